"""Runs the kernels with one defect after the other on a GPU: by themselves, and under the tools of
compute-sanitizer."""

import concurrent.futures
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from builds import GPU_PROGRAM, PLACES_PROGRAM
from defects import ROOT
from search import OutOfTime
from switches import program_with

sys.path.append(str(ROOT / "scripts" / "gpu"))
import device  # noqa: E402
import groups  # noqa: E402

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
# The kits that run on this GPU, and TILEMOE_KIT for them. The router has none: it runs with the first.
KITS = {"sm90": "auto", "sm80": "sm80"}
SUMMARY = re.compile(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: )([0-9]+)")
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER)(\S.*)$", re.MULTILINE)


@dataclasses.dataclass
class Gpu:
    """The programs, and how long they may take."""
    programs: object  # the folder that builds.pack() made
    limit_s: float  # of a program
    tool_limit_s: float  # of one under a sanitizer
    end: float  # of all, by time.monotonic()
    repeats: int
    sanitizer: str

    def environment(self, kit):
        libraries = [str(self.programs / "lib"), os.environ.get("LD_LIBRARY_PATH")]
        return {**os.environ, "TILEMOE_KIT": KITS[kit],
                "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}

    def output_of(self, number, place, limit_s, repeats=0, prefix=(), notes=None):
        """(exit status, what it says) of a case; None for the status of one that hangs. `prefix`: a
        tool that runs the program; `notes`: a file for the places that are reached without any
        defect."""
        left = self.end - time.monotonic()
        if left < 1:
            raise OutOfTime
        environment = self.environment(place["kit"])
        if notes:
            made = (self.programs / "bin" / PLACES_PROGRAM).read_bytes()
            environment["TILEMOE_DEFECTS_REACHED"] = notes
        else:
            made = program_with(number, (self.programs / "bin" / GPU_PROGRAM).read_bytes())
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, GPU_PROGRAM)

            def write():
                program.write_bytes(made)
                program.chmod(0o755)

            status, said = groups.run([*prefix, program, repeats, place["case"]],
                                      min(limit_s, left), environment, before=write)
        if status is None and left < limit_s:
            raise OutOfTime
        return status, said

    def cases(self):
        """By name, with each kit."""
        said = subprocess.run(
            [self.programs / "bin" / PLACES_PROGRAM], text=True, capture_output=True, check=True,
            env=self.environment(next(iter(KITS)))).stdout
        return [{"case": case, "kit": kit} for case in said.split()
                for kit in (KITS if not case.startswith("router-") else list(KITS)[:1])]

    def survey(self, place):
        """A case without a defect: how long it takes, and which defects' places it comes by."""
        begin = time.monotonic()
        with tempfile.NamedTemporaryFile() as notes:
            status, said = self.output_of(0, place, self.limit_s, notes=notes.name)
            numbers = {int(number) for number in notes.read().split()}
        if status != 0:
            print(f"without a defect, {place['case']} with {place['kit']}: exit status {status} "
                  f"{said.strip()[-200:]}", file=sys.stderr, flush=True)
        return {**place, "seconds": time.monotonic() - begin, "numbers": numbers}

    def plain(self, number, place):
        """(right, wrong, hangs or error; the first line that tells)"""
        status, said = self.output_of(number, place, self.limit_s, self.repeats)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if status is None:
            return "hangs", ""
        if status == 1:
            return "wrong", next((line for line in lines if not line.endswith(": WRONG")), "")
        return ("right", "") if status == 0 else ("error", (lines or [f"exit status {status}"])[-1])

    def under(self, tool, number, place):
        """(found, nothing, hangs or error; the first report)"""
        status, said = self.output_of(number, place, self.tool_limit_s, prefix=[
            self.sanitizer, "--tool", tool, "--print-limit", "20"])
        summary = SUMMARY.search(said)
        if status is None:
            return "hangs", ""
        if not summary:
            return "error", (said.strip().splitlines() or [f"exit status {status}"])[-1]
        if int(summary[1]) == 0:
            return "nothing", ""
        return "found", REPORT.search(said)[1]

    def check(self, what, number, place):
        return self.plain(number, place) if what == "plain" else self.under(what, number, place)


def places_of(number, surveyed):
    """Where this defect is looked for: of the cases that come by it the quickest and the longest,
    with the GPU's own kit where that does."""
    for kit in KITS:
        reaching = sorted((case for case in surveyed
                           if case["kit"] == kit and number in case["numbers"]),
                          key=lambda case: case["seconds"])
        if reaching:
            ends = reaching[:1] if len(reaching) == 1 else [reaching[0], reaching[-1]]
            return [{"case": case["case"], "kit": case["kit"]} for case in ends]
    return []


GOOD = {"plain": "right", **{tool: "nothing" for tool in TOOLS}}


def look(gpu, what, number, places):
    """The first of its cases that is not as it should be."""
    for place in places:
        outcome, text = gpu.check(what, number, place)
        if outcome != GOOD[what]:
            return {"outcome": outcome, **place, "text": text[:200]}
    return {"outcome": GOOD[what]}


