"""Route tokens with functions of tensors: T tokens choose K of E experts.

All results are on the device, and no function waits for the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _checks, _library, ops
from ._autocast import autocast_dtype
from ._layout import array_of, counters_of, offsets_of, rounded_capacity
from ._shapes import shape_text
from ._signatures import Reader
from .options import LITERALS, ROUNDED, TOP_K, At, OfRounding, OfScores, OfTopK, Rounding

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ops = _library.operators

Counter = (
    int | Tensor
)  # seed and offset of stochastic rounding: int, or int64 tensor of one element


class Aux(NamedTuple):
    """Counts of a routing, on the device; the host waits only if it reads them.

    Attributes:
        expert_counts: int32, shape (E): how often each expert was chosen, before token rounding.
        dropped: int32, shape (): chosen pairs that token rounding removed.
        added: int32, shape (): pairs that token rounding added.
        skipped: int32, shape (): pairs with an id outside [0, E) or a token outside [0, T).
        without: int32, shape (): tokens without an expert.
        overflow: int32, shape (): pairs that exceeded the capacity; they are also counted in
            skipped.
        ids: int32, shape (..., K): chosen or given experts of each token, before token rounding and
            capacity; shape (pairs) for `moe_general`.
        scores: float32, shape (..., K): scores of ids, without gradient; shape (pairs) for
            `moe_general`.
    """

    expert_counts: Tensor
    dropped: Tensor
    added: Tensor
    skipped: Tensor
    without: Tensor
    overflow: Tensor
    ids: Tensor
    scores: Tensor


_top_k, _scores_at = Reader("top_k", OfTopK, "K"), Reader("scores_at", OfScores)
_rounded_router = Reader("rounded_router", OfRounding, "K", "rounding")


@_top_k.shows
def top_k(
    logits: Tensor,
    K: int,
    *,
    selection_bias: Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
    **options: Unpack[OfTopK],
) -> tuple[Tensor, Tensor]:
    """Choose the K experts of each token and compute their scores, in descending order.

    Ties go to the lower id; NaN ranks last.

    Args:
        logits: Logits of the router, float32, bfloat16 or float16, shape (..., E).
        K: Experts per token.
        selection_bias: Added to the sigmoid scores to choose experts, but not to the scores;
            float32, shape (E).
        ids_dtype: torch.int32 or torch.int64.
        **options: Options of the choice by name; see `tilemoe.options.Options`.

    Returns:
        Scores, float32, shape (..., K), differentiable in the logits, and ids, shape (..., K).

    Raises:
        ValueError: K is outside [1, E], or another argument is wrong; the message names the
            argument.

    Example:
        >>> scores, ids = tilemoe.top_k(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        >>> ids
        tensor([[1, 2]], dtype=torch.int32)

        Choose only from the better of two groups:

        >>> logits = torch.tensor([[3.0, -1.0, 2.0, 1.0]])
        >>> tilemoe.top_k(logits, 2, scoring="sigmoid", n_group=2)[1]
        tensor([[2, 3]], dtype=torch.int32)
    """
    _library.require_device(logits, "logits")
    rows = rows_of(logits, "logits", "(..., E)")
    chosen = _top_k({"K": K, **options})
    scores, ids, _ = choose(rows, chosen, selection_bias, ids_dtype)
    return shaped_like(scores, logits), shaped_like(ids, logits)


topk_router = top_k  # name up to version 0.2


def router_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute a router's logits x weight^T + bias in one order of the sum.

    The bits of a token's logits do not depend on the number of tokens, on the token's place among
    them or on the other tokens, so a rollout and training choose the same experts. The gradient of
    x has the same property; the gradients of weight and bias have the same bits in each run. The
    bits may differ between devices.

    Args:
        x: Tokens, shape (..., d), d a multiple of 8; float32, bfloat16 or float16 on the CPU,
            bfloat16 or float16 on a GPU.
        weight: Weight of the router in x's dtype or in float32, shape (E, d). On a GPU a float32
            weight requires x in bfloat16, and is computed as a sum of three bfloat16 terms, which
            have its 24 bits.
        bias: Added to the logits in float32 before they are rounded, shape (E).
        dtype: Dtype of the logits: torch.float32, torch.bfloat16 or torch.float16. None: x's dtype.
            Under autocast with None, x, weight and bias are cast, as in a linear layer.

    Returns:
        Logits, shape (..., E), differentiable in x, weight and bias.

    Raises:
        ValueError: A shape, a dtype or a device is wrong; the message names the argument.
        TypeError: An argument is not a tensor.
        NotImplementedError: No kernel supports the dtypes, for example float32 tokens on a GPU.

    Example:
        >>> x, weight = torch.randn(6, 16), torch.randn(4, 16)
        >>> logits = tilemoe.router_logits(x, weight)
        >>> torch.equal(tilemoe.router_logits(x[2:3], weight), logits[2:3])
        True
    """
    _library.require_device(x, "x")
    _library.require_weight(weight, "weight")
    _library.require_together(x, "x", weight=weight, bias=bias)
    rows = rows_of(x, "x", "(..., d)")
    cast = autocast_dtype(x.device) if dtype is None else None
    if cast is not None:
        rows, weight = rows.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    how = (rows, weight, bias, dtype or rows.dtype)
    return shaped_like(ops.call(_ops.router_logits.default, *how), x)


@_scores_at.shows
def scores_at(logits: Tensor, ids: Tensor, **options: Unpack[OfScores]) -> Tensor:
    """Compute the scores of given experts, for example those of a rollout, by a rule of `top_k`.

    If the ids are those that `top_k` chooses, in its order, the scores have the same bits. Pass the
    scores to `moe(x, scores, ..., ids=ids)`.

    Args:
        logits: Logits of the router, float32, bfloat16 or float16, shape (..., E).
        ids: Experts, int32 or int64, shape (..., K). An id outside [0, E) is absent: its score is
            0, and it is not part of a sum. An id that occurs twice counts twice.
        **options: Options of the scores by name; see `tilemoe.options.Options`.

    Returns:
        Scores, float32, shape (..., K), differentiable in the logits.

    Raises:
        ValueError: A shape, a dtype, a device or an option is wrong; the message names the
            argument.
        TypeError: An argument is not a tensor.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> tilemoe.scores_at(logits, torch.tensor([[2, 2, -1]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    chosen = _scores_at(options)  # type: ignore[arg-type]
    _library.require_device(logits, "logits")
    _library.require_together(logits, "logits", ids=ids)
    rows = rows_of(logits, "logits", "(..., E)")
    if ids.shape[:-1] != logits.shape[:-1] or ids.dim() == 0 or ids.shape[-1] < 1:
        leading = "".join(f"{size}, " for size in logits.shape[:-1])
        raise ValueError(
            f"ids has shape {shape_text(ids.shape)}, expected ({leading}K) with K >= 1 for "
            "these logits"
        )
    return shaped_like(scores_of(rows, rows_of(ids, "ids", "(..., K)"), chosen), logits)


@_rounded_router.shows
def rounded_router(
    logits: Tensor,
    K: int,
    *,
    rounding: Rounding,
    seed: Counter | None = None,
    offset: Counter | None = None,
    **options: Unpack[OfRounding],
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token with token rounding, as pairs for `moe_general`.

    `moe_general` computes from these pairs the same as `moe` with the same rounding options.

    Args:
        logits: Logits of the router, float32, bfloat16 or float16, shape (T, E).
        K: Experts per token, before rounding.
        rounding: As in `moe`.
        seed: As in `moe`.
        offset: As in `moe`.
        **options: Options of token rounding by name; see `tilemoe.options.Options`.

    Returns:
        Tokens, int32, shape (pairs) for the maximum number of pairs, sorted; experts, int32, shape
        (pairs); and scores, float32, shape (pairs), differentiable in the logits: the softmax over
        all experts. The score of a chosen pair is divided by the sum over the token's K chosen
        experts, including those that rounding removes. Unused pairs at the end have token T, expert
        E and score 0, and are skipped.

    Raises:
        ValueError: An argument is wrong; the message names the argument.
    """
    _library.require_device(logits, "logits")
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {shape_text(logits.shape)}, expected (T, E)")
    T, E = logits.shape
    how = _rounded_router({"K": K, "rounding": rounding, **options})
    routing, capacity, _ = route_rounded(logits, how, seed, offset)
    offsets = offsets_of(routing, E)
    sizes = (ROUNDED, T, E, capacity)
    row_token, pair_row = (array_of(name, routing, *sizes) for name in ("row_token", "pair_row"))
    pair = torch.arange(capacity, device=logits.device)
    there = pair < offsets[E]
    row = torch.where(there, pair_row, 0).long()
    tokens = torch.where(there, row_token[row], T)
    # Search all offsets, not those after the first: torch.compile (2.11) ignores a view's offset.
    expert = torch.searchsorted(offsets.contiguous(), row, right=True) - 1
    experts = torch.where(there, expert.to(torch.int32), E)
    chosen, ids = top_k(logits, K, ids_dtype=torch.int64)
    score_of = logits.float().softmax(-1).scatter(-1, ids, chosen)  # (T, E)
    # Unused pairs may have any place; each has its own, because gradients are added there.
    at = torch.where(there, tokens.long() * E + experts, pair)
    scores = torch.where(there, score_of.flatten().gather(0, at), 0.0)
    return tokens, experts, scores


def router_losses(
    logits: Tensor, expert_counts: Tensor, token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the router's losses: the load balance loss and the z loss.

    The balance loss is E * sum_e (c_e / sum(c)) * mean_t p(t, e), which is 1 if balanced (Switch
    Transformer, arXiv 2101.03961, equation 4), with c the expert_counts. The z loss is
    mean_t logsumexp(logits_t)^2 (ST-MoE, arXiv 2202.08906, equation 5).

    Args:
        logits: Logits of the router, shape (..., E).
        expert_counts: Tokens per expert, int32, shape (E), as in `Aux`.
        token_mask: bool, shape (...); a token with False, for example padding, is in neither mean
            and has no gradient, and expert_counts must not count it. None: every token counts.

    Returns:
        balance and z, float32 scalars, differentiable in the logits.

    Raises:
        ValueError: A shape or a dtype is wrong.
    """
    _library.require_device(logits, "logits")
    rows = rows_of(logits, "logits", "(..., E)")
    if token_mask is not None:
        check_token_mask(token_mask, logits, "logits")
        # The operator leaves a token with a NaN logit out of its means; it has no gradient.
        rows = rows.masked_fill(~token_mask.reshape(-1, 1), torch.nan)
    # Copies, not views: FSDP-2 warns if a module's outputs are views with a gradient.
    losses = ops.call(_ops.router_losses.default, rows, expert_counts)
    balance, z = torch.ops.aten.unbind_copy.int(losses)
    return balance, z


# ---------------------------------------------------------------- for functional.py


def check_token_mask(mask, tokens, name):
    _library.require_together(tokens, name, token_mask=mask)
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:-1]:
        seen, expected = shape_text(mask.shape), shape_text(tokens.shape[:-1])
        raise ValueError(
            f"token_mask is {mask.dtype} {seen}, expected torch.bool {expected}, one value "
            f"per token of {name}"
        )


def rows_of(tensor, name, expected):
    """Return (..., width) as (rows, width)."""
    dims = tensor.dim()
    if dims == 2:
        return tensor
    if dims == 0:
        raise ValueError(f"{name} has shape (), expected {expected}")
    return tensor.reshape(-1, tensor.shape[-1])


def shaped_like(rows, like):
    """Return rows (rows, width), to which the caller has the only reference, as (..., width).

    Rows that have as many dimensions as `like` are returned unchanged. A view without effect would
    be a node of the graph, and FSDP-2 warns if a module returns a view of autograd.
    """
    if like.dim() == rows.dim():
        return rows
    return torch.ops.aten._unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))


def choose(logits, options, selection_bias, ids_dtype=torch.int32):
    """Choose by the options: logits (T, E) -> scores (T, K), ids (T, K), counts (E)."""
    _checks.groups(options, logits.shape[1], options.K)
    factor = options.routed_scaling_factor
    args = (logits, selection_bias, options.rule, factor, ids_dtype)
    return ops.call(_ops.top_k.default, *args)


def scores_of(logits, ids, options):
    """Compute scores (T, K) from logits (T, E) and ids (T, K)."""
    args = (logits, ids, options.rule[At.SCORING], options.routed_scaling_factor)
    return ops.call(_ops.scores_at.default, *args)


def route_rounded(logits, options, seed, offset):
    """Return the rounded routing of logits (T, E), its maximum rows, the unrounded counts (E)."""
    rounding, m, tokens = options.rounding, options.m, options.rounding_tokens
    number = _checks.number("rounding", LITERALS["rounding"], rounding)
    if (rounding == "stochastic") != (seed is not None and offset is not None):
        if rounding == "stochastic":
            raise ValueError("seed and offset are required with rounding='stochastic'")
        raise ValueError(
            f"seed and offset require rounding='stochastic', got rounding={rounding!r}"
        )
    seed, offset = (_counter(value, logits.device) for value in (seed, offset))
    (T, E), K = logits.shape, options.K
    if tokens is not None and (tokens < 1 and T > 0 or T % max(tokens, 1)):
        raise ValueError(f"rounding_tokens must divide T = {T}, got {tokens}")
    tokens = 0 if tokens is None or tokens >= T else tokens
    args = (logits.detach(), seed, offset, K, m, number, tokens)
    routing, counts = ops.call_undifferentiated(_ops.route_rounded.default, *args)
    return routing, rounded_capacity(T, E, K, m, rounding, tokens), counts


def choose_as_rounding(logits, options):
    """Return ids and scores (T, K) before rounding, from logits (T, E), without gradient."""
    scores, ids = top_k(logits.detach(), options.K)
    return ids, scores


def _counter(value, device):
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.reshape(1)
    return torch.full((1,), value, dtype=torch.int64, device=device)


def narrowed_to_experts(ids: Tensor, scores: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Return ids and scores (N, K), or (N, E) with a place per expert if K is larger than E.

    An expert that a token has twice gets the sum of both scores.
    """
    if ids.shape[1] <= E:
        return ids, scores
    experts = torch.arange(E, dtype=ids.dtype, device=ids.device)
    same = ids.unsqueeze(1) == experts.unsqueeze(-1)  # (N, E, K)
    narrow = torch.where(same, scores.unsqueeze(1), 0.0).sum(-1)
    return torch.where(same.any(-1), experts, -1), narrow


def counts_of_ids(ids, E):
    """Count how often each expert is among ids (T, K) -> int32 (E)."""
    there = torch.where((ids >= 0) & (ids < E), ids, E).flatten().long()
    counts = torch.zeros(E + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add(0, there, torch.ones_like(there, dtype=torch.int32))[:E]


def int32_ids(ids):
    """Return given ids in int32. An id outside int32 stays outside [0, E)."""
    if ids.dtype == torch.int32:
        return ids
    return ids.clamp(-1, torch.iinfo(torch.int32).max).int()


def given_choice(ids, scores):
    """Return the ids and scores of an Aux for a choice by the caller."""
    return int32_ids(ids.detach()), scores.detach().float()


def aux_of_pairs(routing, E, T, capacity, choice, counts=None):
    """Return the Aux of a routing of given pairs.

    choice: their ids and scores; counts: (E), if some pairs may have no row.
    """
    offsets, counters = offsets_of(routing, E), counters_of(routing)
    row_token = array_of("row_token", routing, TOP_K, T, E, capacity)  # as in a general routing
    there = torch.arange(capacity, device=routing.device) < offsets[E]
    seen = torch.zeros(T + 1, dtype=torch.bool, device=routing.device)
    seen = seen.scatter(0, torch.where(there, row_token, T).long(), True)[:T]
    without = T - seen.sum(dtype=torch.int32)
    none = torch.zeros_like(without)
    counts = offsets.diff() if counts is None else counts
    skipped, overflow = counters[0] + counters[1], counters[0].clone()
    return Aux(counts, none, none, skipped, without, overflow, *choice)
