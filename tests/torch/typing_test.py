"""The package's annotations, as a type checker reads them."""

import sys
from pathlib import Path

import pytest

import tilemoe
from checks import python, start

HERE = Path(__file__).resolve().parent


@pytest.mark.cpu
def test_a_type_checker_accepts_the_package_and_a_program_that_uses_it(tmp_path):
    pytest.importorskip("mypy")
    package = Path(tilemoe.__file__).parent
    assert (package / "py.typed").exists()
    program = HERE / "typed_program.py"
    # In site-packages mypy finds it without more.
    where = {} if "site-packages" in package.parts else {"MYPYPATH": str(package.parent)}
    options = "--config-file", HERE / "mypy.ini", "--cache-dir", tmp_path
    done = start(sys.executable, "-m", "mypy", *options, program, **where)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cpu
def test_the_typed_program_runs():
    python(HERE / "typed_program.py")
