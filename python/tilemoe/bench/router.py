"""Compare the time of tilemoe.router_logits with torch's linear layer.

Both run once in each round, one after another, with cold caches; numbers are quartiles over the
rounds. The program prints one JSON line per layer, dtype of the logits and number of tokens, and
writes the lines to --json in the format of records.py: tilemoe_ms, linear_ms, and ratio, the first
divided by the second. Logits of x's dtype are compared with torch.nn.functional.linear, float32
logits with torch.mm(out_dtype=torch.float32), on a CPU with a linear layer in float32.
"""

import sys

import torch

from . import machine, program, records
from .layers import LAYERS
from .measure import make_clock

# Layers of scripts/gpu/stages.py with different routers.
DEFAULT = ("7b-n256", "7b-n1024", "30b-n256", "30b-n1024", "olmoe", "qwen3-235b", "gpt-oss-20b",
           "kimi-linear", "qwen3-next", "sparse-e512")  # fmt: skip
SMALL_T = (1, 64, 512)
WARM_UP = 3


def linear(x, weight, dtype):
    """Call torch as a router's linear layer does."""
    if dtype == x.dtype:
        return torch.nn.functional.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.mT, out_dtype=dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))


def compare(T, d, E, dtype, clock, device, rounds):
    """Return {"tilemoe_ms", "linear_ms", "ratio"}: a number per round."""
    import tilemoe

    torch.manual_seed(0)
    x = torch.randn(T, d, device=device, dtype=torch.bfloat16)
    weight = torch.randn(E, d, device=device, dtype=torch.bfloat16) / d**0.5
    calls = {
        "tilemoe_ms": lambda: tilemoe.router_logits(x, weight, dtype=dtype),
        "linear_ms": lambda: linear(x, weight, dtype),
    }
    exact = x[:64].double() @ weight.double().T
    for name, call in calls.items():
        got = [call() for _ in range(WARM_UP)][-1][:64].double()
        if not (got - exact).abs().amax() <= 2.0**-6 * exact.abs().amax():
            raise ValueError(f"{name}: the logits differ from the reference")
    samples = {name: [] for name in (*calls, "ratio")}
    for _ in range(rounds):
        times = {}
        for name, call in calls.items():
            clock.host(call)  # the host's time of a call, for which the device sleeps
            times[name] = clock.timed(call)[0]
        for name, ms in times.items():
            samples[name].append(ms)
        samples["ratio"].append(times["tilemoe_ms"] / times["linear_ms"])
    return samples


def measure(layers, tokens, device, rounds):
    """Yield a Measurement for each layer, dtype of the logits and number of tokens."""
    clock = make_clock(device)
    of_machine = machine.describe(device, ["tilemoe", "torch"])
    for name in layers:
        layer = (LAYERS["cuda"] | LAYERS["cpu"])[name]
        for dtype in (torch.bfloat16, torch.float32):
            for T in dict.fromkeys(tokens or (layer.T, *SMALL_T)):
                samples = compare(T, layer.d, layer.E, dtype, clock, device, rounds)
                values = {key: records.quartiles(of) for key, of in samples.items()}
                kind = str(dtype).removeprefix("torch.")
                values = {"T": T, "d": layer.d, "E": layer.E, **values}
                yield records.Measurement(name=f"router/{name}/{kind}/t{T}", values=values,
                                          **of_machine)  # fmt: skip


def main(argv=None):
    """Run the command line.

    Args:
        argv: Arguments of the command.
    """
    names = [*LAYERS["cuda"], *LAYERS["cpu"]]
    parser = program.parser_of("router", __doc__, 30, names)
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T",
        help="Token counts; default: the layer's, and 1, 64, 512")  # fmt: skip
    args = program.arguments_of(parser, argv, names)
    program.report(
        measure(args.layers or DEFAULT, args.tokens, args.device, args.rounds), args.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
