#!/usr/bin/env python3
"""Tests, sanitizes, times and profiles a build on this machine's GPU, stage by stage.

  scripts/gpu/run.py --programs build/ci --wheel WHEEL     # every stage
  scripts/gpu/run.py --programs build/ci test bench        # these two, which need no wheel

Builds nothing. Each stage ends within 8 minutes and writes one results file, gpu_STAGE.json. What
passed at this commit is not run again, so a run that was cut off goes on where it stopped. Says at
the end what was skipped and why. Its status is 1 where something failed, where a program skipped a
test that it need not skip here, or where anything was skipped of a stage that was asked for by name.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import device
import groups
import wheels
from stages import AT_ONCE, KITS, STAGES, Machine

STAGE_LIMIT_S = 480


def say(text):
    print(text, file=sys.stderr, flush=True)


def device_facts(tilemoe, environment):
    """The commit that was built and the GPU; ends the program where there is none."""
    said = subprocess.run([tilemoe, "info"], env=environment, capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"run.py: error: {tilemoe} does not run: {said.stderr.strip()}")
    gpu = device.facts("run.py", "name", "driver_version", "clocks.max.sm", "power.limit")
    first_line = said.stdout.splitlines()[0]
    commit = first_line.split("commit ")[1].split(",")[0]
    return {"commit": commit, "build": first_line, **gpu}


def kits_that_run(tilemoe, environment):
    """The kits that the first GPU runs with these programs: its own first, then those that
    TILEMOE_KIT can ask for beside it."""
    def kit_of(asked):
        said = subprocess.run([tilemoe, "info", "--json"], capture_output=True, text=True,
                              env={**environment, "TILEMOE_KIT": asked})
        with contextlib.suppress(ValueError, KeyError, TypeError):
            backends = json.loads(said.stdout)["backends"]
            return next(b["kit"] for b in backends if "kit" in b).split(",")[0]
        return None

    own = kit_of("auto")
    return [own, *(kit for kit in KITS if kit != own and kit_of(kit) == kit)] if own in KITS else []


def memory_mib(gpu):
    """Of nvidia-smi's answer, such as "81559 MiB"; 0 where it has none."""
    figure = gpu["memory.total"].split()[0]
    return int(figure) if figure.isdigit() else 0


def kit_of(item):
    return {"kit": item.kit} if item.kit else {}


def skipped_too_much(item, report):
    if item.may_skip is None or not isinstance(report, dict):
        return []
    return [test for test in report.get("skipped", []) if test not in item.may_skip]


def run_item(item, folder, environment, limit_s):
    """Runs one command; returns what the results file says of it. Its output is kept beside."""
    start = time.monotonic()
    code, output = groups.run(item.command, limit_s, environment)
    status = (f"not done in {limit_s:.0f} s" if code is None
              else "passed" if code == 0 else f"exit status {code}")
    (folder / f"{item.name}.log").write_text(output)
    try:
        report = item.report(output)
    except (OSError, ValueError, KeyError) as error:
        report = None
        if status == "passed":
            status = f"no result: {error}"
    if status == "passed" and (tests := skipped_too_much(item, report)):
        status = f"skipped though they need not be: {', '.join(tests)}"
    return {"item": item.name, **kit_of(item), "status": status,
            "seconds": round(time.monotonic() - start, 1), "report": report}


def run_stage(name, machine, facts, args, environment):
    """Runs what has not passed yet; yields the stage's items with their status, in their order."""
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + STAGE_LIMIT_S

    def result_of(item):
        kept = folder / f"{item.name}.done"
        if item.missing:
            return {"item": item.name, **kit_of(item), "status": f"skipped: {item.missing}"}
        if not args.again and kept.exists() and json.loads(kept.read_text())["facts"] == facts:
            say(f"  {item.name}: passed before")
            return json.loads(kept.read_text())["result"]
        if end - time.monotonic() < 5:
            return {"item": item.name, **kit_of(item),
                    "status": "not begun: the stage's 8 minutes are over"}
        result = run_item(item, folder, environment, min(item.limit_s, end - time.monotonic()))
        say(f"  {item.name}: {result['status']}, {result['seconds']} s")
        if result["status"] == "passed":
            kept.write_text(json.dumps({"facts": facts, "result": result}))
        return result

    with ThreadPoolExecutor(AT_ONCE.get(name, 1)) as pool:
        begun = [pool.submit(result_of, item) for item in STAGES[name](machine, folder)]
        for future in groups.in_order(begun):
            yield future.result()


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--programs", type=pathlib.Path, required=True,
                        help="a build's folder, or an unpacked scripts/gpu/pack.sh archive")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/gpu"),
                        help="where logs, what has passed, and the results go (build/gpu)")
    parser.add_argument("--wheel", type=pathlib.Path,
                        help="of the PyTorch package, for the stages torch, command, sizes, two-gpus "
                             "and one-gpu-ranks")
    parser.add_argument("--packages", type=pathlib.Path,
                        help="a folder of wheels of what the package's tests need (packages.sh)")
    parser.add_argument("--again", action="store_true", help="run also what has passed")
    args = parser.parse_args()
    groups.end_together()  # what were left running would disturb whatever is timed next
    for name in args.stages:
        if name not in STAGES:
            parser.error(f"no stage is called {name}; there are {', '.join(STAGES)}")

    environment = dict(os.environ)
    environment.pop("TILEMOE_KIT", None)  # items name theirs
    libraries = (args.programs / "lib").resolve()
    if libraries.is_dir():
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(libraries), environment.get("LD_LIBRARY_PATH")]))
    installed = (args.out / "installed").resolve()
    machine = Machine(args.programs, args.wheel, args.packages, installed)
    if "tilemoe" not in machine.programs:
        sys.exit(f"run.py: error: {args.programs} has no program tilemoe; build it first")
    facts = device_facts(machine.program("tilemoe"), environment)
    machine.commit = facts["commit"]
    machine.gpus = [memory_mib(gpu) for gpu in device.each("run.py", "memory.total")]
    facts["gpus"] = len(machine.gpus)
    machine.kits = kits_that_run(machine.program("tilemoe"), environment)
    facts["kits"] = machine.kits
    say(f"{facts['build']}; {facts['gpus']} x {facts['name']}; kits: {', '.join(machine.kits)}")
    if args.wheel:
        facts["wheel"] = wheels.install_once(args.wheel, args.packages, installed)

    lines = []
    for name in args.stages or STAGES:
        say(name)
        items = []
        for item in run_stage(name, machine, facts, args, environment):
            items.append(item)
            # After each, for a run that is cut off.
            (args.out / f"gpu_{name}.json").write_text(
                json.dumps({"stage": name, **facts, "items": items}, indent=1) + "\n")
            if item["status"] != "passed":
                lines.append(f"{name}, {item['item']}: {item['status']}")
        if all(item["status"] == "passed" for item in items):
            lines.append(f"{name}: all {len(items)} passed")
    lines += [f"{name}: skipped: not asked for" for name in STAGES
              if args.stages and name not in args.stages]
    print("\n".join(lines))
    skipped = [line for line in lines if ": skipped: " in line]
    failed = [line for line in lines if line not in skipped and not line.endswith("passed")]
    if args.stages:  # those: what was asked for has to run
        failed += [line for line in skipped if not line.endswith("not asked for")]
    print(f"{len(failed)} failed, {len(skipped)} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
