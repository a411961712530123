"""State dicts between Hugging Face's names and layouts, which are `MoE`'s, and those of torchtitan
and ScatterMoE. No value changes: every round trip gives the same bits.

A function takes a state dict of one layer or of a whole model and returns a new one: the entries
it knows by the end of their names are converted in their place, all others are passed through as
they are. Converted tensors own their memory where rows move, and are the given ones where not.

Here                                     torchtitan 0.3.0 (* routed_experts.inner_experts)
    gate.weight (E, d)                       router.gate.weight
    gate.e_score_correction_bias (E)         expert_bias_E
    experts.gate_up_proj (E, 2n, d)          *.w1_EFD (E, n, d) the gate, *.w3_EFD (E, n, d) the up
    experts.down_proj (E, d, n)              *.w2_EDF (E, d, n)

Here                                     ScatterMoE's GLUMLP and MLP (the router is the caller's)
    experts.gate_up_proj (E, 2n, d)          experts.weight (E, 2n, d): n up rows, then n gate rows
    experts.up_proj (E, n, d), not gated     experts.weight (E, n, d)
    experts.down_proj (E, d, n)              output_experts.weight (E, d, n)
    experts.(gate_)up_proj_bias              experts.bias, in the order of its weight's rows
    experts.down_proj_bias (E, d)            output_experts.bias (E, d)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

StateDict = Mapping[str, Tensor]

_TITAN = "routed_experts.inner_experts."
_TITAN_RENAMED = {  # torchtitan's: ours
    "router.gate.weight": "gate.weight",
    "expert_bias_E": "gate.e_score_correction_bias",
    _TITAN + "w2_EDF": "experts.down_proj",
}


def _split(key, endings):
    """(prefix, ending) where `key` is prefix + ending at a dot, else (None, None)."""
    for ending in endings:
        if key == ending or key.endswith("." + ending):
            return key[: len(key) - len(ending)], ending
    return None, None


def _partner(state_dict, key, partner):
    if partner not in state_dict:
        raise ValueError(f"{key} is in the state dict, {partner} is not")
    return state_dict[partner]


def from_torchtitan(state_dict: StateDict) -> dict[str, Tensor]:
    """torchtitan's names and (w1, w2, w3) -> ours. Non-persistent counters need no conversion."""
    w1, w3 = _TITAN + "w1_EFD", _TITAN + "w3_EFD"
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = _split(key, (*_TITAN_RENAMED, w1, w3))
        if ending is None:
            converted[key] = tensor
        elif ending == w1:
            up = _partner(state_dict, key, prefix + w3)
            converted[prefix + "experts.gate_up_proj"] = torch.cat([tensor, up], dim=1)
        elif ending == w3:
            _partner(state_dict, key, prefix + w1)
        else:
            converted[prefix + _TITAN_RENAMED[ending]] = tensor
    return converted


def to_torchtitan(state_dict: StateDict) -> dict[str, Tensor]:
    """Ours -> torchtitan's names and (w1, w2, w3). Raises ValueError where torchtitan has no place:
    experts without a gate, or with biases."""
    renamed = {ours: titan for titan, ours in _TITAN_RENAMED.items()}
    homeless = (
        "experts.up_proj",
        "experts.up_proj_bias",
        "experts.gate_up_proj_bias",
        "experts.down_proj_bias",
    )
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = _split(key, (*renamed, "experts.gate_up_proj", *homeless))
        if ending is None:
            converted[key] = tensor
        elif ending in homeless:
            raise ValueError(f"{key}: torchtitan's experts have a gate and no biases")
        elif ending == "experts.gate_up_proj":
            gate, up = _halves(key, tensor)
            converted[prefix + _TITAN + "w1_EFD"] = gate.contiguous()
            converted[prefix + _TITAN + "w3_EFD"] = up.contiguous()
        else:
            converted[prefix + renamed[ending]] = tensor
    return converted


def _halves(key, tensor):
    if tensor.shape[1] % 2:
        raise ValueError(f"{key} has shape {tuple(tensor.shape)}, expected an even dimension 1")
    return tensor.chunk(2, dim=1)


def _halves_swapped(key, tensor):
    """(E, 2n, ...) -> the same with its two halves changed over."""
    first, second = _halves(key, tensor)
    return torch.cat([second, first], dim=1)


_SCATTER = {  # ScatterMoE's: ours, where the row order is the same
    "output_experts.weight": "experts.down_proj",
    "output_experts.bias": "experts.down_proj_bias",
}


def from_scattermoe(state_dict: StateDict) -> dict[str, Tensor]:
    """ScatterMoE's `GLUMLP` (up rows, then gate rows) or `MLP` -> ours. An MLP is told from a
    GLUMLP by the shapes of its two weights."""
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = _split(key, (*_SCATTER, "experts.weight", "experts.bias"))
        if ending is None:
            converted[key] = tensor
        elif ending in _SCATTER:
            converted[prefix + _SCATTER[ending]] = tensor
        else:
            suffix = "_bias" if ending == "experts.bias" else ""
            n = _partner(state_dict, key, prefix + "output_experts.weight").shape[2]
            if tensor.shape[1] == 2 * n:
                swapped = _halves_swapped(key, tensor)
                converted[prefix + "experts.gate_up_proj" + suffix] = swapped
            elif tensor.shape[1] == n:
                converted[prefix + "experts.up_proj" + suffix] = tensor
            else:
                raise ValueError(
                    f"{key} has shape {tuple(tensor.shape)}, expected dimension 1 to be {n} or "
                    f"{2 * n}, as {prefix}output_experts.weight has n = {n}"
                )
    return converted


def to_scattermoe(state_dict: StateDict) -> dict[str, Tensor]:
    """Ours -> ScatterMoE's `GLUMLP` (gated) or `MLP` (not gated)."""
    same = {ours: scatter for scatter, ours in _SCATTER.items()}
    same |= {"experts.up_proj": "experts.weight", "experts.up_proj_bias": "experts.bias"}
    gated = {
        "experts.gate_up_proj": "experts.weight",
        "experts.gate_up_proj_bias": "experts.bias",
    }
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = _split(key, (*same, *gated))
        if ending is None:
            converted[key] = tensor
        elif ending in same:
            converted[prefix + same[ending]] = tensor
        else:
            converted[prefix + gated[ending]] = _halves_swapped(key, tensor)
    return converted
