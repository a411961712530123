"""Adapters of an experts module during one forward: set around it, read by its implementation."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from .. import functional
from ..lora import LoRA

_ATTRIBUTE = "_tilemoe_adapters"


class Adapter(NamedTuple):
    """W + scale B A of one weight: A (E, r, in), B (E, out, r)."""

    A: Tensor
    B: Tensor
    scale: float


class Adapters:
    """The adapters of a module's weights by name, and whether a forward has read them."""

    def __init__(self) -> None:
        self.by_weight: dict[str, Adapter] = {}
        self.are_read = False


def has(experts: nn.Module, weight: str) -> bool:
    """Whether an adapter of this weight is set."""
    adapters = getattr(experts, _ATTRIBUTE, None)
    return adapters is not None and weight in adapters.by_weight


def put(experts: nn.Module, weight: str, adapter: Adapter) -> Adapters:
    """Set the adapter of a weight until remove()."""
    adapters = getattr(experts, _ATTRIBUTE, None)
    if adapters is None:
        adapters = Adapters()
        setattr(experts, _ATTRIBUTE, adapters)
    adapters.by_weight[weight] = adapter
    adapters.are_read = False
    return adapters


def remove(experts: nn.Module, weight: str) -> None:
    """Undo put()."""
    adapters = getattr(experts, _ATTRIBUTE)
    del adapters.by_weight[weight]
    if not adapters.by_weight:
        delattr(experts, _ATTRIBUTE)


def lora_of(experts: nn.Module, first: str, moe: Callable) -> LoRA | None:
    """Read the module's adapters, as an argument of `moe`.

    Args:
        experts: the module.
        first: the name of W1.
        moe: the function that will compute the experts.

    Returns:
        None if no adapter is set.

    Raises:
        NotImplementedError: `moe` takes no adapters.
    """
    adapters = getattr(experts, _ATTRIBUTE, None)
    if adapters is None:
        return None
    if moe is not functional.moe:
        raise NotImplementedError(
            f"tilemoe cannot compute adapters of {', '.join(adapters.by_weight)}: "
            "tilemoe.expert_parallel.moe has no lora="
        )
    adapters.are_read = True
    one, two = (adapters.by_weight.get(weight) for weight in (first, "down_proj"))
    return LoRA(
        A1=one.A if one else None,
        B1=one.B if one else None,
        A2=two.A if two else None,
        B2=two.B if two else None,
        scale=(one.scale if one else 1.0, two.scale if two else 1.0),
    )
