"""dH over H on a GPU: in CUDA graphs, and where memory fails. Run by --device cuda."""

import gc

import pytest
import torch

import tilemoe
from checks import Calls, same_bits
from random_layers import K, T, d, logits_layer, normal
from overwrite_test import KEEPS_H, OVER_H, expected, gradients

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left_to_free():
    """A graph of an earlier test that is collected during a capture ends the capture."""
    gc.collect()
    torch.cuda.synchronize()


def test_a_capture_has_an_id_of_its_own():
    x = torch.ones(8)
    capture_id = torch.ops.tilemoe.capture_id
    assert capture_id(x) == 0
    seen = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen.extend(capture_id(x) for _ in range(2))
            x + 1
    assert seen[0] == seen[1] != seen[2] == seen[3] and 0 not in seen


def test_graphed_callables_keep_H():
    """Backward is captured alone: a replay that keeps the graph needs H as forward left it."""
    tensors = logits_layer(torch.bfloat16)
    want = expected(tensors)
    layer = lambda *args: tilemoe.moe(*args, K=K)  # noqa: E731
    args = tuple(tensors.values())
    graphed = torch.cuda.make_graphed_callables(layer, args)
    O = graphed(*args)
    for keep in (True, True, False):
        same_bits(gradients(O, tensors, retain_graph=keep), want)


def test_a_graph_of_forward_and_backward_overwrites_H():
    tensors = logits_layer(torch.bfloat16)
    want = expected(tensors)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    leaves = list(tensors.values())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(tilemoe.moe(**tensors, K=K), leaves, dO)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with Calls() as calls, torch.cuda.graph(graph):
        found = torch.autograd.grad(tilemoe.moe(**tensors, K=K), leaves, dO)
    assert calls.names == [OVER_H]
    for _ in range(3):
        graph.replay()
        same_bits(dict(zip(tensors, found)), want)


def test_a_backward_captured_after_an_eager_forward_keeps_H():
    tensors = logits_layer(torch.bfloat16)
    want = expected(tensors)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    leaves = list(tensors.values())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # backward runs on forward's stream: the one that captures
        O = tilemoe.moe(**tensors, K=K)
        torch.autograd.grad(O, leaves, dO, retain_graph=True)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with Calls() as calls, torch.cuda.graph(graph, stream=stream):
        found = torch.autograd.grad(O, leaves, dO, retain_graph=False)
    assert calls.names == [KEEPS_H]
    for _ in range(2):  # the second replay reads H again
        graph.replay()
        torch.cuda.synchronize()
        same_bits(dict(zip(tensors, found)), want)


@pytest.fixture
def limited():
    """Sets how much torch may have of the device beyond what it has now."""

    def limit(more):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_backward_goes_on_after_memory_failed(limited):
    T, d, n, E, K = 64, 2048, 2048, 64, 2  # dW1 is 1 GiB, dW2 half of it, all else is small
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16) * 0.05  # noqa: E731
    tensors = [make(T, d), make(T, E), make(E, 2 * n, d), make(E, d, n)]
    for tensor in tensors:
        tensor.requires_grad_()
    dO = make(T, d)
    want = torch.autograd.grad(tilemoe.moe(*tensors, K=K, overwrite_H=False), tensors, dO)
    for room, begun in ((1024 * MIB, True), (256 * MIB, False)):
        O = tilemoe.moe(*tensors, K=K)
        limited(room)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(O, tensors, dO)
        progress = O.grad_fn.progress
        assert (progress.left is not None) == progress.consumed == begun
        limited(8192 * MIB)
        if begun:
            with pytest.raises(RuntimeError, match="with the same gradient of the output"):
                torch.autograd.grad(O, tensors, dO + 1)
        found = torch.autograd.grad(O, tensors, dO)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_the_default_takes_no_more_than_overwriting_always():
    T, d, n, E, K = 8192, 1024, 256, 32, 8
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16) * 0.05  # noqa: E731
    tensors = [make(T, d), make(T, E), make(E, 2 * n, d), make(E, d, n)]
    for tensor in tensors:
        tensor.requires_grad_()
    dO = make(T, d)

    def peak(overwrite_H):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        O = tilemoe.moe(*tensors, K=K, overwrite_H=overwrite_H)
        torch.autograd.grad(O, tensors, dO)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peaks = {how: peak(how) for how in (False, True, None)}
    # An allocation may get up to 1 MiB more than requested, depending on the allocator's blocks.
    assert peaks[None] <= peaks[True] + 4 * MIB, peaks
    assert peaks[False] - peaks[None] >= 0.9 * 2 * T * K * n, peaks
