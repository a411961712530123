"""Simulates cases with one defect after the other, until each is found."""

import collections
import concurrent.futures
import fnmatch
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

from builds import SIMULATORS, build, hash_of

# A line of theirs; what is wrong and what was found follow it.
OUTCOME = re.compile(r"^(?P<case>.+), seed (?P<seed>\d+): (?P<output>right|WRONG), "
                     r"(?P<findings>\d+) findings.*\n", re.MULTILINE)
# Beside the one that leaves all to the seed: asynchronous work is done at once in them, so that an
# output is more often right in spite of a defect.
ORDERED = ["by-rank", "in-step"]


class OutOfTime(Exception):
    """The time for all ends before the program's own limit."""


def environment_of(programs):
    """Where the packed programs find their libraries and addr2line."""
    environment = dict(os.environ)
    for name, folder in (("LD_LIBRARY_PATH", "lib"), ("PATH", "bin")):
        environment[name] = os.pathsep.join(
            filter(None, [str(programs / folder), environment.get(name)]))
    return environment


def simulate(programs, place, seed, number, limit_s, reached=None, end=float("inf")):
    """What the simulator says of one case, on one device, with one seed and one defect; 0: none. A
    program that hangs, crashes or says nothing has found nothing in words. `end`: of all, by
    time.monotonic()."""
    left = end - time.monotonic()
    if left < 1:
        raise OutOfTime
    program = programs / "bin" / SIMULATORS[place["case"].startswith("router-")]
    environment = {**environment_of(programs), "TILEMOE_DEFECT": str(number)}
    if reached:
        environment["TILEMOE_DEFECTS_REACHED"] = str(reached)
    command = [program, place["case"], "--device", place["device"], "--seed", str(seed)]
    if "schedule" in place:
        command += ["--schedule", place["schedule"]]
    try:
        said = subprocess.run(command, text=True, capture_output=True, timeout=min(limit_s, left),
                              env=environment)
    except subprocess.TimeoutExpired:
        if left < limit_s:
            raise OutOfTime from None
        return {"findings": 0, "right": False, "ended": f"not done in {limit_s} s"}
    ended = f"exit status {said.returncode}"
    outcome = OUTCOME.search(said.stdout)
    if not outcome:
        return {"findings": 0, "right": False, "ended": f"{ended}: {said.stderr.strip()[-200:]}"}
    lines = [line for line in said.stdout[outcome.end():].splitlines() if line]
    first = next((i for i, line in enumerate(lines) if not line.startswith("  ")), 0)
    return {"findings": int(outcome["findings"]), "right": outcome["output"] == "right",
            "ended": ended, "text": " ".join(line.strip() for line in lines[first:first + 4])}


NOTHING = {"found": None, "found_while_right": None, "wrong": None, "seeds": 0}


def search_seed(simulated, places, result, counted="seeds"):
    """What is known of a defect (`result`) with one seed more: the first finding of
    `simulated(place, seed)` and the first beside which the output is right. Where there is no
    finding, whether an output was wrong all the same. `counted`: see next_of."""
    seed = result.get(counted, 0) + 1
    result = {**result, counted: seed}
    if counted == "ordered_seeds":
        places = [{**place, "schedule": name} for place in places for name in ORDERED]
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
    return result


def next_of(result, seeds, more_seeds, ordered_seeds):
    """Which seeds there is another of to try: "seeds" of the schedule that leaves all to them, or
    "ordered_seeds" of the others; None where there is none. Where the output was wrong beside the
    finding, a few more are tried for another, but after a deadlock, which has no output, no other
    schedule."""
    if result["found_while_right"]:
        return None
    if result["seeds"] < (more_seeds if result["found"] else seeds):
        return "seeds"
    if (result["found"] and not result["found"]["finding"].startswith("deadlock")
            and result.get("ordered_seeds", 0) < ordered_seeds):
        return "ordered_seeds"
    return None


def turn_of(result):
    """When it is searched for again, the least first: what is found is soon done with."""
    return not result["found"], result["seeds"] + result.get("ordered_seeds", 0)


def cases_of(programs, args, device):
    def listed(program, *arguments):
        return subprocess.run([programs / "bin" / program, *arguments, "--list"], text=True,
                              capture_output=True, check=True,
                              env=environment_of(programs)).stdout.split()

    layers = listed(SIMULATORS[0], *args.cases, "--device", device)
    # Another kit: the router has none. Nor tiles, which a whole GPU is for.
    return layers + ([] if re.search("-on-|-whole", device) else listed(SIMULATORS[1]))


def survey_case(programs, built, place, limit_s, end):
    """One case without a defect: how long it takes, and which defects' places it comes by."""
    begin = time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        said = simulate(programs, place, 1, 0, limit_s, file.name, end)
        reached = [built["defects"][int(number) - 1]["id"] for number in file.read().split()]
    seconds = round(time.monotonic() - begin, 1)
    print(f"{place['case']} on {place['device']}: {seconds} s, {len(reached)} places",
          file=sys.stderr, flush=True)
    return {**place, "seconds": seconds, "right": said["right"], "findings": said["findings"],
            "reached": reached}


def survey(programs, built, args, end):
    """Each case on each device so. The programs' folder keeps it, also where the time is over."""
    kept = programs / "survey.json"
    asked = hash_of([json.dumps(built), *args.cases, *args.devices])
    known = json.loads(kept.read_text()) if kept.exists() else {}
    surveyed = known["surveyed"] if known.get("asked") == asked else []
    have = [(case["case"], case["device"]) for case in surveyed]
    places = [{"case": case, "device": device} for device in args.devices
              for case in cases_of(programs, args, device) if (case, device) not in have]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for future in concurrent.futures.as_completed(
                [pool.submit(survey_case, programs, built, place, args.limit, end)
                 for place in places]):
            surveyed.append(future.result())
            kept.write_text(json.dumps({"asked": asked, "surveyed": surveyed}))
    return surveyed


