"""Define `LoRA`, the low-rank adapters of the experts' weights, and check them."""

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
_SPLIT_ALONE = "requires gate_layout='split'"


class LoRA(NamedTuple):
    """Low-rank adapters: the experts compute with W1 + scale B1 A1 and W2 + scale B2 A2.

    The sums are not materialised. An adapter may cover W1, W2 or both; the two factors of a weight
    are both given or both None. With a split gate, the gate rows and the up rows have separate
    factors. The ranks r may differ; each is in [1, 256]. A rank that is not a multiple of 8 is
    padded with zeros, which is exact. The factors are float32, bfloat16 or float16, with any
    strides.

    Attributes:
        A1: Shape (E, r, d).
        B1: Shape (E, 2n, r) in the row order of W1, or (E, n, r) if W1 is split or the activation
            has no gate.
        A2: Shape (E, r, n).
        B2: Shape (E, d, r).
        A1_up: Shape (E, r, d), with a split gate only.
        B1_up: Shape (E, n, r), with a split gate only.
        scale: alpha / r, or two such factors, for W1 and for W2.
    """

    A1: Tensor | None = None
    B1: Tensor | None = None
    A2: Tensor | None = None
    B2: Tensor | None = None
    scale: Union[float, tuple[float, float]] = 1.0
    A1_up: Tensor | None = None
    B1_up: Tensor | None = None


class Factors(NamedTuple):
    """LoRA in the form that operators read."""

    tensors: list[Tensor | None]  # FACTORS, padded
    ranks: list[int]  # ranks of A1, A1_up, A2
    scales: list[float]


def no_factors() -> Factors:
    return Factors([None] * len(FACTORS), [0] * len(RANKS), [1.0] * len(SCALES))


def factors_of(lora: Any, x: Tensor, weights: list[Tensor | None], numbers: list[int]) -> Factors:
    """Return the factors, padded to the ranks that operators support.

    Raises:
        TypeError: lora is not a LoRA or a field is not a tensor.
        ValueError: A field is wrong; the message names it.
    """
    if not isinstance(lora, LoRA):
        raise TypeError(f"lora must be a tilemoe.LoRA, got a {_library.class_of(lora)}")
    W2 = weights[2]
    assert W2 is not None
    if W2.dim() != 3:
        raise ValueError(f"W2 has shape {shape_text(W2.shape)}, expected (E, d, n)")
    E, d, n = W2.shape
    rows = w1_rows(numbers[At.ACTIVATION], numbers[At.GATE_LAYOUT], n)
    sizes = {"1": (rows, d), "1_up": (n, d), "2": (d, n)}
    tensors: list[Tensor | None] = []
    ranks = []
    for name, (out, width) in sizes.items():
        A, B = getattr(lora, f"A{name}"), getattr(lora, f"B{name}")
        if name == "1_up" and weights[1] is None and not (A is None and B is None):
            raise ValueError(f"lora.{'A' if A is not None else 'B'}1_up {_SPLIT_ALONE}")
        rank = _rank_of(name, A, B, x, E, out, width)
        ranks.append(-(-rank // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        if pad := ranks[-1] - rank:
            A = torch.nn.functional.pad(A, (0, 0, 0, pad))
            B = torch.nn.functional.pad(B, (0, pad))
        tensors += [A, B]
    if not any(ranks):
        raise ValueError("lora requires the factors of W1, of W2 or of both, got none")
    assert len(tensors) == len(FACTORS)
    return Factors(tensors, ranks, _scales(lora.scale))


def _rank_of(name, A, B, x, E, out, width):
    if (A is None) != (B is None):
        absent, given = ("A", "B") if A is None else ("B", "A")
        raise ValueError(f"lora.{given}{name} requires lora.{absent}{name}, got None")
    if A is None:
        return 0
    for field, tensor in ((f"lora.A{name}", A), (f"lora.B{name}", B)):
        _library.require_together(x, "x", **{field: tensor})
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{field} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.dim() != 3:
            raise ValueError(
                f"{field} has shape {shape_text(tensor.shape)}, expected three dimensions"
            )
    rank = A.shape[1]
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"lora.A{name} must have a rank in [1, {MAX_RANK}], got {rank}")
    shapes = ((f"A{name}", A, (E, rank, width)), (f"B{name}", B, (E, out, rank)))
    for field, tensor, shape in shapes:
        if tensor.shape != shape:
            raise ValueError(
                f"lora.{field} has shape {shape_text(tensor.shape)}, expected "
                f"{shape_text(shape)} for these weights and the rank of lora.A{name}"
            )
    return rank


def _scales(scale: Any) -> list[float]:
    both = scale if isinstance(scale, tuple) else (scale, scale)
    # torch.compile can trace comparisons of a symbolic number, but not math.isfinite.
    if len(both) != 2 or not all(_is_number(s) and -math.inf < s < math.inf for s in both):
        raise ValueError(f"lora.scale must be a finite number or a pair of them, got {scale!r}")
    return [float(s) for s in both]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
