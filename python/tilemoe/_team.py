"""The ranks that share a layer's experts, and what travels between them: a token's row once to every
rank, a partial sum of its experts back from each.

Nothing here waits for the host, and no shape depends on what was chosen: a rank's place in what is
gathered has as many rows as the rank with the most tokens. Sums of ranks are added in float32, in
the order of the ranks, so every run has the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RankTokens = int | Sequence[int] | None


class Team:
    """One call's.

    group: the ranks, in the order of their experts; t: this rank's tokens; rank_tokens: those of
    every rank, or the most that one has, or None where each has as many as this one."""

    def __init__(self, group: dist.ProcessGroup, t: int, rank_tokens: RankTokens = None) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.t = t
        self.counts = _counts(rank_tokens, t, self.size, self.rank)
        self.rows = t if rank_tokens is None else _most(rank_tokens)  # of a rank, in what is gathered
        if t > self.rows:
            raise ValueError(
                f"tilemoe: rank {self.rank} has {t} tokens, and rank_tokens says {self.rows} at most"
            )

    @property
    def tokens(self) -> int:
        """N: tokens in what is gathered, the empty rows of shorter ranks among them."""
        return self.size * self.rows

    def start(self, own: Tensor, fill: int = 0) -> Arrival:
        """own (t, ...) -> what will be (N, ...), rank by rank; empty rows are `fill`."""
        return Arrival(self, own.detach(), fill)

    def gather(self, own: Tensor, fill: int = 0) -> Tensor:
        return self.start(own, fill).wait()

    def gather_flat(self, own: Tensor) -> Tensor:
        """own (length), as long on every rank -> (ranks, length)."""
        all_of_them = own.new_empty(self.size, *own.shape)
        dist.all_gather_into_tensor(all_of_them.view(-1), own.contiguous(), group=self.group)
        return all_of_them

    def exchange(self, parts: Tensor) -> Tensor:
        """parts (N, ...), each rank's rows -> (ranks, t, ...): what each rank has of this one's."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received.view(self.size, self.rows, *parts.shape[1:])[:, : self.t]

    def sum_back(self, parts: Tensor, addend: Tensor | None = None) -> Tensor:
        """parts (N, d): this rank's part of every token -> (t, d): the sum of this rank's tokens'
        parts and of the addend, added in float32 and rounded once."""
        received = self.exchange(parts)
        first, *rest = received.unbind(0) if addend is None else (addend, *received.unbind(0))
        total = first.to(torch.float32, copy=True)
        for part in rest:
            total += part
        return total.to(parts.dtype)


def _most(rank_tokens: int | Sequence[int]) -> int:
    return rank_tokens if isinstance(rank_tokens, int) else max(rank_tokens)


def _counts(rank_tokens: RankTokens, t: int, size: int, rank: int) -> tuple[int, ...] | None:
    """Of every rank, or None where they are not known here."""
    if rank_tokens is None:
        return (t,) * size
    if isinstance(rank_tokens, int):
        return (t,) * size if rank_tokens == t == 0 else None
    counts = tuple(rank_tokens)
    if len(counts) != size or any(not isinstance(c, int) or c < 0 for c in counts):
        raise ValueError(
            f"tilemoe: rank_tokens is {list(counts)}, expected the tokens of each of {size} ranks"
        )
    if counts[rank] != t:
        raise ValueError(
            f"tilemoe: rank {rank} has {t} tokens, and rank_tokens says {counts[rank]}"
        )
    return counts


class Arrival:
    """Rows on their way: `wait`, once, makes the current stream wait for them, not the host."""

    def __init__(self, team: Team, own: Tensor, fill: int) -> None:
        shape = own.shape[1:]
        if team.t < team.rows:
            padded = own.new_full((team.rows, *shape), fill)
            padded[: team.t] = own
            own = padded
        own = own.contiguous()
        rows = own.new_empty((team.tokens, *shape))
        work = dist.all_gather_into_tensor(rows, own, group=team.group, async_op=True)
        self._underway: Any = work, rows, own  # alive until the rows have left

    def wait(self) -> Tensor:
        work, rows, _ = self._underway
        work.wait()
        self._underway = None  # whoever has the rows decides how long they live
        return rows


