"""Define the order and sizes of weights, gradients, H and the routing in operators' lists.

Operators take and return these as a list or as one tensor.
"""

from typing import NamedTuple

import torch

from ._library import operators
from .options import (
    ACTIVATIONS, GATED, GENERAL, GROUPED, LITERALS, ROUNDED, SCORINGS, TOP_K, At,
)  # fmt: skip

WEIGHTS = ("W1", "W1_up", "W2", "b1", "b1_up", "b2")
FACTORS = ("A1", "B1", "A1_up", "B1_up", "A2", "B2")  # of low-rank adapters
RANKS = ("gate", "up", "down")  # ranks of A1, A1_up and A2, multiples of WIDTH_MULTIPLE; 0: absent
SCALES = ("of_W1", "of_W2")
# Arrays of one quantised weight, and of all weights that can be quantised.
ARRAYS = ("codes", "scales", "scale_map", "scale_of_scales", "scale_offset")
QUANTIZABLE = WEIGHTS[:3]
QUANTIZED = (
    *(f"{weight}.{array}" for weight in QUANTIZABLE for array in ARRAYS),
    # the transposed weights that backward of recipe="fp8" reads
    *(f"{weight}_transposed.{array}" for weight in QUANTIZABLE for array in ARRAYS[:2]),
)
FORMATS = (*QUANTIZABLE, *(f"{weight}_transposed" for weight in QUANTIZABLE))
GRADIENTS = ("dX", "ds", *(f"d{name}" for name in WEIGHTS))  # in the order of the bits of `wanted`
SIZES = ("T", "E", "d", "n", "capacity")  # of layer_bytes
WIDTH_MULTIPLE = (
    8  # of d and n for every dtype, so that rows of 16-bit values are aligned to 16 bytes
)

_GATED = tuple(map(ACTIVATIONS.index, GATED))
_SPLIT = LITERALS["gate_layout"].index("split")
_OF_CHOSEN = ("softmax_over_chosen", "softmax_renormalized")


def pack_gradients(all_of_them):
    """Return the gradients that exist, and their places, as operators read them.

    The argument has eight gradients, None for each absent one, or is None.
    """
    if all_of_them is None:
        return [], 0
    places = 0
    for bit, gradient in enumerate(all_of_them):
        if gradient is not None:
            places |= 1 << bit
    return [gradient for gradient in all_of_them if gradient is not None], places


def names_of_gradients(places):
    return [name for bit, name in enumerate(GRADIENTS) if places & 1 << bit]


def rule_of(kind, K, scoring):
    """Return the rule of an existing routing; scoring: its number, or SCORES_GIVEN."""
    return [kind, K, scoring, 1, 1, 0]


def is_gated(activation):
    return activation in _GATED


def h_width(activation, n):
    return 2 * n if is_gated(activation) else n


def saved_H(like, capacity, numbers, n):
    """Return H's empty tensor: in x's dtype, or bytes of codes and then their scales."""
    width = h_width(numbers[At.ACTIVATION], n)
    if not numbers[At.SAVE_H]:
        return like.new_empty((capacity, width))
    return like.new_empty((capacity, width + 8 * ((n + 127) // 128)), dtype=torch.uint8)


def w1_rows(activation, gate_layout, n):
    return n if gate_layout == _SPLIT else h_width(activation, n)


def reads_logits(scoring, kind):
    """Return whether the logits' gradient reads the logits, in addition to the scores."""
    return kind == ROUNDED or SCORINGS[scoring] not in _OF_CHOSEN


# ---------------------------------------------------------------- the routing


def rounded_capacity(T, E, K, m, rounding, round_tokens):
    """Return the maximum rows of a rounded routing.

    round_tokens: tokens that are rounded together; 0 for all.
    """
    if round_tokens:
        return T // round_tokens * rounded_capacity(round_tokens, E, K, m, rounding, 0)
    added = {"nearest": E * (m // 2), "down": 0, "balanced": m}.get(rounding, E * (m - 1))
    bounds = T * K + added, T * E
    # torch.compile does not trace sym_min of two constants; min() of two symbols would be a guard.
    return min(bounds) if all(isinstance(b, int) for b in bounds) else torch.sym_min(*bounds)


class Array(NamedTuple):
    """Array of a routing: its name in tilemoe_routing, and its elements."""

    name: str
    size: int  # TILEMOE_ROUTING_SIZE_
    more: int  # elements in addition to that size


# Arrays of each kind of routing in the order of its tensor, from the library's table. The sizes are
# computed here, because torch.compile has symbols for them, which no C function accepts.
_ARRAYS = [
    [Array(*array) for array in zip(*operators.routing_layout(kind))]
    for kind in (TOP_K, GENERAL, ROUNDED, GROUPED)
]


def places_of(kind, T, E, capacity, pairs=None):
    """Return {name: (first element, elements)} of a routing's arrays, and the elements of all.

    Each array is aligned to 16 bytes. pairs=None: one pair per row.
    """
    sizes = (0, T, E, capacity if pairs is None else pairs, capacity)  # by TILEMOE_ROUTING_SIZE_
    places, end = {}, 0
    for name, size, more in _ARRAYS[kind]:
        elements = sizes[size] + more
        places[name] = (end, elements)
        end += (elements + 3) // 4 * 4
    return places, end


def routing_elements(kind, T, E, capacity, pairs=None):
    """Return the elements of the int32 tensor of a routing."""
    return places_of(kind, T, E, capacity, pairs)[1]


def array_of(name, routing, kind, T, E, capacity, pairs=None):
    """Return an array of a routing, as int32."""
    begin, elements = places_of(kind, T, E, capacity, pairs)[0][name]
    return routing[begin : begin + elements]


def offsets_of(routing, E):
    """Return int32 (E + 1): expert e has rows [offsets[e], offsets[e + 1]). The first array."""
    return routing[: E + 1]


def counters_of(routing):
    """Return int32 (4), the last array of a routing.

    It counts pairs over the capacity, pairs with ids out of range, tokens with NaN, and chosen
    pairs that rounding dropped.
    """
    return routing[-4:]
