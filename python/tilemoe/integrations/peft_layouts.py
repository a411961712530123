"""Convert saved adapters of experts from other layouts to PEFT's while they are loaded.

PEFT's layout is lora_A (E r, in) with row expert * r + rank, and lora_B (out, r E) with column
rank * E + expert. Two other layouts have been saved:

- PEFT up to 0.19.0 exchanged input and output of most experts: lora_A is (E r, out) and lora_B
  (in, r E). The shapes determine the layout, unless in = out for every weight of the model.
- unsloth: the column of lora_B is expert * r + rank, with the same shape. Entries of
  adapter_config.json, which PEFT ignores, describe it.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Roles = Literal["current", "reversed"]
_ATTRIBUTE = "_tilemoe_saved"
_RANK_MAJOR, _EXPERT_MAJOR = "rank_major", "grouped_by_expert"
_FIRST_CURRENT = (0, 19, 1)  # the first version of PEFT that saves every model in its layout


class Saved(NamedTuple):
    """Layout of an adapter according to adapter_config.json."""

    version: str | None  # version of PEFT
    of_B: str | None
    of_B_by_parameter: dict[str, str]


def take_entries(entries: dict[str, Any]) -> Saved:
    """Remove the layout's entries from those of adapter_config.json and return them."""
    of_B = entries.pop("lora_B_layout", None)
    detail = entries.pop("unsloth_fused_expert_lora", None) or {}
    by_parameter = {
        name: value["lora_B_layout"]
        for name, value in (detail.get("parameters") or {}).items()
        if "lora_B_layout" in value
    }
    return Saved(entries.get("peft_version"), detail.get("lora_B_layout", of_B), by_parameter)


def keep(config: Any, saved: Saved) -> None:
    """Remember the layout until the factors are loaded."""
    setattr(config, _ATTRIBUTE, saved)


def convert_loaded(
    model: torch.nn.Module, config: Any, adapter: str, ambiguous_roles: Roles | None
) -> None:
    """Convert an adapter's factors in place, after a loader has copied those of a file.

    The arguments are those of converted().
    """
    loaded = {
        f"{name}.lora_{factor}.weight": getattr(module, f"lora_{factor}")[adapter].weight
        for name, module in model.named_modules()
        if adapter in getattr(module, "lora_B", ())
        for factor in "AB"
    }
    with torch.no_grad():
        for key, tensor in converted(model, config, adapter, loaded, ambiguous_roles).items():
            if tensor is not loaded[key]:
                loaded[key].copy_(tensor)


class _Pair(NamedTuple):
    """Factors of a wrapper in a state dict."""

    wrapper: Any
    key_A: str
    key_B: str


def converted(
    model: torch.nn.Module,
    config: Any,
    adapter: str,
    state_dict: dict[str, Tensor],
    ambiguous_roles: Roles | None,
) -> dict[str, Tensor]:
    """Convert the factors of experts to PEFT's layout.

    Args:
        model: Model with the adapter's wrappers.
        config: LoraConfig of the adapter.
        adapter: Name of the adapter.
        state_dict: Tensors by their names in a saved adapter.
        ambiguous_roles: Roles of lora_A and lora_B if neither the shapes nor PEFT's version
            determine them; None: raise an error.

    Returns:
        A state dict with the same names.

    Raises:
        ValueError: The layout is unknown or ambiguous; the message names the weight.
    """
    pairs = _pairs(model, adapter, state_dict)
    if not pairs:
        return state_dict
    saved = getattr(config, _ATTRIBUTE, None)
    is_reversed = _are_reversed(pairs, adapter, state_dict, saved, ambiguous_roles)
    state_dict = dict(state_dict)
    for wrapper, key_A, key_B in pairs:
        E, is_expert_major = wrapper.num_experts, _is_expert_major(saved, wrapper.parameter_name)
        if not is_reversed and not is_expert_major:
            continue
        A = state_dict[key_A].unflatten(0, (E, -1))  # (E, r, in)
        if is_expert_major:
            B = state_dict[key_B].unflatten(1, (E, -1)).transpose(1, 2)
        else:
            B = state_dict[key_B].unflatten(1, (-1, E))  # (out, r, E)
        if is_reversed:
            A, B = B.permute(2, 1, 0), A.permute(2, 1, 0)
        state_dict[key_A] = A.flatten(0, 1).contiguous()
        state_dict[key_B] = B.flatten(1).contiguous()
    return state_dict


def _pairs(model: torch.nn.Module, adapter: str, state_dict: dict[str, Tensor]) -> list[_Pair]:
    """Return the factors of transformers' experts whose shapes have either layout."""
    found = []
    for name, module in model.named_modules():
        is_wrapper = getattr(module, "_param_ndim", 0) == 3 and adapter in module.r
        if not is_wrapper or not hasattr(module.get_base_layer(), "is_transposed"):
            continue
        for prefix in ("", "base_model.model."):
            pair = _Pair(module, f"{prefix}{name}.lora_A.weight", f"{prefix}{name}.lora_B.weight")
            if pair.key_A in state_dict and pair.key_B in state_dict:
                if _roles_of(pair, adapter, state_dict):
                    found.append(pair)
                break
    return found


def _roles_of(pair: _Pair, adapter: str, state_dict: dict[str, Tensor]) -> set[Roles]:
    """Return the roles that the shapes allow; none if PEFT will reject them."""
    wrapper, inputs, outputs = pair.wrapper, pair.wrapper.in_features, pair.wrapper.out_features
    rows = wrapper.num_experts * wrapper.r[adapter]
    shapes = tuple(state_dict[pair.key_A].shape), tuple(state_dict[pair.key_B].shape)
    roles: set[Roles] = set()
    if shapes == ((rows, inputs), (outputs, rows)):
        roles.add("current")
    if shapes == ((rows, outputs), (inputs, rows)):
        roles.add("reversed")
    return roles


def _are_reversed(
    pairs: list[_Pair],
    adapter: str,
    state_dict: dict[str, Tensor],
    saved: Saved | None,
    ambiguous_roles: Roles | None,
) -> bool:
    roles: set[Roles] = {"current", "reversed"}
    for pair in pairs:
        roles &= _roles_of(pair, adapter, state_dict)
    if not roles:
        raise ValueError(
            f"lora_A and lora_B of adapter {adapter} have the layout of PEFT before 0.19.1 "
            "for some experts' weights, but not for others"
        )
    if len(roles) == 1:
        return roles == {"reversed"}
    if saved is None or _is_current(saved.version):  # not from a file, or from a newer one
        return False
    if ambiguous_roles is None:
        raise ValueError(
            f"adapter {adapter} was saved by PEFT {saved.version or 'before 0.18'}, whose "
            f"layout of {pairs[0].key_A} depends on the version, and the shapes do not "
            "determine the layout, because in = out; call "
            "tilemoe.peft.register(ambiguous_roles='reversed') if lora_A has the outputs' "
            "width, else register(ambiguous_roles='current')"
        )
    return ambiguous_roles == "reversed"


def _is_current(version: str | None) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and Version(version.partition("@")[0]).release >= _FIRST_CURRENT
    except InvalidVersion:
        return False


def _is_expert_major(saved: Saved | None, parameter: str) -> bool:
    if saved is None:
        return False
    layout = saved.of_B_by_parameter.get(parameter, saved.of_B)
    if layout not in (None, _RANK_MAJOR, _EXPERT_MAJOR):
        raise ValueError(
            f"lora_B of {parameter} in adapter_config.json must be {_RANK_MAJOR!r} or "
            f"{_EXPERT_MAJOR!r}, got {layout!r}"
        )
    return layout == _EXPERT_MAJOR
