#!/usr/bin/env python3
"""One layer, forward and backward, on the CPU, against two peers that take turns with it.

  tilemoe-cpu        the whole layer: router, top-K, routing, experts, combine, and all of it backward
  onednn-dense       the layer's matrix products alone, dense operands of M/E rows an expert
  torch-grouped_mm   the layer as PyTorch users write it (python/tilemoe/bench), in a process of its own

A round runs each once, one after the other, with caches cold; the order changes from round to round.
Prints the medians and the medians of the rounds' ratios, writes all to a results file, and says
whether the bars of docs/benchmarks.md are met. Run it on a machine that does nothing else:

  python3 benchmarks/cpu_layer.py --python PYTHON_WITH_TORCH
"""

import argparse
import json
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
from rounds import Worker, peer_worker  # noqa: E402

LAYER, DENSE, TORCH = "tilemoe-cpu", "onednn-dense", "torch-grouped_mm"
# In float32: the layer's speed against each peer, and the part of its time that routing may take.
BARS = {TORCH: 1.5, DENSE: 0.70}
ROUTING_BAR = 0.03
SHAPE = "TdnEK"


def whole(times):
    return times["fwd_ms"] + times["bwd_ms"]


def measure(args, dtype):
    """The entries of one type: the layer's first, with its speed against the others."""
    common = ["--dtype", dtype, "--threads", args.threads, "--rounds-from-stdin"]
    ours = Worker([args.tilemoe, "bench", "--config", args.config, *common])
    shape = {name: ours.ready["shape"][name] for name in SHAPE}
    case = {"name": args.config, **shape, "device": "cpu", "dtype": dtype}
    torch = peer_worker(args.python, TORCH, case, threads=args.threads)
    if reason := torch.ready.get("left_out"):
        sys.exit(f"cpu_layer.py: error: {TORCH}: {reason}")
    rounds = []
    for index in range(args.rounds):
        if index % 2:
            times = {**torch.round(), **ours.round()}
        else:
            times = {**ours.round(), **torch.round()}
        rounds.append(times)
        line = ", ".join(f"{name} {whole(times[name]):.1f}" for name in sorted(times))
        print(f"  round {index + 1:2} ms: {line}", file=sys.stderr)
    entries = ours.finish() + torch.finish()
    layer, peers = entries[0], entries[1:]
    layer["speed_against"] = {
        peer["backend"]: statistics.median(
            whole(r[peer["backend"]]) / whole(r[LAYER]) for r in rounds
        )
        for peer in peers
    }
    for entry in entries:
        name = entry["backend"]
        entry["rounds"] = len(rounds)
        entry["round_times"] = [r[name] for r in rounds]
        entry["fwd_plus_bwd_ms"] = statistics.median(whole(r[name]) for r in rounds)
        entry["commit"] = layer["commit"]
        entry["load_average"] = os.getloadavg()[0]
    return entries


def report(entries):
    """Prints one type's figures; returns whether the bars, which are float32's, are met."""
    layer = entries[0]
    shape = " ".join(f"{name}={layer['shape'][name]}" for name in SHAPE)
    print(f"{layer['config']}: {shape}, {layer['dtype']}, {layer['threads']} threads, {layer['device']}")
    print(f"  {'':18}{'forward':>10}{'backward':>10}{'both, ms':>10}{'saved MiB':>11}{'peak MiB':>10}")
    for entry in entries:
        memory = [entry.get(key) for key in ("saved_bytes", "peak_bytes")]
        memory = ["" if size is None else f"{size / 2**20:.0f}" for size in memory]
        print(
            f"  {entry['backend']:18}{entry['fwd_ms']:10.1f}{entry['bwd_ms']:10.1f}"
            f"{entry['fwd_plus_bwd_ms']:10.1f}{memory[0]:>11}{memory[1]:>10}"
        )
    has_bars = layer["dtype"] == "float32"
    met = True
    for peer, speed in layer["speed_against"].items():
        bar = f", bar {BARS[peer]}" if has_bars else ""
        print(f"  speed against {peer}: {speed:.3f}{bar}")
        met = met and speed >= BARS[peer]
    bar = f", bar under {100 * ROUTING_BAR:.0f} %" if has_bars else ""
    print(
        f"  routing metadata: {100 * layer['routing_share']:.2f} % of the layer{bar}; "
        f"top-K: {100 * layer['top_k_share']:.2f} %"
    )
    return not has_bars or (met and layer["routing_share"] < ROUTING_BAR)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tilemoe", type=pathlib.Path, help="the program; else build/release's")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--config", default="cpu-t4096", help="see `tilemoe bench --list`")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--output", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "cpu_layer.json"
    )
    args = parser.parse_args()
    args.tilemoe = args.tilemoe or ROOT / "build" / "release" / "apps" / "tilemoe" / "tilemoe"
    if not args.tilemoe.exists():
        sys.exit(f"cpu_layer.py: error: {args.tilemoe} is not there; build it or name it by --tilemoe")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.open("a").close()
    except OSError as error:
        sys.exit(f"cpu_layer.py: error: cannot write {args.output}: {error.strerror}")

    results, all_met = [], True
    for dtype in args.dtypes:
        entries = measure(args, dtype)
        all_met = report(entries) and all_met
        results += entries
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.output}")
    if not all_met:
        sys.exit("cpu_layer.py: a bar is not met")


if __name__ == "__main__":
    main()
