"""The layer with its experts spread over ranks: each rank has its own tokens and E / ranks experts.

A token's row goes once to every rank, whatever the number of its experts there ("all_gather"), or
only to the ranks that have an expert of the token ("pull"). A rank's experts gather from these rows
as from the rank's own rows, combine adds a token's results on this rank, and the sum goes back to
the token's rank, which adds the ranks' sums in float32. No rank sorts or copies rows by expert,
shapes do not depend on the routing, and the host never waits.

`tilemoe.MoE(expert_mesh=)` is the module. Start the processes and make the process group of
torch.distributed first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _library, _renamed, _rules, _travel, functional, ops
from ._autocast import autocast_dtype
from ._expert_cost import Way
from ._expert_plan import Chunks, Dispatch, Memory, Places, plan
from ._pull import Pull
from ._team import (
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
from .functional import Activation, GateLayout
from .routing import (
    Aux,
    Counter,
    GroupScore,
    OnOverflow,
    Rounding,
    Scoring,
    narrowed_to_experts,
    counts_of_ids,
    route_rounded,
    rows_of,
    shaped_like,
    top_k,
)

__all__ = ["Memory", "clip_grad_norm_", "moe", "plan"]

_ops = _library.operators


@_renamed.option(beside="overlap")
def moe(
    x: Tensor,
    logits_or_scores: Tensor,
    W1: Tensor,
    W2: Tensor,
    *,
    group: dist.ProcessGroup,
    K: int | None = None,
    ids: Tensor | None = None,
    W1_up: Tensor | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "swiglu",
    gate_layout: GateLayout = "concatenated",
    clamp: float = 0.0,
    alpha: float = 0.0,
    up_shift: float = 0.0,
    scoring: Scoring = "softmax_over_chosen",
    selection_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: GroupScore | None = None,
    routed_scaling_factor: float = 1.0,
    rounding: Rounding | None = None,
    m: int = 128,
    rounding_tokens: int | None = None,
    seed: Counter | None = None,
    offset: Counter | None = None,
    capacity_factor: float | None = None,
    on_overflow: OnOverflow = "nan",
    keep_gathered: bool = False,
    overlap: bool = True,
    chunks: Chunks = 1,
    dispatch: Dispatch = "all_gather",
    rank_tokens: RankTokens = None,
    addend: Tensor | None = None,
    overwrite_H: bool | None = None,
    column_blocks: int = 1,
    return_aux: bool = False,
) -> Any:
    """Compute `tilemoe.moe` with experts that are spread over ranks. Every rank of the group calls
    this function.

    Args:
        x: this rank's tokens; logits_or_scores, ids, addend: those of these tokens.
        W1, W2, W1_up, b1, b1_up, b2: this rank's experts: of E, those from rank * E / ranks on.
        group: the process group of torch.distributed.
        K, ids, scoring, selection_bias, n_group, topk_group, group_score, routed_scaling_factor: as
            in `moe`; ids number all E experts, and a pair with an id outside [0, E) is skipped.
        rounding, m, rounding_tokens, seed, offset: as in `moe`, over the tokens of all ranks, in
            the order of the ranks. seed and offset are the same on every rank.
        capacity_factor: None: a rank has memory for every pair that its experts can receive, so no
            routing loses one. A number saves memory: the capacity is this factor times the mean,
            which is T * K pairs if every rank has T tokens. One rank has T * K.
        on_overflow: if a rank's experts receive more pairs than its capacity, which only a
            capacity_factor allows: "nan", the outputs of all ranks are NaN; "drop", the pairs past
            the capacity are left out, the last tokens' of the highest experts.
        keep_gathered: keep all ranks' rows for backward, which otherwise gathers them again.
        overlap: in backward, gather X while the GEMMs run, and send dX back while dW1's run. False:
            all steps run one after another. The bits are the same. Older name: `beside=`.
        chunks: number of collectives in which X travels, each overlapped with the GEMMs of the
            chunk before, and O likewise; in backward dO, while `overlap` applies to X and dX. 1:
            one collective for each. O, dX and the gradients of logits and scores have the same
            bits; the weights' gradients are sums in another order of the tokens, which is also that
            of `on_overflow`. "auto": chosen by a model of the time, from the sizes alone. With
            rounding and with "pull" it is 1.
        dispatch: "all_gather": every token's row goes to every rank; "pull": each rank reads the
            rows of the tokens with an expert there, from symmetric memory, which GPUs of one host
            have (on the CPU they are sent); "auto": chosen by the model, and all_gather if the
            processes are not all on one host. All outputs and gradients have the same bits. With
            rounding it is "all_gather".
        rank_tokens: None: every rank has as many tokens as this one, which is not checked; or the
            tokens of each rank; or the maximum over the ranks, the same number on all of them.
        activation, gate_layout, clamp, alpha, up_shift, overwrite_H, column_blocks: as in `moe`.
        return_aux: also return the counts of the routing.

    Shape:
        x (..., d); logits (..., E), or ids and scores (..., K); weights as in `moe`, of E / ranks
        experts.

    Returns:
        O, of x's shape and dtype; with `return_aux` O and an `Aux`, of this rank's tokens but for
        `overflow`, which counts the pairs of all ranks.

    Gradients of x, logits and scores are those of the sum of the ranks' objectives, and so are the
    weights': if the loss is averaged over the ranks, scale the weights' gradients by 1 / ranks.

    Raises:
        ValueError: an argument does not fit; the other ranks then wait for this one.
    """
    layer = functional._layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, None, False,
    )  # fmt: skip
    places = Places(capacity_factor, on_overflow, keep_gathered, overlap, chunks, dispatch)
    places.check()
    _library.require_device(x, "x")
    rows = rows_of(x, "x", "(..., d)")
    router = rows_of(logits_or_scores, "logits" if ids is None else "scores", "(..., E or K)")
    if ids is None and K is None:
        raise ValueError(functional._NO_K)
    rounds = rounding is not None and ids is None
    E_local, E = W1.shape[0], W1.shape[0] * dist.get_world_size(group)
    sizes = W2.shape[1], W2.shape[2], E, K if ids is None else router.shape[1]
    team = team_of(group, rows, places, rank_tokens, sizes, rounds)
    if addend is not None:
        addend = functional._shaped_as(addend, rows)
    arrival = None if rounds else start(rows, team)
    if ids is not None:
        ids = rows_of(ids, "ids", "(..., K)")
        functional._check_shape("ids", ids, team.t, router.shape[1])
        chosen = _Chosen(router, ids, counts_of_ids(ids, E), False)
    else:
        functional._check_shape("logits", router, team.t, E)
        choice = dict(
            scoring=scoring, selection_bias=selection_bias, n_group=n_group,
            topk_group=topk_group, group_score=group_score,
            routed_scaling_factor=routed_scaling_factor,
        )  # fmt: skip
        if rounding is not None:
            functional._check_rounded(rounding, **choice)
            args = (rounding, m, rounding_tokens, seed, offset)
            out, aux, _ = rounded(rows, router, E_local, layer, addend, team, places, K, args)
            out = shaped_like(out, x)
            return (out, aux) if return_aux else out
        chosen = choose(router, K, **choice)
    out, aux, _ = routed(rows, chosen, E_local, layer, addend, team, places, arrival)
    out = shaped_like(out, x)
    return (out, aux) if return_aux else out


def team_of(
    group: dist.ProcessGroup, x: Tensor, places: Places, rank_tokens: RankTokens,
    sizes: tuple[int, int, int, int], rounds: bool,
) -> Team:  # fmt: skip
    """The team of a call with x (t, d), in a layer of these d, n, E and K."""
    way = Way(1, False)
    if not rounds:
        T = max_tokens(x.shape[0], rank_tokens)
        way = places.way_of(T, *sizes, dist.get_world_size(group), x.dtype)
    return Team(group, x.shape[0], rank_tokens, *way)


class _Chosen(NamedTuple):
    """The experts of this rank's tokens."""

    scores: Tensor  # (t, K)
    ids: Tensor  # (t, K)
    counts: Tensor  # (E) int32
    distinct: bool  # no expert twice for a token


