"""The order of the lists that operators take: bindings/torch/packing.h in Python."""

WEIGHTS = ("W1", "W1_up", "W2", "b1", "b1_up", "b2")
GRADIENTS = ("dX", "ds", *(f"d{name}" for name in WEIGHTS))  # in the order of the bits of `wanted`
RULE = ("kind", "K", "scoring", "n_group", "topk_group", "group_score")
NUMBERS = (*RULE, "activation", "gate_layout", "column_blocks")
SIZES = ("T", "E", "d", "n", "capacity")  # of layer_bytes
REALS = ("routed_scaling_factor", "clamp", "alpha", "up_shift")


class At:
    """Positions in `numbers`, which begins with `rule`, and in `reals`."""

    KIND, K, SCORING, N_GROUP, TOPK_GROUP, GROUP_SCORE = range(len(RULE))
    ACTIVATION, GATE_LAYOUT, COLUMN_BLOCKS = range(len(RULE), len(NUMBERS))
    ROUTED_SCALING_FACTOR, CLAMP, ALPHA, UP_SHIFT = range(len(REALS))


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
