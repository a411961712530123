"""How fast real training gets: a list of entries, each measured once and kept in a file of its own.

    python examples/pretrain/study/speed_study.py list '7B-*-p1'
    python examples/pretrain/study/speed_study.py run --data runs/linux --out runs/speed
    torchrun --nproc-per-node 4 examples/pretrain/study/speed_study.py run --data ... --out ...
    python examples/pretrain/study/speed_study.py merge runs/speed

`run` takes the entries that are for as many processes as there are, in the order of the patterns.
It skips what has a file in --out, and begins none after --seconds: given again it goes on. `merge`
puts the files of some folders into benchmarks/results/pretrain_study.json; speed_page.py writes
docs/training_speed.md from that.
"""

import argparse
import fnmatch
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import product
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch

import torch
import torch.distributed as dist

import example
import train
from configs import CONFIGS, Refusal
from experts import IMPLEMENTATIONS
from parallel import leave, start
from stopwatch import PACKAGES, entry_of
from tilemoe.bench import machine

RESULTS = example.RESULTS / "pretrain_study.json"
KERNELS = 12  # of a profile that the merged file keeps


@dataclass(frozen=True)
class Entry:
    """One measurement."""

    config: str
    layers: int
    experts: str
    micro_batch: int  # sequences; 0: as many as fit
    recompute: str = "none"
    share: int = 1  # micro-batches of a step in each process
    processes: int = 1
    kept: bool = False  # copies for computing, over all of a step
    once: bool = False  # gradients are reduced once a step, not after each of its micro-batches
    turns: int = 1  # of tilemoe's blocks (tilemoe.set_block_turns)

    @property
    def name(self):
        size = self.micro_batch or "largest"
        parts = [self.config, self.layers, self.experts, self.recompute, size]
        parts += [f"x{self.share}", f"p{self.processes}"]
        parts += ["kept"] * self.kept + ["once"] * self.once
        parts += [f"turns{self.turns}"] * (self.turns > 1)
        return "-".join(map(str, parts))


def entries():
    """Of the study: sizes at which all implementations are measured, then as many as fit."""
    whole = lambda config: CONFIGS[config].layers
    sizes = [  # config, layers, micro-batches, recompute, processes
        # The layers' time by the difference of two depths; 24,576 tokens as in the layer's bench.
        ("7B", 4, (6,), "none", (1,)),
        ("7B", 8, (6,), "none", (1,)),
        # The whole model on one GPU of 139 GiB, and in shards on several.
        ("7B", whole("7B"), (2, 3, 4, 6, 7), "none", (1, 2, 4)),
        ("7B", whole("7B"), (8, 10, 12), "none", (2, 4)),
        ("7B", whole("7B"), (4, 6, 8, 10, 12), "half", (1, 2, 4)),
        ("7B", whole("7B"), (12, 16, 24), "blocks", (1, 2, 4)),
        ("1.4B", whole("1.4B"), (8, 16), "none", (1, 2, 4)),
        # For tests, on a CPU.
        ("tiny", whole("tiny"), (2, 4), "none", (1, 2)),
        ("tiny", 1, (2,), "none", (1,)),
    ]
    found = []
    for config, layers, micro_batches, recompute, counts in sizes:
        for size, count, name in product(micro_batches, counts, IMPLEMENTATIONS):
            found.append(Entry(config, layers, name, size, recompute, processes=count))
    # Steps of several micro-batches, as real ones are.
    ways = ((False, False), (True, False), (True, True))  # kept, once
    for count, (kept, once), name in product((1, 2, 4), ways, IMPLEMENTATIONS):
        of = {"share": 4, "processes": count, "kept": kept, "once": once}
        found.append(Entry("7B", whole("7B"), name, 3, **of))
    # Beside other kernels, NCCL's: fewer of them, and blocks that make way for them.
    for count, size in product((2, 4), (3, 6, 10, 12, 13, 14)):
        of = {"micro_batch": size, "processes": count}
        for name in IMPLEMENTATIONS:
            found.append(Entry("7B", whole("7B"), name, kept=True, **of))
        for kept in (False, True):
            found.append(Entry("7B", whole("7B"), "tilemoe", kept=kept, turns=4, **of))
    for config, layers in (("7B", 4), ("7B", whole("7B")), ("1.4B", whole("1.4B"))):
        for recompute, name in product(("none", "half", "blocks"), IMPLEMENTATIONS):
            found.append(Entry(config, layers, name, 0, recompute))
    return found


def chosen(patterns, processes=None):
    """The study's entries by the patterns, in their order; each once."""
    of = [e for e in entries() if processes in (None, e.processes)]
    found = (e for pattern in patterns for e in of if fnmatch.fnmatchcase(e.name, pattern))
    return list(dict.fromkeys(found))


def names(options):
    print(*(entry.name for entry in chosen(options.patterns)), sep="\n")
    return 0


def arguments(entry, micro_batch, options, scratch):
    """Of train.py."""
    batch = micro_batch * entry.share * entry.processes
    words = ["--config", entry.config, "--layers", entry.layers, "--experts", entry.experts]
    words += ["--layers", entry.layers, "--recompute", entry.recompute]
    words += ["--micro-batch", micro_batch, "--batch", batch]
    words += ["--reduce", "step" if entry.share == 1 or entry.once else "micro-batch"]
    words += ["--keep-gathered"] * entry.kept + ["--block-turns", entry.turns]
    words += ["--data", options.data, "--output", scratch, *["--compile"] * (not options.eager)]
    return train.arguments(list(map(str, words)))


