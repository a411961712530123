"""Define the fake kernels, which torch traces in the place of the operators.

They return the shapes of the outputs and raise the same errors as the kernels, with the library's
messages.
"""

import functools

import torch

from ._library import NAMESPACE, operators
from ._layout import (
    ARRAYS,
    FACTORS,
    FORMATS,
    GRADIENTS,
    QUANTIZED,
    RANKS,
    SCALES,
    WEIGHTS,
    h_width,
    names_of_gradients,
    rounded_capacity,
    routing_elements,
    saved_H,
    w1_rows,
)
from .options import (
    GENERAL,
    GROUPED,
    LITERALS,
    NUMBERS,
    REALS,
    ROUNDED,
    RULE,
    SCORES_GIVEN,
    TOP_K,
    At,
)

# Bits of `wanted` (TILEMOE_GRADIENT_ in tilemoe.h).
WANTED_X, WANTED_S, WANTED_W1, WANTED_W1_UP, WANTED_W2, WANTED_B1, WANTED_B1_UP, WANTED_B2 = (
    1 << bit for bit in range(len(GRADIENTS))
)
# Of moe_with_router, where the gradient of router_weight is in the place of ds.
OF_ROUTER_BIAS = 1 << len(GRADIENTS)


def shape_text(shape):
    return f"({', '.join(map(str, shape))})"


def _check_dims(name, tensor, dims, expected):
    if tensor.dim() != dims:
        seen = shape_text(tensor.shape)
        raise ValueError(f"{name} has shape {seen}, expected {expected}")


def _check_shape(function, name, tensor, *shape):
    if tensor is not None and tuple(tensor.shape) != shape:
        seen, expected = shape_text(tensor.shape), shape_text(shape)
        raise ValueError(f"{function}: {name} has shape {seen}, expected {expected}")


def _check_length(name, seen, expected):
    if len(seen) != len(expected):
        raise ValueError(f"{name} has length {len(seen)}, expected {len(expected)}")


def _check_lists(weights, numbers, reals=REALS):
    _check_length("weights", weights, WEIGHTS)
    _check_length("numbers", numbers, NUMBERS)
    _check_length("reals", reals, REALS)
    for name, tensor in zip(WEIGHTS, weights):
        if tensor is None and name in ("W1", "W2"):
            raise ValueError(f"{name} is required")


def _check_weights(function, X, weights, numbers):
    """Check the weights, and return n, from W2."""
    W1, W1_up, W2, b1, b1_up, b2 = weights
    _check_dims("W2", W2, 3, "(E, d, n)")
    E, d, n = W2.shape
    rows = w1_rows(numbers[At.ACTIVATION], numbers[At.GATE_LAYOUT], n)
    if tuple(W1.shape) != (E, rows, d):  # either may be wrong
        expected = "(E, n, d)" if rows == n else "(E, 2n, d)"
        raise ValueError(
            f"W1 has shape {shape_text(W1.shape)}, W2 has shape {shape_text(W2.shape)}, "
            f"expected {expected} and (E, d, n) of the same E, n and d"
        )
    _check_shape(function, "weights.b1", b1, E, rows)
    _check_shape(function, "weights.b2", b2, E, d)
    _check_shape(function, "weights.W1_up", W1_up, E, n, d)
    _check_shape(function, "weights.b1_up", b1_up, E, n)
    _check_dims("X", X, 2, "(T, d)")
    _check_shape(function, "X", X, X.shape[0], d)
    return n


def _named_tensors(names, values):
    """Return (name, tensor) of each tensor among an operator's arguments, also in lists."""
    arguments = dict(zip(names, values))
    for name, value in arguments.items():
        if name == "weights":
            yield from _named_tensors(WEIGHTS, value)
        elif name == "lora":
            yield from _named_tensors(FACTORS, value)
        elif name == "quantized":
            yield from _named_tensors(QUANTIZED, value)
        elif name == "arrays":
            yield from _named_tensors(ARRAYS, value)
        elif name == "gradients":
            yield from zip(names_of_gradients(arguments["places"]), value)
        elif isinstance(value, torch.Tensor):
            yield name, value


def check_devices(names, values):
    """Require one device for all tensors.

    A single tensor on meta dispatches its call to these kernels, whose outputs are not computed,
    whatever the devices of the other tensors are.
    """
    first = None
    for name, tensor in _named_tensors(names, values):
        if first is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"expected all tensors on one device: {name} is on {tensor.device}, {first} is "
                f"on {device}"
            )


