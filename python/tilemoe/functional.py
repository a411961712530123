"""Compute the layer with functions of tensors.

Symbols: T tokens of width d, E experts of width n, K experts per token; W1 (E, 2n, d), or (E, n, d)
if it is split or the activation has no gate; W2 (E, d, n).

Either of the last two dimensions of a weight may be contiguous: pass a transposed tensor of a
checkpoint as its `transpose(1, 2)`; nothing is copied. Under autocast x, the weights and the biases
are cast, as in a linear layer; logits and scores are not cast, because routing computes in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from . import _checks, _library, ops
from ._autocast import autocast_dtype
from ._calls import (
    Layer,
    LinearRouter,
    WeightGradients,
    aux_of_top_k,
    cast_router,
    choice_of,
    experts_in,
    in_one_node,
    of_routing,
    require_weights,
    routed,
    shaped_as,
    shaped_choice,
    with_router,
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
_with_router = Reader("moe_with_router", OfMoe)


class _Tensors(TypedDict, total=False):
    """Keywords of every function, in addition to its options."""

    W1_up: Weight | None
    b1: Tensor | None
    b1_up: Tensor | None
    b2: Tensor | None
    addend: Tensor | None
    weight_grad_out: WeightGradients | None
    lora: LoRA | None


class _OfPairs(OfRows, _Tensors, total=False):
    """Keywords of `moe_general` without return_aux."""


class _Routed(OfMoe, _Tensors, total=False):
    """Keywords of `moe` without return_aux."""

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
    """Compute the routed layer.

    The output is O_t = addend_t + sum over the K experts of token t of s * expert(x_t).

    With `K`, the experts of each token are chosen from the router's logits. With `ids`, the experts
    are given, and the second argument is their scores.

    Args:
        x: Tokens, shape (..., d), d a multiple of 8; float32, bfloat16 or float16 on the CPU,
            bfloat16 or float16 on a GPU.
        logits_or_scores: With `K` the router's logits, shape (..., E); with `ids` the scores of the
            chosen experts, shape (..., K). float32, bfloat16 or float16. Receives a gradient.
        W1: First weights of the experts, gate and up rows (see `gate_layout`), shape (E, 2n, d), or
            (E, n, d) if it is split or the activation has no gate; n a multiple of 8. A
            `QuantizedExperts` is dequantised in forward and again in backward, and has no gradient.
        W2: Second weights of the experts, shape (E, d, n), or a `QuantizedExperts`.
        ids: Experts of each token, int32 or int64, shape (..., K); an id outside [0, E) is skipped.
        W1_up: Up rows, shape (E, n, d), with gate_layout="split".
        b1: Biases of the first GEMM, one per row of W1, shape (E, 2n) or (E, n).
        b1_up: Biases of the up rows, shape (E, n), with gate_layout="split".
        b2: Biases of the second GEMM, shape (E, d).
        selection_bias: Added to the sigmoid scores to choose experts, but not to the scores;
            float32, shape (E).
        seed: Seed of rounding="stochastic", an int or an int64 tensor of one element on x's device.
        offset: Offset of rounding="stochastic", like seed.
        addend: Added to the output in float32 before the output is rounded, for example a residual;
            shape of x.
        weight_grad_out: Memory into which backward writes the weights' gradients, or adds them with
            `accumulate`; the weights' `.grad` does not change. A backward pass writes the memory
            only if the engine executes the edge to that weight, which `autograd.grad(out, x)` does
            not. Under torch.compile and compiled autograd every backward pass writes it. Not
            supported with lora or with quantised weights.
        lora: Low-rank adapters of the weights, packed once per call for forward and backward. The
            gradient of a weight that requires none is not computed.
        return_aux: Also return the counts of the routing, and the ids and scores of each token.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        O, shape and dtype of x; with `return_aux` O and an `Aux`.

    Raises:
        ValueError: A shape, a dtype, a device or an option is wrong; the message names the
            argument.
        TypeError: An argument is not a tensor.
        NotImplementedError: No kernel supports the dtype (for example float32 on a GPU) or the
            layout of a tensor (nested, sparse, quantised or packed).
        torch.OutOfMemoryError: The output, H or the workspace cannot be allocated.

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
                "rounding and selection_bias require logits without ids, got ids; remove "
                "them, or pass logits and K"
            )
        _checks.plain_choice(
            chosen, "{name} must have its default if ids and their scores are given, got {value}"
        )
    layer = Layer([W1, W1_up, W2, b1, b1_up, b2], chosen, weight_grad_out, lora)
    return routed(
        x, logits_or_scores, layer, ids=ids, selection_bias=selection_bias, seed=seed,
        offset=offset, addend=addend, return_aux=return_aux,
    )  # fmt: skip


