#!/usr/bin/env python3
"""Runs the PyTorch package's tests on this machine's GPU, from a wheel (scripts/dist.sh).

  scripts/gpu/test_torch.py build/dist/tilemoe-*.whl
  scripts/gpu/test_torch.py WHEEL --packages DIR -- -k graph     # options after -- are pytest's

Needs no network: this Python has torch, pytest and transformers; what else it lacks (expecttest, for
opcheck; torchtitan) is taken from the wheels in DIR, which scripts/gpu/packages.sh fetches. Writes
gpu_torch.json: how many tests there were, which failed, which were skipped, and on what they ran.
Its status is 1 where one failed, or was skipped that tests/torch/skips.py does not expect to be.
scripts/gpu/run.py --wheel does this too, and what needs two GPUs.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

import device
import wheels

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "torchtitan", "pytest", "numpy")


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
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--packages", type=pathlib.Path, help="a folder of more wheels")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/gpu"))
    parser.add_argument("--commit", default=commit(), help="else that of this checkout")
    parser.add_argument("--limit", type=int, default=480, help="seconds for the tests")
    parser.add_argument("--file", action="append", default=[], dest="files", metavar="FILE",
                        help="of tests/torch, to be run alone; may be repeated")
    parser.add_argument("--workers", type=int, default=8, help="with pytest-xdist")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    tests = [ROOT / "tests" / "torch" / file for file in args.files] or [ROOT / "tests" / "torch"]
    facts = {"commit": args.commit, **device.facts("test_torch.py", "name", "driver_version")}
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out.resolve() / "torch.xml"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels.install(args.wheel, args.packages, folder)
        sys.path.append(folder)  # where versions() looks, too
        facts["versions"] = versions()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device",
                   "cuda", "-o", f"pythonpath={ROOT}/tests/torch", f"--junitxml={report}",
                   "--durations=15", *tests, *sys.argv[end + 1 :]]  # fmt: skip
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
        facts |= {"finished": done.returncode in (0, 1), **counts(report)}
        written = args.out / "gpu_torch.json"
        written.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(0 if done.returncode == 0 else 1)


if __name__ == "__main__":
    main()
