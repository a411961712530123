"""Define the operators' formulas for torch.utils.flop_counter.FlopCounterMode, from shapes.

The formulas count the GEMMs. A layer of T tokens with K experts each has 6 * T * K * d * n flops in
forward and 12 * T * K * d * n in backward if its activation has a gate, otherwise 4 and 8, without
gradients that are not computed. The router's linear layer is counted by torch, except in
`moe_with_router`, `moe_tokens` and `router_logits`. The rows of a rounded routing count as T * K.

torch.utils.flop_counter imports triton, which takes longer to import than this package, so the
formulas are registered when a program imports torch.utils.flop_counter.
"""

import importlib.abc
import importlib.util
import sys

from ._library import operators
from ._layout import GRADIENTS, WEIGHTS, h_width
from .options import ROUNDED, At
from ._shapes import (
    WANTED_B1,
    WANTED_B1_UP,
    WANTED_S,
    WANTED_W1,
    WANTED_W1_UP,
    WANTED_W2,
    WANTED_X,
)

_OF_W1 = 0b1111 << len(GRADIENTS)  # bits of the factors of W1 and W1_up
_THROUGH_A = WANTED_X | WANTED_S | WANTED_W1 | WANTED_W1_UP | WANTED_B1 | WANTED_B1_UP


def _sizes(X, weights, capacity, numbers):
    """Return rows, d, n and the width of H; X and weights are shapes."""
    _, d, n = weights[WEIGHTS.index("W2")]
    rows = X[0] * numbers[At.K] if numbers[At.KIND] == ROUNDED else capacity
    return rows, d, n, h_width(numbers[At.ACTIVATION], n)


def _forward(X, weights, capacity, numbers):
    rows, d, n, width = _sizes(X, weights, capacity, numbers)
    return 2 * rows * d * (width + n)


def _backward(has_dO, X, H, weights, numbers, wanted):
    rows, d, n, width = _sizes(X, weights, H[0], numbers)
    flops = 0
    if has_dO and wanted & _THROUGH_A:
        flops += 2 * rows * d * n  # dO @ W2; without dO, H already contains dH
    if wanted & WANTED_W2:
        flops += 2 * rows * d * n
    if wanted & WANTED_X:
        flops += 2 * rows * d * width
    for bit, name in ((WANTED_W1, "W1"), (WANTED_W1_UP, "W1_up")):
        if wanted & bit:
            flops += 2 * rows * d * weights[WEIGHTS.index(name)][1]
    return flops


def _experts(X, router, routing, weights, addend, capacity, numbers, *_, **__):
    return _forward(X, weights, capacity, numbers)


def _moe(X, logits, selection_bias, weights, addend, numbers, *_, **__):
    return _forward(X, weights, X[0] * numbers[At.K], numbers)


def _moe_with_router(X, router_weight, router_bias, selection_bias, weights, addend, numbers, *_,
                     **__):  # fmt: skip
    return _moe_tokens(
        X, router_weight, router_bias, selection_bias, weights, addend, numbers
    )


def _moe_with_router_backward(dO, dlogits, X, H, routing, router_weight, weights, logits, numbers,
                              reals, wanted, **_):  # fmt: skip
    E, d = router_weight
    router = bool(wanted & WANTED_X) + bool(wanted & WANTED_S)  # dX and the weight's gradient
    return 2 * X[0] * E * d * router + _backward(True, X, H, weights, numbers, wanted)


def _moe_tokens(X, router_weight, router_bias, selection_bias, weights, addend, numbers, *_, **__):
    E, d = router_weight
    return 2 * X[0] * E * d + _forward(X, weights, X[0] * numbers[At.K], numbers)


def _router_logits(X, weight, *_, **__):
    return 2 * X[0] * weight[0] * weight[1]


def _adapters(weights, ranks):
    """Return (rank, columns of A, rows of B) of each adapter: of W1, W1_up and W2."""
    _, d, n = weights[WEIGHTS.index("W2")]
    return zip(ranks, (d, d, n), (weights[WEIGHTS.index("W1")][1], n, d))


def _experts_lora(X, router, routing, weights, addend, lora, packed, quantized, capacity, ranks,
                  scales, formats, numbers, *_, **__):  # fmt: skip
    rows, *_ = _sizes(X, weights, capacity, numbers)
    narrow = sum(rank * (of_A + of_B) for rank, of_A, of_B in _adapters(weights, ranks))
    return _forward(X, weights, capacity, numbers) + 2 * rows * narrow


