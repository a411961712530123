"""Compute PEFT's adapters of experts' weights in TileMoE's GEMMs.

`tilemoe.peft` is the public module. PEFT wraps an experts module once per weight that it adapts.
Each wrapper's forward activates its adapter around the forward of the wrapped module, by a
parametrization. This module replaces the activation: the adapter's factors are set for the experts'
forward, which passes those of both wrappers to one call of tilemoe.moe. Methods that PEFT calls at
these points check a model's targets before it is wrapped, and convert saved factors when they are
loaded. Nothing else of PEFT is changed.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from ..distributed.dtensor import is_dtensor
from ..lora import MAX_RANK
from . import expert_adapters, peft_layouts, peft_targets, quantized_experts
from .expert_adapters import Adapter
from .peft_layouts import Roles
from .transformers import is_tilemoe
from .transformers_loop import dispatching_forward

_OURS = "_is_of_tilemoe"
_ambiguous_roles: Roles | None = None
_reported: set[str] = set()


def register(*, ambiguous_roles: Roles | None = None) -> None:
    """Compute PEFT's adapters of experts (`LoraConfig(target_parameters=...)`) in TileMoE's GEMMs.

    This applies to every model whose experts implementation is TileMoE, also to models that PEFT
    has already wrapped. PEFT does everything else. If TileMoE cannot compute an adapter, PEFT adds
    weight and adapter at each call, and a warning gives the reason once.

    A LoraConfig is checked before adapters are made: if it names a weight of experts for which PEFT
    would make no adapter, a ValueError names that weight. Adapters of experts that were saved in
    another layout, by PEFT before 0.19.1 or by unsloth, are converted when they are loaded.

    Args:
        ambiguous_roles: Roles of lora_A and lora_B in adapters of PEFT before 0.19.1 whose shapes
            do not determine them, because in = out: "current" if lora_A has the width of the
            inputs, "reversed" if it has the width of the outputs. None: such adapters raise an
            error.

    Raises:
        ImportError: PEFT is not installed, or older than 0.21.
        ValueError: ambiguous_roles has another value.
    """
    if ambiguous_roles not in (None, "current", "reversed"):
        raise ValueError(
            f"ambiguous_roles must be None, 'current' or 'reversed', got {ambiguous_roles!r}"
        )
    needs = "tilemoe.peft requires transformers >= 5.17 and PEFT >= 0.21"
    try:
        import peft
        from peft.config import PeftConfigMixin
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.lora.model import LoraModel
        from transformers.integrations.peft import PeftAdapterMixin
    except ImportError as error:
        raise ImportError(needs) from error
    replaced: list[tuple[type, str, Callable]] = [
        (ParamWrapper, "_activate_lora", _activation),
        (LoraModel, "_prepare_model", _preparation),
        (LoraModel, "_check_merge_allowed", _merging),
        (LoraModel, "_remap_adapter_state_dict_for_load", _loading),
        (PeftConfigMixin, "from_peft_type", _configuring),
        (PeftAdapterMixin, "load_adapter", _loading_of_transformers),
    ]
    owned = [*replaced, (ParamWrapper, "get_delta_factors", None)]  # 0.21's
    if not all(hasattr(owner, name) for owner, name, _ in owned):
        raise ImportError(f"{needs}, got PEFT {peft.__version__}")
    global _ambiguous_roles
    _ambiguous_roles = ambiguous_roles
    for owner, name, make in replaced:
        theirs = getattr(owner, name)
        if not hasattr(theirs, _OURS):
            ours = make(theirs)
            setattr(getattr(ours, "__func__", ours), _OURS, True)
            setattr(owner, name, ours)


def _activation(theirs: Callable) -> Callable:
    """Return a ParamWrapper._activate_lora that uses TileMoE if possible, else `theirs`."""

    @wraps(theirs)
    def _activate_lora(self: Any, active_adapters: list[str]) -> Any:
        names = [name for name in active_adapters if name in self.lora_A]
        experts = _innermost(self)
        if names and _is_fused(self, experts, names):
            adapter = _adapter(self, names[0])
            weight = experts._parameters.get(self.parameter_name)  # unless it is parametrized
            if weight is not None and is_dtensor(weight):  # each rank has a part of it
                adapter = adapter._replace(sharded=weight)
            return _Activation(experts, self.parameter_name, adapter)
        return theirs(self, active_adapters)

    return _activate_lora


class _Activation:
    """Context in which the forward of `experts` must read the adapter of a weight.

    With contextlib.contextmanager the host would need 10 us more.
    """

    def __init__(self, experts: torch.nn.Module, weight: str, adapter: Adapter) -> None:
        self.experts, self.weight, self.adapter = experts, weight, adapter

    def __enter__(self) -> None:
        self.adapters = expert_adapters.put(self.experts, self.weight, self.adapter)

    def __exit__(self, kind: type | None, *_: Any) -> None:
        expert_adapters.remove(self.experts, self.weight)
        if kind is None and not self.adapters.are_read:
            raise RuntimeError(
                f"the adapter of {self.weight} was not used, because the forward of "
                f"{_name(self.experts)} did not call TileMoE"
            )


def _preparation(theirs: Callable) -> Callable:
    """Return a LoraModel._prepare_model that checks the targets, then calls `theirs`."""

    @wraps(theirs)
    def _prepare_model(self: Any, config: Any, model: torch.nn.Module) -> None:
        experts = {name: m for name, m in model.named_modules() if _is_computed_here(m)}
        if experts:
            peft_targets.check(config, model, experts)
        theirs(self, config, model)

    return _prepare_model


def _merging(theirs: Callable) -> Callable:
    """Return a LoraModel._check_merge_allowed that calls `theirs` and checks for quantised weights.

    The check runs before the first module is merged.
    """

    @wraps(theirs)
    def _check_merge_allowed(self: Any) -> None:
        theirs(self)
        for name, module in self.model.named_modules():
            weight = getattr(module, "parameter_name", None)
            if weight in quantized_experts.names(_innermost(module)):
                raise ValueError(
                    f"adapters of {name}.{weight} cannot be merged into a quantised "
                    "weight; call model.dequantize() first, or load the base in 16 bits"
                )

    return _check_merge_allowed


def _configuring(theirs: Callable) -> Any:
    """Return a PeftConfigMixin.from_peft_type that keeps the entries of a layout.

    No config class has these entries, which are kept until the adapter is loaded.
    """

    @wraps(theirs)
    def from_peft_type(cls: type, **entries: Any) -> Any:
        saved = peft_layouts.take_entries(entries)
        config = theirs.__func__(cls, **entries)  # type: ignore[attr-defined]
        peft_layouts.keep(config, saved)
        return config

    return classmethod(from_peft_type)


def _loading(theirs: Callable) -> Any:
    """Return a LoraModel._remap_adapter_state_dict_for_load with PEFT's layout, then `theirs`."""

    @wraps(theirs)
    def _remap_adapter_state_dict_for_load(
        cls: type, model: Any, config: Any, adapter_name: str, state_dict: dict
    ) -> dict:
        given = model, config, adapter_name
        args = *given, peft_layouts.converted(*given, state_dict, _ambiguous_roles)
        return theirs.__func__(cls, *args)  # type: ignore[attr-defined]

    return classmethod(_remap_adapter_state_dict_for_load)


