#!/usr/bin/env python3
"""Two builds of TileMoE on one GPU, step by step: what a change of the kernels did to their times.

  python3 benchmarks/gpu_builds.py BEFORE AFTER --json build/gpu/gpu_builds.json

BEFORE and AFTER are command lines' programs (`tilemoe`). They time the same layer in turn, again and
again; a step's ratio is the median of those of two runs that follow each other, the first of which
changes. A step counts as slower where it is by more than 0.5 % and by more than 1 us. Kernels that
are equal in machine code are counted: what steps of such kernels differ by is the noise. Status 1: a
step is slower.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "python" / "tilemoe" / "bench"), str(ROOT / "scripts" / "gpu")]
import device  # noqa: E402
import machine_code  # noqa: E402

LAYERS = ["7b-n256", "7b-n1024", "30b-n256", "olmoe", "gpt-oss-20b", "qwen3-235b", "few-rows"]
BAR, BAR_MS = 1.005, 0.001


def times(program, config, rounds):
    """{step: ms} of one run of a program, forward and backward among them, and the run's entry."""
    command = [program, "bench", "--device", "cuda", "--config", config, "--baseline", "none",
               "--rounds", str(rounds), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"gpu_builds.py: error: {program} ended with {done.returncode}: {done.stderr}")
    (entry,) = json.loads(done.stdout)
    steps = {name: step["ms"] for name, step in entry["steps"].items()}
    return {"forward": entry["fwd_ms"], "backward": entry["bwd_ms"], **steps}, entry


def compare(programs, config, turns, rounds):
    """{step: {"before", "after": median ms, "ratio"}} of one layer, and the last run's entry."""
    taken = []
    for turn in range(turns):
        pair = [None, None]
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            pair[which], entry = times(programs[which], config, rounds)
        taken.append(pair)
    steps = {}
    for name in taken[0][1]:
        before, after = ([pair[which][name] for pair in taken] for which in (0, 1))
        steps[name] = {
            "before": statistics.median(before),
            "after": statistics.median(after),
            "ratio": statistics.median(b / a for a, b in zip(before, after)),
        }
    return steps, entry


def is_slower(step):
    return step["ratio"] > BAR and (step["ratio"] - 1) * step["before"] > BAR_MS


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--config", nargs="+", default=LAYERS, help="see `tilemoe bench --list`")
    parser.add_argument("--turns", type=int, default=7, help="runs of each program and layer")
    parser.add_argument("--rounds", type=int, default=7, help="of a run, which has their medians")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    programs = [args.before.resolve(), args.after.resolve()]
    hashes = [machine_code.kernels(program)[0][machine_code.HOPPER].values()
              for program in programs]
    report = {
        **device.facts("gpu_builds.py", "name", "driver_version", "clocks.max.sm", "power.limit"),
        "machine_code": machine_code.stamp(programs[1]),
        "before": machine_code.stamp(programs[0]),
        "equal_kernels": len(set(hashes[0]) & set(hashes[1])),
        "turns": args.turns,
        "rounds": args.rounds,
        "layers": {},
    }
    print(f"{report['equal_kernels']} of {report['machine_code']['kernels']} kernels are equal")
    slower = []
    for config in args.config:
        steps, entry = compare(programs, config, args.turns, args.rounds)
        report["commit"] = entry["commit"]
        report["layers"][config] = steps
        for name, step in steps.items():
            mark = "  slower" if is_slower(step) else ""
            slower += [f"{config} {name}"] if mark else []
            print(f"{config:12} {name:20} {step['before']:9.4f} {step['after']:9.4f} ms "
                  f"{step['ratio']:7.4f}{mark}", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"slower: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
