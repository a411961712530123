"""Convert checkpoints of six families of Hugging Face models, and read their configurations.

State dicts are converted to and from `MoE`'s names, and a configuration to arguments of `MoE`.
state_dict.py exports the functions.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._entries import StateDict, partner_of, split_key


class _Family(NamedTuple):
    """Names in the hub's files that differ from TileMoE's."""

    gate: str = "gate_proj"  # of one expert
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"  # the layer in the decoder's block
    shared: str | None = None  # shared_experts in TileMoE
    has: tuple[str, ...] = ()  # those of _OPTIONAL, without the shared experts


_FAMILIES = {
    "deepseek_v3": _Family(shared="shared_experts", has=("gate.e_score_correction_bias",)),
    "gpt_oss": _Family(  # stacked and transposed
        has=("gate.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias")
    ),
    "mixtral": _Family("w1", "w3", "w2", block="block_sparse_moe"),
    "olmoe": _Family(),
    "qwen3_moe": _Family(),
    "qwen3_next": _Family(shared="shared_expert", has=("shared_expert_gate.weight",)),
}
_OF_ONE_EXPERT = re.compile(r"(?:^|(?<=\.))experts\.(\d+)\.(\w+)\.weight(_scale_inv)?$")
_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_ROLES |= {"w1": "gate", "w3": "up", "w2": "down"}
_SHARED = tuple(f"{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
_STACKED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
# Optional entries of a TileMoE layer, which not every family supports.
_OPTIONAL = (
    "gate.bias",
    "gate.e_score_correction_bias",
    "experts.gate_up_proj_bias",
    "experts.down_proj_bias",
    "experts.up_proj",
    "experts.up_proj_bias",
    "shared_expert_gate.weight",
)
_OF_MXFP4 = tuple(
    f"experts.{name}_{part}"
    for name in ("gate_up_proj", "down_proj")
    for part in ("blocks", "scales")
)
_FP8_SCALES = "_scale_inv"
_FP8_ROWS = 128  # rows per scale


# ---------------------------------------------------------------- to TileMoE


def from_huggingface(state_dict: StateDict) -> dict[str, Tensor]:
    """Convert a Hugging Face checkpoint to TileMoE's names.

    Supported are DeepSeek-V3, Qwen3-MoE, Qwen3-Next, OLMoE, Mixtral and gpt-oss, from the hub's own
    files (one entry per expert) or from transformers' models (stacked). Values do not change.
    Routed experts in MXFP4 (gpt-oss) and FP8 keep their format, for a layer after
    `tilemoe.quantize_` with this format.

    All entries of a layer must be in the state dict: merge the files of a sharded checkpoint first.
    Mixtral's `block_sparse_moe` becomes `mlp`, as in transformers; other prefixes do not change.

    Args:
        state_dict: State dict of one layer or of a whole model.

    Returns:
        A new state dict.

    Raises:
        ValueError: An expert, or one of its weights, is missing; a shape does not match the other
            shapes; or a weight that is not a routed expert's is quantised.
    """
    converted: dict[str, Tensor | None] = {}
    # (prefix, ending): {(expert, role): key}
    layers: dict[tuple[str, str], dict[tuple[int, str], str]] = {}
    for key, tensor in state_dict.items():
        _check_quantized(state_dict, key, tensor)
        found = _OF_ONE_EXPERT.search(key)
        if found is None or found[2] not in _ROLES:
            name, value = _converted(state_dict, key, tensor)
            converted[name] = value
            continue
        prefix, role, ending = key[: found.start()], _ROLES[found[2]], found[3] or ""
        layers.setdefault((prefix, ending), {})[int(found[1]), role] = key
        converted.setdefault(
            _in_mlp(prefix) + _stacked_name(role) + ending, None
        )  # place of the first
    for (prefix, ending), keys in layers.items():
        stacked = _stack(state_dict, prefix, ending, keys)
        converted.update({_in_mlp(prefix) + name: tensor for name, tensor in stacked.items()})
    return {name: tensor for name, tensor in converted.items() if tensor is not None}


def _in_mlp(name: str) -> str:
    return re.sub(r"(^|\.)block_sparse_moe\.", r"\1mlp.", name)


def _stacked_name(role: str) -> str:
    return "experts.down_proj" if role == "down" else "experts.gate_up_proj"


def _check_quantized(state_dict: StateDict, key: str, tensor: Tensor) -> None:
    """Accept codes and scales of routed experts in MXFP4 and FP8."""
    is_of_experts = re.search(r"(^|\.)(shared_)?experts?\.", key) is not None
    is_quantized = key.endswith(_FP8_SCALES) or tensor.dtype.itemsize < 2
    if not is_of_experts or not is_quantized or split_key(key, _OF_MXFP4)[1] is not None:
        return
    codes = key.removesuffix(_FP8_SCALES)
    is_routed = re.search(r"(^|\.)experts\.", key) is not None
    if is_routed and partner_of(state_dict, key, codes).dtype == torch.float8_e4m3fn:
        partner_of(state_dict, key, codes + _FP8_SCALES)
    else:
        raise ValueError(
            f"{key} is quantised, expected 16 bits, or routed experts in MXFP4 or FP8; "
            "dequantize the checkpoint"
        )


def _converted(state_dict: StateDict, key: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return the name and the value of an entry that is not the weight of a single expert."""
    stacked = tuple(f"experts.{name}" for name in _STACKED)
    routers, shared = ("router.weight", "router.bias"), [f"shared_expert.{w}" for w in _SHARED]
    prefix, ending = split_key(key, (*stacked, *routers, *shared, *_OF_MXFP4))
    if ending is None:
        return _in_mlp(key), tensor
    if ending in shared:
        return prefix + ending.replace("shared_expert.", "shared_experts."), tensor
    if ending in routers:
        is_of_a_layer = any(other.startswith(prefix + "experts.") for other in state_dict)
        return (prefix + ending.replace("router", "gate") if is_of_a_layer else key), tensor
    if prefix + "experts.gate_up_proj_blocks" in state_dict:  # (E, out, in), not transposed
        is_gpt_oss = prefix + "experts.gate_up_proj_bias" in state_dict  # interleaved
        is_first = ending.startswith("experts.gate_up_proj")
        return key, _halves_of_pairs(tensor) if is_gpt_oss and is_first else tensor
    if prefix + "experts.up_proj" in state_dict or not _is_transposed(state_dict, key, prefix):
        return key, tensor
    partner_of(state_dict, key, prefix + "experts.gate_up_proj_bias")
    if ending == "experts.down_proj":
        tensor = tensor.mT.contiguous()
    elif ending == "experts.gate_up_proj":
        tensor = _halves_of_pairs(tensor.mT)
    elif ending == "experts.gate_up_proj_bias":
        tensor = _halves_of_pairs(tensor)
    return key, tensor


