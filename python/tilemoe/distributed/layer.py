"""Compute one call of a layer whose experts are sharded over ranks.

A call exchanges the choice of every rank's tokens, the rows and the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _calls, _library, _travel, ops
from .._autocast import autocast_dtype
from .._layout import array_of, offsets_of, rule_of
from ..options import GENERAL, ROUNDED, SCORES_GIVEN, Options
from ..routing import (
    Aux,
    Counter,
    choose,
    counts_of_ids,
    given_choice,
    narrowed_to_experts,
    route_rounded,
    top_k,
)
from .cost import Way, capacity_of, way_of
from .pull import Pull
from .team import (
    Arrival,
    RankTokens,
    Team,
    Travel,
    gathered,
    max_tokens,
    returned,
    scores_of_all,
    scores_of_pairs,
)

_ops = _library.operators


def team_of(
    group: dist.ProcessGroup, x: Tensor, options: Options, rank_tokens: RankTokens,
    sizes: tuple[int, int, int, int], rounds: bool,
) -> Team:  # fmt: skip
    """Return the team of a call with x (t, d), in a layer of these d, n, E and K."""
    way = Way(1, False)
    if not rounds:
        T = max_tokens(x.shape[0], rank_tokens)
        way = way_of(options, T, *sizes, dist.get_world_size(group), x.dtype)
    return Team(group, x.shape[0], rank_tokens, *way)


class _Chosen(NamedTuple):
    """Experts of this rank's tokens."""

    scores: Tensor  # (t, K)
    ids: Tensor  # (t, K)
    counts: Tensor  # (E) int32
    distinct: bool  # no token has an expert twice


def start(x: Tensor, team: Team) -> Arrival | None:
    """Send the first chunk of x (t, d) to every rank, in autocast's dtype, before the choice.

    Return None with "pull", because the chosen experts determine the rows to send.
    """
    if team.pulls:
        return None
    return Arrival(team, x.detach().to(autocast_dtype(x.device) or x.dtype), 0)


class OfTeam(NamedTuple):
    """Choice of all ranks' tokens."""

    counts: Tensor  # (E) int32, before rounding
    tokens: Tensor  # () int32


def computed(
    x: Tensor,
    router: Tensor,
    layer: _calls.Layer,
    addend: Tensor | None,
    team: Team,
    arrival: Arrival | None,
    *,
    ids: Tensor | None,
    selection_bias: Tensor | None,
    counter: tuple[Counter | None, Counter | None],
    rounds: bool,
) -> tuple[Tensor, Aux, OfTeam]:
    """Compute O (t, d), its Aux and the choice of all ranks from x (t, d) of this rank.

    The router's tensor is logits (t, E), or scores (t, K) with ids. The rows of x are already in
    transfer. With `rounds` the options' token rounding applies, with the seed and offset of
    `counter`.
    """
    if rounds:
        _calls.refuse_bias(selection_bias)
        return _rounded(x, router, layer, addend, team, counter)
    if ids is not None:
        E = _calls.experts_in(layer.weights[0]) * team.size
        chosen = _Chosen(router, ids, counts_of_ids(ids, E), False)
    else:
        chosen = _Chosen(*choose(router, layer.options, selection_bias), True)
    return _routed(x, chosen, layer, addend, team, arrival)


def _routed(
    x: Tensor,
    chosen: _Chosen,
    layer: _calls.Layer,
    addend: Tensor | None,
    team: Team,
    arrival: Arrival | None,
) -> tuple[Tensor, Aux, OfTeam]:
    """Compute O (t, d), its Aux and the choice of all ranks from x (t, d) and chosen experts."""
    K, E_local = chosen.ids.shape[1], _calls.experts_in(layer.weights[0])
    E = E_local * team.size
    ids, scores, counts, tokens = _gather_choice(chosen, team)
    first = team.rank * E_local
    max_pairs = team.tokens * (min(K, E_local) if chosen.distinct else K)
    capacity = capacity_of(layer.options, team.tokens * K, team.size, max_pairs)

    # Pairs of each rank's experts.
    of_ranks = counts.view(team.size, team.size, E_local).sum((0, 2))
    overflow = (of_ranks - capacity).clamp(min=0).sum(dtype=torch.int32)
    pull = None
    if team.pulls:
        pull = Pull(ids, E_local, capacity, team)
        ids, scores = pull.ids_of_rows(ids), pull.scores_of_rows(scores)
    rows, comm = _rows(x, team, layer.options, arrival, pull)
    own_ids = ids - first
    own_ids, scores = narrowed_to_experts(own_ids, scores, E_local)
    places_here = max(min(capacity, own_ids.numel()), 1)
    parts, _ = _calls.of_ids(
        rows, scores, own_ids, E_local, layer, None, places_here, "drop", False, comm,
        team.token_cuts if team.chunks > 1 else None,
    )  # fmt: skip
    del rows  # before the results of the same size are allocated
    out = _back(parts, addend, comm.travel, layer.options, capacity < max_pairs, overflow)
    here = (chosen.ids >= 0) & (chosen.ids < E)
    none = torch.zeros_like(overflow)
    aux = Aux(
        chosen.counts,
        none,
        none,
        (~here).sum(dtype=torch.int32),
        (~here.any(1)).sum(dtype=torch.int32),
        overflow,
        *given_choice(chosen.ids, chosen.scores),
    )
    return out, aux, OfTeam(counts.sum(0, dtype=torch.int32), tokens)


