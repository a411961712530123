"""Run `tilemoe check`: run the cases of the registry on a device and print their errors.

For each tensor the command prints the error against float64 and its limit. The exit status is 1 if
an error exceeds its limit. With --against the command runs two archs of the GPU, each in a child
process, and also compares their results bit for bit.
"""

import argparse
import json
import os

from . import archs
from .errors import DONE, FAILED, Failed, WrongUsage
from .installation import version
from .output import StatusLine, check_writable, table, write
from .registry import REDUCED_HELP, Registry, Results, operators, why_no_layer

MAXIMA = {"repeat": 1_000_000, "threads": 4096, "seed": 2**63 - 1}
TITLES = ("case", "tensor", "Frobenius", "limit", "worst row", "limit", "")


def add_options(parser):
    add = parser.add_argument
    add("patterns", nargs="*", metavar="case",
        help="Cases to run: names or patterns such as 'rounded-*'; default: all")  # fmt: skip
    add("--case", action="extend", nargs="+", default=[], metavar="NAME", help="the same")
    add("--dtype", choices=("all", "float32", "bfloat16", "float16"), default="all",
        help="Only the cases of this dtype")  # fmt: skip
    add("--pass", dest="passes", choices=("forward", "all"), default="all",
        help="Passes to run: forward, or all with backward")  # fmt: skip
    add("--reduced", action="store_true", help=REDUCED_HELP)
    add("--seed", type=int, default=1, help="Random seed")
    add("--repeat", type=int, default=0, metavar="N",
        help="Run each case N more times on a busy device and require equal bits")  # fmt: skip
    add("--list", action="store_true", help="List the cases and exit")
    add("--json", metavar="FILE", help="Write the results to this file as JSON")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="Device; auto selects the GPU if it is usable")  # fmt: skip
    add("--threads", type=int, default=0,
        help="Threads of the CPU backend; 0: torch's number")  # fmt: skip
    archs.add_options(parser, "Run the kernels of this arch")
    add("--against", choices=archs.ARCHS, metavar="ARCH",
        help="Run the cases with --arch and with this arch, each in a separate process, and "
             "compare their bits")  # fmt: skip
    add("--lines", action="store_true", help=argparse.SUPPRESS)  # for archs.run()


def _device(wanted):
    if wanted == "cpu":
        return "cpu"
    reason = why_no_layer()
    if wanted == "cuda" and reason is not None:
        raise Failed(f"--device cuda: {reason}; `tilemoe doctor` reports what is missing")
    return "cpu" if reason is not None else "cuda:0"


def _number(value):
    return "nan" if value is None else f"{value:.2e}"


def _rows(results):
    for row in results.all["rows"]:
        figures = ("frobenius", "frobenius_limit", "worst_row", "worst_row_limit")
        yield (row["case"], row["tensor"], *(_number(row[key]) for key in figures),
               "ok" if row["passed"] else "FAILED")  # fmt: skip


def _list(cases):
    titles = ("case", "rows", "d", "n", "E", "K")
    for line in table(titles, [[str(case[key]) for key in titles] for case in cases], left={0}):
        print(line)


def _print(results, args, description):
    for line in table(TITLES, list(_rows(results)), left={0, 1, 6}):
        print(line)
    failures = results.all["failures"]
    of = " of the forward pass alone" if args.passes == "forward" else ""
    count = f"{results.cases} cases, {results.tensors} tensors{of}, {len(failures)} failures"
    if args.repeat:
        count += f", each case run {args.repeat} times"
    if results.all["refused"]:
        count += f", {results.all['refused']} of them refused"
    spoiled = f"{results.all['spoilings']} results were corrupted on purpose"
    if results.all["impossible"]:
        spoiled += f"; {len(results.all['impossible'])} cannot be"
    print(f"\n{description}\n{count}\n{spoiled}")
    for failure in failures:
        print(f"  {failure}")


