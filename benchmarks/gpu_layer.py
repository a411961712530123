#!/usr/bin/env python3
"""One layer on a GPU, router included, in turn with sonic-moe's in the same call.

A round runs each once, with cold caches; the order changes from round to round. Prints and writes
the medians and the medians of the rounds' ratios.

  python3 benchmarks/gpu_layer.py --config 7b-n256 --peer DIR_OF_PYTHON_PACKAGES
"""

import argparse
import json
import os
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "python" / "tilemoe" / "bench"))  # a file of it needs no package
from rounds import Worker, peer_worker  # noqa: E402

OURS, PEER = "tilemoe-cuda", "sonic-moe"
SHAPE = "TdnEK"


def peer_environment(packages):
    """With `packages`, and the part of it that holds the kernels' compiler, on Python's path."""
    path = [packages, packages / "nvidia_cutlass_dsl" / "python_packages"]
    return {"QUACK_CACHE_AUTOTUNING": "1", **os.environ,
            "PYTHONPATH": os.pathsep.join(str(p) for p in path)}


def measure(args):
    """The entries, the layer's first, with its speed against the peer, pass by pass."""
    ours = Worker([args.tilemoe, "bench", "--device", "cuda", "--config", args.config,
                   "--pass", args.passes, "--baseline", "none", "--rounds-from-stdin"])
    shape = {name: ours.ready["shape"][name] for name in SHAPE}
    case = {"name": args.config, **shape, "device": "cuda", "dtype": "bfloat16"}
    peer = peer_worker("python3", PEER, case, args.passes, environment=peer_environment(args.peer))
    if reason := peer.ready.get("left_out"):
        sys.exit(f"gpu_layer.py: error: {PEER}: {reason}")
    rounds = []
    for index in range(args.rounds):
        turns = [ours, peer] if index % 2 == 0 else [peer, ours]
        rounds.append({name: times for worker in turns for name, times in worker.round().items()})
    entries = ours.finish() + peer.finish()
    for entry in entries:
        entry["round_times"] = [r[entry["backend"]] for r in rounds]
    passes = rounds[0][OURS].keys() & rounds[0][PEER].keys()
    entries[0]["time_of_peers"] = {
        key: statistics.median(r[OURS][key] / r[PEER][key] for r in rounds) for key in sorted(passes)
    }
    return entries


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilemoe", type=pathlib.Path, help="the program; else build/release's")
    parser.add_argument("--config", required=True, help="see `tilemoe bench --list`")
    parser.add_argument("--pass", dest="passes", choices=["forward", "both"], default="both")
    parser.add_argument("--peer", type=pathlib.Path, required=True,
                        help="a folder of Python packages with sonic-moe and what it needs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, help="write the entries to this file")
    args = parser.parse_args()
    args.tilemoe = args.tilemoe or HERE.parent / "build" / "release" / "apps" / "tilemoe" / "tilemoe"
    for path in (args.tilemoe, args.peer):
        if not path.exists():
            sys.exit(f"gpu_layer.py: error: {path} is not there")
    entries = measure(args)
    for entry in entries:
        backward = entry.get("bwd_ms")
        print(f"{entry['config']} {entry['backend']:14} forward {entry['fwd_ms']:.3f} ms"
              + (f", backward {backward:.3f} ms" if backward else ""))
    for key, ratio in entries[0]["time_of_peers"].items():
        print(f"{args.config} {key}: {ratio:.3f} of {PEER}'s")
    if args.json:
        args.json.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
