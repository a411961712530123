"""The layer as functions of tensors. Letters: T tokens of width d, E experts of width n, K experts
per token; W1 (E, 2n, d), or (E, n, d) if it is split or the activation has no gate; W2 (E, d, n).

Either of a weight's last two dimensions may be contiguous: pass a checkpoint's transposed tensor as
its `transpose(1, 2)`; nothing is copied. Under autocast x, the weights and the biases are cast, as
in a linear layer; logits and scores are not cast, since routing computes in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from . import _given_memory, _library, _rules, ops
from ._packing import WEIGHTS
from ._shapes import shape_text
from .routing import (
    Aux,
    Counter,
    GroupScore,
    Rounding,
    Scoring,
    OnOverflow,
    aux_of_pairs,
    counts_of_ids,
    route_rounded,
    rows_of,
    shaped_like,
    top_k,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Activation = _rules.Activation
GateLayout = Literal["concatenated", "interleaved", "split"]

_ops = _library.operators


class WeightGradients(NamedTuple):
    """Memory for the gradients of weights; None if autograd shall return that gradient as usual.

    Each has its weight's shape, its dtype or float32, and is aligned to 16 bytes. It shares memory
    with no input and no other gradient, and requires no gradient itself."""

    W1: Tensor | None = None
    W1_up: Tensor | None = None
    W2: Tensor | None = None
    b1: Tensor | None = None
    b1_up: Tensor | None = None
    b2: Tensor | None = None


class _Experts(TypedDict, total=False):
    """The options that every function has."""

    W1_up: Tensor | None
    b1: Tensor | None
    b1_up: Tensor | None
    b2: Tensor | None
    activation: Activation
    gate_layout: GateLayout
    clamp: float
    alpha: float
    up_shift: float
    addend: Tensor | None
    overwrite_H: bool | None
    column_blocks: int
    weight_grad_out: WeightGradients | None
    accumulate: bool


class _Routed(_Experts, total=False):
    """The options of `moe` without return_aux."""

    K: int | None
    ids: Tensor | None
    scoring: Scoring
    selection_bias: Tensor | None
    n_group: int
    topk_group: int
    group_score: GroupScore | None
    routed_scaling_factor: float
    rounding: Rounding | None
    m: int
    rounding_tokens: int | None
    seed: Counter | None
    offset: Counter | None
    capacity: int | None
    on_overflow: OnOverflow


class _Layer(NamedTuple):
    """The weights and options of the experts, and of the gradients of a call."""

    weights: list[Tensor | None]  # _packing.WEIGHTS
    numbers: tuple[int, ...]  # _packing.NUMBERS from activation on
    reals: tuple[float, ...]  # _packing.REALS from clamp on
    overwrite_H: bool | None
    weight_grad_out: WeightGradients | None
    accumulate: bool


@overload
def moe(x: Tensor, logits_or_scores: Tensor, W1: Tensor, W2: Tensor, *,
        return_aux: Literal[False] = False, **options: Unpack[_Routed]) -> Tensor: ...  # fmt: skip
@overload
def moe(x: Tensor, logits_or_scores: Tensor, W1: Tensor, W2: Tensor, *, return_aux: Literal[True],
        **options: Unpack[_Routed]) -> tuple[Tensor, Aux]: ...  # fmt: skip
@overload
def moe(x: Tensor, logits_or_scores: Tensor, W1: Tensor, W2: Tensor, *, return_aux: bool,
        **options: Unpack[_Routed]) -> Tensor | tuple[Tensor, Aux]: ...  # fmt: skip
def moe(
    x: Tensor,
    logits_or_scores: Tensor,
    W1: Tensor,
    W2: Tensor,
    *,
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
    capacity: int | None = None,
    on_overflow: OnOverflow = "nan",
    addend: Tensor | None = None,
    overwrite_H: bool | None = None,
    column_blocks: int = 1,
    weight_grad_out: WeightGradients | None = None,
    accumulate: bool = True,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """Compute the routed layer: O_t = addend_t + sum over the token's K experts of s * expert(x_t).

    With `K`, each token's experts are chosen from the router's logits. With `ids`, the experts are
    given, and the second argument is their scores.

    Args:
        x: the tokens; float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on a GPU.
        logits_or_scores: with `K` the router's logits, with `ids` the scores of the chosen experts.
            The gradient goes to this tensor. float32, bfloat16 or float16.
        W1: the experts' first weights, gate and up rows. See `gate_layout`.
        W2: the experts' second weights.
        K: experts that each token chooses by its logits.
        ids: the experts of each token, int32 or int64; one outside [0, E) is skipped.
        W1_up, b1_up: the up rows and their biases, if `gate_layout` is "split".
        b1, b2: biases of the first and the second GEMM.
        activation: an `Activation`, which is gated if its name contains "glu"; the formula of each
            is in include/tilemoe/activations.inc.
        gate_layout: where W1's gate and up rows are: "concatenated", "interleaved" or "split".
        clamp, alpha, up_shift: gpt-oss's form of swiglu; 0: plain swiglu.
        scoring: the scores of chosen experts, see `top_k`.
        selection_bias: added to the sigmoid scores to choose experts, not to the scores themselves.
        n_group, topk_group, group_score: choice among the experts of the best groups, see `top_k`.
            Not with rounding.
        routed_scaling_factor: every score is multiplied by it. Not with rounding.
        rounding: makes each expert's count of tokens a multiple of `m`, for training: "nearest",
            "up", "down", "stochastic" or "balanced". It requires softmax_over_chosen.
        m: see `rounding`; the tile of the GPU's GEMMs is 128.
        rounding_tokens: round each group of this many tokens separately, as batches of that size;
            T must be a multiple of it. Group i of G draws from the offset `offset * G + i`.
        seed, offset: for "stochastic": ints, or int64 tensors of one element on x's device.
        capacity: maximum number of (token, expert) pairs, which sets the size of H and of the
            workspaces, if many ids are known to be outside [0, E): for a part of a layer whose
            experts are spread over GPUs, for instance. Pairs past it, the last tokens of the
            highest experts, are counted and have no row. None: all pairs fit. Not with rounding.
        on_overflow: the output if a pair did not fit: "nan", all of it is NaN; "drop", the pair is
            left out, as if its id were outside [0, E).
        addend: added to the output in float32 before rounding, a residual for instance.
        overwrite_H: whether backward writes dH, its largest intermediate, over H, the largest
            tensor that forward kept. None: if nothing reads H again, so not under `retain_graph`,
            nor while torch.compile traces it, nor in a CUDA graph that does not contain forward.
            True: always; a second backward is then an error. False: never.
        column_blocks: compute the experts' outputs, and their inputs' gradients, in this many
            blocks of columns, each a multiple of 64, one after another: less memory for a little
            more time.
        weight_grad_out: memory into which backward writes the weights' gradients, or adds them
            if `accumulate`; the weights' `.grad` is not changed. A walk of the graph writes it if
            the engine runs the edge to that weight: autograd.grad(out, x) does not. Under
            torch.compile and compiled autograd every walk writes.
        return_aux: also return the counts of the routing.

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
    layer = _layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, weight_grad_out, accumulate,
    )  # fmt: skip
    _library.require_device(x, "x")
    router_name = "logits" if ids is None else "scores"
    _library.require_together(x, "x", **{router_name: logits_or_scores})
    rows = rows_of(x, "x", "(..., d)")
    router = rows_of(logits_or_scores, router_name, "(..., E)" if ids is None else "(..., K)")
    if addend is not None:
        addend = _shaped_as(addend, rows)
    if ids is not None:
        if rounding is not None or selection_bias is not None:
            raise ValueError(
                "tilemoe: rounding and selection_bias choose from logits, but ids are given"
            )
        choice = (n_group, topk_group, group_score, routed_scaling_factor)
        if choice != _PLAIN_CHOICE:
            _refuse_choice("ids are given, with their scores", *choice)
        _library.require_together(x, "x", ids=ids)
        ids = rows_of(ids, "ids", "(..., K)")
        K, E = ids.shape[1], _experts_in(W1)
        _check_shape("ids", ids, rows.shape[0], K)
        _check_shape("scores", router, rows.shape[0], K)
        args = (rows, router, ids, E, layer, addend, capacity, on_overflow, return_aux)
        out, aux = _of_ids(*args)
    elif capacity is not None:
        if rounding is not None:
            raise ValueError(
                f"tilemoe: capacity is {capacity} and rounding {rounding!r}, which sets its own"
            )
        E = _experts_in(W1)
        _check_shape("logits", router, rows.shape[0], E)
        if K is None:
            raise ValueError(_NO_K)
        scores, ids = top_k(
            router, K, scoring=scoring, selection_bias=selection_bias, n_group=n_group,
            topk_group=topk_group, group_score=group_score,
            routed_scaling_factor=routed_scaling_factor,
        )  # fmt: skip
        args = (rows, scores, ids, E, layer, addend, capacity, on_overflow, return_aux)
        out, aux = _of_ids(*args)
    else:
        _check_shape("logits", router, rows.shape[0], _experts_in(W1))
        if K is None:
            raise ValueError(_NO_K)
        found: Any
        if rounding is None:
            rule = _rules.rule(router.shape[1], K, scoring, n_group, topk_group, group_score)
            if routed_scaling_factor != 1.0:
                _rules.check_factor(routed_scaling_factor)
            found = _top_k(
                rows, router, layer, addend, rule, routed_scaling_factor, selection_bias, return_aux
            )
        else:
            choice = (n_group, topk_group, group_score, routed_scaling_factor)
            if choice != _PLAIN_CHOICE:
                _refuse_choice(f"rounding is {rounding!r}", *choice)
            found = _rounded(
                rows, router, layer, addend, K, scoring, selection_bias, return_aux, rounding, m,
                rounding_tokens, seed, offset,
            )  # fmt: skip
        out, aux = found if return_aux else (found, None)
    out = shaped_like(out, x)
    return (out, aux) if return_aux else out


