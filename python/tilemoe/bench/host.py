"""Measure the host's time of a layer, and its GPU time with the router inside and outside its node.

Three ways compute one layer in forward and backward: `apart`, torch's linear layer and tilemoe.moe;
`node`, tilemoe.moe_with_router; and `module`, tilemoe.MoE. The host's time of a pass is that until
its call returns; the device is idle before, and is not waited for. It is measured warm, with one
call after another, and cold, after an array larger than the caches was written. The GPU's time is
that between events, with a cold L2, while the host is ahead. The ways run once in each round, one
after another; numbers are quartiles over the rounds. One JSON line per layer and way is written to
--json in the format of records.py.
"""

import contextlib
import gc
import sys
import time

import torch

from tilemoe.bench import machine, program, records
from tilemoe.bench.measure import make_clock

# T, d, n, E, K
HOST = {"t2048": (2048, 2048, 768, 128, 8), "small": (256, 256, 128, 16, 4)}
GPU = {"qwen3-30b": (32768, 2048, 768, 128, 8), "7b-n256": (24576, 1536, 256, 128, 8)}
ON_CPU = {"tiny": (8, 16, 16, 8, 2)}
CACHES_BYTES = 96 << 20  # more than the caches of a core and its share of the last level
SUSTAINED = 20  # passes between two events


class Layer:
    """A layer with its tensors; the ways share weights and inputs."""

    def __init__(self, sizes, device, dtype):
        import tilemoe

        T, d, n, E, K = sizes
        torch.manual_seed(0)
        make = lambda scale, *shape: (
            torch.randn(shape, device=device, dtype=torch.float32) * scale
        ).to(dtype)
        self.K, self.tilemoe = K, tilemoe
        self.x = make(0.2, T, d).requires_grad_()
        self.dO = make(0.2, T, d)
        self.module = tilemoe.MoE(d, n, E, K, device=device, dtype=dtype)
        with torch.no_grad():
            self.module.gate.weight.copy_(make(d**-0.5, E, d))
            self.module.experts.gate_up_proj.copy_(make(0.02, E, 2 * n, d))
            self.module.experts.down_proj.copy_(make(0.02, E, d, n))
        self.router = self.module.gate.weight
        self.W1, self.W2 = self.module.experts.gate_up_proj, self.module.experts.down_proj
        self.leaves = (self.x, self.router, self.W1, self.W2)
        self.ways = {"apart": self.apart, "module": lambda: self.module(self.x)}
        if hasattr(tilemoe, "moe_with_router"):
            self.ways["node"] = self.node

    def apart(self):
        logits = torch.nn.functional.linear(self.x, self.router)
        return self.tilemoe.moe(self.x, logits, self.W1, self.W2, K=self.K)

    def node(self):
        return self.tilemoe.moe_with_router(self.x, self.router, self.W1, self.W2, K=self.K)

    def backward(self, O):
        O.backward(self.dO)

    def clear(self):
        for leaf in self.leaves:
            leaf.grad = None

    def results(self, way):
        self.clear()
        O = self.ways[way]()
        self.backward(O)
        found = {"O": O.detach()} | dict(zip(("dX", "dW_r", "dW1", "dW2"), (t.grad for t in self.leaves)))
        self.clear()
        return found

    def check(self):
        """Return {way: relative distance of dX from that of `apart`}; all else has its bits."""
        want, distances = self.results("apart"), {}
        for way in self.ways:
            got = self.results(way)
            different = [k for k in want if k != "dX" and not torch.equal(got[k], want[k])]
            if different:
                print(f"warning: {way}: other bits than apart: {', '.join(different)}", flush=True)
            norm = torch.linalg.vector_norm
            away = norm(got["dX"].float() - want["dX"].float()) / norm(want["dX"].float())
            distances[way] = float(away)
            if not distances[way] < 0.02:
                print(f"warning: {way}: dX differs by {distances[way]:.2g}", flush=True)
        return distances


