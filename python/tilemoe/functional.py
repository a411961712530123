"""The layer as functions of tensors. Letters as everywhere: T tokens of width d, E experts of width
n, K experts a token; W1 (E, 2n, d), or (E, n, d) where it is split or the activation has no gate;
W2 (E, d, n).

Either of a weight's last two dimensions may be the contiguous one: pass a checkpoint's transposed
tensor as its `transpose(1, 2)`, nothing is copied. Under autocast x, the weights and the biases are
cast, as in a linear layer; logits and scores stay as they are, since routing counts in float32."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import _groups, _library, _rules, ops
from ._shapes import shape_text

_ops = torch.ops.tilemoe


class Aux(NamedTuple):
    """What a routing did, on the device: reading it is the first wait for the host."""

    expert_counts: Tensor  # (E) int32: how often each expert was chosen, before rounding
    dropped: Tensor  # () int32: chosen pairs that rounding dropped
    added: Tensor  # () int32: pairs that rounding added
    skipped: Tensor  # () int32: pairs with an id outside [0, E), or a token outside [0, T)
    without: Tensor  # () int32: tokens that no expert gets


class WeightGradients(NamedTuple):
    """Memory for the gradients of weights, each of its weight's shape, in the weight's dtype or
    float32; None where autograd shall return that gradient as usual."""

    W1: Tensor | None = None
    W1_up: Tensor | None = None
    W2: Tensor | None = None
    b1: Tensor | None = None
    b1_up: Tensor | None = None
    b2: Tensor | None = None


class _Layer(NamedTuple):
    """What the experts compute, and how a call of them is differentiated."""

    weights: tuple  # W1, W1_up, W2, b1, b1_up, b2
    shape: tuple  # activation, gate_layout, clamp, alpha, up_shift, column_blocks
    overwrite_H: bool
    weight_grad_out: WeightGradients | None
    accumulate: bool


def topk_router(
    logits, K, *, scoring="softmax_over_chosen", selection_bias=None, ids_dtype=torch.int32
):
    """Each token's K experts.

    logits (..., E) float32, bfloat16 or float16 -> scores (..., K) float32, differentiable in the
    logits, and ids (..., K) int32 or int64. `scoring` is one of softmax_over_chosen,
    softmax_over_all, softmax_renormalized, sigmoid and sigmoid_renormalized; `selection_bias` (E)
    float32, of the sigmoid scorings, is added where experts are chosen and not in the scores. Ties
    go to the lower id, NaN ranks last, a token's K stand in descending order.
    """
    _library.require_device(logits)
    rows = _rows(logits)
    scoring = _rules.number("scoring", _rules.SCORINGS, scoring)
    scores, ids, _ = ops.call(_ops.top_k.default, rows, selection_bias, K, scoring, ids_dtype)
    return _shaped(scores, logits), _shaped(ids, logits)


def rounded_router(logits, K, *, rounding, m=128, rounding_tokens=None, seed=None, offset=None):
    """Each token's experts under token rounding, as pairs for `moe_general`, which with them
    computes what `moe` does with the same `rounding` and the options that go with it.

    logits (T, E) float32, bfloat16 or float16 -> tokens (pairs) int32, experts (pairs) int32,
    scores (pairs) float32, differentiable in the logits: softmax over all experts, which of a
    chosen pair is divided by its sum over the token's K, whether they stay or not. Pairs are as
    many as there can be, sorted by token; those past the last have token T, expert E and score 0,
    and are skipped.
    """
    _library.require_device(logits)
    if logits.dim() != 2:
        raise ValueError(f"tilemoe: logits has shape {shape_text(logits.shape)}, expected (T, E)")
    T, E = logits.shape
    routing, capacity, *_ = _route_rounded(logits, K, rounding, m, rounding_tokens, seed, offset)
    offsets = _rules.offsets_of(routing, E)
    _, row_token, pair_row, _ = _rules.row_arrays_of(routing, E, capacity)
    pair = torch.arange(capacity, device=logits.device)
    there = pair < offsets[E]
    row = torch.where(there, pair_row, 0).long()
    tokens = torch.where(there, row_token[row], T)
    # Of all offsets, not of those behind the first: torch.compile searches a view from its base on.
    expert_of = torch.searchsorted(offsets.contiguous(), row, right=True, out_int32=True) - 1
    experts = torch.where(there, expert_of, E)
    chosen, ids = topk_router(logits, K, ids_dtype=torch.int64)
    score_of = logits.float().softmax(-1).scatter(-1, ids, chosen)  # (T, E)
    # Past the last pair any place will do: each its own, since gradients are added there.
    at = torch.where(there, tokens.long() * E + experts, pair)
    scores = torch.where(there, score_of.flatten().gather(0, at), 0.0)
    return tokens, experts, scores


def router_losses(logits, expert_counts):
    """The router's losses, two float32 scalars that are differentiable in logits (..., E).

    balance = E * sum_e (c_e / sum(c)) * mean_t p(t, e), 1 when balanced (Switch Transformer,
    arXiv 2101.03961, equation 4), with c the `expert_counts` (E) int32 of `Aux`;
    z = mean_t logsumexp(logits_t)^2 (ST-MoE, arXiv 2202.08906, equation 5).
    """
    _library.require_device(logits)
    rows = _rows(logits)
    return ops.call(_ops.router_losses.default, rows, expert_counts).unbind()


def moe(
    x,
    logits_or_scores,
    W1,
    W2,
    *,
    K=None,
    ids=None,
    W1_up=None,
    b1=None,
    b1_up=None,
    b2=None,
    activation="swiglu",
    gate_layout="concatenated",
    clamp=0.0,
    alpha=0.0,
    up_shift=0.0,
    scoring="softmax_over_chosen",
    selection_bias=None,
    rounding=None,
    m=128,
    rounding_tokens=None,
    seed=None,
    offset=None,
    addend=None,
    overwrite_H=False,
    column_blocks=1,
    weight_grad_out=None,
    accumulate=True,
    return_aux=False,
):
    """The routed layer: O_t = addend_t + sum over the token's pairs of s * expert(x_t).

    x (..., d) -> O of its shape. With `ids` (..., K) the second argument is scores (..., K), and
    gradients go to x, scores, weights, biases and addend; ids outside [0, E) are skipped. Without,
    it is logits (..., E), from which `K` experts are chosen by `scoring` (see topk_router) and to
    which the gradient goes. `rounding` (nearest, up, down, stochastic, balanced) then makes every
    expert's count a multiple of `m`: for training, with scoring softmax_over_chosen; `stochastic`
    draws from `seed` and `offset`, int64 tensors (1) on x's device, or ints. `rounding_tokens`
    rounds every so many tokens, of which there is then a multiple, by themselves, as batches of
    that size would be: what is chosen then depends neither on the batch's size nor on who shares
    it. `stochastic` gives each of G such groups, i, the offset `offset * G + i`.

    `gate_layout` says where W1's gate and up rows are: concatenated, interleaved, or split, with
    the up rows in W1_up (E, n, d). clamp, alpha and up_shift are gpt-oss's form of swiglu.
    `overwrite_H` has backward write its largest intermediate over what forward kept, after which a
    second backward raises. `column_blocks` has the experts' outputs, and their inputs' gradients,
    exist in so many blocks of columns one after the other: less memory for a little time.
    `weight_grad_out` (WeightGradients) is memory into which backward writes the weights' gradients,
    or adds them where `accumulate`; the weights' .grad then stays as it is. With `return_aux` the
    result is O, Aux.
    """
    layer = _layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, weight_grad_out, accumulate,
    )  # fmt: skip
    _library.require_device(x)
    rows = _rows(x)
    router = _rows(logits_or_scores)
    if addend is not None:
        addend = addend.reshape(rows.shape)
    if ids is not None:
        if rounding is not None or selection_bias is not None:
            raise ValueError(
                "tilemoe: rounding and selection_bias choose from logits, but ids are given"
            )
        ids = _rows(ids)
        K, E = ids.shape[1], W1.shape[0]
        _check_shape("ids", ids, rows.shape[0], K)
        _check_shape("scores", router, rows.shape[0], K)
        routing = ops.call(_ops.route_top_k.default, ids, router.detach(), E)
        out = _experts(
            rows, router, routing, layer, addend, _rules.TOP_K, K, ids.numel(), _rules.SCORES_GIVEN
        )
        aux = _aux(routing, E, rows.shape[0], ids.numel()) if return_aux else None
    else:
        _check_shape("logits", router, rows.shape[0], W1.shape[0])
        if K is None:
            raise ValueError(
                "tilemoe: K is None: it says how many experts to choose from the logits"
            )
        choose = _top_k if rounding is None else functools.partial(
            _rounded, rounding=rounding, m=m, tokens=rounding_tokens, seed=seed, offset=offset
        )  # fmt: skip
        found = choose(rows, router, layer, addend, K, scoring, selection_bias, return_aux)
        out, aux = found if return_aux else (found, None)
    out = _shaped(out, x)
    return (out, aux) if return_aux else out


def moe_general(
    x,
    tokens,
    experts,
    scores,
    W1,
    W2,
    *,
    W1_up=None,
    b1=None,
    b1_up=None,
    b2=None,
    activation="swiglu",
    gate_layout="concatenated",
    clamp=0.0,
    alpha=0.0,
    up_shift=0.0,
    addend=None,
    overwrite_H=False,
    column_blocks=1,
    weight_grad_out=None,
    accumulate=True,
    return_aux=False,
):
    """The routed layer with any number of experts a token: tokens, experts (pairs) int32 or int64
    and scores (pairs) say which, sorted by token.

    x (T, d) -> O (T, d). A pair whose expert is outside [0, E), or whose token is outside [0, T) or
    smaller than one before it, is skipped. All else as in `moe`.
    """
    layer = _layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, weight_grad_out, accumulate,
    )  # fmt: skip
    _library.require_device(x)
    rows = _rows(x)
    if addend is not None:
        addend = addend.reshape(rows.shape)
    E, pairs = W1.shape[0], tokens.shape[0]
    routing = ops.call(
        _ops.route_general.default, tokens, experts, scores.detach(), rows.shape[0], E
    )
    out = _experts(
        rows, scores, routing, layer, addend, _rules.GENERAL, 0, pairs, _rules.SCORES_GIVEN
    )
    out = _shaped(out, x)
    return (out, _aux(routing, E, rows.shape[0], pairs)) if return_aux else out


def grouped_experts(
    rows,
    counts,
    W1,
    W2,
    *,
    row_scores=None,
    W1_up=None,
    b1=None,
    b1_up=None,
    b2=None,
    activation="swiglu",
    gate_layout="concatenated",
    clamp=0.0,
    alpha=0.0,
    up_shift=0.0,
    addend=None,
    overwrite_H=False,
    column_blocks=1,
    weight_grad_out=None,
    accumulate=True,
):
    """The experts alone, over rows that are sorted by expert already.

    rows (R, d) and counts (E) int32 or int64 -> (R, d): the first counts[0] rows go through expert
    0, and so on, each scaled by its `row_scores` (R). Rows past the sum of the counts are not read:
    they are zero in the output and in the gradient. Every row counts when the counts are read, on
    the device. All else as in `moe`.
    """
    layer = _layer(
        W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
        column_blocks, overwrite_H, weight_grad_out, accumulate,
    )  # fmt: skip
    _library.require_device(rows)
    if row_scores is not None:
        row_scores = row_scores.float()
    detached = row_scores.detach() if row_scores is not None else None
    routing = ops.call(_ops.route_grouped.default, counts, detached, rows.shape[0])
    return _experts(
        rows, row_scores, routing, layer, addend, _rules.GROUPED, 0, rows.shape[0],
        _rules.SCORES_GIVEN,
    )  # fmt: skip


# ---------------------------------------------------------------- parts


def _rows(tensor):
    """(..., width) as (rows, width)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _shaped(rows, like):
    """(rows, width) as (..., width). A view that changes nothing would be a node of the graph."""
    return rows if like.dim() == 2 else rows.reshape(*like.shape[:-1], rows.shape[-1])


