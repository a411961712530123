r"""Compare the speed and the results of the example with each implementation of the experts.

    python examples/pretrain/speed.py measure --data runs/corpus --out speed.jsonl \
        --config 7B --micro-batches 2 3 6 --compile --recompute half
    python examples/pretrain/speed.py guard --data runs/corpus --out guard.jsonl --work runs/guard

`measure` starts one process (or --processes) for each implementation in each round, in alternating
order. --out gets a line per implementation and micro-batch with its quartiles, or that it does not
fit. Existing lines of --out are not measured again. Both commands have the options of train.py.

`guard` trains with the same seed and data: TileMoE; grouped_mm; grouped_mm with its experts
renumbered, the same model with other rounding errors; TileMoE with dW2 scaled by 1.05, which must
fail; and the first steps of grouped_mm in float32. It continues an interrupted command. The limits:

- mean loss and mean norm of the gradient of the last steps: TileMoE differs from grouped_mm by at
  most twice the difference of the renumbered run, or by 0.2 %, whichever is larger;
- loss and all norms of gradients in the first steps: the median of their distance from float32's is
  at most that of the worse grouped_mm run, within two standard deviations of such a median;
- the run whose dW2 is scaled exceeds one of them. (AdamW cancels a gradient's scale.)
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import experts
import plan
import tilemoe
import train
from configs import CONFIGS, Refusal
from logs import Log
from parallel import leave, start
from run import Run
from tilemoe.bench import machine, records

PACKAGES = ("torch", "triton", "tilemoe", "scattermoe", "sonic-moe")
# Parts of kernel names, the first match counts, with the part of a step's time.
KINDS = {
    "experts": (
        "tilemoe", "group", "scatter2scatter", "index_select", "sort",
        "quack", "token_gather", "col_partial_sum", "metadata_compute",  # sonic-moe's
    ),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "gemms": ("gemm", "cutlass", "nvjet", "xmma"),
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor"),
    "copies of parameters": ("chunk_cat", "split_with_sizes", "memcpy", "copy_kernel"),
}  # fmt: skip
IN_HEAD = ("gemms", "elementwise and other")  # in the head's range, these belong to the head


def measurement(name, device, values, commit=None):
    """Return a line of a results file for a measurement of this process."""
    of = machine.describe(device.type, PACKAGES)
    return records.Measurement(name, of["device"], of["versions"], commit or of["commit"], values)


class TimedRun(Run):
    """Run with the milliseconds of each update, in the device's order of work."""

    marks = ()

    def mark(self):
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def update(self, *args):
        before = self.mark()
        norm = super().update(*args)
        self.marks = [*self.marks, (before, self.mark())]
        return norm

    def update_ms(self):
        on_cuda = self.device.type == "cuda"
        return [a.elapsed_time(b) if on_cuda else (b - a) * 1e3 for a, b in self.marks]

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def by_kind(kernels, head):
    """Return ms by kind of kernels (name, begin, ms) and ranges head (begin, end).

    A kernel without a known name belongs to the head if it began in one of the head's ranges.
    """
    kinds = {}
    for name, begin, ms in kernels:
        lowered = name.lower()
        found = (kind for kind, parts in KINDS.items() if any(part in lowered for part in parts))
        kind = next(found, "elementwise and other")
        if kind in IN_HEAD and any(first <= begin < last for first, last in head):
            kind = "head"
        kinds[kind] = kinds.get(kind, 0.0) + ms
    return kinds


def profile(run, steps):
    """Return ms of a step by kind of kernel."""
    on_cuda = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            run.train()
        run.wait()
    of = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [e for e in recorded.events() if e.device_type == of]
    head = [(e.time_range.start, e.time_range.end) for e in events if e.name == "head"]
    kernels = []
    for e in events:
        if not e.is_user_annotation and e.name != "head":
            spent = e.self_device_time_total if on_cuda else e.self_cpu_time_total
            kernels.append((e.name, e.time_range.start, spent / 1e3 / steps))
    return by_kind(kernels, head)