@contextlib.contextmanager
def without_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def host_times(layer, device, warm, cold):
    """Return {way: {"warm_forward_us": [...], ...}}."""
    flush = torch.zeros(CACHES_BYTES // 4, dtype=torch.float32)
    samples = {way: {} for way in layer.ways}

    def one(way, kind, prepare):
        forward = layer.ways[way]
        layer.clear()
        prepare()
        synchronize(device)
        begin = time.perf_counter()
        O = forward()
        middle = time.perf_counter()
        prepare()
        synchronize(device)
        before = time.perf_counter()
        layer.backward(O)
        end = time.perf_counter()
        if kind is not None:
            into = samples[way]
            into.setdefault(f"{kind}_forward_us", []).append(1e6 * (middle - begin))
            into.setdefault(f"{kind}_backward_us", []).append(1e6 * (end - before))

    nothing = lambda: None  # noqa: E731
    with without_collection():
        for way in layer.ways:
            for _ in range(10):
                one(way, None, nothing)
        for _ in range(5):  # blocks of one way, so that its code is warm; interleaved
            for way in layer.ways:
                for _ in range(3):
                    one(way, None, nothing)
                for _ in range(warm // 5):
                    one(way, "warm", nothing)
        for _ in range(cold):
            for way in layer.ways:
                one(way, "cold", lambda: flush.add_(1))
    return samples


class Nothing(torch.autograd.Function):
    """Autograd function that saves its inputs, and computes nothing."""

    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(x, *others)
        return x.detach()

    @staticmethod
    def backward(ctx, dO):
        return (dO, *[torch.empty_like(t) for t in ctx.saved_tensors[1:]])


def parts(layer, device, calls):
    """Return medians in us of what a pass consists of.

    These are a launch, an allocation, a GEMM, the layer without gradients, its operator alone, and
    an autograd function with the layer's leaves that computes nothing, in forward and in backward.
    """
    small = torch.zeros(8, device=device)
    logits = torch.nn.functional.linear(layer.x, layer.router).detach()
    how, ops = (layer.W1, layer.W2), layer.tilemoe.ops
    options = layer.module.options
    args = (
        layer.x, layer.router, None, None, [layer.W1, None, layer.W2, None, None, None], None,
        options.numbers, options.reals, True, False,
    )  # fmt: skip
    op = ops.operators.moe_with_router.default
    works = {
        "zero_us": small.zero_,
        "empty_us": lambda: torch.empty(8, device=device),
        "linear_us": lambda: torch.nn.functional.linear(layer.x, layer.router),
        "moe_without_gradients_us": lambda: layer.tilemoe.moe(layer.x, logits, *how, K=layer.K),
        "operator_us": lambda: ops.below_autograd(op, *args),
    }
    times = {name: [] for name in (*works, "function_us", "engine_us")}

    def timed(name, work):
        synchronize(device)
        begin = time.perf_counter()
        found = work()
        times[name].append(1e6 * (time.perf_counter() - begin))
        return found

    with without_collection():
        with torch.no_grad():
            for name, work in works.items():
                for _ in range(calls):
                    timed(name, work)
        for _ in range(calls):
            layer.clear()
            O = timed("function_us", lambda: Nothing.apply(*layer.leaves))
            timed("engine_us", lambda: layer.backward(O))
    layer.clear()
    return {name: records.quartiles(of)[1] for name, of in times.items()}


def gpu_times(layer, rounds):
    """Return {way: {"forward_ms": [...], ...}} by CUDA events."""
    clock = make_clock("cuda")
    ways = {way: call for way, call in layer.ways.items() if way != "module"}
    samples = {way: {} for way in ways}

    def one(way, timed):
        layer.clear()
        forward, O = timed(ways[way])
        backward, _ = timed(lambda: layer.backward(O))
        return forward, backward

    for way in ways:
        for _ in range(3):
            one(way, clock.untimed)
        one(way, clock.host)
    for number in range(rounds):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for way in order:
            forward, backward = one(way, clock.timed)
            values = dict(forward_ms=forward, backward_ms=backward, whole_ms=forward + backward)
            for key, ms in values.items():
                samples[way].setdefault(key, []).append(ms)
    for number in range(max(rounds // 4, 2)):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for way in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(SUSTAINED):
                one(way, clock_free)
            end.record()
            end.synchronize()
            into = samples[way].setdefault("sustained_ms", [])
            into.append(begin.elapsed_time(end) / SUSTAINED)
    return samples


def clock_free(work):
    return None, work()


def launches(layer):
    """Return {way: {"forward": kernels, "backward": kernels}}, from torch's profiler."""
    found = {}
    for way in layer.ways:
        counts = {}
        for name in ("forward", "backward"):
            layer.clear()
            if name == "backward":
                O = layer.ways[way]()
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                if name == "forward":
                    O = layer.ways[way]()
                else:
                    layer.backward(O)
                torch.cuda.synchronize()
            on_device = torch.autograd.DeviceType.CUDA
            kernels = [e.name for e in profile.events() if e.device_type == on_device]
            counts[name] = kernels
        found[way] = counts
    return found


def report(name, samples, keys):
    print(f"\n{name}")
    print("  " + "way".ljust(8) + "".join(key.rjust(19) for key in keys))
    for way, values in samples.items():
        medians = [records.quartiles(values[key])[1] for key in keys]
        print("  " + way.ljust(8) + "".join(f"{median:19.3f}" for median in medians), flush=True)


def measure(device, args):
    """Yield a Measurement for each layer and way."""
    of_machine = machine.describe(device, ["tilemoe", "torch"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def records_of(kind, name, samples, more):
        for way, values in samples.items():
            values = {key: records.quartiles(of) for key, of in values.items()} | more[way]
            yield records.Measurement(name=f"{kind}/{name}/{way}", values=values, **of_machine)

    for name, sizes in (HOST if device == "cuda" else ON_CPU).items():
        layer = Layer(sizes, device, dtype)
        more = {way: {"dX_distance": of} for way, of in layer.check().items()}
        samples = host_times(layer, device, args.warm, args.cold)
        kinds = [f"{kind}_{of}_us" for kind in ("warm", "cold") for of in ("forward", "backward")]
        report(f"host time, {name}, T d n E K = {sizes}", samples, kinds)
        of_parts = parts(layer, device, args.warm)
        more["apart"] |= of_parts
        print("  parts: " + ", ".join(f"{key[:-3]} {us:.1f} us" for key, us in of_parts.items()))
        if device == "cuda":
            for way, counts in launches(layer).items():
                for of, kernels in counts.items():
                    more[way] |= {f"{of}_kernels": len(kernels)}
                print(f"  {way}: kernels " + ", ".join(f"{of} {len(k)}" for of, k in counts.items()))
        yield from records_of("host", name, samples, more)
    for name, sizes in (GPU if device == "cuda" else {}).items():
        layer = Layer(sizes, device, dtype)
        more = {way: {"dX_distance": of} for way, of in layer.check().items()}
        samples = gpu_times(layer, args.rounds)
        keys = ("forward_ms", "backward_ms", "whole_ms", "sustained_ms")
        report(f"GPU time, {name}, T d n E K = {sizes}", samples, keys)
        if "node" in samples:
            for key in keys:
                pairs = zip(samples["node"][key], samples["apart"][key])
                ratios = records.quartiles([node / apart for node, apart in pairs])
                more["node"][f"{key[:-3]}_ratio"] = ratios
                print(f"  node / apart, {key[:-3]}: " + " ".join(f"{r:.4f}" for r in ratios), flush=True)
        yield from records_of("router_node", name, samples, more)
        del layer
        torch.cuda.empty_cache()


def main(argv=None):
    """Run the command line.

    Args:
        argv: Arguments of the command.
    """
    parser = program.parser_of("host", __doc__, 24, of_rounds="Rounds on the GPU; ")
    parser.add_argument("--warm", type=int, default=500, help="Warm calls; default: 500")
    parser.add_argument("--cold", type=int, default=60, help="Cold calls; default: 60")
    args = program.arguments_of(parser, argv)
    begin = time.perf_counter()
    program.report(measure(args.device, args), args.json, prints=False)
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
