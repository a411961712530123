"""Run `tilemoe doctor`: check the library's results and speed on this machine.

The command writes one report file: info, the quick cases of the registry with each arch that the
GPU supports, the comparison of the archs' bits, and the bench of a small layer. Without a usable
GPU it does the same on the CPU and reports what is missing. The exit status is 1 if a result is
wrong, or a named GPU cannot be used.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import archs, info, installation
from .errors import DONE, FAILED, WrongUsage
from .output import StatusLine, check_writable

REPORT = "tilemoe-report.json"
_BENCH = {
    "cuda": ["few-rows", "--device", "cuda", "--rounds", "5", "--against", "torch-grouped_mm"],
    "cpu": ["cpu-t512", "--device", "cpu", "--rounds", "3", "--against", "none"],
}
_BENCH_LIMIT_S = 600
_COMMAND = (sys.executable, "-m", "tilemoe", "bench")


def add_options(parser):
    add = parser.add_argument
    add("--device", default="auto",
        help=("auto, cpu, cuda, or cuda:N in torch's numbering; auto selects the GPU if it is "
             "usable"))  # fmt: skip
    archs.add_options(parser, "Run only this arch; default: all that the GPU supports")
    add("--no-bench", action="store_true", help="Do not measure times")
    add("--json", metavar="FILE", default=REPORT, help=f"Report file ({REPORT})")


def _index(device):
    """Return the index of the GPU; None for the CPU."""
    if device == "cpu":
        return None
    found = re.fullmatch(r"auto|cuda(?::(\d{1,3}))?", device)
    if not found:
        raise WrongUsage(f"--device must be auto, cpu, cuda or cuda:N, got {device}")
    return int(found.group(1) or 0)


def _lacks(found, index):
    """Return what is missing for this GPU, as a list of installation.Missing."""
    lacks = installation.missing(found)
    if lacks:
        return lacks
    if index >= len(found.gpus):
        count = f"{len(found.gpus)} GPUs" if len(found.gpus) > 1 else "one GPU"
        return [installation.Missing(f"cuda:{index}: this machine has {count}", "name cuda:0")]
    if found.gpus[index].reason is not None:
        others = [f"cuda:{gpu.index}" for gpu in found.gpus if gpu.reason is None]
        return [installation.Missing(found.gpus[index].reason, f"use {' or '.join(others)}")]
    return []


def _visible(index):
    """Return CUDA_VISIBLE_DEVICES of children that use only this GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index].strip() if visible else str(index)


def _run_archs(names, limit_s, variables):
    """Run the archs on a GPU, and return a list of archs.ArchRun."""
    found, status = [], StatusLine()
    for name in names:
        found.append(archs.run(name, ("--device", "cuda", "--reduced"), limit_s,
                               archs.environment(name) | variables, status.draw))  # fmt: skip
        status.clear()
    return found


def _bench(kind, variables):
    """Return the measurements as JSON, and why there are none, else None."""
    from ..bench import records

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.jsonl"
        try:
            ended = subprocess.run(
                [*_COMMAND, *_BENCH[kind], "--json", str(file)], capture_output=True, text=True,
                timeout=_BENCH_LIMIT_S, env=os.environ | variables,
            )  # fmt: skip
            if ended.returncode != 0:
                return [], (ended.stderr or ended.stdout).strip()[-2000:]
            return [vars(one) for one in records.read(file)], None
        except subprocess.TimeoutExpired:
            return [], f"no output for {_BENCH_LIMIT_S} s"
        except (OSError, ValueError) as error:
            return [], str(error)


def _compare(runs):
    """Compare the first of the archs that ran with the others.

    Returns:
        The cases that differ, by arch, and the lines to print.
    """
    ran = [one for one in runs if one.skipped is None]
    differ, lines = {}, []
    for one in ran[1:]:
        differ[one.arch] = archs.differences(one, ran[0])
        lines += [f"  {line}" for line in differ[one.arch]]
        lines.append(f"{one.arch} and {ran[0].arch}: {archs.tensors_compared(one, ran[0])} tensors "
                     f"compared bit for bit, {len(differ[one.arch])} cases differ")  # fmt: skip
    return differ, lines


def _result(runs, differ, lacks, named):
    """Return whether everything passed, and the last line of the report."""
    ran = [one for one in runs if one.skipped is None]
    wrong = [one for one in ran if one.failures or differ.get(one.arch) or not one.cases]
    good = [one.arch for one in ran if one not in wrong]
    failed = [one.arch for one in wrong]
    if lacks and (named or not ran):
        failed.append("no usable GPU")
    elif not ran:
        failed.append("no usable arch")
    texts = ["FAILED: " + ", ".join(failed)] if failed else []
    texts += ["passed: " + ", ".join(good)] if good else []
    if lacks and not failed:
        texts.append("no usable GPU")
    return not failed, "; ".join(texts)


def _missing_lines(lacks):
    yield "Missing for a GPU:"
    for one in lacks:
        yield f"  {one.what}"
        yield f"    -> {one.how}"
    yield ""


def _times(measured, error):
    for one in measured:
        times = {name: value for name, value in one["values"].items() if name.endswith("_ms")}
        values = ", ".join(f"{name} {value[1] if isinstance(value, list) else value}"
                           for name, value in times.items())  # fmt: skip
        yield f"{one['name']}: {values}"
    if error is not None:
        yield f"no times: {error}"


def run(args):
    index, arch = _index(args.device), archs.arch_of(args)
    if index is None and arch is not None:
        raise WrongUsage("--arch requires a GPU; remove --device cpu")
    check_writable(args.json)
    began = time.time()
    found = installation.find()
    lacks = [] if index is None else _lacks(found, index)
    for line in [*(f"{name:10} {text}" for name, text in info.lines(found)), ""]:
        print(line)
    for line in _missing_lines(lacks) if lacks else ():
        print(line)

    on_gpu = index is not None and not lacks
    variables = {"CUDA_VISIBLE_DEVICES": _visible(index)} if on_gpu else {}
    named = args.device.startswith("cuda") or arch is not None
    runs, status = [], StatusLine()
    if on_gpu:
        runs = _run_archs([arch] if arch else archs.ARCHS, args.limit, variables)
    elif not named and found.operators_error is None:
        runs = [archs.run("cpu", ("--device", "cpu", "--reduced"), args.limit,
                          on_case=status.draw)]  # fmt: skip
        status.clear()
    if runs:
        print("Comparison with float64, quick cases, forward and backward:")
    differ, compared = _compare(runs)
    for line in [*(line for one in runs for line in one.lines(shown=5)), *compared]:
        print(line)

    measured, error = [], None
    if runs and not args.no_bench:
        measured, error = _bench("cuda" if on_gpu else "cpu", variables)
        print("\nTimes of a small layer (`tilemoe bench`):")
        for line in _times(measured, error):
            print(line)

    passed, result = _result(runs, differ, lacks, named)
    devices = [one.device for one in runs if one.device]
    report = {
        "result": result,
        "passed": passed,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.time() - began),
        "device": devices[0] if devices else None,
        **info.as_json(found),
        "archs": [one.as_json() for one in runs],
        "differences": [line for lines in differ.values() for line in lines],
        "bench": measured,
        "bench_error": error,
        "missing": [{"what": one.what, "how": one.how} for one in lacks],
    }
    Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nresult     {result}")
    print(f"report     {Path(args.json).resolve()}: attach it to an issue of {_tracker()}")
    return DONE if passed else FAILED


def _tracker():
    return installation.issues() or "the repository of your TileMoE package"
