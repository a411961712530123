"""One expert in float64 that rounds to 16 bits exactly where the library stores 16 bits, forward and
backward: its error is what a correct 16-bit layer is expected to have.

Stored are H, A, Y, dH, A' and dX~; the sums of a token's rows and the weights' gradients are rounded
by the caller. Forward A comes from the H that was not rounded, backward A from the stored one.
Without a dtype nothing is rounded, and this is the layer itself.
"""

from typing import NamedTuple

import torch

from reference import activate


class Gradients(NamedTuple):
    """Gradients of one expert's rows and weights; db1 and db2 are None without biases."""

    x: torch.Tensor  # (rows, d), dX~
    s: torch.Tensor  # (rows)
    W1: torch.Tensor
    W2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None


def rounded(tensor, dtype):
    """tensor, in its own dtype, with the values that `dtype` has; as it is where that is None."""
    return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)


def forward(x, W1, W2, b1, b2, act, dtype):
    """x (rows, d) -> H (rows, h), Y (rows, d), as they are stored."""
    H = x @ W1.T
    if b1 is not None:
        H = H + b1
    Y = rounded(activate(H, **act), dtype) @ W2.T
    if b2 is not None:
        Y = Y + b2
    return rounded(H, dtype), rounded(Y, dtype)


def backward(x, s, H, dO, W1, W2, b1, b2, act, dtype):
    """dO (rows, d), not weighted by s (rows) -> Gradients."""
    s = s.unsqueeze(-1)
    dA = dO @ W2
    with torch.enable_grad():
        H = H.detach().requires_grad_()
        A = activate(H, **act)
        (dH,) = torch.autograd.grad(A, H, s * dA)
    A, dH = A.detach(), rounded(dH, dtype)
    ds = (dA * A).sum(-1)
    if b2 is not None:
        ds = ds + dO @ b2
    return Gradients(
        x=rounded(dH @ W1, dtype), s=ds, W1=dH.T @ x, W2=dO.T @ rounded(s * A, dtype),
        b1=None if b1 is None else dH.sum(0), b2=None if b2 is None else (s * dO).sum(0),
    )  # fmt: skip


class _WeightedExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s, W1, W2, b1, b2, act, dtype):
        H, Y = forward(x, W1, W2, b1, b2, act, dtype)
        ctx.save_for_backward(x, s, H, W1, W2, b1, b2)
        ctx.how = act, dtype
        return s.unsqueeze(-1) * Y

    @staticmethod
    def backward(ctx, dO):
        x, s, H, *weights = ctx.saved_tensors
        return *backward(x, s, H, dO, *weights, *ctx.how), None, None


def weighted_expert(x, s, W1, W2, b1, b2, act, dtype):
    """x (rows, d), s (rows) -> s Y (rows, d), for autograd."""
    return _WeightedExpert.apply(x, s, W1, W2, b1, b2, act, dtype)
