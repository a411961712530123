#!/usr/bin/env python3
"""A layer of few tokens, router to combine, as decoding has it: how near to its weights' bytes.

  python3 benchmarks/gpu_few_tokens.py --json build/gpu/gpu_few_tokens.json

`tilemoe.MoE` in evaluation, without gradients, in bfloat16, under a CUDA graph, with each kit, and
torch's grouped_mm. The graph goes through copies of the layer that have weights and tokens of their
own: so many that between two visits of a copy the others read at least three times the size of the
L2. Graphs are replayed back to back behind a long kernel, so that the host is ahead. They take
turns, and numbers are medians over the rounds. Each first computes what the formula has in float64.

The bar is for the kit that the package chooses by itself: 1.2 times what the touched experts'
weights take at the GPU's bandwidth, and 25 us. Which are touched is counted from the routing. The
status is 1 until everything is measured and meets its bar. Needs tilemoe.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import tilemoe
from tilemoe.bench import machine
from tilemoe.bench.cases import CASES, DTYPES
from tilemoe.bench.check import TOLERANCE
from tilemoe.bench.peers import TorchGroupedMM
from tilemoe.bench.problem import Problem

TOKENS = [1, 16, 64]
OURS, TORCH = "tilemoe", TorchGroupedMM.name
NAMES = [OURS, f"{OURS}-sm90", f"{OURS}-sm80", TORCH]
LAYERS = {"cuda": ["qwen3-235b", "7b-n256"], "cpu": ["cpu-t512"]}  # cpu: to try this script itself
BYTES_PER_S = {"H200": 4.0e12, "H100": 3.0e12}  # by a part of the device's name
FACTOR, MORE_US = 1.2, 25.0
L2_BETWEEN = 3  # times its size
LEAST_FORWARDS = 48  # in a graph, as many as a model has layers
REPLAYS = 4
AHEAD_CYCLES = 60_000_000  # about 30 ms of an SM: for the host to queue all replays
MOST_COPIES = 64
CPU_L2_BYTES = 1 << 20


class Wrong(Exception):
    """It ran, and computed something else."""


class Layer:
    """A copy of the layer: weights and tokens of its own."""

    def __init__(self, case, seed):
        self.case, self.problem = case, Problem(case, seed)
        p = self.problem
        self.module = tilemoe.MoE(
            case.d, case.n, case.E, case.K, return_aux=False, device="meta", dtype=p.X.dtype
        ).eval()
        weights = {"gate.weight": p.router, "experts.gate_up_proj": p.W1, "experts.down_proj": p.W2}
        self.module.load_state_dict(weights, assign=True)

    def of(self, T):
        """The layer with the first of its tokens, weights shared."""
        found = copy.copy(self)
        found.case, found.problem = dataclasses.replace(self.case, T=T), copy.copy(self.problem)
        found.problem.case, found.problem.X = found.case, self.problem.X.detach()[:T]
        return found

    @torch.no_grad()
    def touched(self):
        """How many experts its tokens are routed to."""
        self.module.return_aux = True
        _, aux = self.module(self.problem.X)
        self.module.return_aux = False
        return int((aux.expert_counts > 0).sum())

    def expert_bytes(self):
        case = self.case
        return 3 * case.n * case.d * DTYPES[case.dtype].itemsize

    def call(self, name):
        """The forward of one of NAMES."""
        if name == TORCH:
            return TorchGroupedMM(self.problem).forward
        return lambda: self.module(self.problem.X)

    @torch.no_grad()
    def choice(self):
        """scores and ids (T, K) in float64, and the tokens (T) whose experts no rounding of a logit
        to the layer's type changes: there the K-th and the next are far enough apart."""
        p, K = self.problem, self.case.K
        logits, ids = p.logits().double().sort(dim=-1, descending=True, stable=True)  # (T, E)
        last, following = logits[:, K - 1], logits[:, K]
        least = 1.5 * torch.finfo(p.X.dtype).eps * torch.maximum(last.abs(), following.abs())
        return logits[:, :K].softmax(-1), ids[:, :K], last - following > least

    @torch.no_grad()
    def expected(self):
        """O (T, d) in float64, expert by expert, and the tokens of `choice` (T)."""
        p, (s, ids, clear) = self.problem, self.choice()
        O = torch.zeros_like(p.X, dtype=torch.float64)
        for e in ids.unique().tolist():
            token, k = (ids == e).nonzero(as_tuple=True)
            gate, up = (p.X[token].double() @ p.W1[e].double().t()).chunk(2, dim=-1)
            O[token] += s[token, k, None] * ((F.silu(gate) * up) @ p.W2[e].double().t())
        return O, clear


