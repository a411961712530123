"""Experts spread over one, two and four processes on this machine (gloo): the processes run every
scenario once; each is a test here."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import expert_parallel_worker as worker
import launcher
import tilemoe
import tilemoe.expert_parallel
from module_support import same_bits
from processes import launch, of_world

WORLDS = (1, 2, 4)
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "expert_parallel.py"
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """-> what runs the processes once: world -> folder, for each rank {scenario: what went wrong}."""
    done = {}

    def of(world):
        if world not in done:
            folder = tmp_path_factory.mktemp(f"world{world}")
            names = [scenario.__name__ for scenario in of_world(worker.SCENARIOS, world)]
            done[world] = folder, launch(pathlib.Path(worker.__file__), names, world, folder, "cpu")
        return done[world]

    return of


@pytest.mark.parametrize(
    "world, scenario",
    [(w, s.__name__) for w in WORLDS for s in of_world(worker.SCENARIOS, w)],
)
def test_ranks(job, world, scenario):
    for rank, result in enumerate(job(world)[1]):
        assert not result[scenario], f"rank {rank}: {result[scenario]}"


@pytest.mark.parametrize("world, name", [(2, "checkpoint"), (4, "checkpoint"), (4, "of_four")])
def test_a_checkpoint_of_ranks_is_loaded_by_one(job, world, name):
    folder, _ = job(world)
    moe = worker.plain_layer()
    state = moe.state_dict()
    dcp.load(state, checkpoint_id=folder / name, no_dist=True)
    moe.load_state_dict(state)
    same_bits(moe.state_dict(), torch.load(folder / "whole.pt", weights_only=True))


def test_the_example_learns():
    """In two processes."""
    done = subprocess.run(
        [*launcher.python(2), EXAMPLE],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"loss (\S+), overflow 0\n", done.stdout))
    assert after < 0.9 * before


def test_the_plans_sizes():
    """Places by hand: of the mean, of every routing, and one rank's own."""
    plan = tilemoe.expert_parallel.plan
    sizes = dict(T=64, d=32, n=16, E=8, K=3)
    assert plan(**sizes, ranks=2).places == 64 * 3 * 1.5
    assert plan(**sizes, ranks=2, capacity_factor=None).places == 64 * 2 * 3
    assert plan(**sizes, ranks=4, capacity_factor=None).places == 64 * 4 * 2
    assert plan(**sizes, ranks=1).places == plan(**sizes, ranks=1, capacity_factor=None).places == 64 * 3
    kept = [plan(**sizes, ranks=2, keep_gathered=keep).kept for keep in (False, True)]
    assert kept[1] - kept[0] == 2 * 2 * 64 * 32
    with pytest.raises(ValueError, match="E is 8, and the experts do not go evenly to 3 ranks"):
        plan(**sizes, ranks=3)
    assert "288 places" in str(plan(**sizes, ranks=2))


def test_the_name_of_a_dimension_is_asked_for():
    class Mesh:
        ndim = 2

    with pytest.raises(ValueError, match="expert_mesh has 2 dimensions, expected one"):
        tilemoe.MoE(32, 16, 4, 2, return_aux=False, expert_mesh=Mesh())
