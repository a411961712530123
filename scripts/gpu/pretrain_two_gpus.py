#!/usr/bin/env python3
"""Train examples/pretrain on two GPUs and on one, a few steps each, and compare the losses.

- Two deterministic runs: the losses are equal bit for bit.
- Gradient shards in memory of the computing stream (the example's default) and FSDP's own
  reduce-scatter: the losses are equal up to the order of sums.
- One GPU: the same step, so the losses are equal up to the order of sums.
- Experts shared by both GPUs, and one GPU with micro-batches of twice the size: the same step.

  scripts/gpu/pretrain_two_gpus.py --json pretrain.json

The corpus is text of this repository. The script needs the installed package, but not the network.
The status is 1 if losses differ or if a run fails; the file then has the results up to that point.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pretrain"
sys.path += [str(EXAMPLE), str(ROOT / "tests" / "torch")]

import launcher  # noqa: E402

STEPS = 6
# A loss is a mean over thousands of tokens; the bfloat16 GEMMs differ in the order of their sums.
CLOSE = 2e-3
# FSDP's own reduce-scatter: the program without the hook of parallel.py.
OWN_OF_FSDP = """
import sys
sys.path.insert(0, {example!r})
from torch.distributed.fsdp import FSDPModule
FSDPModule.set_custom_reduce_scatter = lambda self, comm: None
import train
sys.exit(train.main())
"""
# Counts the gradient shards that the hook allocated in the computing stream, so that a run in which
# the hook did nothing is reported.
COUNTED = """
import sys
sys.path.insert(0, {example!r})
import parallel, train
allocate, taken = parallel.ReduceScatter.allocate, []
def counted(self, *given, **named):
    taken.append(1)
    return allocate(self, *given, **named)
parallel.ReduceScatter.allocate = counted
status = train.main()
print("reduce-scatters:", len(taken), file=sys.stderr)
sys.exit(status)
"""


def corpus(folder):
    """Write a corpus of bytes from this repository's pages and headers."""
    import corpus
    import sources

    if not (folder / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        corpus.build(folder, sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2)
    return folder


def train(folder, data, *options, processes=2, program=None, device="cuda"):
    """Return {"losses": [...], "norms": [...]}, or {"failed": the end of the output}."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = EXAMPLE / "train.py"
    if program is not None:
        script = folder / "program.py"
        script.write_text(program.format(example=str(EXAMPLE)))
    precision = "mixed" if device == "cuda" else "float32"
    command = [
        *launcher.python(processes), script, "--config", "tiny", "--data", data, "--output",
        folder / "run", "--steps", STEPS, "--save-every", STEPS, "--evaluate-every", STEPS,
        "--batch", 8, "--micro-batch", 2, "--warmup", 1, "--learning-rate", 3e-3,
        "--precision", precision, *options,
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # --deterministic requires it
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100,
                              env=environment)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": "timed out after 100 s"}
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    steps = [record for record in log if "step" in record]
    return {
        "losses": [record["loss"] for record in steps],
        "norms": [record["gradient_norm"] for record in steps],
        "said": [line for line in done.stderr.splitlines() if "reduce-scatters" in line],
    }


def same(one, other):
    return one["losses"] == other["losses"] and one["norms"] == other["norms"]


def close(one, other):
    return all(abs(a - b) <= CLOSE * abs(a) for a, b in zip(one["losses"], other["losses"]))


VARIANTS = {
    "deterministic": (["--deterministic"], {}),
    "deterministic again": (["--deterministic"], {}),
    "own memory": ([], dict(program=COUNTED)),
    "of FSDP": ([], dict(program=OWN_OF_FSDP)),
    "one GPU": ([], dict(processes=1)),
    "another seed": (["--seed", "1"], {}),
    "shared experts": (["--expert-parallel", "2"], {}),
    "one GPU, twice the micro-batch": (["--micro-batch", "4"], dict(processes=1)),
}
# A run with another seed must exceed the bound; otherwise the bound proves nothing.
PAIRS = [
    ("deterministic", "deterministic again", same, True),
    ("own memory", "of FSDP", close, True),
    ("own memory", "deterministic", close, True),
    ("own memory", "one GPU", close, True),
    ("own memory", "another seed", close, False),
    ("shared experts", "one GPU, twice the micro-batch", close, True),
    ("shared experts", "another seed", close, False),
]


def chosen(words):
    """Return the variants that the pairs of the named variants compare; without names, all."""
    compared = [pair[:2] for pair in PAIRS if not words or words & set(pair[:2])]
    return {name: how for name, how in VARIANTS.items() if any(name in pair for pair in compared)}


def judge(runs):
    """Return a list of errors."""
    wrong = [f"{name}: {run['failed']}" for name, run in runs.items() if "failed" in run]
    wrong += [
        f"{name}: expected {STEPS} steps, got {len(run['losses'])}"
        for name, run in runs.items()
        if len(run.get("losses", [])) != STEPS and "failed" not in run
    ]
    if wrong:
        return wrong
    for first, second, compare, want in PAIRS:
        if {first, second} <= set(runs) and compare(runs[first], runs[second]) != want:
            wrong.append(f"{first} and {second} {'differ' if want else 'agree'}")
    for name in {"own memory", "shared experts"} & set(runs):
        if not runs[name]["losses"][-1] < runs[name]["losses"][0]:
            wrong.append(f"{name}: the loss does not fall")
    said = runs.get("own memory", {}).get("said", ["without this run"])
    if not said or any(line.endswith(" 0") for line in said):
        wrong.append("own memory: the hook allocated no shard")
    return wrong


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/gpu/pretrain"))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[], metavar="RUN",
                        help="only this run and those that it is compared with")  # fmt: skip
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda",
                        help="default: cuda; cpu tests the script (gloo, float32)")  # fmt: skip
    args = parser.parse_args()
    work = args.work.resolve()
    data = corpus(work / "corpus")
    runs = {}
    for name, (options, how) in chosen(set(args.only)).items():
        folder = work / name.replace(" ", "-").replace(",", "")
        runs[name] = train(folder, data, *options, device=args.device, **how)
        args.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        print(name, runs[name].get("losses", "failed"), flush=True)
    wrong = judge(runs)
    args.json.write_text(json.dumps({"wrong": wrong, "runs": runs}, indent=1) + "\n")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
