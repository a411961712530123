"""python -m tilemoe.bench (or `tilemoe bench`): times the layer beside other implementations of it.

Each round runs every peer once, one after the other, with cold caches; numbers are medians and
quartiles over the rounds, ratios are those of the rounds' ratios. A peer that is not installed, or
that does not compute the layer, is left out by name. See docs/benchmarks.md.
"""

import argparse
import json
import pathlib
import sys
import time
from dataclasses import replace

import torch

from .._command.errors import FAILED, WRONG_USAGE, Failed
from . import machine, session
from .ahead import compile_for
from .cases import CASES, DTYPES, SHAPE, Case
from .measure import PASSES
from .peers import TileMoE, all_peers
from .report import table


def _parser(prog):
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="every case, and every peer with what it lacks here")
    add("--config", nargs="+", metavar="NAME", help="cases; else all of the device")
    add("--shape", nargs=5, type=int, metavar=tuple(SHAPE), help="a case of your own")
    add("--device", choices=["cpu", "cuda"], help="else cuda where there is one")
    add("--dtype", choices=DTYPES, help="else float32 on the CPU, bfloat16 on a GPU")
    add("--pass", dest="passes", choices=PASSES, default="both")
    add("--against", nargs="*", metavar="PEER", help="peers; else all that are there")
    add("--python", nargs="+", default=[], metavar="PEER=PYTHON",
        help="run a peer in another Python, where its packages do not fit this one's")  # fmt: skip
    add("--packages", nargs="+", default=[], metavar="PEER=DIR",
        help="run a peer in a process of its own, with a folder of packages before others")  # fmt: skip
    add("--compile-only", action="store_true",
        help="have those of --packages compile for the cases, several at once; time nothing")  # fmt: skip
    add("--rounds", type=int, default=15)
    add("--threads", type=int, default=0, help="on the CPU; else torch's own number")
    add("--kernels", action="store_true",
        help="on a GPU also the time of each kernel, from torch's profiler")  # fmt: skip
    add("--json", type=pathlib.Path, help="write the entries to this file")
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    add("--granularity", action="store_true",
        help="also measure the memory at other n, at constant n K and n E")  # fmt: skip
    add("--plots", type=pathlib.Path, metavar="DIR",
        help="draw what was measured: throughput, --kernels, --granularity")
    add("--from", dest="source", nargs="+", type=pathlib.Path, metavar="FILE",
        help="draw JSON files, this bench's or `tilemoe bench`'s, and measure nothing")  # fmt: skip
    return parser


def _cases(args):
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Failed("--device cuda: torch sees no GPU here")
    if args.shape:
        chosen = [Case("custom", *args.shape, dtype="float32" if device == "cpu" else "bfloat16")]
    elif args.config:
        if unknown := [name for name in args.config if name not in CASES]:
            raise ValueError(f"--config {unknown[0]}: not one of {', '.join(CASES)}")
        chosen = [CASES[name] for name in args.config]
    else:
        chosen = [case for case in CASES.values() if case.device == device]
    return [replace(case, device=device, dtype=args.dtype or case.dtype) for case in chosen]


def _peers(args):
    """Classes, TileMoE first, and the places of those that run in another process."""
    known = all_peers()
    pythons, packages = (
        dict(word.partition("=")[::2] for word in words) for words in (args.python, args.packages)
    )
    wanted = args.against
    if wanted is None:
        wanted = [name for name, peer in known.items() if not peer.only_if_named]
    for option, names in (("--against", wanted), ("--python", pythons), ("--packages", packages)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{option} {unknown[0]}: not one of {', '.join(known)}")
    for name, folder in packages.items():
        if not pathlib.Path(folder).is_dir():
            raise ValueError(f"--packages {name}={folder}: no such folder")
    places = {
        name: session.Place(
            pythons.get(name, sys.executable),
            pathlib.Path(packages[name]) if name in packages else None,
            known[name].variables(),
        )
        for name in {**pythons, **packages}
    }
    names = dict.fromkeys([TileMoE.name, *wanted])
    return [known[name] for name in names], places


def _list():
    for case in CASES.values():
        shape = " ".join(f"{letter}={size}" for letter, size in case.shape.items())
        more = ", zipf" if case.zipf else f", rounding {case.rounding}" if case.rounding else ""
        print(f"{case.name:18} {shape}, {case.dtype}, {case.device}{more}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = next(case for case in CASES.values() if case.device == device)
    for name, peer in all_peers().items():
        print(f"{name:26} {peer.missing(case) or 'available'}")


def _writable(path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise Failed(f"--json {path}: {error.strerror}") from None


def _plots(folder):
    try:
        from . import plots
    except ImportError:
        raise Failed("--plots needs matplotlib: pip install 'tilemoe[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    return plots


def _say(line):
    print(f"  {line}", file=sys.stderr, flush=True)


def _measure(args):
    peers, places = _peers(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    cases = _cases(args)
    if args.compile_only:
        compile_for(cases, peers, places, _say)
        return []
    if warning := machine.load_warning():
        _say(warning)
    entries, began = [], time.monotonic()
    for index, case in enumerate(cases):
        found = session.run(
            case, peers, passes=args.passes, rounds=args.rounds, threads=args.threads,
            places=places, kernels=args.kernels, granularity=args.granularity, say=_say,
        )  # fmt: skip
        for entry in found:
            entry["commit"] = args.commit or entry["commit"]
        print(table(found), flush=True)
        entries += found
        if args.json:  # after each, for a run that is cut off
            args.json.write_text(json.dumps(entries, indent=1) + "\n")
        _say_what_is_left(cases, index + 1, time.monotonic() - began, args.passes)
    return entries


def _say_what_is_left(cases, done, seconds, passes):
    """The time of the cases that follow, by their operations."""
    flop = [case.flop(passes) for case in cases]
    if done < len(cases):
        left = seconds * sum(flop[done:]) / sum(flop[:done])
        _say(f"{done} of {len(cases)} cases done; about {session.duration(left)} for the others")


def _fail(status, prog, error):
    name = prog.removeprefix("python -m ").split()[0]  # "tilemoe.bench", "tilemoe"
    print(f"{name}: error: {error}", file=sys.stderr)
    sys.exit(status)


def main(argv=None, prog="python -m tilemoe.bench"):
    """Runs the command line `argv`, else the process's. Exits with status 1 if the work failed, 2 if
    the command line is wrong."""
    parser = _parser(prog)
    args = parser.parse_args(argv)
    try:
        if args.list:
            return _list()
        if args.rounds < 1:
            raise ValueError("--rounds: at least 1")
        if args.source and not args.plots:
            raise ValueError("--from draws: --plots says where to")
        plots = _plots(args.plots) if args.plots else None
        if args.json:
            _writable(args.json)
        if args.source:
            entries = [entry for file in args.source for entry in json.loads(file.read_text())]
        else:
            entries = _measure(args)
    except ValueError as error:
        _fail(WRONG_USAGE, prog, error)
    except (OSError, Failed, session.LeftOut) as error:
        _fail(FAILED, prog, error)
    if args.json and entries:
        args.json.write_text(json.dumps(entries, indent=1) + "\n")
        print(f"written to {args.json}")
    if plots:
        for path in plots.draw(entries, args.plots):
            print(f"drawn to {path}")


if __name__ == "__main__":
    main()