def _check_shape(name, tensor, *shape):
    if tensor.shape != shape:
        raise ValueError(
            f"tilemoe: {name} has shape {shape_text(tensor.shape)}, expected "
            f"{shape_text(shape)} for this x and these weights"
        )


def _layer(W1, W1_up, W2, b1, b1_up, b2, activation, gate_layout, clamp, alpha, up_shift,
           column_blocks, overwrite_H, weight_grad_out, accumulate):  # fmt: skip
    return _Layer(
        (W1, W1_up, W2, b1, b1_up, b2),
        (
            _rules.number("activation", _rules.ACTIVATIONS, activation),
            _rules.number("gate_layout", _rules.GATE_LAYOUTS, gate_layout),
            clamp, alpha, up_shift, column_blocks,
        ),
        overwrite_H,
        weight_grad_out,
        accumulate,
    )


def _top_k(x, logits, layer, addend, K, scoring, selection_bias, return_aux):
    """O (T, d), and where it is asked for its Aux."""
    scoring = _rules.number("scoring", _rules.SCORINGS, scoring)
    args = (x, logits, selection_bias, layer, addend, (K, scoring), return_aux)
    found = _run(_ops.moe.default, *args)
    if not return_aux:
        return found
    out, routing, counts = found
    counters = _rules.counters_of(routing)
    none = torch.zeros_like(counters[:3]).unbind()  # K distinct experts have every token
    return out, Aux(counts, *none[:2], counters[0] + counters[1], none[2])


