"""Does TileMoE train as torch's grouped_mm does? The same seed, the same data, many steps.

    python examples/pretrain/study/guard.py --out guard.json --work runs/guard --data runs/corpus

Runs, one after another: TileMoE; grouped_mm; grouped_mm with its experts renumbered, the same model
with other rounding errors; TileMoE with dW2 scaled by 1.05, which has to be found out; and some
steps of grouped_mm in float32. The command may be stopped at any moment, or by --seconds, and goes
on where it was when it is given again. The bars:

- mean loss and mean norm of the gradient of the last steps: TileMoE differs from grouped_mm by at
  most twice what the renumbered run does, or by 0.2 %, whichever is larger;
- loss, norm of the gradient, and the norms of dW1, dW2 and the router's gradient in the first
  steps: the median of their distance from float32's is at most that of the worse grouped_mm run,
  within two standard deviations of such a median. A median, since runs part by themselves: once a
  token's experts differ, so does all that follows;
- the run whose dW2 is scaled misses one of them. AdamW cancels a gradient's scale, so that this
  shows in the norms of the first steps, and later in no loss.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import example  # noqa: F401
import experts
import tilemoe
import train
from logs import Log
from parallel import start
from run import Run
from tilemoe.bench import machine

LEAST_BAR = 0.002  # of the value
FIRST = 20  # steps that are compared with float32
BLOCK = 50  # steps whose means the file of the verdict keeps
MEDIAN_BAR = 1.5  # a quarter is the standard deviation of 20 normal distances' median
WATCHED = {"dW1": "gate_up_proj", "dW2": "down_proj", "router": "gate.weight"}
KEYS = ("loss", "gradient_norm", *(f"norm_{name}" for name in WATCHED))
UNFINISHED = 75  # exit status: there is time needed still


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, W, scale):
        ctx.scale = scale
        return W.view_as(W)

    @staticmethod
    def backward(ctx, dW):
        return dW * ctx.scale, None


class Spoiled(experts.Peer):
    """TileMoE's experts, but for dW2 times 1.05."""

    name = "spoiled"

    def forward(self, x, logits, spread, **routing):
        W2 = ScaledGradient.apply(self.down_proj, 1.05)
        return tilemoe.moe(x, logits, self.gate_up_proj, W2, **routing)


experts.PEERS["spoiled"] = Spoiled
# Experts, whether they are renumbered, precision, whether the run ends with the first steps.
RUNS = {
    "tilemoe": ("tilemoe", False, None, False),
    "grouped_mm": ("grouped_mm", False, None, False),
    "renumbered": ("grouped_mm", True, None, False),
    "spoiled": ("spoiled", False, None, False),
    "float32": ("grouped_mm", False, "float32", True),
}


def distance(run, exact, key):
    """Median of the first steps' relative differences."""
    return statistics.median(abs(a / b - 1) for a, b in list(zip(run[key], exact[key]))[:FIRST])


def judge(runs, last):
    """runs {name: {key of KEYS: values by step}} -> numbers, and what holds."""
    judged = [name for name in runs if name != "float32"]
    verdict = {"last_steps": {}, "first_steps": {}}
    misses = {"tilemoe": [], "spoiled": []}
    for key in KEYS[:2]:
        means = {name: sum(runs[name][key][-last:]) / last for name in judged}
        of = means["grouped_mm"]
        bar = max(2 * abs(means["renumbered"] - of), LEAST_BAR * abs(of))
        verdict["last_steps"][key] = {"means": means, "bar": bar}
        for name, missed in misses.items():
            if not abs(means[name] - of) <= bar:
                missed.append(f"{key} of the last steps")
    for key in KEYS:
        off = {name: distance(runs[name], runs["float32"], key) for name in judged}
        bar = max(off["grouped_mm"], off["renumbered"]) * MEDIAN_BAR
        verdict["first_steps"][key] = {"off": off, "bar": bar}
        for name, missed in misses.items():
            if not off[name] <= bar:
                missed.append(f"{key} of the first steps")
    return verdict | {"misses": misses}


def metrics(folder):
    """-> {key of KEYS: values by step}; where a step was done twice, the last time counts."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if "step" in line}
    ordered = [steps[step] for step in sorted(steps)]
    return {key: [line[key] for line in ordered] for key in KEYS}


def condensed(run):
    """{key: values by step} -> {"first": {key: first values}, "means": {key: of BLOCK steps}}"""
    means = {
        key: [statistics.fmean(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
        for key, values in run.items()
    }
    return {"first": {key: values[:FIRST] for key, values in run.items()}, "means": means}


def go_on(args, mesh, device, order, until, deadline):
    """-> whether the run has come to its end."""
    args.output.mkdir(parents=True, exist_ok=True)
    run = Run(args, mesh, device, order)
    run.resume()
    for name, ending in WATCHED.items():
        run.watched[name] = [p for n, p in run.model.named_parameters() if n.endswith(ending)]
    log = Log(args.output, run.rank)
    while run.step < until:
        record, good = run.train()
        if not good:
            raise ValueError(f"{args.output}: loss or gradient is not finite: {record}")
        log.write(record)
        if run.step < until and time.monotonic() > deadline:
            save(run)
            return False
        if run.step % args.save_every == 0:
            save(run)
    return True


def save(run):
    if not run.save():
        raise ValueError(f"{run.args.output}: parameters are not finite after step {run.step}")


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON of the verdict")
    add("--work", type=Path, required=True, help="folder of the runs and their checkpoints")
    add("--data", type=Path, required=True)
    add("--config", default="S1")
    add("--steps", type=int, default=2000)
    add("--last", type=int, default=200, help="steps whose means are compared")
    add("--batch", type=int, default=32, help="sequences")
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="of all, these now")
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    add("--seconds", type=float, default=float("inf"), help="then stop, to go on another time")
    options, rest = parser.parse_known_args(argv)
    deadline = time.monotonic() + options.seconds
    own = ["--config", options.config, "--data", options.data, "--steps", options.steps]
    own += ["--batch", options.batch, "--micro-batch", options.batch, "--keep", 1]
    own += ["--output", options.work, "--warmup", max(1, options.steps // 20)]
    mesh, device = start()
    finished = {}
    for name in options.runs:
        kind, renumbered, precision, short = RUNS[name]
        done = options.work / f"{name}.json"
        if not done.exists():
            args = train.arguments(list(map(str, own + rest)))
            args.output, args.experts = options.work / name, kind
            if precision is not None:
                args.precision, args.compile = precision, False  # its compiler takes 16 bits alone
            E = train.CONFIGS[args.config].E
            generator = torch.Generator().manual_seed(1)
            order = torch.randperm(E, generator=generator) if renumbered else None
            until = min(FIRST, args.steps) if short else args.steps
            began = time.monotonic()
            ended = go_on(args, mesh, device, order, until, deadline)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
            if not ended:
                return UNFINISHED
            done.write_text(json.dumps(metrics(args.output)))
        finished[name] = json.loads(done.read_text())
    if len(finished) == len(RUNS):
        document = machine.describe(device.type, ("torch", "triton", "tilemoe"))
        document["commit"] = options.commit or document["commit"]
        how = {name: vars(options)[name] for name in ("config", "steps", "last", "batch")}
        document |= how | {"options": rest, "verdict": judge(finished, options.last)}
        runs = {name: condensed(run) for name, run in finished.items()}
        document |= {"block": BLOCK, "runs": runs}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document["verdict"], indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
