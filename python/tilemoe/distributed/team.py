"""Communicate between the ranks that share a layer's experts.

A token's row is sent once to every rank, and a partial sum of its experts returns from each. The
host never waits, and no shape depends on the choice: a rank's place in a gathered tensor has as
many rows as the rank with the most tokens. In chunks, each chunk is a separate collective: the
first chunk of every rank's rows, then the second of every rank's, and so on. Sums of ranks are
added in float32, in the order of the ranks, so every run has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RankTokens = int | Sequence[int] | None


class Team:
    """Ranks of one call.

    Attributes:
        group: Ranks, in the order of their experts.
        t: Tokens of this rank.
        rank_tokens: Tokens of every rank, or their maximum, or None if all ranks have the same
            number.
        chunks: Number of chunks of the rows, at most a rank's rows.
        pulls: Rows are pulled (pull.py).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        t: int,
        rank_tokens: RankTokens = None,
        chunks: int = 1,
        pulls: bool = False,
    ) -> None:
        self.group, self.pulls = group, pulls
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.t = t
        self.counts = _counts(rank_tokens, t, self.size, self.rank)
        # Rows of each rank in the gathered tensor:
        self.rows = max_tokens(t, rank_tokens)
        if t > self.rows:
            raise ValueError(
                f"rank {self.rank} has {t} tokens, expected at most {self.rows}, the "
                "maximum in rank_tokens"
            )
        self.cuts = cuts_of(self.rows, chunks)  # chunks of a rank's rows

    @property
    def tokens(self) -> int:
        """Return N, the tokens in gathered tensors, including empty rows of ranks."""
        return self.size * self.rows

    @property
    def chunks(self) -> int:
        return len(self.cuts) - 1

    @property
    def token_cuts(self) -> list[int]:
        """Return the first token of each chunk in the gathered tensor."""
        return [self.size * cut for cut in self.cuts]

    def own_rows(self, chunk: int) -> slice:
        """Return a chunk's rows among one rank's rows."""
        return slice(self.cuts[chunk], self.cuts[chunk + 1])

    def all_rows(self, chunk: int) -> slice:
        """Return a chunk's rows among those of all ranks."""
        return slice(self.size * self.cuts[chunk], self.size * self.cuts[chunk + 1])

    def by_chunk(self, of_ranks: Tensor) -> Tensor:
        """Reorder (ranks, rows, ...) -> (N, ...), the order of gathered tensors."""
        if self.chunks == 1:
            return of_ranks.reshape(self.tokens, *of_ranks.shape[2:])
        parts = [of_ranks[:, self.own_rows(chunk)].flatten(0, 1) for chunk in range(self.chunks)]
        return torch.cat(parts)

    def by_rank(self, gathered: Tensor) -> Tensor:
        """Reorder (N, ...) -> (ranks, rows, ...)."""
        parts = [
            gathered[self.all_rows(chunk)].unflatten(0, (self.size, -1))
            for chunk in range(self.chunks)
        ]
        return parts[0] if self.chunks == 1 else torch.cat(parts, 1)

    def start(self, own: Tensor, fill: int = 0) -> Arrival:
        """Start to gather own (t, ...) -> (N, ...); empty rows are `fill`."""
        return Arrival(self, own.detach(), fill).go_on()

    def depart(self, parts: Tensor) -> Departure:
        """Send parts (N, d), this rank's part of every token, to the tokens' ranks."""
        return Departure(self, parts)

    def gather(self, own: Tensor, fill: int = 0) -> Tensor:
        return self.start(own, fill).wait()

    def gather_flat(self, own: Tensor) -> Tensor:
        """Gather own (length), equally long on every rank -> (ranks, length)."""
        all_of_them = own.new_empty(self.size, *own.shape)
        dist.all_gather_into_tensor(all_of_them.view(-1), own.contiguous(), group=self.group)
        return all_of_them

    def exchange(self, parts: Tensor) -> Tensor:
        """Exchange parts (N, ...) of all ranks' rows -> (ranks, t, ...) of this rank's rows."""
        parts = self.by_rank(parts).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received.flatten(0, 1), parts.flatten(0, 1), group=self.group)
        return received[:, : self.t]

    def sum_back(self, parts: Tensor, addend: Tensor | None = None) -> Tensor:
        """Sum parts (N, d), this rank's part of every token -> (t, d).

        The result is the sum of the parts of this rank's tokens and of the addend, added in float32
        and rounded once.
        """
        return self.depart(parts).sum(addend)