def _gather_choice(chosen: _Chosen, team: Team) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather the choice of all ranks in one collective.

    Return ids (N, K), scores (N, K) in float32 with their gradient, counts (ranks, E) and tokens
    (). Empty rows have id -1.
    """
    K, size = chosen.ids.shape[1], team.rows * chosen.ids.shape[1]
    own_scores = chosen.scores.float()
    own = chosen.ids.new_empty(2 * size + chosen.counts.shape[0] + 1, dtype=torch.int32)
    pairs, used = own[: 2 * size].view(2, team.rows, K), team.t
    # int64 ids outside int32 would change: all outside become -1.
    E = chosen.counts.shape[0]
    pairs[0, :used] = torch.where((chosen.ids >= 0) & (chosen.ids < E), chosen.ids, -1)
    pairs[0, used:] = -1
    pairs[1, :used] = own_scores.detach().view(torch.int32)
    pairs[1, used:] = 0
    own[2 * size : -1] = chosen.counts
    own[-1:] = team.t
    all_of_them = team.gather_flat(own)  # (ranks, ...)
    both = all_of_them[:, : 2 * size].view(team.size, 2, team.rows, K)
    ids, scores = team.by_chunk(both[:, 0]), team.by_chunk(both[:, 1]).view(torch.float32)
    counts, tokens = all_of_them[:, 2 * size : -1], all_of_them[:, -1].sum(dtype=torch.int32)
    return ids, scores_of_all(own_scores, team, scores), counts, tokens


def _rows(
    x: Tensor, team: Team, options: Options, arrival: Arrival | None, pull: Pull | None = None
) -> tuple[Tensor, _travel.Comm]:
    """Return the rows of all ranks (N, d), or a Pull's (C, d), and their communication.

    The communication gathers the rows again in backward and sends their gradient back.
    """
    own = x.to(autocast_dtype(x.device) or x.dtype)
    way = team if pull is None else pull
    travel = Travel(way, options.keep_gathered, options.overlap)
    arrival = way.start(own) if arrival is None else arrival.go_on()
    rows = gathered(own, travel, arrival)
    return rows, _travel.Comm(travel, (rows if options.keep_gathered else own).detach())


def _back(
    parts: Tensor, addend: Tensor | None, travel: Any, options: Options, may_overflow: bool,
    overflow: Tensor,
) -> Tensor:  # fmt: skip
    if addend is not None:
        addend = addend.to(parts.dtype)
    spoils = may_overflow and options.on_overflow == "nan"
    return returned(parts, addend, travel, overflow > 0 if spoils else None)


# ---------------------------------------------------------------- token rounding


def _rounded(
    x: Tensor,
    logits: Tensor,
    layer: _calls.Layer,
    addend: Tensor | None,
    team: Team,
    counter: tuple[Counter | None, Counter | None],
) -> tuple[Tensor, Aux, OfTeam]:
    """Compute `computed` with token rounding of all ranks' tokens.

    Each rank rounds all tokens in the same way, from the same logits. counter: seed and offset.
    """
    if team.counts is None:
        raise ValueError(
            "token rounding requires the tokens of each rank, but rank_tokens is only their maximum"
        )
    arrival = start(x, team)
    tokens, E_local = sum(team.counts), _calls.experts_in(layer.weights[0])
    options, E = layer.options, E_local * team.size
    of_all = team.gather(logits)
    if any(count != team.rows for count in team.counts):
        of_all = torch.cat([of_all[r * team.rows :][:c] for r, c in enumerate(team.counts)])
    routing, max_pairs, counts = route_rounded(of_all, options, *counter)
    capacity = capacity_of(options, max_pairs, team.size, min(max_pairs, tokens * E_local))
    offsets = offsets_of(routing, E)
    pairs = _own_pairs(routing, offsets, E, E_local, max_pairs, capacity, team)

    chosen, ids = top_k(logits, options.K, ids_dtype=torch.int64)
    score_of = logits.float().softmax(-1).scatter(-1, ids, chosen)  # (t, E)
    scores = scores_of_pairs(score_of, team, pairs.scores, pairs.tokens, pairs.experts, E_local)
    rows, comm = _rows(x, team, options, arrival)
    args = (pairs.tokens, pairs.experts, scores.detach(), team.tokens, E_local)
    routing_here = ops.call_undifferentiated(_ops.route_general.default, *args)
    rule = rule_of(GENERAL, 0, SCORES_GIVEN)
    here = pairs.tokens.shape[0]
    parts = _calls.of_routing(rows, scores, routing_here, layer, None, here, rule, comm)
    del rows
    of_ranks = offsets[::E_local].diff()  # pairs of each rank's experts
    overflow = (of_ranks - capacity).clamp(min=0).sum(dtype=torch.int32)
    out = _back(parts, addend, comm.travel, layer.options, capacity < max_pairs, overflow)
    aux = _aux_of_rounded(routing, offsets, ids, chosen, E, max_pairs, team, overflow)
    of_team = OfTeam(counts, torch.full((), tokens, dtype=torch.int32, device=x.device))
    return out, aux, of_team


class _Pairs(NamedTuple):
    """Pairs sorted by token; unused places are last and have token N."""

    tokens: Tensor  # (capacity) int32
    experts: Tensor  # (capacity) int32, experts of this rank
    scores: Tensor  # (capacity) float32


def _own_pairs(routing, offsets, E, E_local, rows, capacity, team):
    """Return the pairs of this rank's experts, from a rounded routing of all tokens."""
    sizes = (ROUNDED, sum(team.counts), E, rows)
    row_score, row_token = (array_of(name, routing, *sizes) for name in ("row_score", "row_token"))
    first = team.rank * E_local
    of_own = offsets[first : first + E_local + 1]
    row = of_own[0] + torch.arange(capacity, device=routing.device)
    there = row < of_own[-1]
    at = torch.where(there, row, 0)
    token, score = row_token[at], row_score[at].view(torch.float32)
    expert = torch.searchsorted(of_own.contiguous(), row, right=True) - 1
    if any(count != team.rows for count in team.counts):
        of_count = [torch.arange(c, device=routing.device) for c in team.counts]
        places = torch.cat([r * team.rows + of_count[r] for r in range(team.size)])
        token = places[token.long()].int()
    token = torch.where(there, token, team.tokens)
    token, order = token.sort(stable=True)
    expert = torch.where(there, expert, E_local).int()
    return _Pairs(token, expert[order], torch.where(there, score, 0.0)[order])


def _aux_of_rounded(routing, offsets, ids, scores, E, rows, team, overflow):
    """Return the Aux of this rank's tokens, which chose ids (t, K) with these scores."""
    row_token = array_of("row_token", routing, ROUNDED, sum(team.counts), E, rows)
    row = torch.arange(rows, device=routing.device)
    own_first = sum(team.counts[: team.rank])
    token = row_token.long() - own_first
    there = (row < offsets[E]) & (token >= 0) & (token < team.t)
    expert = torch.searchsorted(offsets.contiguous(), row, right=True) - 1
    kept = torch.zeros(team.t * E + 1, dtype=torch.bool, device=routing.device)
    kept = kept.scatter(0, torch.where(there, token * E + expert, team.t * E), True)
    kept = kept[:-1].view(team.t, E)
    chosen = torch.zeros_like(kept).scatter(-1, ids, True)
    count = lambda mask: mask.sum(dtype=torch.int32)
    return Aux(
        chosen.sum(0, dtype=torch.int32),
        count(chosen & ~kept),
        count(kept & ~chosen),
        torch.zeros_like(overflow),
        count(~kept.any(1)),
        overflow,
        ids.int(),
        scores.detach(),
    )
