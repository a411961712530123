"""The peak memory of backward, on the CPU, where torch's profiler reports every byte of
its allocator; and a backward that memory fails half-way. cuda_test.py has the GPU's."""

import ctypes
import gc
import contextlib
import resource

import pytest
import torch

from checks import refused
import tilemoe
from random_layers import normal

pytestmark = pytest.mark.cpu

# Sizes by which an allocation is known: no two of H, dX, ds, dW1, dW2 and the workspaces are alike.
T, d, n, E, K = 9000, 128, 56, 256, 4
ROWS = T * K
BYTES = {
    "dX": 4 * T * d,
    "dlogits": 4 * T * E,
    "ds": 4 * T * K,
    "dW1": 4 * E * 2 * n * d,
    "dW2": 4 * E * d * n,
    "H": 4 * ROWS * 2 * n,
    "dX rows": 4 * ROWS * d,
    "A'": 4 * ROWS * n,
}
MIB = 1 << 20
SLACK = 3 * MIB  # partial sums, and weights that a thread's GEMMs transpose; no size is less


def layer(T=T, d=d, n=n, E=E, K=K, dtype=torch.float32):
    made = {
        "x": normal(T, d, seed=1, dtype=dtype),
        "logits_or_scores": normal(T, E, seed=2, dtype=torch.float32),
        "W1": normal(E, 2 * n, d, seed=3, dtype=dtype, scale=d**-0.5),
        "W2": normal(E, d, n, seed=4, dtype=dtype, scale=n**-0.5),
    }
    return {name: t.requires_grad_() for name, t in made.items()}


@pytest.fixture(autouse=True)
def one_thread():
    """Partial sums are a thread's each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def allocations(call):
    """The bytes that a call takes from torch's allocator and gives back, in order, negative when they
    are given back. The call's result stays alive."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        kept = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del kept
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def live_sums(changes):
    live, sums = 0, []
    for change in changes:
        live += change
        sums.append(live)
    return sums


def backward_of(overwrite_H):
    tensors = layer()
    O = tilemoe.moe(**tensors, K=K, overwrite_H=overwrite_H)
    dO = torch.ones_like(O)
    return lambda: torch.autograd.grad(O, list(tensors.values()), dO)


def test_stages_of_backward():
    """dW1 is allocated after dX's workspace is freed, and no second H exists."""
    changes = allocations(backward_of(None))
    assert changes.count(BYTES["dW1"]) == 1 and changes.count(BYTES["dX"]) == 1
    at = changes.index(BYTES["dW1"])
    workspace = max(changes)
    assert BYTES["dX rows"] <= workspace <= BYTES["dX rows"] + SLACK
    assert changes.index(workspace) < changes.index(-workspace) < at
    # Only gradients live when dW1 is computed.
    gradients = sum(BYTES[name] for name in ("dX", "dlogits", "ds", "dW2"))
    assert abs(sum(changes[:at]) - gradients) <= SLACK
    # A second H, or a workspace with dH inside, is in none of them.
    assert all(change <= BYTES["dX rows"] + SLACK for change in changes)
    not_over_H = max(allocations(backward_of(False)))
    assert BYTES["H"] + BYTES["dX rows"] <= not_over_H <= BYTES["H"] + BYTES["dX rows"] + SLACK


def test_the_peak_of_backward_is_its_floor(capsys):
    """The floor: at the worst moment dX~ with dX, ds and dW2; or, later, all gradients."""
    first = BYTES["dX"] + BYTES["ds"] + BYTES["dW2"] + max(BYTES["dX rows"], BYTES["A'"])
    last = sum(BYTES[name] for name in ("dX", "dlogits", "ds", "dW1", "dW2"))
    floor = max(first, last)
    seen = {how: max(live_sums(allocations(backward_of(how)))) for how in (None, True, False)}
    with capsys.disabled():
        of = ", ".join(f"overwrite_H={how} {peak / MIB:.2f}" for how, peak in seen.items())
        print(f"\nbackward's peak, MiB: floor {floor / MIB:.2f}; seen with {of}")
    assert floor <= seen[None] <= floor + SLACK
    assert seen[True] == seen[None]
    assert seen[False] >= floor + BYTES["H"]


# ------------------------------------------------------------ shared experts

SHARED = 72  # their width: no size of theirs is one of those above


def module(**options):
    options = dict(shared_intermediate_size=SHARED) | options
    moe = tilemoe.MoE(d, n, E, K, return_aux=False, **options)
    return moe, normal(T, d, seed=1, dtype=torch.float32).requires_grad_()


