"""`tilemoe doctor`: whether the library computes right on this machine's GPU, as a report to paste
into an issue; without a usable GPU, what is missing and how to get it. Exit status 1 then, and if a
result is wrong."""

import json
import re
import time

from . import info, installation
from .errors import DONE, FAILED, WrongUsage
from .output import StatusLine, check_writable, write
from .registry import Registry, Results

KITS = ("sm80", "sm90")
DTYPES = ("bfloat16", "float16")
FAILURES_SHOWN = 5


def add_options(parser):
    add = parser.add_argument
    add("--device", default="cuda", help="the GPU: cuda, or cuda:N as torch counts them")
    add("--kit", choices=("all", *KITS), default="all",
        help="which kernels: sm80, sm90, or all that the GPU runs, whatever TILEMOE_KIT says")
    add("--out", metavar="FILE", help="write the report to this file too")
    add("--json", metavar="FILE", help="write the numbers to this file as JSON")


def _index(device):
    found = re.fullmatch(r"cuda(?::(\d{1,3}))?", device)
    if not found:
        raise WrongUsage(
            f"--device {device}: expected cuda or cuda:N; `tilemoe check --device cpu` compares the "
            "CPU's results with float64"
        )
    return int(found.group(1) or 0)


def _lacks(found, index):
    """[installation.Missing] for this GPU."""
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


def _check_kit(registry, kit, cases):
    """What a kit computed, as the C++ doctor's JSON has it."""
    results, status, began = Results(), StatusLine(), time.monotonic()
    broken = []
    for index, case in enumerate(cases):
        status.draw(f"{kit} {index + 1}/{len(cases)} {case}")
        try:
            results.add(registry.run(case))
        except RuntimeError as error:  # the GPU does no more for this process
            broken = [f"{case}: {error}; the cases after it were not run"]
            break
    status.clear()
    return {"kit": kit, "cases": results.cases, "tensors": results.tensors,
            "seconds": time.monotonic() - began,
            "failures": broken + results.all["failures"]}  # fmt: skip


def _examine(index, wanted):
    """[results of a kit] on a GPU."""
    from .. import _config
    from .._config import set_kit

    registry = Registry(f"cuda:{index}")
    cases = [case["case"] for dtype in DTYPES for case in registry.cases((), dtype, True)]
    found = []
    try:
        for kit in KITS if wanted == "all" else (wanted,):
            try:
                set_kit(kit)
                reason = _config.kit_of(index)[1]
            except NotImplementedError as error:  # the build does not have it
                reason = str(error)
            found.append(
                {"kit": kit, "skipped": reason} if reason else _check_kit(registry, kit, cases)
            )
    finally:
        set_kit(None)
    return found


def _verdict(kits):
    ran = [one for one in kits if one.get("cases") or one.get("failures")]
    names = {good: ", ".join(one["kit"] for one in ran if (not one["failures"]) == good)
             for good in (True, False)}  # fmt: skip
    if not ran:
        return "FAILED: no kit runs here"
    if names[False]:
        return f"FAILED: {names[False]}" + (f"; passed: {names[True]}" if names[True] else "")
    return f"passed: {names[True]}"


def _kit_lines(one):
    if "skipped" in one:
        yield f"{one['kit']}: not run: {one['skipped']}"
        return
    failures = one["failures"]
    yield (f"{one['kit']}: {one['cases']} cases, {one['tensors']} tensors, "
           f"{len(failures)} failures, {one['seconds']:.0f} s")  # fmt: skip
    for failure in failures[:FAILURES_SHOWN]:
        yield f"  {failure}"
    if len(failures) > FAILURES_SHOWN:
        yield f"  and {len(failures) - FAILURES_SHOWN} more"


def _missing_lines(lacks, cpu_works):
    yield "Missing for a GPU:"
    for one in lacks:
        yield f"  {one.what}"
        yield f"    -> {one.how}"
    if cpu_works:
        yield ""
        yield "`tilemoe check --device cpu` compares the CPU's results with float64."


def run(args):
    index = _index(args.device)
    check_writable(args.out)
    check_writable(args.json)
    found = installation.find()
    lacks = _lacks(found, index)
    kits = [] if lacks else _examine(index, args.kit)
    if lacks:
        verdict = "FAILED: no GPU can be used"
    else:
        verdict = _verdict(kits)
    passed = not lacks and verdict.startswith("passed")
    report = [f"{name:10} {text}" for name, text in info.lines(found)]
    report.append("")
    if lacks:
        report += _missing_lines(lacks, found.operators_error is None)
    else:
        report.append("Against float64, the reduced registry, forward and backward:")
        report += [line for one in kits for line in _kit_lines(one)]
    report += ["", f"{'verdict':10} {verdict}"]
    text = "\n".join(report) + "\n"
    print(text, end="")
    write(args.out, text)
    numbers = {**info.as_json(found), "kits": kits, "passed": passed, "verdict": verdict,
               "missing": [{"what": one.what, "how": one.how} for one in lacks]}  # fmt: skip
    write(args.json, json.dumps(numbers, indent=2) + "\n")
    return DONE if passed else FAILED
