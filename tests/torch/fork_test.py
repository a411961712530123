"""The operators in data loaders' workers and other child processes, on CPUs."""

import os
import subprocess
import sys

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


def load(method, rounds):
    """The results of the workers of `rounds` loaders, one loader after another."""
    workers = 4 if method == "fork" else 2  # which import torch each
    def outputs():
        loader = torch.utils.data.DataLoader(Outputs(), batch_size=None, num_workers=workers,
                                             multiprocessing_context=method, timeout=120)
        return [output.clone() for output in loader]  # what came holds a file descriptor open
    return [outputs() for _ in range(rounds)]


def start_python(code, timeout, cwd=None, **environment):
    folder = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=timeout, cwd=cwd,
                   env={**os.environ, "PYTHONPATH": path, **environment})


# A hang may need many rounds to show: TILEMOE_LOADER_ROUNDS=100 runs this many of each.
def rounds(default):
    return int(os.environ.get("TILEMOE_LOADER_ROUNDS", default))


def require_equal(loaded, expected, count):
    assert len(loaded) == count > 0
    for found in loaded:
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def spawned(*more):
    return pytest.param("spawn", *more, marks=pytest.mark.long)


# `expected` has used the library before the workers start.
@pytest.mark.parametrize("method,count", [("fork", rounds(3)), spawned(rounds(1))])
def test_data_loaders_compute(expected, method, count):
    require_equal(load(method, count), expected, count)
    assert torch.equal(output(0), expected[0])


@pytest.mark.parametrize("method", ["fork", spawned()])
def test_data_loaders_compute_first(expected, method, tmp_path):
    """In a process that leaves all use of the library to its workers."""
    count = rounds(1)
    code = f"import fork_test, torch; torch.save(fork_test.load({method!r}, {count}), 'out.pt')"
    start_python(code, timeout=120 + 60 * count, cwd=tmp_path)
    require_equal(torch.load(tmp_path / "out.pt"), expected, count)


# Each in a separate Python: what else a test's process has started, such as threads of OpenMP,
# is nothing that a child could use. The library has as many threads as torch shall have. Torch's
# own, which survive neither fork nor exit, begin with torch.set_num_threads() or with larger work.
BEFORE = """
import multiprocessing, os, sys, ctypes, torch, tilemoe
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
shapes = (24, 32), (24, 6), (6, 32, 32), (6, 32, 16)  # x, logits, W1, W2
inputs = [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for shape in shapes]
output = tilemoe.moe(*inputs, K=2)
assert threads() == before + 3, (before, threads())
def compute():
    equal = torch.equal(tilemoe.moe(*inputs, K=2), output)
    torch.set_num_threads(1)  # as a data loader's worker does
    sys.exit(0 if equal and torch.equal(tilemoe.moe(*inputs, K=2), output) else 3)
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
    start_python(BEFORE + code, timeout=300, OMP_NUM_THREADS="4", MKL_DYNAMIC="FALSE")


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


def test_threads_that_cannot_start_are_an_error():
    """Neither a hang nor a silently smaller pool; the next call tries again."""
    run("""
import resource
torch.set_num_threads(64)  # starts torch's own
stack, most = resource.getrlimit(resource.RLIMIT_STACK)[0], resource.RLIM_INFINITY
stack = stack if stack != most else 2 << 20  # glibc's then
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + stack * 5 // 2
resource.setrlimit(resource.RLIMIT_AS, (limit, most))
try:
    tilemoe.moe(*inputs, K=2)
    sys.exit(4)
except RuntimeError as error:
    text = str(error)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
assert "threads is 64, but the system started only" in text, text
assert torch.equal(tilemoe.moe(*inputs, K=2), output)""")