def cuts_of(rows: int, chunks: int) -> list[int]:
    """Return the first row of each chunk and the end. No chunk is empty unless rows is 0."""
    chunks = max(min(chunks, rows), 1)
    return [rows * chunk // chunks for chunk in range(chunks + 1)]


def total_of(received: Tensor, addend: Tensor | None = None) -> Tensor:
    """Sum received (ranks, t, d) -> (t, d) in the order of the ranks, after the addend."""
    first, *rest = received.unbind(0) if addend is None else (addend, *received.unbind(0))
    total = first.to(torch.float32, copy=True)
    for part in rest:
        total += part
    return total.to(received.dtype)


def max_tokens(t: int, rank_tokens: RankTokens) -> int:
    """Return the maximum number of tokens of a rank, if this rank has t."""
    if rank_tokens is None:
        return t
    return rank_tokens if isinstance(rank_tokens, int) else max(rank_tokens)


def _counts(rank_tokens: RankTokens, t: int, size: int, rank: int) -> tuple[int, ...] | None:
    """Return the tokens of every rank, or None if they are not known here."""
    if rank_tokens is None:
        return (t,) * size
    if isinstance(rank_tokens, int):
        return (t,) * size if rank_tokens == t == 0 else None
    counts = tuple(rank_tokens)
    if len(counts) != size or any(not isinstance(c, int) or c < 0 for c in counts):
        raise ValueError(
            f"rank_tokens must have one number for each of the {size} ranks, got {list(counts)}"
        )
    if counts[rank] != t:
        raise ValueError(
            f"rank {rank} has {t} tokens, but rank_tokens has {counts[rank]} for this rank"
        )
    return counts


class Arrival:
    """Rows in transfer: the first chunk, and after `go_on` the others.

    `wait`, called once, makes the current stream wait for them, not the host.
    """

    def __init__(self, team: Team, own: Tensor, fill: int) -> None:
        shape = own.shape[1:]
        if team.t < team.rows:
            padded = own.new_full((team.rows, *shape), fill)
            padded[: team.t] = own
            own = padded
        own = own.contiguous()
        rows = own.new_empty((team.tokens, *shape))
        self.team = team
        self._underway: Any = [], rows, own  # referenced until the rows are sent
        self._start(0)

    def _start(self, chunk: int) -> None:
        works, rows, own = self._underway
        into = rows.detach()  # gloo writes from a thread, and rows may already have a history then
        into, own = into[self.team.all_rows(chunk)], own[self.team.own_rows(chunk)]
        group = self.team.group
        works.append(dist.all_gather_into_tensor(into, own, group=group, async_op=True))

    def go_on(self) -> Arrival:
        """Start the other chunks. Collectives of one group run in the order of their calls."""
        for chunk in range(len(self._underway[0]), self.team.chunks):
            self._start(chunk)
        return self

    @property
    def rows(self) -> Tensor:
        """Rows (N, ...), not to be read before `wait`."""
        return self._underway[1]

    def wait_chunk(self, chunk: int) -> None:
        """Wait for the rows of one chunk; `wait` must still be called."""
        self._underway[0][chunk].wait()

    def wait(self) -> Tensor:
        works, rows, _ = self._underway
        for work in works:
            work.wait()
        self._underway = None  # only the caller's reference keeps the rows
        return rows


class Departure:
    """Parts (N, d) in transfer to the ranks of their tokens, chunk by chunk."""

    def __init__(self, team: Team, parts: Tensor) -> None:
        self.team, self._parts = team, parts.contiguous()
        self._underway: list[tuple[Any, Tensor]] = []

    def has(self, parts: Tensor) -> bool:
        return self._parts is parts

    def send(self) -> None:
        """Send the next chunk, which the current stream has computed."""
        parts = self._parts[self.team.all_rows(len(self._underway))]
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=self.team.group, async_op=True)
        self._underway.append((work, received))

    def leave(self) -> Departure:
        """Send the remaining chunks."""
        while len(self._underway) < self.team.chunks:
            self.send()
        return self

    def sum(self, addend: Tensor | None = None) -> Tensor:
        """Return (t, d): the sum of the ranks' parts of this rank's tokens and the addend.

        The sum is in float32 and rounded once. Called at most once.
        """
        self.leave()
        underway, self._underway = self._underway, []
        del self._parts
        for work, _ in underway:
            work.wait()
        if len(underway) == 1:
            return self._total(0, underway[0][1], addend)
        out = underway[0][1].new_empty(self.team.t, *underway[0][1].shape[1:])
        for chunk in range(self.team.chunks):
            out[self.team.own_rows(chunk)] = self._total(chunk, underway.pop(0)[1], addend)
        return out

    def _total(self, chunk: int, received: Tensor, addend: Tensor | None) -> Tensor:
        team = self.team
        own = range(team.t)[team.own_rows(chunk)]  # without the empty rows
        of_ranks = received.unflatten(0, (team.size, -1))[:, : len(own)]
        return total_of(of_ranks, None if addend is None else addend[own.start : own.stop])