def _register(name):
    """Register a function as the operator's fake kernel, after a check of all its tensors."""
    schema = getattr(operators, name).default._schema
    names = [argument.name for argument in schema.arguments]

    def register(kernel):
        @functools.wraps(kernel)
        def checked(*args):
            check_devices(names, args)
            return kernel(*args)

        torch.library.register_fake(f"{NAMESPACE}::{name}", checked)
        return kernel

    return register


def _int32(like, *shape):
    return like.new_empty(shape, dtype=torch.int32)


def _check_K(K, E):
    if not 1 <= K <= E:
        raise ValueError(f"K must be in [1, {E}] for E = {E}, got {K}")


@_register("top_k")
def _(logits, selection_bias, rule, routed_scaling_factor, ids_dtype):
    _check_dims("logits", logits, 2, "(T, E)")
    _check_length("rule", rule, RULE)
    (T, E), K = logits.shape, rule[At.K]
    _check_K(K, E)
    scores = logits.new_empty((T, K), dtype=torch.float32)
    return scores, logits.new_empty((T, K), dtype=ids_dtype), _int32(logits, E)


@_register("router_logits")
def _(X, weight, bias, dtype):
    _check_dims("X", X, 2, "(T, d)")
    _check_dims("weight", weight, 2, "(E, d)")
    E = weight.shape[0]
    _check_shape("tilemoe_router_logits", "weight", weight, E, X.shape[1])
    _check_shape("tilemoe_router_logits", "bias", bias, E)
    return X.new_empty((X.shape[0], E), dtype=dtype)


@_register("scores_at")
def _(logits, ids, scoring, routed_scaling_factor):
    _check_dims("logits", logits, 2, "(T, E)")
    _check_dims("ids", ids, 2, "(T, K)")
    _check_shape("tilemoe_top_k_scores", "ids", ids, logits.shape[0], ids.shape[1])
    return logits.new_empty(ids.shape, dtype=torch.float32)


@_register("top_k_backward")
def _(dscores, ids, scores, logits, E, scoring, routed_scaling_factor, dtype):
    return dscores.new_empty((ids.shape[0], E), dtype=dtype)


@_register("route_logits")
def _fake_route_logits(logits, selection_bias, rule, routed_scaling_factor):
    _check_dims("logits", logits, 2, "(T, E)")
    _check_length("rule", rule, RULE)
    (T, E), K = logits.shape, rule[At.K]
    _check_K(K, E)
    return _int32(logits, routing_elements(TOP_K, T, E, T * K)), _int32(logits, E)


@_register("route_top_k")
def _(ids, scores, E, capacity):
    _check_dims("ids", ids, 2, "(T, K)")
    T, K = ids.shape
    _check_shape("tilemoe_route_top_k", "scores", scores, T, K)
    return _int32(ids, routing_elements(TOP_K, T, E, capacity, T * K))


@_register("route_general")
def _(tokens, experts, scores, T, E):
    _check_dims("tokens", tokens, 1, "(pairs)")
    pairs = tokens.shape[0]
    _check_shape("tilemoe_route_general", "experts", experts, pairs)
    _check_shape("tilemoe_route_general", "scores", scores, pairs)
    return _int32(tokens, routing_elements(GENERAL, T, E, pairs))


@_register("route_rounded")
def _(logits, seed, offset, K, m, rounding, round_tokens):
    _check_dims("logits", logits, 2, "(T, E)")
    T, E = logits.shape
    _check_K(K, E)
    capacity = rounded_capacity(T, E, K, m, LITERALS["rounding"][rounding], round_tokens)
    return _int32(logits, routing_elements(ROUNDED, T, E, capacity)), _int32(logits, E)


@_register("route_grouped")
def _(counts, row_scores, rows):
    _check_dims("counts", counts, 1, "(E)")
    _check_shape("tilemoe_route_grouped", "scores", row_scores, rows)
    return _int32(counts, routing_elements(GROUPED, 0, counts.shape[0], rows))


@_register("experts")
def _fake_experts(
    X, router, routing, weights, addend, capacity, numbers, reals, keep_H, overwrite_H
):
    _check_lists(weights, numbers, reals)
    n = _check_weights("tilemoe_forward", X, weights, numbers)
    if addend is not None:
        _check_shape("tilemoe_forward", "addend", addend, *X.shape)
    H = saved_H(X, capacity, numbers, n) if keep_H else X.new_empty((0,))
    return X.new_empty(X.shape), H


