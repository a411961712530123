"""Simulates cases with one defect after the other, until each is found."""

import collections
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

from defects import ROOT, all_defects, line_of, number_of_line
from switches import write_switches

# Of the layer, and of cases whose names begin with "router-".
PROGRAMS = ["tilemoe_simulate", "tilemoe_simulate_router"]
# A line of theirs; what is wrong and what was found follow it.
OUTCOME = re.compile(r"^(?P<case>.+), seed (?P<seed>\d+): (?P<output>right|WRONG), "
                     r"(?P<findings>\d+) findings.*\n", re.MULTILINE)


def simulate(programs, place, seed, number, limit_s, reached=None):
    """What the simulator says of one case, on one device, with one seed and one defect; 0: none. A
    program that hangs, crashes or says nothing has found nothing in words."""
    program = programs / PROGRAMS[place["case"].startswith("router-")]
    environment = {**os.environ, "TILEMOE_DEFECT": str(number)}
    if reached:
        environment["TILEMOE_DEFECTS_REACHED"] = str(reached)
    command = [program, place["case"], "--device", place["device"], "--seed", str(seed)]
    try:
        said = subprocess.run(command, text=True, capture_output=True, timeout=limit_s,
                              env=environment)
    except subprocess.TimeoutExpired:
        return {"findings": 0, "right": False, "ended": f"not done in {limit_s} s"}
    ended = f"exit status {said.returncode}"
    outcome = OUTCOME.search(said.stdout)
    if not outcome:
        return {"findings": 0, "right": False, "ended": f"{ended}: {said.stderr.strip()[-200:]}"}
    lines = [line for line in said.stdout[outcome.end():].splitlines() if line]
    first = next((i for i, line in enumerate(lines) if not line.startswith("  ")), 0)
    return {"findings": int(outcome["findings"]), "right": outcome["output"] == "right",
            "ended": ended, "text": " ".join(line.strip() for line in lines[first:first + 4])}


def search(simulated, places, seeds, more_seeds):
    """The first finding of `simulated(place, seed)` and, where the output was wrong then, one beside
    which it is right, if a few more seeds have one. Where there is no finding, whether an output was
    wrong all the same."""
    result = {"found": None, "found_while_right": None, "wrong": None}
    for seed in range(1, seeds + 1):
        for place in places:
            said = simulated(place, seed)
            where = {**place, "seed": seed}
            if said["findings"] > 0:
                result["found"] = result["found"] or {**where, "right": said["right"],
                                                      "finding": said["text"]}
                if said["right"]:
                    return {**result, "found_while_right": where}
            elif not said["right"] and not result["wrong"]:
                result["wrong"] = {**where, "ended": said["ended"]}
        if result["found"] and seed >= more_seeds:
            return result
    return result


def hash_of(texts):
    total = hashlib.sha256()
    for text in texts:
        total.update(text if isinstance(text, bytes) else text.encode())
        total.update(b"\0")
    return total.hexdigest()[:16]


def sources_hash(root=ROOT):
    """Of the kernels, the simulator and its cases, without defects."""
    files = [path for folder in ("src", "simulator", "verify")
             for path in sorted((root / folder).rglob("*"))
             if path.is_file() and root / "simulator" / "mutants" not in path.parents]
    return hash_of(part for path in files
                   for part in (str(path.relative_to(root)), path.read_bytes()))


def defect_hash(defect):
    return hash_of([defect.id, defect.file.as_posix(), str(defect.begin), defect.new])


def copy_checkout(tree, products):
    """What git knows of, with only those products that are asked for."""
    files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, capture_output=True, check=True)
    for name in files.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    table = tree / "src" / "cuda" / "instances" / "products.inc"
    table.write_text("".join(
        line for line in table.read_text().splitlines(keepends=True)
        if not line.startswith("PRODUCT(") or re.search(products, line)))


def build(args):
    """The folder of the simulator's programs with all defects, in a copy of the checkout. Its build is
    as deep as a checkout's own, so that ccache knows what has no defects."""
    tree = args.build.resolve() / "tree"
    stamp = args.build.resolve() / "sources"
    made_of = hash_of([sources_hash(), args.products, *args.cmake, *map(defect_hash, all_defects())])
    if not stamp.exists() or stamp.read_text() != made_of:
        old = tree.with_name("tree.old")
        shutil.rmtree(old, ignore_errors=True)
        if tree.exists():
            tree.rename(old)
        copy_checkout(tree, args.products)
        write_switches(tree, all_defects())
        keep_times(old, tree)
        if (old / "build").exists():
            (old / "build").rename(tree / "build")
        shutil.rmtree(old, ignore_errors=True)
        stamp.write_text(made_of)
    folder = tree / "build" / "defects"
    subprocess.run(["cmake", "-S", tree, "-B", folder, "-G", "Ninja",
                    "-DCMAKE_BUILD_TYPE=Release", *args.cmake],
                   check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", folder, f"-j{args.jobs}", *PROGRAMS], check=True,
                   stdout=sys.stderr)
    return folder / "simulator"


