"""Compute the output layer and its loss without the logits of all tokens.

Logits are the largest tensor of a small model: T x vocabulary in float32 are 9.9 GB at T = 24,576
and a vocabulary of 100,352. Here they are computed for some rows at a time; because the loss is a
scalar, their gradient is available immediately, and only the gradients of x and of the weight are
saved for backward.
"""

import torch

ROWS = 4096  # rows of logits at a time: enough for the GEMM, 0.8 GB at a vocabulary of 100,352


def cross_entropy(logits, targets):
    """Compute losses (rows) float32 and the gradient of the logits from logits and targets.

    logits are (rows, vocabulary), targets (rows); the gradient has the logits' dtype.
    """
    wide = logits.float()
    total = wide.logsumexp(dim=-1)
    losses = total - wide.gather(1, targets[:, None])[:, 0]
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = (wide - total[:, None]).exp() - (columns == targets[:, None]).float()
    return losses, gradient.to(logits.dtype)


def add_gemm(total, a, b):
    """Compute total (m, n) float32 += a (m, k) @ b (k, n).

    On a GPU the GEMM accumulates onto total in its registers; elsewhere its result is rounded to
    its inputs' dtype first.
    """
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class LinearCrossEntropy(torch.autograd.Function):
    """Mean loss () float32 of x (T, d), weight (vocabulary, d) and targets (T).

    `of_rows` is cross_entropy, or cross_entropy compiled.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, of_rows):
        T, wanted = x.shape[0], ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), device=x.device)
        dx = torch.empty_like(x) if wanted else None  # (T, d)
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        for start in range(0, T, ROWS):
            rows = slice(start, start + ROWS)
            losses, dlogits = of_rows(x[rows] @ weight.mT, targets[rows])
            loss += losses.sum()
            if wanted:
                torch.mm(dlogits, weight, out=dx[rows])
                add_gemm(dweight, dlogits.mT, x[rows])
        if wanted:
            # The mean's 1/T is applied last: in the logits it would reduce 16-bit gradients' range.
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
            ctx.T = T
        return loss / T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        dx, dweight = ctx.saved_tensors
        scale = dloss / ctx.T  # float32: a factor rounded to 16 bits would scale every gradient
        scaled = lambda gradient: (gradient.float() * scale).to(gradient.dtype)
        return scaled(dx), scaled(dweight), None, None
