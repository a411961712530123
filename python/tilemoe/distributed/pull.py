"""Transfer each row only to the ranks that need it.

A rank receives only the rows of the tokens that chose one of its experts, and a token's rank
receives the partial sums of the ranks with such an expert. On GPUs a rank reads these rows from the
symmetric memory of other ranks: no shape depends on the routing, and the host never waits. On the
CPU a collective sends the rows; the host computes its sizes from the routing. The rows, and so all
bits, are the same.
"""

from __future__ import annotations

import datetime
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library, _private, ops
from .team import Team

_ops = _library.operators


class Pull:
    """Transfer of one call.

    The tokens that this rank needs, among the N tokens of all ranks, are packed in their order into
    C rows; tokens past C are skipped. A rank with a capacity of C pairs needs at most C rows. ids
    (N, K) int32 name the experts among all E; capacity is the maximum of C, the same on every rank.
    """

    chunks = 1

    def __init__(self, ids: Tensor, E_local: int, capacity: int, team: Team) -> None:
        N, R = team.tokens, team.size
        rows = min(N, capacity)
        of_rank = torch.where(ids < 0, R, ids // E_local).long()
        needs = torch.zeros(N, R + 1, dtype=torch.bool, device=ids.device)
        needs = needs.scatter_(1, of_rank, True)[:, :R]
        place = needs.cumsum(0, dtype=torch.int32) - 1  # (N, R): in the rows of that rank
        there = needs & (place < rows)
        at = torch.where(there[:, team.rank], place[:, team.rank], rows).long()
        token = torch.arange(N, dtype=torch.int32, device=ids.device)
        self.team, self.rows = team, rows
        # (C) int32: token of each row of this rank; N: none.
        self.tokens = token.new_full((rows + 1,), N).scatter_(0, at, token)[:rows]
        # (t, R) int32: row of each of this rank's tokens on every rank, numbered over all ranks;
        # -1: none.
        own = slice(team.rank * team.rows, team.rank * team.rows + team.t)
        first = rows * torch.arange(R, dtype=torch.int32, device=ids.device)
        self.places = torch.where(there[own], place[own] + first, -1)

    def ids_of_rows(self, ids: Tensor) -> Tensor:
        """Select ids (N, K) -> (C, K), -1 for rows without a token."""
        return _with_last(ids, -1).index_select(0, self.tokens.long())

    def scores_of_rows(self, scores: Tensor) -> Tensor:
        """Select scores (N, K) -> (C, K), differentiable."""
        return _ScoresOfRows.apply(scores, self.tokens)

    def start(self, own: Tensor) -> PulledRows:
        """Start to pull (C, d) from own (t, d); rows without a token are zero."""
        own = own.detach().contiguous()
        rows = own.new_empty(self.rows, own.shape[1])
        return PulledRows(rows, self._transport(own).spread(self, own, rows))

    def depart(self, parts: Tensor) -> PulledSums:
        """Send parts (C, d), this rank's results for its rows."""
        return PulledSums(self, parts)

    def collect(self, parts: Tensor, addend: Tensor | None, out: Tensor) -> Any:
        return self._transport(parts).collect(self, parts, addend, out)

    def _transport(self, like: Tensor) -> Any:
        return _link_of(self.team, like.device) if like.device.type == "cuda" else _Collectives()


def _with_last(tensor: Tensor, value: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((1, tensor.shape[1]), value)])


class _ScoresOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, tokens):
        ctx.save_for_backward(tokens)
        ctx.N = scores.shape[0]
        return _with_last(scores, 0.0).index_select(0, tokens.long())

    @staticmethod
    def backward(ctx, gradient):
        (tokens,) = ctx.saved_tensors
        of_all = gradient.new_zeros(ctx.N + 1, gradient.shape[1])
        return of_all.index_copy_(0, tokens.long(), gradient)[: ctx.N], None


class PulledRows:
    """Counterpart of team.Arrival for pulled rows."""

    def __init__(self, rows: Tensor, underway: Any) -> None:
        self.rows, self._underway = rows, underway

    def wait(self) -> Tensor:
        self._underway.wait()
        rows = self.rows
        del self.rows, self._underway  # only the caller's reference keeps the rows
        return rows


class PulledSums:
    """Counterpart of team.Departure for pulled rows."""

    def __init__(self, pull: Pull, parts: Tensor) -> None:
        self._pull, self._parts = pull, parts
        self._left: tuple[Any, Tensor] | None = None

    def has(self, parts: Tensor) -> bool:
        return self._parts is parts

    def leave(self, addend: Tensor | None = None) -> PulledSums:
        parts = self._parts.contiguous()
        out = parts.new_empty(self._pull.team.t, parts.shape[1])
        self._left = self._pull.collect(parts, addend, out), out
        return self

    def sum(self, addend: Tensor | None = None) -> Tensor:
        """Return (t, d): the sums of this rank's tokens, with the addend unless already sent."""
        if self._left is None:
            self.leave(addend)
        assert self._left is not None
        (underway, out), self._left = self._left, None
        del self._parts
        underway.wait()
        return out


def _sum_rows(
    sources: list[int], source_rows: int, places: Tensor, addend: Tensor | None, out: Tensor
) -> None:
    """Compute out_i = addend_i + the sum of the rows that `places` names, by address."""
    if source_rows == 0:
        out.zero_() if addend is None else out.copy_(addend)
        return
    args = (sources, source_rows, places.contiguous(), addend, out)
    ops.call_undifferentiated(_ops.sum_rows.default, *args)


