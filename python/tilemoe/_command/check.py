"""`tilemoe check`: runs the cases of the registry on a device and prints the error of each tensor
against float64, and its limit. Exit status 1 if an error is above its limit. With --against: runs
two archs of the GPU, each in a child process, and also compares their results bit for bit."""

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
        help="cases to run: names or patterns such as 'rounded-*'; without them all")  # fmt: skip
    add("--case", action="extend", nargs="+", default=[], metavar="NAME", help="the same")
    add("--dtype", choices=("all", "float32", "bfloat16", "float16"), default="all",
        help="only the cases of this type")  # fmt: skip
    add("--pass", dest="passes", choices=("forward", "all"), default="all",
        help="what to run: forward, or all with backward")  # fmt: skip
    add("--reduced", action="store_true", help=REDUCED_HELP)
    add("--seed", type=int, default=1, help="seed of the random numbers")
    add("--repeat", type=int, default=0, metavar="N",
        help="also run each case N times on a busy device: the bits must stay the same")  # fmt: skip
    add("--list", action="store_true", help="list the cases and do nothing else")
    add("--json", metavar="FILE", help="write the results to this file as JSON")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where to run; auto for the GPU if it can be used")  # fmt: skip
    add("--threads", type=int, default=0,
        help="threads of the CPU backend; 0 for torch's own number")  # fmt: skip
    archs.add_options(parser, "run the kernels of this arch")
    add("--against", choices=archs.ARCHS, metavar="ARCH",
        help="run the cases by --arch and by this arch, each in a process of its own, and compare "
        "their bits")  # fmt: skip
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
    spoiled = f"{results.all['spoilings']} results were spoiled on purpose"
    if results.all["impossible"]:
        spoiled += f"; {len(results.all['impossible'])} cannot be"
    print(f"\n{description}\n{count}\n{spoiled}")
    for failure in failures:
        print(f"  {failure}")


def _words(args):
    """The command line of a child that runs the same cases."""
    words = ["--device", "cuda", "--dtype", args.dtype, "--pass", args.passes, "--seed", args.seed,
             "--repeat", args.repeat, *(["--reduced"] if args.reduced else [])]  # fmt: skip
    return [*words, "--", *args.patterns, *args.case]


def _compare(args, arch):
    if arch is None:
        raise WrongUsage("--against needs --arch, the arch that is compared")
    if arch == args.against:
        raise WrongUsage(f"--against {arch}: an arch is compared with another one")
    check_writable(args.json)
    runs, status = [], StatusLine()
    for name in (arch, args.against):
        found = archs.run(name, _words(args), args.limit, archs.environment(name), status.draw)
        status.clear()
        if found.skipped is not None:
            raise Failed(f"--arch {name}: {found.skipped}; `tilemoe doctor` reports what is missing")
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
    """The main function of the child of archs.run()."""
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
        raise WrongUsage("--arch selects kernels of a GPU: leave out --device cpu")
    for name, maximum in MAXIMA.items():
        if not 0 <= getattr(args, name) <= maximum:
            raise WrongUsage(f"--{name} is {getattr(args, name)}, expected 0 to {maximum}")
    if args.lines:
        return _emit(args)
    operators()  # or why they cannot be loaded
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