@_register("moe")
def _(X, logits, selection_bias, weights, addend, numbers, reals, keep_H, overwrite_H):
    _check_lists(weights, numbers, reals)
    rule, factor = numbers[: len(RULE)], reals[At.ROUTED_SCALING_FACTOR]
    routing, expert_counts = _fake_route_logits(logits, selection_bias, rule, factor)
    capacity = logits.shape[0] * rule[At.K]
    O, H = _fake_experts(
        X, logits, routing, weights, addend, capacity, numbers, reals, keep_H, overwrite_H
    )
    return O, H, routing, expert_counts


@_register("moe_with_router")
def _(X, router_weight, router_bias, selection_bias, weights, addend, numbers, reals, keep_H,
      overwrite_H):  # fmt: skip
    _check_lists(weights, numbers, reals)
    _check_dims("X", X, 2, "(T, d)")
    _check_dims("router_weight", router_weight, 2, "(E, d)")
    E, rule, factor = router_weight.shape[0], numbers[: len(RULE)], reals[At.ROUTED_SCALING_FACTOR]
    _check_shape("moe_with_router", "router_weight", router_weight, E, X.shape[1])
    _check_shape("moe_with_router", "router_bias", router_bias, E)
    logits = X.new_empty((X.shape[0], E))
    routing, expert_counts = _fake_route_logits(logits, selection_bias, rule, factor)
    capacity = X.shape[0] * rule[At.K]
    O, H = _fake_experts(
        X, logits, routing, weights, addend, capacity, numbers, reals, keep_H, overwrite_H
    )
    return O, H, routing, expert_counts, logits


@_register("gathered_mm")
def _(X, routing, W, b, capacity, kind, K):
    _check_mm("tilemoe_gathered_mm", X, W, b, "X", "(T, d)", "(E, n, d)")
    return X.new_empty((capacity, W.shape[1]))


@_register("gathered_mm_backward")
def _(dH, X, routing, W, kind, K, wanted):
    of_b = W.new_empty(W.shape[:2])
    made = X.new_empty(X.shape), _gradient_like(W), of_b
    return [gradient for bit, gradient in enumerate(made) if wanted & 1 << bit]


@_register("combine_mm")
def _(A, scores, routing, W, b, addend, T, kind, K):
    _check_mm("tilemoe_combine_mm", A, W, b, "A", "(capacity, n)", "(E, d, n)")
    d = W.shape[1]
    if addend is not None:
        _check_shape("tilemoe_combine_mm", "addend", addend, T, d)
    return A.new_empty((T, d))


@_register("combine_mm_backward")
def _(dO, A, routing, W, b, kind, K, wanted):
    of_s = (dO.shape[0], K) if kind == TOP_K else (A.shape[0],)
    made = (
        A.new_empty(A.shape),
        A.new_empty(of_s, dtype=torch.float32),
        _gradient_like(W),
        W.new_empty(W.shape[:2]),
    )
    return [gradient for bit, gradient in enumerate(made) if wanted & 1 << bit]


def _check_mm(function, rows, W, b, name, of_rows, of_W):
    _check_dims(name, rows, 2, of_rows)
    _check_dims("W", W, 3, of_W)
    _check_shape(function, name, rows, rows.shape[0], W.shape[2])
    _check_shape(function, "b", b, *W.shape[:2])


@_register("moe_tokens")
def _(X, router_weight, router_bias, selection_bias, weights, addend, numbers, reals, logits_dtype,
      wants_logits):  # fmt: skip
    _check_lists(weights, numbers, reals)
    _check_dims("X", X, 2, "(T, d)")
    _check_dims("router_weight", router_weight, 2, "(E, d)")
    (T, d), E, rule = X.shape, router_weight.shape[0], numbers[: len(RULE)]
    _check_shape("tilemoe_route_tokens", "router_weight", router_weight, E, d)
    _check_shape("tilemoe_route_tokens", "router_bias", router_bias, E)
    logits = X.new_empty((T, E), dtype=logits_dtype)
    routing, expert_counts = _fake_route_logits(logits, selection_bias, rule, 1.0)
    O, _ = _fake_experts(
        X, logits, routing, weights, addend, T * rule[At.K], numbers, reals, False, False
    )
    return O, routing, expert_counts, logits if wants_logits else logits.new_empty((0,))


def _gradient_like(weight):
    """Return an empty gradient that is contiguous in the same dimension as its weight."""
    if weight.dim() == 3 and weight.stride(2) != 1 and weight.stride(1) == 1:
        E, rows, columns = weight.shape
        return weight.new_empty((E, columns, rows)).transpose(1, 2)
    return weight.new_empty(weight.shape)


