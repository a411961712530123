"""Where, and of what, the numbers are."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]  # of the source tree, where this is one


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(l.split(": ")[1].strip() for l in lines if l.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def cores():
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def load_warning():
    """That other programs take the processor's time, before anything is measured; None if they do
    not."""
    load = os.getloadavg()[0]
    if load <= cores() / 2:
        return None
    return (f"warning: the load average is {load:.1f} on {cores()} cores: other programs disturb the "
            "times")  # fmt: skip


def _command(*words):
    """Its output, or None where it is not there or fails."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def commit():
    """Of the source tree that this runs from, `-dirty` where files differ; None where installed."""
    if not (ROOT / "include" / "tilemoe" / "tilemoe.h").exists():
        return None
    return _command("git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")


def build():
    """The commit of the tilemoe that this Python imports; None if the package contains none."""
    from tilemoe import _library

    written = _library.directory() / "commit.txt"
    return {"commit": written.read_text().strip() if written.exists() else None}


def versions(packages):
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass  # a source tree: the commit tells
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def available_bytes(device):
    if device == "cuda":
        torch.cuda.empty_cache()  # what torch holds back of earlier peers is to be had too
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        found = next(line for line in lines if line.startswith("MemAvailable"))
    return int(found.split()[1]) << 10


def describe(device, packages):
    """The keys that every entry has of the machine."""
    entry = {"commit": commit(), "versions": versions(packages)}
    if "tilemoe" in packages:
        built = build()
        entry |= {**built, "commit": built["commit"] or entry["commit"]}
    entry["load_average"] = os.getloadavg()[0]
    if device == "cuda":
        driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        name = torch.cuda.get_device_name()
        return {**entry, "device": name, "driver_version": driver and driver.splitlines()[0]}
    return {**entry, "device": _cpu_model(), "threads": torch.get_num_threads()}
