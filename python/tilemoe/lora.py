"""`LoRA`: low-rank adapters of the experts' weights, and their checks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from . import _library
from ._layout import FACTORS, RANKS, SCALES, WIDTH_MULTIPLE, w1_rows
from ._shapes import shape_text
from .options import At

MAX_RANK = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_pad = torch.nn.functional.pad
_SPLIT_ALONE = "only gate_layout='split' has it"


class LoRA(NamedTuple):
    """Low-rank adapters: the experts compute with W1 + scale B1 A1 and W2 + scale B2 A2, without
    making these sums.

    An adapter may cover W1, W2, or both; a weight's two factors are both given, or both None. With
    a split gate, the gate rows and the up rows each have their own factors. The ranks r may differ;
    each is at most 256. One that is not a multiple of 8 is padded with zeros, which is exact.

    Shape:
        A1 (E, r, d); B1 (E, 2n, r) in W1's row order, or (E, n, r) if it is split or the activation
        has no gate; A2 (E, r, n); B2 (E, d, r); A1_up (E, r, d) and B1_up (E, n, r) only with a
        split gate. float32, bfloat16 or float16, of any strides.
    """

    A1: Tensor | None = None
    B1: Tensor | None = None
    A2: Tensor | None = None
    B2: Tensor | None = None
    scale: Union[float, tuple[float, float]] = 1.0  # alpha / r; of W1 and of W2 if two
    A1_up: Tensor | None = None
    B1_up: Tensor | None = None


class Factors(NamedTuple):
    """A LoRA as operators take it."""

    tensors: list[Tensor | None]  # FACTORS, padded
    ranks: list[int]  # of A1, A1_up, A2
    scales: list[float]


def no_factors() -> Factors:
    return Factors([None] * len(FACTORS), [0] * len(RANKS), [1.0] * len(SCALES))


def factors_of(lora: Any, x: Tensor, weights: list[Tensor | None], numbers: list[int]) -> Factors:
    """The factors, padded to the ranks that operators take.

    Raises:
        TypeError, ValueError: naming the field."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"tilemoe: lora is a {_library.class_of(lora)}, expected a tilemoe.LoRA")
    W2 = weights[2]
    assert W2 is not None
    if W2.dim() != 3:
        raise ValueError(f"tilemoe: W2 has shape {shape_text(W2.shape)}, expected (E, d, n)")
    E, d, n = W2.shape
    rows = w1_rows(numbers[At.ACTIVATION], numbers[At.GATE_LAYOUT], n)
    sizes = {"1": (rows, d), "1_up": (n, d), "2": (d, n)}
    tensors: list[Tensor | None] = []
    ranks = []
    for name, (out, width) in sizes.items():
        A, B = getattr(lora, f"A{name}"), getattr(lora, f"B{name}")
        if name == "1_up" and weights[1] is None and not (A is None and B is None):
            raise ValueError(f"tilemoe: lora.{'A' if A is not None else 'B'}1_up: {_SPLIT_ALONE}")
        rank = _rank_of(name, A, B, x, E, out, width)
        ranks.append(-(-rank // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        if pad := ranks[-1] - rank:
            A = torch.nn.functional.pad(A, (0, 0, 0, pad))
            B = torch.nn.functional.pad(B, (0, pad))
        tensors += [A, B]
    if not any(ranks):
        raise ValueError("tilemoe: lora has no factors, expected those of W1, of W2, or of both")
    assert len(tensors) == len(FACTORS)
    return Factors(tensors, ranks, _scales(lora.scale))


def _rank_of(name, A, B, x, E, out, width):
    if (A is None) != (B is None):
        absent, given = ("A", "B") if A is None else ("B", "A")
        raise ValueError(f"tilemoe: lora.{given}{name} is given, but lora.{absent}{name} is None")
    if A is None:
        return 0
    for field, tensor in ((f"lora.A{name}", A), (f"lora.B{name}", B)):
        _library.require_together(x, "x", **{field: tensor})
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"tilemoe: {field} is {tensor.dtype}, expected float32, bfloat16 or float16"
            )
        if tensor.dim() != 3:
            raise ValueError(
                f"tilemoe: {field} has shape {shape_text(tensor.shape)}, expected three dimensions"
            )
    rank = A.shape[1]
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"tilemoe: lora.A{name} has rank {rank}, expected 1 to {MAX_RANK}")
    shapes = ((f"A{name}", A, (E, rank, width)), (f"B{name}", B, (E, out, rank)))
    for field, tensor, shape in shapes:
        if tensor.shape != shape:
            raise ValueError(
                f"tilemoe: lora.{field} has shape {shape_text(tensor.shape)}, expected "
                f"{shape_text(shape)} for these weights and the rank of lora.A{name}"
            )
    return rank


def _scales(scale: Any) -> list[float]:
    both = scale if isinstance(scale, tuple) else (scale, scale)
    # torch.compile traces comparisons of a number that it does not know, but not math.isfinite.
    if len(both) != 2 or not all(_is_number(s) and -math.inf < s < math.inf for s in both):
        raise ValueError(f"tilemoe: lora.scale is {scale!r}, expected a finite number, or two")
    return [float(s) for s in both]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