@overload
def moe_general(x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, W1: Tensor, W2: Tensor,
                *, return_aux: Literal[False] = False,
                **options: Unpack[_Experts]) -> Tensor: ...  # fmt: skip
@overload
def moe_general(x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, W1: Tensor, W2: Tensor,
                *, return_aux: Literal[True],
                **options: Unpack[_Experts]) -> tuple[Tensor, Aux]: ...  # fmt: skip
@overload
def moe_general(x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, W1: Tensor, W2: Tensor,
                *, return_aux: bool,
                **options: Unpack[_Experts]) -> Tensor | tuple[Tensor, Aux]: ...  # fmt: skip
def moe_general(
    x: Tensor,
    tokens: Tensor,
    experts: Tensor,
    scores: Tensor,
    W1: Tensor,
    W2: Tensor,
    *,
    W1_up: Tensor | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "swiglu",
    gate_layout: GateLayout = "concatenated",
    clamp: float = 0.0,
    alpha: float = 0.0,
    up_shift: float = 0.0,
    addend: Tensor | None = None,
    overwrite_H: bool | None = None,
    column_blocks: int = 1,
    weight_grad_out: WeightGradients | None = None,
    accumulate: bool = True,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """Compute the routed layer of (token, expert, score), with any number of experts per token.

    Args:
        x: the tokens.
        tokens, experts: the token and the expert of each pair, int32 or int64, sorted by token. A
            pair is skipped if its expert is outside [0, E), or if its token is outside [0, T) or
            smaller than one before it.
        scores: the factor of each pair's result; the gradient goes to them.
        W1, W2, W1_up, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift, addend,
            overwrite_H, column_blocks, weight_grad_out, accumulate, return_aux: as in `moe`.

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
    layer = _layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, weight_grad_out, accumulate,
    )  # fmt: skip
    _library.require_device(x, "x")
    _library.require_together(x, "x", tokens=tokens, experts=experts, scores=scores)
    rows = rows_of(x, "x", "(T, d)")
    if addend is not None:
        addend = _shaped_as(addend, rows)
    E = _experts_in(W1)
    routing = ops.call_undifferentiated(
        _ops.route_general.default, tokens, experts, scores.detach(), rows.shape[0], E
    )
    pairs = tokens.shape[0]
    out = _experts(
        rows, scores, routing, layer, addend, _rules.GENERAL, 0, pairs, _rules.SCORES_GIVEN
    )
    out = shaped_like(out, x)
    return (out, aux_of_pairs(routing, E, rows.shape[0], pairs)) if return_aux else out


def grouped_experts(
    rows: Tensor,
    counts: Tensor,
    W1: Tensor,
    W2: Tensor,
    *,
    row_scores: Tensor | None = None,
    W1_up: Tensor | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "swiglu",
    gate_layout: GateLayout = "concatenated",
    clamp: float = 0.0,
    alpha: float = 0.0,
    up_shift: float = 0.0,
    addend: Tensor | None = None,
    overwrite_H: bool | None = None,
    column_blocks: int = 1,
    weight_grad_out: WeightGradients | None = None,
    accumulate: bool = True,
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
        W1, W2, W1_up, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift, addend,
            overwrite_H, column_blocks, weight_grad_out, accumulate: as in `moe`.

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
    layer = _layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, weight_grad_out, accumulate,
    )  # fmt: skip
    _library.require_device(rows, "rows")
    _library.require_together(rows, "rows", counts=counts, row_scores=row_scores)
    if rows.dim() != 2:
        raise ValueError(f"tilemoe: rows has shape {shape_text(rows.shape)}, expected (R, d)")
    if row_scores is not None:
        row_scores = row_scores.float()
    detached = row_scores.detach() if row_scores is not None else None
    routing = ops.call_undifferentiated(_ops.route_grouped.default, counts, detached, rows.shape[0])
    return _experts(
        rows, row_scores, routing, layer, addend, _rules.GROUPED, 0, rows.shape[0],
        _rules.SCORES_GIVEN,
    )  # fmt: skip


# ---------------------------------------------------------------- parts


def _experts_in(W1):
    """E of W1, whose other sizes the operators check."""
    _library.require_weight(W1, "W1")
    if W1.dim() != 3:
        raise ValueError(f"tilemoe: W1 has shape {shape_text(W1.shape)}, expected three dimensions")
    return W1.shape[0]


_NO_K = "tilemoe: K is None, expected the number of experts to choose from the logits"
_PLAIN_CHOICE = (1, 1, None, 1.0)  # n_group, topk_group, group_score, routed_scaling_factor


def _refuse_choice(why, *choice):
    names = ("n_group", "topk_group", "group_score", "routed_scaling_factor")
    for name, value, plain in zip(names, choice, _PLAIN_CHOICE):
        if value != plain:
            raise ValueError(f"tilemoe: {name} is {value!r}, but {why}")


def _shaped_as(addend, rows):
    _library.require_tensor(addend, "addend")
    if addend.numel() != rows.numel():
        raise ValueError(
            f"tilemoe: addend has shape {shape_text(addend.shape)}, expected that of x, as rows "
            f"{shape_text(rows.shape)}"
        )
    return addend.reshape(rows.shape)


def _check_shape(name, tensor, *shape):
    if tensor.shape != shape:
        raise ValueError(
            f"tilemoe: {name} has shape {shape_text(tensor.shape)}, expected "
            f"{shape_text(shape)} for this x and these weights"
        )


def _layer(W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
           column_blocks, overwrite_H, weight_grad_out, accumulate):  # fmt: skip
    return _Layer(
        [W1, W1_up, W2, b1, b1_up, b2],
        (
            _rules.number("activation", _rules.ACTIVATIONS, activation),
            _rules.number("gate_layout", _rules.GATE_LAYOUTS, gate_layout),
            column_blocks,
        ),
        (clamp, alpha, up_shift),
        overwrite_H,
        weight_grad_out,
        accumulate,
    )


class Gate(NamedTuple):
    """A router whose GEMM `moe_tokens` computes, for a small T."""

    weight: Tensor  # (E, d)
    bias: Tensor | None  # (E)
    logits_dtype: torch.dtype

    def takes(self, T: int, K: int) -> bool:
        """Whether `moe_tokens` supports T tokens and these sizes."""
        E, d = self.weight.shape
        small = T <= _rules.DECODE_T and K <= _rules.DECODE_K
        return small and E <= _rules.DECODE_E and d <= _rules.DECODE_D


def moe_tokens(
    x: Tensor,
    gate: Gate,
    W1: Tensor,
    W2: Tensor,
    *,
    K: int,
    b1: Tensor | None,
    b2: Tensor | None,
    activation: Activation,
    clamp: float,
    alpha: float,
    up_shift: float,
    scoring: Scoring,
    selection_bias: Tensor | None,
    n_group: int,
    topk_group: int,
    group_score: GroupScore | None,
    routed_scaling_factor: float,
    addend: Tensor | None,
    column_blocks: int,
    wants_logits: bool,
    return_aux: bool,
) -> tuple[Tensor, Aux | None, Tensor]:
    """`moe` for a small T in inference, from x (T, d) and the router's weight: O (T, d), its Aux
    if `return_aux`, and the logits (T, E), empty unless `wants_logits`. Four kernels on a GPU,
    without those of the Aux."""
    layer = _layer(
        W1, None, W2, b1, None, b2, activation, "concatenated", clamp, alpha, up_shift,
        column_blocks, None, None, False,
    )  # fmt: skip
    rule = _rules.rule(gate.weight.shape[0], K, scoring, n_group, topk_group, group_score)
    if routed_scaling_factor != 1.0:
        _rules.check_factor(routed_scaling_factor)
    _library.require_dtype(x)
    try:
        out, routing, counts, logits = ops.call_undifferentiated(
            _ops.moe_tokens.default, x, gate.weight, gate.bias, selection_bias, layer.weights,
            addend, [*rule, *layer.numbers], [routed_scaling_factor, *layer.reals],
            gate.logits_dtype, wants_logits,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError, ValueError):
        _require_weights(layer.weights, addend)
        raise
    return out, _aux_of_top_k(routing, counts) if return_aux else None, logits


def _aux_of_top_k(routing, counts):
    counters = _rules.counters_of(routing)
    zeros = torch.zeros_like(counters).unbind()  # K experts for every token, and a row for each
    dropped, added, without, overflow = zeros
    return Aux(counts, dropped, added, counters[0] + counters[1], without, overflow)


def _chunks_of(ids, E, routing, cuts):
    """The ops.Chunks of a routing: an expert's rows are in the order of their tokens, and pairs
    past the capacity have no row."""
    offsets = _rules.offsets_of(routing, E)
    counts = [counts_of_ids(ids[begin:end], E) for begin, end in zip(cuts, cuts[1:])]
    ends = offsets[:-1] + torch.stack(counts).cumsum(0, dtype=torch.int32)
    return ops.Chunks(torch.cat([offsets[None, :-1], ends.minimum(offsets[1:])]), cuts)


def _of_ids(
    x, scores, ids, E, layer, addend, capacity, on_overflow, return_aux, comm=None, cuts=None
):
    """O (T, d) of ids and scores (T, K), and its Aux or None. comm: see `_run`; cuts: the first
    token of each chunk in which it travels."""
    (T, K), pairs = ids.shape, ids.numel()
    rows = pairs if capacity is None else rows_for(capacity, pairs)
    check_on_overflow(on_overflow)
    routing = ops.call_undifferentiated(_ops.route_top_k.default, ids, scores.detach(), E, rows)
    if cuts is not None:
        comm = comm._replace(chunks=_chunks_of(ids, E, routing, cuts))
    rule = _rules.rule_of(_rules.TOP_K, K, _rules.SCORES_GIVEN)
    out = _run(
        _ops.experts.default, x, scores, routing, layer, addend, (rows,), rule, comm=comm
    )
    if rows != pairs and on_overflow == "nan":
        out = _spoilt(out, _rules.counters_of(routing)[0] > 0)
    if not return_aux:
        return out, None
    counts = counts_of_ids(ids, E) if rows != pairs else None
    return out, aux_of_pairs(routing, E, T, rows, counts)


def rows_for(capacity, pairs):
    """The rows of a routing for a caller's capacity, at most `pairs`."""
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ValueError(f"tilemoe: capacity is {capacity!r}, expected an int of at least 1")
    return min(capacity, pairs)


def check_on_overflow(on_overflow):
    _rules.number("on_overflow", ("nan", "drop"), on_overflow)


class _Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, is_spoilt):
        ctx.mark_dirty(out)
        return out.masked_fill_(is_spoilt, torch.nan)

    @staticmethod
    def backward(ctx, dO):
        return dO, None


