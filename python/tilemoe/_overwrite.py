"""Decide whether a backward may write dH over H with `overwrite_H=None`.

It may if nothing can read H afterwards. The module also describes the rest of a backward that
stopped after dH was written over H.

Torch frees the saved tensors of a graph after a backward without `retain_graph`, and reports this
before the backward starts: AOTAutograd donates buffers by the same flag. The flag is valid for the
call that reads it. It does not apply while a backward is traced, because the trace runs later, nor
while a backward is captured into a CUDA graph, which may be replayed many times: then H may be
overwritten only if every replay writes H again, in the same capture.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ._library import operators

CONSUMED = "tilemoe_backward: an earlier backward wrote dH over the saved H; run forward again"
NO_MEMORY = (
    "tilemoe_backward: no memory for the gradients of W1 and b1, and H already contains "
    "dH; free memory and call backward again with the same gradient of the output, which "
    "continues from dH; in a graph of several layers torch has freed the layers nearer "
    "the loss, so run forward again"
)
NOT_KEPT = (
    "tilemoe_backward: H was not saved; call the layer with gradients enabled, or the "
    "operator with keep_H"
)
ANOTHER_GRADIENT = (
    "tilemoe_backward: an earlier backward ran out of memory after it had written dH over "
    "H, and only a backward with the same gradient of the output, for the same inputs, "
    "can continue from dH; run forward again"
)

# Without this function H is never overwritten. torch reports that no backward runs.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FUNCTIONAL", "FAKE")
)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(1, device="cpu"))
        return x.clone()


def _probe():
    """Test whether this torch behaves as is_read_last assumes.

    It reports a saved graph if no backward runs, and counts the tensors that use memory. The test
    runs no backward: the engine would start threads, and a process forked later could not use
    autograd.

    Returns:
        A function that returns whether no other tensor uses the memory of a saved tensor; False for
        every tensor if this torch behaves differently.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)

    def users(tensor):
        return count(tensor.untyped_storage()._cdata)

    try:
        with torch.inference_mode(False), torch.enable_grad():
            output = _Saves.apply(torch.empty(1, device="cpu", requires_grad=True))
        (saved,) = output.grad_fn.saved_tensors
        alone = users(saved)
        second = saved.detach()
        shared = users(saved)
        del second
        known = _keeps_graph() and shared == alone + 1 and users(saved) == alone
    except (AttributeError, RuntimeError, TypeError, ValueError):
        known = False
    if not known:
        return lambda tensor: False
    return lambda tensor: count(tensor.untyped_storage()._cdata) == alone


_uses_memory_alone = _probe()


def capture_of(tensor):
    """Return the CUDA graph capture of the current stream of the tensor's GPU, else None."""
    if not tensor.is_cuda or type(tensor) is not torch.Tensor or torch.compiler.is_compiling():
        return None  # the GPU of a fake tensor may not exist
    if not _is_capturing():
        return None
    return operators.capture_id.default(tensor) or None


def is_traced(tensor):
    """Return whether operations on `tensor` are recorded to run later."""
    if type(tensor) is not torch.Tensor or torch.compiler.is_compiling():
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def is_read_last(ctx, H):
    """Return whether nothing reads H after the current backward of `ctx`, which is not traced.

    torch's engine runs the backward, its graph is not retained and has no graph of its own, H was
    written in the same capture (or neither is captured), and no other tensor uses H's memory, such
    as one that a dispatch mode has detached and stored.
    """
    return (
        isinstance(ctx, BackwardCFunction)  # compiled autograd has its own class
        and not _keeps_graph()
        and not torch.is_grad_enabled()
        and capture_of(H) == ctx.capture
        and _uses_memory_alone(H)
    )


class Left(NamedTuple):
    """Rest of a backward that stopped after dH was written over H."""

    dO: Tensor
    version: int  # version of dO
    wanted: int  # bits of the gradients to compute
    dH: Tensor  # (capacity, 2n or n): saved-tensor hooks may return a new H
    made: list[Tensor | None]  # the eight gradients; None: given, not wanted, or not made yet
    stages: list  # autograd.Stage


class Progress:
    """Progress of a backward of one call that writes dH over H.

    Two passes may run in two threads, but only one may write dH.
    """

    consumed = False  # H contains dH or a part of it
    left: Left | None = None  # another walk can continue from dH
    dlogits: Tensor | None = None  # gradient of the logits that moe_with_router returned

    def claim(self):
        """Claim H before the first write."""
        if self.consumed:
            raise RuntimeError(CONSUMED)
        self.consumed = True

    def take(self, dO, wanted):
        """Return the rest, for a pass with the same gradient of the output."""
        left = self.left
        same = left is not None and (dO is left.dO or torch.equal(dO, left.dO))
        if left is not self.left or left is None:  # another thread has taken it
            raise RuntimeError(CONSUMED)
        if wanted != left.wanted or not same or left.dO._version != left.version:
            raise RuntimeError(ANOTHER_GRADIENT)
        self.left = None
        return left