def places_of(name, surveyed, most, seed, counted="seeds"):
    """Of the cases that come by it on each device, with the first seed the quickest, and the longest,
    whose sums are long enough to use all stages again; with each further seed the next of either
    end, in turn. The quickest of all first. In an ordered schedule the quick ones alone: with every
    stage that is used again it is less likely that all comes right."""
    reaching = sorted((case for case in surveyed
                       if name in case["reached"] and case["right"] and not case["findings"]),
                      key=lambda case: case["seconds"])
    by_device = collections.defaultdict(list)
    for case in reaching:
        by_device[case["device"]].append(case)
    taken = []
    for cases in by_device.values():
        quick = [(most * (seed - 1) + i) % len(cases) for i in range(most)]
        long = [(len(cases) - seed) % len(cases)] if counted == "seeds" else []
        taken += [cases[i] for i in sorted({*quick, *long})]
    return [{"case": case["case"], "device": case["device"]}
            for case in sorted(taken, key=lambda case: case["seconds"])]


def still_known(results, built, searched):
    """What was found of the same defects. What was not is looked for again where sources or cases
    are others (`searched`)."""
    hashes = {one["id"]: one["hash"] for one in built["defects"]}
    return {name: one for name, one in results.get("defects", {}).items()
            if one["hash"] == hashes.get(name) and (one["found"] or one["searched"] == searched)}


def work_off(queue, take, jobs):
    """Has so many threads take the least of the queue's tasks; `take(task)` gives the next one or
    None. Returns how many were left when the time was over."""
    heapq.heapify(queue)
    lock = threading.Lock()
    under_way, left = [0], [0]
    changed = threading.Condition(lock)

    def worker():
        while True:
            with changed:
                while not queue and under_way[0]:
                    changed.wait()
                if not queue:
                    return
                task = heapq.heappop(queue)
                under_way[0] += 1
            following = None
            try:
                following = take(task)
            except OutOfTime:
                with changed:
                    left[0] += 1
            finally:
                with changed:
                    under_way[0] -= 1
                    if following is not None:
                        heapq.heappush(queue, following)
                    changed.notify_all()

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(worker) for _ in range(jobs)]:
            future.result()
    return left[0]


def run(args):
    end = time.monotonic() + args.most_seconds
    programs = args.programs.resolve() if args.programs else build("simulator", args)
    built = json.loads((programs / "built.json").read_text())
    try:
        surveyed = survey(programs, built, args, end)
    except OutOfTime:
        print("time is over: not all cases were surveyed", file=sys.stderr)
        return 1
    old = json.loads(args.json.read_text()) if args.json.exists() and not args.again else {}
    searched = hash_of([built["sources"], *args.cases, *args.devices, str(args.most_cases)])
    known = still_known(old, built, searched)
    results = {"cases": [{key: value for key, value in case.items()
                          if key not in ("seconds", "reached")} for case in surveyed],
               "defects": known}
    lock = threading.Lock()

    def next_one(result):
        return next_of(result, args.seeds, args.more_seeds, args.ordered_seeds)

    def search_for(task):
        """Of the defect of this number the seed; the seeds of all defects in turn."""
        _, number = task
        defect = built["defects"][number - 1]
        name = defect["id"]
        begin = time.monotonic()
        counted = next_one(known.get(name, NOTHING))
        places = places_of(name, surveyed, args.most_cases,
                           known.get(name, NOTHING).get(counted, 0) + 1, counted)
        result = known.get(name) or {
            **{key: defect[key] for key in ("file", "line", "text", "hash")}, "searched": searched,
            "reached": bool(places), **NOTHING}
        result |= {key: built[key] for key in ("commit", "compiler")}  # that it was last searched with
        if places:
            result = search_seed(
                lambda place, seed: simulate(programs, place, seed, number, args.limit, end=end),
                places, result, counted)
        with lock:
            known[name] = result
            write(args.json, results)
        if places and next_one(result):
            return turn_of(result), number
        print(f"{name}: {words(result)}, {time.monotonic() - begin:.0f} s", file=sys.stderr,
              flush=True)
        return None

    queue = [(turn_of(known.get(one["id"], NOTHING)), number)
             for number, one in enumerate(built["defects"], start=1)
             if fnmatch.fnmatch(one["id"], args.pattern)
             and next_one(known.get(one["id"], NOTHING))
             and not (one["id"] in known and not known[one["id"]]["reached"])]
    left = work_off(queue, search_for, args.jobs)
    print(f"{len(known)} defects, {sum(bool(one['found']) for one in known.values())} found, "
          f"{sum(bool(one['found_while_right']) for one in known.values())} of them while the output "
          f"was right" + (f"; {left} left when the time was over" if left else ""))
    return 1 if left else 0


def write(file, results):
    """As a whole or not at all, for a run that is cut off."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(file)


def words(result):
    if result["found"]:
        output = "right" if result["found_while_right"] else "wrong"
        return f"seed {result['found']['seed']}, output {output}: {result['found']['finding']}"
    if result["wrong"]:
        return f"not found, output wrong ({result['wrong']['ended']})"
    return "not found" if result["reached"] else "not reached"
