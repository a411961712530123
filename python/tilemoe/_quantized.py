"""Convert quantised weights to the form that operators read."""

from __future__ import annotations

from typing import Any, NamedTuple, Union

from torch import Tensor

from ._formats import FORMATS
from ._layout import QUANTIZABLE, WEIGHTS
from .quantization import QuantizedExperts

Weight = Union[Tensor, QuantizedExperts]

_W1, _W1_UP, _W2 = (WEIGHTS.index(name) for name in QUANTIZABLE)


class Operands(NamedTuple):
    """Weights of a call, and the arrays and formats of the quantised ones."""

    weights: list[Tensor | None]  # a quantised weight has its shape and x's dtype, without memory
    arrays: list[Tensor | None]  # in the order of _layout.QUANTIZED, or empty
    formats: list[int]  # _layout.FORMATS, or empty


def any_quantized(weights: list[Any]) -> bool:
    kind = QuantizedExperts
    return type(weights[_W1]) is kind or type(weights[_W2]) is kind or type(weights[_W1_UP]) is kind


def operands(weights: list[Any], x: Tensor) -> Operands:
    """Return the weights with their arrays.

    Raises:
        ValueError: W1 and W1_up have different formats.
    """
    if not any_quantized(weights):
        return Operands(weights, [], [])
    _check_pair(weights[_W1], weights[_W1_UP])
    shapes: list[Tensor | None] = list(weights)
    arrays: list[Tensor | None] = []
    formats, transposed = [], []
    for place in (_W1, _W1_UP, _W2):
        weight = weights[place]
        if type(weight) is QuantizedExperts:
            shapes[place] = x.new_empty(()).expand(weight.shape)
            arrays += [*weight.arrays]
            formats.append(FORMATS.index(weight.format) + 1)
            transposed.append(int(weight.transposed))
        else:
            arrays += [None] * 5
            formats.append(0)
            transposed.append(0)
    return Operands(shapes, arrays, [*formats, *transposed])


def _check_pair(gate: Any, up: Any) -> None:
    if up is None or _stored(gate) == _stored(up):
        return
    raise ValueError(f"W1 is {_stored(gate)} and W1_up is {_stored(up)}, expected the same")


def _stored(weight: Any) -> str:
    if type(weight) is not QuantizedExperts:
        return "not quantised"
    return f"{weight.format}, transposed={weight.transposed}"
