"""Compile the operations around torch's grouped_mm with torch.compile, for a strong baseline."""

import torch

from .problem import glu as eager_glu

compiled = torch.compile(dynamic=False)


@compiled
def glu(H, delta, activation: str):
    """Compute A (M, n) from H (M, 2n) and an adapter's part of H or None."""
    return eager_glu(H if delta is None else H + delta, activation)


@compiled
def _rows_of_tokens(X, order, K: int):
    """Return the rows of tokens, (M, d)."""
    return X[order // K]


@compiled
def _sum_by_token(rows, rows_of_pairs, K: int):
    """Sum rows (M, d) by token -> (T, d)."""
    return rows[rows_of_pairs].view(-1, K, rows.shape[1]).float().sum(1).to(rows.dtype)


def _sum(Y, delta, rows):
    """Sum rows of Y and of an adapter's part of Y, or None, in float32."""
    return Y[rows].float() if delta is None else Y[rows].float() + delta[rows].float()


@compiled
def _weighted_sum(Y, delta, s, rows_of_pairs):
    """Return the weighted sum O (T, d)."""
    T, K = s.shape
    weighted = _sum(Y, delta, rows_of_pairs).view(T, K, -1) * s[..., None].float()
    return weighted.sum(1).to(Y.dtype)


@compiled
def _weighted_rows(dO, s, order):
    """Return dY (M, d)."""
    weight = s.flatten()[order, None].float()
    return (dO[order // s.shape[1]].float() * weight).to(dO.dtype)


@compiled
def _row_dots(dO, Y, delta, rows_of_pairs, K: int):
    """Return ds (T, K)."""
    return (_sum(Y, delta, rows_of_pairs).view(-1, K, Y.shape[1]) * dO[:, None].float()).sum(-1)


class Gather(torch.autograd.Function):
    """Gather X (T, d) -> its rows by expert, (M, d)."""

    @staticmethod
    def forward(ctx, X, order, rows_of_pairs, K):
        ctx.save_for_backward(rows_of_pairs)
        ctx.K = K
        return _rows_of_tokens(X, order, K)

    @staticmethod
    def backward(ctx, drows):
        return _sum_by_token(drows, *ctx.saved_tensors, ctx.K), None, None, None


class Combine(torch.autograd.Function):
    """Combine Y (M, d), an adapter's part of Y or None, s (T, K) -> O (T, d)."""

    @staticmethod
    def forward(ctx, Y, delta, s, order, rows_of_pairs):
        ctx.save_for_backward(Y, delta, s, order, rows_of_pairs)
        return _weighted_sum(Y, delta, s, rows_of_pairs)

    @staticmethod
    def backward(ctx, dO):
        Y, delta, s, order, rows_of_pairs = ctx.saved_tensors
        ds = _row_dots(dO, Y, delta, rows_of_pairs, s.shape[1])
        dY = _weighted_rows(dO, s, order)
        return dY, None if delta is None else dY, ds.to(s.dtype), None, None
