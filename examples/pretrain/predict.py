"""How long a step of a configuration takes on a Hopper GPU, from measured rates.

The experts: every kernel's limit is max(FLOP / GEMMS, bytes / MEMORY), each tensor counted once
(docs/kernels.md). How many times the limit they take is measured: by the profile of a training
with this layer (benchmarks/results/pretrain.jsonl), else by the layer alone (kernels.jsonl there),
else it is the mean of all layers. The rest: FLOP and bytes over the RATES below.
Communication between processes is not in it, nor what the host does while the device waits.
"""

import statistics
import sys
from pathlib import Path

from configs import CONFIGS, Config

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
import records  # noqa: E402
from layers import LAYERS, Layer  # noqa: E402

KERNELS = ROOT / "benchmarks" / "results" / "kernels.jsonl"
TRAININGS = KERNELS.with_name("pretrain.jsonl")
# The limits' rates: GEMMs in bfloat16, and device memory, of an H100.
GEMMS, MEMORY = 798e12, 3.0e12


def kernels(c: Config | Layer, T):
    """-> seconds at the limit of the experts' forward and backward kernels, top-K."""
    M, gathered = T * c.K, 2 * T * c.d
    rows, hidden = 2 * M * c.d, 2 * M * c.n  # bytes of (M, d) and (M, n)
    W1, W2 = 4 * c.E * c.n * c.d, 2 * c.E * c.n * c.d
    gemm = 2 * M * c.n * c.d  # FLOP of one (M, n) by (n, d)
    limit = lambda flop, size: max(flop / GEMMS, size / MEMORY)
    forward = (
        limit(2 * gemm, gathered + W1 + 3 * hidden)  # H, A
        + limit(gemm, hidden + W2 + rows)  # Y
        + limit(0, rows + gathered)  # O
    )
    backward = (
        limit(gemm, gathered + W2 + 5 * hidden)  # dH, A'
        + limit(gemm, gathered + hidden + W2)  # dW2
        + limit(2 * gemm, 2 * hidden + W1 + rows)  # dX~
        + limit(0, rows + gathered)  # dX
        + limit(2 * gemm, 2 * hidden + gathered + W1)  # dW1
    )
    return forward, backward


def measured(path=KERNELS):
    """-> {(d, n, E, K): time / limit, forward and backward} of the listed layers that were
    measured, routing and router with them."""
    times = {one.name: one.median("ms") / 1e3 for one in records.read(path) if "ms" in one.values}
    ratios = {}
    for name, layer in LAYERS["cuda"].items():
        if f"kernels/{name}/backward" in times:
            both = (times[f"kernels/{name}/{way}"] for way in ("forward", "backward"))
            limits = kernels(layer, layer.T)
            ratios[layer[1:]] = tuple(time / limit for time, limit in zip(both, limits))
    return ratios


def profiled():
    """-> {(d, n, E, K): time / limit, the same for both passes}, of profiles of whole trainings,
    from the largest micro-batch."""
    found = [one for one in records.read(TRAININGS) if one.name.startswith("pretrain-speed/")]
    ratios = {}
    for one in sorted(found, key=lambda one: one.values["micro_batch"]):
        values = one.values
        if values["experts"] == "tilemoe" and "kind.experts_ms" in values:
            c = CONFIGS[values["config"]]
            spent = one.median("kind.experts_ms") / 1e3 / values.get("layers", c.layers)
            ratio = spent / sum(kernels(c, values["micro_batch"] * c.context))
            ratios[c.d, c.n, c.E, c.K] = ratio, ratio
    return ratios


def experts(c: Config, T):
    """-> seconds of one layer's experts, forward and backward; the source of the rate."""
    of, layers = (c.d, c.n, c.E, c.K), measured()
    found = {"a profile of this layer's training": profiled().get(of)}
    found["this layer measured"] = layers.get(of)
    found["the mean of measured layers"] = tuple(map(statistics.mean, zip(*layers.values())))
    source, ratio = next((source, ratio) for source, ratio in found.items() if ratio)
    forward, backward = (limit * times for limit, times in zip(kernels(c, T), ratio))
    return forward, backward, source


# The rates of the rest of a step, by the profiles of S1 and of four layers of 7B on an H100
# (benchmarks/results/pretrain.jsonl).
RATES = {
    "gemms": 650e12,  # FLOP/s of attention's projections, the shared expert and the head
    "attention": 270e12,  # FLOP/s of causal attention, heads of 64
    "bytes": 2.5e12,  # of elementwise kernels and the optimizer
}
# How often a block's norms, rotations and residuals move x (T, d) in 16 bits, forward and backward;
# bytes that the loss moves of a logit; and of a parameter, by gathering, reduction, clipping and
# AdamW, each once a step.
PASSES, LOGIT_BYTES, PARAMETER_BYTES = 40, 12, 80


def step(c: Config, T, processes):
    """-> {part: seconds} of a micro-batch of T tokens and the update after it; the experts'
    source."""
    forward, backward, source = experts(c, T)
    attention = 2 * c.d * c.d * (1 + c.kv_heads / c.heads)
    weights = c.layers * (attention + 3 * c.d * c.shared + c.d * c.E) + c.vocabulary * c.d
    total = c.layers * (attention + 3 * c.E * c.n * c.d) + c.vocabulary * c.d
    moved = c.layers * PASSES * 2 * T * c.d + LOGIT_BYTES * T * c.vocabulary
    return {
        "experts": c.layers * (forward + backward),
        "gemms": 6 * T * weights / RATES["gemms"],
        "attention": 6 * c.layers * c.d * c.context * T / RATES["attention"],
        "elementwise": moved / RATES["bytes"],
        "parameters": PARAMETER_BYTES * total / processes / RATES["bytes"],
    }, source


def is_known(of):
    """Whether a plan is one whose time is predicted."""
    is_plain = of.experts == "tilemoe" and of.recompute == "none" and of.together == 1
    return is_plain and of.precision != "float32"


def seconds(of, micro_batch, micro_batches):
    """The seconds of a step of `micro_batches` in each process; None if they are not known."""
    if not is_known(of):
        return None
    parts, _ = step(of.config, micro_batch * of.config.context, of.processes)
    update = parts.pop("parameters")
    return micro_batches * sum(parts.values()) + update


def lines(of, micro_batch, flop_of_token, peak):
    """A plan's lines of time."""
    c = of.config
    if not is_known(of):
        what = "tilemoe in bfloat16, without recomputation and --expert-parallel"
        return [f"  tokens/s are predicted for {what}"]
    T = micro_batch * c.context
    parts, source = step(c, T, of.processes)
    whole = sum(parts.values())
    times = ", ".join(f"{name} {1e3 * time:.1f}" for name, time in parts.items())
    return [
        f"  {'predicted on an H100':24}{T / whole:>12,.0f} tokens/s a process, MFU "
        f"{T * flop_of_token / whole / peak:.1%}",
        f"    ms: {times}; the experts' rate: {source}",
    ]
