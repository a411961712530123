#!/usr/bin/env python3
"""Defects of our own kernels, made one at a time: what the simulator has to find.

  simulator/mutants/mutants.py list [PATTERN]        # all of them, by number and name
  simulator/mutants/mutants.py apply NAME DIR        # the sources with one defect, into DIR/src
  simulator/mutants/mutants.py run --build build/mutants --json FILE --case NAME [PATTERN]

A defect is either a call that orders memory accesses and is dropped, found in the sources as they
are ("drop/sm90/mma.h:30"), or one of changes.py ("parity/full-sm90"). NAME may be its number.

`run` builds the simulator in the folder BUILD from the sources with each defect in turn, simulates
the cases with up to --seeds seeds, until a defect is found, and writes a results file: of each
defect how it was found, by which seed, and whether the output was still right. The sources of this
checkout are not touched. A defect that the compiler refuses is "not built".
"""

import argparse
import dataclasses
import fnmatch
import json
import pathlib
import re
import shutil
import subprocess
import sys

from changes import CHANGES

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUDA = pathlib.Path("src") / "cuda"
# Not ptx: the simulator has its own.
FOLDERS = ["core", "epilogue", "load", "rowwise", "schedule", "sm80", "sm90", "sm100", "step"]

# What orders accesses of memory, by the name that is called: instructions, and what our code makes
# of them. Not here: pin(), which orders a compiler's registers; setmaxnreg, which has no memory;
# tcgen05.relinquish_alloc_permit, without which another block's allocation waits;
# let_next_start(), without which the next kernel starts later; and whatever gives a value, such as a
# shuffle or a barrier's vote.
ORDERING = [
    "wgmma_fence", "wgmma_commit", "wgmma_wait", "mbarrier_arrive", "mbarrier_arrive_cluster",
    "mbarrier_arrive_expect_bytes", "mbarrier_wait", "cp_async_arrive", "fence_mbarrier_init",
    "fence_proxy_async", "tma_store_commit", "tma_store_wait_read", "tma_store_wait",
    "barrier_sync", "barrier_arrive", "cluster_sync", "__syncthreads", "__syncwarp",
    "__threadfence", "cudaGridDependencySynchronize", "wait_for_data", "wait_for_previous",
    "wait_empty", "wait_full", "wait", "wait_for_stores", "fill", "release", "release_previous",
    "release_block", "sync", "finish", "tcgen05_commit", "tcgen05_fence_before_sync",
    "tcgen05_fence_after_sync", "tensor_memory_allocate", "tensor_memory_free",
    "tensor_memory_wait_loads", "land",
]
# Of the same name, but an epilogue's arithmetic.
OTHER_CALLS = re.compile(r"(?:\w+\.)?finish\((?!D?\))")
# A call that is a statement by itself: after the end of another, a brace, a condition or `else`.
CALL = re.compile(
    r"(?:(?<=[;{})])|(?<=\belse))\s*"
    r"(?P<call>(?:\w+(?:<[^;(){}]*>)?(?:::|\.|->))*(?:template\s+)?"
    rf"(?P<name>{'|'.join(ORDERING)})(?:<[^;(){{}}]*>)?\((?:[^();]|\([^();]*\))*\))\s*;")


@dataclasses.dataclass(frozen=True)
class Defect:
    id: str
    file: pathlib.Path  # from the root
    begin: int  # of what is replaced, in the file
    end: int
    new: str

    def applied_to(self, text):
        return text[:self.begin] + self.new + text[self.end:]


def blank(found):
    return re.sub(r"[^\n]", " ", found.group())


def statements_of(text):
    """The text with comments, preprocessor lines and what concepts require blanked out, as long as
    it was."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^#[^\n]*", blank, text, flags=re.S | re.M)
    nested = r"(?:[^{}]|\{[^{}]*\})*"
    return re.sub(rf"(?<=[=&])\s*requires\s*\((?:[^()]|\([^()]*\))*\)\s*\{{{nested}\}}", blank, text)


def dropped_calls(root):
    for folder in FOLDERS:
        for file in sorted((root / CUDA / folder).rglob("*")):
            if file.suffix not in (".h", ".cu"):
                continue
            text = file.read_text()
            lines = {}
            for found in CALL.finditer(statements_of(text)):
                if OTHER_CALLS.match(found["call"]):
                    continue
                begin, end = found.span("call")
                line = text.count("\n", 0, begin) + 1
                lines[line] = lines.get(line, 0) + 1
                name = f"drop/{file.relative_to(root / CUDA).as_posix()}:{line}"
                if lines[line] > 1:
                    name += f".{lines[line]}"
                yield Defect(name, file.relative_to(root), begin, end, "(void)0")


def listed_changes(root):
    for change in CHANGES:
        file = CUDA / change.file
        text = (root / file).read_text()
        if text.count(change.old) != 1:
            sys.exit(f"mutants.py: error: {change.id}: its text stands {text.count(change.old)} "
                     f"times in {file}, not once; changes.py is to follow the sources")
        begin = text.index(change.old)
        yield Defect(change.id, file, begin, begin + len(change.old), change.new)


def all_defects(root=ROOT):
    return [*dropped_calls(root), *listed_changes(root)]


def line_of(defect, root=ROOT):
    """What the list shows: the call, or the first line of the text."""
    return (root / defect.file).read_text()[defect.begin:defect.end].strip().split("\n")[0].strip()


def find(name):
    defects = all_defects()
    for number, defect in enumerate(defects, start=1):
        if name in (defect.id, str(number)):
            return defect
    sys.exit(f"mutants.py: error: no defect is called {name}; `list` names them")


def write_sources(defect, folder):
    """src/ as it is here but for one file."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"mutants.py: error: {folder} is not empty")
    shutil.copytree(ROOT / "src", folder / "src")
    file = folder / defect.file
    file.write_text(defect.applied_to(file.read_text()))


