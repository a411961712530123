"""The layer as functions of tensors. Letters: T tokens of width d, E experts of width n, K experts
per token; W1 (E, 2n, d), or (E, n, d) if it is split or the activation has no gate; W2 (E, d, n).

Either of a weight's last two dimensions may be contiguous: pass a checkpoint's transposed tensor as
its `transpose(1, 2)`; nothing is copied. Under autocast x, the weights and the biases are cast, as
in a linear layer; logits and scores are not cast, since routing computes in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from . import _checks, _library, ops
from ._calls import (
    Layer,
    WeightGradients,
    aux_of_top_k,
    choice_of,
    experts_in,
    of_routing,
    require_weights,
    routed,
    shaped_as,
)
from ._layout import rule_of
from ._quantized import Weight
from ._shapes import shape_text
from ._signatures import Reader
from .lora import LoRA
from .options import GENERAL, GROUPED, SCORES_GIVEN, OfMoe, OfRows, Options
from .routing import Aux, Counter, aux_of_pairs, given_choice, rows_of, shaped_like

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ops = _library.operators
_moe, _moe_general = Reader("moe", OfMoe), Reader("moe_general", OfRows)
_grouped_experts = Reader("grouped_experts", OfRows)


class _Tensors(TypedDict, total=False):
    """The keywords that every function has, in addition to its options."""

    W1_up: Weight | None
    b1: Tensor | None
    b1_up: Tensor | None
    b2: Tensor | None
    addend: Tensor | None
    weight_grad_out: WeightGradients | None
    lora: LoRA | None


class _OfPairs(OfRows, _Tensors, total=False):
    """The keywords of `moe_general` without return_aux."""


class _Routed(OfMoe, _Tensors, total=False):
    """The keywords of `moe` without return_aux."""

    ids: Tensor | None
    selection_bias: Tensor | None
    seed: Counter | None
    offset: Counter | None


@overload
def moe(x: Tensor, logits_or_scores: Tensor, W1: Weight, W2: Weight, *,
        return_aux: Literal[False] = False, **options: Unpack[_Routed]) -> Tensor: ...  # fmt: skip
@overload
def moe(x: Tensor, logits_or_scores: Tensor, W1: Weight, W2: Weight, *, return_aux: Literal[True],
        **options: Unpack[_Routed]) -> tuple[Tensor, Aux]: ...  # fmt: skip
@overload
def moe(x: Tensor, logits_or_scores: Tensor, W1: Weight, W2: Weight, *, return_aux: bool,
        **options: Unpack[_Routed]) -> Tensor | tuple[Tensor, Aux]: ...  # fmt: skip
@_moe.shows
def moe(
    x: Tensor,
    logits_or_scores: Tensor,
    W1: Weight,
    W2: Weight,
    *,
    ids: Tensor | None = None,
    W1_up: Weight | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    selection_bias: Tensor | None = None,
    seed: Counter | None = None,
    offset: Counter | None = None,
    addend: Tensor | None = None,
    weight_grad_out: WeightGradients | None = None,
    lora: LoRA | None = None,
    return_aux: bool = False,
    **options: Unpack[OfMoe],
) -> Tensor | tuple[Tensor, Aux]:
    """Compute the routed layer: O_t = addend_t + sum over the token's K experts of s * expert(x_t).

    With `K`, each token's experts are chosen from the router's logits. With `ids`, the experts are
    given, and the second argument is their scores.

    Args:
        x: the tokens; float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on a GPU.
        logits_or_scores: with `K` the router's logits, with `ids` the scores of the chosen experts.
            The gradient goes to this tensor. float32, bfloat16 or float16.
        W1: the experts' first weights, gate and up rows. See `gate_layout`.
        W2: the experts' second weights. W1 and W2 may each be a `QuantizedExperts`, which is
            dequantised in forward and again in backward, and has no gradient.
        ids: the experts of each token, int32 or int64; one outside [0, E) is skipped.
        W1_up, b1_up: the up rows and their biases, if `gate_layout` is "split".
        b1, b2: biases of the first and the second GEMM.
        selection_bias: added to the sigmoid scores to choose experts, not to the scores themselves.
        seed, offset: for "stochastic": ints, or int64 tensors of one element on x's device.
        addend: added to the output in float32 before rounding, a residual for instance.
        weight_grad_out: memory into which backward writes the weights' gradients, or adds them
            if `accumulate`; the weights' `.grad` is not changed. A walk of the graph writes it if
            the engine runs the edge to that weight: autograd.grad(out, x) does not. Under
            torch.compile and compiled autograd every walk writes.
        lora: low-rank adapters of the weights. They are packed once in a call, for forward and
            backward. Weights that require no gradient have none computed. Neither adapters nor
            quantised weights go together with weight_grad_out.
        return_aux: also return the counts of the routing, and each token's ids and scores.

    Shape:
        x (..., d); logits (..., E), or ids and scores (..., K); W1 (E, 2n, d), or (E, n, d) if it
        is split or the activation has no gate; W2 (E, d, n); biases b1 (E, 2n) or (E, n), one for
        each row of W1, b2 (E, d); selection_bias (E) float32; addend and the output as x. d and n
        are multiples of 8. Either of a weight's last two dimensions may be contiguous.

    Returns:
        O, of x's shape and dtype; with `return_aux` O and an `Aux`.

    Raises:
        ValueError: a shape, a dtype, a device or an option does not fit; it names the argument.
        TypeError: an argument is no tensor.
        NotImplementedError: no kernel supports the dtype, float32 on a GPU for instance, or the
            layout of a tensor: nested, sparse, quantized, packed.
        torch.OutOfMemoryError: too little memory for the output, H or the workspace.

    Example:
        >>> x, logits = torch.randn(6, 16), torch.randn(6, 4)
        >>> W1, W2 = torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> tilemoe.moe(x, logits, W1, W2, K=2).shape
        torch.Size([6, 16])
    """
    chosen = _moe(options)  # type: ignore[arg-type]
    if ids is not None:
        if chosen.rounding is not None or selection_bias is not None:
            raise ValueError(
                "tilemoe: rounding and selection_bias choose from logits, but ids are given"
            )
        _checks.plain_choice(chosen, "{name} is {value}, but ids are given, with their scores")
    layer = Layer([W1, W1_up, W2, b1, b1_up, b2], chosen, weight_grad_out, lora)
    return routed(
        x, logits_or_scores, layer, ids=ids, selection_bias=selection_bias, seed=seed,
        offset=offset, addend=addend, return_aux=return_aux,
    )  # fmt: skip


@overload
def moe_general(x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, W1: Weight, W2: Weight,
                *, return_aux: Literal[False] = False,
                **options: Unpack[_OfPairs]) -> Tensor: ...  # fmt: skip
@overload
def moe_general(x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, W1: Weight, W2: Weight,
                *, return_aux: Literal[True],
                **options: Unpack[_OfPairs]) -> tuple[Tensor, Aux]: ...  # fmt: skip
@overload
def moe_general(x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, W1: Weight, W2: Weight,
                *, return_aux: bool,
                **options: Unpack[_OfPairs]) -> Tensor | tuple[Tensor, Aux]: ...  # fmt: skip
@_moe_general.shows
def moe_general(
    x: Tensor,
    tokens: Tensor,
    experts: Tensor,
    scores: Tensor,
    W1: Weight,
    W2: Weight,
    *,
    W1_up: Weight | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    addend: Tensor | None = None,
    weight_grad_out: WeightGradients | None = None,
    lora: LoRA | None = None,
    return_aux: bool = False,
    **options: Unpack[OfRows],
) -> Tensor | tuple[Tensor, Aux]:
    """Compute the routed layer of (token, expert, score), with any number of experts per token.

    Args:
        x: the tokens.
        tokens, experts: the token and the expert of each pair, int32 or int64, sorted by token. A
            pair is skipped if its expert is outside [0, E), or if its token is outside [0, T) or
            smaller than one before it.
        scores: the factor of each pair's result; the gradient goes to them.
        W1, W2, W1_up, b1, b1_up, b2, addend, weight_grad_out, lora, return_aux: as in `moe`.

    Shape:
        x (T, d); tokens, experts and scores (pairs); weights, addend and the output as in `moe`.

    Returns:
        O (T, d), of x's dtype; with `return_aux` O and an `Aux`.

    Raises:
        As `moe`.

    Example:
        >>> x, W1, W2 = torch.randn(3, 16), torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> tokens, experts = torch.tensor([0, 0, 2]), torch.tensor([1, 3, 0])
        >>> tilemoe.moe_general(x, tokens, experts, torch.ones(3), W1, W2)[1].count_nonzero()
        tensor(0)
    """
    chosen = _moe_general(options)  # type: ignore[arg-type]
    layer = Layer([W1, W1_up, W2, b1, b1_up, b2], chosen, weight_grad_out, lora)
    _library.require_device(x, "x")
    _library.require_together(x, "x", tokens=tokens, experts=experts, scores=scores)
    rows = rows_of(x, "x", "(T, d)")
    if addend is not None:
        addend = shaped_as(addend, rows)
    T, E = rows.shape[0], experts_in(W1)
    routing = ops.call_undifferentiated(
        _ops.route_general.default, tokens, experts, scores.detach(), T, E
    )
    pairs, rule = tokens.shape[0], rule_of(GENERAL, 0, SCORES_GIVEN)
    out = shaped_like(of_routing(rows, scores, routing, layer, addend, pairs, rule), x)
    if not return_aux:
        return out
    return out, aux_of_pairs(routing, E, T, pairs, given_choice(experts, scores))


@_grouped_experts.shows
def grouped_experts(
    rows: Tensor,
    counts: Tensor,
    W1: Weight,
    W2: Weight,
    *,
    row_scores: Tensor | None = None,
    W1_up: Weight | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    addend: Tensor | None = None,
    weight_grad_out: WeightGradients | None = None,
    lora: LoRA | None = None,
    **options: Unpack[OfRows],
) -> Tensor:
    """Compute the experts alone, over rows that are already sorted by expert.

    Args:
        rows: the first counts[0] of them go through expert 0, the next counts[1] through expert 1,
            and so on. Those past the sum of the counts are not read: they are zero in the output
            and in the gradient.
        counts: rows of each expert, int32 or int64, at least 0, with a sum of at most R. On the CPU
            other counts are a ValueError. On a GPU the host does not read them: a negative count
            counts as 0, and experts get no rows past R.
        row_scores: the factor of each row's result; the gradient goes to them. None: 1.
        W1, W2, W1_up, b1, b1_up, b2, addend, weight_grad_out, lora: as in `moe`.

    Shape:
        rows (R, d); counts (E); row_scores (R); weights, addend and the output as in `moe`.

    Returns:
        Rows (R, d), of the given rows' dtype.

    Raises:
        As `moe`.

    Example:
        >>> rows, counts = torch.randn(5, 16), torch.tensor([2, 0, 3, 0])
        >>> W1, W2 = torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> tilemoe.grouped_experts(rows, counts, W1, W2).shape
        torch.Size([5, 16])
    """
    chosen = _grouped_experts(options)  # type: ignore[arg-type]
    layer = Layer([W1, W1_up, W2, b1, b1_up, b2], chosen, weight_grad_out, lora)
    _library.require_device(rows, "rows")
    _library.require_together(rows, "rows", counts=counts, row_scores=row_scores)
    if rows.dim() != 2:
        raise ValueError(f"tilemoe: rows has shape {shape_text(rows.shape)}, expected (R, d)")
    if row_scores is not None:
        row_scores = row_scores.float()
    R, detached = rows.shape[0], row_scores.detach() if row_scores is not None else None
    routing = ops.call_undifferentiated(_ops.route_grouped.default, counts, detached, R)
    rule = rule_of(GROUPED, 0, SCORES_GIVEN)
    return of_routing(rows, row_scores, routing, layer, addend, R, rule)


# ---------------------------------------------------------------- decode

_MAX_T, _MAX_E, _MAX_K, _MAX_D = 64, 512, 32, 65536  # TILEMOE_ROUTE_TOKENS_MOST_


class Gate(NamedTuple):
    """A router whose GEMM `moe_tokens` computes, for a small T."""

    weight: Tensor  # (E, d)
    bias: Tensor | None  # (E)
    logits_dtype: torch.dtype

    def takes(self, T: int, K: int) -> bool:
        """Whether `moe_tokens` supports T tokens and these sizes."""
        E, d = self.weight.shape
        return T <= _MAX_T and K <= _MAX_K and E <= _MAX_E and d <= _MAX_D


def moe_tokens(
    x: Tensor,
    gate: Gate,
    weights: list[Tensor | None],
    options: Options,
    *,
    selection_bias: Tensor | None,
    addend: Tensor | None,
    wants_logits: bool,
    return_aux: bool,
) -> tuple[Tensor, Aux | None, Tensor]:
    """`moe` for a small T in inference, from x (T, d) and the router's weight: O (T, d), its Aux
    if `return_aux`, and the logits (T, E), empty unless `wants_logits` or `return_aux`. Four
    kernels on a GPU, without those of the Aux."""
    assert options.K is not None
    _checks.groups(options, gate.weight.shape[0], options.K)
    _library.require_dtype(x)
    try:
        out, routing, counts, logits = ops.call_undifferentiated(
            _ops.moe_tokens.default, x, gate.weight, gate.bias, selection_bias, weights, addend,
            options.numbers, options.reals, gate.logits_dtype, wants_logits or return_aux,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError, ValueError):
        require_weights(weights, addend)
        raise
    if not return_aux:
        return out, None, logits
    return out, aux_of_top_k(routing, counts, choice_of(logits, options, selection_bias)), logits
