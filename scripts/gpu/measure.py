#!/usr/bin/env python3
"""Measure the results files again on a GPU machine, part by part.

  scripts/gpu/measure.py --list                      # parts, seconds, files, and what is current
  scripts/gpu/measure.py --programs DIR --wheel WHEEL --packages DIR --peers DIR --out OUT
  scripts/gpu/measure.py --merge OUT/measured.jsonl  # into benchmarks/results

A part's name measures its items, PART/ITEM one of them. The parts are in the order of their use.
Without names, a machine with one GPU measures the parts of one GPU, and one with several GPUs the
parts of several. A part ends within 10 minutes. It is started if half of its time is left of --seconds;
an item that would take longer ends then, without a line. On one GPU `peers` needs two calls and
`recipes` six; on several GPUs, if `recipes` is named, each runs one of its trainings at a time. An
item whose line in benchmarks/results has the hash of the present sources is current and is skipped,
so that an interrupted command continues after --merge. The build and the wheel must be of the present
sources.

--side-by-side first measures the parts of one GPU at the same time, each on a GPU of its own, into
OUT/PART. Also, with CUDA_VISIBLE_DEVICES, commands that share a machine measure on their own GPUs.
--prepare compiles sonic-moe's kernels and makes the corpora, and measures nothing: the first takes
five to eight minutes per quack, in the background of other parts. It runs kernels too: give it
another GPU than parts that measure. It logs into OUT/prepare.

OUT has two files: measured.jsonl, written after each item, and log.txt, what the programs printed,
for example the tiles that sonic-moe chose. --peers is a folder of packages (pip install --target):
sonic-moe with the newest quack, sonic-moe-release with quack 0.3.11, and scattermoe. It must be in a
folder named site-packages, by which quack recognises other packages' functions. The exit status is 1
if an item failed or was skipped without --seconds being over.
"""

import argparse
import dataclasses
import os
import pathlib
import queue
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import groups
import parts
import run
import side_by_side
from parts import HELPERS, PARTS, ROOT, digest, records
from stages import AT_ONCE

RESULTS = ROOT / "benchmarks" / "results"
PART_LIMIT_S = 600
MAX_GPUS = 8
LOG_CHARACTERS = 20_000  # of an item
OVER = "the time is over"


def say(text):
    print(text, file=sys.stderr, flush=True)


class Results:
    """Lines of the results files, and which items are current."""

    def __init__(self, folder):
        self.folder, self.digests = folder, {}

    def lines(self, file):
        path = self.folder / f"{file}.jsonl"
        return records.read(path) if path.exists() else []

    def digest(self, part):
        if part.sources not in self.digests:
            self.digests[part.sources] = digest(part.sources)
        return self.digests[part.sources]

    def current(self, part):
        """Return the names of the part's items whose lines have the hash of the sources."""
        wanted = self.digest(part)
        return {one.values["item"].partition("/")[2] for one in self.lines(part.file)
                if one.values.get("item", "").startswith(f"{part.name}/")
                and one.values.get("sources") == wanted}

    def owned(self, part):
        """Return the lines of the part's file that the part wrote, or replaces."""
        def owns(one):
            item = one.values.get("item")
            return item.startswith(f"{part.name}/") if item else bool(parts.re.match(part.owns, one.name))

        return [one for one in self.lines(part.file) if owns(one)]


def measuring(names):
    """Leave out the items that measure nothing."""
    return [name for name in names if name not in HELPERS]


def state(part, results, machine=None):
    """Return a sentence, and whether all items are current."""
    current = results.current(part)
    names = [measuring(of) for of in parts.names_of(part, machine=machine)]
    count, total = max((sum(name in current for name in of), len(of)) for of in names)
    if count == total:
        return "current", True
    commits = sorted({one.commit[:7] for one in results.owned(part)})
    older = f"; lines of {', '.join(commits)}" if commits else ""
    return f"{count} of {total} items are current{older}", False


def plan(results, chosen):
    """Print the plan, and return 0."""
    print(f"{'part':14} {'GPUs':>4} {'s':>5} {'sum':>5}  {'file':16} state")
    total = 0
    for part in chosen.values():
        text, done = state(part, results)
        seconds = part.seconds * part.calls
        total += 0 if done or part.gpus > 1 else seconds
        summed = total if part.gpus == 1 else ""
        print(f"{part.name:14} {part.gpus:4} {seconds:5} {summed:>5}  {part.file:16} {text}")
    return 0


def expected(part, results, again, machine=None):
    """Return the seconds that the items of a call take which are not current."""
    current = set() if again else results.current(part)
    names = max(map(measuring, parts.names_of(part, machine=machine)), key=len)
    left = sum(name not in current for name in names) / len(names)
    return min(part.seconds, part.seconds * part.calls * left)


