"""`LoRA`: low-rank adapters of the experts' weights in JAX, and their checks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..options import GATED, Options
from ._shapes import require_array, shape_text

MAX_RANK = 256
_MULTIPLE = 8  # of the ranks that the library takes
FACTORS = ("A1", "B1", "A1_up", "B1_up", "A2", "B2")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: the experts compute with W1 + scale B1 A1 and W2 + scale B2 A2, without
    making these sums. It is a pytree of its factors: `jax.grad` of one returns a LoRA of gradients.

    An adapter may cover W1, W2, or both; a weight's two factors are both given, or both None. With
    a split gate, the gate rows and the up rows each have their own factors. The ranks r may differ;
    each is at most 256. One that is not a multiple of 8 is padded with zeros, which is exact.

    Shape:
        A1 (E, r, d); B1 (E, 2n, r) in W1's row order, or (E, n, r) if it is split or the activation
        has no gate; A2 (E, r, n); B2 (E, d, r); A1_up (E, r, d) and B1_up (E, n, r) only with a
        split gate. float32, bfloat16 or float16.
    """

    A1: Any = None
    B1: Any = None
    A2: Any = None
    B2: Any = None
    scale: float | tuple[float, float] = 1.0  # alpha / r; of W1 and of W2 if two
    A1_up: Any = None
    B1_up: Any = None


jax.tree_util.register_dataclass(
    LoRA, data_fields=["A1", "B1", "A2", "B2", "A1_up", "B1_up"], meta_fields=["scale"]
)


class Factors(NamedTuple):
    """A LoRA as the handlers take it."""

    arrays: dict[str, Any]  # FACTORS, padded; absent ones are not among them
    ranks: tuple[int, int, int]  # of A1, A1_up, A2
    scales: tuple[float, float]


def factors_of(lora: Any, E: int, d: int, n: int, options: Options) -> Factors:
    """The factors, padded to the ranks that the library takes.

    Raises:
        TypeError, ValueError: naming the field."""
    if not isinstance(lora, LoRA):
        kind = f"{type(lora).__module__}.{type(lora).__qualname__}"
        raise TypeError(f"tilemoe: lora is a {kind}, expected a tilemoe.jax.LoRA")
    gated, split = options.activation in GATED, options.gate_layout == "split"
    sizes = {"1": (2 * n if gated and not split else n, d), "1_up": (n, d), "2": (d, n)}
    arrays: dict[str, Any] = {}
    ranks = []
    for name, (out, width) in sizes.items():
        A, B = getattr(lora, f"A{name}"), getattr(lora, f"B{name}")
        if name == "1_up" and not split and not (A is None and B is None):
            given = "A" if A is not None else "B"
            raise ValueError(f"tilemoe: lora.{given}1_up: only gate_layout='split' has it")
        rank = _rank_of(name, A, B, E, out, width)
        ranks.append(-(-rank // _MULTIPLE) * _MULTIPLE)
        if rank:
            pad = ranks[-1] - rank
            arrays[f"A{name}"] = jnp.pad(A, ((0, 0), (0, pad), (0, 0)))
            arrays[f"B{name}"] = jnp.pad(B, ((0, 0), (0, 0), (0, pad)))
    if not any(ranks):
        raise ValueError("tilemoe: lora has no factors, expected those of W1, of W2, or of both")
    return Factors(arrays, (ranks[0], ranks[1], ranks[2]), _scales(lora.scale))


def _rank_of(name: str, A: Any, B: Any, E: int, out: int, width: int) -> int:
    if (A is None) != (B is None):
        absent, given = ("A", "B") if A is None else ("B", "A")
        raise ValueError(f"tilemoe: lora.{given}{name} is given, but lora.{absent}{name} is None")
    if A is None:
        return 0
    for field, array in ((f"lora.A{name}", A), (f"lora.B{name}", B)):
        if require_array(array, field).ndim != 3:
            raise ValueError(
                f"tilemoe: {field} has shape {shape_text(array.shape)}, expected three dimensions"
            )
    rank = A.shape[1]
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"tilemoe: lora.A{name} has rank {rank}, expected 1 to {MAX_RANK}")
    for field, array, shape in (
        (f"A{name}", A, (E, rank, width)),
        (f"B{name}", B, (E, out, rank)),
    ):
        if array.shape != shape:
            raise ValueError(
                f"tilemoe: lora.{field} has shape {shape_text(array.shape)}, expected "
                f"{shape_text(shape)} for these weights and the rank of lora.A{name}"
            )
    return rank


def _scales(scale: Any) -> tuple[float, float]:
    both = scale if isinstance(scale, tuple) else (scale, scale)
    if len(both) != 2 or not all(_is_number(s) and math.isfinite(s) for s in both):
        raise ValueError(f"tilemoe: lora.scale is {scale!r}, expected a finite number, or two")
    return float(both[0]), float(both[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
