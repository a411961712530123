"""Compare the kernels of recipe="fp8" with dense FP8 GEMMs and with copies, on a GPU.

Each round runs, one after another and with cold caches, the up-projection of `tilemoe.moe` in FP8, a
dense GEMM of the same rows, columns and sum by torch._scaled_mm (cuBLASLt, e4m3, one scale per
tensor), `quantize_fp8` of x (1 x 128 blocks) and of W1 (128 x 128), and copies that move the bytes of
these two. Times are those of the kernels alone, from torch's profiler; numbers are quartiles over the
rounds, ratios those of the rounds' ratios. The program prints one JSON line per layer and writes the
lines to --json in the format of records.py.
"""

import sys

import torch

from . import kernels, machine, program, records
from .layers import LAYERS
from .measure import CudaClock

DEFAULT = ("gpt-oss-20b", "qwen3-235b", "olmoe", "kimi-linear", "7b-n1024", "30b-n1024", "wide",
           "7b-n256")  # fmt: skip
WARM_UP = 3
SCALES = 128  # columns of gate and up that share no scale


def kernel_ms(flush, call):
    """Return [(kernel, ms)] of a call on an idle device with cold caches."""
    flush.add_(1)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [(event.name, event.device_time_total * 1e-3) for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA]  # fmt: skip


def total(found):
    return sum(ms for _, ms in found)


def up_projection(found):
    """Return the time of the up-projection among the kernels of a layer."""
    if not (times := [ms for name, ms in found if kernels.step(name) == "up-projection"]):
        raise ValueError(f"no up-projection among the kernels {[name for name, _ in found]}")
    return sum(times)


def calls_of(layer):
    """Return {quantity: (call, time of its kernels)} of a layer's sizes."""
    import tilemoe

    T, d, n, E, K = layer
    torch.manual_seed(0)
    normal = lambda scale, *shape: torch.randn(
        *shape, device="cuda", dtype=torch.bfloat16).mul_(scale)  # fmt: skip
    x, logits = normal(0.2, T, d), normal(1.0, T, E)
    parts = 2 if n % SCALES else 1  # of W1
    W1 = [normal(0.02, E, 2 * n // parts, d) for _ in range(parts)]
    codes = [tilemoe.fp8_weight(W, transposed=False) for W in (*W1, normal(0.02, E, d, n))]
    split = {"W1_up": codes[1], "gate_layout": "split"} if parts == 2 else {}

    @torch.no_grad()
    def layer_in_fp8():
        tilemoe.moe(x, logits, codes[0], codes[-1], K=K, recipe="fp8", **split)

    # Dense operands, (M, d) and (2n, d): the second one is column-major, as cuBLASLt requires.
    M, one = T * K, torch.ones((), device="cuda")
    rows = normal(1.0, M, d).to(torch.float8_e4m3fn)
    weight = normal(1.0, 2 * n, d).to(torch.float8_e4m3fn).t()
    dense = lambda fast: torch._scaled_mm(
        rows, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)  # fmt: skip
    # 2 bytes in, 1 byte out: a copy that reads and writes 1.5 bytes per value moves as many.
    copy = lambda values: torch.empty(3 * values.numel() // 4, dtype=torch.int16, device="cuda")
    of_x, to_x, of_W1, to_W1 = (copy(values) for values in (x, x, W1[0], W1[0]))
    return {
        "up_ms": (layer_in_fp8, up_projection),
        "dense_ms": (lambda: dense(False), total),
        "dense_fast_accum_ms": (lambda: dense(True), total),
        "quantize_x_ms": (lambda: tilemoe.quantize_fp8(x), total),
        "copy_of_x_ms": (lambda: to_x.copy_(of_x), total),
        "quantize_W1_ms": (lambda: tilemoe.quantize_fp8(W1[0], rows=128), total),
        "copy_of_W1_ms": (lambda: to_W1.copy_(of_W1), total),
    }


def values_of(layer, samples):
    """Return a layer's values from {quantity: times by round}."""
    T, d, n, E, K = layer
    tflop = 4e-12 * T * K * d * n
    ratio = lambda a, b: [x / y for x, y in zip(samples[a], samples[b])]
    rate = lambda key: [tflop / (ms * 1e-3) for ms in samples[key]]
    values = samples | {
        "up_tflop_per_s": rate("up_ms"), "dense_tflop_per_s": rate("dense_ms"),
        "dense_fast_accum_tflop_per_s": rate("dense_fast_accum_ms"),
        "up_rate_over_dense": ratio("dense_ms", "up_ms"),
        "up_rate_over_dense_fast_accum": ratio("dense_fast_accum_ms", "up_ms"),
        "quantize_x_over_copy": ratio("quantize_x_ms", "copy_of_x_ms"),
        "quantize_W1_over_copy": ratio("quantize_W1_ms", "copy_of_W1_ms"),
    }  # fmt: skip
    return {"T": T, "d": d, "n": n, "E": E, "K": K, "rounds": len(samples["up_ms"]),
            **{key: records.quartiles(of) for key, of in values.items()}}  # fmt: skip


def compare(layer, rounds):
    """Return {quantity: times by round}."""
    flush = torch.zeros(CudaClock.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    calls = calls_of(layer)
    for call, _ in calls.values():
        for _ in range(WARM_UP):
            call()
    samples = {key: [] for key in calls}
    for _ in range(rounds):
        for key, (call, time_of) in calls.items():
            samples[key].append(time_of(kernel_ms(flush, call)))
    return samples


def measure(names, rounds):
    """Yield the measurement of each layer.

    Args:
        names: Layers.
        rounds: Interleaved rounds.
    """
    of_machine = machine.describe("cuda", ["tilemoe", "torch"])
    for name in names:
        layer = LAYERS["cuda"][name]
        values = values_of(layer, compare(layer, rounds))
        yield records.Measurement(name=f"fp8-kernels/{name}", values=values, **of_machine)
        torch.cuda.empty_cache()


def main(argv=None):
    """Run the command line.

    Args:
        argv: Arguments of the command.
    """
    names = list(LAYERS["cuda"])
    args = program.arguments_of(
        program.parser_of("fp8", __doc__, 15, names, device=False), argv, names
    )
    if not torch.cuda.is_available():
        print("tilemoe: error: torch finds no GPU", file=sys.stderr)
        return 1
    program.report(measure(args.layers or DEFAULT, args.rounds), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