class Travel:
    """_travel.Travel of a call whose X comes from all ranks.

    In backward X arrives, and dX is sent, while GEMMs run. In chunks, X and dO arrive during the
    GEMMs of the previous chunk, and O is sent during those of the next chunk.

    Attributes:
        way: The team, or a Pull.
        kept: Forward saves the rows, and backward does not gather them.
        overlap: False: in backward all steps run one after another.
    """

    def __init__(self, way: Any, kept: bool, overlap: bool) -> None:
        self.way, self.kept, self.overlap = way, kept, overlap
        self._arrival: Any = None
        self._departure: Any = None
        self._gradient: Any = None

    def forward_begins(self, arrival: Any) -> Tensor:
        """Return X; with chunks, `chunk_arrived` waits for it."""
        if self.way.chunks == 1:
            return arrival.wait()
        self._arrival = arrival
        return arrival.rows

    def chunk_arrived(self, chunk: int) -> None:
        assert self._arrival is not None
        self._arrival.wait_chunk(chunk)
        if chunk == self.way.chunks - 1:
            self.arrived()

    def chunk_made(self, O: Tensor) -> None:
        if self._departure is None:
            self._departure = self.way.depart(O)
        self._departure.send()

    def sum_of(self, O: Tensor, addend: Tensor | None) -> Tensor:
        """Return (t, d): the sum of O, whose chunks may already be sent, and the addend."""
        return self._departed(O).sum(addend)

    def gradient_begins(self, dO: Tensor) -> Tensor:
        """Return dO of all tokens; with overlapped chunks, `gradient_arrived` waits for it."""
        self._gradient = self.way.start(dO)
        rows = self._gradient.rows
        # Anomaly detection reads the results of each node of the graph.
        if self.way.chunks == 1 or not self.overlap or torch.is_anomaly_enabled():
            self.gradient_arrived()
        return rows

    def gradient_arrived(self, chunk: int | None = None) -> None:
        """Make the current stream wait for dO, or for a chunk of it."""
        if self._gradient is None:
            return
        if chunk is not None:
            self._gradient.wait_chunk(chunk)
        if chunk is None or chunk == self.way.chunks - 1:
            self._gradient.wait()
            self._gradient = None

    def begin(self, source: Tensor) -> Tensor:
        if self.kept:
            return source
        self._arrival = self.way.start(source)
        rows = self._arrival.rows
        if not self.overlap:
            self.arrived()
        return rows

    def arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    def made(self, dX: Tensor) -> None:
        if self.overlap:
            self._departure = self.way.depart(dX).leave()

    def sum_back(self, dX: Tensor) -> Tensor:
        """Return the sum of a dX that may already be sent."""
        departure = self._departed(dX)
        del dX
        return departure.sum()

    def _departed(self, parts: Tensor) -> Any:
        departure, self._departure = self._departure, None
        if departure is None or not departure.has(parts):
            departure = self.way.depart(parts)
        return departure


# ---------------------------------------------------------------- with gradients


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, travel, arrival):
        ctx.travel = travel
        return travel.forward_begins(arrival)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.travel.sum_back(gradient), None, None


def gathered(own: Tensor, travel: Travel, arrival: Any) -> Tensor:
    """Return the gathered rows (N, d), or a Pull's (C, d), of own (t, d).

    With chunks these rows may still be in transfer. Backward adds the ranks' parts of a token's
    gradient.
    """
    return _Gathered.apply(own, travel, arrival)


class _ScoresOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, team, all_scores):
        ctx.team = team
        return all_scores

    @staticmethod
    def backward(ctx, gradient):
        # The gradient of a pair comes from the rank of its expert; those of other ranks are zero.
        return ctx.team.exchange(gradient).sum(0), None, None


def scores_of_all(own: Tensor, team: Team, all_scores: Tensor) -> Tensor:
    """Return the gathered scores (N, K) with a gradient to own (t, K) float32."""
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
    """Return the scores of pairs with a gradient to own (t, E) float32.

    own: the score of each pair that this rank's tokens could have; scores, tokens and experts
    (pairs) of this rank's experts, with token N in unused places.
    """
    return _ScoresOfPairs.apply(own, team, scores, tokens, experts, E_local)


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, addend, travel, is_spoilt):
        ctx.travel = travel
        out = travel.sum_of(parts, addend)
        return out if is_spoilt is None else out.masked_fill_(is_spoilt, torch.nan)

    @staticmethod
    def backward(ctx, dO):
        of_parts = ctx.travel.gradient_begins(dO) if ctx.needs_input_grad[0] else None
        return of_parts, dO if ctx.needs_input_grad[1] else None, None, None


def returned(
    parts: Tensor, addend: Tensor | None, travel: Travel, is_spoilt: Tensor | None
) -> Tensor:
    """Return the sums (t, d) of this rank's tokens from parts (N, d), or (C, d).

    parts: results of this rank's experts for the received rows. The sums are NaN if is_spoilt ().
    """
    return _Returned.apply(parts, addend, travel, is_spoilt)


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share, team):
        return team.gather_flat(share.reshape(1)).sum(0).reshape(()) / team.size

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def mean_of_ranks(share: Tensor, team: Team) -> Tensor:
    """Return the mean of () over the ranks, on each of them.

    The gradient is the rank's own: data parallel training averages the gradients of the ranks.
    """
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
        return gradient.mul_(
            ctx.factor
        ), None  # no other reference exists; a copy would be a memory peak


def gradient_scaled(weight: Tensor, factor: float) -> Tensor:
    """Return the weight, whose gradient is scaled."""
    return _Scaled.apply(weight, factor) if weight.requires_grad and factor != 1 else weight