def choose(logits: Tensor, K: int, *, scoring, selection_bias, n_group, topk_group, group_score,
           routed_scaling_factor) -> _Chosen:  # fmt: skip
    """logits (t, E) -> each token's K experts."""
    rule = _rules.rule(logits.shape[1], K, scoring, n_group, topk_group, group_score)
    if routed_scaling_factor != 1.0:
        _rules.check_factor(routed_scaling_factor)
    args = (logits, selection_bias, rule, routed_scaling_factor, torch.int32)
    return _Chosen(*ops.call(_ops.top_k.default, *args), True)


def given(scores: Tensor, ids: Tensor, E: int) -> _Chosen:
    """Experts that were chosen elsewhere."""
    return _Chosen(scores, ids, counts_of_ids(ids, E), False)


def start(x: Tensor, team: Team) -> Arrival | None:
    """Sends the first chunk of x (t, d) to every rank, in autocast's dtype, before the experts are
    chosen. None with "pull", in which the chosen experts determine the rows to send."""
    if team.pulls:
        return None
    return Arrival(team, x.detach().to(autocast_dtype(x.device) or x.dtype), 0)


class OfTeam(NamedTuple):
    """The choice of all ranks' tokens."""

    counts: Tensor  # (E) int32, before rounding
    tokens: Tensor  # () int32