def _is_transposed(state_dict: StateDict, key: str, prefix: str) -> bool:
    """Return whether a layer's weights are gpt-oss's (E, d, 2n) and (E, n, d).

    The shapes are unambiguous: if both (E, 2n, d) and (E, d, n) were possible, n would equal 4n.
    """
    W1 = partner_of(state_dict, key, prefix + "experts.gate_up_proj")
    W2 = partner_of(state_dict, key, prefix + "experts.down_proj")
    if W1.dim() == W2.dim() == 3:
        (rows, columns), (of_rows, of_columns) = W1.shape[1:], W2.shape[1:]
        if (rows, columns) == (of_columns, 2 * of_rows):
            return True
        if (rows, columns) == (2 * of_columns, of_rows):
            return False
    raise ValueError(
        f"{prefix}experts.gate_up_proj has shape {tuple(W1.shape)}, down_proj has shape "
        f"{tuple(W2.shape)}, expected (E, 2n, d) and (E, d, n), or gpt-oss's (E, d, 2n) "
        "and (E, n, d)"
    )


def _halves_of_pairs(tensor: Tensor) -> Tensor:
    """Reorder (E, 2n, ...) from interleaved gate/up rows to gate rows, then up rows."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()


def _stack(
    state_dict: StateDict, prefix: str, ending: str, keys: Mapping[tuple[int, str], str]
) -> dict[str, Tensor]:
    """Stack the single experts of one layer -> gate_up_proj (E, 2n, d), down_proj (E, d, n).

    With an ending of the names, the scales of both are stacked.
    """
    E = max(e for e, _ in keys) + 1
    router = state_dict.get(prefix + "gate.weight")
    if router is not None:
        if E > router.shape[0]:
            raise ValueError(
                f"{prefix}experts.{E - 1} is in the state dict, expected {router.shape[0]} "
                f"experts, the rows of {prefix}gate.weight"
            )
        E = router.shape[0]
    first = next(iter(keys.values()))
    is_mixtrals = first.rsplit(".", 2)[1] in ("w1", "w2", "w3")
    end = f".weight{ending}"
    family = _FAMILIES["mixtral" if is_mixtrals else "qwen3_moe"]
    names = {"gate": family.gate, "up": family.up, "down": family.down}
    n_d = partner_of(state_dict, first, f"{prefix}experts.0.{family.gate}{end}").shape
    if ending:
        n = partner_of(state_dict, first, f"{prefix}experts.0.{family.gate}.weight").shape[0]
        if n % _FP8_ROWS:  # the blocks of gate and up rows would overlap
            raise ValueError(
                f"{first}: the number of gate rows in FP8 must be a multiple of "
                f"{_FP8_ROWS}, got {n}"
            )
    shapes = {"gate": n_d, "up": n_d, "down": n_d[::-1]}
    tensors: dict[str, list[Tensor]] = {"gate_up": [], "down": []}
    for e in range(E):
        for role, name in names.items():
            key = f"{prefix}experts.{e}.{name}{end}"
            tensor = partner_of(state_dict, first, key)
            if tensor.shape != shapes[role]:
                raise ValueError(
                    f"{key} has shape {tuple(tensor.shape)}, expected "
                    f"{tuple(shapes[role])}, because {prefix}experts.0.{family.gate}{end} "
                    f"has {tuple(n_d)}"
                )
            tensors["down" if role == "down" else "gate_up"].append(tensor)
    return {
        "experts.gate_up_proj" + ending: torch.cat(tensors["gate_up"]).unflatten(0, (E, -1)),
        "experts.down_proj" + ending: torch.stack(tensors["down"]),
    }


# ---------------------------------------------------------------- from TileMoE


def to_huggingface(state_dict: StateDict, family: str) -> dict[str, Tensor]:
    """Convert TileMoE's names to those of the hub's files of a family.

    Experts in FP8, and gpt-oss's in MXFP4, keep their format. transformers' `from_pretrained` reads
    the result. The function is the inverse of `from_huggingface`, with the same bits.

    Args:
        state_dict: State dict of one layer or of a whole model.
        family: "deepseek_v3", "qwen3_moe", "qwen3_next", "olmoe", "mixtral" or "gpt_oss".

    Returns:
        A new state dict.

    Raises:
        ValueError: The family is unknown, or does not support an entry.
    """
    form = _FAMILIES[_known(family)]
    shared = tuple(f"shared_experts.{weight}" for weight in _SHARED)
    unsupported = set(_OPTIONAL) - set(form.has) | set(() if form.shared else shared)
    stacked = ("experts.gate_up_proj", "experts.down_proj")
    stacked += _OF_MXFP4 if family == "gpt_oss" else tuple(name + _FP8_SCALES for name in stacked)
    split = _as_gpt_oss if family == "gpt_oss" else _single_experts
    converted = {}
    for key, tensor in state_dict.items():
        prefix, ending = split_key(key, (*_OPTIONAL, *stacked, *shared, "gate.weight"))
        if ending is None:
            converted[key] = tensor
            continue
        if ending in unsupported:
            raise ValueError(f"{family} does not support {key}")
        if prefix.endswith("mlp."):
            prefix = prefix[: -len("mlp.")] + form.block + "."
        if ending in shared:
            assert form.shared is not None
            ending = ending.replace("shared_experts", form.shared)
            converted[prefix + ending] = tensor
        else:
            converted |= {prefix + name: t for name, t in split(ending, tensor, form).items()}
    return converted


def _single_experts(ending: str, tensor: Tensor, form: _Family) -> dict[str, Tensor]:
    name = ending.removesuffix(_FP8_SCALES)
    if name == "experts.gate_up_proj":
        parts = {form.gate: tensor.chunk(2, dim=1)[0], form.up: tensor.chunk(2, dim=1)[1]}
    elif name == "experts.down_proj":
        parts = {form.down: tensor}
    else:
        return {ending: tensor}
    return {
        f"experts.{e}.{of}.weight{ending.removeprefix(name)}": part[e].clone()
        for e in range(tensor.shape[0])
        for of, part in parts.items()
    }


def _as_gpt_oss(ending: str, tensor: Tensor, form: _Family) -> dict[str, Tensor]:
    interleaved = lambda rows: rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if ending == "experts.gate_up_proj":
        return {ending: interleaved(tensor).mT.contiguous()}
    if ending.startswith("experts.gate_up_proj_"):  # the bias, blocks and scales of MXFP4
        return {ending: interleaved(tensor).contiguous()}
    if ending == "experts.down_proj":
        return {ending: tensor.mT.contiguous()}
    return {ending.replace("gate.", "router."): tensor}


# ---------------------------------------------------------------- a configuration


_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}


def options_of(config: Any) -> dict[str, Any]:
    """Return the arguments of `MoE` for a model of transformers.

    `MoE(**options_of(config), ...)` computes the same as the model's MoE layers with the parameters
    of `from_huggingface`. The result does not contain losses (transformers computes them over all
    layers at once), `return_aux`, `dtype` and `device`, nor which layers are MoE layers
    (`first_k_dense_replace`, `mlp_only_layers`, `decoder_sparse_step`).

    Args:
        config: Configuration of transformers whose `model_type` is "deepseek_v3", "qwen3_moe",
            "qwen3_next", "olmoe", "mixtral" or "gpt_oss".

    Returns:
        Keyword arguments of `MoE`.

    Raises:
        ValueError: The model is another one, or `MoE` does not support a setting; the message names
            the setting.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(
        ...     model_type="mixtral", hidden_size=64, intermediate_size=32, num_local_experts=8,
        ...     num_experts_per_tok=2, hidden_act="silu",
        ... )
        >>> tilemoe.MoE(**tilemoe.state_dict.options_of(config), return_aux=False).K
        2
    """
    return _OPTIONS[_known(getattr(config, "model_type", None))](config)


def _known(family: str | None) -> str:
    if family not in _FAMILIES:
        names = ", ".join(_FAMILIES)
        raise ValueError(f"model_type must be one of {names}, got {family!r}")
    return family


def _common(config: Any, width: str, scoring: str) -> dict[str, Any]:
    return dict(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, width),
        num_experts=_experts(config),
        top_k=config.num_experts_per_tok,
        activation=_activation(config),
        scoring=scoring,
    )


def _experts(config: Any) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next(getattr(config, name) for name in names if hasattr(config, name))


def _activation(config: Any) -> str:
    if config.hidden_act not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise ValueError(f"hidden_act must be one of {names}, got {config.hidden_act!r}")
    return _ACTIVATIONS[config.hidden_act]


def _refuse_other(config: Any, name: str, *expected: Any) -> None:
    """Reject other values of a setting that the model's class in transformers does not read."""
    value = getattr(config, name, expected[0])
    if value not in expected:
        raise ValueError(f"{name} must be {expected[0]!r} for MoE, got {value!r}")


