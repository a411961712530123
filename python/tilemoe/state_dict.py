"""Convert state dicts between `MoE`'s names and those of checkpoints, torchtitan and ScatterMoE.

The names and layouts of `MoE` are those of transformers' experts. No value changes: every round
trip returns the same bits.

A function reads a state dict of one layer or of a whole model and returns a new one: entries that
it recognises by the end of their names are converted, and all others are returned unchanged. A
converted tensor has new memory if its rows move, else it is the given tensor.

Names of Hugging Face checkpoints (e: an expert)::

    TileMoE                                  Hugging Face
    gate.weight, gate.bias                   router.weight, router.bias (gpt-oss)
    experts.gate_up_proj (E, 2n, d)          experts.{e}.gate_proj.weight, .up_proj.weight;
                                             experts.{e}.w1.weight, .w3.weight (Mixtral);
                                             gpt-oss: (E, d, 2n), interleaved gate/up columns
    experts.down_proj (E, d, n)              experts.{e}.down_proj.weight; experts.{e}.w2.weight
                                             (Mixtral); gpt-oss: (E, n, d)
    shared_experts.*_proj.weight             the same (DeepSeek); shared_expert.*_proj.weight (Qwen)
    shared_expert_gate.weight (1, d)         the same (Qwen)

Names of torchtitan 0.3.0 (``*``: routed_experts.inner_experts)::

    TileMoE                                  torchtitan
    gate.weight (E, d), gate.bias (E)        router.gate.weight, router.gate.bias
    gate.e_score_correction_bias (E)         expert_bias_E
    experts.gate_up_proj (E, 2n, d)          *.w1_EFD (E, n, d) the gate, *.w3_EFD (E, n, d) the up
    experts.down_proj (E, d, n)              *.w2_EDF (E, d, n)
    shared_experts.{gate,up,down}_proj       shared_experts.{w1,w3,w2}
    shared_expert_gate                       shared_experts.gate

Names of ScatterMoE's GLUMLP and MLP (the caller has the router)::

    TileMoE                                  ScatterMoE
    experts.gate_up_proj (E, 2n, d)          experts.weight (E, 2n, d): n up rows, then n gate rows
    experts.up_proj (E, n, d), no gate       experts.weight (E, n, d)
    experts.down_proj (E, d, n)              output_experts.weight (E, d, n)
    experts.(gate_)up_proj_bias              experts.bias, in the order of its weight's rows
    experts.down_proj_bias (E, d)            output_experts.bias (E, d)
"""

import torch
from torch import Tensor

from ._entries import StateDict, partner_of, split_key
from .integrations.huggingface import from_huggingface, options_of, to_huggingface

__all__ = [
    "from_huggingface",
    "from_scattermoe",
    "from_torchtitan",
    "options_of",
    "to_huggingface",
    "to_scattermoe",
    "to_torchtitan",
]

_TITAN = "routed_experts.inner_experts."
_TITAN_RENAMED = {  # torchtitan's: ours
    "router.gate.weight": "gate.weight",
    "router.gate.bias": "gate.bias",
    "expert_bias_E": "gate.e_score_correction_bias",
    _TITAN + "w2_EDF": "experts.down_proj",
    "shared_experts.w1.weight": "shared_experts.gate_proj.weight",
    "shared_experts.w2.weight": "shared_experts.down_proj.weight",
    "shared_experts.w3.weight": "shared_experts.up_proj.weight",
    "shared_experts.gate.weight": "shared_expert_gate.weight",
}