def _spoilt(out, is_spoilt):
    """out, to which the caller has the only reference, or NaN in its place if is_spoilt ()."""
    if torch.compiler.is_compiling():
        return out.masked_fill(is_spoilt, torch.nan)
    if not (torch.is_grad_enabled() and out.requires_grad):
        return out.masked_fill_(is_spoilt, torch.nan)
    return _Spoilt.apply(out, is_spoilt)


def _top_k(x, logits, layer, addend, rule, factor, selection_bias, return_aux):
    """O (T, d), with `return_aux` also its Aux."""
    args = (x, logits, selection_bias, layer, addend, (), rule, factor, return_aux)
    found = _run(_ops.moe.default, *args)
    if not return_aux:
        return found
    out, routing, counts = found
    return out, _aux_of_top_k(routing, counts)


def _rounded(x, logits, layer, addend, K, scoring, selection_bias, return_aux, rounding, m, tokens,
             seed, offset):  # fmt: skip
    """The same with token rounding; the counts are those before rounding."""
    _check_scoring_of_rounded(scoring, selection_bias)
    T, E = logits.shape
    args = (K, rounding, m, tokens, seed, offset)
    routing, capacity, counts = route_rounded(logits, *args)
    renormalized = _rules.SCORINGS.index("softmax_renormalized")
    out = _experts(x, logits, routing, layer, addend, _rules.ROUNDED, K, capacity, renormalized)
    if not return_aux:
        return out
    dropped = _rules.counters_of(routing)[3].clone()
    added = _rules.offsets_of(routing, E)[E] - T * K + dropped
    *_, token_offsets = _rules.row_arrays_of(routing, E, capacity)
    without = (token_offsets[: T + 1].diff() == 0).sum(dtype=torch.int32)
    none = torch.zeros_like(dropped)
    return out, Aux(counts, dropped, added, none, without, torch.zeros_like(none))


