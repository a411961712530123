"""What token rounding gains in time, by the tiles that an expert has: T K / (E m).

    python examples/pretrain/study/rounding_time.py --out benchmarks/results/rounding_time.json
    python examples/pretrain/study/rounding_time.py --out ... --step --data runs/corpus --models S1

Times top-K and `nearest` at the same T, E, K and m: one layer, router and routing included, and its
kernels by torch's profiler; with --step the whole training step, for which T is the micro-batch.
Top-K has the tiles that the cost model picks; all tiles of the library are m = 128 rows high, so
that none other is there for it. A grid point is measured once: the file has what was measured, and
the command goes on with what it has not.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import example  # noqa: F401
import train
from configs import CONFIGS
from parallel import start
from rounding import METHODS
from stopwatch import clear, entry_of
from tilemoe.bench import machine
from tilemoe.bench.cases import Case
from tilemoe.bench.measure import Measured, make_clock
from tilemoe.bench.peers import TileMoE
from tilemoe.bench.problem import Problem

TILES = (1, 2, 4, 8)
TIMED = ("top_k", "nearest")
M = 128


class Layer(NamedTuple):
    """A layer whose experts have so many tiles: T follows, or E where T is given."""

    d: int
    n: int
    E: int
    K: int
    T: int | None = None

    def case(self, name, tiles, method, device):
        """Of the bench."""
        E = self.E if self.T is None else self.T * self.K // (tiles * M)
        T = tiles * E * M // self.K
        kind = {"device": device, "dtype": "bfloat16"}
        rounding = None if method == "top_k" else method
        return Case(name, T, self.d, self.n, E, self.K, **kind, rounding=rounding)


LAYERS = {
    "tiny": Layer(32, 16, 8, 2),
    "S1": Layer(512, 128, 128, 8),
    "S2": Layer(512, 256, 256, 4),
    # The larger layers of scripts/gpu/run.py's stage `rounding`: the sparser, the more experts.
    "sparse": Layer(4096, 1024, 0, 8, T=16384),
}


def kinds(kernels):
    """{kernel: ms} of a pass -> ms of the layer's grouped products and sums; of the library's other
    kernels, which route; of the rest, the router's product."""
    own = ("grouped_gemm", "combine", "shared_sums")
    sums = {"kernels": 0.0, "routing": 0.0, "rest": 0.0}
    for name, ms in kernels.items():
        routes = "routing" if "tilemoe" in name else "rest"
        sums["kernels" if any(part in name for part in own) else routes] += ms
    return sums


def layers(cases, rounds, passes):
    """Entries of the cases, which take turns."""
    clock = make_clock(cases[0].device)
    problems = [Problem(case) for case in cases[:1]]
    problems += [problems[0].of(case) for case in cases[1:]]
    layers = [Measured(TileMoE, problem, clock, passes) for problem in problems]
    profiles = {case: [] for case in cases}
    for i in range(rounds):
        for layer in layers if i % 2 == 0 else reversed(layers):
            layer.round()
    for _ in range(3):
        for case, layer in zip(cases, layers):
            profiles[case].append({key: kinds(of) for key, of in layer.kernels().items()})
    entries = []
    for case, layer in zip(cases, layers):
        entry = layer.entry()
        keep = {key: entry[key] for key in ("shape", "fwd_ms", "bwd_ms", "rounds") if key in entry}
        keep["rows"] = rows(layer.peer.problem)
        found = profiles[case]
        keep["profile_ms"] = {
            key: {kind: statistics.median(p[key][kind] for p in found) for kind in found[0][key]}
            for key in found[0]
        }
        entries.append(keep)
    return entries


@torch.no_grad()
def rows(problem):
    """Pairs that the experts compute."""
    import tilemoe

    p = problem
    _, aux = tilemoe.moe(
        p.X, p.logits(), p.W1, p.W2, K=p.K, rounding=p.rounding, return_aux=True
    )
    return int(aux.expert_counts.sum() + aux.added - aux.dropped)


def step(model, T, method, options, rest, mesh, device):
    """Entry of a training step whose micro-batch has T tokens."""
    sequences = T // CONFIGS[model].context
    with tempfile.TemporaryDirectory() as scratch:
        own = ["--config", model, "--data", options.data, "--output", scratch, *METHODS[method]]
        own += ["--batch", sequences, "--micro-batch", sequences]
        args = train.arguments(list(map(str, own + rest)))
        entry = entry_of(args, mesh, device, options.warmup_steps, options.measured_steps, 0)
    return {key: value for key, value in entry.items() if key != "losses"}


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__.partition("\n")[0], epilog="All other options are train.py's."
    )
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--models", nargs="+", choices=LAYERS, default=["S1", "S2", "sparse"])
    add("--tiles", nargs="+", type=int, default=TILES, help="an expert")
    add("--pass", dest="passes", choices=("forward", "both"), default="both")
    add("--rounds", type=int, default=15)
    add("--step", action="store_true", help="the whole training step, not the layer")
    add("--data", type=Path, help="of --step: folder that corpus.py wrote")
    add("--warmup-steps", type=int, default=4)
    add("--measured-steps", type=int, default=15)
    add("--seconds", type=float, default=float("inf"), help="no grid point begins later")
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    options, rest = parser.parse_known_args(argv)
    deadline = time.monotonic() + options.seconds
    mesh, device = start()
    document = {"entries": []}
    if options.out.exists():
        document = json.loads(options.out.read_text())
    described = machine.describe(device.type, ("torch", "triton", "tilemoe"))
    described["commit"] = options.commit or described["commit"]
    part = "step" if options.step else "layer"
    there = {(e["part"], e["model"], e["tiles"]) for e in document["entries"]}
    for model in options.models:
        for tiles in options.tiles:
            if (part, model, tiles) in there or time.monotonic() > deadline:
                continue
            clear(device)
            cases = [LAYERS[model].case(model, tiles, method, device.type) for method in TIMED]
            if options.step:
                entries = [
                    step(model, cases[0].T, method, options, rest, mesh, device)
                    for method in TIMED
                ]
            else:
                entries = layers(cases, options.rounds, options.passes)
            for method, entry in zip(TIMED, entries):
                at = {"part": part, "model": model, "tiles": tiles, "method": method}
                document["entries"].append(at | {"T": cases[0].T} | entry | described)
                print(json.dumps(document["entries"][-1]), flush=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
