"""recipe="fp8" under FSDP-2 and with experts on several ranks, in two processes."""

from pathlib import Path

import pytest

from checks import found_by_ranks
from fp8_shards_worker import CASES

WORKER = Path(__file__).parent / "fp8_shards_worker.py"


@pytest.fixture(scope="module")
def found():
    return found_by_ranks(WORKER)


@pytest.mark.parametrize("case", CASES)
def test_case(found, case):
    assert found[case] is None, found[case]