def empty_gradients(X, H, weights, numbers, wanted):
    """Return the eight empty gradients; None for each without a bit in `wanted`."""
    dX = X.new_empty(X.shape) if wanted & WANTED_X else None
    pairs = (X.shape[0], numbers[At.K]) if numbers[At.KIND] == TOP_K else (H.shape[0],)
    ds = X.new_empty(pairs, dtype=torch.float32) if wanted & WANTED_S else None
    return (
        dX,
        ds,
        *(
            _gradient_like(weight) if wanted & WANTED_W1 << i else None
            for i, weight in enumerate(weights)
        ),
    )


def _check_backward(dO, X, weights, numbers, reals, gradients=(), places=0):
    _check_length("gradients", gradients, names_of_gradients(places))
    _check_lists(weights, numbers, reals)
    _check_weights("tilemoe_backward", X, weights, numbers)
    _check_shape("tilemoe_backward", "dO", dO, *X.shape)


def _made(X, H, weights, numbers, router_dtype, wanted):
    dX, ds, *others = empty_gradients(X, H, weights, numbers, wanted)
    if ds is not None and numbers[At.SCORING] != SCORES_GIVEN:
        E = weights[WEIGHTS.index("W2")].shape[0]
        ds = X.new_empty((X.shape[0], E), dtype=router_dtype)
    return [gradient for gradient in (dX, ds, *others) if gradient is not None]


@_register("experts_backward")
def _(dO, X, H, routing, weights, logits, numbers, reals, router_dtype, wanted):
    _check_backward(dO, X, weights, numbers, reals)
    return _made(X, H, weights, numbers, router_dtype, wanted)


@_register("experts_backward_over_H")
def _(dO, X, H, routing, weights, logits, gradients, places, numbers, reals, router_dtype, wanted,
      accumulate):  # fmt: skip
    _check_backward(dO, X, weights, numbers, reals, gradients, places)
    return _made(X, H, weights, numbers, router_dtype, wanted), True


def _made_with_router(X, H, router_weight, weights, numbers, wanted):
    of_layer = wanted & ((1 << len(GRADIENTS)) - 1) & ~WANTED_S
    dX, _, *others = empty_gradients(X, H, weights, numbers, of_layer)
    of_router = router_weight.new_empty(router_weight.shape) if wanted & WANTED_S else None
    of_bias = router_weight.new_empty(router_weight.shape[:1]) if wanted & OF_ROUTER_BIAS else None
    made = (dX, of_router, *others, of_bias)
    return [gradient for gradient in made if gradient is not None]


@_register("moe_with_router_backward")
def _(dO, dlogits, X, H, routing, router_weight, weights, logits, numbers, reals, wanted):
    _check_backward(dO, X, weights, numbers, reals)
    return _made_with_router(X, H, router_weight, weights, numbers, wanted)


@_register("moe_with_router_backward_over_H")
def _(dO, dlogits, X, H, routing, router_weight, weights, logits, numbers, reals, wanted):
    _check_backward(dO, X, weights, numbers, reals)
    return _made_with_router(X, H, router_weight, weights, numbers, wanted), True


@_register("experts_part")
def _(X, routing, weights, bounds, cuts, part, capacity, numbers, reals, O, H):
    _check_lists(weights, numbers, reals)
    _check_weights("tilemoe_forward", X, weights, numbers)
    _check_shape("tilemoe_forward", "O", O, *X.shape)


@_register("experts_backward_part")
def _(dO, X, H, routing, weights, gradients, places, bounds, cuts, part, numbers, reals, workspace):
    _check_backward(dO, X, weights, numbers, reals, gradients, places)


@_register("experts_backward_out")
def _(dO, X, H, H_consumed, routing, weights, gradients, places, numbers, reals, accumulate):
    _check_backward(dO, X, weights, numbers, reals, gradients, places)


def _check_adapters(ranks, scales, lora=FACTORS):
    _check_length("lora", lora, FACTORS)
    _check_length("ranks", ranks, RANKS)
    _check_length("scales", scales, SCALES)


def _check_quantized(quantized, formats):
    if formats:
        _check_length("formats", formats, FORMATS)
    _check_length("quantized", quantized, QUANTIZED if formats else ())


