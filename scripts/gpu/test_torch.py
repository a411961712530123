#!/usr/bin/env python3
"""Runs the PyTorch package's tests on this machine's GPU, from a wheel (scripts/wheel.sh).

  scripts/gpu/test_torch.py build/dist/tilemoe-*.whl
  scripts/gpu/test_torch.py WHEEL --packages DIR -- -k graph     # options after -- are pytest's

Where there are two GPUs, the scenarios of several processes run on them, over NCCL. Needs no
network: this Python has torch and pytest; what else it lacks (expecttest, for opcheck) is taken from
the wheels in DIR. Writes gpu_torch.json: how many tests there were, which failed, and on what they
ran. Its status is 1 where one failed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

import device

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "pytest", "numpy")


def commit():
    """Of this tree; None where it is no checkout."""
    command = ["git", "-C", ROOT, "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions():
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def install(wheels, folder):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                    "--no-compile", "--disable-pip-version-check", "--target", folder, *wheels],
                   check=True)


def run_on_two_gpus(environment, folder):
    """distributed_worker.py over NCCL -> {scenario: "passed" or "failed"}; {} where there is one."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]  # visible ones
    counted = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if int(counted.stdout) < 2:
        return {}
    said = subprocess.run(
        [sys.executable, ROOT / "tests" / "torch" / "distributed_worker.py", "--device", "cuda"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False).stdout  # fmt: skip
    print(said[-6000:])
    results = re.findall(r"^(\w+) (passed|failed)$", said, re.MULTILINE)
    return dict(results) or {"distributed_worker.py": said[-1000:]}


def counts(report):
    tests, wrong, skipped = 0, {}, []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        tests += 1
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                wrong[name] = found.get("message", "").splitlines()[:1]
        if (found := case.find("skipped")) is not None:
            skipped.append(f"{name}: {found.get('message')}")
    return {"tests": tests, "failed": wrong, "skipped": skipped}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--packages", type=pathlib.Path, help="a folder of more wheels")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/gpu"))
    parser.add_argument("--commit", default=commit(), help="else that of this checkout")
    parser.add_argument("--limit", type=int, default=480, help="seconds for the tests")
    parser.add_argument("--workers", type=int, default=8, help="with pytest-xdist")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    facts = {"commit": args.commit, **device.facts("test_torch.py", "name", "driver_version"),
             "versions": versions()}
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out.resolve() / "torch.xml"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        install([args.wheel, *(args.packages.glob("*.whl") if args.packages else [])], folder)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device",
                   "cuda", "-o", f"pythonpath={ROOT}/tests/torch", f"--junitxml={report}",
                   "--durations=15", f"{ROOT}/tests/torch", *sys.argv[end + 1 :]]  # fmt: skip
        if importlib.util.find_spec("xdist") and args.workers > 1:
            command += ["-n", str(args.workers)]
        environment = {**os.environ, "PYTHONPATH": folder}
        environment.pop("TILEMOE_LIBRARY_DIR", None)
        begin = time.monotonic()
        # From another folder, so that Python has the source nowhere on its path. An interrupt lets
        # pytest report what was done until then.
        done = subprocess.run(["timeout", "-s", "INT", "-k", "10", str(args.limit), *command],
                              cwd=folder, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        facts["seconds"] = round(time.monotonic() - begin, 1)
        (args.out / "torch.log").write_text(done.stdout)
        print(done.stdout[-6000:], flush=True)
        if not report.exists():
            sys.exit(f"test_torch.py: error: pytest ended with {done.returncode}, without a report")
        facts |= {"two_gpus": {}, "finished": done.returncode in (0, 1), **counts(report)}
        written = args.out / "gpu_torch.json"
        written.write_text(json.dumps(facts, indent=1) + "\n")
        facts["two_gpus"] = run_on_two_gpus(environment, folder)
        written.write_text(json.dumps(facts, indent=1) + "\n")
    good = done.returncode == 0 and set(facts["two_gpus"].values()) <= {"passed"}
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
