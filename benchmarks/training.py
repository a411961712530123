#!/usr/bin/env python3
"""Measure what `tilemoe train` reaches: validation bits per byte of its default model and variants.

    training.py --tilemoe build/release/apps/tilemoe/tilemoe --out train.jsonl
    training.py --tilemoe build/cuda/apps/tilemoe/tilemoe --out train.jsonl --devices cuda cpu

Train each variant with each seed, one after another. Runs of one seed have the same initial weights
and the same order of the text. Write one line per run; a run that is in --out already is not
repeated. The status is 1 if one of these conditions does not hold:

- the experts improve the loss by at least 0.15 bits per byte, and improve it more than a dense
  layer of the same active width, by more than the spread of top-K's seeds;
- `nearest` is within 2 % of top-K of the same seed;
- the first 10 losses on both devices differ by at most 0.001 nats, and the mean validation bits of
  the devices differ by at most the spread of the CPU's seeds.

Other options are passed to `tilemoe train`.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
import records  # noqa: E402

# Options, seeds. One seed is enough if the difference is many times that of the seeds.
VARIANTS = {
    "top-k": ([], (0, 1, 2)),
    "nearest": (["--routing", "nearest"], (0, 1, 2)),
    "dense": (["--dense"], (0,)),
    "experts-off": (["--experts-off"], (0,)),
}
FIRST_STEPS, LOSS_LIMIT, EXPERTS_LIMIT, ROUNDING_LIMIT = 10, 1e-3, 0.15, 0.02


def train(args, options):
    """Return the values of a run's line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [args.tilemoe, "train", "--out", folder, *options, *args.options]
        began = time.monotonic()
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        log = [json.loads(line) for line in pathlib.Path(folder, "log.jsonl").open()]
    steps = [line for line in log if line["event"] == "step"]
    values = {"bits_per_byte": log[-2]["bits_per_byte"], "parameters": log[0]["parameters"]}
    values |= {"steps": len(steps), "seconds": seconds}
    values["tokens_per_s"] = records.quartiles(step["tokens_per_s"] for step in steps)
    values["first_losses"] = [step["loss"] for step in steps[:FIRST_STEPS]]
    if "expert_load" in steps[0]:
        pairs = max(1, sum(sum(sum(load) for load in step["expert_load"]) for step in steps))
        for key in ("dropped", "added"):
            values[f"{key}_share"] = sum(sum(step[key]) for step in steps) / pairs
    return values


def missed(runs):
    """Return the conditions that do not hold; runs: {(device, variant, seed): values}."""
    found, bits = [], {}
    for (device, variant, seed), values in runs.items():
        bits.setdefault((device, variant), {})[seed] = values["bits_per_byte"]
    for device in {device for device, _, _ in runs}:
        of = lambda variant: bits.get((device, variant), {})
        top_k = of("top-k")
        both = lambda variant: [(of(variant)[s], top_k[s]) for s in of(variant) if s in top_k]
        spread = max(top_k.values(), default=0) - min(top_k.values(), default=0)
        limits = {
            "gain of the experts": all(a - b >= EXPERTS_LIMIT for a, b in both("experts-off")),
            "gain over the dense layer": all(a - b > spread for a, b in both("dense")),
            "nearest": all(abs(a / b - 1) <= ROUNDING_LIMIT for a, b in both("nearest")),
        }
        found += [f"{what} ({device})" for what, holds in limits.items() if not holds]
    cpu, cuda = bits.get(("cpu", "top-k")), bits.get(("cuda", "top-k"))
    if cpu and cuda:
        losses = lambda device: [x for s in cpu for x in runs[device, "top-k", s]["first_losses"]]
        if max(abs(a - b) for a, b in zip(losses("cpu"), losses("cuda"))) > LOSS_LIMIT:
            found.append("first losses on both devices")
        between = abs(statistics.mean(cpu.values()) - statistics.mean(cuda.values()))
        if between > max(cpu.values()) - min(cpu.values()):
            found.append("mean validation bits on both devices")
    return found


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--tilemoe", type=pathlib.Path, required=True, help="the program")
    add("--out", type=pathlib.Path, required=True, help="results file, JSON lines")
    add("--devices", nargs="+", choices=("cpu", "cuda"), default=["cpu"])
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args, args.options = parser.parse_known_args()
    info = json.loads(subprocess.check_output([args.tilemoe, "info", "--json"], text=True))
    models = {of["name"]: of.get("description", "") for of in info["backends"]}
    models["cpu"] = info["devices"][0]["model"]
    names = {line.name: line for line in records.read(args.out)} if args.out.exists() else {}
    runs = {}
    for device, variant in ((d, v) for d in args.devices for v in args.variants):
        options, seeds = VARIANTS[variant]
        for seed in seeds:
            name = f"train-{device}/{variant}/{seed}"
            if name not in names:
                values = train(args, ["--device", device, "--seed", seed, *options])
                of = models[device], {"tilemoe": info["version"]}, info["commit"]
                names[name] = records.Measurement(name, *of, values)
                records.write(args.out, names.values())
            runs[device, variant, seed] = names[name].values
            print(f"{name}: {names[name].values['bits_per_byte']} bits per byte", flush=True)
    if wrong := missed(runs):
        sys.exit("training.py: error: these conditions do not hold: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