def merge(files, results):
    """Put measured lines into the results files; of lines of one name, the last. Return 0."""
    new = {}
    for file in files:
        for one in records.read(file):
            new.setdefault(one.values["item"].partition("/")[0], {})[one.name] = one
    for name, lines in new.items():
        part, lines = PARTS[name], list(lines.values())
        items, names = {one.values["item"] for one in lines}, {one.name for one in lines}
        kept = [one for one in results.lines(part.file)
                if one.values.get("item") not in items and one.name not in names]
        records.write(results.folder / f"{part.file}.jsonl", ordered(part, kept + lines))
        text, done = state(part, results)
        if done:  # lines that the part no longer measures
            wanted = results.digest(part)
            old = [one for one in results.owned(part) if one.values.get("sources") != wanted]
            kept = [one for one in results.lines(part.file) if one not in old]
            records.write(results.folder / f"{part.file}.jsonl", kept)
            text += f"; {len(old)} older lines were removed" if old else ""
        devices = {one.device for one in results.owned(part) if "item" in one.values}
        mixed = f"; warning: measured on {' and '.join(sorted(devices))}" * (len(devices) > 1)
        print(f"{name}: {text}{mixed}")
    print("now run benchmarks/results_page.py and benchmarks/pictures.py")
    return 0


def ordered(part, lines):
    """Sort lines of a file's parts by part and item; lines without an item stay first."""
    order = {}
    for one in PARTS.values():
        if one.file == part.file:
            for name in (name for of in parts.names_of(one, MAX_GPUS) for name in of):
                order.setdefault(f"{one.name}/{name}", len(order))
    return sorted(lines, key=lambda one: order.get(one.values.get("item"), -1))


class Output:
    """The files measured.jsonl and log.txt, complete after each item."""

    def __init__(self, folder):
        self.folder, self.lines = folder, []
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "log.txt").open("a")

    def add(self, part, item, result, facts, sources, output):
        """Add an item's lines, none if the time ended it; a failed one's lack the sources' hash."""
        of_item = {"item": f"{part.name}/{item.name}"}
        if result["status"] == "passed":
            of_item["sources"] = sources
        else:
            of_item["status"] = result["status"]
        status, *measured = run.measurements_of(part.name, item, result, facts)
        found = [status] if part.keeps_status else []
        for one in measured:
            tagged = dataclasses.replace(one, values=one.values | of_item)
            found += part.lines(tagged)
        if not result["status"].endswith(OVER):
            self.lines += [dataclasses.replace(one, values=one.values | of_item) for one in found]
        records.write(self.folder / "measured.jsonl", self.lines)
        self.log.write(f"== {part.name}/{item.name}: {result['status']}\n"
                       f"{output[-LOG_CHARACTERS:]}\n")
        self.log.flush()


def measure(part, machine, facts, work, results, output, environment, end, again, prepare=False):
    """Measure the items of a part that are not current; return a sentence for each failure.

    prepare: Run only the items that measure nothing.
    """
    folder, failed = work / part.name, []
    folder.mkdir(parents=True, exist_ok=True)
    current = set() if again else results.current(part)
    machine.wanted = None
    (names,) = parts.names_of(part, machine=machine)
    machine.wanted = [name for name in names if name not in current]
    items = part.items(machine, folder)
    end = min(end, time.monotonic() + PART_LIMIT_S)

    def result_of(item):
        if item.missing:
            return {"status": f"skipped: {item.missing}"}
        left = end - time.monotonic()
        if left < item.min_s:
            return {"status": f"not started: {OVER}"}
        gpu = free.get()
        own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if part.spreads else {}
        try:
            result = run.run_item(item, folder, environment | own, min(item.limit_s, left))
            if left < item.limit_s and result["status"].startswith("timed out"):
                result["status"] = f"ended: {OVER}"
            return result
        finally:
            free.put(gpu)

    at_once = max(len(machine.gpus), 1) if part.spreads else AT_ONCE.get(part.name, 1)
    free = queue.SimpleQueue()  # numbers of GPUs, if the part spreads its items over them
    for gpu in visible(environment, at_once) if part.spreads else range(at_once):
        free.put(gpu)
    items = [item for item in items if item.name not in current]
    with ThreadPoolExecutor(at_once) as pool:
        for helps in (True,) if prepare else (True, False):
            group = [item for item in items if (item.name in HELPERS) == helps]
            begun = [pool.submit(result_of, item) for item in group]
            for item, future in zip(group, groups.in_order(begun)):
                result = future.result()
                say(f"  {item.name}: {result['status']}, {result.get('seconds', 0)} s")
                log = folder / f"{item.name}.log"
                said = log.read_text() if log.exists() and "seconds" in result else ""
                output.add(part, item, result, facts, results.digest(part), said)
                if result["status"] != "passed":
                    failed.append(f"{part.name}, {item.name}: {result['status']}")
    return failed