def _words(args):
    """Return the command line of a child that runs the same cases."""
    words = ["--device", "cuda", "--dtype", args.dtype, "--pass", args.passes, "--seed", args.seed,
             "--repeat", args.repeat, *(["--reduced"] if args.reduced else [])]  # fmt: skip
    return [*words, "--", *args.patterns, *args.case]


def _compare(args, arch):
    if arch is None:
        raise WrongUsage("--against requires --arch, the arch to compare with")
    if arch == args.against:
        raise WrongUsage(f"--against must differ from --arch, got {arch}")
    check_writable(args.json)
    runs, status = [], StatusLine()
    for name in (arch, args.against):
        found = archs.run(name, _words(args), args.limit, archs.environment(name), status.draw)
        status.clear()
        if found.skipped is not None:
            raise Failed(
                f"--arch {name}: {found.skipped}; `tilemoe doctor` reports what is missing"
            )
        runs.append(found)
    differences, compared = archs.differences(*runs), archs.tensors_compared(*runs)
    for line in (*runs[0].lines(), *runs[1].lines(), *differences):
        print(line)
    print(f"\n{runs[0].device}\n{compared} tensors compared bit for bit, "
          f"{len(differences)} cases differ")  # fmt: skip
    summary = {"version": version(), "pass": args.passes, "seed": args.seed, "repeats": args.repeat,
               "archs": [one.as_json() for one in runs], "tensors_compared": compared,
               "differences": differences}  # fmt: skip
    write(args.json, json.dumps(summary, indent=1) + "\n")
    good = compared and not differences and not any(one.failures for one in runs)
    return DONE if good else FAILED


def _emit(args):
    """Run the child of archs.run()."""
    try:
        operators()
        if args.device != "cpu" and (reason := why_no_layer()) is not None:
            archs.emit(skipped=reason)
            return DONE
        registry = Registry("cpu" if args.device == "cpu" else "cuda:0")
        cases = registry.cases(args.patterns + args.case, args.dtype, args.reduced)
    except WrongUsage as error:
        archs.emit(wrong_usage=str(error))
    except Failed as error:
        archs.emit(skipped=str(error))
    else:
        archs.emit_cases(
            lambda case: registry.run(case, args.seed, args.repeat, args.passes == "all"),
            registry.description(), [case["case"] for case in cases],
        )  # fmt: skip
    return DONE


def run(args):
    arch = archs.arch_of(args)
    if arch is not None and args.device == "cpu":
        raise WrongUsage("--arch requires a GPU; remove --device cpu")
    for name, maximum in MAXIMA.items():
        if not 0 <= getattr(args, name) <= maximum:
            raise WrongUsage(f"--{name} must be in [0, {maximum}], got {getattr(args, name)}")
    if args.lines:
        return _emit(args)
    operators()  # raises if they cannot be loaded
    if args.against is not None and not args.list:
        return _compare(args, arch)
    if arch is not None:  # the library reads it at the first use of a GPU
        os.environ.update(archs.environment(arch))
        os.environ.pop("TILEMOE_KIT", None)
        args.device = "cuda"
    registry = Registry("cpu" if args.list else _device(args.device))
    cases = registry.cases(args.patterns + args.case, args.dtype, args.reduced)
    if args.list:
        _list(cases)
        return DONE
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    check_writable(args.json)
    results, status = Results(), StatusLine()
    for index, case in enumerate(cases):
        status.draw(f"{index + 1}/{len(cases)} {case['case']}")
        results.add(registry.run(case["case"], args.seed, args.repeat, args.passes == "all"))
    status.clear()
    description = registry.description()
    _print(results, args, description)
    summary = {"version": version(), "device": description, "pass": args.passes, "seed": args.seed,
               "repeats": args.repeat, "cases": results.cases}  # fmt: skip
    write(args.json, json.dumps({**summary, **results.all}, indent=1) + "\n")
    return FAILED if results.all["failures"] else DONE
