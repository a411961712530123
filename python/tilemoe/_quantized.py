"""Convert quantised weights to the form that operators read."""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from ._formats import FORMATS
from ._layout import QUANTIZABLE, WEIGHTS
from .fp8_weights import Fp8Weight
from .quantization import QuantizedExperts

Weight = Union[Tensor, QuantizedExperts, Fp8Weight]

_W1, _W1_UP, _W2 = (WEIGHTS.index(name) for name in QUANTIZABLE)
KINDS = (QuantizedExperts, Fp8Weight)  # compared with `type() in`, which is quick
_NO_TRANSPOSED = (
    "{name} has no transposed codes, which backward of recipe='fp8' reads; pass "
    "tilemoe.fp8_weight({name}), call quantize_weights() of the module, or use recipe='fp8_forward'"
)


class Operands(NamedTuple):
    """Weights of a call, and the arrays and formats of the quantised ones."""

    # A quantised weight is its master, if that requires a gradient, or has its shape and x's dtype,
    # without memory.
    weights: list[Tensor | None]
    arrays: list[Tensor | None]  # in the order of _layout.QUANTIZED, or empty
    formats: list[int]  # _layout.FORMATS, or empty


def any_quantized(weights: list[Any]) -> bool:
    W1, W1_up, W2, *_ = weights
    return type(W1) in KINDS or type(W2) in KINDS or type(W1_up) in KINDS


def with_recipe(weights: list[Any], recipe: str) -> list[Any]:
    """Return the weights as the recipe reads them: "bf16" reads the masters of FP8 weights."""
    if recipe != "bf16":
        return weights
    return [_plain(weight) if type(weight) is Fp8Weight else weight for weight in weights]


def _plain(weight: Fp8Weight) -> Tensor | QuantizedExperts:
    return weight.weight if weight.master is None else weight.master


def operands(weights: list[Any], x: Tensor, recipe: str = "bf16") -> Operands:
    """Return the weights with their arrays.

    Raises:
        ValueError: W1 and W1_up have different formats.
    """
    if not any_quantized(weights):
        return Operands(weights, [], [])
    _check_pair(weights[_W1], weights[_W1_UP])
    shapes: list[Tensor | None] = list(weights)
    arrays: list[Tensor | None] = []
    of_backward: list[Tensor | None] = []
    formats, transposed = [], []
    for place in (_W1, _W1_UP, _W2):
        weight = weights[place]
        if type(weight) not in KINDS:
            arrays += [None] * 5
            of_backward += [None] * 2
            formats.append(0)
            transposed.append(0)
            continue
        kept = master = None
        if type(weight) is Fp8Weight:
            weight, kept, master = weight
        trains = master is not None and master.requires_grad and torch.is_grad_enabled()
        shapes[place] = master if trains else shape_only(weight.shape, x, x.dtype)
        arrays += [*weight.arrays]  # torch.compile adds no NamedTuple to a list
        kept = kept if recipe == "fp8" else None
        of_backward += [None, None] if kept is None else [kept.codes, kept.scales]
        formats.append(FORMATS.index(weight.format) + 1)
        transposed.append(int(weight.transposed))
    return Operands(shapes, [*arrays, *of_backward], [*formats, *transposed])


def require_transposed(weights: list[Any]) -> None:
    """Raise an error for an FP8 weight that backward of recipe="fp8" cannot read."""
    for place in (_W1, _W1_UP, _W2):
        weight = weights[place]
        if type(weight) is QuantizedExperts or (
            type(weight) is Fp8Weight and weight.transposed is None
        ):
            raise ValueError(_NO_TRANSPOSED.format(name=WEIGHTS[place]))


def shape_only(shape: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a shape and a dtype on x's device, without memory for its elements."""
    return x.new_empty((), dtype=dtype).expand(shape)


def without_master(weight: Tensor, x: Tensor) -> Tensor:
    """Return what operators read of a master: its shape, and the dtype of its gradient."""
    dtype = weight.dtype if weight.dtype == torch.float32 else x.dtype
    return shape_only(weight.shape, x, dtype)


def _check_pair(gate: Any, up: Any) -> None:
    if up is None or _stored(gate) == _stored(up):
        return
    raise ValueError(f"W1 is {_stored(gate)} and W1_up is {_stored(up)}, expected the same")


def _stored(weight: Any) -> str:
    if type(weight) is Fp8Weight:
        weight = weight.weight
    if type(weight) is not QuantizedExperts:
        return "not quantised"
    return f"{weight.format}, transposed={weight.transposed}"
