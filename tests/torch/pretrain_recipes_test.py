"""examples/pretrain's study of recipes, small: runs are paired, an interrupted command continues, and
the limit is for the upper ends of the intervals."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
sys.path.append(str(EXAMPLE))

import corpus  # noqa: E402
import paired  # noqa: E402
import recipes  # noqa: E402
import sources  # noqa: E402
from configs import CONFIGS  # noqa: E402
from tilemoe.bench import records  # noqa: E402

STUDY = recipes.STUDY
METHODS = ["bf16", "grouped_mm", "fp8", "fp8_save_h"]
NAMES = [f"tiny-wide-{m}-s{seed}" for seed, last in ((0, 4), (1, 3)) for m in METHODS[:last]]


def test_runs_of_the_first_seeds_are_first():
    runs = STUDY.runs()
    assert list(map(str, runs[:4])) == ["S3-bf16-s0", "S3-grouped_mm-s0", "S3-fp8-s0", "S3-bf16-s1"]
    assert {(run.method, run.seed) for run in runs} == {(m, s) for m in METHODS for s in range(5)}
    assert len(runs) == 20 and CONFIGS["S3"].n >= 512
    assert [STUDY.named(str(run)) for run in runs] == runs
    assert STUDY.named(NAMES[1]) == ("tiny-wide", "grouped_mm", None, 0)
    for wrong in ("S3-fp8-2-s0", "S4-fp8-s0", "S3-int8-s0", "S3-fp8-0", "s0", "fp8-s0", "S3-fp8-s00"):
        with pytest.raises(ValueError):
            STUDY.named(wrong)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    corpus.build(folder, sources.files([EXAMPLE.parents[1] / "docs"]), validation=0.2)
    return folder


OPTIONS = ["--tokens", "6144", "--batch", "16", "--learning-rate", "0.01", "--evaluate-batches", "2"]


def command(data, out, *arguments):
    words = [sys.executable, EXAMPLE / "recipes.py", "--data", data, "--out", out, *OPTIONS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return {"args": list(map(str, [*words, *arguments])), "env": environment}


def study(data, out, *arguments):
    return subprocess.run(
        **command(data, out, *arguments), capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """Results file of a command that was killed in its second training, and continued."""
    out = tmp_path_factory.mktemp("study") / "recipes.jsonl"
    words = command(data, out, "--runs", *NAMES)
    with subprocess.Popen(**words, stdout=subprocess.PIPE, text=True) as killed:
        first = json.loads(killed.stdout.readline())["name"]
        time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    assert first == NAMES[0] and len(STUDY.lines_of(out)) < len(NAMES)
    there = set(map(str, STUDY.lines_of(out)))
    done = study(data, out, "--runs", *NAMES)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == [
        name for name in NAMES if name not in there
    ]
    return out


def test_runs_of_a_seed_are_paired(finished, capsys):
    lines = {str(run): line.values for run, line in STUDY.lines_of(finished).items()}
    assert sorted(lines) == sorted(NAMES)
    for seed in (0, 1):
        of = {v["method"]: v for v in lines.values() if v["seed"] == seed}
        assert len({(v["initial"], v["batches"]) for v in of.values()}) == 1
        # Other rounding errors, or another recipe.
        assert len({v["loss"] for v in of.values()}) == len(of) == 4 - seed
        for v in of.values():
            assert v["steps"] == 12 and v["options"] == "--learning-rate 0.01"
            assert v["mean_pairs_dropped"] == 0 and "loss_as_trained" not in v
            assert v["loss"] == pytest.approx(of["bf16"]["loss"], rel=0.05)
    assert lines[NAMES[0]]["initial"] != lines[NAMES[4]]["initial"]
    assert STUDY.main(["--table", "--out", str(finished)]) == 0
    rows = capsys.readouterr().out.splitlines()
    seeds = {"`grouped_mm`": "2", "`fp8`": "2", "`fp8_save_h`": "1"}
    assert [tuple(row.split(" | ")[1:3]) for row in rows[2:]] == list(seeds.items())
    assert STUDY.main(["--list", "--out", str(finished), "--runs", NAMES[2], "S3-fp8-s0"]) == 0
    assert capsys.readouterr().out == f"{NAMES[2]} finished\nS3-fp8-s0 \n"


def some_lines(null, fp8, **changed):
    """bf16, the null and fp8, whose losses are larger by these percentages, one per seed."""
    made = {}
    for method, differences in (("bf16", [0] * 5), ("grouped_mm", null), ("fp8", fp8)):
        for seed, more in enumerate(differences):
            run = paired.Named("S3", method, None, seed)
            values = {"initial": seed, "batches": 7, "steps": 458, "tokens_of_step": 131072}
            values |= {"validation_tokens": 1_572_864, "options": ""}
            values |= {"loss": (2 + seed / 10) * (1 + more / 100)}
            values |= changed if method == "fp8" else {}
            made[run] = records.Measurement(f"recipes/{run}", "a GPU", {}, "abc", values)
    return made


# Student's t with two degrees of freedom: 4.303 times a deviation of 0.1 over sqrt(3) is 0.248.
NULL = (-0.09, 0.01, 0.11)


@pytest.mark.parametrize(
    "null, fp8, cells",
    [
        (NULL, (0.3, 0.4, 0.5), "3 | +0.40 ± 0.25 | [+0.15, +0.65] | +0.39 | met"),
        (NULL, (0.42, 0.52, 0.62), "3 | +0.52 ± 0.25 | [+0.27, +0.77] | +0.51 | not met"),
        ((0.4, 0.5, 0.6), (0.8, 0.9, 1.0), "3 | +0.90 ± 0.25 | [+0.65, +1.15] | +0.40 | met"),
        (NULL, (-0.9, 0.1, 1.1), "3 | +0.10 ± 2.48 | [-2.38, +2.58] | +2.33 | not met"),
        (NULL, (0.1, math.nan), "2 | +nan ± nan | [+nan, +nan] | +nan | not met"),
        (NULL, (0.1,), "1 | +0.10 |  |  | "),
        ((0.1,), (0.1, 0.2), "2 | +0.15 ± 0.64 | [-0.49, +0.79] |  | "),
        ((), (0.1, 0.2), "2 | +0.15 ± 0.64 | [-0.49, +0.79] |  | "),
    ],
)
def test_the_limit_is_for_the_upper_ends(null, fp8, cells):
    rows = STUDY.table(some_lines(null, fp8)).splitlines()[2:]
    assert rows[-1] == f"| S3 | `fp8` | {cells} |"
    assert len(rows) == 1 + bool(null)
    if null == NULL:
        assert rows[0] == "| S3 | `grouped_mm` | 3 | +0.01 ± 0.25 | [-0.24, +0.26] |  |  |"


@pytest.mark.parametrize("key", ["initial", "batches", "steps", "options"])
def test_what_is_no_pair_is_refused(key):
    with pytest.raises(ValueError, match=f"S3-fp8-s0 and .*S3-bf16-s0 must have the same {key}"):
        STUDY.table(some_lines(NULL, NULL, **{key: [1]}))
