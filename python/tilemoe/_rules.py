"""The C interface's enums by name, and the sizes of a routing, which do not depend on values."""

import math
from typing import Literal, get_args

import torch

TOP_K, GENERAL, ROUNDED, GROUPED = range(4)  # kinds of routing

SCORINGS = (
    "softmax_over_chosen",
    "softmax_over_all",
    "softmax_renormalized",
    "sigmoid",
    "sigmoid_renormalized",
)
SCORES_GIVEN = -1  # in place of a scoring: backward returns the gradient of the scores themselves
MAX_GROUPS = 32
# TILEMOE_ROUTE_TOKENS_MOST_T and so on: the limits of moe_tokens.
DECODE_T, DECODE_E, DECODE_K, DECODE_D = 64, 512, 32, 65536
MIN_FACTOR = 2.0**-126  # float32's smallest normal number: the library reads 0 as 1
GROUP_SCORES = ("top2_sum", "max")
SIGMOIDS = ("sigmoid", "sigmoid_renormalized")
ROUNDINGS = ("nearest", "up", "down", "stochastic", "balanced")
Activation = Literal[  # by their numbers
    "swiglu", "geglu", "geglu_tanh", "reglu",
    "silu", "gelu", "gelu_tanh", "relu", "relu_squared", "identity", "glu", "situ_glu",
]  # fmt: skip
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
GATE_LAYOUTS = ("concatenated", "interleaved", "split")
WIDTH_MULTIPLE = 8  # of d and of n, for every dtype: rows of 16 bits lie on 16 bytes
_SPLIT = GATE_LAYOUTS.index("split")


def number(what, names, name):
    """The enum's number of `name`."""
    try:
        return names.index(name)
    except ValueError:
        expected = ", ".join(names)
        raise ValueError(f"tilemoe: {what} is {name!r}, expected one of {expected}") from None


def rule(E, K, scoring, n_group=1, topk_group=1, group_score=None):
    """The first of an operator's numbers (_packing.RULE), for a choice from logits."""
    if group_score is None:
        if n_group == 1 and topk_group == 1:
            return [TOP_K, K, number("scoring", SCORINGS, scoring), 1, 1, 0]
        group_score = "top2_sum" if scoring in SIGMOIDS else "max"
    found = [
        TOP_K, K, number("scoring", SCORINGS, scoring), n_group, topk_group,
        number("group_score", GROUP_SCORES, group_score),
    ]  # fmt: skip
    if n_group != 1 or topk_group != 1:
        _check_groups(E, K, scoring, n_group, topk_group, group_score)
    return found


def rule_of(kind, K, scoring):
    """The same for a routing that exists already; scoring: its number, or SCORES_GIVEN."""
    return [kind, K, scoring, 1, 1, 0]


def _check_groups(E, K, scoring, n_group, topk_group, group_score):
    def refuse(sentence):
        raise ValueError(f"tilemoe: {sentence}")

    if not 1 <= n_group <= MAX_GROUPS or E % n_group:
        refuse(
            f"n_group is {n_group}, expected 1 to {MAX_GROUPS} groups that divide E = {E} experts"
        )
    width = E // n_group
    if not 1 <= topk_group <= n_group:
        refuse(f"topk_group is {topk_group}, expected 1 to n_group = {n_group}")
    if topk_group * width < K:
        refuse(
            f"topk_group is {topk_group}, but {topk_group} groups of {width} experts have fewer "
            f"than K = {K}"
        )
    if group_score == "top2_sum" and scoring not in SIGMOIDS:
        refuse(f"group_score is top2_sum, which requires a sigmoid scoring, not {scoring}")
    if group_score == "top2_sum" and width < 2:
        refuse(f"group_score is top2_sum, but n_group is {n_group}: groups of one expert")


def check_factor(routed_scaling_factor):
    """Checks a factor that is not 1."""
    if not MIN_FACTOR <= routed_scaling_factor < math.inf:
        raise ValueError(
            f"tilemoe: routed_scaling_factor is {routed_scaling_factor}, expected a finite number "
            "above 0"
        )


def is_gated(activation):
    """Whether the activation of this number is a gated linear unit, as its name says."""
    return "glu" in ACTIVATIONS[activation]


def h_width(activation, n):
    return 2 * n if is_gated(activation) else n


def w1_rows(activation, gate_layout, n):
    return n if gate_layout == _SPLIT else h_width(activation, n)


def reads_logits(scoring, kind):
    """Whether the logits' gradient needs the logits again, in addition to the scores."""
    return kind == ROUNDED or SCORINGS[scoring] not in (
        "softmax_over_chosen",
        "softmax_renormalized",
    )


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