def _check_scoring_of_rounded(scoring, selection_bias):
    # Over the chosen experts both softmaxes are equal; an added pair's score is from the second.
    if scoring not in ("softmax_over_chosen", "softmax_renormalized"):
        raise ValueError(
            f"tilemoe: scoring is {scoring!r}, but rounding requires softmax_over_chosen"
        )
    if selection_bias is not None:
        raise ValueError("tilemoe: selection_bias: only the sigmoid scorings support it")


def _check_rounded(rounding, *, scoring, selection_bias, n_group, topk_group, group_score,
                   routed_scaling_factor):  # fmt: skip
    choice = (n_group, topk_group, group_score, routed_scaling_factor)
    if choice != _PLAIN_CHOICE:
        _refuse_choice(f"rounding is {rounding!r}", *choice)
    _check_scoring_of_rounded(scoring, selection_bias)


def _cast(tensor, dtype):
    if tensor is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _experts(x, router, routing, layer, addend, kind, K, capacity, scoring):
    """O (T, d) of a routing that was built."""
    rule = _rules.rule_of(kind, K, scoring)
    return _run(_ops.experts.default, x, router, routing, layer, addend, (capacity,), rule)


def _run(
    op, x, router, third, layer, addend, capacity, rule, factor=1.0, more=False, comm=None
):
    """Calls `moe` or `experts`, whose third argument is `third`, with a capacity or none. Returns
    O, and with `more` the operator's other outputs except H, which autograd keeps. `comm`: an
    ops.Comm, through which backward gets x."""
    try:
        return _computed(op, x, router, third, layer, addend, capacity, rule, factor, more, comm)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        _require_weights(layer.weights, addend)
        raise


