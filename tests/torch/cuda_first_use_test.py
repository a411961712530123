"""The package's first use of a process inside a CUDA graph's capture: what it sets up once must not
wait for the GPU, nor be captured. Run by --device cuda."""

import sys
from pathlib import Path

import pytest

from checks import start
from first_use import KINDS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_first_use_in_a_capture(kind, dtype):
    done = start(sys.executable, Path(__file__).with_name("first_use.py"), kind, dtype)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stderr
