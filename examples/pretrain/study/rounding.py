"""What token rounding does to a model: short trainings that differ in their routing alone.

    python examples/pretrain/study/rounding.py --list
    python examples/pretrain/study/rounding.py --data runs/corpus --out benchmarks/results/rounding
    python examples/pretrain/study/rounding.py ... --gpus 4 --seconds 900   # and go on another time

A run has a name: model, method, tiles an expert, seed; of `S1-nearest-2-s0`, T K / (E m) = 2. Every
T tokens of a step are routed by themselves, as micro-batches or ranks of T tokens would be, while
attention, experts and head work on all of the step's tokens at once; the losses of the balance are
the step's. So top-K is the same for every number of tiles, and has none in its name. Runs of one
seed begin with the same weights and see the same batches: `initial` and `batches` in the metrics
are checksums of them.

Each run writes one file of metrics when it has ended, and is left out where that is there. So the
command may be stopped at any moment, and given again on any number of machines, with any of the
files; what was begun and not ended is lost.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import example  # noqa: F401
import train
from configs import CONFIGS
from parallel import start
from run import MEANS, Run
from stopwatch import clear
from tilemoe.bench import machine

# What train.py is told.
METHODS = {
    "top_k": (),
    "nearest": ("--rounding", "nearest"),
    "renormalized": ("--rounding", "nearest", "--renormalize"),
    "up": ("--rounding", "up"),
    "down": ("--rounding", "down"),
    "stochastic": ("--rounding", "stochastic"),
    "balanced": ("--rounding", "balanced"),
    "capacity": ("--capacity", "1.25"),
}
CURVE = 24  # parts of a training, whose mean losses the metrics have


class NotFinite(ValueError):
    """A training that cannot go on; others can."""


class Named(NamedTuple):
    model: str
    method: str
    tiles: int | None  # an expert: T K / (E m); None: top-K, which does not depend on it
    seed: int

    def __str__(self):
        tiles = () if self.tiles is None else (str(self.tiles),)
        return "-".join((self.model, self.method, *tiles, f"s{self.seed}"))

    @property
    def routing_tokens(self):
        """T, or None."""
        c = CONFIGS[self.model]
        return None if self.tiles is None else self.tiles * c.E * c.m // c.K


def named(text):
    model, method, *tiles, seed = text.split("-")
    run = Named(model, method, int(tiles[0]) if tiles else None, int(seed[1:]))
    if model not in CONFIGS or method not in METHODS or str(run) != text:
        raise ValueError(f"{text} is no run: see --list")
    if (method == "top_k") != (run.tiles is None):
        raise ValueError(f"{text}: all methods but top_k have a number of tiles")
    return run


def study(models=("S1", "S2")):
    """All runs, the most important first."""
    runs = []

    def add(model, seed, *methods):
        for method, tiles in methods:
            run = Named(model, method, tiles, seed)
            if run not in runs:
                runs.append(run)

    pair = ("top_k", None), ("nearest", 2)
    for model in models:
        add(model, 0, *pair, ("nearest", 1), ("nearest", 4))
    others = [method for method in METHODS if method not in ("top_k", "nearest")]
    for seeds, methods in (
        ((1, 2), pair),
        ((0,), [(method, 2) for method in others]),
        ((1, 2), (("nearest", 1), ("nearest", 4))),
        ((3, 4), (*pair, ("nearest", 1), ("nearest", 4))),
        ((0, 1, 2, 3, 4), (("nearest", 8),)),
        ((1, 2), [(method, 2) for method in others]),
        ((0,), [(method, 1) for method in others]),
    ):
        for seed in seeds:
            for model in models:
                add(model, seed, *methods)
    return runs


def checksum(parameters):
    """Of all bits; the order of a sum of integers does not matter."""
    sums = [p.to_local().view(torch.int32).sum(dtype=torch.int64) for p in parameters]
    return zlib.crc32(torch.stack(sums).cpu().numpy().tobytes())


def means(records):
    """Over some steps."""
    return {key: sum(r[key] for r in records) / len(records) for key in MEANS}


def carry_out(run, options, rest, mesh, device):
    """Trains and evaluates -> metrics."""
    steps = round(options.tokens / (options.batch * CONFIGS[run.model].context))
    own = ["--config", run.model, "--data", options.data, "--seed", run.seed, "--steps", steps]
    own += ["--batch", options.batch, "--micro-batch", options.batch, "--warmup", steps // 20 + 1]
    if run.routing_tokens is not None:
        own += ["--routing-tokens", run.routing_tokens]
    clear(device)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        own += ["--output", scratch, *METHODS[run.method], *rest]
        args = train.arguments(list(map(str, own)))
        job = Run(args, mesh, device)
        c, windows = job.config, job.held_out.windows
        args.evaluate_batches = min(options.evaluate_batches, windows // options.batch)
        metrics = {"name": str(run)} | run._asdict() | {"T": args.batch * c.context}
        metrics |= {letter: getattr(c, letter) for letter in "dnEKm"}
        metrics["initial"] = checksum(job.model.parameters())
        records, batches, ready = [], 0, None
        while job.step < steps:
            record, good = job.train()
            if not good:
                raise NotFinite(f"loss or gradient is not finite: {record}")
            records.append(record)
            batches = zlib.crc32(str(record["batch"]).encode(), batches)
            if job.step == 1:
                ready = time.monotonic()
        trained = time.monotonic()
        held_out = {"top_k": job.evaluate()}
        if run.method != "top_k":
            held_out["as_trained"] = job.evaluate(as_trained=True)
    part = -(-steps // CURVE)
    parts = [means(records[at : at + part]) for at in range(0, steps, part)]
    tokens = args.batch * c.context
    metrics |= {"T": records[0]["T"], "batches": batches, "held_out": held_out}
    metrics |= {"held_out_tokens": args.evaluate_batches * tokens, "steps": steps}
    metrics |= {"tokens_of_step": tokens, "unique_tokens": job.corpus.windows * c.context}
    metrics |= {"curve": {key: [round(of[key], 6) for of in parts] for key in MEANS}}
    metrics |= {"whole": means(records), "gradient_norm": records[-1]["gradient_norm"]}
    metrics["tokens_per_s"] = tokens * (steps - 1) / (trained - ready)
    metrics["seconds"] = {"until the first step's end": ready - began}
    metrics["seconds"] |= {"training": trained - ready, "all": time.monotonic() - began}
    return metrics | {"options": rest}


def finished(out, run):
    return (out / f"{run}.json").exists()


def longest(out, model):
    """Seconds that a run of this model has taken, by the metrics that are there; 0: none yet."""
    files = out.glob(f"{model}-*.json")
    return max((json.loads(file.read_text())["seconds"]["all"] for file in files), default=0)


def work(options, rest):
    """One process on one device: takes the first run that is not finished and that no other process
    has, until none is left or the time is over. -> exit status."""
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    mesh, device = start()
    described = machine.describe(device.type, ("torch", "triton", "tilemoe"))
    described["commit"] = options.commit or described["commit"]
    failed = 0
    for run in options.runs:
        ends = time.monotonic() + longest(options.out, run.model)
        if finished(options.out, run) or ends > deadline:
            continue
        with open(options.out / f"{run}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if finished(options.out, run):
                continue
            try:
                metrics = described | carry_out(run, options, rest, mesh, device)
            except NotFinite as why:
                print(f"{run}: {why}", file=sys.stderr, flush=True)
                failed += 1
                continue
            partial = options.out / f"{run}.partial"
            partial.write_text(json.dumps(metrics, indent=1) + "\n")
            os.replace(partial, options.out / f"{run}.json")
            os.unlink(lock.name)
        said = {key: metrics[key] for key in ("name", "T", "held_out", "tokens_per_s", "seconds")}
        print(json.dumps(said), flush=True)
    dist.destroy_process_group()
    return int(failed > 0)


def spread(gpus):
    """This command once for each GPU -> the largest exit status."""
    command = [sys.executable, *sys.argv, "--gpus", "1"]
    workers = []
    for gpu in range(gpus):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        workers.append(subprocess.Popen(command, env=environment))
    return max(abs(worker.wait()) for worker in workers)


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__.partition("\n")[0], epilog="All other options are train.py's."
    )
    add = parser.add_argument
    add("--list", action="store_true", help="names the runs, and which of them are finished")
    add("--out", type=Path, default=Path("benchmarks/results/rounding"), help="folder of metrics")
    add("--data", type=Path, help="folder that corpus.py wrote")
    add("--runs", nargs="+", type=named, default=study(), help="these, in this order")
    add("--tokens", type=float, default=120e6, help="of a training")
    add("--batch", type=int, default=128, help="sequences of a step")
    add("--evaluate-batches", type=int, default=12, help="held-out, of --batch sequences, at most")
    add("--gpus", type=int, default=1, help="as many processes, each with a GPU of its own")
    add("--seconds", type=float, default=float("inf"), help="no run begins that would end later")
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    options, rest = parser.parse_known_args(argv)
    if options.list:
        for run in options.runs:
            print(run, "finished" if finished(options.out, run) else "")
        return 0
    if options.gpus > 1:
        return spread(options.gpus)
    return work(options, rest)


if __name__ == "__main__":
    sys.exit(main())
