"""PEFT's adapters of experts' weights in TileMoE's GEMMs; `tilemoe.peft` is the public module.

PEFT wraps an experts module once per weight that it adapts, and each wrapper's forward activates its
adapter around the forward of what it wraps, by a parametrization. Here the activation is replaced,
and nothing else: the adapter's factors are set for the experts' forward, which passes those of
both wrappers to one call of tilemoe.moe."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from ..lora import MAX_RANK
from . import expert_adapters
from .expert_adapters import Adapter
from .transformers import experts_forward
from .transformers_loop import dispatching_forward

_reported: set[str] = set()


def register() -> None:
    """Make PEFT's adapters of experts (`LoraConfig(target_parameters=...)`) part of TileMoE's GEMMs,
    in every model whose experts implementation is TileMoE, also in models that are already wrapped.

    Nothing else of PEFT is changed. An adapter that TileMoE cannot compute is left to PEFT, which
    makes the sum of weight and adapter at each call; a warning then names the reason, once.

    Raises:
        ImportError: PEFT is not installed, or older than 0.21.
    """
    needs = "tilemoe.peft needs PEFT 0.21 or newer"
    try:
        import peft
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        raise ImportError(needs) from error
    if not hasattr(ParamWrapper, "get_delta_factors") or not hasattr(
        ParamWrapper, "_activate_lora"
    ):
        raise ImportError(f"{needs}, but peft is {peft.__version__}")
    theirs = ParamWrapper._activate_lora
    if hasattr(theirs, "of_peft"):
        return

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        if not names or not _is_fused(self, names):
            with theirs(self, active_adapters):
                yield
            return
        with _set_for_forward(self, names[0]):
            yield

    _activate_lora.of_peft = theirs  # type: ignore[attr-defined]
    ParamWrapper._activate_lora = _activate_lora


@contextmanager
def _set_for_forward(wrapper: Any, name: str) -> Iterator[None]:
    experts, weight = wrapper.get_base_layer(), wrapper.parameter_name
    adapters = expert_adapters.put(experts, weight, _adapter(wrapper, name))
    try:
        yield
        if not adapters.are_read:
            raise RuntimeError(
                f"tilemoe.peft: the adapter of {weight} was not used: the forward of "
                f"{_name(experts)} did not call TileMoE"
            )
    finally:
        expert_adapters.remove(experts, weight)


def _adapter(wrapper: Any, name: str) -> Adapter:
    """The adapter's factors, as views of PEFT's parameters: A's rows are expert * r + rank, B's
    columns rank * E + expert."""
    A, B, E = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    A = A.view(E, -1, A.shape[1])
    B = B.view(B.shape[0], -1, E).permute(2, 0, 1)
    return Adapter(A, B, wrapper.scaling[name])


def _is_fused(wrapper: Any, names: list[str]) -> bool:
    """Whether TileMoE computes the active adapters `names`; if not, and they are of experts, reports
    why."""
    experts = wrapper.get_base_layer()
    if dispatching_forward(type(experts)) is None:
        return False  # a router's weight, for instance
    if reason := _why_not(wrapper, experts, names):
        _report(f"{_name(experts)}.{wrapper.parameter_name}", reason)
    return not reason


def _why_not(wrapper: Any, experts: torch.nn.Module, names: list[str]) -> str:
    implementation = experts.config._experts_implementation
    if not _is_tilemoe(implementation):
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
        return f"the rank {wrapper.r[name]} of adapter {name} is over {MAX_RANK}"
    if not isinstance(wrapper.lora_dropout[name], torch.nn.Identity):
        return f"adapter {name} has dropout"
    if wrapper.use_dora.get(name) or name in wrapper.lora_variant:
        return f"adapter {name} is a variant of LoRA, such as DoRA"
    if wrapper.lora_bias.get(name):
        return f"adapter {name} has a bias"
    return ""


def _is_tilemoe(implementation: str | None) -> bool:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS.get(implementation, None) is experts_forward


def _name(experts: torch.nn.Module) -> str:
    return type_before_parametrizations(experts).__qualname__


def _report(weight: str, reason: str) -> None:
    message = (
        f"tilemoe.peft: PEFT computes the adapter of {weight} by adding it to the weight at each "
        f"call, since {reason}"
    )
    if message not in _reported:
        _reported.add(message)
        warnings.warn(message, stacklevel=2)
