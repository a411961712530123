#!/usr/bin/env python3
"""Test, sanitize, time and profile a build on this machine's GPU, stage by stage.

  scripts/gpu/run.py --programs build/ci --wheel WHEEL     # every stage
  scripts/gpu/run.py --programs build/ci test kernels      # two stages, which do not need a wheel

The script does not build anything. Each stage ends within 8 minutes and writes a results file,
STAGE.jsonl: one measurement per item with its status, and the measurements of the item's program.
An item that passed at this commit is not repeated, so that an interrupted run continues. The
skipped items are printed at the end with the reasons. The exit status is 1 if an item failed, if a
program skipped a test without need, or if an item of a named stage was skipped.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import device
import groups
import several_gpus
import stages
from stages import ARCHS, AT_ONCE, Machine, records

STAGE_LIMIT_S = 480
PACKAGES = ("torch", "transformers", "torchtitan", "jax")  # whose versions are stored
STAGES = stages.STAGES | several_gpus.STAGES


def say(text):
    print(text, file=sys.stderr, flush=True)


def info(tilemoe, environment, arch="auto"):
    """Return the output of `tilemoe info --json` with an arch, or None and the error."""
    done = subprocess.run([tilemoe, "info", "--json"], capture_output=True, text=True,
                          env={**environment, "TILEMOE_ARCH": arch})
    try:
        return json.loads(done.stdout), ""
    except ValueError:
        return None, done.stderr.strip() or done.stdout.strip()


def archs_that_run(tilemoe, environment):
    """Return the archs that the first GPU runs with these programs.

    The first is the default of the GPU; the others are selected by TILEMOE_ARCH.
    """
    def selected(arch):
        said, _ = info(tilemoe, environment, arch)
        with contextlib.suppress(KeyError, TypeError, StopIteration):
            backends = (b.get("arch", b.get("kit")) for b in said["backends"])
            return next(text for text in backends if text).split(",")[0]
        return None

    own = selected("auto")
    others = [arch for arch in ARCHS if arch != own and selected(arch) == arch]
    return [own, *others] if own in ARCHS else []


def memory_mib(gpu):
    """Return the number of nvidia-smi's text, such as "81559 MiB", or 0 without a number."""
    figure = gpu["memory.total"].split()[0]
    return int(figure) if figure.isdigit() else 0


def digest(paths):
    """Return a hash of the names and contents of files."""
    sha = hashlib.sha256()
    for path in paths:
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:12]


def install_once(wheel, packages, folder):
    """Install a wheel and a folder of wheels (or None) into `folder`; return their digest.

    The network is not used and requirements are not installed. Wheels that `folder` has already are
    not installed again. Other processes may install at the same time.
    """
    wheels = [wheel, *(sorted(packages.glob("*.whl")) if packages else [])]
    wanted, note = digest(wheels), folder / "wheels.sha256"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists() or note.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                            "--no-compile", "--disable-pip-version-check", "--target", folder,
                            *wheels], check=True)
            note.write_text(wanted)
    return wanted


def versions_of(packages, installed):
    """Return {package: version} of those that this Python and the folder of wheels have."""
    program = ("import importlib.metadata as m, json, sys\n"
               "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
               "print(json.dumps({p: found[p] for p in sys.argv[1:] if p in found}))")
    done = subprocess.run([sys.executable, "-c", program, *packages], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(installed)}, check=True)
    return json.loads(done.stdout)


def run_item(item, folder, environment, limit_s):
    """Run the command of an item, write its output to the folder, and return its result."""
    start = time.monotonic()
    code, output = groups.run(item.command, limit_s, environment)
    status = (f"timed out after {limit_s:.0f} s" if code is None
              else "passed" if code == 0 else f"exit status {code}")
    (folder / f"{item.name}.log").write_text(output)
    try:
        report = item.report(output)
    except (OSError, ValueError, KeyError) as error:
        report = {}
        if status == "passed":
            status = f"no result: {error}"
    values, measurements = {}, []
    if isinstance(report, list):
        measurements = [vars(one) for one in report]
    elif any(isinstance(value, dict) for value in report.values()):
        measurements = [{"name": name, "values": of} for name, of in report.items()]
    else:
        skipped = report.get("skipped", [])
        needless = [one for one in skipped if item.may_skip is not None and one not in item.may_skip]
        if status == "passed" and needless:
            status = f"skipped without need: {', '.join(needless)}"
        values = report | ({"skipped": len(skipped)} if "skipped" in report else {})
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "values": values,
            "measurements": measurements}


