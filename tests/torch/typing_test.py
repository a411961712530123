"""The package's annotations, as a type checker reads them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilemoe

HERE = Path(__file__).resolve().parent


@pytest.mark.cpu
def test_a_type_checker_accepts_the_package_and_a_program_that_uses_it(tmp_path):
    pytest.importorskip("mypy")
    package = Path(tilemoe.__file__).parent
    assert (package / "py.typed").exists()
    program = HERE / "typed_program.py"
    environment = dict(os.environ)
    if "site-packages" not in package.parts:  # there it is found by itself
        environment["MYPYPATH"] = str(package.parent)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", HERE / "mypy.ini",
         "--cache-dir", tmp_path, program],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.cpu
def test_the_typed_program_runs():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, HERE / "typed_program.py"], check=True, env=environment)
