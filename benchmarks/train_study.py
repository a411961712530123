#!/usr/bin/env python3
"""What the default training reaches, and what the experts and the rounding have to do with it.

Trains the default model of `tilemoe train` and variants of it on the default text, and judges the
bars of docs/training.md: held-out bits a byte, against `xz -9` given the training text, against the
same model without experts and with one dense layer of the same active width, and token rounding
against top-K. Variants of one seed share their first weights and the order of the text.

    train_study.py                      all runs, two at a time with one thread each, then the table
    train_study.py --timed              the default run alone, with all threads, and its wall time

A run whose log in --work is complete, and of the same program, is not made again. Needs nothing but
Python.
"""

import argparse
import concurrent.futures
import gzip
import json
import lzma
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
XZ_TRAINING_BYTES = 50_000_000  # the last of the training text that xz is given
# Name -> options, seeds. One seed is enough where the gap is many times top-K's spread.
VARIANTS = {
    "top-k": ([], (0, 1, 2)),
    "nearest": (["--routing", "nearest"], (0, 1, 2)),
    "dense": (["--dense"], (0,)),
    "experts-off": (["--experts-off"], (0,)),
}
BITS_BAR = 1.90
SECONDS_BAR = 180
EXPERTS_BAR = 0.15  # bits a byte that the experts must be worth
ROUNDING_BAR = 0.02  # part by which `nearest` may be worse