def commit_of(wheel):
    """Return the commit in a wheel, or None."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("commit.txt")]
        return archive.read(names[0]).decode().strip() if names else None


def visible(environment, gpus):
    """Return the GPUs' names in CUDA_VISIBLE_DEVICES."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(gpu) for gpu in range(gpus)]


def work(args, results):
    """Measure parts on this machine; return the exit status."""
    groups.end_together()
    began = time.monotonic()
    end = began + args.seconds
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("TILEMOE_ARCH", "TILEMOE_KIT")}
    libraries = (args.programs / "lib").resolve()
    if libraries.is_dir():
        path = [str(libraries), environment.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, path))
    place = args.work = args.work.resolve()
    args.cache = args.cache.resolve() if args.cache else place
    given = argparse.Namespace(out=place, programs=args.programs, wheel=args.wheel,
                               packages=args.packages)
    machine, facts = run.prepared(given, environment)
    machine.peers = args.peers.resolve() if args.peers else None
    machine.cache = args.cache
    built = commit_of(args.wheel) if args.wheel else None
    if built not in (None, facts["commit"]):
        sys.exit(f"measure.py: error: the wheel is of commit {built}, the programs are of "
                 f"{facts['commit']}")
    several, failed = len(machine.gpus) > 1, []
    output = Output(args.out / "prepare" if args.prepare else args.out)  # both may run at a time
    try:
        chosen = parts.chosen(args.parts, machine)
    except ValueError as error:
        sys.exit(f"measure.py: error: on this machine, {error}")
    chosen = chosen or {name: part for name, part in PARTS.items()
                        if (part.gpus > 1) == several or args.side_by_side and not part.spreads}
    seconds = {}  # of the parts that are not current
    for part in chosen.values():
        text, done = state(part, results, machine)
        if done and not args.again:
            say(f"{part.name}: {text}")
        else:
            seconds[part.name] = expected(part, results, args.again, machine)
    if args.side_by_side and not args.prepare:
        alone = {name: of for name, of in seconds.items()
                 if chosen[name].gpus == 1 and not chosen[name].spreads}
        gpus = visible(environment, len(machine.gpus))
        failed += side_by_side.measure(alone, gpus, args, environment, end, say)
        seconds = {name: of for name, of in seconds.items() if name not in alone}
    for name, of in seconds.items():
        left = end - time.monotonic()
        if not args.prepare and not side_by_side.has_time(of, left):
            say(f"{name}: not started: {of:.0f} s expected, {max(left, 0):.0f} s left")
            continue
        say(f"{name}: {of:.0f} s expected")
        failed += measure(chosen[name], machine, facts, place, results, output, environment, end,
                          args.again, args.prepare)
    print("\n".join(failed or ["every item that was started has passed"]))
    return 1 if failed else 0


def parsed():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}, or part/item")
    add("--list", action="store_true", help="print the plan and exit")
    add("--merge", nargs="+", type=pathlib.Path, metavar="FILE",
        help="put these measurements into benchmarks/results and exit")
    add("--programs", type=pathlib.Path, help="folder of a build, or of an unpacked pack.sh")
    add("--wheel", type=pathlib.Path, help="wheel of the PyTorch package; kernels, routing and codes "
        "do not need it")
    add("--packages", type=pathlib.Path, help="folder of wheels (packages.sh)")
    add("--peers", type=pathlib.Path, help="folder of the compared packages")
    add("--out", type=pathlib.Path, help="folder of measured.jsonl and log.txt")
    add("--results", type=pathlib.Path, default=RESULTS,
        help="folder of the results files (default: benchmarks/results)")
    add("--work", type=pathlib.Path, default=ROOT / "build" / "gpu" / "parts",
        help="folder of the programs' files (default: build/gpu/parts)")
    add("--cache", type=pathlib.Path, help="folder of sonic-moe's compiled kernels (default: --work)")
    add("--side-by-side", action="store_true",
        help="measure the parts of one GPU at the same time, each on its own GPU")
    add("--prepare", action="store_true", help="only compile sonic-moe's kernels and make corpora")
    add("--again", action="store_true", help="also measure what is current")
    add("--seconds", type=float, default=float("inf"), help="seconds for the whole command")
    args = parser.parse_args()
    try:
        # Items may depend on the machine: work() checks them.
        (parts.chosen if args.list else parts.named)(args.parts)
    except ValueError as error:
        parser.error(str(error))
    if not (args.list or args.merge) and not (args.programs and args.out):
        parser.error("--programs and --out are required to measure")
    if args.peers and "site-packages" not in args.peers.resolve().parts:
        parser.error(f"--peers must be in a folder named site-packages, got {args.peers}")
    return args


def main():
    args = parsed()
    results = Results(args.results)
    if args.list:
        return plan(results, parts.chosen(args.parts or PARTS))
    if args.merge:
        return merge(args.merge, results)
    return work(args, results)


if __name__ == "__main__":
    sys.exit(main())
