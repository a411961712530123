"""Call the operators that compute the layer.

The public functions, the modules and the ranks of a group share this code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import (
    _checks,
    _given_memory,
    _library,
    _lora_autograd,
    _router_autograd,
    _travel,
    autograd,
    ops,
    recipes,
)
from ._autocast import autocast_dtype
from ._layout import WEIGHTS, array_of, counters_of, offsets_of, rule_of
from ._quantized import (
    KINDS, Weight, any_quantized, operands, require_transposed, with_recipe,
)  # fmt: skip
from ._shapes import shape_text
from .lora import LoRA, factors_of, no_factors
from .options import (
    LITERALS, ROUNDED, RULE, SCORES_GIVEN, SCORINGS, TOP_K, At, OnOverflow, Options,
)  # fmt: skip
from .quantization import QuantizedExperts
from .routing import (
    Aux,
    Counter,
    aux_of_pairs,
    choose,
    choose_as_rounding,
    counts_of_ids,
    given_choice,
    route_rounded,
    rows_of,
    shaped_like,
)

_ops = _library.operators

NO_K = "K is required unless ids is given"


_GIVEN_AND_QUANTIZED = (
    "weight_grad_out requires weights that are not quantised; quantised weights have no gradients"
)
_ONE_OF_BOTH = "the adapters' gradients are returned by autograd, like those of the weights"


class WeightGradients(NamedTuple):
    """Memory for the gradients of weights; None: autograd returns the gradient as usual.

    Each tensor has its weight's shape, its dtype or float32, and is aligned to 16 bytes. It does
    not share memory with an input or with another gradient, and requires no gradient itself.
    """

    W1: Tensor | None = None
    W1_up: Tensor | None = None
    W2: Tensor | None = None
    b1: Tensor | None = None
    b1_up: Tensor | None = None
    b2: Tensor | None = None


class Layer(NamedTuple):
    """Weights of a call, its options, memory for the weights' gradients, and adapters."""

    weights: list[Any]  # Weight or None, in the order of WEIGHTS
    options: Options
    weight_grad_out: WeightGradients | None = None
    lora: LoRA | None = None