def _packed_bytes(ranks, weights, numbers, dtype):
    """Return the bytes of packed adapters, as tilemoe_packed_lora_bytes does."""
    _check_dims("W2", weights[WEIGHTS.index("W2")], 3, "(E, d, n)")
    E, d, n = weights[WEIGHTS.index("W2")].shape
    (gate, up, of_W2), width = ranks, h_width(numbers[At.ACTIVATION], n)
    of_W1 = gate + up
    elements = (E * of_W1 * d, E * of_W1 * width, E * of_W2 * n, E * of_W2 * d)
    return sum((count * dtype.itemsize + 255) // 256 * 256 for count in elements)


@_register("pack_lora")
def _(lora, weights, ranks, scales, formats, numbers, dtype):
    _check_lists(weights, numbers)
    _check_adapters(ranks, scales, lora)
    if formats:
        _check_length("formats", formats, FORMATS)
    like = weights[WEIGHTS.index("W2")]
    return like.new_empty((_packed_bytes(ranks, weights, numbers, dtype),), dtype=torch.uint8)


@_register("experts_lora")
def _(X, router, routing, weights, addend, lora, packed, quantized, capacity, ranks, scales,
      formats, numbers, reals, keep_H):  # fmt: skip
    _check_adapters(ranks, scales, lora)
    _check_quantized(quantized, formats)
    O, H = _fake_experts(
        X, router, routing, weights, addend, capacity, numbers, reals, keep_H, False
    )
    gate, up, of_W2 = ranks
    P1, P2 = (
        X.new_empty((capacity, rank) if keep_H and rank else (0,)) for rank in (gate + up, of_W2)
    )
    return O, H, P1, P2


def _fake_lora_backward(
    dO, X, H, P1, P2, routing, weights, packed, quantized, ranks, scales, formats, numbers, reals,
    factor_dtype, wanted, H_codes=None
):  # fmt: skip
    _check_adapters(ranks, scales)
    _check_quantized(quantized, formats)
    _check_backward(dO, X, weights, numbers, reals)
    made = [
        gradient
        for gradient in empty_gradients(X, H, weights, numbers, wanted & (1 << len(GRADIENTS)) - 1)
        if gradient is not None
    ]
    (E, d, n), (gate, up, of_W2) = weights[WEIGHTS.index("W2")].shape, ranks
    rows = weights[0].shape[1]
    shapes = ((gate, d), (rows, gate), (up, d), (n, up), (of_W2, n), (d, of_W2))
    for bit, shape in enumerate(shapes, len(GRADIENTS)):
        if wanted & 1 << bit:
            made.append(X.new_empty((E, *shape), dtype=factor_dtype))
    return made


_register("experts_lora_backward")(_fake_lora_backward)
_register("experts_lora_backward_over_H")(_fake_lora_backward)


@_register("dequantize")
def _(arrays, format, shape, dtype):
    _check_length("arrays", arrays, ARRAYS)
    return arrays[0].new_empty(shape, dtype=dtype)


@_register("quantize_fp8")
def _(values, block_rows, float_scales):
    _check_dims("values", values, 3, "(E, R, C)")
    E, R, C = values.shape
    rows = (R + block_rows - 1) // block_rows
    scales = values.new_empty((E, rows, (C + 127) // 128), dtype=torch.float32)
    return values.new_empty((E, R, C), dtype=torch.uint8), scales


@_register("quantize_fp8_into")
def _(values, float_scales, codes, block_scales, transposed_codes, transposed_scales):
    _check_dims("values", values, 3, "(E, R, C)")


@_register("router_backward")
def _(ds, routing, logits, E, rule, routed_scaling_factor, dtype):
    _check_length("rule", rule, RULE)
    T = logits.shape[0] if logits is not None else ds.shape[0]
    return ds.new_empty((T, E), dtype=dtype)


@_register("router_losses")
def _(logits, expert_counts):
    _check_dims("logits", logits, 2, "(T, E)")
    _check_shape("tilemoe_router_losses", "expert_counts", expert_counts, logits.shape[1])
    return logits.new_empty((2,), dtype=torch.float32)


@_register("router_losses_backward")
def _(logits, expert_counts, balance_coefficient, z_coefficient):
    return logits.new_empty(logits.shape, dtype=torch.float32)


@_register("sum_rows")
def _(sources, source_rows, place, addend, out):
    _check_dims("out", out, 2, "(rows, d)")
    _check_dims("place", place, 2, "(rows, P)")
    _check_shape("tilemoe_sum_rows", "addend", addend, *out.shape)
    _check_shape("tilemoe_sum_rows", "place", place, out.shape[0], place.shape[1])
