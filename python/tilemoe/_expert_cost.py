"""Chooses the way, and the number of chunks, in which the rows of a layer of several ranks travel:
a model of the time that GEMMs wait for rows, and rows for GEMMs. The host computes it from the
sizes alone, so every rank makes the same choice."""

from __future__ import annotations

from typing import NamedTuple

from ._team import cuts_of

_MAX_CHUNKS = 8
_TILE_ROWS = 128  # rows of a GEMM tile: an expert's last tile of a chunk is half empty on average


class Way(NamedTuple):
    """How rows travel: gathered in chunks, or pulled in one."""

    chunks: int
    pulls: bool


class Rates(NamedTuple):
    """The rates of a host's GPUs. Defaults: NCCL on four H200 of one host, all-gathers and
    all-to-alls of 32768 and 4096 rows of 4096 bfloat16; a layer of 128 experts on one H200.
    benchmarks/expert_parallel.py measures the rates of another host."""

    gather_gb_per_s: float = 330.0  # that leave a GPU; 1 GB is 1e9 bytes
    return_gb_per_s: float = 310.0
    latency_ms: float = 0.06  # latency of a collective
    tflop_per_s: float = 600.0  # of the GEMMs
    # The extra time of each chunk after the first, which the model does not explain: collectives
    # and GEMMs compete for SMs and memory. About the measured value of two H100 with 2 and 4 chunks
    # of 32768 tokens.
    chunk_ms: float = 1.3
    # Rows of 8 KiB that a GPU reads from the others' symmetric memory, on four H200.
    pull_gb_per_s: float = 333.0
    barrier_ms: float = 0.012  # of symmetric memory
    memory_gb_per_s: float = 4000.0  # of a GPU's own
    packing_ms: float = 0.1  # from the choice to which rows are pulled: a guess, not measured


def exposed_ms(
    T: int, d: int, n: int, E: int, K: int, ranks: int, chunks: int, itemsize: int, rates: Rates
) -> float:
    """Milliseconds of forward and backward in which a rank runs no GEMM, or work that one chunk
    would not need: the waits for X, O and dO, half-empty tiles, and the extra time of a chunk."""
    cuts = cuts_of(T, chunks)
    chunks = len(cuts) - 1
    leaving = (ranks - 1) * T * d * itemsize / chunks * 1e-6  # MB a chunk
    gather = rates.latency_ms + leaving / rates.gather_gb_per_s
    back = rates.latency_ms + leaving / rates.return_gb_per_s
    flop_of_row = 6 * d * n * 1e-9  # of forward, in GFLOP
    forward = T * K * flop_of_row / rates.tflop_per_s
    half_empty = (chunks - 1) * E // ranks * _TILE_ROWS / 2 * flop_of_row / rates.tflop_per_s
    exposed = 0.0
    # In backward only the GEMMs with dO, a third of forward's.
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
    """The same for pulled rows with randomly chosen experts: each rank waits for X, O and dO. A
    rank first copies its rows to the memory from which the others read them."""
    copies = (ranks - 1) * (1 - (1 - 1 / ranks) ** K)  # a token's copies on other ranks than its own
    row = T * d * itemsize * 1e-6  # MB
    reading = copies * row / rates.pull_gb_per_s
    # X and dO are copied as they are; O has a row for each received token.
    copying = (2 * 2 + 2 * (copies + 1)) * row / rates.memory_gb_per_s
    return 3 * (reading + 2 * rates.barrier_ms) + copying + rates.packing_ms


def best_way(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, chunks: int,
    rates: Rates = Rates(),
) -> Way:  # fmt: skip
    """Gathered in `chunks` chunks or pulled, whichever the model expects to take less time."""
    sizes = T, d, n, E, K, ranks
    pulled = pull_ms(*sizes, itemsize, rates)
    pulls = ranks > 1 and pulled < exposed_ms(*sizes, chunks, itemsize, rates)
    return Way(1, True) if pulls else Way(chunks, False)


def best_chunks(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, rates: Rates = Rates()
) -> int:
    """The number of chunks, up to 8, with the least expected time for T tokens on each rank."""
    cost = lambda chunks: exposed_ms(T, d, n, E, K, ranks, chunks, itemsize, rates)  # noqa: E731
    return min(range(1, _MAX_CHUNKS + 1), key=cost)