# A line of tilemoe_simulate; what is wrong and what was found follow it.
OUTCOME = re.compile(r"^(?P<case>.+), seed (?P<seed>\d+): (?P<output>right|WRONG), "
                     r"(?P<findings>\d+) findings.*\n", re.MULTILINE)


def simulate(program, arguments, limit_s):
    """What the simulator says of one case and seed: {"findings": [...], "right": ..., "ended": ...}.
    A program that hangs, crashes or says nothing has found nothing in words."""
    try:
        said = subprocess.run([program, *arguments], text=True, capture_output=True,
                              timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"findings": 0, "right": None, "ended": f"not done in {limit_s} s"}
    ended = f"exit status {said.returncode}"
    outcome = OUTCOME.search(said.stdout)
    if not outcome:
        return {"findings": 0, "right": None, "ended": f"{ended}: {said.stderr.strip()[-200:]}"}
    lines = [line for line in said.stdout[outcome.end():].splitlines() if line]
    first = next((i for i, line in enumerate(lines) if not line.startswith("  ")), 0)
    return {"findings": int(outcome["findings"]), "right": outcome["output"] == "right",
            "ended": ended, "text": " ".join(line.strip() for line in lines[first:first + 5])}


def verdict(defect, program, args):
    """The first finding; where there is none, whether an output was wrong all the same."""
    result = {"defect": defect.id, "found": False, "wrong": False}
    for seed in range(1, args.seeds + 1):
        for case in args.cases:
            said = simulate(program, [case, "--device", args.device, "--seed", str(seed)],
                            args.limit)
            where = {"case": case, "seed": seed, "right": said["right"]}
            if said["findings"] > 0:
                return {**result, "found": True, **where, "finding": said["text"]}
            if said["right"] is not True and not result["wrong"]:
                result = {**result, "wrong": True, **where, "ended": said["ended"]}
    return result


def run(args):
    """Builds in a copy of the checkout, so that this one stays as it is."""
    tree = args.build.resolve() / "tree"
    if not tree.exists():
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        for name in files.stdout.decode().split("\0")[:-1]:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    build = tree / "build" / "mutants"  # as deep as others: ccache has what is unchanged
    configure = ["cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 *args.cmake]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    make = ["ninja", "-C", build, f"-j{args.jobs}", args.target]
    defects = [d for d in all_defects(tree) if fnmatch.fnmatch(d.id, args.pattern)]
    results = []
    for number, defect in enumerate([None, *defects]):
        file = defect and tree / defect.file
        original = file and file.read_text()
        try:
            if defect:
                file.write_text(defect.applied_to(original))
            built = subprocess.run(make, capture_output=True, text=True)
            if not defect:  # the kernels as they are: nothing is to be found
                if built.returncode:
                    sys.exit(f"mutants.py: error: {args.target} is not built: "
                             f"{built.stdout[-2000:]}")
                defect = Defect("none", pathlib.Path(), 0, 0, "")
            program = next(path for path in build.rglob(args.target) if path.is_file())
            result = ({"defect": defect.id, "found": False, "not_built": True}
                      if built.returncode else
                      verdict(defect, program, args))
        finally:
            if original is not None:
                file.write_text(original)
        results.append(result)
        print(f"{number}/{len(defects)} {json.dumps(result)}", file=sys.stderr, flush=True)
        args.json.write_text(json.dumps(report_of(results, args), indent=1) + "\n")
    found = [result for result in results if result["found"]]
    print(f"{len(defects)} defects, {len(found)} found, "
          f"{sum(result['right'] is True for result in found)} of them while the output was right")
    return 0 if results[0] == {"defect": "none", "found": False, "wrong": False} else 1


def report_of(results, args):
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT,
                            text=True, capture_output=True).stdout.strip()
    return {"commit": commit, "device": args.device, "cases": args.cases, "seeds": args.seeds,
            "results": results}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list")
    listing.add_argument("pattern", nargs="?", default="*", help="such as 'drop/sm90/*'")
    applying = commands.add_parser("apply")
    applying.add_argument("name")
    applying.add_argument("folder", type=pathlib.Path)
    running = commands.add_parser("run")
    running.add_argument("pattern", nargs="?", default="*")
    running.add_argument("--build", type=pathlib.Path, required=True)
    running.add_argument("--json", type=pathlib.Path, required=True, help="the results file")
    running.add_argument("--case", dest="cases", action="append", required=True,
                         help="that is simulated; may be given more than once")
    running.add_argument("--device", default="sm90", help="that is simulated")
    running.add_argument("--seeds", type=int, default=20)
    running.add_argument("--limit", type=int, default=120, help="seconds for a case and seed")
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--target", default="tilemoe_simulate", help="the simulator's program")
    running.add_argument("--cmake", action="append", default=[], metavar="-DNAME=VALUE",
                         help="for the configuration")
    args = parser.parse_args()
    if args.command == "list":
        for number, defect in enumerate(all_defects(), start=1):
            if fnmatch.fnmatch(defect.id, args.pattern):
                print(f"{number:4}  {defect.id:44}  {line_of(defect)}")
        return 0
    if args.command == "apply":
        write_sources(find(args.name), args.folder)
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
