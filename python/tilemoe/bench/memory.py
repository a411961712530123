"""What a layer keeps between its passes, and the most that is alive in both."""

import os

import torch

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
    """By torch's allocator. The input is the caller's, and kept all the same."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    O = peer.forward()
    saved = torch.cuda.memory_allocated() - before - _bytes(O) + _bytes(peer.X)
    gradients = peer.backward(O)
    torch.cuda.synchronize()
    del gradients
    return saved, torch.cuda.max_memory_allocated() - before


def measure(peer):
    """saved_bytes: kept from forward to backward, X included, weights not. peak_bytes: the most
    that is alive in both passes, with resident_bytes: weights, X and dO."""
    if peer.X.device.type == "cuda":
        saved, above = _on_cuda(peer)
    else:
        saved, above = _saved_on_cpu(peer), _peak_on_cpu(peer)
    resident = peer.problem.resident_bytes()
    return {"saved_bytes": saved, "peak_bytes": resident + above, "resident_bytes": resident}
