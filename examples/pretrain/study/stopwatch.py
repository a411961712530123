"""A training's speed and memory, and by a profile where the device's time goes."""

import gc
import statistics
import time

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import example  # noqa: F401
import plan
from run import Run

PACKAGES = ("torch", "triton", "tilemoe", "scattermoe", "sonic-moe")
# Kernels by a part of their name, the first that matches: what a step's time is spent on.
KINDS = {
    "experts": (
        "tilemoe", "group", "scatter2scatter", "index_select", "sort",
        # sonic-moe's
        "quack", "token_gather", "col_partial_sum", "metadata_compute",
    ),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "xmma"),
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor"),
    "copies of parameters": ("chunk_cat", "split_with_sizes", "memcpy", "copy_kernel"),
}  # fmt: skip
NAMED = 360  # characters of a kernel's name, of which templates take the first hundreds
IN_HEAD = ("products", "elementwise and other")  # kinds that, inside of its range, are the head's


def clear(device):
    """Gives back what an entry before held."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Milliseconds between two marks in the device's order of work."""

    def __init__(self, device):
        self.on_cuda, self.marks = device.type == "cuda", []

    def mark(self):
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def spans(self):
        """Of marks in pairs; the device has done all of them."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return [a.elapsed_time(b) if self.on_cuda else (b - a) * 1e3 for a, b in pairs]


class TimedRun(Run):
    """With a clock that runs in the update."""

    def __init__(self, args, mesh, device):
        super().__init__(args, mesh, device)
        self.clock = Clock(device)

    def update(self, *args):
        self.clock.mark()
        norm = super().update(*args)
        self.clock.mark()
        return norm


def kind(kernel):
    lowered = kernel.lower()
    found = (name for name, parts in KINDS.items() if any(part in lowered for part in parts))
    return next(found, "elementwise and other")


def by_kind(kernels, head):
    """kernels (name, begin, ms), head (begin, end) of its ranges -> ms by kind. What the name does
    not tell from others is the head's where it began in one of the head's ranges."""
    kinds = {}
    for name, begin, ms in kernels:
        of = kind(name)
        if of in IN_HEAD and any(first <= begin < last for first, last in head):
            of = "head"
        kinds[of] = kinds.get(of, 0.0) + ms
    return kinds


def profile(run, steps):
    """-> ms of a step by kind and by kernel, the largest first; what the profiler sees of it."""
    on_cuda = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            run.train()
        wait(run.device)
    on = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [event for event in recorded.events() if event.device_type == on]
    head = [(e.time_range.start, e.time_range.end) for e in events if e.name == "head"]
    kernels, calls = [], {}
    for event in events:
        if not event.is_user_annotation and event.name != "head":
            spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            kernels.append((event.name, event.time_range.start, spent / 1e3 / steps))
            count, ms = calls.get(event.name, (0, 0.0))
            calls[event.name] = count + 1, ms + kernels[-1][-1]
    largest = sorted(calls.items(), key=lambda of: -of[1][1])[:25]
    table = [{"kernel": n[:NAMED], "calls": count / steps, "ms": ms} for n, (count, ms) in largest]
    return {"kinds_ms": by_kind(kernels, head), "kernels": table}


def measure(run, warmup, steps, profiled):
    began = time.perf_counter()
    for _ in range(warmup):
        record, good = run.train()
        if not good:
            raise ValueError(f"loss or gradient is not finite: {record}")
    wait(run.device)
    entry = {"warmup_s": time.perf_counter() - began, "losses": [record["loss"]]}
    times, run.clock = [], Clock(run.device)
    for _ in range(steps):
        began = time.perf_counter()
        record, _ = run.train()
        wait(run.device)
        times.append(time.perf_counter() - began)
        entry["losses"].append(record["loss"])
    tokens = run.args.batch * run.config.context
    entry["ms"] = statistics.median(times) * 1e3
    entry["spread_ms"] = [min(times) * 1e3, max(times) * 1e3]
    entry["update_ms"] = statistics.median(run.clock.spans())
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


def entry_of(args, mesh, device, warmup_steps, measured_steps, profile):
    """Of a job's arguments, what was measured of it; or that it does not fit the device."""
    clear(device)
    run = None
    try:
        run = TimedRun(args, mesh, device)
        return measure(run, warmup_steps, measured_steps, profile)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a compiled graph's is just that
        if "out of memory" not in str(error):
            raise
        return {"does_not_fit": str(error).splitlines()[0]}
    finally:
        del run
