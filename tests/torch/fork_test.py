"""The operators in data loaders' workers and other child processes, on CPUs."""

import os
import subprocess
import sys
import tempfile

import pytest
import torch

import tilemoe

TOKENS, WIDTH, EXPERTS, CHOSEN = 24, 32, 6, 2


def output(seed):
    torch.manual_seed(seed)
    layer = tilemoe.MoE(WIDTH, 16, EXPERTS, CHOSEN, return_aux=True)
    with torch.no_grad():
        return layer(torch.randn(TOKENS, WIDTH))[0]


class Outputs(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return output(index)


@pytest.fixture
def expected():
    return [output(seed) for seed in range(len(Outputs()))]


def load(method, workers):
    loader = torch.utils.data.DataLoader(Outputs(), batch_size=None, num_workers=workers,
                                         multiprocessing_context=method, timeout=120)
    return list(loader)


# `expected` has used the library before the workers start.
@pytest.mark.parametrize("method,rounds", [("fork", 3), ("spawn", 1)])
def test_data_loaders_compute(expected, method, rounds):
    for _ in range(rounds):
        for found, wanted in zip(load(method, 4), expected, strict=True):
            assert torch.equal(found, wanted)
    assert torch.equal(output(0), expected[0])


def test_data_loaders_compute_first(expected):
    """In a process whose workers are the first to use the library."""
    code = "import fork_test, torch; torch.save(fork_test.load('fork', 4), 'out.pt')"
    folder = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=place,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])})
        for found, wanted in zip(torch.load(os.path.join(place, "out.pt")), expected, strict=True):
            assert torch.equal(found, wanted)


# Each in a Python of its own: what a test's process has started besides, such as threads of OpenMP,
# is nothing that a child could use.
BEFORE = """
import multiprocessing, os, sys, ctypes, torch, fork_test
torch.set_num_threads(1)  # torch's own threads do not survive a fork
fork_test.output(1)
def compute():
    sys.exit(0 if torch.isfinite(fork_test.output(1)).all() else 3)
def end_well():
    sys.exit(0)
def ended(target):
    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join(60)
    child.kill()
    return child.exitcode
"""


def run(code):
    folder = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", BEFORE + code], check=True, timeout=300,
                   env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("target", ["end_well", "compute"])
def test_children_of_a_process_that_computed_end(target):
    run(f"assert [ended({target}) for _ in range(5)] == [0] * 5")


def test_a_child_that_leaves_by_exit_ends():
    """Without multiprocessing, which ends a child by os._exit: all that runs at exit() runs."""
    run("""
child = os.fork()
if child == 0:
    ctypes.CDLL(None).exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0""")