def is_dropped(name):
    return name.startswith("drop/")


def passes_of(names):
    """(what with, which defects) one after the other, the most telling first. Under every tool what
    is there but wrong; a dropped call is a race or nothing."""
    dropped = [name for name in names if is_dropped(name)]
    others = [name for name in names if not is_dropped(name)]
    return [("plain", names), *((tool, others) for tool in TOOLS), ("racecheck", dropped)]


class Results:
    """The results file: what it has of the same defects is not looked for again."""

    def __init__(self, file, built, facts, options, again):
        self.file, self.lock = file, threading.Lock()
        self.built = {one["id"]: one for one in built["defects"]}
        old = json.loads(file.read_text()) if file.exists() and not again else {}
        same = old.get("sources") == built["sources"] and old.get("name") == facts["name"]
        self.clean = old["without_a_defect"] if same else []
        self.defects = {name: one for name, one in old.get("defects", {}).items()
                        if same and name in self.built
                        and one["hash"] == self.built[name]["hash"]}
        self.head = {"commit": built["commit"], "sources": built["sources"],
                     "cuda": built["compiler"], **facts, "options": options}

    def save(self):
        text = json.dumps({**self.head, "without_a_defect": self.clean,
                           "defects": self.defects}, indent=1)
        new = self.file.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(self.file)

    def knows(self, name, what):
        return what in self.defects.get(name, {})

    def add(self, name, what, outcome):
        with self.lock:
            one = self.defects.setdefault(name, {"hash": self.built[name]["hash"]})
            one[what] = outcome
            self.save()

    def add_clean(self, place, what, outcome, text):
        with self.lock:
            self.clean.append({**place, "with": what, "outcome": outcome, "text": text[:200]})
            self.save()

    def clean_outcome(self, place, what):
        return next((one["outcome"] for one in self.clean
                     if {"case": one["case"], "kit": one["kit"]} == place
                     and one["with"] == what), None)


def each(pool, tasks):
    """Runs them; False where the time did not suffice for all."""
    done = True
    for future in groups.in_order([pool.submit(*task) for task in tasks]):
        try:
            future.result()
        except OutOfTime:
            done = False
    return done


def search(gpu, names, results, jobs):
    """`names`: of the defects to look for, with their numbers. Without any defect first: a case that
    is not right then, or of which a tool reports something, is not used with that. False where time
    was over."""

    def say(text, begin):
        print(f"{text}, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)

    def first(place, what):
        begin = time.monotonic()
        outcome, text = gpu.check(what, 0, place)
        results.add_clean(place, what, outcome, text)
        if outcome != GOOD[what]:
            say(f"without a defect, {place['case']} with {place['kit']}, {what}: {outcome} {text}",
                begin)

    def one(name, what):
        usable = [place for place in results.defects[name]["places"]
                  if results.clean_outcome(place, what) == GOOD[what]]
        if not usable:
            return
        begin = time.monotonic()
        outcome = look(gpu, what, names[name], usable)
        results.add(name, what, outcome)
        say(f"{name}, {what}: {outcome['outcome']} {outcome.get('text', '')}", begin)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            begun = [pool.submit(gpu.survey, case) for case in gpu.cases()]
            surveyed = [future.result() for future in groups.in_order(begun)]
        except OutOfTime:
            return False
        for name, number in names.items():
            results.add(name, "places", places_of(number, surveyed))
        for what, of in passes_of(list(names)):
            asked = [name for name in of if not results.knows(name, what)]
            needed = {json.dumps(place) for name in asked
                      for place in results.defects[name]["places"]}
            if not each(pool, [(first, place, what) for place in map(json.loads, sorted(needed))
                               if results.clean_outcome(place, what) is None]):
                return False
            if not each(pool, [(one, name, what) for name in asked]):
                return False
    return True


def run(args):
    groups.end_together()
    built = json.loads((args.programs / "built.json").read_text())
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    gpu = Gpu(args.programs.resolve(), args.limit, args.tool_limit,
              time.monotonic() + args.most_seconds, args.repeats, sanitizer)
    facts = device.facts("mutants.py", "name", "driver_version")
    options = {name: getattr(args, name) for name in ("repeats", "limit", "tool_limit", "jobs")}
    results = Results(args.json, built, facts, options, args.again)
    names = {one["id"]: number for number, one in enumerate(built["defects"], start=1)
             if fnmatch.fnmatch(one["id"], args.pattern)}
    done = search(gpu, names, results, args.jobs)
    reached = sum(bool(one.get("places")) for one in results.defects.values())
    print(f"{len(names)} defects, {reached} of them in places that this GPU's cases come by"
          + ("" if done else "; time is over, some were not run"))
    unclean = [one for one in results.clean if one["outcome"] != GOOD[one["with"]]]
    return 1 if unclean or not done else 0
