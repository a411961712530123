"""By which way, and in how many chunks, a layer of several ranks had best travel: a model of the time
that products wait for rows, and rows for products. The host computes it from sizes alone, so every
rank chooses alike."""

from __future__ import annotations

from typing import NamedTuple

from ._team import cuts_of

_MOST_CHUNKS = 8
_TILE_ROWS = 128  # of a product: an expert's last tile of each chunk is half empty on average


class Way(NamedTuple):
    """How rows travel: gathered in chunks, or pulled in one."""

    chunks: int
    pulls: bool


class Rates(NamedTuple):
    """What a host's GPUs do. As given: NCCL on four H200 of one host, all-gathers and all-to-alls of
    32768 and 4096 rows of 4096 bfloat16; a layer of 128 experts on one H200.
    benchmarks/expert_parallel.py measures those of another host."""

    gather_gb_per_s: float = 330.0  # that leave a GPU; 1 GB is 1e9 bytes
    return_gb_per_s: float = 310.0
    latency_ms: float = 0.06  # of a collective
    tflop_per_s: float = 600.0  # of the products
    # That each chunk after the first takes beside what is modelled, since collectives and products
    # take multiprocessors and memory from each other: about what two H100 showed with 2 and 4
    # chunks of 32768 tokens.
    chunk_ms: float = 1.3
    # Rows of 8 KiB that a GPU reads from the others' symmetric memory, on four H200.
    pull_gb_per_s: float = 333.0
    barrier_ms: float = 0.012  # of symmetric memory
    memory_gb_per_s: float = 4000.0  # of a GPU's own
    packing_ms: float = 0.1  # from the choice to which rows are pulled: a guess, not measured


def exposed_ms(
    T: int, d: int, n: int, E: int, K: int, ranks: int, chunks: int, itemsize: int, rates: Rates
) -> float:
    """Milliseconds of forward and backward in which a rank does no product, or what one piece would
    not need: what is left of X, O and dO to be waited for, tiles that are half empty, and what a
    chunk costs beside."""
    cuts = cuts_of(T, chunks)
    chunks = len(cuts) - 1
    leaving = (ranks - 1) * T * d * itemsize / chunks * 1e-6  # MB a chunk
    gather = rates.latency_ms + leaving / rates.gather_gb_per_s
    back = rates.latency_ms + leaving / rates.return_gb_per_s
    flop_of_row = 6 * d * n * 1e-9  # of forward, in GFLOP
    forward = T * K * flop_of_row / rates.tflop_per_s
    half_empty = (chunks - 1) * E // ranks * _TILE_ROWS / 2 * flop_of_row / rates.tflop_per_s
    exposed = 0.0
    # Of backward's products those with dO, a third of forward's.
    for products, returns in ((forward + half_empty, True), ((forward + half_empty) / 3, False)):
        there = done = gone = 0.0
        for _ in range(chunks):
            there += gather
            done = max(done, there) + products / chunks
            gone = max(gone, done, chunks * gather) + back  # collectives are done in turn
        exposed += (gone if returns else done) - products
    return exposed + half_empty * 4 / 3 + (chunks - 1) * rates.chunk_ms


def pull_ms(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, rates: Rates = Rates()
) -> float:
    """The same of rows that are pulled, where experts are chosen at random: X, O and dO are waited
    for. A rank first copies its rows to where the others read them."""
    copies = (ranks - 1) * (1 - (1 - 1 / ranks) ** K)  # of a token, on other ranks than its own
    row = T * d * itemsize * 1e-6  # MB
    reading = copies * row / rates.pull_gb_per_s
    # X and dO are copied as they are; of O there is a row for each of the tokens that came.
    copying = (2 * 2 + 2 * (copies + 1)) * row / rates.memory_gb_per_s
    return 3 * (reading + 2 * rates.barrier_ms) + copying + rates.packing_ms


def best_way(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, chunks: int,
    rates: Rates = Rates(),
) -> Way:  # fmt: skip
    """Gathered in so many chunks or pulled, whichever the model expects to take less."""
    sizes = T, d, n, E, K, ranks
    pulled = pull_ms(*sizes, itemsize, rates)
    pulls = ranks > 1 and pulled < exposed_ms(*sizes, chunks, itemsize, rates)
    return Way(1, True) if pulls else Way(chunks, False)


def best_chunks(
    T: int, d: int, n: int, E: int, K: int, ranks: int, itemsize: int, rates: Rates = Rates()
) -> int:
    """The number of chunks, up to 8, for T tokens on each rank, of which the model expects least."""
    cost = lambda chunks: exposed_ms(T, d, n, E, K, ranks, chunks, itemsize, rates)  # noqa: E731
    return min(range(1, _MOST_CHUNKS + 1), key=cost)