def measure(run, warmup, steps, profiled):
    """Return the measurements of a job in one process."""
    losses, step_ms = [], []
    for step in range(warmup + steps):
        if step == warmup:
            run.marks = []
        run.wait()
        began = time.perf_counter()
        record, good = run.train()
        run.wait()
        step_ms.append((time.perf_counter() - began) * 1e3)
        losses.append(record["loss"])
        if not good:
            why = train.too_few_places(record, run.args)
            raise ValueError(f"{why}loss or gradient is not finite: {record}")
    found = {"step_ms": step_ms[warmup:], "update_ms": run.update_ms()}
    found |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if run.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    kinds = profile(run, profiled) if profiled else {}
    return found | {f"kind.{kind}_ms": ms for kind, ms in kinds.items()}


def one(options, rest):
    """Write the measurements to --out, in a process that `launched` starts."""
    mesh, device = start()
    with tempfile.TemporaryDirectory() as scratch:
        args = train.arguments([*rest, "--output", scratch])
        try:
            run = TimedRun(args, mesh, device)
            found = measure(run, options.warmup_steps, options.measured_steps, options.profile)
            flop, peak = plan.flop_of_token(run.config), plan.peak_flops(device)
            found |= {"flop_of_token": flop, "peak_flops": peak}
        except RuntimeError as error:  # a compiled graph does not raise OutOfMemoryError
            if "out of memory" not in str(error):
                raise
            found = {"does_not_fit": str(error).splitlines()[0]}
    if dist.get_rank() == 0:
        records.write(options.out, [measurement("", device, found, options.commit)])
    dist.destroy_process_group()
    return 0


def error_of(stderr):
    """Return the last line of a rank's error, which torchrun's report follows, or else the last one."""
    said = stderr.strip().splitlines()
    of_ranks = [line for line in said if re.match(r"\[rank\d+\]: \S", line)]
    return (of_ranks or said or [""])[-1]


