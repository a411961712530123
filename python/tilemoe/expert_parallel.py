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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _library, _renamed, functional
from .distributed import layer as spread
from .distributed.cost import Chunks, Dispatch, Memory, Places, plan
from .distributed.team import RankTokens
from .functional import Activation, GateLayout
from .routing import (
    Counter,
    GroupScore,
    OnOverflow,
    Rounding,
    Scoring,
    rows_of,
    shaped_like,
)

__all__ = ["Memory", "clip_grad_norm_", "moe", "plan"]


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
    team = spread.team_of(group, rows, places, rank_tokens, sizes, rounds)
    if addend is not None:
        addend = functional._shaped_as(addend, rows)
    arrival = None if rounds else spread.start(rows, team)
    if ids is not None:
        ids = rows_of(ids, "ids", "(..., K)")
        functional._check_shape("ids", ids, team.t, router.shape[1])
        chosen = spread.given(router, ids, E)
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
            out, aux, _ = spread.rounded(rows, router, E_local, layer, addend, team, places, K, args)
            out = shaped_like(out, x)
            return (out, aux) if return_aux else out
        chosen = spread.choose(router, K, **choice)
    out, aux, _ = spread.routed(rows, chosen, E_local, layer, addend, team, places, arrival)
    out = shaped_like(out, x)
    return (out, aux) if return_aux else out


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
