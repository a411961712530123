"""The output of examples/pretrain while it trains, and of --plan."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "pretrain"))

import corpus  # noqa: E402
import logs  # noqa: E402
import plan  # noqa: E402
import predict  # noqa: E402
import sources  # noqa: E402
import train  # noqa: E402
from configs import CONFIGS  # noqa: E402

ALONE = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def lines_of(capsys, steps, every, first=1, rank=0):
    """Lines of a run whose steps take 2 s, and as long again between them; the loss is the step's
    number."""
    clock = Clock()
    screen = logs.Screen(rank, steps, 1000, every, clock)
    for step in range(first, steps + 1):
        clock.now += 4
        screen.step({"step": step, "loss": float(step), "gradient_norm": 0.5, "z": 3.0}, 2.0)
    return capsys.readouterr().out.splitlines()


def test_a_line_has_five_fields_and_the_mean_since_the_line_before(capsys):
    assert lines_of(capsys, 25, 10) == [
        "step  1/25   loss 1.0000   gradient norm 0.5   500 tokens/s",
        "step 10/25   loss 6.0000   gradient norm 0.5   500 tokens/s   60 s left",
        "step 20/25   loss 15.5000   gradient norm 0.5   500 tokens/s   20 s left",
        "step 25/25   loss 23.0000   gradient norm 0.5   500 tokens/s   0 s left",
    ]
    resumed = lines_of(capsys, 25, 10, first=18)
    assert [line.split("   ")[0] for line in resumed] == ["step 18/25", "step 20/25", "step 25/25"]
    assert lines_of(capsys, 25, 10, rank=1) == []


def test_a_duration_is_read_at_a_glance():
    said = [logs.duration(s) for s in (0.4, 89, 90, 3600, 5400, 47 * 3600, 49 * 3600)]
    assert said == ["0 s", "89 s", "2 min", "60 min", "1.5 h", "47.0 h", "2.0 days"]


def test_the_screen_has_some_steps_and_the_log_all(tmp_path, monkeypatch, capsys):
    for name, value in ALONE.items():
        monkeypatch.setenv(name, str(value))
    manifest = corpus.build(tmp_path / "data", sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2)
    options = f"--config tiny --data {tmp_path / 'data'} --output {tmp_path / 'run'} --batch 2"
    options += " --evaluate-batches 1 --precision float32 --steps 5 --log-every 3"
    capsys.readouterr()
    assert train.main(options.split()) == 0
    torch.set_float32_matmul_precision("highest")
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    records = [record for record in log if "step" in record]
    assert len(records) == 5 and all("batch" in record for record in records)
    said = capsys.readouterr().out.splitlines()
    last = tmp_path / "run" / "checkpoints" / "step-000000005"
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # of so small a model
    of_threads = "1 thread" if threads == "1" else f"{threads} threads"
    said_of_processes = f"24,256 active; 1 process of {of_threads} on cpu; "
    assert said[0].startswith(f"tiny: 42,688 parameters, {said_of_processes}")
    assert said[-1] == f"done: {last}"
    lines = [line.split("   ") for line in said if "gradient norm" in line]
    assert [fields[0] for fields in lines] == ["step 1/5", "step 3/5", "step 5/5"]
    losses = [record["loss"] for record in records]
    assert lines[1][1] == f"loss {(losses[1] + losses[2]) / 2:.4f}"
    # Every byte of the text is a token, and so is the end of each document.
    validation = manifest["validation"]
    of_byte = 1 + validation["documents"] / validation["bytes"]
    loss = log[-1]["validation_loss"]
    bits = loss / math.log(2) * of_byte
    assert f"step 5: validation loss {loss:.4f}, {bits:.3f} bits per byte" in said
    assert train.main(options.split()) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"resuming from {last}",
        "all of --steps 5 are done; pass a larger --steps to continue the run",
    ]


def planned(job, device_bytes=79.2 * plan.GIB, processes=1, recompute="none"):
    of = plan.Plan(CONFIGS["tiny"], "tilemoe", recompute, "mixed", False, processes)
    return of, plan.table("tiny", of, job, device_bytes).splitlines()[-1]


def test_a_plan_ends_with_the_answer():
    job = plan.Job(steps=1000, batch=64, micro_batch=2)
    of, said = planned(job)
    seconds = predict.seconds(of, 2, 32)
    parts, _ = predict.step(CONFIGS["tiny"], 2 * 32, 1)
    assert seconds == pytest.approx(32 * sum(parts.values()) - 31 * parts["parameters"])
    assert said == (
        "It fits: 0.0 of 79.2 GiB per process. On an H100 1,000 steps of 64 sequences need about "
        f"{logs.duration(1000 * seconds)}."
    )
    assert "On 4 H100s, without communication, 1,000 steps" in planned(job, processes=4)[1]
    assert job.micro_batches(4) == 8 and job.micro_batches(64) == 1
    said = planned(job, 0.5 * plan.GIB, recompute="blocks")[1]
    assert said == "It fits: 0.0 of 0.5 GiB per process."  # that time is not predicted


def test_a_plan_that_does_not_fit_says_what_does():
    _, said = planned(plan.Job(10, 2000, 2000), device_bytes=1e7)
    of = plan.Plan(CONFIGS["tiny"], "tilemoe", "none", "mixed", False, 1)
    largest = of.largest_micro_batch(1e7)
    assert said.startswith("It does not fit: ") and said.endswith(f" --micro-batch {largest} fits.")
    said = planned(plan.Job(10, 1, 1), 1e6)[1]
    assert said.endswith("and no micro-batch fits. Use more processes.")