def saved_by_forward(call):
    """-> {data_ptr of a storage: its bytes}, of what is kept for backward."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call()
    return out, kept


@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_shared_experts_keep_their_H_and_share_X(gate):
    moe, x = module(shared_expert_gate=gate)
    plain = tilemoe.MoE(d, n, E, K, return_aux=False)
    parameters = {p.untyped_storage().data_ptr() for p in (*moe.parameters(), *plain.parameters())}
    total = []
    for layer in (plain, moe):
        out, kept = saved_by_forward(lambda: layer(x))
        assert kept[x.untyped_storage().data_ptr()] == 4 * T * d
        total.append(sum(size for at, size in kept.items() if at not in parameters))
        del out
    scores = 8 * T if gate else 4 * T  # a row's in the routing, and the sigmoid's
    more = total[1] - total[0] - 4 * T * 2 * SHARED - scores
    assert 0 <= more <= 256, more


def test_autocast_makes_one_copy_of_x_for_all_experts():
    moe, x = module(shared_expert_gate=True, router_dtype=torch.float32)

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return moe(x)

    _, kept = saved_by_forward(call)
    assert list(kept.values()).count(2 * T * d) == 1
    assert list(kept.values()).count(4 * T * d) == 1  # x itself, of the float32 router


def test_shared_experts_add_their_H_and_their_result_to_a_steps_peak(capsys):
    """The peak is in the routed experts' forward, whose combine adds the result. In backward what
    is theirs comes when the routed experts' workspace is gone."""
    seen = []
    for options in (dict(shared_intermediate_size=None), {}):
        moe, x = module(**options)
        inputs, dO = [x, *moe.parameters()], torch.ones(T, d)
        step = lambda: torch.autograd.grad(moe(x), inputs, dO)  # noqa: B023
        seen.append(max(live_sums(allocations(step))))
    more, theirs = seen[1] - seen[0], 4 * T * 2 * SHARED + 4 * T * d
    with capsys.disabled():
        print(f"\npeak of a step, MiB: {seen[0] / MIB:.2f}; shared experts add {more / MIB:.2f}")
    assert abs(more - theirs) <= MIB < 4 * T * d  # which a second X would take


# ------------------------------------------------------------ memory fails


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def c_library():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


def fill_holes(library, minimum=MIB):
    """Takes what malloc can give of address space it has already: a heap that other tests have
    left in pieces may have a hole of a gradient's size. Nothing of it is touched."""
    taken, size = [], 1 << 40
    while size >= minimum:
        block = library.malloc(size)
        if block:
            taken.append(block)
        else:
            size //= 2
    return taken


@contextlib.contextmanager
def no_more_than(bytes_more):
    """Memory that malloc can have, beyond what the process has in use: larger blocks come from
    mmap or a hole of the heap."""
    gc.collect()  # memory that an earlier exception still referenced would be room
    library = c_library()
    library.malloc_trim(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space(), hard))
    taken = []
    try:
        taken = fill_holes(library)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + bytes_more, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for block in taken:
            library.free(block)


def test_a_hole_of_the_heap_is_no_room():
    """Blocks from the heap, below what malloc gives to mmap, freed beneath one that stays."""
    library = c_library()
    library.free(library.malloc(31 * MIB))  # from now on blocks of this size come from the heap
    blocks = [library.malloc(16 * MIB) for _ in range(8)]
    stays = library.malloc(16 * MIB)
    for block in blocks:
        library.free(block)
    try:
        with no_more_than(8 * MIB):
            assert not library.malloc(100 * MIB)
        hole = library.malloc(100 * MIB)  # if there was one, it exists again
        assert hole
        library.free(hole)
    finally:
        library.free(stays)


BIG = dict(T=16, d=512, n=512, E=96, K=2)  # dW1 is 192 MiB, dW2 96, all else is small
TIGHT, TIGHTER = 200 * MIB, 8 * MIB  # enough for all but dW1; for nothing


@pytest.fixture(scope="module")
def big():
    tensors = layer(**BIG)
    dO = normal(BIG["T"], BIG["d"], seed=5, dtype=torch.float32)
    O = tilemoe.moe(**tensors, K=BIG["K"], overwrite_H=False)
    want = torch.autograd.grad(O, list(tensors.values()), dO)
    return tensors, dO, want


def forward(tensors, **options):
    return tilemoe.moe(**tensors, K=BIG["K"], **options)