def _softmax(config: Any) -> str:
    return "softmax_renormalized" if config.norm_topk_prob else "softmax_over_all"


def _of_deepseek_v3(config: Any) -> dict[str, Any]:
    _refuse_other(config, "scoring_func", "sigmoid")
    _refuse_other(config, "topk_method", "noaux_tc")
    scoring = "sigmoid_renormalized" if config.norm_topk_prob else "sigmoid"
    return _common(config, "moe_intermediate_size", scoring) | dict(
        selection_bias=True,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor,
        shared_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        router_dtype=torch.float32,
    )


def _of_qwen3_moe(config: Any) -> dict[str, Any]:
    return _common(config, "moe_intermediate_size", _softmax(config))


def _of_qwen3_next(config: Any) -> dict[str, Any]:
    return _of_qwen3_moe(config) | dict(
        shared_intermediate_size=config.shared_expert_intermediate_size,
        shared_expert_gate=True,
    )


def _of_olmoe(config: Any) -> dict[str, Any]:
    return _common(config, "intermediate_size", _softmax(config))


def _of_mixtral(config: Any) -> dict[str, Any]:
    _refuse_other(config, "router_jitter_noise", 0.0, None)
    return _common(config, "intermediate_size", "softmax_renormalized")


def _of_gpt_oss(config: Any) -> dict[str, Any]:
    _refuse_other(config, "swiglu_limit", 7.0)
    return _common(config, "intermediate_size", "softmax_over_chosen") | dict(
        activation="swiglu",  # for any hidden_act, which the class does not read
        clamp=7.0,
        alpha=1.702,
        up_shift=1.0,
        bias=True,
        router_bias=True,
    )


_OPTIONS = {
    "deepseek_v3": _of_deepseek_v3,
    "gpt_oss": _of_gpt_oss,
    "mixtral": _of_mixtral,
    "olmoe": _of_olmoe,
    "qwen3_moe": _of_qwen3_moe,
    "qwen3_next": _of_qwen3_next,
}