def routed(
    x: Tensor,
    chosen: _Chosen,
    E_local: int,
    layer: functional._Layer,
    addend: Tensor | None,
    team: Team,
    places: Places,
    arrival: Arrival | None,
) -> tuple[Tensor, Aux, OfTeam]:
    """x (t, d) -> O (t, d), its Aux, and what all ranks chose."""
    K, E = chosen.ids.shape[1], E_local * team.size
    ids, scores, counts, tokens = _gather_choice(chosen, team)
    first = team.rank * E_local
    max_pairs = team.tokens * (min(K, E_local) if chosen.distinct else K)
    capacity = places.capacity(team.tokens * K, team.size, max_pairs)

    # Pairs of each rank's experts.
    of_ranks = counts.view(team.size, team.size, E_local).sum((0, 2))
    overflow = (of_ranks - capacity).clamp(min=0).sum(dtype=torch.int32)
    pull = None
    if team.pulls:
        pull = Pull(ids, E_local, capacity, team)
        ids, scores = pull.ids_of_rows(ids), pull.scores_of_rows(scores)
    rows, comm = _rows(x, team, places, arrival, pull)
    own_ids = ids - first
    own_ids, scores = narrowed_to_experts(own_ids, scores, E_local)
    places_here = max(min(capacity, own_ids.numel()), 1)
    parts, _ = functional._of_ids(
        rows, scores, own_ids, E_local, layer, None, places_here, "drop", False, comm,
        team.token_cuts if team.chunks > 1 else None,
    )  # fmt: skip
    del rows  # before as many rows of results are allocated
    out = _back(parts, addend, comm.travel, places, capacity < max_pairs, overflow)
    here = (chosen.ids >= 0) & (chosen.ids < E)
    none = torch.zeros_like(overflow)
    aux = Aux(
        chosen.counts,
        none,
        none,
        (~here).sum(dtype=torch.int32),
        (~here.any(1)).sum(dtype=torch.int32),
        overflow,
    )
    return out, aux, OfTeam(counts.sum(0, dtype=torch.int32), tokens)


