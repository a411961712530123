"""Whether a backward may write dH over H with `overwrite_H=None`: it may if nothing can read H
after it.

Torch frees the saved tensors of a graph after a backward without `retain_graph`, and reports this
beforehand: AOTAutograd donates buffers by the same flag. The flag is valid for the call that reads
it. It does not apply while a backward is traced, since the trace runs later, nor while one is
captured into a CUDA graph, which may be replayed many times: then H may be overwritten only if
every replay writes H again, in the same capture."""

import torch

from ._library import operators

# Without this function H is never overwritten. torch itself reports that no backward runs.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FUNCTIONAL", "FAKE")
)


def _users_of(tensor):
    """The number of references to the tensor's memory; None if torch does not count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(tensor.untyped_storage()._cdata)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(1, device="cpu"))
        return x.clone()


def _users_if_alone():
    """The value of `_users_of` for a saved tensor if no other tensor uses its memory, found by a
    trial: None, which equals no count, if this torch does not count a second tensor as one more."""
    with torch.inference_mode(False), torch.enable_grad():
        output = _Saves.apply(torch.empty(1, device="cpu", requires_grad=True))
    (saved,) = output.grad_fn.saved_tensors
    alone = _users_of(saved)
    second = saved.detach()
    shared = _users_of(saved)
    del second
    counts = alone is not None and shared == alone + 1 and _users_of(saved) == alone
    return alone if counts else None


_alone = _users_if_alone()


def capture_of(tensor):
    """The capture of a CUDA graph that the current stream of the tensor's GPU is in, else None."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or not tensor.is_cuda:
        return None  # a fake tensor's GPU may not exist
    if not _is_capturing():
        return None
    return operators.capture_id.default(tensor) or None


def is_traced(tensor):
    """Whether operations on `tensor` are recorded to run later."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if type(tensor) is not torch.Tensor:
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def is_read_last(ctx, H):
    """Whether nothing reads H after the current backward of `ctx`, which is not traced: torch's
    engine runs it, its graph is not kept, no graph is made of it, H was written in the same capture
    (or neither is captured), and no other tensor uses H's memory, such as one that a dispatch mode
    has detached and kept."""
    return (
        isinstance(ctx, torch.autograd.function.BackwardCFunction)  # compiled autograd has its own
        and not _keeps_graph()
        and not torch.is_grad_enabled()
        and capture_of(H) == ctx.capture
        and _alone is not None
        and _users_of(H) == _alone
    )