@_with_router.shows
def moe_with_router(
    x: Tensor,
    router_weight: Tensor,
    W1: Weight,
    W2: Weight,
    *,
    router_bias: Tensor | None = None,
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
) -> Any:
    """Compute `moe` with the logits x router_weight^T + router_bias, in one autograd node.

    The output has the bits of `moe` with `torch.nn.functional.linear(x, router_weight,
    router_bias)`. In backward, the kernel that sums dX over the experts adds the router's part,
    which saves a pass over dX and a rounding. With token rounding, `capacity`, `weight_grad_out`,
    `lora` or quantised weights the linear layer is a node of its own.

    Args:
        x: As in `moe`.
        router_weight: Weight of the router, shape (E, d), dtype of x. Receives a gradient.
        W1: As in `moe`.
        W2: As in `moe`.
        router_bias: Bias of the router, shape (E), dtype of x. Receives a gradient.
        W1_up: As in `moe`.
        b1: As in `moe`.
        b1_up: As in `moe`.
        b2: As in `moe`.
        selection_bias: As in `moe`.
        seed: As in `moe`.
        offset: As in `moe`.
        addend: As in `moe`.
        weight_grad_out: As in `moe`.
        lora: As in `moe`.
        return_aux: Also return the logits and the `Aux`.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        O, shape and dtype of x; with `return_aux` O, the logits, shape (..., E), which have a
        gradient, for example that of `router_losses`, and an `Aux`.

    Raises:
        ValueError: A shape, a dtype, a device or an option is wrong; other errors as in `moe`.

    Example:
        >>> x, router_weight = torch.randn(6, 16), torch.randn(4, 16)
        >>> W1, W2 = torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> tilemoe.moe_with_router(x, router_weight, W1, W2, K=2).shape
        torch.Size([6, 16])
    """
    chosen = _with_router(options)  # type: ignore[arg-type]
    if chosen.K is None:
        raise ValueError("K is required")
    layer = Layer([W1, W1_up, W2, b1, b1_up, b2], chosen, weight_grad_out, lora)
    if type(router_weight) not in _library.PLAIN:
        _library.require_weight(router_weight, "router_weight")
    _library.require_device(x, "x")
    _library.require_together(x, "x", router_weight=router_weight, router_bias=router_bias)
    rows = x
    if x.dim() < 2 or addend is not None or not x.is_contiguous():
        rows = rows_of(x, "x", "(..., d)")
    cast = autocast_dtype(rows.device)
    own, router = cast_router(rows, LinearRouter(router_weight, router_bias), cast)
    if not in_one_node(own, router, layer, rounds=True):
        logits = torch.nn.functional.linear(x, router_weight, router_bias)
        found = routed(
            x, logits, layer, ids=None, selection_bias=selection_bias, seed=seed, offset=offset,
            addend=addend, return_aux=return_aux,
        )  # fmt: skip
        return (found[0], logits, found[1]) if return_aux else found
    if addend is not None:
        addend = shaped_as(addend, rows)
    out, aux, logits = with_router(
        own, router, layer, cast=cast, selection_bias=selection_bias, addend=addend,
        return_aux=return_aux,
    )  # fmt: skip
    out = shaped_like(out, x)
    if aux is None:
        return out
    return out, shaped_like(logits, x), shaped_choice(aux, x)


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
    """Compute the routed layer from (token, expert, score), with any number of experts per token.

    Args:
        x: Tokens, shape (T, d).
        tokens: Token of each pair, int32 or int64, shape (pairs), sorted.
        experts: Expert of each pair, int32 or int64, shape (pairs). A pair is skipped if its expert
            is outside [0, E), or if its token is outside [0, T) or smaller than a token before it.
        scores: Factor of the result of each pair, shape (pairs). Receives a gradient.
        W1: As in `moe`.
        W2: As in `moe`.
        W1_up: As in `moe`.
        b1: As in `moe`.
        b1_up: As in `moe`.
        b2: As in `moe`.
        addend: As in `moe`, shape (T, d).
        weight_grad_out: As in `moe`.
        lora: As in `moe`.
        return_aux: As in `moe`.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        O, shape (T, d), dtype of x; with `return_aux` O and an `Aux`.

    Raises:
        ValueError: A shape, a dtype, a device or an option is wrong; other errors as in `moe`.

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
    """Compute the experts alone, on rows that are already sorted by expert.

    Args:
        rows: Rows, shape (R, d): expert 0 computes the first counts[0] rows, expert 1 the next
            counts[1] rows, and so on. Rows past the sum of the counts are not read; they are zero
            in the output and in the gradient.
        counts: Number of rows of each expert, int32 or int64, shape (E), at least 0, with a sum of
            at most R. On the CPU other counts raise a ValueError. On a GPU the host does not read
            them: a negative count is read as 0, and experts have no rows past R.
        W1: As in `moe`.
        W2: As in `moe`.
        row_scores: Factor of the result of each row, shape (R). Receives a gradient. None: 1.
        W1_up: As in `moe`.
        b1: As in `moe`.
        b1_up: As in `moe`.
        b2: As in `moe`.
        addend: As in `moe`, shape (R, d).
        weight_grad_out: As in `moe`.
        lora: As in `moe`.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        Rows, shape (R, d), dtype of the given rows.

    Raises:
        ValueError: A shape, a dtype, a device or an option is wrong; other errors as in `moe`.

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
        raise ValueError(f"rows has shape {shape_text(rows.shape)}, expected (R, d)")
    if row_scores is not None:
        row_scores = row_scores.float()
    R, detached = rows.shape[0], row_scores.detach() if row_scores is not None else None
    routing = ops.call_undifferentiated(_ops.route_grouped.default, counts, detached, R)
    rule = rule_of(GROUPED, 0, SCORES_GIVEN)
    return of_routing(rows, row_scores, routing, layer, addend, R, rule)


# ---------------------------------------------------------------- decode

_MAX_T, _MAX_E, _MAX_K, _MAX_D = 64, 512, 32, 65536  # TILEMOE_ROUTE_TOKENS_MOST_


class Gate(NamedTuple):
    """Router whose GEMM `moe_tokens` computes, for small T."""

    weight: Tensor  # (E, d)
    bias: Tensor | None  # (E)
    logits_dtype: torch.dtype

    def takes(self, T: int, K: int) -> bool:
        """Return whether `moe_tokens` supports T tokens and these sizes."""
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
    """Compute `moe` for small T in inference, from x (T, d) and the router's weight.

    Without the Aux, a call launches four kernels on a GPU.

    Returns:
        O (T, d), its Aux if `return_aux`, and the logits (T, E), empty unless `wants_logits` or
        `return_aux`.
    """
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