def routed(
    x: Tensor,
    router: Tensor,
    layer: Layer,
    *,
    ids: Tensor | None,
    selection_bias: Tensor | None,
    seed: Counter | None,
    offset: Counter | None,
    addend: Tensor | None,
    return_aux: bool,
    rounds: bool = True,
) -> Any:
    """Compute O (..., d) from x (..., d) and logits (..., E), or scores (..., K) with ids.

    With `return_aux` the Aux is also returned. rounds=False ignores the options' token rounding.
    """
    if type(x) not in _library.PLAIN or torch.compiler.is_compiling():  # no error is raised there
        _require_usual(x, router, ids)
    try:
        out, aux = _routed(
            x, router, layer, ids, selection_bias, seed, offset, addend, return_aux, rounds
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        _require_usual(x, router, ids)
        experts_in(layer.weights[0])
        raise
    out = shaped_like(out, x)
    return (out, shaped_choice(aux, x)) if return_aux else out


def shaped_choice(aux: Aux, like: Tensor) -> Aux:
    """Return the Aux with ids and scores (..., K) of the rows of `like` (..., d)."""
    if like.dim() == 2:
        return aux
    return aux._replace(ids=shaped_like(aux.ids, like), scores=shaped_like(aux.scores, like))


def _require_usual(x: Any, router: Any, ids: Any) -> None:
    """Raise an error that names the argument that no kernel reads or that is on another device.

    torch's errors do not name it. Called only after an error: in every call the check would cost
    host time.
    """
    _library.require_device(x, "x")
    together = {"logits": router} if ids is None else {"scores": router, "ids": ids}
    _library.require_together(x, "x", **together)


def _routed(x, router, layer, ids, selection_bias, seed, offset, addend, return_aux, rounds):
    options, W1 = layer.options, layer.weights[0]
    name, expected = ("logits", "(..., E)") if ids is None else ("scores", "(..., K)")
    rows, router = rows_of(x, "x", "(..., d)"), rows_of(router, name, expected)
    if addend is not None:
        addend = shaped_as(addend, rows)
    T, (E, _, _) = rows.shape[0], W1.shape
    if ids is None:
        check_shape(name, router, T, E)
        if options.K is None:
            raise ValueError(NO_K)
        if options.rounding is not None and rounds:
            return _rounded(rows, router, layer, addend, selection_bias, return_aux, seed, offset)
        if options.capacity is None:
            return _top_k(rows, router, layer, addend, selection_bias, return_aux)
        router, ids, _ = choose(router, options, selection_bias)
    else:
        ids = rows_of(ids, "ids", expected)
        check_shape("ids", ids, T, ids.shape[1])
        check_shape("scores", router, T, ids.shape[1])
    how = addend, options.capacity, options.on_overflow, return_aux
    return of_ids(rows, router, ids, E, layer, *how)


# ---------------------------------------------------------------- the router's GEMM in the call


class LinearRouter(NamedTuple):
    """Router whose logits are torch.nn.functional.linear(x, weight, bias)."""

    weight: Tensor  # (E, d)
    bias: Tensor | None = None  # (E)


def cast_router(
    x: Tensor, router: LinearRouter, dtype: torch.dtype | None
) -> tuple[Tensor, LinearRouter]:
    """Return x and the router as torch's linear layer casts them under autocast to `dtype`."""
    if dtype is None:
        return x, router
    return _cast(x, dtype), LinearRouter(_cast(router.weight, dtype), _cast(router.bias, dtype))


def in_one_node(x: Tensor, router: LinearRouter, layer: Layer, rounds: bool) -> bool:
    """Return whether `moe_with_router` computes this call; otherwise logits, then `routed`.

    Both have the same logits, choice and output. x and the router are on one device. The operator
    has no token rounding, whose routing needs the logits before, no capacity, no adapters and
    quantised weights, which have operators of their own, and no memory for gradients. It does not
    write dH over H in a compiled backward.
    """
    options, weight, bias = layer.options, router.weight, router.bias
    if layer.lora is not None or layer.weight_grad_out is not None or any_quantized(layer.weights):
        return False
    if options.K is None or options.capacity is not None or (rounds and options.rounding):
        return False
    if torch.compiler.is_compiling():
        if options.overwrite_H:
            return False
    elif torch._C._are_functorch_transforms_active():
        return False  # refused there
    plain, dtype = _library.PLAIN, x.dtype
    if type(x) not in plain or type(weight) not in plain or weight.dtype != dtype:
        return False  # DTensors and quantised weights have kernels of their own
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return False  # the linear layer raises the error
    if bias is None:
        return True
    return type(bias) in plain and bias.dtype == dtype and bias.shape == weight.shape[:1]


def with_router(
    x: Tensor,
    router: LinearRouter,
    layer: Layer,
    *,
    cast: torch.dtype | None,
    selection_bias: Tensor | None,
    addend: Tensor | None,
    return_aux: bool,
) -> tuple[Tensor, Aux | None, Tensor | None]:
    """Compute O (..., d), its Aux and the logits (T, E) from x (..., d), for a call in_one_node.

    Without return_aux only O. x and the router are those of cast_router, `cast` is its dtype. An x
    with more than two dimensions is contiguous.
    """
    options, weights = layer.options, layer.weights
    weight, bias = router
    if options.n_group != 1 or options.topk_group != 1:
        _checks.groups(options, weight.shape[0], options.K)
    rest = (options.numbers, options.reals)
    try:
        if cast is not None:
            addend = _cast(addend, x.dtype)
            weights = [_cast(one, x.dtype) for one in weights]
        differentiates = torch.is_grad_enabled()
        if not differentiates or torch.compiler.is_compiling():
            op, rows = _ops.moe_with_router.default, rows_of(x, "x", "(..., d)")
            args = rows, weight, bias, selection_bias, weights, addend, *rest
            if differentiates:
                inputs = (x, weight, bias, *weights)
                keep_H = any(t is not None and t.requires_grad for t in inputs)
                O, _, *more = ops.call(op, *args, keep_H, bool(options.overwrite_H))
            else:
                O, _, *more = ops.call_undifferentiated(op, *args, False, False)
            O = shaped_like(O, x)
        else:
            found = _router_autograd.differentiated(
                x, router, selection_bias, weights, addend, rest, options.overwrite_H, return_aux
            )
            if not return_aux:
                return found, None, None
            O, *more = found
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        _library.require_dtype(x)
        require_weights(layer.weights, addend)
        raise
    if not return_aux:
        return O, None, None
    routing, counts, logits = more
    return O, aux_of_top_k(routing, counts, choice_of(logits, options, selection_bias)), logits


def _top_k(x, logits, layer, addend, selection_bias, return_aux):
    options = layer.options
    if options.n_group != 1 or options.topk_group != 1:
        _checks.groups(options, logits.shape[1], options.K)
    how = (options.numbers, options.reals)
    found = run(_ops.moe.default, x, logits, selection_bias, layer, addend, (), *how, return_aux)
    if not return_aux:
        return found, None
    out, routing, counts = found
    return out, aux_of_top_k(routing, counts, choice_of(logits, options, selection_bias))


def aux_of_top_k(routing: Tensor, counts: Tensor, choice: tuple[Tensor, Tensor]) -> Aux:
    """Return the Aux of K experts per token with one row per pair; choice: ids and scores."""
    counters = counters_of(routing)
    dropped, added, without, overflow = torch.zeros_like(counters).unbind()
    return Aux(counts, dropped, added, counters[0] + counters[1], without, overflow, *choice)


def choice_of(
    logits: Tensor, options: Options, selection_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the ids and scores (T, K) of an Aux.

    The operators that choose and compute in one call do not return them, so one kernel chooses
    again, with the same bits.
    """
    scores, ids, _ = choose(logits.detach(), options, selection_bias)
    return ids, scores


def _rounded(x, logits, layer, addend, selection_bias, return_aux, seed, offset):
    """Compute `routed` with token rounding; the counts are those before rounding."""
    refuse_bias(selection_bias)
    (T, E), K = logits.shape, layer.options.K
    routing, capacity, counts = route_rounded(logits, layer.options, seed, offset)
    # Both softmaxes are equal over the chosen experts; the score of an added pair uses the second.
    rule = rule_of(ROUNDED, K, SCORINGS.index("softmax_renormalized"))
    out = of_routing(x, logits, routing, layer, addend, capacity, rule)
    if not return_aux:
        return out, None
    dropped = counters_of(routing)[3].clone()
    added = offsets_of(routing, E)[E] - T * K + dropped
    token_offsets = array_of("token_offsets", routing, ROUNDED, T, E, capacity)
    without = (token_offsets.diff() == 0).sum(dtype=torch.int32)
    none = torch.zeros_like(dropped)
    choice = choose_as_rounding(logits, layer.options)
    return out, Aux(counts, dropped, added, none, without, torch.zeros_like(none), *choice)


# ---------------------------------------------------------------- given experts


def chunks_of(ids, E, routing, cuts):
    """Return the Chunks of a routing.

    The rows of an expert are in the order of their tokens; pairs past the capacity have no row.
    """
    offsets = offsets_of(routing, E)
    counts = [counts_of_ids(ids[begin:end], E) for begin, end in zip(cuts, cuts[1:])]
    ends = offsets[:-1] + torch.stack(counts).cumsum(0, dtype=torch.int32)
    return _travel.Chunks(torch.cat([offsets[None, :-1], ends.minimum(offsets[1:])]), cuts)


def of_ids(
    x: Tensor,
    scores: Tensor,
    ids: Tensor,
    E: int,
    layer: Layer,
    addend: Tensor | None,
    capacity: int | None,
    on_overflow: OnOverflow,
    return_aux: bool,
    comm: _travel.Comm | None = None,
    cuts: list[int] | None = None,
) -> tuple[Tensor, Aux | None]:
    """Compute O (T, d) from ids and scores (T, K); return O and its Aux or None.

    comm: see `run`; cuts: first token of each chunk of the communication.
    """
    (T, K), pairs = ids.shape, ids.numel()
    rows = pairs if capacity is None else min(capacity, pairs)
    routing = ops.call_undifferentiated(_ops.route_top_k.default, ids, scores.detach(), E, rows)
    if comm is not None and cuts is not None:
        comm = comm._replace(chunks=chunks_of(ids, E, routing, cuts))
    rule = rule_of(TOP_K, K, SCORES_GIVEN)
    out = of_routing(x, scores, routing, layer, addend, rows, rule, comm)
    if rows != pairs and on_overflow == "nan":
        out = _spoilt(out, counters_of(routing)[0] > 0)
    if not return_aux:
        return out, None
    counts = counts_of_ids(ids, E) if rows != pairs else None
    return out, aux_of_pairs(routing, E, T, rows, given_choice(ids, scores), counts)


class _Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, is_spoilt):
        ctx.mark_dirty(out)
        return out.masked_fill_(is_spoilt, torch.nan)

    @staticmethod
    def backward(ctx, dO):
        return dO, None


def _spoilt(out, is_spoilt):
    """Return out, or NaN in its place if is_spoilt (); the caller has the only reference to out."""
    if torch.compiler.is_compiling():
        return out.masked_fill(is_spoilt, torch.nan)
    if not (torch.is_grad_enabled() and out.requires_grad):
        return out.masked_fill_(is_spoilt, torch.nan)
    return _Spoilt.apply(out, is_spoilt)


# ---------------------------------------------------------------- the operators


def of_routing(
    x: Tensor,
    router: Tensor | None,
    routing: Tensor,
    layer: Layer,
    addend: Tensor | None,
    capacity: int,
    rule: list[int],
    comm: _travel.Comm | None = None,
) -> Tensor:
    """Compute O (T, d) with a given routing."""
    numbers = [*rule, *layer.options.numbers[len(RULE) :]]
    reals = list(layer.options.reals)
    reals[At.ROUTED_SCALING_FACTOR] = 1.0  # already part of the routing's scores
    op = _ops.experts.default
    return run(op, x, router, routing, layer, addend, (capacity,), numbers, reals, comm=comm)


def run(
    op, x, router, third, layer, addend, capacity, numbers, reals, more=False, comm=None
) -> Any:
    """Call `moe` or `experts`, whose third argument is `third`, with or without a capacity.

    Return O, and with `more` the operator's other outputs except H, which autograd saves. `comm` is
    a _travel.Comm, through which backward gets x.
    """
    weights, given = layer.weights, layer.weight_grad_out
    try:
        recipe, is_quantized = "bf16", any_quantized(weights)
        if is_quantized:
            recipe = _recipe_of(x, router, weights, layer.options, capacity)
            weights = with_recipe(weights, recipe)
            is_quantized = any_quantized(weights)
            numbers = [*numbers]
            numbers[At.RECIPE] = LITERALS["recipe"].index(recipe)
        if numbers[At.SAVE_H] and recipe != "fp8" and layer.options.recipe == "auto":
            numbers = [*numbers]
            numbers[At.SAVE_H] = 0
        device_type = x.device.type
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            x, addend = _cast(x, dtype), _cast(addend, dtype)
            weights = [_cast(weight, dtype) for weight in weights]
        if type(x) not in _library.PLAIN:
            _library.require_dtype(x)
        rest = (*capacity, numbers, reals)
        if layer.lora is not None or is_quantized:
            return _frozen(op, x, router, third, weights, layer, addend, rest, more, comm, recipe)
        if given is not None:
            _check_given(given, layer.weights, x, router, addend)
        if not torch.is_grad_enabled():
            if comm is not None and comm.chunks is not None:
                return autograd.forward_in_chunks(x, third, weights, *rest, False, comm)[0]
            args = (x, router, third, weights, addend, *rest, False, False)
            found = ops.call_undifferentiated(op, *args)
            return (found[0], *found[2:]) if more else found[0]
        tensors, overwrite_H = (x, router, *weights, addend), layer.options.overwrite_H
        if given is None and (
            torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        ):
            keep_H = any(t is not None and t.requires_grad for t in tensors[:-1])
            args = (x, router, third, weights, addend, *rest, keep_H, bool(overwrite_H))
            found = ops.call(op, *args)
            return (found[0], *found[2:]) if more else found[0]
        accumulate = given is not None and layer.options.accumulate
        return autograd.differentiated(
            op, tensors, third, rest, overwrite_H, more, given, accumulate, comm
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        _library.require_dtype(x)
        require_weights(layer.weights, addend)
        raise


def _recipe_of(x, router, weights, options, capacity):
    """Return the recipe of a call with quantised weights; "auto" is chosen from its sizes."""
    if options.recipe != "auto":
        return options.recipe
    W2 = weights[WEIGHTS.index("W2")]
    pairs = capacity[0] if capacity else router.shape[0] * options.K
    E, d, n = W2.shape
    return recipes.choice_of(x, x.shape[0], pairs, (E, d, n), options, W2.dtype).recipe


def _frozen(op, x, router, third, weights, layer, addend, rest, more, comm, recipe="bf16"):
    """Call `run` with adapters, quantised weights or both; `weights` are cast under autocast."""
    if layer.weight_grad_out is not None:
        if layer.lora is None:
            raise NotImplementedError(_GIVEN_AND_QUANTIZED)
        raise NotImplementedError("lora and weight_grad_out cannot be combined: " + _ONE_OF_BOTH)
    if comm is not None and comm.chunks is not None:
        which = "quantised weights require" if layer.lora is None else "lora requires"
        raise NotImplementedError(f"{which} chunks=1")
    if recipe == "fp8" and layer.lora is not None:
        raise NotImplementedError(_checks.ADAPTERS_IN_FP8)
    *capacity, numbers, reals = rest
    quantized = operands(weights, x, recipe)
    if recipe == "fp8" and torch.is_grad_enabled():
        needing = (x, router, *quantized.weights)
        if any(t is not None and t.requires_grad for t in needing):
            require_transposed(weights)
    weights = quantized.weights
    factors = no_factors() if layer.lora is None else factors_of(layer.lora, x, weights, numbers)
    routing, counts = third, None
    if op is _ops.moe.default:
        routing, counts = _lora_autograd.routed(router, third, numbers, reals)
        capacity = [router.shape[0] * numbers[At.K]]
    out = _lora_autograd.run(
        x, router, routing, weights, addend, factors, quantized, *capacity, numbers, reals,
        layer.options.overwrite_H, comm,
    )  # fmt: skip
    return (out, routing, counts) if more else out


def _check_given(given, weights, x, router, addend):
    ops.refuse_transforms()
    if not isinstance(given, WeightGradients):
        kind = _library.class_of(given)
        raise TypeError(f"weight_grad_out must be a tilemoe.WeightGradients, got a {kind}")
    others = {"x": x, "the logits or scores": router, "addend": addend}
    _given_memory.check(given, weights, x.dtype, others)


def _cast(tensor, dtype):
    if tensor is None or type(tensor) in KINDS:
        return tensor
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


# ---------------------------------------------------------------- checks of tensors


def require_weights(weights: list[Weight | None], addend: Tensor | None) -> None:
    """Raise an error that names the argument that no kernel reads.

    torch's errors do not name it. Called only after an error: in every call the check would cost
    host time.
    """
    for name, tensor in zip((*WEIGHTS, "addend"), (*weights, addend)):
        if type(tensor) in KINDS and name in WEIGHTS[:3]:
            of = (tensor,) if type(tensor) is QuantizedExperts else tensor[:2]
            for one in of:
                if one is not None:
                    one.check(name)
            continue
        if tensor is not None:
            _library.require_weight(tensor, name)


def experts_in(W1: Any) -> int:
    """Return E of W1, whose other sizes the operators check."""
    if type(W1) in KINDS:
        return W1.shape[0]
    _library.require_weight(W1, "W1")
    if W1.dim() != 3:
        raise ValueError(
            f"W1 has shape {shape_text(W1.shape)}, expected three dimensions (E, 2n, d) or (E, "
            "n, d)"
        )
    return W1.shape[0]


def shaped_as(addend: Tensor, rows: Tensor) -> Tensor:
    _library.require_tensor(addend, "addend")
    if addend.numel() != rows.numel():
        raise ValueError(
            f"addend has shape {shape_text(addend.shape)}, expected the shape of x, as "
            f"rows {shape_text(rows.shape)}"
        )
    return addend.reshape(rows.shape)


def refuse_bias(selection_bias: Tensor | None) -> None:
    """Reject a selection bias with token rounding, which requires a softmax."""
    if selection_bias is not None:
        raise ValueError(
            "selection_bias requires a sigmoid scoring, got rounding, which requires a "
            "softmax scoring"
        )


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{name} has shape {shape_text(tensor.shape)}, expected "
            f"{shape_text(shape)} for this x and these weights"
        )
