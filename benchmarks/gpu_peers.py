#!/usr/bin/env python3
"""TileMoE beside sonic-moe and torch's grouped_mm, all from PyTorch, on ten layers and one GPU.

  python3 benchmarks/gpu_peers.py --tilemoe DIR --sonic-moe DIR --cache DIR

Each DIR holds Python packages, as `pip install --target DIR` leaves them; sonic-moe runs in a
process of its own. A round runs every peer once; 15 rounds give medians, and medians of the rounds'
ratios (python/tilemoe/bench has how). Results are kept a layer at a time: run it again after it was
cut off, or after it stopped at --seconds, and it goes on. Its status is 1 until all layers are
measured with all peers. First of all sonic-moe compiles what the layers need, several at once;
--cache keeps that.

  --before DIR     another build of TileMoE, in the same rounds: what a change did
  --rounds 51      for differences under a percent

It writes build/gpu/gpu_peers.json; benchmarks/gpu_tables.py makes the pages' tables of it.
"""

import argparse
import pathlib
import sys

import layer_runs

LAYERS = [
    "7b-n256",
    "7b-n1024",
    "30b-n256",
    "olmoe",
    "gpt-oss-20b",
    "qwen3-235b",
    "kimi-linear",
    "qwen3-next",
    "wide",
    "few-rows",
]
GROUPED_MM = ["torch-grouped_mm-compiled", "torch-grouped_mm"]


def peers(args):
    """Their names, and the folders of those that have one."""
    places = {"tilemoe-before": args.before, "sonic-moe": args.sonic_moe}
    places = {name: folder for name, folder in places.items() if folder}
    names = ["tilemoe-keeps-h", *places, *GROUPED_MM] if args.against is None else args.against
    return names, places


def facts(args, names):
    folders = {"tilemoe": layer_runs.package_folders("gpu_peers.py", args.tilemoe)}
    if args.before:
        folders["tilemoe-before"] = [args.before / "tilemoe"]
    return layer_runs.facts("gpu_peers.py", args, names, folders)


def summary(report):
    """A line for each peer: times, memory above what the caller owns, our time over theirs."""
    ours = report[0]
    for entry in report:
        times = " / ".join(f"{entry[key]:.3f}" for key in ("fwd_ms", "bwd_ms"))
        line = f"{ours['config']:12} {entry['backend']:26} {times} ms"
        for key in ("peak_bytes", "reserved_bytes", "floor_bytes"):
            if key in entry:
                above = (entry[key] - entry["resident_bytes"]) / 2**20
                line += f", {key.removesuffix('_bytes')} {above:.0f} MiB"
        if ratios := ours["time_of_peers"].get(entry["backend"]):
            line += "; tilemoe over it: " + ", ".join(f"{k} {v:.4f}" for k, v in ratios.items())
        yield line


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = lambda name, **of: parser.add_argument(name, **of)
    layer_runs.add_options(parser, LAYERS, "build/gpu/gpu_peers.json")
    add("--before", type=pathlib.Path, help="a folder with another build of it")
    add("--sonic-moe", type=pathlib.Path, help="a folder with sonic-moe and what it needs")
    add(
        "--against",
        nargs="*",
        metavar="PEER",
        help="these alone, by their names in docs/benchmarks.md",
    )
    args = parser.parse_args()
    layer_runs.require_folders("gpu_peers.py", args.tilemoe, args.before, args.sonic_moe)

    names, places = peers(args)
    options = layer_runs.packages_options(places)
    here = facts(args, names)
    runs = layer_runs.Runs(args, "peers", LAYERS, here)
    if args.sonic_moe and "sonic-moe" in names:
        modules = [args.sonic_moe / "sonicmoe", args.sonic_moe / "quack"]
        runs.compile_ahead(["sonic-moe"], modules, options)
    runs.run("--against", *names, *options)
    for report in runs.reports():
        print("\n".join(summary(report)))
    missing = runs.missing()
    print("\n".join(missing) or f"all {len(args.config)} layers measured: {args.out}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
