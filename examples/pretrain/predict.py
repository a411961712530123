"""Predict the time of a step of a configuration on a Hopper GPU from measured rates.

For the experts, every kernel's limit is max(FLOP / GEMMS, bytes / MEMORY), each tensor counted once
(docs/kernels.md). The measured ratio of time and limit is from the profile of a training with this
layer (benchmarks/results/pretrain.jsonl), else from the layer alone (kernels.jsonl there), else it
is the mean of all layers. In FP8 the time is scaled as tilemoe.choose_recipe() estimates. For the
rest: FLOP and bytes over the RATES below. Communication between processes is not included, nor is
work of the host while the device waits.
"""

import statistics
import sys
from pathlib import Path

from configs import CONFIGS, Config

import tilemoe

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # one of its files needs no package
import records  # noqa: E402
from layers import LAYERS, Layer  # noqa: E402

KERNELS = ROOT / "benchmarks" / "results" / "kernels.jsonl"
TRAININGS = KERNELS.with_name("pretrain.jsonl")
# Rates of the limits: GEMMs in bfloat16, and device memory, of an H100.
GEMMS, MEMORY = 798e12, 3.0e12


def kernels(c: Config | Layer, T):
    """Return the seconds at the limit of the experts' forward and backward kernels, top-K."""
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
    """Return {(d, n, E, K): time / limit, forward and backward} of the measured layers.

    Routing and router are included.
    """
    times = {one.name: one.median("ms") / 1e3 for one in records.read(path) if "ms" in one.values}
    ratios = {}
    for name, layer in LAYERS["cuda"].items():
        if f"kernels/{name}/backward" in times:
            both = (times[f"kernels/{name}/{way}"] for way in ("forward", "backward"))
            limits = kernels(layer, layer.T)
            ratios[layer[1:]] = tuple(time / limit for time, limit in zip(both, limits))
    return ratios


def profiled():
    """Return {(d, n, E, K): time / limit, equal for both passes} of profiles of whole trainings.

    The profiles are those of the largest micro-batch.
    """
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
    """Return the seconds of one layer's experts, forward and backward; the source of the rate."""
    of, layers = (c.d, c.n, c.E, c.K), measured()
    found = {"profile of a training with this layer": profiled().get(of)}
    found["measurement of this layer"] = layers.get(of)
    found["mean of measured layers"] = tuple(map(statistics.mean, zip(*layers.values())))
    source, ratio = next((source, ratio) for source, ratio in found.items() if ratio)
    scale = 1.0
    if c.recipe == "fp8":
        estimate = tilemoe.choose_recipe(T, c.d, c.n, c.E, c.K, capability=(9, 0))
        scale = estimate.fp8_ms / estimate.bf16_ms
        source += ", times FP8's estimate"
    forward, backward = (scale * limit * times for limit, times in zip(kernels(c, T), ratio))
    return forward, backward, source


# Rates of the rest of a step, from the profiles of S1 and of four layers of 7B on an H100
# (benchmarks/results/pretrain.jsonl).
RATES = {
    "gemms": 650e12,  # FLOP/s of attention's projections, the shared expert and the head
    "attention": 270e12,  # FLOP/s of causal attention with heads of 64
    "bytes": 2.5e12,  # elementwise kernels and the optimizer
}
# Transfers of x (T, d) in 16 bits by a block's norms, rotations and residuals, forward and
# backward; bytes of the loss per logit; and bytes per parameter of gathering, reduction, clipping
# and AdamW, each once per step.
PASSES, LOGIT_BYTES, PARAMETER_BYTES = 40, 12, 80


def step(c: Config, T, processes):
    """Return {part: seconds} of a micro-batch of T tokens and the update; the experts' source."""
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
    """Return whether the time of a plan can be predicted."""
    is_plain = of.experts == "tilemoe" and of.recompute == "none" and of.together == 1
    return is_plain and of.precision != "float32" and of.config.recipe != "fp8_forward"


def seconds(of, micro_batch, micro_batches):
    """Return the seconds of a step of `micro_batches` in each process; None if unknown."""
    if not is_known(of):
        return None
    parts, _ = step(of.config, micro_batch * of.config.context, of.processes)
    update = parts.pop("parameters")
    return micro_batches * sum(parts.values()) + update


def lines(of, micro_batch, flop_of_token, peak):
    """Return a plan's lines of time."""
    c = of.config
    if not is_known(of):
        what = "tilemoe in bfloat16 or --recipe fp8, without recomputation and --expert-parallel"
        return [f"  tokens/s are predicted only for {what}"]
    T = micro_batch * c.context
    parts, source = step(c, T, of.processes)
    whole = sum(parts.values())
    times = ", ".join(f"{name} {1e3 * time:.1f}" for name, time in parts.items())
    return [
        f"  {'predicted on an H100':24}{T / whole:>12,.0f} tokens/s per process, MFU "
        f"{T * flop_of_token / whole / peak:.1%}",
        f"    ms: {times}; the experts' rate: {source}",
    ]