def keep_times(old, new):
    """Of what has not changed, so that it is not built again."""
    for path in new.rglob("*"):
        was = old / path.relative_to(new)
        if path.is_file() and was.is_file() and was.read_bytes() == path.read_bytes():
            times = was.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cases_of(programs, args, device):
    layers = subprocess.run([programs / PROGRAMS[0], *args.cases, "--list", "--device", device],
                            text=True, capture_output=True, check=True).stdout.split()
    if "-on-" in device:  # another kit: the router has none
        return layers
    return layers + subprocess.run([programs / PROGRAMS[1], "--list"], text=True,
                                   capture_output=True, check=True).stdout.split()


def survey(programs, args):
    """Each case on each device without a defect: how long it takes and which defects' places it
    comes by. The folder of the build keeps it."""
    kept = args.build / "survey.json"
    asked = hash_of([(args.build / "sources").read_text(), *args.cases, *args.devices])
    if kept.exists():
        known = json.loads(kept.read_text())
        if known["asked"] == asked:
            return known["surveyed"]
    surveyed = []
    for device in args.devices:
        for case in cases_of(programs, args, device):
            place = {"case": case, "device": device}
            with tempfile.NamedTemporaryFile() as file:
                begin = time.process_time() + os.times().children_user
                said = simulate(programs, place, 1, 0, args.limit, file.name)
                seconds = time.process_time() + os.times().children_user - begin
                numbers = [int(line) for line in file.read().split()]
            print(f"{case} on {device}: {seconds:.1f} s, {len(numbers)} places", file=sys.stderr,
                  flush=True)
            surveyed.append({**place, "seconds": round(seconds, 1), "right": said["right"],
                             "findings": said["findings"], "reached": numbers})
    kept.write_text(json.dumps({"asked": asked, "surveyed": surveyed}))
    return surveyed


def compiler():
    said = subprocess.run(["c++", "--version"], text=True, capture_output=True).stdout
    return said.split("\n")[0]


def commit():
    return subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT,
                          text=True, capture_output=True).stdout.strip()


def places_of(number, surveyed, most):
    """Of the cases that come by it on each device the quickest, and the longest, whose sums are long
    enough to use all stages again; the quickest of all first."""
    reaching = sorted((case for case in surveyed
                       if number in case["reached"] and case["right"] and not case["findings"]),
                      key=lambda case: case["seconds"])
    by_device = collections.defaultdict(list)
    for case in reaching:
        by_device[case["device"]].append(case)
    taken = [case for cases in by_device.values()
             for case in [*cases[:most], *cases[max(most, len(cases) - 1):]]]
    return [{"case": case["case"], "device": case["device"]}
            for case in sorted(taken, key=lambda case: case["seconds"])]


def run(args):
    programs = build(args)
    sources = sources_hash()
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    searched = {"cases": args.cases, "devices": args.devices}
    surveyed = survey(programs, args)
    if (results.get("sources"), results.get("searched")) != (sources, searched):
        results = {"commit": commit(), "sources": sources, "compiler": compiler(),
                   "searched": searched, "seeds": args.seeds,
                   "cases": [{name: value for name, value in case.items()
                              if name not in ("seconds", "reached")} for case in surveyed],
                   "defects": {}}
    defects = all_defects()
    for number, defect in enumerate(defects, start=1):
        known = results["defects"].get(defect.id, {}).get("hash") == defect_hash(defect)
        if not defect.matches(args.pattern) or (known and not args.again):
            continue
        places = places_of(number, surveyed, args.most_cases)
        begin = time.monotonic()
        found = search(lambda place, seed: simulate(programs, place, seed, number, args.limit),
                       places, args.seeds if places else 0, args.more_seeds)
        results["defects"][defect.id] = {
            "file": str(defect.file), "line": number_of_line(defect), "text": line_of(defect),
            "hash": defect_hash(defect), "reached": bool(places), **found}
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{number}/{len(defects)} {defect.id}: {words(results['defects'][defect.id])}, "
              f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    for_all = results["defects"].values()
    print(f"{len(for_all)} defects, {sum(bool(one['found']) for one in for_all)} found, "
          f"{sum(bool(one['found_while_right']) for one in for_all)} of them while the output was "
          "right")
    return 0


def words(result):
    if result["found"]:
        output = "right" if result["found_while_right"] else "wrong"
        return f"seed {result['found']['seed']}, output {output}: {result['found']['finding']}"
    if result["wrong"]:
        return f"not found, output wrong ({result['wrong']['ended']})"
    return "not found" if result["reached"] else "not reached"


