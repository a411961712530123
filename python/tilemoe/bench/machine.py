"""Describe the device, the versions and the commit of a measurement."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]  # the source tree, if it is one


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(l.split(": ")[1].strip() for l in lines if l.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_warning():
    """Return a warning if other programs use the processor before the measurement, else None."""
    load = os.getloadavg()[0]
    if load <= cores() / 2:
        return None
    return (f"warning: the load average is {load:.1f} on {cores()} cores: other programs affect "
            "the times")  # fmt: skip


def _command(*words):
    """Return the output of a command, or None if it is missing or fails."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def commit():
    """Return the commit of this source tree, `-dirty` if files differ; None if installed."""
    if not (ROOT / "include" / "tilemoe" / "tilemoe.h").exists():
        return None
    return _command("git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")


def _build_commit():
    """Return the commit of the imported tilemoe; None if the package has none."""
    from tilemoe import _library

    written = _library.directory() / "commit.txt"
    return written.read_text().strip() if written.exists() else None


def versions(packages):
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass  # a source tree: its commit is read instead
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def available_bytes(device):
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        found = next(line for line in lines if line.startswith("MemAvailable"))
    return int(found.split()[1]) << 10


def describe(device, packages):
    """Return {"device", "versions", "commit"} of a measurement; the commit is TileMoE's or None."""
    found = {"commit": None, "versions": versions(packages)}
    if "tilemoe" in packages:
        found["commit"] = _build_commit() or commit()
        if "tilemoe" not in found["versions"]:
            from tilemoe import _library

            found["versions"]["tilemoe"] = _library.VERSION
    if device == "cuda":
        driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["versions"]["driver"] = driver.splitlines()[0] if driver else "unknown"
        return {**found, "device": torch.cuda.get_device_name()}
    threads = torch.get_num_threads()
    return {**found, "device": f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"}
