"""Run `tilemoe info`: print versions, libraries, and devices or why they are unusable."""

import json

from . import installation
from .errors import DONE


def add_options(parser):
    parser.add_argument("--json", action="store_true", help="Print JSON instead of text")


def _backends(found):
    cpu = {"name": "cpu", "available": found.operators_error is None}
    if found.operators_error is not None:
        cpu["reason"] = found.operators_error
    lacks = installation.missing(found)
    cuda = {"name": "cuda", "available": not lacks}
    if lacks:
        cuda["reason"] = "; ".join(one.what for one in lacks)
    else:
        cuda["arch"] = next(gpu.arch for gpu in found.gpus if gpu.reason is None)
    return [cpu, cuda]


def as_json(found):
    devices = [{"name": "cpu", "threads": found.threads}]
    for gpu in found.gpus:
        devices.append(
            {"name": f"cuda:{gpu.index}", "model": gpu.name, "memory_bytes": gpu.memory_bytes,
             "capability": "{}.{}".format(*gpu.capability), "arch": gpu.arch, "reason": gpu.reason}
        )  # fmt: skip
    return {
        "version": found.version, "commit": found.commit, "libraries": found.libraries,
        "torch": found.torch, "torch_cuda": found.torch_cuda, "python": found.python,
        "driver": found.driver, "driver_cuda": found.driver_cuda, "devices": devices,
        "backends": _backends(found),
    }  # fmt: skip


def lines(found):
    """Return (name, text) lines, those of tilemoe.show_config() if the operators are loaded."""
    if found.operators_error is None:
        from .. import _config

        rows = _config.lines()
    else:
        rows = [
            ("tilemoe", found.version),
            ("libraries", found.libraries),
            ("torch", found.torch or "not installed"),
            ("python", found.python),
            ("CPU", f"no: {found.operators_error}"),
            ("CUDA", "no: the operators cannot be loaded"),
        ]
    rows.insert(1, ("commit", found.commit))
    cuda = found.driver_cuda and f"CUDA {found.driver_cuda}"
    driver = ", ".join(filter(None, (found.driver, cuda)))
    rows.append(("driver", driver or "none: libcuda.so.1 cannot be loaded"))
    return rows


def run(args):
    found = installation.find()
    if args.json:
        print(json.dumps(as_json(found), indent=2))
        return DONE
    for name, text in lines(found):
        print(f"{name:10} {text}")
    if installation.missing(found):
        print("\n`tilemoe doctor` reports what is missing for a GPU and how to install it.")
    return DONE
