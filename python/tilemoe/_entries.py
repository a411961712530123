"""Find entries of state dicts by the ends of their names."""

from collections.abc import Mapping

from torch import Tensor

StateDict = Mapping[str, Tensor]


def split_key(key, endings):
    """Return (prefix, ending) if `key` is prefix + ending at a dot, else (None, None)."""
    for ending in endings:
        if key == ending or key.endswith("." + ending):
            return key[: len(key) - len(ending)], ending
    return None, None


def partner_of(state_dict, key, partner):
    """Return the entry that is required together with `key`."""
    if partner not in state_dict:
        raise ValueError(f"{key} requires {partner} in the state dict")
    return state_dict[partner]