def largest(peak, sizes, limit):
    """The largest micro-batch that was found to fit, and the smallest that was not: peak(size) is
    its bytes, or None. Tried are two sizes, then where their line meets the limit, and from there
    sizes by steps of a thirty-second."""
    known = {}

    def fits(size):
        if size not in known:
            known[size] = peak(size)
        return known[size] is not None

    near, far = sizes
    if not fits(near):
        return 0, near
    size = far
    if fits(far):
        slope = (known[far] - known[near]) / (far - near)
        size = max(far + 1, far + int((limit - known[far]) / slope))
    step = max(1, size // 32)
    while fits(size):
        size += step
    while size - step > near and not fits(size - step):
        size -= step
    return max(s for s in known if fits(s)), size


def measured(entry, mesh, device, options):
    """-> what the entry's file has beside where it was measured."""

    def of(micro_batch, warmup_steps, measured_steps, profile):
        with tempfile.TemporaryDirectory() as scratch:
            args = arguments(entry, micro_batch, options, scratch)
            return entry_of(args, mesh, device, warmup_steps, measured_steps, profile)

    how = options.warmup_steps, options.measured_steps, options.profile
    if entry.micro_batch:
        return of(entry.micro_batch, *how)
    peak = lambda size: of(size, 1, 1, 0).get("reserved_bytes")
    total = torch.cuda.get_device_properties(device).total_memory
    size, refused = largest(peak, options.trials, 0.97 * total)
    found = of(size, *how) if size else {}
    return found | {"micro_batch": size, "does_not_fit_micro_batch": refused}


def run(options):
    """-> exit status."""
    began, failed = time.perf_counter(), 0
    mesh, device = start()
    options.out.mkdir(parents=True, exist_ok=True)
    first = dist.get_rank() == 0
    where = machine.describe(device.type, PACKAGES)
    where |= {"commit": options.commit or where["commit"], "compile": not options.eager}
    where |= {key: vars(options)[key] for key in ("warmup_steps", "measured_steps")}
    for entry in chosen(options.patterns, dist.get_world_size()):
        file = options.out / f"{entry.name}.json"
        # One of them says it for all: clocks differ.
        goes = torch.tensor(
            [not file.exists(), time.perf_counter() - began < options.seconds], device=device
        ).int()
        dist.broadcast(goes, 0)
        is_new, in_time = goes.tolist()
        if not in_time:
            break
        if not is_new:
            continue
        try:
            found = measured(entry, mesh, device, options)
        except Refusal as why:  # not installed, for one
            if first:
                print(f"{entry.name}: {why}", flush=True)
            continue
        except Exception:  # the rest can still be measured
            failed += 1
            print(f"{entry.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        if first:
            whole = {"name": entry.name, **where, **asdict(entry), **found}
            file.with_suffix(".partial").write_text(json.dumps(whole, indent=1) + "\n")
            file.with_suffix(".partial").rename(file)
            short = {k: v for k, v in found.items() if k not in ("kernels", "losses")}
            print(f"{time.perf_counter() - began:.0f} s", entry.name, json.dumps(short), flush=True)
    dist.destroy_process_group()
    return int(failed > 0)


def merge(options):
    """One list by device and name; a later folder's replace an earlier's. What a file does not say
    is what the entry had before there was a choice."""
    kept, choices = {}, {f.name: f.default for f in fields(Entry) if f.default is not MISSING}
    before = json.loads(options.results.read_text()) if options.results.exists() else []
    files = [file for folder in options.folders for file in sorted(folder.glob("*.json"))]
    for entry in before + [json.loads(file.read_text()) for file in files]:
        entry["kernels"] = entry.get("kernels", [])[:KERNELS]
        kept[entry.get("device"), entry["name"]] = choices | entry
    ordered = [kept[key] for key in sorted(kept)]
    options.results.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


def parsed(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("list").add_argument
    add("patterns", nargs="*", default=["*"])
    add = commands.add_parser("run").add_argument
    add("patterns", nargs="*", default=["*"], help="of entries' names, as the shell's")
    add("--data", type=Path, required=True, help="folder that corpus.py wrote")
    add("--out", type=Path, required=True, help="folder of the entries' files")
    add("--seconds", type=float, default=float("inf"), help="after which none begins")
    add("--warmup-steps", type=int, default=10)
    add("--measured-steps", type=int, default=20)
    add("--profile", type=int, default=1, metavar="STEPS", help="after the measured ones")
    add("--trials", type=int, nargs=2, default=(1, 2), help="sizes from which `largest` begins")
    add("--eager", action="store_true", help="without torch.compile")
    add("--commit", help="what was built, where this is no source tree and cannot know it")
    add = commands.add_parser("merge").add_argument
    add("folders", type=Path, nargs="+")
    add("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def main(argv=None):
    options = parsed(argv)
    return {"list": names, "run": run, "merge": merge}[options.command](options)


if __name__ == "__main__":
    leave(main())
