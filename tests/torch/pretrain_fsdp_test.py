"""examples/pretrain's gradients under FSDP-2 in two processes are those of the whole model, and no
module returns what FSDP warns of."""

from pathlib import Path

import pytest

from checks import found_by_ranks
from pretrain_fsdp_worker import CASES

WORKER = Path(__file__).parent / "pretrain_fsdp_worker.py"


@pytest.fixture(scope="module")
def found():
    return found_by_ranks(WORKER)


@pytest.mark.parametrize("case", CASES)
def test_sharded_gradients_are_the_whole_models(found, case):
    """The same bits: half of a sum of two is the sum of two halves."""
    assert found[case]["gradients"] == found[case]["shards"] > 10
    assert found[case]["different"] == []


@pytest.mark.parametrize("case", CASES)
def test_no_sharded_module_returns_a_view(found, case):
    """FSDP hangs its gathering for backward on a module's outputs. An operation in place on one that
    is a view would lose that hook, of which torch 2.15 warns; so no module returns one."""
    assert found[case]["views"] == []
    assert found[case]["warnings"] == []
