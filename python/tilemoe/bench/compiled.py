"""What surrounds torch's grouped_mm, compiled by torch.compile: the parts of a strong baseline."""

import torch

from .problem import glu as eager_glu

compiled = torch.compile(dynamic=False)


@compiled
def glu(H, activation: str):
    """H (M, 2n) -> A (M, n)"""
    return eager_glu(H, activation)


@compiled
def _rows_of_tokens(X, order, K: int):
    """-> (M, d)"""
    return X[order // K]


@compiled
def _sum_by_token(rows, rows_of_pairs, K: int):
    """rows (M, d) -> (T, d)"""
    return rows[rows_of_pairs].view(-1, K, rows.shape[1]).float().sum(1).to(rows.dtype)


@compiled
def _weighted_sum(Y, s, rows_of_pairs):
    """-> O (T, d)"""
    T, K = s.shape
    weighted = Y[rows_of_pairs].view(T, K, -1).float() * s[..., None].float()
    return weighted.sum(1).to(Y.dtype)


@compiled
def _weighted_rows(dO, s, order):
    """-> dY (M, d)"""
    weight = s.flatten()[order, None].float()
    return (dO[order // s.shape[1]].float() * weight).to(dO.dtype)


@compiled
def _row_dots(dO, Y, rows_of_pairs, K: int):
    """-> ds (T, K)"""
    return (Y[rows_of_pairs].view(-1, K, Y.shape[1]).float() * dO[:, None].float()).sum(-1)


class Gather(torch.autograd.Function):
    """X (T, d) -> its rows by expert, (M, d)"""

    @staticmethod
    def forward(ctx, X, order, rows_of_pairs, K):
        ctx.save_for_backward(rows_of_pairs)
        ctx.K = K
        return _rows_of_tokens(X, order, K)

    @staticmethod
    def backward(ctx, drows):
        return _sum_by_token(drows, *ctx.saved_tensors, ctx.K), None, None, None


class Combine(torch.autograd.Function):
    """Y (M, d), s (T, K) -> O (T, d)"""

    @staticmethod
    def forward(ctx, Y, s, order, rows_of_pairs):
        ctx.save_for_backward(Y, s, order, rows_of_pairs)
        return _weighted_sum(Y, s, rows_of_pairs)

    @staticmethod
    def backward(ctx, dO):
        Y, s, order, rows_of_pairs = ctx.saved_tensors
        ds = _row_dots(dO, Y, rows_of_pairs, s.shape[1])
        return _weighted_rows(dO, s, order), ds.to(s.dtype), None, None
