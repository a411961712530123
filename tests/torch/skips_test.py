"""A skipped test makes a run fail unless it is expected: on runs of pytest of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import skips

HERE = Path(__file__).parent


def test_only_what_is_named_may_be_skipped():
    transformers = [("tests/torch/transformers_test.py", "transformers is not installed")]
    assert skips.unexpected(transformers) == transformers
    assert skips.unexpected(transformers, ["transformers"]) == []
    assert skips.unexpected(transformers, ["torchtitan"]) == transformers
    other = [("transformers_test.py", "another reason"), ("module_test.py::test_x[a/b]", "no")]
    assert skips.unexpected(other, ["transformers"]) == other
    one = [("pretrain_test.py::test_tensorboard_has_what_the_log_has", "tensorboard is not installed")]
    assert skips.unexpected(one, ["tensorboard"]) == []
    file = [("pretrain_test.py", "tensorboard is not installed")]
    assert skips.unexpected(file, ["tensorboard"]) == file


@pytest.mark.parametrize(
    "processes, source, status",
    [
        (0, "def test_a(): pass", 0),
        (1, "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('for once')", 1),
        (1, "import pytest\npytest.importorskip('no_such', reason='none')\ndef test_a(): pass", 1),
    ],
    ids=["none", "a test", "a file"],
)
def test_a_run_with_an_unexpected_skip_fails(processes, source, status, tmp_path):
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "some_test.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    command += ["-n", processes, "-o", "python_files=*_test.py", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("not expected to be (skips.py)" in done.stdout) == bool(status)
