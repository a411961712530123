"""Two processes on this machine, gloo: DDP, fully_shard, mixed precision, DTensors, distributed
checkpoint. The processes run every scenario once; each is a test here."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from distributed_worker import SCENARIOS
from module_support import make, same_bits

WORLD = 2
LIMIT_S = 240


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """-> folder, {scenario: [traceback or "", for each rank]}."""
    folder = tmp_path_factory.mktemp("distributed")
    script = pathlib.Path(__file__).with_name("distributed_worker.py")
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(WORLD), folder],
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # a scenario without a result tells
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = []
    for rank, log in enumerate(logs):
        log.seek(0)
        file = folder / f"{rank}.json"
        done = json.loads(file.read_text()) if file.exists() else {}
        missing = f"no result within {LIMIT_S} s; its output:\n{log.read()[-4000:]}"
        results.append({s.__name__: done.get(s.__name__, missing) for s in SCENARIOS})
    return folder, results


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
