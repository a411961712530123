"""Whether a backward may write dH over H where its caller leaves that open (`overwrite_H=None`): it
may where nothing can read H after it.

Torch frees what a graph has saved when a backward without `retain_graph` has gone through it, and
says beforehand whether it will: AOTAutograd donates buffers by the same answer. The answer holds
for the call that it is asked in. It says nothing while a backward is traced, since the trace is run
later, nor while one is captured into a CUDA graph, since that may be replayed many times: then H
may be overwritten where every replay writes it anew, in the same capture."""

import torch

from ._library import operators

# Where torch lacks it no graph is given up; where no backward runs torch says so itself.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FUNCTIONAL", "FAKE")
)


def _users_of(tensor):
    """How many have the tensor's memory, as torch counts; None where it does not."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(tensor.untyped_storage()._cdata)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(1, device="cpu"))
        return x.clone()


def _users_if_alone():
    """What `_users_of` a saved tensor is if no other tensor lies in its memory, tried out: None,
    which no count equals, if this torch does not count a second tensor as one more."""
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
        return None  # a fake tensor's GPU need not be there
    if not _is_capturing():
        return None
    return operators.capture_id.default(tensor) or None


def is_traced(tensor):
    """Whether what is computed from `tensor` is recorded, to be run later."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if type(tensor) is not torch.Tensor:
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def is_read_last(ctx, H):
    """Whether nothing reads H after the backward of `ctx` that asks, which is not traced: torch's
    engine runs it, its graph is not kept, no graph is made of it, H was written in the same
    capture, or H and it in none, and no other tensor lies where H does, such as what a dispatch
    mode has detached and put by."""
    return (
        isinstance(ctx, torch.autograd.function.BackwardCFunction)  # compiled autograd has its own
        and not _keeps_graph()
        and not torch.is_grad_enabled()
        and capture_of(H) == ctx.capture
        and _alone is not None
        and _users_of(H) == _alone
    )
