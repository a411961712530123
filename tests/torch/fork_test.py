"""The operators in data loaders' workers and other child processes, on CPUs."""

import multiprocessing
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
    layer = tilemoe.MoE(WIDTH, 16, EXPERTS, CHOSEN)
    with torch.no_grad():
        return layer(torch.randn(TOKENS, WIDTH))


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


def end_well():
    sys.exit(0)


def compute_with_threads(threads):
    torch.set_num_threads(threads)
    sys.exit(0 if torch.isfinite(output(1)).all() else 3)


@pytest.mark.parametrize("target,arguments",
                         [(end_well, ()), (compute_with_threads, (1,)), (compute_with_threads, (3,))])
def test_children_of_a_process_that_computed_end(expected, target, arguments):
    for _ in range(5):
        child = multiprocessing.get_context("fork").Process(target=target, args=arguments)
        child.start()
        child.join(60)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0


def test_a_child_that_leaves_by_exit_ends(expected):
    """Without multiprocessing, which ends a child by os._exit: all that runs at exit() runs."""
    child = os.fork()
    if child == 0:
        import ctypes
        ctypes.CDLL(None).exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
