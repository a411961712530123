#!/usr/bin/env python3
"""Trains the default model of `tilemoe train` on a GPU and holds it against the CPU's results.

Reads what benchmarks/train_study.py wrote for the CPU: the same options, seeds and text. The bar is
that the means of the held-out bits a byte differ by no more than the CPU's seeds do among themselves.
Needs nothing but Python.
"""

import argparse
import json
import pathlib
import statistics
import sys

import train_study

RESULTS = train_study.ROOT / "benchmarks" / "results"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilemoe", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--work", type=pathlib.Path, default=train_study.ROOT / "runs" / "gpu")
    parser.add_argument("--cpu", type=pathlib.Path, default=RESULTS / "train_cpu.json")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "train_gpu.json")
    args = parser.parse_args()
    args.options = ["--device", "cuda"]
    args.program = train_study.program_info(args.tilemoe)
    cpu = json.loads(args.cpu.read_text())["study"]

    bits, speeds = {}, []
    for variant in ("top-k", "nearest"):
        options, seeds = train_study.VARIANTS[variant]
        bits[variant] = []
        for seed in seeds:
            log = train_study.train(args, f"{variant}-{seed}", ["--seed", seed, *options])
            if log[0]["text"]["sha256"] != cpu["text"]["sha256"]:
                sys.exit("train_gpu.py: error: the CPU's results are of another text")
            bits[variant].append(train_study.held_out(log))
            speeds += [line["tokens_per_s"] for line in log if line["event"] == "step"]
    spread = cpu["seeds_spread"]
    bars = {
        f"{variant}: mean within {spread:.4f} bits of the CPU's":
            abs(statistics.mean(bits[variant]) - cpu["mean_bits_per_byte"][variant]) <= spread
        for variant in bits
    }
    results = {
        "bits_per_byte": bits,
        "cpu_bits_per_byte": {variant: cpu["bits_per_byte"][variant] for variant in bits},
        "cpu_seeds_spread": spread,
        "median_tokens_per_s": statistics.median(speeds),
        "bars": bars,
        "commit": args.program["commit"],
        "backend": args.program["backends"][1]["description"],
        "text": cpu["text"],
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    missed = [bar for bar, met in bars.items() if not met]
    if missed:
        sys.exit("train_gpu.py: not met: " + "; ".join(missed))


if __name__ == "__main__":
    main()