def _require_weights(weights, addend):
    """Raises an error that names the argument that is no tensor, or one that no kernel reads;
    torch's errors do not. Called only after an error: in every call it would cost host time."""
    for name, tensor in zip((*WEIGHTS, "addend"), (*weights, addend)):
        if tensor is not None:
            _library.require_weight(tensor, name)


def _computed(op, x, router, third, layer, addend, capacity, rule, factor, more, comm):
    weights = layer.weights
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, addend = _cast(x, dtype), _cast(addend, dtype)
        weights = [_cast(weight, dtype) for weight in weights]
    _library.require_dtype(x)
    tensors = (x, router, *weights, addend)
    given = layer.weight_grad_out
    if given is not None:
        ops.refuse_transforms()
        if not isinstance(given, WeightGradients):
            kind = _library.class_of(given)
            raise TypeError(
                f"tilemoe: weight_grad_out is a {kind}, expected a tilemoe.WeightGradients"
            )
        others = {"x": x, "the logits or scores": router, "addend": addend}
        _given_memory.check(given, layer.weights, x.dtype, others)
    rest = (*capacity, [*rule, *layer.numbers], [factor, *layer.reals])
    if not torch.is_grad_enabled():
        if comm is not None and comm.chunks is not None:
            return ops.forward_in_chunks(x, third, weights, *rest, False, comm)[0]
        found = ops.call_undifferentiated(
            op, x, router, third, weights, addend, *rest, False, False
        )
    elif given is None and (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    ):
        keep_H = any(t is not None and t.requires_grad for t in tensors[:-1])
        found = ops.call(
            op, x, router, third, weights, addend, *rest, keep_H, bool(layer.overwrite_H)
        )
    else:
        accumulate = given is not None and layer.accumulate
        return ops.differentiated(
            op, tensors, third, rest, layer.overwrite_H, more, given, accumulate, comm
        )
    return (found[0], *found[2:]) if more else found[0]