def run_stage(name, machine, facts, args, environment):
    """Run the items that have not passed yet; yield (item, result) in their order."""
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + STAGE_LIMIT_S

    def result_of(item):
        kept = folder / f"{item.name}.done"
        if item.missing:
            return {"status": f"skipped: {item.missing}"}
        if not args.again and kept.exists() and json.loads(kept.read_text())["facts"] == facts:
            say(f"  {item.name}: passed before")
            return json.loads(kept.read_text())["result"]
        if end - time.monotonic() < 5:
            return {"status": "not started: the stage has used its 8 minutes"}
        result = run_item(item, folder, environment, min(item.limit_s, end - time.monotonic()))
        say(f"  {item.name}: {result['status']}, {result['seconds']} s")
        if result["status"] == "passed":
            kept.write_text(json.dumps({"facts": facts, "result": result}))
        return result

    items = STAGES[name](machine, folder)
    with ThreadPoolExecutor(AT_ONCE.get(name, 1)) as pool:
        begun = [pool.submit(result_of, item) for item in items]
        for item, future in zip(items, groups.in_order(begun)):
            yield item, future.result()


def measurements_of(stage, item, result, facts):
    """Yield the measurement of an item and those of its program."""
    common = {"device": facts["device"], "versions": facts["versions"], "commit": facts["commit"]}
    values = {"gpus": facts["gpus"], "status": result["status"]}
    if item.arch:
        values["arch"] = item.arch
    if "seconds" in result:
        values["seconds"] = result["seconds"]
    yield records.Measurement(name=f"{stage}/{item.name}", **common,
                              values=values | result.get("values", {}))
    for one in result.get("measurements", []):
        yield records.Measurement(**(common | one))


def parsed():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--programs", type=pathlib.Path, required=True,
                        help="folder of a build, or an unpacked archive of scripts/gpu/pack.sh")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/gpu"),
                        help="folder of logs, states and results (default: build/gpu)")
    parser.add_argument("--wheel", type=pathlib.Path,
                        help="wheel of the PyTorch package, for the stages torch, command, sizes, "
                             "two-gpus, one-gpu-ranks, bench, jax, ranks, parallel and fsdp")
    parser.add_argument("--packages", type=pathlib.Path,
                        help="folder of wheels that the package's tests need (packages.sh)")
    parser.add_argument("--again", action="store_true", help="repeat items that have passed")
    args = parser.parse_args()
    for name in args.stages:
        if name not in STAGES:
            parser.error(f"stage must be one of {', '.join(STAGES)}, got {name!r}")
    args.out = args.out.resolve()
    return args


def prepared(args, environment):
    """Return the machine and the facts of its results; end the program on an error."""
    installed = args.out / "installed"
    machine = Machine(args.programs, args.wheel, args.packages, installed)
    if "tilemoe" not in machine.programs:
        sys.exit(f"run.py: error: {args.programs} does not contain tilemoe; build it first")
    tilemoe = machine.program("tilemoe")
    build, error = info(tilemoe, environment)
    if build is None:
        sys.exit(f"run.py: error: {tilemoe} does not run: {error}")
    gpu = device.facts("run.py", "name", "driver_version", "clocks.max.sm", "power.limit")
    machine.gpus = [memory_mib(one) for one in device.each("run.py", "memory.total")]
    machine.archs = archs_that_run(tilemoe, environment)
    facts = {"device": gpu.pop("name"), "commit": build["commit"], "gpus": len(machine.gpus),
             "archs": machine.archs, "program": digest([tilemoe]),
             "versions": {"tilemoe": build["version"], "driver": gpu.pop("driver_version")}, **gpu}
    if args.wheel:
        facts["wheel"] = install_once(args.wheel, args.packages, installed)
        facts["versions"] |= versions_of(PACKAGES, installed)
    say(f"TileMoE {build['version']}, commit {build['commit']}; {facts['gpus']} x "
        f"{facts['device']}; archs: {', '.join(machine.archs)}")
    return machine, facts


def main():
    args = parsed()
    groups.end_together()  # programs left running would disturb the next measurements
    environment = dict(os.environ)
    for name in ("TILEMOE_ARCH", "TILEMOE_KIT"):  # each item sets its arch
        environment.pop(name, None)
    libraries = (args.programs / "lib").resolve()
    if libraries.is_dir():
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(libraries), environment.get("LD_LIBRARY_PATH")]))
    machine, facts = prepared(args, environment)

    lines = []
    for name in args.stages or STAGES:
        say(name)
        found, statuses = [], []
        for item, result in run_stage(name, machine, facts, args, environment):
            found += measurements_of(name, item, result, facts)
            records.write(args.out / f"{name}.jsonl", found)  # after each item
            statuses.append(result["status"])
            if result["status"] != "passed":
                lines.append(f"{name}, {item.name}: {result['status']}")
        if all(status == "passed" for status in statuses):
            lines.append(f"{name}: all {len(statuses)} passed")
    lines += [f"{name}: skipped: not selected" for name in STAGES
              if args.stages and name not in args.stages]
    print("\n".join(lines))
    skipped = [line for line in lines if ": skipped: " in line]
    failed = [line for line in lines if line not in skipped and not line.endswith("passed")]
    if args.stages:  # items of named stages must run
        failed += [line for line in skipped if not line.endswith("not selected")]
    print(f"{len(failed)} failed, {len(skipped)} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