def _route_rounded(logits, K, rounding, m, tokens, seed, offset):
    """The rounded routing of logits (T, E), the rows it may have, the counts (E) before rounding
    and what rounding changed, (E) or (groups, E)."""
    number = _rules.number("rounding", _rules.ROUNDINGS, rounding)
    if (rounding == "stochastic") != (seed is not None and offset is not None):
        raise ValueError("tilemoe: stochastic rounding has a seed and an offset, no other has")
    seed, offset = (_counter(value, logits.device) for value in (seed, offset))
    T, E = logits.shape
    tokens = T if tokens is None else tokens
    if tokens < 1 and T > 0 or T % max(tokens, 1):
        raise ValueError(f"tilemoe: rounding_tokens is {tokens}, and T = {T} is no multiple of it")
    groups = T // max(tokens, 1)
    if groups <= 1:
        args = (logits.detach(), seed, offset, K, m, number)
        routing, counts = ops.call(_ops.route_rounded.default, *args)
        capacity = _rules.rounded_capacity(T, E, K, m, rounding)
        change = _rules.offsets_of(routing, E).diff() - counts  # (E)
    else:
        of_group = _rules.rounded_capacity(tokens, E, K, m, rounding)
        capacity = groups * of_group
        made = []
        for i, part in enumerate(logits.detach().split(tokens)):
            drawn = offset * groups + i if offset is not None else None
            made.append(ops.call(_ops.route_rounded.default, part, seed, drawn, K, m, number))
        routings, counts = (torch.stack(tensors) for tensors in zip(*made))
        change = _rules.offsets_of(routings, E).diff() - counts  # (groups, E)
        routing = _groups.as_one(routings, tokens, E, of_group)
        counts = counts.sum(0, dtype=torch.int32)
    return routing, capacity, counts, change


