"""The order and the sizes of what operators take and return as a list or as one tensor: weights,
gradients, H, and the routing."""

import torch

from .options import ACTIVATIONS, GATED, GENERAL, GROUPED, LITERALS, ROUNDED, SCORINGS

WEIGHTS = ("W1", "W1_up", "W2", "b1", "b1_up", "b2")
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


def _on_16_bytes(elements):
    return (elements + 3) // 4 * 4


def offsets_of(routing, E):
    """(E + 1) int32: expert e has rows [offsets[e], offsets[e + 1])."""
    return routing[: E + 1]


def counters_of(routing):
    """(4) int32: pairs over capacity, pairs with bad ids, tokens with NaN, chosen pairs that
    rounding dropped."""
    return routing[-4:]


def row_arrays_of(routing, E, capacity, pairs=None):
    """row_score (as int32), row_token, pair_row, and the rest; pairs: None: as many as rows."""
    start, step = _on_16_bytes(E + 1), _on_16_bytes(capacity)
    pairs = capacity if pairs is None else pairs
    sizes = (capacity, capacity, pairs)
    arrays = [routing[start + i * step :][:size] for i, size in enumerate(sizes)]
    return *arrays, routing[start + 2 * step + _on_16_bytes(pairs) :]


def routing_elements(kind, T, E, capacity, pairs=None):
    """Elements of the int32 tensor that tilemoe_routing_bind lays out; pairs: None: as many as
    rows."""
    elements = _on_16_bytes(E + 1) + _on_16_bytes(capacity)  # offsets, row_score
    if kind != GROUPED:
        elements += _on_16_bytes(capacity)  # row_token
        elements += _on_16_bytes(capacity if pairs is None else pairs)  # pair_row
    if kind in (GENERAL, ROUNDED):
        elements += _on_16_bytes(T + 1)  # token_offsets
    return elements + 4  # counters
