"""The order and the sizes of what operators take and return as a list or as one tensor: weights,
gradients, H, and the routing."""

from typing import NamedTuple

import torch

from ._library import operators
from .options import ACTIVATIONS, GATED, GENERAL, GROUPED, LITERALS, ROUNDED, SCORINGS, TOP_K

WEIGHTS = ("W1", "W1_up", "W2", "b1", "b1_up", "b2")
FACTORS = ("A1", "B1", "A1_up", "B1_up", "A2", "B2")  # of low-rank adapters
RANKS = ("gate", "up", "down")  # of A1, A1_up and A2, multiples of WIDTH_MULTIPLE; 0: absent
SCALES = ("of_W1", "of_W2")
# The arrays of a quantised weight, and those of all weights that can be quantised.
ARRAYS = ("codes", "scales", "scale_map", "scale_of_scales", "scale_offset")
QUANTIZABLE = WEIGHTS[:3]
QUANTIZED = tuple(f"{weight}.{array}" for weight in QUANTIZABLE for array in ARRAYS)
FORMATS = (*QUANTIZABLE, *(f"{weight}_transposed" for weight in QUANTIZABLE))
GRADIENTS = ("dX", "ds", *(f"d{name}" for name in WEIGHTS))  # in the order of the bits of `wanted`
SIZES = ("T", "E", "d", "n", "capacity")  # of layer_bytes
WIDTH_MULTIPLE = 8  # of d and of n, for every dtype: rows of 16 bits lie on 16 bytes

_GATED = tuple(map(ACTIVATIONS.index, GATED))
_SPLIT = LITERALS["gate_layout"].index("split")
_OF_CHOSEN = ("softmax_over_chosen", "softmax_renormalized")


def pack_gradients(all_of_them):
    """The eight gradients, None for an absent one or for all, as operators take them: (gradients,
    places)."""
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
    """The rule of a routing that exists already; scoring: its number, or SCORES_GIVEN."""
    return [kind, K, scoring, 1, 1, 0]


def is_gated(activation):
    return activation in _GATED


def h_width(activation, n):
    return 2 * n if is_gated(activation) else n


def w1_rows(activation, gate_layout, n):
    return n if gate_layout == _SPLIT else h_width(activation, n)


def reads_logits(scoring, kind):
    """Whether the logits' gradient needs the logits again, in addition to the scores."""
    return kind == ROUNDED or SCORINGS[scoring] not in _OF_CHOSEN


# ---------------------------------------------------------------- the routing


def rounded_capacity(T, E, K, m, rounding, round_tokens):
    """The maximum rows of a rounded routing; round_tokens: tokens that are rounded separately, 0
    for all."""
    if round_tokens:
        return T // round_tokens * rounded_capacity(round_tokens, E, K, m, rounding, 0)
    added = {"nearest": E * (m // 2), "down": 0, "balanced": m}.get(rounding, E * (m - 1))
    bounds = T * K + added, T * E
    # torch.compile traces no sym_min of two constants; min() of two symbols would be a guard.
    return min(bounds) if all(isinstance(b, int) for b in bounds) else torch.sym_min(*bounds)


class Array(NamedTuple):
    """An array of a routing: its name in tilemoe_routing, and its elements."""

    name: str
    size: int  # TILEMOE_ROUTING_SIZE_
    more: int  # elements in addition to that size


# The arrays of each kind of routing, in the order of its tensor: the library's table. The sizes are
# computed here, because torch.compile has symbols for them, which no C function takes.
_ARRAYS = [
    [Array(*array) for array in zip(*operators.routing_layout(kind))]
    for kind in (TOP_K, GENERAL, ROUNDED, GROUPED)
]


def places_of(kind, T, E, capacity, pairs=None):
    """{name: (first element, elements)} of a routing's arrays, each on 16 bytes, and the elements
    of all of them; pairs: None: as many as rows."""
    sizes = (0, T, E, capacity if pairs is None else pairs, capacity)  # by TILEMOE_ROUTING_SIZE_
    places, end = {}, 0
    for name, size, more in _ARRAYS[kind]:
        elements = sizes[size] + more
        places[name] = (end, elements)
        end += (elements + 3) // 4 * 4
    return places, end


def routing_elements(kind, T, E, capacity, pairs=None):
    """Elements of the int32 tensor of a routing."""
    return places_of(kind, T, E, capacity, pairs)[1]


def array_of(name, routing, kind, T, E, capacity, pairs=None):
    """An array of a routing, as int32."""
    begin, elements = places_of(kind, T, E, capacity, pairs)[0][name]
    return routing[begin : begin + elements]


def offsets_of(routing, E):
    """(E + 1) int32: expert e has rows [offsets[e], offsets[e + 1]). The first array."""
    return routing[: E + 1]


def counters_of(routing):
    """(4) int32: pairs over capacity, pairs with bad ids, tokens with NaN, chosen pairs that
    rounding dropped. The last array."""
    return routing[-4:]
