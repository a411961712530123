"""What a layer keeps between its passes, and the most that is alive in both."""

import os

import torch

from .cases import DTYPES

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, about GPUs that are not there


def _bytes(tensor):
    return tensor.untyped_storage().nbytes()


def _saved_on_cpu(peer):
    """By autograd's hooks: every storage that it keeps, but for the weights'."""
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


def _peak_on_cpu(peer):
    """By the profiler: the highest sum of what torch's allocator gave out."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        gradients = peer.backward(peer.forward())
    del gradients
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def _on_cuda(peer):
    """By torch's allocator. The input is the caller's, and kept all the same. Reserved is what the
    allocator has taken of the device for it, from empty caches on."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    O = peer.forward()
    saved = torch.cuda.memory_allocated() - before - _bytes(O) + _bytes(peer.X)
    gradients = peer.backward(O)
    torch.cuda.synchronize()
    del gradients
    return saved, torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()


def floor_above_resident(case, column_blocks=1):
    """Bytes that a layer which keeps H must hold beside weights, X and dO at its worst moment: by
    arithmetic, without partial sums or a router's own. The moments, each with H, the routing and O:
    the down-projection (A, Y), dX (dX, ds, dW2, dX~, before it A' there), all the gradients."""
    size = DTYPES[case.dtype].itemsize
    T, d, n, E = case.T, case.d, case.n, case.E
    pairs = T * case.K
    block = -(-d // column_blocks)
    H, routing, dX, ds = size * pairs * 2 * n, 12 * pairs, size * T * d, 4 * pairs
    dW1, dW2 = size * E * 2 * n * d, size * E * n * d
    moments = (
        size * pairs * (n + block),
        dX + ds + dW2 + size * pairs * max(n, block),
        dX + size * T * E + dW2 + dW1,
    )
    return H + routing + size * T * d + max(moments)


def measure(peer):
    """saved_bytes: kept from forward to backward, X included, weights not. peak_bytes: the most
    that is alive in both passes, with resident_bytes: weights, X and dO. floor_bytes: the least
    that it could be where H is kept, by arithmetic. On a GPU reserved_bytes: the most that torch's
    allocator had of the device meanwhile, all else that lives there included."""
    reserved = {}
    if peer.X.device.type == "cuda":
        saved, above, reserved["reserved_bytes"] = _on_cuda(peer)
    else:
        saved, above = _saved_on_cpu(peer), _peak_on_cpu(peer)
    resident = peer.problem.resident_bytes()
    floor = floor_above_resident(peer.problem.case, getattr(peer, "column_blocks", 1))
    return {
        "saved_bytes": saved,
        "peak_bytes": resident + above,
        "resident_bytes": resident,
        "floor_bytes": resident + floor,
        **reserved,
    }
