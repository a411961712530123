#!/usr/bin/env python3
"""examples/pretrain over two GPUs and on one, a few steps each of a small corpus of this repository:

- deterministic, twice: the same losses to the bit;
- with the gradients' shards in memory of the computing stream (the example's default), and
  with FSDP's own reduce-scatter: the same losses but for the order of sums;
- on one GPU: the same step, so the same losses but for that order.

  scripts/gpu/pretrain_two_gpus.py --json pretrain.json

Needs the package installed, and no network. Its status is 1 if losses differ or a run fails; what
was found until then is in the file.
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
# A loss is a mean over thousands of tokens, of GEMMs in bfloat16 whose sums have another order.
CLOSE = 2e-3
# FSDP's own: the program with the hook of parallel.py left out.
OWN_OF_FSDP = """
import sys
sys.path.insert(0, {example!r})
from torch.distributed.fsdp import FSDPModule
FSDPModule.set_custom_reduce_scatter = lambda self, comm: None
import train
sys.exit(train.main())
"""
# The memory of gradients' shards was taken in the computing stream: counted, so that a run in which
# the hook did nothing is seen.
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
    """Bytes of this repository's pages and headers."""
    import corpus
    import sources

    if not (folder / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        corpus.build(folder, sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2)
    return folder


def train(folder, data, *options, processes=2, program=None, device="cuda"):
    """-> {"losses": [...], "norms": [...]}, or {"failed": its last words}"""
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
        "--batch", 8, "--micro-batch", 2, "--precision", precision, *options,
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
        return {"failed": "not done in 100 s"}
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


def judge(runs):
    """-> [what is wrong]"""
    wrong = [f"{name}: {run['failed']}" for name, run in runs.items() if "failed" in run]
    wrong += [
        f"{name}: {len(run['losses'])} steps, not {STEPS}"
        for name, run in runs.items()
        if len(run.get("losses", [])) != STEPS and "failed" not in run
    ]
    if wrong:
        return wrong
    own = runs["own memory"]
    # Another seed must differ from it, or the bound means nothing.
    pairs = [
        ("deterministic", "deterministic again", same, True),
        ("own memory", "of FSDP", close, True),
        ("own memory", "deterministic", close, True),
        ("own memory", "one GPU", close, True),
        ("own memory", "another seed", close, False),
    ]
    for first, second, compare, want in pairs:
        if compare(runs[first], runs[second]) != want:
            wrong.append(f"{first} and {second} {'differ' if want else 'agree'}")
    if not own["losses"][-1] < own["losses"][0]:
        wrong.append("own memory: it does not learn")
    if not own["said"] or any(line.endswith(" 0") for line in own["said"]):
        wrong.append("own memory: no shard was taken from it")
    return wrong


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/gpu/pretrain"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda",
                        help="cpu: the same over gloo in float32, to try the command")  # fmt: skip
    args = parser.parse_args()
    work = args.work.resolve()
    data = corpus(work / "corpus")
    variants = {
        "deterministic": (["--deterministic"], {}),
        "deterministic again": (["--deterministic"], {}),
        "own memory": ([], dict(program=COUNTED)),
        "of FSDP": ([], dict(program=OWN_OF_FSDP)),
        "one GPU": ([], dict(processes=1)),
        "another seed": (["--seed", "1"], {}),
    }
    runs = {}
    for name, (options, how) in variants.items():
        folder = work / name.replace(" ", "-")
        runs[name] = train(folder, data, *options, device=args.device, **how)
        args.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        print(name, runs[name].get("losses", "failed"), flush=True)
    wrong = judge(runs)
    args.json.write_text(json.dumps({"wrong": wrong, "runs": runs}, indent=1) + "\n")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
