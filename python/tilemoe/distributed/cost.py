"""Predict the time and the memory of a layer whose experts are sharded over ranks.

The first part models how long GEMMs wait for rows, and rows for GEMMs; it selects the dispatch and
the number of chunks. The host computes the model from the sizes alone, so every rank makes the same
choice. The second part is the memory of a rank. Its sizes follow team.py and layer.py; the library
reports the sizes of the layer itself.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _library
from .._formats import FORMATS
from .._layout import h_width, rule_of
from .._signatures import Reader
from ..options import FP8_RECIPES, RULE, SCORES_GIVEN, TOP_K, At, OfPlan, Options
from .team import cuts_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CODES = [1 + FORMATS.index("fp8"), 0, 1 + FORMATS.index("fp8"), 0, 0, 0]  # of W1 and W2
_MAX_CHUNKS = 8
_TILE_ROWS = (
    128  # rows of a GEMM tile: the last tile of an expert in a chunk is half empty on average
)


class Way(NamedTuple):
    """Dispatch of rows: gathered in chunks, or pulled in one."""

    chunks: int
    pulls: bool


class Rates(NamedTuple):
    """Rates of the GPUs of a host.

    The defaults are from NCCL on four H100 of one host (all-gathers and all-to-alls of 32768 rows
    of 4096 bfloat16) and from layers on two and four of them (benchmarks/results/fitted.jsonl).
    benchmarks/expert_parallel.py measures the rates of another host.
    """

    gather_gb_per_s: float = 324.0  # leave a GPU; 1 GB is 1e9 bytes
    return_gb_per_s: float = 330.0
    latency_ms: float = 0.06  # latency of a collective
    tflop_per_s: float = 600.0  # of the GEMMs
    # Extra time of each chunk after the first, which the model does not explain: collectives and
    # GEMMs compete for SMs and memory. On four GPUs, two chunks took 4 to 6 ms more than without it.
    chunk_ms: float = 5.0
    # Rows of 8 KiB that a GPU reads from the symmetric memory of other GPUs, in the whole layer.
    pull_gb_per_s: float = 100.0
    barrier_ms: float = 0.012  # barrier of symmetric memory
    memory_gb_per_s: float = 4000.0  # local memory of a GPU
    packing_ms: float = (
        0.1  # from the choice to the list of rows to pull: an estimate, not measured
    )


def exposed_ms(
    T: int, d: int, n: int, E: int, K: int, ranks: int, chunks: int, itemsize: int, rates: Rates
) -> float:
    """Return the milliseconds of forward and backward in which a rank runs no useful GEMM.

    These are the waits for X, O and dO, half-empty tiles, and the extra time of each chunk.
    """
    cuts = cuts_of(T, chunks)
    chunks = len(cuts) - 1
    leaving = (ranks - 1) * T * d * itemsize / chunks * 1e-6  # MB per chunk
    gather = rates.latency_ms + leaving / rates.gather_gb_per_s
    back = rates.latency_ms + leaving / rates.return_gb_per_s
    flop_of_row = 6 * d * n * 1e-9  # forward, in GFLOP
    forward = T * K * flop_of_row / rates.tflop_per_s
    half_empty = (chunks - 1) * E // ranks * _TILE_ROWS / 2 * flop_of_row / rates.tflop_per_s
    exposed = 0.0
    # In backward only the GEMMs with dO overlap, a third of the forward's work.
    for gemms, returns in ((forward + half_empty, True), ((forward + half_empty) / 3, False)):
        arrived = done = gone = 0.0
        for _ in range(chunks):
            arrived += gather
            done = max(done, arrived) + gemms / chunks
            gone = max(gone, done, chunks * gather) + back  # collectives run one after another
        exposed += (gone if returns else done) - gemms
    return exposed + half_empty * 4 / 3 + (chunks - 1) * rates.chunk_ms


def pull_ms(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, rates: Rates = Rates()
) -> float:
    """Return the same milliseconds for pulled rows and randomly chosen experts.

    Each rank waits for X, O and dO. A rank first copies its rows to the memory that the others
    read.
    """
    copies = (ranks - 1) * (1 - (1 - 1 / ranks) ** K)  # copies of a token on other ranks
    row = T * d * itemsize * 1e-6  # MB
    reading = copies * row / rates.pull_gb_per_s
    # X and dO are copied unchanged; O has one row per received token.
    copying = (2 * 2 + 2 * (copies + 1)) * row / rates.memory_gb_per_s
    return 3 * (reading + 2 * rates.barrier_ms) + copying + rates.packing_ms


def best_way(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, chunks: int,
    rates: Rates = Rates(),
) -> Way:  # fmt: skip
    """Return the faster dispatch by the model: gathered in `chunks` chunks, or pulled."""
    sizes = T, d, n, E, K, ranks
    pulled = pull_ms(*sizes, itemsize, rates)
    pulls = ranks > 1 and pulled < exposed_ms(*sizes, chunks, itemsize, rates)
    return Way(1, True) if pulls else Way(chunks, False)


def best_chunks(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, rates: Rates = Rates()
) -> int:
    """Return the number of chunks, up to 8, with the least expected time for T tokens per rank."""
    cost = lambda chunks: exposed_ms(T, d, n, E, K, ranks, chunks, itemsize, rates)  # noqa: E731
    return min(range(1, _MAX_CHUNKS + 1), key=cost)


# ---------------------------------------------------------------- memory

_GIB = 2**30


class Memory(NamedTuple):
    """Memory of a rank for one layer.

    Not included are weights, the rank's own x and O, their gradients, the router, and the memory of
    torch.distributed itself.

    Attributes:
        places: Number of pairs that fit, not bytes.
        kept: Bytes saved from forward to backward.
        forward: Maximum bytes while forward runs, including what is saved.
        backward: Maximum bytes while backward runs, including the gradients of the weights.
    """

    places: int
    kept: int
    forward: int
    backward: int

    def __str__(self) -> str:
        kept, forward, backward = (f"{size / _GIB:.3f}" for size in self[1:])
        return (
            f"{self.places:,} pairs: {kept} GiB saved for backward, at most {forward} GiB "
            f"in forward and {backward} GiB in backward"
        )


def way_of(
    options: Options, T: int, d: int, n: int, E: int, K: int, ranks: int, dtype: torch.dtype
) -> Way:
    """Return the dispatch of a layer of these sizes."""
    if options.dispatch == "pull":
        return Way(1, True)
    sizes = T, d, n, E, K, ranks, dtype.itemsize
    chunks = options.chunks
    if chunks == "auto":  # codes are computed in one chunk
        chunks = best_chunks(*sizes) if options.recipe == "bf16" else 1
    if options.dispatch == "auto" and _on_one_host():
        return best_way(*sizes, chunks)
    return Way(chunks, False)


def capacity_of(options: Options, pairs: int, ranks: int, max_pairs: int) -> int:
    """Return the rows of one rank: the factor times the mean, at most `max_pairs`."""
    if options.capacity_factor is None:
        return max_pairs
    return min(math.ceil(options.capacity_factor * pairs / ranks), max_pairs)


def _on_one_host() -> bool:
    """Return whether all processes of the job run on one host, by torchrun's variables."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local is not None and local == os.environ.get("WORLD_SIZE")