# ---------------------------------------------------------------- with gradients


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, team, arrival, dtype):
        ctx.team, ctx.dtype = team, own.dtype
        return arrival.wait().to(dtype)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.team.sum_back(gradient).to(ctx.dtype), None, None, None


def gathered(own: Tensor, team: Team, arrival: Arrival, dtype: torch.dtype) -> Tensor:
    """own (t, d), and its rows on their way -> (N, d) of `dtype`. Backward adds the ranks' parts of
    a token's gradient."""
    return _Gathered.apply(own, team, arrival, dtype)


class _ScoresOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, team, all_scores):
        ctx.team = team
        return all_scores

    @staticmethod
    def backward(ctx, gradient):
        # A pair's gradient comes from the rank that has its expert; the others' is zero.
        return ctx.team.exchange(gradient).sum(0), None, None


def scores_of_all(own: Tensor, team: Team, all_scores: Tensor) -> Tensor:
    """own (t, K) float32, and all that were gathered (N, K) -> the latter."""
    return _ScoresOfAll.apply(own, team, all_scores)


class _ScoresOfPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, team, scores, tokens, experts, E_local):
        ctx.team, ctx.E_local = team, E_local
        ctx.save_for_backward(tokens, experts)
        return scores

    @staticmethod
    def backward(ctx, gradient):
        team, E_local = ctx.team, ctx.E_local
        tokens, experts = ctx.saved_tensors
        there = tokens < team.tokens
        at = torch.where(there, tokens.long() * E_local + experts, team.tokens * E_local)
        dense = gradient.new_zeros(team.tokens * E_local + 1)
        dense = dense.scatter(0, at, torch.where(there, gradient, 0.0))[:-1]
        received = team.exchange(dense.view(team.tokens, E_local))  # (ranks, t, E_local)
        of_own = received.permute(1, 0, 2).reshape(team.t, team.size * E_local)
        return of_own, None, None, None, None, None


def scores_of_pairs(own, team, scores, tokens, experts, E_local):
    """own (t, E) float32: the score of each pair that this rank's tokens could have; scores, tokens
    and experts (pairs) of this rank's experts, whose token is N where there is none -> scores."""
    return _ScoresOfPairs.apply(own, team, scores, tokens, experts, E_local)


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, addend, team, is_spoilt):
        ctx.team = team
        out = team.sum_back(parts, addend)
        return out if is_spoilt is None else out.masked_fill_(is_spoilt, torch.nan)

    @staticmethod
    def backward(ctx, dO):
        of_parts = ctx.team.gather(dO) if ctx.needs_input_grad[0] else None
        return of_parts, dO if ctx.needs_input_grad[1] else None, None, None


def returned(parts: Tensor, addend: Tensor | None, team: Team, is_spoilt: Tensor | None) -> Tensor:
    """parts (N, d): what this rank's experts make of every token -> (t, d): this rank's tokens'
    sums, NaN where is_spoilt () says so."""
    return _Returned.apply(parts, addend, team, is_spoilt)


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share, team):
        return team.gather_flat(share.reshape(1)).sum(0).reshape(()) / team.size

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def mean_of_ranks(share: Tensor, team: Team) -> Tensor:
    """A rank's () -> the ranks' mean, on each of them. The gradient is the share's own: data parallel
    training takes the mean of the ranks' gradients."""
    return _MeanOfRanks.apply(share, team)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, factor):
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            return gradient * ctx.factor, None
        return gradient.mul_(ctx.factor), None  # nobody else has it yet, and a copy is a peak


def gradient_scaled(weight: Tensor, factor: float) -> Tensor:
    """The weight, whose gradient is scaled."""
    return _Scaled.apply(weight, factor) if weight.requires_grad and factor != 1 else weight