def _experts_lora_backward(dO, X, H, P1, P2, routing, weights, packed, quantized, ranks, scales,
                           formats, numbers, reals, factor_dtype, wanted, *_, **__):  # fmt: skip
    of_W1 = wanted & _OF_W1
    through_A = wanted & _THROUGH_A or of_W1
    # dH, which the gradients of W1's factors read, has the cost of db1.
    from_dO = dO is not None
    flops = _backward(from_dO, X, H, weights, numbers, wanted | (WANTED_B1 if of_W1 else 0))
    rows, *_ = _sizes(X, weights, H[0], numbers)
    through = (wanted & WANTED_X, wanted & WANTED_X, through_A)  # gradient of A's input
    for i, (rank, of_A, of_B) in enumerate(_adapters(weights, ranks)):
        wanted_A, wanted_B = (wanted >> len(GRADIENTS) + 2 * i + of & 1 for of in (0, 1))
        narrow = of_B * bool(through[i] or wanted_A)  # Q
        narrow += of_A * bool(through[i]) + of_A * wanted_A + of_B * wanted_B
        flops += 2 * rows * rank * narrow
    return flops


def _experts_part(X, routing, weights, bounds, cuts, part, capacity, numbers, *_, **__):
    is_last = part == len(cuts) - 2  # the last part counts all parts
    return _forward(X, weights, capacity, numbers) if is_last else 0


def _experts_backward(dO, X, H, routing, weights, logits, numbers, reals, router_dtype, wanted,
                      **_):  # fmt: skip
    return _backward(True, X, H, weights, numbers, wanted)


def _experts_backward_over_H(dO, X, H, routing, weights, logits, gradients, places, numbers, reals,
                             router_dtype, wanted, accumulate, **_):  # fmt: skip
    return _backward(dO is not None, X, H, weights, numbers, wanted | places)


def _experts_backward_out(dO, X, H, H_consumed, routing, weights, gradients, places, numbers, *_,
                          **__):  # fmt: skip
    H = H_consumed if H is None else H
    return _backward(dO is not None, X, H, weights, numbers, places)


def _experts_backward_part(dO, X, H, routing, weights, gradients, places, bounds, cuts, part,
                           numbers, *_, **__):  # fmt: skip
    is_last = part == len(cuts) - 2
    return _backward(True, X, H, weights, numbers, places) if is_last else 0


def _mm(rows, routing, W, *_, **__):
    return 2 * rows[0] * W[1] * W[2]


def _gathered_mm(X, routing, W, b, capacity, *_, **__):
    return _mm((capacity,), routing, W)


def _gathered_mm_backward(dH, X, routing, W, kind, K, wanted, **_):
    return _mm(dH, routing, W) * (wanted & 3).bit_count()  # dX, dW


def _combine_mm(A, scores, routing, W, *_, **__):
    return _mm(A, routing, W)


def _combine_mm_backward(dO, A, routing, W, b, kind, K, wanted, **_):
    return _mm(A, routing, W) * (bool(wanted & 3) + bool(wanted & 4))  # dA and ds, dW


_FORMULAS = {
    "gathered_mm": _gathered_mm,
    "gathered_mm_backward": _gathered_mm_backward,
    "combine_mm": _combine_mm,
    "combine_mm_backward": _combine_mm_backward,
    "experts": _experts,
    "moe": _moe,
    "moe_with_router": _moe_with_router,
    "moe_with_router_backward": _moe_with_router_backward,
    "moe_with_router_backward_over_H": _moe_with_router_backward,
    "moe_tokens": _moe_tokens,
    "router_logits": _router_logits,
    "experts_lora": _experts_lora,
    "experts_lora_backward": _experts_lora_backward,
    "experts_lora_backward_over_H": _experts_lora_backward,
    "experts_part": _experts_part,
    "experts_backward": _experts_backward,
    "experts_backward_over_H": _experts_backward_over_H,
    "experts_backward_out": _experts_backward_out,
    "experts_backward_part": _experts_backward_part,
}
_COUNTER = "torch.utils.flop_counter"


def _register(flop_counter):
    for name, formula in _FORMULAS.items():
        flop_counter.register_flop_formula(getattr(operators, name))(formula)


class _WhenImported(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register
        return spec


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _WhenImported())
