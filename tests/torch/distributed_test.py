"""Two processes on this machine, gloo: DDP, fully_shard, mixed precision, DTensors, distributed
checkpoint. The processes run every scenario once; each is a test here."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distributed_worker
from distributed_worker import SCENARIOS
from module_support import make, same_bits
from processes import launch


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """-> folder, for each rank {scenario: "" or what went wrong}."""
    folder = tmp_path_factory.mktemp("distributed")
    names = [scenario.__name__ for scenario in SCENARIOS]
    return folder, launch(distributed_worker.__file__, names, 2, folder, "cpu", dtype="float32")


@pytest.mark.parametrize("scenario", [s.__name__ for s in SCENARIOS])
def test_two_processes_equal_one(job, scenario):
    for rank, result in enumerate(job[1]):
        assert not result[scenario], f"rank {rank}: {result[scenario]}"


def test_a_checkpoint_of_two_is_loaded_by_one(job):
    folder, _ = job
    moe = make(seed=9, bias=True, scoring="sigmoid", selection_bias=True)
    state = moe.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    moe.load_state_dict(state)
    same_bits(moe.state_dict(), torch.load(folder / "whole.pt", weights_only=True))
