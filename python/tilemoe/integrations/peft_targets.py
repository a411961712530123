"""Check the targets of a LoraConfig against the model's experts before adapters are made."""

import warnings
from typing import Any

import torch

_reported: set[str] = set()


def check(config: Any, model: torch.nn.Module, experts: dict[str, torch.nn.Module]) -> None:
    """Reject targets for which no adapter would be made, and warn about experts that stay frozen.

    Args:
        config: A LoraConfig.
        model: Model that will be adapted.
        experts: Its experts modules, by name.

    Raises:
        ValueError: target_parameters does not name a parameter of the model, or target_modules
            names a weight of experts, which is a parameter and not a module.
    """
    targets = sorted(config.target_parameters or [])
    parameters = [_plain(name) for name, _ in model.named_parameters()]
    for target in targets:
        if not any(_has_suffix(name, target) for name in parameters):
            raise ValueError(
                f"target_parameters names {target}, but {type(model).__qualname__} has no "
                "parameter with this name"
            )
    for name, module in experts.items():
        first = "gate_up_proj" if module.has_gate else "up_proj"
        for weight, names in ((first, _names_of(first)), ("down_proj", ["down_proj"])):
            key = f"{_plain(name)}.{weight}"
            if any(_has_suffix(key, target) for target in targets):
                continue
            _check_weight(config, _plain(name), key, names)


def _check_weight(config: Any, module: str, key: str, names: list[str]) -> None:
    """Check that target_modules does not name a weight for which no adapter is made."""
    from peft.tuners.tuners_utils import check_target_module_exists

    advice = f"a parameter, not a module; pass target_parameters=[{key!r}], or the end of this name"
    if str(config.target_modules).lower() == "all-linear":
        if key not in _reported:
            _reported.add(key)
            warnings.warn(f"{key} stays frozen; it is {advice}", stacklevel=4)
        return
    for name in names:
        if check_target_module_exists(config, f"{module}.{name}"):
            raise ValueError(f"target_modules names {name}, but {key} is {advice}")


def _names_of(first: str) -> list[str]:
    """Return the names of W1, and of its parts in models with one weight per expert."""
    return [first] if first == "up_proj" else [first, "gate_proj", "up_proj"]


def _plain(name: str) -> str:
    """Return a parameter's or module's name without wrappers and parametrizations."""
    for inserted in ("base_layer.", "parametrizations."):
        name = name.replace(inserted, "")
    return name.removesuffix(".base_layer").removesuffix(".original")


def _has_suffix(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