def between_visits(touched, expert_bytes):
    """The least bytes of experts that are read between two visits of a copy. touched: experts of
    each copy, which take turns."""
    return (sum(touched) - max(touched)) * expert_bytes


def clear_layers(case):
    """Layers whose first token's experts are clear, so that every T has one to check."""
    for seed in itertools.count():
        layer = Layer(case, seed)
        if layer.of(1).choice()[2].all():
            yield layer


def make_layers(case, l2_bytes):
    """Copies of a layer that hold to L2_BETWEEN with one token, and so with more."""
    layers, touched = [], []
    for layer in itertools.islice(clear_layers(case), MOST_COPIES):
        layers.append(layer)
        touched.append(layer.of(1).touched())
        if between_visits(touched, layer.expert_bytes()) >= L2_BETWEEN * l2_bytes:
            return layers
    raise ValueError(f"{case.name}: {MOST_COPIES} copies read less than {L2_BETWEEN} times the L2")


@contextlib.contextmanager
def kit_of(name):
    """Chooses the kit that a name of NAMES ends in, while it lasts."""
    _, _, kit = name.partition(OURS + "-")
    if kit:
        tilemoe.set_kit(kit)
    try:
        yield
    finally:
        if kit:
            tilemoe.set_kit("auto")


class Rotation:
    """An implementation's forwards of all copies, again and again: on a GPU one CUDA graph."""

    @torch.no_grad()
    def __init__(self, name, layers):
        self.name, self.graph = name, None
        calls = [layer.call(name) for layer in layers]
        repeats = -(-LEAST_FORWARDS // len(calls))
        self.forwards = repeats * len(calls)
        with kit_of(name):
            if not layers[0].problem.X.is_cuda:
                self.replay = lambda: self.run(calls, repeats)
                return
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # a first call may do what no graph can have
                self.run(calls, 2)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run(calls, repeats)
            self.replay = self.graph.replay

    @torch.no_grad()
    def run(self, calls, repeats):
        for _ in range(repeats):
            self.outs = [call() for call in calls]

    def check(self, layers):
        """Raises Wrong where an output is not the layer's. -> how many tokens it looked at."""
        self.replay()
        tokens = 0
        for index, (layer, got) in enumerate(zip(layers, self.outs)):
            want, clear = layer.expected()
            error = ((got.double() - want)[clear].norm() / want[clear].norm()).item()
            if not error <= TOLERANCE[got.dtype]:
                raise Wrong(f"O of copy {index} is off by {error:.1e} of its norm")
            tokens += int(clear.sum())
        return tokens

    def timed(self):
        """Microseconds of a forward, the mean over REPLAYS of the rotation."""
        if self.graph is None:
            begin = time.perf_counter()
            self.replay()
            return (time.perf_counter() - begin) * 1e6 / self.forwards
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.replay()  # the first copies' weights are as cold as the others'
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        for _ in range(REPLAYS):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / (REPLAYS * self.forwards)

    def launches(self):
        """{kernel: launches of it a forward} by torch's profiler, copies and memsets among them."""
        if self.graph is None:
            return {}
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.replay()
            torch.cuda.synchronize()
        counts = collections.Counter(
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        return {kernel: count / self.forwards for kernel, count in counts.items()}


def bytes_us(nbytes, device):
    """What so many bytes take on a device; None where its bandwidth is not among ours."""
    rates = [rate for part, rate in BYTES_PER_S.items() if part in device]
    return nbytes / rates[0] * 1e6 if rates else None


def measure(layers, T, names, rounds, l2_bytes):
    """The entry of a layer at T tokens, without what judges it."""
    layers = [layer.of(T) for layer in layers]
    touched = [layer.touched() for layer in layers]
    expert_bytes = layers[0].expert_bytes()
    rotations, left_out, checked = [], {}, {}
    for name in names:
        if name.startswith(OURS + "-") and not hasattr(tilemoe, "set_kit"):
            left_out[name] = "this tilemoe has no kits to choose from"
            continue
        try:
            rotation = Rotation(name, layers)
            checked[name] = rotation.check(layers)
            rotations.append(rotation)
        except Exception as error:  # of foreign code too: whatever it raises
            sentence = (str(error) or "no more was said").splitlines()[0]
            left_out[name] = f"{type(error).__name__}: {sentence}"
    times = {rotation.name: [] for rotation in rotations}
    for index in range(rounds):
        for rotation in random.Random(index).sample(rotations, len(rotations)):
            times[rotation.name].append(rotation.timed())
    kernels = {rotation.name: rotation.launches() for rotation in rotations}
    case = layers[0].case
    return {
        "config": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "copies": len(layers),
        "forwards": {rotation.name: rotation.forwards for rotation in rotations},
        "touched": touched,
        "touched_bytes": statistics.mean(touched) * expert_bytes,
        "between_visits_bytes": between_visits(touched, expert_bytes),
        "l2_bytes": l2_bytes,
        "us": {name: statistics.median(of) for name, of in times.items()},
        "round_us": times,
        "launches": {name: sum(of.values()) for name, of in kernels.items()},
        "kernels": kernels,
        "checked_tokens": checked,
        "left_out": left_out,
    }


def judged(entry, device):
    """The entry with its bar, and whether the time of the kit that is taken by itself meets it."""
    limit, us = bytes_us(entry["touched_bytes"], device), entry["us"].get(OURS)
    bar = None if limit is None else FACTOR * limit + MORE_US
    met = None if bar is None or us is None else us <= bar
    return {**entry, "bytes_us": limit, "bar_us": bar, "met": met}


def sentences(entry):
    bar = "no bar for this GPU" if entry["bar_us"] is None else f"bar {entry['bar_us']:.1f} us"
    met = {True: "met", False: "not met", None: "not judged"}[entry["met"]]
    yield (
        f"{entry['config']} T={entry['shape']['T']}: {statistics.mean(entry['touched']):.1f} "
        f"experts, {entry['touched_bytes'] / 1e6:.1f} MB, {entry['copies']} copies; {bar}: {met}"
    )
    for name, us in entry["us"].items():
        rate = entry["touched_bytes"] / us * 1e-6
        yield f"  {name:18} {us:9.2f} us, {rate:5.2f} TB/s, {entry['launches'][name]:g} launches"
    for name, why in entry["left_out"].items():
        yield f"  left out: {name}: {why}"


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", nargs="+", help=f"layers; else {' and '.join(LAYERS['cuda'])}")
    add("--tokens", nargs="+", type=int, default=TOKENS)
    add("--against", nargs="+", default=NAMES, choices=NAMES, metavar="NAME", help="these alone")
    add("--rounds", type=int, default=15)
    add("--json", type=pathlib.Path, help="write the figures to this file")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script itself")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_few_tokens.py: error: torch sees no GPU here")
    l2_bytes = CPU_L2_BYTES
    if args.device == "cuda":
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size

    report = {**machine.describe(args.device, ("torch", "tilemoe")), "rounds": args.rounds,
              "bar": {"factor": FACTOR, "more_us": MORE_US, "bytes_per_s": BYTES_PER_S},
              "entries": []}  # fmt: skip
    for name in args.config or LAYERS[args.device]:
        case = dataclasses.replace(CASES[name], T=max(args.tokens), device=args.device)
        layers = make_layers(case, l2_bytes)
        for T in args.tokens:
            entry = judged(
                measure(layers, T, args.against, args.rounds, l2_bytes), report["device"]
            )
            report["entries"].append(entry)
            print("\n".join(sentences(entry)), flush=True)
            if args.json:  # after each, for a run that is cut off
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
        del layers
    unmet = [f"{e['config']} T={e['shape']['T']}" for e in report["entries"] if not e["met"]]
    print(f"bars not met or not judged: {', '.join(unmet) or 'none'}")
    left_out = any(entry["left_out"] for entry in report["entries"])
    return 1 if unmet or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
