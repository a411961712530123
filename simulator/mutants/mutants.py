#!/usr/bin/env python3
"""Defects of our own kernels, made one at a time: what the simulator has to find.

  simulator/mutants/mutants.py list [PATTERN]        # all of them, by number and name
  simulator/mutants/mutants.py apply NAME DIR        # the sources with one defect, into DIR/src
  simulator/mutants/mutants.py run --build build/mutants [PATTERN]
  simulator/mutants/mutants.py build gpu --build build/gpu-mutants
  simulator/mutants/mutants.py gpu --programs DIR [PATTERN]
  simulator/mutants/mutants.py table                 # docs/mutants.md, from the results files

A defect is either a call that orders memory accesses and is dropped, found in the sources as they
are ("drop/sm90/mma.h:wgmma_fence"), or one of changes.py ("parity/full-sm90"). NAME may be its
number.

`run` builds the simulator once, in the folder BUILD, with every defect behind a number that is
chosen when the program starts. It simulates the cases without a defect, to see which defects'
places each comes by. Then it simulates those cases with each defect, the quickest first, with up to
--seeds seeds, until the defect is found. Of each defect it writes how it was found, by which seed,
and whether the output was still right. What the results file has of the same defects stays, and a
run that was cut off goes on. The sources of this checkout are not touched.

`build` only builds. It leaves the programs and their libraries in BUILD/programs: that folder is all
that `run --programs` and `gpu --programs` need, on a machine without a compiler.

`gpu` runs the kernels with each defect on this machine's GPU: by themselves, then under
compute-sanitizer's racecheck, and those of changes.py under its other tools too. DIR is
BUILD/programs of `build gpu`; a second program there, without defects, tells which cases come by a
defect's place.
"""

import argparse
import json
import pathlib
import sys

import builds
import gpu
import page
import search
from defects import ROOT, all_defects, find, line_of, write_sources
sys.path.append(str(ROOT / "benchmarks"))
from marks import marked  # noqa: E402

DEVICES = ["sm80", "sm80-on-90", "sm90", "sm100", "sm100-pairs", "sm80-on-90-whole", "sm90-whole",
           "sm100-whole"]
RESULTS = ROOT / "benchmarks" / "results" / "simulator_mutants.json"
GPU_RESULTS = RESULTS.with_name("gpu_mutants.json")


def write_table(check):
    old = page.PAGE.read_text()
    of_gpu = json.loads(GPU_RESULTS.read_text()) if GPU_RESULTS.exists() else None
    new = marked(page.page_with(page.text_of(json.loads(RESULTS.read_text()), of_gpu), old))
    if check and new != old:
        print(f"{page.PAGE.relative_to(ROOT)} differs from the results: "
              "run simulator/mutants/mutants.py table", file=sys.stderr)
        return 1
    if not check:
        page.PAGE.write_text(new)
    return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list")
    listing.add_argument("pattern", nargs="?", default="*", help="such as 'drop/sm90/*'")
    applying = commands.add_parser("apply")
    applying.add_argument("name")
    applying.add_argument("folder", type=pathlib.Path)
    making = argparse.ArgumentParser(add_help=False)
    making.add_argument("--build", type=pathlib.Path, help="the folder of the build")
    making.add_argument("--products", default=r"kBF16(?!.*(kPlain|float_out))", metavar="REGEX",
                        help="rows of products.inc that are built: fewer take less time, and "
                        "instances of one template have the same calls (default: %(default)s)")
    making.add_argument("--cmake", action="append", default=[], metavar="-DNAME=VALUE",
                        help="for the configuration")
    looking = argparse.ArgumentParser(add_help=False)
    looking.add_argument("pattern", nargs="?", default="*")
    looking.add_argument("--programs", type=pathlib.Path, metavar="DIR",
                         help="BUILD/programs of a build: nothing is built")
    looking.add_argument("--most-seconds", type=float, default=float("inf"),
                         help="end after this time, and go on when run again")
    looking.add_argument("--again", action="store_true", help="also what the file has")
    jobs = argparse.ArgumentParser(add_help=False)
    jobs.add_argument("--jobs", type=int, default=2, help="so many processes (%(default)s)")
    building = commands.add_parser("build", parents=[making, jobs])
    building.add_argument("kind", choices=builds.KINDS)
    running = commands.add_parser("run", parents=[making, looking, jobs])
    running.add_argument("--json", type=pathlib.Path, default=RESULTS, help="the results file")
    running.add_argument("--case", dest="cases", action="append", metavar="PATTERN",
                         help="the layer's cases (default: those of the reduced registry in bfloat16); "
                         "the router's are always simulated")
    running.add_argument("--device", dest="devices", action="append",
                         help=f"what is simulated (default: {', '.join(DEVICES)})")
    running.add_argument("--seeds", type=int, default=20)
    running.add_argument("--more-seeds", type=int, default=3,
                         help="that are tried for a finding beside a right output")
    running.add_argument("--ordered-seeds", type=int, default=3,
                         help="that are tried for the same with each of the other schedules")
    running.add_argument("--most-cases", type=int, default=2,
                         help="for each defect and device (default: %(default)s)")
    running.add_argument("--limit", type=int, default=300, help="seconds for a case and seed")
    on_gpu = commands.add_parser("gpu", parents=[looking, jobs])
    on_gpu.add_argument("--json", type=pathlib.Path, default=GPU_RESULTS, help="the results file")
    on_gpu.add_argument("--repeats", type=int, default=20,
                        help="how often the layer runs a case to compare bits (%(default)s)")
    on_gpu.add_argument("--limit", type=float, default=15,
                        help="seconds for a program before it counts as hanging (%(default)s)")
    on_gpu.add_argument("--tool-limit", type=float, default=60,
                        help="the same under a sanitizer (%(default)s)")
    writing = commands.add_parser("table")
    writing.add_argument("--check", action="store_true",
                         help="status 1 where the page differs from the files")
    args = parser.parse_args()
    if args.command in ("build", "run") and not (args.build or getattr(args, "programs", None)):
        parser.error("--build names a folder")
    if args.command == "gpu" and not args.programs:
        parser.error("--programs names the folder of a build for a GPU")
    if args.command == "build":
        print(builds.build(args.kind, args))
        return 0
    if args.command == "gpu":
        return gpu.run(args)
    if args.command == "list":
        for number, defect in enumerate(all_defects(), start=1):
            if defect.matches(args.pattern):
                print(f"{number:4}  {defect.id:44}  {line_of(defect)}")
        return 0
    if args.command == "apply":
        write_sources(find(args.name), args.folder)
        return 0
    if args.command == "table":
        return write_table(args.check)
    args.cases = args.cases or ["--reduced", "*/bfloat16"]
    args.devices = args.devices or DEVICES
    return search.run(args)


if __name__ == "__main__":
    sys.exit(main())