# ---------------------------------------------------------------- on the CPU


class _Done:
    def wait(self) -> None:
        pass


class _Collectives:
    """Collectives that send rows to the ranks that need them."""

    def spread(self, pull: Pull, own: Tensor, rows: Tensor) -> _Done:
        team = pull.team
        sent = [own[(column >= 0).nonzero()[:, 0]] for column in pull.places.unbind(1)]
        counts = _counts_by_rank(pull)
        dist.all_to_all_single(
            rows[: sum(counts)], torch.cat(sent), counts, list(map(len, sent)), group=team.group
        )
        rows[sum(counts) :] = 0
        return _Done()

    def collect(self, pull: Pull, parts: Tensor, addend: Tensor | None, out: Tensor) -> _Done:
        here = pull.places >= 0
        counts, back = _counts_by_rank(pull), here.sum(0).tolist()
        received = parts.new_empty(sum(back), parts.shape[1])
        sent = parts[: sum(counts)]
        dist.all_to_all_single(received, sent, back, counts, group=pull.team.group)
        # Ordered by rank, then by token.
        nth = here.t().flatten().cumsum(0, dtype=torch.int32).view(here.t().shape).t() - 1
        places = torch.where(here, nth, -1)
        _sum_rows([received.data_ptr()], len(received), places, addend, out)
        return _Done()


def _counts_by_rank(pull: Pull) -> list[int]:
    """Return the number of this rank's rows that come from each rank."""
    team = pull.team
    tokens = pull.tokens[pull.tokens < team.tokens]
    return torch.bincount(tokens // max(team.rows, 1), minlength=team.size).tolist()


# ---------------------------------------------------------------- on GPUs


class _Link:
    """State of a process for all calls of a group.

    A link has memory that the group's ranks read, and a stream on which exchanges run in the order
    of the calls, which is the same on all ranks. It has no reference to the group: destroying a
    group destroys its link.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        _private.require("expert parallelism with dispatch='pull' on GPUs")
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._memory: tuple[Tensor, Any] | None = None  # with its handle
        # Memory that a captured exchange uses in each replay: torch does not report when a graph is
        # destroyed, so the memory lives as long as the link.
        self._in_graphs: list[tuple[Tensor, Any]] = []
        self._timeout_ms = max(int(_timeout_of(group, device).total_seconds() * 1000), 1)

    def spread(self, pull: Pull, own: Tensor, rows: Tensor) -> _Underway:
        places = pull.tokens[:, None]
        return self._exchange(pull.team.group, own, pull.team.rows, places, None, rows)

    def collect(self, pull: Pull, parts: Tensor, addend: Tensor | None, out: Tensor) -> _Underway:
        return self._exchange(pull.team.group, parts, pull.rows, pull.places, addend, out)

    def _exchange(
        self, group: dist.ProcessGroup, own: Tensor, source_rows: int, places: Tensor,
        addend: Tensor | None, out: Tensor,
    ) -> _Underway:  # fmt: skip
        """Exchange rows; every rank has the same number of source_rows, starting with `own`."""
        handle = self._handle(group, max(source_rows * own.shape[1] * own.element_size(), 1))
        # Made before the stream reads anything: if something fails below, the tensors outlive the
        # reads.
        underway = _Underway(self.stream, (own, places, addend, out))
        with torch.cuda.stream(self.stream):
            handle.get_buffer(handle.rank, own.shape, own.dtype).copy_(own)
            handle.barrier(0, self._timeout_ms)  # every rank has written its rows
            _sum_rows(list(handle.buffer_ptrs), source_rows, places, addend, out)
            handle.barrier(0, self._timeout_ms)  # every rank has read them
        return underway

    def _handle(self, group: dist.ProcessGroup, size: int) -> Any:
        """Return a handle of at least `size` bytes of symmetric memory, the same on every rank."""
        from torch.distributed import _symmetric_memory as symmetric

        captures = torch.cuda.is_current_stream_capturing()
        if self._memory is None or self._memory[0].numel() < size:
            if captures:
                raise RuntimeError(
                    "the first call of a layer with this many tokens allocates symmetric "
                    "memory, which a CUDA graph cannot capture; call the layer once "
                    "before the capture"
                )
            torch.cuda.synchronize(self.device)  # no work reads the old memory afterwards
            self._memory = None
            memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
            self._memory = memory, symmetric.rendezvous(memory, group)
        if captures and not any(one is self._memory for one in self._in_graphs):
            self._in_graphs.append(self._memory)
        return self._memory[1]


class _Underway:
    """Work on `stream`, which waits for the current stream, with tensors of the current stream.

    The tensors live until `wait`. If nothing calls `wait`, for example after an exception, the
    stream on which torch reuses their memory waits when this object is deleted.
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: tuple[Tensor | None, ...]) -> None:
        self._stream, self._tensors = stream, tensors
        self._home = torch.cuda.current_stream(stream.device)
        stream.wait_stream(self._home)

    def wait(self) -> None:
        """Make the current stream wait, not the host."""
        self._home.wait_stream(self._stream)
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._home:
            current.wait_stream(self._stream)
        self._tensors = ()

    def __del__(self) -> None:
        if getattr(self, "_tensors", ()) and not sys.is_finalizing():
            self.wait()


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Return the group's timeout if this torch has an attribute for it, else torch's default."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Link]]
_links = weakref.WeakKeyDictionary()


def _link_of(team: Team, device: torch.device) -> _Link:
    links = _links.setdefault(team.group, {})
    if device not in links:
        links[device] = _Link(team.group, device)
    return links[device]