def compare(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def fails(O, tensors, dO, room):
    with no_more_than(room), pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(O, list(tensors.values()), dO)


@pytest.mark.parametrize("overwrite_H", [None, True])
@pytest.mark.parametrize("room", [TIGHT, TIGHTER], ids=["second stage", "first stage"])
def test_a_backward_goes_on_after_memory_failed(big, room, overwrite_H):
    tensors, dO, want = big
    O = forward(tensors, overwrite_H=overwrite_H)
    progress = O.grad_fn.progress
    assert (progress.left, progress.consumed) == (None, False)
    second_stage = room == TIGHT
    for more in (room, TIGHTER):  # what was made the first time needs no memory the second
        fails(O, tensors, dO, more)
        assert (progress.left is not None) == progress.consumed == second_stage
    if room == TIGHTER:
        fails(O, tensors, dO, TIGHT)
    compare(torch.autograd.grad(O, list(tensors.values()), dO.clone()), want)
    assert O.grad_fn.progress.left is None


def test_another_gradient_does_not_go_on(big):
    tensors, dO, want = big
    O = forward(tensors)
    given = dO.clone()
    fails(O, tensors, given, TIGHT)
    with pytest.raises(RuntimeError, match="with the same gradient of the output"):
        torch.autograd.grad(O, list(tensors.values()), 2 * dO)
    given.mul_(2)  # the same tensor, no longer the same gradient
    for other in (given, given.clone()):
        with pytest.raises(RuntimeError, match="with the same gradient of the output"):
            torch.autograd.grad(O, list(tensors.values()), other)
    compare(torch.autograd.grad(forward(tensors), list(tensors.values()), dO), want)


def test_going_on_has_dH_though_a_hook_brings_H_back(big):
    tensors, dO, want = big
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    with hooks:  # it copies weights too: room for those, not for dW1
        O = forward(tensors)
    fails(O, tensors, dO, TIGHT + 288 * MIB)
    compare(torch.autograd.grad(O, list(tensors.values()), dO), want)


def test_another_walk_of_the_graph_does_not_go_on(big):
    """The gradients made so far are those of the first walk's inputs."""
    tensors, dO, _ = big
    O = forward(tensors)
    with no_more_than(TIGHT), pytest.raises(torch.OutOfMemoryError, match="run forward again"):
        torch.autograd.grad(O, [tensors["W1"], tensors["W2"]], dO)
    assert O.grad_fn.progress.left is not None
    for inputs in (list(tensors.values()), [tensors["W2"]], [tensors["x"]]):
        with pytest.raises(RuntimeError, match="for the same inputs, can continue"):
            torch.autograd.grad(O, inputs, dO)


def test_a_graph_of_several_layers_needs_a_new_forward(big):
    tensors, dO, _ = big
    O = forward(tensors)
    last = O * O  # nearer the loss, so it has been freed when memory fails
    with no_more_than(TIGHT), pytest.raises(torch.OutOfMemoryError, match="run forward again"):
        torch.autograd.grad(last, list(tensors.values()), dO)
    assert O.grad_fn.progress.left is not None
    with pytest.raises(RuntimeError, match="through the graph a second time"):
        torch.autograd.grad(last, list(tensors.values()), dO)


def test_going_on_adds_once_to_given_memory(big):
    tensors, dO, want = big
    given = torch.ones_like(tensors["W2"])
    O = forward(tensors, weight_grad_out=tilemoe.WeightGradients(W2=given))
    inputs = [tensors[name] for name in ("x", "logits_or_scores", "W1", "W2")]
    with no_more_than(TIGHT - 100 * MIB), pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(O, inputs, dO, allow_unused=True)
    compare(torch.autograd.grad(O, inputs, dO, allow_unused=True)[:3], want[:3])
    once = torch.ones_like(given)
    O = forward(tensors, weight_grad_out=tilemoe.WeightGradients(W2=once), overwrite_H=False)
    torch.autograd.grad(O, inputs, dO, allow_unused=True)
    assert torch.equal(given, once) and not torch.equal(given, torch.ones_like(given))


def test_what_fails_otherwise_leaves_no_wrong_state(big, monkeypatch):
    """An error after dH is written, other than for lack of memory: no gradient results from it."""
    tensors, dO, _ = big
    O = forward(tensors)
    operator = tilemoe.ops.call_undifferentiated

    def fails_late(op, *args):
        operator(op, *args)
        raise RuntimeError("device error: kernel")

    monkeypatch.setattr(tilemoe.ops, "call_undifferentiated", fails_late)
    refused(RuntimeError, "device error", torch.autograd.grad, O, list(tensors.values()), dO)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="an earlier backward wrote dH over the saved H"):
        torch.autograd.grad(O, list(tensors.values()), dO)
