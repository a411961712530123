"""Store the adapters of an experts module during one forward."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..lora import LoRA

_ATTRIBUTE = "_tilemoe_adapters"


class Adapter(NamedTuple):
    """Adapter of one weight, W + scale B A: A (E, r, in), B (E, out, r)."""

    A: Tensor
    B: Tensor
    scale: float
    sharded: Any = None  # the weight, if it is a DTensor outside the forward


class Adapters:
    """Adapters of a module's weights by name, and whether a forward has read them."""

    def __init__(self) -> None:
        self.by_weight: dict[str, Adapter] = {}
        self.are_read = False


def has(experts: nn.Module, weight: str) -> bool:
    """Return whether an adapter of this weight is set."""
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


def lora_of(
    experts: nn.Module, first: str, W1: Tensor, W2: Tensor, same_batch: Any = None
) -> LoRA | None:
    """Return the module's adapters as an argument of `tilemoe.moe`.

    Args:
        experts: Experts module.
        first: Name of W1.
        W1: First weights (E, 2n or n, d) of this rank's experts.
        W2: Second weights (E, d, n) of this rank's experts.
        same_batch: Group of the ranks that have this rank's tokens; None: unknown.

    Returns:
        The adapters, or None if no adapter is set.

    Raises:
        NotImplementedError: The weights are sharded in a way that adapters do not support.
    """
    adapters = getattr(experts, _ATTRIBUTE, None)
    if adapters is None:
        return None
    adapters.are_read = True
    one, two = (adapters.by_weight.get(weight) for weight in (first, "down_proj"))
    if one is not None and one.sharded is not None:
        one = _of_this_rank(one, first, W1, same_batch)
    if two is not None and two.sharded is not None:
        two = _of_this_rank(two, "down_proj", W2, same_batch)
    return LoRA(
        A1=one.A if one else None,
        B1=one.B if one else None,
        A2=two.A if two else None,
        B2=two.B if two else None,
        scale=(one.scale if one else 1.0, two.scale if two else 1.0),
    )


def _of_this_rank(adapter: Adapter, name: str, W: Tensor, same_batch: Any) -> Adapter:
    from .sharded_adapters import of_this_rank

    return of_this_rank(adapter, name, W, same_batch)
