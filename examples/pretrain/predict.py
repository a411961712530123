"""How long a step of a configuration takes on a Hopper GPU, from measured rates.

The experts: every kernel's limit is max(FLOP / PRODUCTS, bytes / MEMORY), each tensor counted once
(docs/benchmarks.md); the measured layers of benchmarks/results/gpu_bench.json say how many times
the limit a layer takes, that of the same shape where there is one, the mean of all otherwise. The
rest: FLOP and bytes over the RATES below. Communication between processes is not in it.
"""

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from configs import Config

LAYERS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_bench.json"
# The limits' rates: products in bfloat16, and device memory, of an H100.
PRODUCTS, MEMORY = 798e12, 3.0e12


class Layer(NamedTuple):
    """The sizes of a layer alone."""

    T: int
    d: int
    n: int
    E: int
    K: int


def kernels(c: Config | Layer, T):
    """-> seconds at the limit of the experts' forward and backward kernels, top-K."""
    M, gathered = T * c.K, 2 * T * c.d
    rows, hidden = 2 * M * c.d, 2 * M * c.n  # bytes of (M, d) and (M, n)
    W1, W2 = 4 * c.E * c.n * c.d, 2 * c.E * c.n * c.d
    product = 2 * M * c.n * c.d  # FLOP of one (M, n) by (n, d)
    limit = lambda flop, size: max(flop / PRODUCTS, size / MEMORY)
    forward = (
        limit(2 * product, gathered + W1 + 3 * hidden)  # H, A
        + limit(product, hidden + W2 + rows)  # Y
        + limit(0, rows + gathered)  # O
    )
    backward = (
        limit(product, gathered + W2 + 5 * hidden)  # dH, A'
        + limit(product, gathered + hidden + W2)  # dW2
        + limit(2 * product, 2 * hidden + W1 + rows)  # dX~
        + limit(0, rows + gathered)  # dX
        + limit(2 * product, 2 * hidden + gathered + W1)  # dW1
    )
    return forward, backward


def measured(path=LAYERS):
    """-> {(d, n, E, K): time / limit, forward and backward} of layers, routing and router with
    them, that were measured with plain top-K."""
    ratios = {}
    for item in json.loads(path.read_text())["items"]:
        for report in item["report"]:
            if report["rounding"] == "none" and report["routing"] == "random":
                shape = dict(report["shape"])
                limits = kernels(Layer(**shape), shape["T"])
                times = report["fwd_ms"] / 1e3, report["bwd_ms"] / 1e3
                of = tuple(shape[letter] for letter in "dnEK")
                ratios[of] = tuple(time / limit for time, limit in zip(times, limits))
    return ratios


def experts(c: Config, T):
    """-> seconds of one layer's experts, forward and backward; where the rate is from."""
    ratios = measured()
    own = ratios.get((c.d, c.n, c.E, c.K))
    ratio = own or tuple(map(statistics.mean, zip(*ratios.values())))
    source = "this layer measured" if own else "the mean of measured layers"
    forward, backward = (limit * times for limit, times in zip(kernels(c, T), ratio))
    return forward, backward, source


# What the rest of a step reaches: estimates.
RATES = {
    "products": 500e12,  # FLOP/s of attention's projections, the shared expert and the head
    "attention": 250e12,  # FLOP/s of causal attention, heads of 64
    "bytes": 2.5e12,  # of elementwise kernels and the optimizer
}
# Bytes of x (T, d) in 16 bits that a block's norms, rotations and residuals move, forward and
# backward; and of a parameter that gathering, reduction, clipping and AdamW do, each once a step.
PASSES = 40
PARAMETER_BYTES = 82


def step(c: Config, T, processes):
    """-> {part: seconds} of a micro-batch of T tokens and the update after it; the experts'
    source."""
    forward, backward, source = experts(c, T)
    attention = 2 * c.d * c.d * (1 + c.kv_heads / c.heads)
    weights = c.layers * (attention + 3 * c.d * c.shared + c.d * c.E) + c.vocabulary * c.d
    total = c.layers * (attention + 3 * c.E * c.n * c.d) + c.vocabulary * c.d
    moved = c.layers * PASSES * 2 * T * c.d + 12 * T * c.vocabulary
    return {
        "experts": c.layers * (forward + backward),
        "products": 6 * T * weights / RATES["products"],
        "attention": 6 * c.layers * c.d * c.context * T / RATES["attention"],
        "elementwise": moved / RATES["bytes"],
        "parameters": PARAMETER_BYTES * total / processes / RATES["bytes"],
    }, source


def lines(of, micro_batch, flop_of_token, peak):
    """A plan's lines of time."""
    c = of.config
    if of.experts != "tilemoe" or of.precision == "float32" or of.recompute != "none":
        return ["  tokens/s are predicted for tilemoe in bfloat16, without recomputation"]
    T = micro_batch * c.context
    parts, source = step(c, T, of.processes)
    seconds = sum(parts.values())
    shares = ", ".join(f"{name} {1e3 * time:.1f}" for name, time in parts.items())
    return [
        f"  {'predicted on an H100':24}{T / seconds:>12,.0f} tokens/s a process, MFU "
        f"{T * flop_of_token / seconds / peak:.1%}",
        f"    ms: {shares}; the experts' rate: {source}",
    ]
