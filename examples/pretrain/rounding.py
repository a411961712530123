"""Measure the effect of token rounding with short trainings that differ in routing alone.

    python examples/pretrain/rounding.py --list
    python examples/pretrain/rounding.py --data runs/corpus --out rounding.jsonl --gpus 4
    python examples/pretrain/rounding.py --table --out benchmarks/results/rounding.jsonl

rounding.json has the methods, the runs, the most important first, and the size of a training. A run
has a name: model, method, tiles for each expert, seed; in `S1-nearest-2-s0`, T K / (E m) = 2. Every
T tokens of a step are routed separately, like micro-batches or ranks of T tokens. Attention,
experts and head compute all of the step's tokens together, and the balance and z losses are the
step's: so top-K is the same for every number of tiles, and its name has none. Runs of one seed
start with the same weights and read the same batches: `initial` and `batches` are their checksums.

A finished run is a line of --out, and is not repeated. So the command may be stopped at any moment,
and started again on any number of GPUs; an interrupted run is lost. --table prints the differences
from top-K of the same seed, and rejects lines that are not paired.
"""

import argparse
import contextlib
import fcntl
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import train
from configs import CONFIGS
from parallel import start
from run import MEANS, Run
from speed import measurement
from tilemoe.bench import records

STUDY = json.loads(Path(__file__).with_suffix(".json").read_text())
METHODS = STUDY["methods"]  # {name: options of train.py}
# Student's t by degrees of freedom, from one on, with 2.5 % on either side.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SAME = (
    "initial",
    "batches",
    "steps",
    "tokens_of_step",
    "validation_tokens",
)  # equal values of a pair


class NotFinite(ValueError):
    """The training cannot continue; others can."""


class Named(NamedTuple):
    model: str
    method: str
    tiles: (
        int | None
    )  # mean tiles per expert: T K / (E m); None: top-K, which does not depend on it
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
        raise ValueError(f"{text} must be a run of --list")
    if (method == "top_k") != (run.tiles is None):
        raise ValueError(f"{text} must have a number of tiles, as all methods but top_k")
    return run


def study():
    """Return all runs, in the order of rounding.json; each once."""
    return list(dict.fromkeys(
        Named(model, method, None if method == "top_k" else tiles, seed)
        for group in STUDY["runs"] for seed in group["seeds"] for model in STUDY["models"]
        for method in group["methods"] for tiles in group["tiles"]
    ))  # fmt: skip


def checksum(parameters):
    """Return a checksum of all bits; the order of a sum of integers has no effect."""
    sums = [p.to_local().view(torch.int32).sum(dtype=torch.int64) for p in parameters]
    return zlib.crc32(torch.stack(sums).cpu().numpy().tobytes())