def _loading_of_transformers(theirs: Callable) -> Callable:
    """Return a load_adapter for transformers' models, which reads files into the parameters."""

    @wraps(theirs)
    def load_adapter(
        self: Any, peft_model_id: Any = None, adapter_name: Any = None, *args: Any, **named: Any
    ) -> Any:
        info = theirs(self, peft_model_id, adapter_name, *args, **named)
        name = adapter_name or "default"
        peft_layouts.convert_loaded(self, self.peft_config[name], name, _ambiguous_roles)
        return info

    return load_adapter


def _adapter(wrapper: Any, name: str) -> Adapter:
    """Return the adapter's factors, as views of PEFT's parameters.

    The rows of A are expert * r + rank, the columns of B rank * E + expert. They are packed again
    in each call. A cache cannot detect changes: FSDP-2 gathers a parameter into the same tensor
    after each step without a new version, and writes to .data have no version.
    """
    A, B, E = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    A = A.view(E, -1, A.shape[1])
    B = B.view(B.shape[0], -1, E).permute(2, 0, 1)
    return Adapter(A, B, wrapper.scaling[name])


def _innermost(wrapper: Any) -> Any:
    """Return the module in all wrappers, ten times faster than get_base_layer()."""
    module = wrapper
    while (inner := module._modules.get("base_layer")) is not None:
        module = inner
    return module


def _is_fused(wrapper: Any, experts: Any, names: list[str]) -> bool:
    """Return whether TileMoE computes the active adapters `names`; warn if not, for experts."""
    if not _is_experts(experts):
        return False  # a router's weight, for example
    if reason := _why_not(wrapper, experts, names):
        if wrapper.parameter_name in quantized_experts.names(experts):
            raise NotImplementedError(
                f"the adapter of {_name(experts)}.{wrapper.parameter_name}, which is "
                f"quantised, cannot be computed: {reason}"
            )
        _report(f"{_name(experts)}.{wrapper.parameter_name}", reason)
    return not reason


def _why_not(wrapper: Any, experts: Any, names: list[str]) -> str:
    implementation = experts.config._experts_implementation
    if not is_tilemoe(implementation):
        return f"its experts_implementation is {implementation!r}"
    weight = wrapper.parameter_name
    if weight not in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        return "it is not a weight of the experts' GEMMs"
    if len(names) > 1:
        return f"{len(names)} adapters are active: {', '.join(names)}"
    if expert_adapters.has(experts, weight):
        return "two wrappers adapt it"
    (name,) = names
    if wrapper.r[name] > MAX_RANK:
        return f"the rank of adapter {name} must be at most {MAX_RANK}, got {wrapper.r[name]}"
    if not isinstance(wrapper.lora_dropout[name], torch.nn.Identity):
        return f"adapter {name} has dropout"
    if wrapper.use_dora.get(name) or name in wrapper.lora_variant:
        return f"adapter {name} is a variant of LoRA, such as DoRA"
    if wrapper.lora_bias.get(name):
        return f"adapter {name} has a bias"
    return ""


def _is_experts(module: torch.nn.Module) -> bool:
    """Return whether the module has transformers' experts interface."""
    return hasattr(module, "has_gate") and dispatching_forward(type(module)) is not None


def _is_computed_here(module: Any) -> bool:
    return _is_experts(module) and is_tilemoe(module.config._experts_implementation)


def _name(experts: torch.nn.Module) -> str:
    return type_before_parametrizations(experts).__qualname__


def _report(weight: str, reason: str) -> None:
    message = (
        f"PEFT computes the adapter of {weight} by adding it to the weight at each call, "
        f"because {reason}"
    )
    if message not in _reported:
        _reported.add(message)
        warnings.warn(message, stacklevel=2)
