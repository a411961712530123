"""Runs the kernels with one defect after the other on a GPU: by themselves, and under the tools of
compute-sanitizer."""

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from builds import GPU_PROGRAM
from defects import ROOT
from switches import program_with

sys.path.append(str(ROOT / "scripts" / "gpu"))
import device  # noqa: E402

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
# A simulated device whose kit runs on this GPU, and TILEMOE_KIT for it; the first is preferred.
KITS = {"sm90": "auto", "sm80-on-90": "sm80"}
SUMMARY = re.compile(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: )([0-9]+)")
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER)(\S.*)$", re.MULTILINE)

running, starting = set(), threading.Lock()


class OutOfTime(Exception):
    """The session ends before the program's own limit."""


def end_with_all(signal_number, _):
    for process in list(running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(128 + signal_number)


@dataclasses.dataclass
class Gpu:
    """The programs, and how long they may take."""
    programs: object  # the folder that builds.pack() made
    places: object  # the same of the build with traps
    limit_s: float  # of a program
    tool_limit_s: float  # of one under a sanitizer
    end: float  # of all, by time.monotonic()
    repeats: int
    sanitizer: str

    def output_of(self, number, place, limit_s, repeats=0, prefix=(), programs=None):
        """(exit status, what it says) of a case; None for the status of one that hangs. `prefix`: a
        tool that runs the program."""
        left = self.end - time.monotonic()
        if left < 1:
            raise OutOfTime
        programs = programs or self.programs
        libraries = os.pathsep.join(
            filter(None, [str(programs / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
        environment = {**os.environ, "TILEMOE_KIT": KITS[place["device"]],
                       "LD_LIBRARY_PATH": libraries}
        made = program_with(number, (programs / "bin" / GPU_PROGRAM).read_bytes())
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, GPU_PROGRAM)
            # A program that another thread starts meanwhile would have this file open for a moment.
            with starting:
                with open(program, "wb") as file:
                    file.write(made)
                os.chmod(program, 0o755)
                process = subprocess.Popen(
                    [*prefix, program, str(repeats), place["case"]], text=True, errors="replace",
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                    env=environment)
            running.add(process)
            try:
                said, _ = process.communicate(timeout=min(limit_s, left))
                return process.returncode, said
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
                if left < limit_s:
                    raise OutOfTime from None
                return None, said
            finally:
                running.discard(process)

    def reaches(self, number, place):
        """Whether the case comes by that defect's place: it ends by an error there."""
        status, _ = self.output_of(number, place, self.limit_s, programs=self.places)
        return status not in (0, 1)

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


def places_of(name, surveyed):
    """Where this defect may be looked for: the cases whose simulation comes by it, the quickest
    first, with the GPU's own kit where that does."""
    for kit in KITS:
        reaching = sorted((case for case in surveyed
                           if case["device"] == kit and name in case["reached"] and case["right"]
                           and not case["findings"]), key=lambda case: case["seconds"])
        if reaching:
            return [{"case": case["case"], "device": kit} for case in reaching]
    return []


def ends_of(places, reaches):
    """The quickest and the longest that come by it on this GPU too, where tiles may be others."""
    first = next((place for place in places if reaches(place)), None)
    if first is None:
        return []
    last = next(place for place in reversed(places) if place == first or reaches(place))
    return [first] if last == first else [first, last]


GOOD = {"plain": "right", **{tool: "nothing" for tool in TOOLS}}


def look(gpu, what, number, places):
    """The first of its cases that is not as it should be."""
    for place in places:
        outcome, text = gpu.check(what, number, place)
        if outcome != GOOD[what]:
            return {"outcome": outcome, "case": place["case"], "device": place["device"],
                    "text": text[:200]}
    return {"outcome": GOOD[what]}


def tools_of(name):
    """Under every tool what is there but wrong; a dropped call is a race or nothing."""
    return ["racecheck"] if name.startswith("drop/") else TOOLS


class Results:
    """The results file: what it has of the same defects is not looked for again."""

    def __init__(self, file, built, facts, again):
        self.file, self.lock = file, threading.Lock()
        self.built = {one["id"]: one for one in built["defects"]}
        old = json.loads(file.read_text()) if file.exists() and not again else {}
        same = old.get("sources") == built["sources"] and old.get("name") == facts["name"]
        self.clean = old["without_a_defect"] if same else []
        self.defects = {name: one for name, one in old.get("defects", {}).items()
                        if same and name in self.built
                        and one["hash"] == self.built[name]["hash"]}
        self.head = {"commit": built["commit"], "sources": built["sources"],
                     "cuda": built["compiler"], **facts}

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
                     if {"case": one["case"], "device": one["device"]} == place
                     and one["with"] == what), None)


def each(pool, tasks):
    """Runs them; False where the time did not suffice for all."""
    done = True
    for future in [pool.submit(*task) for task in tasks]:
        try:
            future.result()
        except OutOfTime:
            done = False
    return done


def search(gpu, names, surveyed, results, jobs):
    """`names`: of the defects to look for, with their numbers. Without any defect first: a case that
    is not right then, or of which a tool reports something, is not used with that. False where time
    was over."""

    def say(text, begin):
        print(f"{text}, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)

    def choose(name):
        begin = time.monotonic()
        places = ends_of(places_of(name, surveyed),
                         lambda place: gpu.reaches(names[name], place))
        results.add(name, "places", places)
        say(f"{name}: {', '.join(place['case'] for place in places) or 'not reached'}", begin)

    def first(place, what):
        begin = time.monotonic()
        outcome, text = gpu.check(what, 0, place)
        results.add_clean(place, what, outcome, text)
        if outcome != GOOD[what]:
            say(f"without a defect, {place['case']} on {place['device']}, {what}: {outcome} {text}",
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
        if not each(pool, [(choose, name) for name in names if places_of(name, surveyed)
                           and not results.knows(name, "places")]):
            return False
        for what in ["plain", "racecheck", *(tool for tool in TOOLS if tool != "racecheck")]:
            asked = [name for name in names if name in results.defects
                     and (what == "plain" or what in tools_of(name))
                     and not results.knows(name, what)]
            needed = {json.dumps(place) for name in asked
                      for place in results.defects[name]["places"]}
            if not each(pool, [(first, place, what) for place in map(json.loads, sorted(needed))
                               if results.clean_outcome(place, what) is None]):
                return False
            if not each(pool, [(one, name, what) for name in asked]):
                return False
    return True


def run(args):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_with_all)
    built = json.loads((args.programs / "built.json").read_text())
    surveyed = json.loads(args.survey.read_text())["surveyed"]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    gpu = Gpu(args.programs.resolve(), args.places.resolve(), args.limit, args.tool_limit,
              time.monotonic() + args.most_seconds, args.repeats, sanitizer)
    facts = device.facts("mutants.py", "name", "driver_version")
    results = Results(args.json, built, facts, args.again)
    names = {one["id"]: number for number, one in enumerate(built["defects"], start=1)
             if fnmatch.fnmatch(one["id"], args.pattern)}
    done = search(gpu, names, surveyed, results, args.jobs)
    reached = sum(bool(one.get("places")) for one in results.defects.values())
    print(f"{len(names)} defects, {reached} of them in places that this GPU's cases come by"
          + ("" if done else "; time is over, some were not run"))
    unclean = [one for one in results.clean if one["outcome"] != GOOD[one["with"]]]
    return 1 if unclean or not done else 0