def _gather_choice(chosen: _Chosen, team: Team) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids (N, K), scores (N, K) float32 with their gradient, counts (ranks, E) and tokens () of all
    ranks, in one collective. Empty rows have id -1."""
    K, size = chosen.ids.shape[1], team.rows * chosen.ids.shape[1]
    own_scores = chosen.scores.float()
    own = chosen.ids.new_empty(2 * size + chosen.counts.shape[0] + 1, dtype=torch.int32)
    pairs, used = own[: 2 * size].view(2, team.rows, K), team.t
    # int64 ids outside int32 would become others: all outside are -1.
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
    x: Tensor, team: Team, places: Places, arrival: Arrival | None, pull: Pull | None = None
) -> tuple[Tensor, _travel.Comm]:
    """All ranks' rows (N, d), or a Pull's (C, d); and the communication that gets them again in
    backward and sends their gradient back."""
    own = x.to(autocast_dtype(x.device) or x.dtype)
    way = team if pull is None else pull
    travel = Travel(way, places.keep_gathered, places.overlap)
    arrival = way.start(own) if arrival is None else arrival.go_on()
    rows = gathered(own, travel, arrival)
    return rows, _travel.Comm(travel, (rows if places.keep_gathered else own).detach())


def _back(
    parts: Tensor, addend: Tensor | None, travel: Any, places: Places, may_overflow: bool,
    overflow: Tensor,
) -> Tensor:  # fmt: skip
    if addend is not None:
        addend = addend.to(parts.dtype)
    spoils = may_overflow and places.on_overflow == "nan"
    return returned(parts, addend, travel, overflow > 0 if spoils else None)


# ---------------------------------------------------------------- token rounding


def rounded(
    x: Tensor,
    logits: Tensor,
    E_local: int,
    layer: functional._Layer,
    addend: Tensor | None,
    team: Team,
    places: Places,
    K: int,
    how: tuple[Any, ...],
) -> tuple[Tensor, Aux, OfTeam]:
    """The same under token rounding, of all ranks' tokens: each rank rounds all of them alike, from
    the same logits. how: rounding, m, rounding_tokens, seed, offset."""
    if team.counts is None:
        raise ValueError(
            "tilemoe: rounding needs the tokens of each rank, but rank_tokens is only their maximum"
        )
    arrival = start(x, team)
    tokens, E = sum(team.counts), E_local * team.size
    of_all = team.gather(logits)
    if any(count != team.rows for count in team.counts):
        of_all = torch.cat([of_all[r * team.rows :][:c] for r, c in enumerate(team.counts)])
    rounding, m, size = how[:3]
    routing, max_pairs, counts = route_rounded(of_all, K, *how)
    capacity = places.capacity(max_pairs, team.size, min(max_pairs, tokens * E_local))
    offsets = _rules.offsets_of(routing, E)
    pairs = _own_pairs(routing, offsets, E, E_local, max_pairs, capacity, team)

    chosen, ids = top_k(logits, K, ids_dtype=torch.int64)
    score_of = logits.float().softmax(-1).scatter(-1, ids, chosen)  # (t, E)
    scores = scores_of_pairs(score_of, team, pairs.scores, pairs.tokens, pairs.experts, E_local)
    rows, comm = _rows(x, team, places, arrival)
    args = (pairs.tokens, pairs.experts, scores.detach(), team.tokens, E_local)
    routing_here = ops.call_undifferentiated(_ops.route_general.default, *args)
    rule = _rules.rule_of(_rules.GENERAL, 0, _rules.SCORES_GIVEN)
    parts = functional._run(
        _ops.experts.default, rows, scores, routing_here, layer, None, (pairs.tokens.shape[0],),
        rule, comm=comm,
    )  # fmt: skip
    del rows
    of_ranks = offsets[:: E_local].diff()  # pairs of each rank's experts
    overflow = (of_ranks - capacity).clamp(min=0).sum(dtype=torch.int32)
    out = _back(parts, addend, comm.travel, places, capacity < max_pairs, overflow)
    aux = _aux_of_rounded(routing, offsets, ids, E, max_pairs, team, overflow)
    of_team = OfTeam(counts, torch.full((), tokens, dtype=torch.int32, device=x.device))
    return out, aux, of_team


class _Pairs(NamedTuple):
    """Sorted by token, places that are not in use last, with token N."""

    tokens: Tensor  # (capacity) int32
    experts: Tensor  # (capacity) int32, of this rank's
    scores: Tensor  # (capacity) float32


def _own_pairs(routing, offsets, E, E_local, rows, capacity, team):
    """The pairs of this rank's experts, from a rounded routing of all tokens with `rows` rows."""
    row_score, row_token, *_ = _rules.row_arrays_of(routing, E, rows)
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


def _aux_of_rounded(routing, offsets, ids, E, rows, team, overflow):
    """The Aux of this rank's tokens, which chose ids (t, K)."""
    _, row_token, *_ = _rules.row_arrays_of(routing, E, rows)
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
    )


# ---------------------------------------------------------------- training


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip the norm of gradients, as torch.nn.utils.clip_grad_norm_ does, for parameters on several
    meshes: experts on one, everything else on another.

    Every rank calls it. A gradient that is no DTensor counts as the same on all ranks.

    Args:
        parameters: whose gradients are scaled in place.
        max_norm: upper bound of the norm of all gradients together.
        norm_type: 2, or another number, or inf.

    Returns:
        The norm of all gradients before, the same on every rank.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            key = getattr(parameter.grad, "device_mesh", None)
            by_mesh.setdefault(key, []).append(parameter)
    norms = []
    for of_mesh in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in of_mesh if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, max_norm, total)
    return total
