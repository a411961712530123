"""recipe="fp8" under FSDP-2 and with experts on several ranks, in two processes."""

import json
from pathlib import Path

import pytest

import launcher
from checks import start
from fp8_shards_worker import CASES

WORKER = Path(__file__).parent / "fp8_shards_worker.py"


@pytest.fixture(scope="module")
def found():
    done = start(*launcher.python(2), WORKER, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_case(found, case):
    assert found[case] is None, found[case]
