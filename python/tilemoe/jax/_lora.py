"""Define `LoRA`, the low-rank adapters of the experts' weights in JAX, and check them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..options import GATED, Options
from ._shapes import require_array, shape_text

MAX_RANK = 256
_MULTIPLE = 8  # multiple of the ranks that the library supports
FACTORS = ("A1", "B1", "A1_up", "B1_up", "A2", "B2")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: the experts compute with W1 + scale B1 A1 and W2 + scale B2 A2.

    The sums are not materialised. A LoRA is a pytree of its factors: `jax.grad` returns a LoRA of
    gradients. An adapter may cover W1, W2 or both; the two factors of a weight are both given or
    both None. With a split gate, the gate rows and the up rows have separate factors. The ranks r
    may differ; each is in [1, 256]. A rank that is not a multiple of 8 is padded with zeros, which
    is exact. The factors are float32, bfloat16 or float16.

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

    A1: Any = None
    B1: Any = None
    A2: Any = None
    B2: Any = None
    scale: float | tuple[float, float] = 1.0
    A1_up: Any = None
    B1_up: Any = None


jax.tree_util.register_dataclass(
    LoRA, data_fields=["A1", "B1", "A2", "B2", "A1_up", "B1_up"], meta_fields=["scale"]
)


class Factors(NamedTuple):
    """LoRA in the form that the handlers read."""

    arrays: dict[str, Any]  # FACTORS, padded, without absent ones
    ranks: tuple[int, int, int]  # ranks of A1, A1_up, A2
    scales: tuple[float, float]


def factors_of(lora: Any, E: int, d: int, n: int, options: Options) -> Factors:
    """Return the factors, padded to the ranks that the library supports.

    Raises:
        TypeError: lora is not a LoRA or a field is not an array.
        ValueError: A field is wrong; the message names it.
    """
    if not isinstance(lora, LoRA):
        kind = f"{type(lora).__module__}.{type(lora).__qualname__}"
        raise TypeError(f"lora must be a tilemoe.jax.LoRA, got a {kind}")
    gated, split = options.activation in GATED, options.gate_layout == "split"
    sizes = {"1": (2 * n if gated and not split else n, d), "1_up": (n, d), "2": (d, n)}
    arrays: dict[str, Any] = {}
    ranks = []
    for name, (out, width) in sizes.items():
        A, B = getattr(lora, f"A{name}"), getattr(lora, f"B{name}")
        if name == "1_up" and not split and not (A is None and B is None):
            given = "A" if A is not None else "B"
            raise ValueError(f"lora.{given}1_up requires gate_layout='split'")
        rank = _rank_of(name, A, B, E, out, width)
        ranks.append(-(-rank // _MULTIPLE) * _MULTIPLE)
        if rank:
            pad = ranks[-1] - rank
            arrays[f"A{name}"] = jnp.pad(A, ((0, 0), (0, pad), (0, 0)))
            arrays[f"B{name}"] = jnp.pad(B, ((0, 0), (0, 0), (0, pad)))
    if not any(ranks):
        raise ValueError("lora requires the factors of W1, of W2 or of both, got none")
    return Factors(arrays, (ranks[0], ranks[1], ranks[2]), _scales(lora.scale))


def _rank_of(name: str, A: Any, B: Any, E: int, out: int, width: int) -> int:
    if (A is None) != (B is None):
        absent, given = ("A", "B") if A is None else ("B", "A")
        raise ValueError(f"lora.{given}{name} requires lora.{absent}{name}, got None")
    if A is None:
        return 0
    for field, array in ((f"lora.A{name}", A), (f"lora.B{name}", B)):
        if require_array(array, field).ndim != 3:
            raise ValueError(
                f"{field} has shape {shape_text(array.shape)}, expected three dimensions"
            )
    rank = A.shape[1]
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"lora.A{name} must have a rank in [1, {MAX_RANK}], got {rank}")
    for field, array, shape in (
        (f"A{name}", A, (E, rank, width)),
        (f"B{name}", B, (E, out, rank)),
    ):
        if array.shape != shape:
            raise ValueError(
                f"lora.{field} has shape {shape_text(array.shape)}, expected "
                f"{shape_text(shape)} for these weights and the rank of lora.A{name}"
            )
    return rank


def _scales(scale: Any) -> tuple[float, float]:
    both = scale if isinstance(scale, tuple) else (scale, scale)
    if len(both) != 2 or not all(_is_number(s) and math.isfinite(s) for s in both):
        raise ValueError(f"lora.scale must be a finite number or a pair of them, got {scale!r}")
    return float(both[0]), float(both[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
