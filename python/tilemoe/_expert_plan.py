"""What a rank takes for a layer whose experts are on several, before anything is allocated. The
places are counted as _team.py and expert_parallel.py have them, the layer's own by the library."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import _library, _rules
from .functional import Activation

_GIB = 2**30


class Memory(NamedTuple):
    """Bytes of a rank for one layer, beside weights, its own x and O, their gradients, the router,
    and what torch.distributed takes for itself."""

    places: int  # pairs of its experts that there is memory for: not bytes
    kept: int  # from forward to backward
    forward: int  # the most while forward runs, what is kept included
    backward: int  # the most while backward runs, its weights' gradients included

    def __str__(self) -> str:
        kept, forward, backward = (f"{size / _GIB:.3f}" for size in self[1:])
        return (
            f"{self.places:,} places: {kept} GiB kept for backward, at most {forward} in forward "
            f"and {backward} in backward"
        )


class Places(NamedTuple):
    """How much memory a rank has for pairs of its experts, and what becomes of those past it."""

    capacity_factor: float | None = 1.5
    on_overflow: str = "nan"
    keep_gathered: bool = False

    def check(self) -> None:
        factor = self.capacity_factor
        if factor is not None and not (factor > 0 and math.isfinite(factor)):
            raise ValueError(
                f"tilemoe: capacity_factor is {factor}, expected None or a number above 0"
            )
        _rules.number("on_overflow", ("nan", "drop"), self.on_overflow)

    def capacity(self, pairs: int, ranks: int, most: int) -> int:
        """Rows of one rank: the factor times the mean; `most` suffices for every routing."""
        if self.capacity_factor is None:
            return most
        return min(math.ceil(self.capacity_factor * pairs / ranks), most)


def plan(
    T: int,
    d: int,
    n: int,
    E: int,
    K: int,
    ranks: int,
    *,
    capacity_factor: float | None = 1.5,
    keep_gathered: bool = False,
    activation: Activation = "swiglu",
    bias: bool = False,
    column_blocks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Memory:
    """What a rank of `ranks` takes for `moe`, or for `MoE(expert_mesh=)` without shared experts and
    without rounding, with T tokens on each rank.

    Args:
        T, d, n, E, K: tokens of a rank, their width, the experts', all ranks' experts, a token's.
        ranks: of the group, or of expert_mesh.
        capacity_factor: None: every routing has places, T * min(K, E / ranks) of each rank.
        keep_gathered, activation, bias, column_blocks: as in `moe`.
        dtype, device: of the tokens. A GPU's own partial sums are known where there is one.

    Returns:
        A `Memory`. Peak of a step: the larger of `forward` and `backward`.

    Raises:
        ValueError: a size or an option does not fit.

    Example:
        >>> factor = tilemoe.expert_parallel.plan(4096, 2048, 768, 128, 8, 4)
        >>> lossless = tilemoe.expert_parallel.plan(4096, 2048, 768, 128, 8, 4, capacity_factor=None)
        >>> factor.places, lossless.places
        (49152, 131072)
    """
    if ranks < 1 or E % ranks:
        raise ValueError(f"tilemoe: E is {E}, and the experts do not go evenly to {ranks} ranks")
    places = Places(capacity_factor, "nan", keep_gathered)
    places.check()
    E_local, N, size = E // ranks, T * ranks, dtype.itemsize
    width = min(K, E_local)  # of ids and scores that the layer gets
    C = max(places.capacity(N * K, ranks, N * width), 1)
    number = _rules.number("activation", _rules.ACTIVATIONS, activation)
    numbers = [*_rules.rule_of(_rules.TOP_K, width, _rules.SCORES_GIVEN), number, 0, column_blocks]
    like = torch.empty(0, dtype=dtype, device=device)
    routing, H, of_forward, of_backward = _library.operators.layer_bytes(
        like, [N, E_local, d, n, C], numbers
    )

    rows, own = N * d * size, T * d * size  # of all ranks; of this one
    ids = 4 * N * K  # also scores, and their gradient
    narrowed = N * E_local * K if K > E_local else 0  # which place is which expert's: bools
    choice = 8 * T * K + narrowed
    kept = H + routing + choice + keep_gathered * rows
    # Adding up the ranks' sums: theirs here and there, this rank's in float32 and rounded.
    adding = 2 * rows + 4 * T * d + own
    gathered = 6 * ids + 4 * narrowed + 8 * N * width  # the packed, the ids, the scores, those of here
    forward = kept + gathered + max((2 - keep_gathered) * rows + of_forward, adding)
    h_width = _rules.h_width(number, n)
    of_W2 = E_local * (d * n + bias * d) * size
    of_W1 = E_local * h_width * (d + bias) * size
    ds = 8 * N * width
    made = rows + ds + of_W2  # dX of all ranks' rows, and what goes on to the optimizer
    computing = (2 - keep_gathered) * rows + made + max(of_backward, of_W1)
    backward = kept + max(computing, ds + gathered + of_W2 + of_W1 + adding)
    return Memory(C, kept, forward, backward)
