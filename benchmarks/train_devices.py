#!/usr/bin/env python3
"""Trains the default model of `tilemoe train` on a GPU and on the CPU beside it, and compares them.

    train_devices.py --tilemoe build/ci/apps/tilemoe/tilemoe --text a.txt

The bars: the losses of the first steps are equal to a thousandth, and the means of the held-out bits a
byte differ by no more than the CPU's seeds do among themselves. Options that it does not know go to
`tilemoe train`. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import statistics
import sys

import train_study

SEEDS = (0, 1, 2)
FIRST_STEPS = 10
LOSS_BAR = 1e-3  # nats a byte


def steps_of(log):
    return [line for line in log if line["event"] == "step"]


def compare(logs, program):
    """`logs`: by device and seed."""
    bits = {device: [train_study.held_out(log) for log in runs] for device, runs in logs.items()}
    losses = {device: [[step["loss"] for step in steps_of(log)] for log in runs]
              for device, runs in logs.items()}
    off = max(abs(cuda - cpu) for runs in zip(losses["cuda"], losses["cpu"])
              for cuda, cpu in list(zip(*runs))[:FIRST_STEPS])
    spread = max(bits["cpu"]) - min(bits["cpu"])
    between = abs(statistics.mean(bits["cuda"]) - statistics.mean(bits["cpu"]))
    return {
        "bits_per_byte": bits,
        "seeds": SEEDS,
        "first_losses_differ_by": off,
        "cpu_seeds_spread": spread,
        "means_differ_by": between,
        "median_tokens_per_s": {
            device: statistics.median(step["tokens_per_s"] for log in runs for step in steps_of(log))
            for device, runs in logs.items()},
        "bars": {
            f"losses of the first {FIRST_STEPS} steps within {LOSS_BAR}": off <= LOSS_BAR,
            "means within the spread of the CPU's seeds": between <= spread,
        },
        "commit": program["commit"],
        "backends": [backend["description"] for backend in program["backends"]],
        "config": logs["cpu"][0][0]["config"],
        "text": logs["cpu"][0][0]["text"],
    }


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilemoe", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--work", type=pathlib.Path, default=train_study.ROOT / "runs" / "devices")
    parser.add_argument("--output", type=pathlib.Path,
                        default=train_study.ROOT / "benchmarks" / "results" / "train_devices.json")
    args, args.options = parser.parse_known_args()  # the rest goes to every `tilemoe train`
    args.program = train_study.program_info(args.tilemoe)
    logs = {device: [train_study.train(args, f"{device}-{seed}",
                                       ["--device", device, "--seed", seed]) for seed in SEEDS]
            for device in ("cuda", "cpu")}
    results = compare(logs, args.program)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    missed = [bar for bar, met in results["bars"].items() if not met]
    if missed:
        sys.exit("train_devices.py: not met: " + "; ".join(missed))


if __name__ == "__main__":
    main()