def from_torchtitan(state_dict: StateDict) -> dict[str, Tensor]:
    """Convert torchtitan's names and (w1, w2, w3) to those of TileMoE.

    Non-persistent counters need no conversion.

    Args:
        state_dict: State dict of one layer or of a whole model.

    Returns:
        A new state dict.
    """
    w1, w3 = _TITAN + "w1_EFD", _TITAN + "w3_EFD"
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = split_key(key, (*_TITAN_RENAMED, w1, w3))
        if ending is None:
            converted[key] = tensor
        elif ending == w1:
            up = partner_of(state_dict, key, prefix + w3)
            converted[prefix + "experts.gate_up_proj"] = torch.cat([tensor, up], dim=1)
        elif ending == w3:
            partner_of(state_dict, key, prefix + w1)
        else:
            converted[prefix + _TITAN_RENAMED[ending]] = tensor
    return converted


def to_torchtitan(state_dict: StateDict) -> dict[str, Tensor]:
    """Convert names and weights of TileMoE to torchtitan's (w1, w2, w3).

    Args:
        state_dict: State dict of one layer or of a whole model.

    Returns:
        A new state dict.

    Raises:
        ValueError: torchtitan does not support an entry: experts without a gate, or with biases.
    """
    renamed = {ours: titan for titan, ours in _TITAN_RENAMED.items()}
    unsupported = (
        "experts.up_proj",
        "experts.up_proj_bias",
        "experts.gate_up_proj_bias",
        "experts.down_proj_bias",
    )
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = split_key(key, (*renamed, "experts.gate_up_proj", *unsupported))
        if ending is None:
            converted[key] = tensor
        elif ending in unsupported:
            raise ValueError(
                f"torchtitan requires experts with a gate and without biases, got {key}"
            )
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
    """Return a tensor (E, 2n, ...) with its two halves swapped."""
    first, second = _halves(key, tensor)
    return torch.cat([second, first], dim=1)


_SCATTER = {  # ScatterMoE's: ours, with the same row order
    "output_experts.weight": "experts.down_proj",
    "output_experts.bias": "experts.down_proj_bias",
}


def from_scattermoe(state_dict: StateDict) -> dict[str, Tensor]:
    """Convert ScatterMoE's `GLUMLP` (up rows, then gate rows) or `MLP` to TileMoE's names.

    The shapes of the two weights distinguish an MLP from a GLUMLP.

    Args:
        state_dict: State dict of one layer or of a whole model.

    Returns:
        A new state dict.

    Raises:
        ValueError: The shapes of two weights do not match.
    """
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = split_key(key, (*_SCATTER, "experts.weight", "experts.bias"))
        if ending is None:
            converted[key] = tensor
        elif ending in _SCATTER:
            converted[prefix + _SCATTER[ending]] = tensor
        else:
            suffix = "_bias" if ending == "experts.bias" else ""
            n = partner_of(state_dict, key, prefix + "output_experts.weight").shape[2]
            if tensor.shape[1] == 2 * n:
                swapped = _halves_swapped(key, tensor)
                converted[prefix + "experts.gate_up_proj" + suffix] = swapped
            elif tensor.shape[1] == n:
                converted[prefix + "experts.up_proj" + suffix] = tensor
            else:
                raise ValueError(
                    f"{key} has shape {tuple(tensor.shape)}, expected dimension 1 to be "
                    f"{n} or {2 * n}, because {prefix}output_experts.weight has n = {n}"
                )
    return converted


def to_scattermoe(state_dict: StateDict) -> dict[str, Tensor]:
    """Convert TileMoE's names to ScatterMoE's `GLUMLP` (with a gate) or `MLP` (without a gate).

    Args:
        state_dict: State dict of one layer or of a whole model.

    Returns:
        A new state dict.
    """
    same = {ours: scatter for scatter, ours in _SCATTER.items()}
    same |= {"experts.up_proj": "experts.weight", "experts.up_proj_bias": "experts.bias"}
    gated = {
        "experts.gate_up_proj": "experts.weight",
        "experts.gate_up_proj_bias": "experts.bias",
    }
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = split_key(key, (*same, *gated))
        if ending is None:
            converted[key] = tensor
        elif ending in same:
            converted[prefix + same[ending]] = tensor
        else:
            converted[prefix + gated[ending]] = _halves_swapped(key, tensor)
    return converted
