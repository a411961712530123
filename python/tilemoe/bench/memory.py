"""Measure the memory that a layer saves between its passes, and the peak of both."""

import os

import torch

from .problem import DTYPES

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no warnings of the profiler about missing GPUs


def _bytes(tensor):
    return tensor.untyped_storage().nbytes()


def _saved_on_cpu(peer):
    """Return the bytes of all storages that autograd saves, by its hooks, without the weights'."""
    weights = {w.untyped_storage().data_ptr() for w in (peer.router, peer.W1, peer.W2)}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        O = peer.forward()
    peer.backward(O)
    return sum(storages.values())


def _peak_on_cpu(peer, forward, backward):
    """Return the peak of torch's allocator, by the profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        O = forward()
        results = peer.backward(O) if backward else O
    del O, results
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def _on_cuda(peer, forward, backward):
    """Return the saved, peak and reserved bytes of torch's allocator, starting with empty caches.

    The caller's input counts as saved.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    O = forward()
    saved = torch.cuda.memory_allocated() - before - _bytes(O) + _bytes(peer.X)
    gradients = peer.backward(O) if backward else None
    torch.cuda.synchronize()
    del gradients
    return saved, torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()


def floor_above_resident(case, column_blocks=1):
    """Compute the minimum bytes at the peak of a layer that saves H.

    The result excludes weights, X and dO, partial sums and the router's own memory. The candidates,
    each with H, the routing and O: the down-projection (A, Y), dX (dX, ds, dW2, dX~, with A' in its
    place before), all gradients.
    """
    size = DTYPES[case.dtype].itemsize
    T, d, n, E = case.T, case.d, case.n, case.E
    pairs = T * case.K
    block = -(-d // column_blocks)
    H, routing, dX, ds = size * pairs * 2 * n, 12 * pairs, size * T * d, 4 * pairs
    trained = 0 if case.frozen else E
    dW1, dW2 = size * trained * 2 * n * d, size * trained * n * d
    candidates = (
        size * pairs * (n + block),
        dX + ds + dW2 + size * pairs * max(n, block),
        dX + size * T * E + dW2 + dW1,
    )
    return H + routing + size * T * d + max(candidates)


def measure(peer, passes="both"):
    """Return the bytes of a call, by torch's allocator.

    Args:
        peer: The peer.
        passes: Passes to measure.

    Returns:
        A dictionary. saved_bytes: saved from forward to backward, with X and without weights.
        peak_bytes: the maximum of live memory, with resident_bytes: weights, X and dO. floor_bytes:
        the lower bound of a layer that saves H, by arithmetic. On a GPU reserved_bytes: the maximum
        that torch's allocator reserved. Without a backward saved_bytes and floor_bytes are absent.
    """
    found, backward = {}, passes in ("both", "backward")
    forward = peer.infer if passes == "inference" else peer.forward
    with torch.set_grad_enabled(passes != "inference"):
        if peer.X.device.type == "cuda":
            saved, above, found["reserved_bytes"] = _on_cuda(peer, forward, backward)
        else:
            saved = _saved_on_cpu(peer) if backward else 0
            above = _peak_on_cpu(peer, forward, backward)
    resident = peer.resident_bytes()
    found |= {"peak_bytes": resident + above, "resident_bytes": resident}
    if backward:
        blocks = getattr(peer, "options", {}).get("column_blocks", 1)
        floor = floor_above_resident(peer.problem.case, blocks)
        found |= {"saved_bytes": saved, "floor_bytes": resident + floor}
    return found