def _rounded(x, logits, layer, addend, K, scoring, selection_bias, return_aux, rounding, m, tokens,
             seed, offset):  # fmt: skip
    """The same; the counts are those before rounding."""
    # Over the chosen experts the two softmaxes are one; an added pair's score is of the second.
    if scoring not in ("softmax_over_chosen", "softmax_renormalized"):
        raise ValueError(
            f"tilemoe: scoring is {scoring!r}, but rounding goes with softmax_over_chosen"
        )
    if selection_bias is not None:
        raise ValueError("tilemoe: selection_bias: only the sigmoid scorings have it")
    T, E = logits.shape
    args = (K, rounding, m, tokens, seed, offset)
    routing, capacity, counts, change = _route_rounded(logits, *args)
    renormalized = _rules.SCORINGS.index("softmax_renormalized")
    out = _experts(x, logits, routing, layer, addend, _rules.ROUNDED, K, capacity, renormalized)
    if not return_aux:
        return out
    # Within one expert rounding drops or adds, never both.
    dropped, added = ((sign * change).clamp(min=0).sum(dtype=torch.int32) for sign in (-1, 1))
    *_, token_offsets = _rules.row_arrays_of(routing, E, capacity)
    without = (token_offsets[: T + 1].diff() == 0).sum(dtype=torch.int32)
    return out, Aux(counts, dropped, added, torch.zeros_like(dropped), without)


def _counter(value, device):
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.reshape(1)
    return torch.full((1,), value, dtype=torch.int64, device=device)


def _aux(routing, E, T, capacity):
    """Of pairs that were given."""
    offsets, counters = _rules.offsets_of(routing, E), _rules.counters_of(routing)
    _, row_token, *_ = _rules.row_arrays_of(routing, E, capacity)
    there = torch.arange(capacity, device=routing.device) < offsets[E]
    seen = torch.zeros(T + 1, dtype=torch.bool, device=routing.device)
    seen = seen.scatter(0, torch.where(there, row_token, T).long(), True)[:T]
    without = T - seen.sum(dtype=torch.int32)
    none = torch.zeros_like(without)
    return Aux(offsets.diff(), none, none, counters[0] + counters[1], without)


def _cast(tensor, dtype):
    if tensor is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _experts(x, router, routing, layer, addend, kind, K, capacity, scoring):
    """O (T, d) of a routing that was built."""
    rule = (kind, K, capacity, scoring)
    return _run(_ops.experts.default, x, router, routing, layer, addend, rule)


def _run(op, x, router, third, layer, addend, rule, more=False):
    """`moe` or `experts`, whose third argument and first numbers are `third` and `rule`. O, and
    where `more` is asked for what else it gives; H is autograd's."""
    weights = layer.weights
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, addend = _cast(x, dtype), _cast(addend, dtype)
        weights = tuple([_cast(weight, dtype) for weight in weights])
    _library.require_dtype(x)
    tensors = (x, router, *weights, addend)
    given = layer.weight_grad_out
    if not torch.is_grad_enabled():
        found = ops.call_undifferentiated(
            op, x, router, third, *weights, addend, *rule, *layer.shape, False, layer.overwrite_H
        )
    elif given is None and (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    ):
        keep_H = any(t is not None and t.requires_grad for t in tensors[:-1])
        found = ops.call(
            op, x, router, third, *weights, addend, *rule, *layer.shape, keep_H, layer.overwrite_H
        )
    else:
        numbers = (*rule, *layer.shape)
        accumulate = given is not None and layer.accumulate
        return ops.differentiated(
            op, tensors, third, numbers, layer.overwrite_H, more, given, accumulate
        )
    return (found[0], *found[2:]) if more else found[0]