def launched(options, name, micro_batch, rest):
    """Return a Measurement of an implementation in one or several new processes."""
    command = [sys.executable]
    if options.processes > 1:
        command += "-m torch.distributed.run --standalone --local-addr localhost".split()
        command += [f"--nproc-per-node={options.processes}"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "one.jsonl"
        command += [__file__, "one", "--out", out, *rest, "--config", options.config]
        command += ["--data", options.data, "--experts", name, "--micro-batch", micro_batch]
        command += ["--batch", micro_batch * options.share * options.processes]
        for key in ("warmup_steps", "measured_steps", "profile"):
            command += ["--" + key.replace("_", "-"), vars(options)[key]]
        command += ["--commit", options.commit] if options.commit else []
        done = subprocess.run(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = error_of(done.stderr) or f"exit status {done.returncode}"
            raise Refusal(f"{name}, micro-batch {micro_batch}: {why}")
        return records.read(out)[0]


def of_job(options, args, name, micro_batch):
    """Return a job's values, and its name such as "pretrain-study/7B-40-tilemoe-none-6-x1-p1"."""
    once = options.share > 1 and args.reduce == "step"
    values = {"config": args.config, "layers": args.layers or CONFIGS[args.config].layers}
    values |= {"experts": name, "recompute": args.recompute, "micro_batch": micro_batch}
    parts = [*values.values(), f"x{options.share}", f"p{options.processes}"]
    parts += ["kept"] * args.keep_gathered + ["once"] * once
    parts += [f"ctas{args.ctas_per_sm}"] * (args.ctas_per_sm > 1)
    parts += [f"ep{args.expert_parallel}"] * (args.expert_parallel > 1)
    values |= {"share": options.share, "processes": options.processes, "once": once}
    values |= {"kept": args.keep_gathered, "ctas_per_sm": args.ctas_per_sm, "compile": args.compile}
    values |= {"expert_parallel": args.expert_parallel, "places": args.places}
    values |= {"precision": args.precision}
    return "pretrain-study/" + "-".join(map(str, parts)), values


def merged(tokens, rounds):
    """Merge measurements of all rounds of a job whose step has `tokens` tokens -> values."""
    last = dict(rounds[-1].values)
    if "does_not_fit" in last:
        return last
    flop, peak = last.pop("flop_of_token"), last.pop("peak_flops")
    for key in ("step_ms", "update_ms"):
        last[key] = records.quartiles(ms for of in rounds for ms in of.values[key])
    speeds = [tokens / ms * 1e3 for of in rounds for ms in of.values["step_ms"]]
    last["tokens_per_s_and_process"] = records.quartiles(speeds)
    if peak is not None:
        last["mfu"] = last["tokens_per_s_and_process"][1] * flop / peak
    return last | {"rounds": len(rounds)}


def compare(options, rest):
    """Measure the implementations alternately, and return the exit status."""
    args = train.arguments([*rest, "--config", options.config, "--plan"])
    lines = records.read(options.out) if options.out.exists() else []
    # Earlier versions named a job with 4 CTAs per SM "...-turns4".
    there, failed = {line.name.replace("-turns", "-ctas") for line in lines}, 0
    for size in options.micro_batches:
        jobs = {of: of_job(options, args, of, size) for of in options.implementations}
        rounds = {of: [] for of, (name, _) in jobs.items() if name not in there}
        for i in range(options.rounds):
            for of in list(rounds) if i % 2 == 0 else list(reversed(rounds)):
                try:
                    rounds[of].append(launched(options, of, size, rest))
                except Refusal as why:  # not installed, for example
                    failed += 1
                    print(f"error: {why}", file=sys.stderr, flush=True)
                    del rounds[of]
        for of, found in rounds.items():
            name, values = jobs[of]
            values |= merged(size * options.share * CONFIGS[args.config].context, found)
            lines.append(dataclasses.replace(found[0], name=name, values=values))
            records.write(options.out, lines)  # after each measurement, for an interrupted command
            print(name, values.get("tokens_per_s_and_process", "does not fit"), flush=True)
    return int(failed > 0)


MIN_LIMIT = 0.002  # relative to the value
FIRST = 20  # steps that are compared with float32
MEDIAN_LIMIT = 1.5  # a quarter is the standard deviation of the median of 20 normal distances
WATCHED = {"dW1": "gate_up_proj", "dW2": "down_proj", "router": "gate.weight"}
KEYS = ("loss", "gradient_norm", *(f"norm_{name}" for name in WATCHED))
UNFINISHED = 75  # exit status: some runs are not finished


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, W, scale):
        ctx.scale = scale
        return W.view_as(W)

    @staticmethod
    def backward(ctx, dW):
        return dW * ctx.scale, None


class Spoiled(experts.Peer):
    """Experts of TileMoE with dW2 times 1.05."""

    name = "spoiled"

    def forward(self, x, logits, spread, *, options, selection_bias, addend, return_aux, **_):
        W2 = ScaledGradient.apply(self.down_proj, 1.05)
        names = ("K", "scoring", "column_blocks", "overwrite_H")
        return tilemoe.moe(
            x, logits, self.gate_up_proj, W2, selection_bias=selection_bias, addend=addend,
            return_aux=return_aux, **{name: getattr(options, name) for name in names},
        )  # fmt: skip


experts.PEERS["spoiled"] = Spoiled
RUNS = (
    "tilemoe",
    "grouped_mm",
    "renumbered",
    "spoiled",
    "float32",
)  # the last one: only FIRST steps


def distance(run, exact, key):
    """Return the median of the first steps' relative differences."""
    return statistics.median(abs(a / b - 1) for a, b in list(zip(run[key], exact[key]))[:FIRST])


def judge(runs, last):
    """Return the results and the limits that are exceeded.

    runs is {name: {key of KEYS: values by step}}. The result is {"last_steps/loss": {"limit", run:
    value}}, and {"tilemoe" or "spoiled": exceeded limits}.
    """
    judged = [name for name in runs if name != "float32"]
    found, misses = {}, {"tilemoe": [], "spoiled": []}
    for key in KEYS[:2]:
        means = {name: sum(runs[name][key][-last:]) / last for name in judged}
        of = means["grouped_mm"]
        limit = max(2 * abs(means["renumbered"] - of), MIN_LIMIT * abs(of))
        found[f"last_steps/{key}"] = {"limit": limit} | means
        for name in misses:
            if not abs(means[name] - of) <= limit:
                misses[name].append(f"{key} of the last steps")
    for key in KEYS:
        off = {name: distance(runs[name], runs["float32"], key) for name in judged}
        limit = max(off["grouped_mm"], off["renumbered"]) * MEDIAN_LIMIT
        found[f"first_steps/{key}"] = {"limit": limit} | off
        for name in misses:
            if not off[name] <= limit:
                misses[name].append(f"{key} of the first steps")
    return found, misses


def trained(args, mesh, device, order, until, deadline):
    """Continue a run of the guard -> {key of KEYS: values by step}, or None after the deadline."""
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
        late = run.step < until and time.monotonic() > deadline
        if (late or run.step % args.save_every == 0) and not run.save():
            raise ValueError(f"{args.output}: parameters are not finite after step {run.step}")
        if late:
            return None
    lines = map(json.loads, (args.output / "log.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if "step" in line}  # the last occurrence counts
    return {key: [steps[step][key] for step in sorted(steps)] for key in KEYS}


def guard(options, rest):
    """Run the guard, and return the exit status."""
    deadline = time.monotonic() + options.seconds
    own = ["--config", options.config, "--data", options.data, "--output", options.work]
    own += ["--steps", options.steps, "--warmup", max(1, options.steps // 20), "--keep", 1]
    own += ["--batch", options.batch, "--micro-batch", options.batch]
    finished, (mesh, device) = {}, start()
    for name in RUNS:
        done = options.work / f"{name}.json"
        if not done.exists():
            args = train.arguments(list(map(str, own + rest)))
            args.output, until, order = options.work / name, args.steps, None
            args.experts = name if name in ("tilemoe", "spoiled") else "grouped_mm"
            if name == "float32":  # its compiler supports only 16 bits
                args.precision, args.compile, until = "float32", False, min(FIRST, args.steps)
            if name == "renumbered":
                generator = torch.Generator().manual_seed(1)
                order = torch.randperm(CONFIGS[args.config].E, generator=generator)
            run = trained(args, mesh, device, order, until, deadline)
            print(f"{name}: {'interrupted' if run is None else 'done'}", file=sys.stderr)
            if run is None:
                return UNFINISHED
            done.write_text(json.dumps(run))
        finished[name] = json.loads(done.read_text())
    found, misses = judge(finished, options.last)
    found["run"] = {name: vars(options)[name] for name in ("config", "steps", "last", "batch")}
    found["run"] |= {f"{name}_misses": ", ".join(of) for name, of in misses.items()}
    line = lambda of: measurement(f"pretrain-guard/{of}", device, found[of], options.commit)
    records.write(options.out, map(line, found))
    print(json.dumps(found, indent=1))
    dist.destroy_process_group()
    return int(bool(misses["tilemoe"]) or not misses["spoiled"])


def parsed(argv=None):
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(allow_abbrev=False, **how)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("measure", "guard", "one"):
        add = commands.add_parser(command, allow_abbrev=False).add_argument
        add("--out", type=Path, required=True, help="results file, JSON lines")
        add("--commit", help="commit of the measured source, if this is not a source tree")
        if command != "one":
            add("--data", type=Path, required=True, help="folder that corpus.py wrote")
            add("--config", default="S1", choices=CONFIGS)
        if command != "guard":
            add("--warmup-steps", type=int, default=10)
            add("--measured-steps", type=int, default=20)
            add(
                "--profile",
                type=int,
                default=1,
                metavar="STEPS",
                help="steps after the measured ones with a profile",
            )
        if command == "measure":
            of = dict(choices=experts.IMPLEMENTATIONS, default=["tilemoe", "grouped_mm"])
            add("--implementations", nargs="+", **of)
            add("--micro-batches", nargs="+", type=int, default=[1], help="sequences")
            add("--share", type=int, default=1, help="micro-batches of a step in each process")
            add("--processes", type=int, default=1)
            add("--rounds", type=int, default=3)
        if command == "guard":
            add("--work", type=Path, required=True, help="folder of runs and checkpoints")
            add("--steps", type=int, default=2000)
            add("--last", type=int, default=200, help="steps whose means are compared")
            add("--batch", type=int, default=32, help="sequences")
            add(
                "--seconds",
                type=float,
                default=float("inf"),
                help="seconds; then stop, to continue later",
            )
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    leave({"measure": compare, "guard": guard, "one": one}[parsed()[0].command](*parsed()))
