"""Run a study: short trainings that differ in one choice alone, in pairs of one seed.

rounding.py and recipes.py are studies. The JSON file of a study has the methods with their options
of train.py, the runs, the most important first, and the size of a training. Runs of one seed start
with the same weights and read the same batches: `initial` and `batches` are their checksums.

A finished run is a line of --out, and is not repeated. So the command may be stopped at any moment,
and started again on any number of GPUs; an interrupted run is lost. --table prints the differences
from the base method of the same seed, and rejects lines that are not paired.
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

import torch
import torch.distributed as dist

import paired
import train
from configs import CONFIGS
from paired import Named
from parallel import start
from run import MEANS, Run
from speed import measurement
from tilemoe.bench import records


class NotFinite(ValueError):
    """The training cannot continue; others can."""


def checksum(parameters):
    """Return a checksum of all bits; the order of a sum of integers has no effect."""
    sums = [p.to_local().view(torch.int32).sum(dtype=torch.int64) for p in parameters]
    return zlib.crc32(torch.stack(sums).cpu().numpy().tobytes())


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


def spread(gpus):
    """Run this command once per GPU, and return the largest exit status."""
    command = [sys.executable, *sys.argv, "--gpus", "1"]
    workers = []
    for gpu in range(gpus):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        workers.append(subprocess.Popen(command, env=environment))
    return max(abs(worker.wait()) for worker in workers)


class Study:
    """A study: a program, and the JSON file next to it, with the same name."""

    def __init__(self, program, description):
        self.name, self.description = Path(program).stem, description
        self.study = json.loads(Path(program).with_suffix(".json").read_text())
        self.methods = self.study["methods"]  # {name: options of train.py}
        self.base = self.study["base"]

    def table(self, lines):
        """Return the differences from the base in Markdown, from {Named: line}."""
        raise NotImplementedError

    def has_tiles(self, method):
        return paired.has_tiles(self.study, method)

    def runs(self):
        """Return all runs, in the order of the JSON file; each once."""
        return paired.runs(self.study)

    def named(self, text):
        run = Named.parsed(text)
        if run.model not in CONFIGS or run.method not in self.methods or str(run) != text:
            raise ValueError(f"{text} must be a run of --list")
        if self.has_tiles(run.method) == (run.tiles is None):
            words = "a" if self.has_tiles(run.method) else "no"
            raise ValueError(f"{text} must have {words} number of tiles")
        return run

    def routing_tokens(self, run):
        """Return T, or None."""
        c = CONFIGS[run.model]
        return None if run.tiles is None else run.tiles * c.E * c.m // c.K

    def carry_out(self, run, options, rest, mesh, device):
        """Train and evaluate; return the values of the run's line."""
        steps = round(options.tokens / (options.batch * CONFIGS[run.model].context))
        own = ["--config", run.model, "--data", options.data, "--seed", run.seed, "--steps", steps]
        own += ["--batch", options.batch, "--micro-batch", options.batch]
        own += ["--warmup", steps // 20 + 1]
        T = self.routing_tokens(run)
        own += [] if T is None else ["--routing-tokens", T]
        torch._dynamo.reset()
        gc.collect()
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            own += ["--output", scratch, *self.methods[run.method], *rest]
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
            if self.has_tiles(run.method):
                values["loss_as_trained"] = job.evaluate(as_trained=True)
        tokens = args.batch * c.context
        values |= {"T": taken[0]["T"], "batches": batches, "steps": steps, "tokens_of_step": tokens}
        values |= {"validation_tokens": args.evaluate_batches * tokens}
        values |= {"unique_tokens": job.corpus.windows * c.context, "options": " ".join(rest)}
        values |= {f"mean_{key}": statistics.fmean(r[key] for r in taken) for key in MEANS}
        values["tokens_per_s"] = tokens * (steps - 1) / (trained - ready)
        return values | {"run_s": time.monotonic() - began}

    def lines_of(self, out):
        """Return {Named: Measurement} of the finished runs."""
        lines = paired.named(records.read(out) if out.exists() else [], self.name)
        return {self.named(str(run)): line for run, line in lines.items()}

    def work(self, options, rest):
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
                before = self.lines_of(options.out)
                alike = [l.values.get("run_s", 0) for of, l in before.items()
                         if of.model == run.model]  # fmt: skip
                late = time.monotonic() + max(alike, default=0) > deadline
                if not mine or run in before or late:
                    continue
                try:
                    values = self.carry_out(run, options, rest, mesh, device)
                except NotFinite as why:
                    print(f"{run}: {why}", file=sys.stderr, flush=True)
                    failed += 1
                    continue
                line = measurement(f"{self.name}/{run}", device, values, options.commit)
                with locked(locks / "all"):
                    kept = records.read(options.out) if options.out.exists() else []
                    records.write(options.out, [*kept, line])
                    # Inside the lock: the processes share one standard output.
                    said = {key: values[key] for key in ("T", "loss", "tokens_per_s", "run_s")}
                    print(json.dumps({"name": str(run)} | said), flush=True)
        dist.destroy_process_group()
        return int(failed > 0)

    def main(self, argv=None):
        parser = argparse.ArgumentParser(
            allow_abbrev=False,
            description=self.description.partition("\n")[0],
            epilog="All other options are those of train.py.",
        )
        add = parser.add_argument
        add("--list", action="store_true", help="print the runs, and which of them are finished")
        add("--table", action="store_true",
            help=f"print the differences from {self.base}, as Markdown")  # fmt: skip
        add("--out", type=Path, default=Path(f"{self.name}.jsonl"), help="results file, JSON lines")
        add("--data", type=Path, help="folder that corpus.py wrote")
        add("--runs", nargs="+", type=self.named, default=self.runs(),
            help="run these, in this order")  # fmt: skip
        add("--tokens", type=float, default=self.study["tokens"], help="steps of a training")
        add("--batch", type=int, default=self.study["batch"], help="sequences of a step")
        add("--evaluate-batches", type=int, default=self.study["evaluate_batches"],
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
            there = self.lines_of(options.out)
            for run in options.runs:
                print(run, "finished" if run in there else "")
            return 0
        if options.table:
            print(self.table(self.lines_of(options.out)), end="")
            return 0
        if options.gpus > 1:
            return spread(options.gpus)
        return self.work(options, rest)