def carry_out(run, options, rest, mesh, device):
    """Train and evaluate; return the values of the run's line."""
    steps = round(options.tokens / (options.batch * CONFIGS[run.model].context))
    own = ["--config", run.model, "--data", options.data, "--seed", run.seed, "--steps", steps]
    own += ["--batch", options.batch, "--micro-batch", options.batch, "--warmup", steps // 20 + 1]
    if run.routing_tokens is not None:
        own += ["--routing-tokens", run.routing_tokens]
    torch._dynamo.reset()
    gc.collect()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        own += ["--output", scratch, *METHODS[run.method], *rest]
        args = train.arguments(list(map(str, own)))
        job = Run(args, mesh, device)
        c, windows = job.config, job.validation.windows
        args.evaluate_batches = min(options.evaluate_batches, windows // options.batch)
        values = run._asdict() | {letter: getattr(c, letter) for letter in "dnEKm"}
        values["initial"] = checksum(job.model.parameters())
        taken, batches, ready = [], 0, None
        while job.step < steps:
            record, good = job.train()
            if not good:
                raise NotFinite(f"loss or gradient is not finite: {record}")
            taken.append(record)
            batches = zlib.crc32(str(record["batch"]).encode(), batches)
            if job.step == 1:
                ready = time.monotonic()
        trained = time.monotonic()
        values["loss"] = job.evaluate()
        if run.method != "top_k":
            values["loss_as_trained"] = job.evaluate(as_trained=True)
    tokens = args.batch * c.context
    values |= {"T": taken[0]["T"], "batches": batches, "steps": steps, "tokens_of_step": tokens}
    values |= {"validation_tokens": args.evaluate_batches * tokens}
    values |= {"unique_tokens": job.corpus.windows * c.context, "options": " ".join(rest)}
    values |= {f"mean_{key}": statistics.fmean(r[key] for r in taken) for key in MEANS}
    values["tokens_per_s"] = tokens * (steps - 1) / (trained - ready)
    return values | {"run_s": time.monotonic() - began}


@contextlib.contextmanager
def locked(path, wait=True):
    """Return whether this process has the lock of that name, which ends with the process."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def lines_of(out):
    """Return {Named: Measurement} of the finished runs."""
    lines = records.read(out) if out.exists() else []
    found = (line for line in lines if line.name.startswith("rounding/"))
    return {named(line.name.removeprefix("rounding/")): line for line in found}


def work(options, rest):
    """Run one process on one device, and return its exit status.

    The process executes the first run that is not finished and that no other process has, until
    none is left or the time is over.
    """
    deadline = time.monotonic() + options.seconds
    mesh, device = start()
    failed, locks = 0, options.out.with_suffix(".locks")
    locks.mkdir(parents=True, exist_ok=True)
    for run in options.runs:
        with locked(locks / str(run), wait=False) as mine:
            before = lines_of(options.out)
            alike = [l.values.get("run_s", 0) for of, l in before.items() if of.model == run.model]
            if not mine or run in before or time.monotonic() + max(alike, default=0) > deadline:
                continue
            try:
                values = carry_out(run, options, rest, mesh, device)
            except NotFinite as why:
                print(f"{run}: {why}", file=sys.stderr, flush=True)
                failed += 1
                continue
            line = measurement(f"rounding/{run}", device, values, options.commit)
            with locked(locks / "all"):
                kept = records.read(options.out) if options.out.exists() else []
                records.write(options.out, [*kept, line])
                # Inside the lock: the processes share one standard output.
                said = {key: values[key] for key in ("T", "loss", "tokens_per_s", "run_s")}
                print(json.dumps({"name": str(run)} | said), flush=True)
    dist.destroy_process_group()
    return int(failed > 0)


def spread(gpus):
    """Run this command once per GPU, and return the largest exit status."""
    command = [sys.executable, *sys.argv, "--gpus", "1"]
    workers = []
    for gpu in range(gpus):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        workers.append(subprocess.Popen(command, env=environment))
    return max(abs(worker.wait()) for worker in workers)


def interval(values):
    """Return the mean of values, and half of its 95 % confidence interval, None of one value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, STUDENT[n - 2] * (variance / n) ** 0.5


def pairs(lines):
    """Return {(model, method, tiles): [(values, those of top-K with the same seed)]}."""
    found = {}
    for run, line in lines.items():
        plain = lines.get(Named(run.model, "top_k", None, run.seed))
        if run.method == "top_k" or plain is None:
            continue
        for key in (*SAME, "options"):
            if line.values.get(key, "") != plain.values.get(key, ""):
                raise ValueError(f"{line.name} and {plain.name} must have the same {key}")
        found.setdefault(run[:3], []).append((line.values, plain.values))
    return dict(sorted(found.items(), key=lambda of: (of[0][0], of[0][1] != "nearest", of[0][1:])))


def table(lines):
    """Return validation losses in Markdown, as differences from top-K of the same seed."""
    header = "model", "method", "tiles", "seeds", "loss, %", "pairs dropped, %", "pairs added, %"
    text = f"| {' | '.join(header)} |\n{'|---' * len(header)}|\n"
    for (model, method, tiles), runs in pairs(lines).items():
        mean, half = interval([100 * (a["loss"] / b["loss"] - 1) for a, b in runs])
        off = f"{mean:+.2f}" + ("" if half is None else f" ± {half:.2f}")
        share = lambda key: 100 * statistics.fmean(values[key] for values, _ in runs)
        dropped, added = share("mean_pairs_dropped"), share("mean_pairs_added")
        cells = f"{model} | `{method}` | {tiles} | {len(runs)} | {off}"
        text += f"| {cells} | {dropped:.1f} | {added:.1f} |\n"
    return text


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__.partition("\n")[0],
        epilog="All other options are those of train.py.",
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the runs, and which of them are finished")
    add("--table", action="store_true", help="print the differences from top-K, as Markdown")
    add("--out", type=Path, default=Path("rounding.jsonl"), help="results file, JSON lines")
    add("--data", type=Path, help="folder that corpus.py wrote")
    add("--runs", nargs="+", type=named, default=study(), help="run these, in this order")
    add("--tokens", type=float, default=STUDY["tokens"], help="steps of a training")
    add("--batch", type=int, default=STUDY["batch"], help="sequences of a step")
    add("--evaluate-batches", type=int, default=STUDY["evaluate_batches"],
        help="maximum number of evaluations of --batch validation sequences")  # fmt: skip
    add("--gpus", type=int, default=1, help="number of processes, each with its own GPU")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="seconds; no run starts that would end later",
    )
    add("--commit", help="commit of the measured source, if this is not a source tree")
    options, rest = parser.parse_known_args(argv)
    if options.list:
        there = lines_of(options.out)
        for run in options.runs:
            print(run, "finished" if run in there else "")
        return 0
    if options.table:
        print(table(lines_of(options.out)), end="")
        return 0
    if options.gpus > 1:
        return spread(options.gpus)
    return work(options, rest)


if __name__ == "__main__":
    sys.exit(main())