def lines_of(log):
    with open(log, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def finished(folder, made_by):
    """The run's log if it is complete and of this program and these options, else none."""
    stamp, log = folder / "made_by", folder / "log.jsonl"
    if not log.exists() or not stamp.exists() or stamp.read_text() != made_by:
        return None
    lines = lines_of(log)
    return lines if lines and lines[-1].get("reason") == "done" else None


def train(args, name, options):
    """Trains into --work/name unless that is done; the lines of its log."""
    folder = args.work / name
    options = [str(option) for option in [*args.options, *options]]
    made_by = json.dumps([args.program["commit"], options])
    lines = finished(folder, made_by)
    if lines is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [args.tilemoe, "train", "--out", folder, *options]
        with open(folder / "output.txt", "w", encoding="utf-8") as output:
            status = subprocess.run([str(word) for word in command], stdout=output, stderr=output)
        if status.returncode:
            sys.exit(f"train_study.py: error: {name} ended with status {status.returncode}; "
                     f"{folder}/output.txt says why")
        (folder / "made_by").write_text(made_by)
        lines = finished(folder, made_by)
        if lines is None:
            sys.exit(f"train_study.py: error: the log of {name} is not complete")
    print(f"  {name}: {held_out(lines):.4f} bits a byte", file=sys.stderr, flush=True)
    return lines


def held_out(lines):
    return [line for line in lines if line["event"] == "eval"][-1]["bits_per_byte"]


def rounding_share(lines):
    """Parts of a step's pairs that rounding dropped and added, over all steps and layers."""
    steps = [line for line in lines if line["event"] == "step"]
    pairs = sum(sum(sum(load) for load in step["expert_load"]) for step in steps)
    return {key: sum(sum(step[key]) for step in steps) / pairs for key in ("dropped", "added")}


def xz_bits(start):
    """(|xz(train + held)| - |xz(train)|) * 8 / |held| for the text that the log's start names."""
    text = start["text"]
    data = b"".join(gzip.open(path).read() for path in text["files"])
    cut = text["train_bytes"]
    begin = max(0, cut - XZ_TRAINING_BYTES)
    size = lambda part: len(lzma.compress(part, preset=9))
    return (size(data[begin:]) - size(data[begin:cut])) * 8 / text["held_bytes"]


def study(args):
    runs = [(f"{variant}-{seed}", variant, seed)
            for variant, (_, seeds) in VARIANTS.items() for seed in seeds]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        logs = list(pool.map(
            lambda run: train(args, run[0], ["--threads", "1", "--seed", run[2],
                                              *VARIANTS[run[1]][0]]),
            runs))
        start = logs[0][0]
        xz = xz_bits(start)
    bits = {variant: [held_out(log) for log, run in zip(logs, runs) if run[1] == variant]
            for variant in VARIANTS}
    rounding = [rounding_share(log) for log, run in zip(logs, runs) if run[1] == "nearest"]
    mean = {variant: statistics.mean(values) for variant, values in bits.items()}
    spread = max(bits["top-k"]) - min(bits["top-k"])
    ratios = [rounded / chosen for rounded, chosen in zip(bits["nearest"], bits["top-k"])]
    bars = {
        f"top-k at most {BITS_BAR}": max(bits["top-k"]) <= BITS_BAR,
        "top-k below xz -9": max(bits["top-k"]) < xz,
        f"experts-off at least {EXPERTS_BAR} above top-k, each seed":
            all(off - on >= EXPERTS_BAR for off, on in zip(bits["experts-off"], bits["top-k"])),
        "dense above top-k of the same seed by more than the seeds' spread":
            all(dense - on > spread for dense, on in zip(bits["dense"], bits["top-k"])),
        f"nearest within {ROUNDING_BAR:.0%} of top-k, each seed":
            all(abs(ratio - 1) <= ROUNDING_BAR for ratio in ratios),
    }
    return {
        "bits_per_byte": bits,
        "mean_bits_per_byte": mean,
        "seeds_spread": spread,
        "nearest_over_top_k": ratios,
        "nearest_pairs": {key: statistics.mean(share[key] for share in rounding)
                          for key in ("dropped", "added")},
        "xz_bits_per_byte": xz,
        "seeds": {variant: seeds for variant, (_, seeds) in VARIANTS.items()},
        "config": start["config"],
        "parameters": start["parameters"],
        "text": start["text"],
        "bars": bars,
    }


def timed(args):
    folder = args.work / "timed"
    shutil.rmtree(folder, ignore_errors=True)
    load = os.getloadavg()[0]
    begin = time.monotonic()
    lines = train(args, "timed", [])
    seconds = time.monotonic() - begin
    steps = [line["tokens_per_s"] for line in lines if line["event"] == "step"]
    return {
        "seconds": seconds,
        "median_tokens_per_s": statistics.median(steps),
        "bits_per_byte": held_out(lines),
        "load_average_before": load,
        "bars": {f"under {SECONDS_BAR} s": seconds < SECONDS_BAR},
    }


def program_info(tilemoe):
    return json.loads(subprocess.run([tilemoe, "info", "--json"], check=True, capture_output=True,
                                     text=True).stdout)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilemoe", type=pathlib.Path,
                        default=ROOT / "build" / "release" / "apps" / "tilemoe" / "tilemoe")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "runs" / "study")
    parser.add_argument("--output", type=pathlib.Path,
                        default=ROOT / "benchmarks" / "results" / "train_cpu.json")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--timed", action="store_true", help="time the default run, nothing else")
    args, args.options = parser.parse_known_args()  # the rest goes to every `tilemoe train`
    if not args.tilemoe.exists():
        sys.exit(f"train_study.py: error: {args.tilemoe} is not there; build it or name it by "
                 "--tilemoe")
    args.program = program_info(args.tilemoe)

    part = {"timed" if args.timed else "study": timed(args) if args.timed else study(args)}
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name, value in part.items():
        value.update(commit=args.program["commit"], device=args.program["devices"][0]["model"],
                     backend=args.program["backends"][0]["description"],
                     compiler=args.program["compiler"], platform=platform.platform(),
                     options=args.options)
        results[name] = value
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(part, indent=1))
    print(f"written to {args.output}")
    missed = [bar for value in part.values() for bar, met in value["bars"].items() if not met]
    if missed:
        sys.exit("train_study.py: not met: " + "; ".join(missed))


if __name__ == "__main__":
    main()