_plan = Reader("plan", OfPlan)


@_plan.shows
def plan(
    T: int,
    d: int,
    n: int,
    E: int,
    K: int,
    ranks: int,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    **options: Unpack[OfPlan],
) -> Memory:
    """Return the memory that a rank needs for `moe`, or for `MoE(expert_mesh=)`.

    The layer has no shared experts and no token rounding, and each rank has T tokens.

    Args:
        T: Tokens of a rank.
        d: Width of a token.
        n: Width inside one expert.
        E: Experts of all ranks.
        K: Experts per token.
        ranks: Number of ranks.
        bias: The experts have biases.
        dtype: Dtype of the tokens.
        device: Device of the tokens. The partial sums of a GPU are counted only on that GPU.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        A `Memory`. The peak of a step is the larger of `forward` and `backward`.

    Raises:
        ValueError: A size or an option is wrong.
        NotImplementedError: The recipe is FP8, and there are several chunks.

    Example:
        >>> sizes = dict(T=4096, d=2048, n=768, E=128, K=8, ranks=4)
        >>> lossless, less = plan(**sizes), plan(**sizes, capacity_factor=1.5)
        >>> lossless.places, less.places
        (131072, 49152)
    """
    how = _plan(options)  # type: ignore[arg-type]
    if how.recipe == "auto":
        raise ValueError(
            "recipe must be bf16, fp8 or fp8_forward in a plan, got 'auto'; pass the recipe that "
            "tilemoe.choose_recipe returns"
        )
    if ranks < 1 or E % ranks:
        raise ValueError(f"E must be a multiple of the {ranks} ranks, got {E}")
    E_local, N, size = E // ranks, T * ranks, dtype.itemsize
    width = min(K, E_local)  # of the layer's ids and scores
    C = max(capacity_of(how, N * K, ranks, N * width), 1)
    way = way_of(how, T, d, n, E, K, ranks, dtype)
    in_fp8 = how.recipe in FP8_RECIPES
    if in_fp8 and way.chunks > 1:
        raise NotImplementedError("quantised weights require chunks=1")
    tokens = min(N, C) if way.pulls else N  # received tokens
    numbers = [*rule_of(TOP_K, width, SCORES_GIVEN), *how.numbers[len(RULE) :]]
    like = torch.empty(0, dtype=dtype, device=device)
    routing, H, of_forward, of_backward, of_dW1 = _library.operators.layer_bytes(
        like, [tokens, E_local, d, n, C], numbers, _CODES if in_fp8 else []
    )

    rows, own = tokens * d * size, T * d * size  # of the received tokens; of this rank
    ids = 4 * N * K  # and scores, and their gradient
    narrowed = tokens * E_local * K if K > E_local else 0  # the expert of each place, as bools
    choice = 8 * T * K + narrowed + way.pulls * 4 * (tokens + T * ranks)
    kept = H + routing + choice + how.keep_gathered * rows
    # Packed ids and scores, ids, scores, and those of this rank.
    gathered = 6 * ids + 4 * narrowed + 8 * tokens * width
    if way.pulls:
        # The CPU has a second copy of the rows that are sent or received; on GPUs they are in
        # symmetric memory.
        sent = min(ranks, K) * own if torch.device(device).type == "cpu" else 0
        adding = rows + own + sent
        arriving = rows + 2 * sent
    else:
        # Sums of the ranks: sent and received, this rank's in float32, and the rounded result.
        adding = 2 * rows + 4 * T * d + own
        arriving = 0
    # Results of all chunks but the last, received while the last chunk is computed.
    back_already = cuts_of(T, way.chunks)[-2] * ranks * d * size
    computing = (2 - how.keep_gathered) * rows + back_already + of_forward
    forward = kept + gathered + max(computing, adding, arriving)
    width_of_H = h_width(numbers[At.ACTIVATION], n)
    of_W2 = E_local * (d * n + bias * d) * size
    of_W1 = E_local * width_of_H * (d + bias) * size
    ds = 8 * tokens * width
    made = rows + ds + of_W2  # dX of the received rows, and the gradients for the optimizer
    back = how.overlap * (own if way.pulls else rows)  # sums of dX, received while dW1 is computed
    # Next to codes of H, which are freed before dW1 is allocated, dH has memory of its own.
    dH = C * width_of_H * size if how.save_h else 0
    last = of_dW1 + of_W1 + back - (H if how.save_h else 0)
    computing = dH + (2 - how.keep_gathered) * rows + made + max(of_backward, last)
    backward = kept + max(computing, ds + gathered + of_W2 + of_W1 + adding)
    return Memory(C, kept, forward, backward)
