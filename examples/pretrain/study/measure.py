"""How fast a configuration trains: the implementations of the experts one after another.

    python examples/pretrain/study/measure.py --out s1.json --data runs/corpus --config S1 \\
        --compile --implementations tilemoe grouped_mm --micro-batches 32 64

Writes one JSON file: tokens/s, MFU, memory and, with --profile, where the device's time goes. All
other options are those of train.py; a step is one micro-batch for each process. What does not fit
the device's memory is an entry that says so. speed_study.py measures a list of such entries.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch.distributed as dist

import example  # noqa: F401
import train
from experts import IMPLEMENTATIONS
from parallel import start
from stopwatch import PACKAGES, entry_of
from tilemoe.bench import machine


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["tilemoe"])
    add("--micro-batches", nargs="+", type=int, default=[1], help="sequences")
    add("--warmup-steps", type=int, default=10)
    add("--measured-steps", type=int, default=20)
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    add("--profile", type=int, default=0, metavar="STEPS", help="after the measured ones")
    options, rest = parser.parse_known_args(argv)
    mesh, device = start()
    document = machine.describe(device.type, PACKAGES)
    document["commit"] = options.commit or document["commit"]
    how = {name: vars(options)[name] for name in ("warmup_steps", "measured_steps", "profile")}
    document |= how | {"options": rest, "processes": dist.get_world_size(), "entries": []}
    for size in options.micro_batches:
        for name in options.implementations:
            with tempfile.TemporaryDirectory() as scratch:
                of_step = ["--batch", size * dist.get_world_size(), "--micro-batch", size]
                own = [*rest, "--experts", name, "--output", scratch, *of_step]
                args = train.arguments(list(map(str, own)))
                entry = {"config": args.config, "layers": args.layers, "experts": name}
                entry |= {"micro_batch": size, "precision": args.precision}
                entry |= {"compile": args.compile, "recompute": args.recompute}
                entry |= entry_of(args, mesh, device, **how)
            document["entries"].append(entry)
            if dist.get_rank() == 0:  # after each, so that a command that is cut short leaves some
                options.out.write_text(json.dumps(document, indent=1) + "\n")
                short = {k: v for k, v in entry.items() if k not in ("kernels", "losses")}
                print(json.dumps(short), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
