"""How fast a configuration trains: the implementations of the experts one after another.

    python examples/pretrain/measure.py --out s1.json --data runs/corpus --config S1 --compile \\
        --implementations tilemoe grouped_mm --micro-batches 32 64

Writes one JSON file: tokens/s, MFU, memory and, with --profile, where the device's time goes. All
other options are those of train.py; a step is one micro-batch for each process. What does not fit
the device's memory is an entry that says so.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import plan
import train
from experts import IMPLEMENTATIONS
from parallel import start
from run import Run
from tilemoe.bench import machine

PACKAGES = ("torch", "triton", "tilemoe", "scattermoe", "sonic-moe")
# Kernels by a part of their name, the first that matches: what a step's time is spent on.
KINDS = {
    "experts": ("tilemoe", "groupproblem", "grouped", "scatter2scatter", "sonic", "quack"),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "xmma"),
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor"),
}


def clear(device):
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def kind(kernel):
    lowered = kernel.lower()
    found = (name for name, parts in KINDS.items() if any(part in lowered for part in parts))
    return next(found, "elementwise and other")


def profile(run, steps):
    """-> ms of a step by kind and by kernel, the largest first; what the profiler sees of it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_cuda = run.device.type == "cuda"
    if on_cuda:
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            run.train()
        wait(run.device)
    kinds, kernels = {}, []
    for event in recorded.key_averages():
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        ms = spent / 1e3 / steps
        kinds[kind(event.key)] = kinds.get(kind(event.key), 0.0) + ms
        kernels.append({"kernel": event.key[:120], "calls": event.count / steps, "ms": ms})
    kernels.sort(key=lambda k: -k["ms"])
    return {"kinds_ms": kinds, "kernels": kernels[:25]}


def measure(run, warmup, steps, profiled):
    began = time.perf_counter()
    for _ in range(warmup):
        record, good = run.train()
        if not good:
            raise ValueError(f"loss or gradient is not finite: {record}")
    wait(run.device)
    entry = {"warmup_s": time.perf_counter() - began, "losses": [record["loss"]]}
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        record, _ = run.train()
        wait(run.device)
        times.append(time.perf_counter() - began)
        entry["losses"].append(record["loss"])
    tokens = run.args.batch * run.config.context
    entry["ms"] = statistics.median(times) * 1e3
    entry["spread_ms"] = [min(times) * 1e3, max(times) * 1e3]
    entry["tokens_per_s_and_process"] = tokens / statistics.median(times) / run.ranks
    peak = plan.peak_flops(run.device)
    if peak is not None:
        flop = plan.flop_of_token(run.config)
        entry["mfu"] = entry["tokens_per_s_and_process"] * flop / peak
        entry["peak_bytes"] = torch.cuda.max_memory_allocated()
        entry["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if profiled:
        entry |= profile(run, profiled)
    return entry


def entry_of(args, mesh, device, options):
    clear(device)
    run = None
    try:
        run = Run(args, mesh, device)
        return measure(run, options.warmup_steps, options.measured_steps, options.profile)
    except torch.OutOfMemoryError as error:
        return {"does_not_fit": str(error).splitlines()[0]}
    finally:
        del run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["tilemoe"])
    add("--micro-batches", nargs="+", type=int, default=[1], help="sequences")
    add("--warmup-steps", type=int, default=10)
    add("--measured-steps", type=int, default=20)
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    add("--profile", type=int, default=0, metavar="STEPS", help="after the measured ones")
    options, rest = parser.parse_known_args(argv)
    mesh, device = start()
    document = machine.describe(device.type, PACKAGES)
    document["commit"] = options.commit or document["commit"]
    how = {name: vars(options)[name] for name in ("warmup_steps", "measured_steps", "profile")}
    document |= how | {"options": rest, "processes": dist.get_world_size(), "entries": []}
    for size in options.micro_batches:
        for name in options.implementations:
            with tempfile.TemporaryDirectory() as scratch:
                of_step = ["--batch", size * dist.get_world_size(), "--micro-batch", size]
                own = [*rest, "--experts", name, "--output", scratch, *of_step]
                args = train.arguments(list(map(str, own)))
                entry = {"config": args.config, "layers": args.layers, "experts": name}
                entry |= {"micro_batch": size, "precision": args.precision}
                entry |= {"compile": args.compile, "recompute": args.recompute}
                entry |= entry_of(args, mesh, device, options)
            document["entries"].append(entry)
            if dist.get_rank() == 0:  # after each, so that a command that is cut short leaves some
                options.out.write_text(json.dumps(document, indent=1) + "\n")
                short = {k: v for k, v in entry.items() if k not in ("kernels", "losses")}
                print(json.dumps(short), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
