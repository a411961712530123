"""examples/pretrain/speed.py on the CPU: how fast implementations train, and whether they agree."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from pretrain_test import EXAMPLE, data  # noqa: F401

import speed
from tilemoe.bench import records


def command(*arguments):
    """speed.py, which trains itself."""
    return subprocess.run(
        [sys.executable, EXAMPLE / "speed.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


def test_the_guard_in_pieces(data, tmp_path):  # noqa: F811
    options = ["--out", tmp_path / "guard.jsonl", "--work", tmp_path / "work", "--data", data]
    options += ["--config", "tiny", "--steps", 24, "--last", 8, "--batch", 4]
    first = command("guard", *options, "--seconds", 0)
    assert first.returncode == 75, first.stderr
    assert "tilemoe: interrupted" in first.stderr and not (tmp_path / "guard.jsonl").exists()
    last = command("guard", *options)
    assert "float32: done" in last.stderr, last.stderr
    for name in speed.RUNS:
        every = json.loads((tmp_path / "work" / f"{name}.json").read_text())["loss"]
        assert len(every) == (20 if name == "float32" else 24)
    assert (tmp_path / "work" / "tilemoe" / "log.jsonl").read_text().count('"step": 1,') == 1
    # TileMoE's own run may exceed a limit by chance in so few steps; the spoiled one always does.
    found = {line.name: line.values for line in records.read(tmp_path / "guard.jsonl")}
    assert len(found) == len(speed.KEYS) + 3
    misses = found["pretrain-guard/run"]
    assert "norm_dW2 of the first steps" in misses["spoiled_misses"]
    assert last.returncode == int(misses["tilemoe_misses"] != "")
    off = found["pretrain-guard/first_steps/norm_dW2"]
    assert off["spoiled"] > 2 * off["tilemoe"], off


def test_the_error_of_a_rank_is_named():
    of_rank = "[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: ValueError: why\n"
    assert speed.error_of(f"a warning\n{of_rank}E torchrun failed\n=====\n") == "[rank0]: ValueError: why"
    assert speed.error_of("a warning\nerror: no data\n") == "error: no data"
    assert speed.error_of("") == ""


def options_of_speed(data, folder, processes, rounds):  # noqa: F811
    options = ["measure", "--data", data, "--out", folder / "speed.jsonl", "--config", "tiny"]
    options += ["--micro-batches", 2, "--processes", processes, "--rounds", rounds]
    return options + ["--warmup-steps", 1, "--measured-steps", 2, "--implementations"]


def of_tiny(implementation, processes):
    return f"pretrain-study/tiny-2-{implementation}-none-2-x1-p{processes}"


def check_speed(values, processes, rounds):
    assert values["processes"] == processes and values["rounds"] == rounds
    assert values["kind.head_ms"] > 0
    assert 0 < values["update_ms"][1] < values["step_ms"][1]
    low, median, high = values["tokens_per_s_and_process"]
    assert low <= median <= high
    slowest, fastest = (2 * 32 / (values["step_ms"][i] / 1e3) for i in (2, 0))
    assert slowest * 0.99 <= median <= fastest * 1.01  # also of few steps on a busy machine


@pytest.fixture
def compared(capsys, monkeypatch):
    """-> a function: as `command`, in this process -> exit status, what it printed and its errors."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments):
        status = speed.compare(*speed.parsed(list(map(str, arguments))))
        return status, *capsys.readouterr()

    return run


def test_speed_is_measured_alternately(data, tmp_path, compared):  # noqa: F811
    """Each implementation has a line, is measured once, and one that cannot run is an error."""
    options = options_of_speed(data, tmp_path, processes=1, rounds=2)
    done = command(*options, "tilemoe", "grouped_mm")
    assert done.returncode == 0, done.stderr
    measured = records.read(tmp_path / "speed.jsonl")
    names = [of_tiny("tilemoe", 1), of_tiny("grouped_mm", 1)]
    assert [line.name for line in measured] == names
    for line in measured:
        check_speed(line.values, processes=1, rounds=2)
    losses = [line.values["last_loss"] for line in measured]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    status, out, err = compared(*options, "tilemoe", "scattermoe")
    assert status == 1 and "requires a GPU, and this process has none" in err
    assert records.read(tmp_path / "speed.jsonl") == measured and names[0] not in out
    older = dataclasses.replace(measured[0], name=names[0] + "-turns4")  # of an earlier version
    records.write(tmp_path / "speed.jsonl", [older])
    status, out, err = compared(*options, "tilemoe", "--ctas-per-sm", 4)
    assert status == 0 and out == "", err
    status, _, err = compared(*options, "tilemoe", "--layers", 3)
    assert status == 1 and "--layers must be in [1, 2] for tiny, got 3" in err


@pytest.mark.long
def test_speed_of_two_processes(data, tmp_path, compared):  # noqa: F811
    """And of two that share the experts: other lines of the same file."""
    options = options_of_speed(data, tmp_path, processes=2, rounds=1)
    status, _, err = compared(*options, "tilemoe")
    assert status == 0, err
    status, _, err = compared(*options, "tilemoe", "--expert-parallel", 2, "--places", 1.5)
    assert status == 0, err
    alone, shared = records.read(tmp_path / "speed.jsonl")
    assert [alone.name, shared.name] == [of_tiny("tilemoe", 2), of_tiny("tilemoe", 2) + "-ep2"]
    assert (alone.values["expert_parallel"], alone.values["places"]) == (1, None)
    assert (shared.values["expert_parallel"], shared.values["places"]) == (2, 1.5)
    for line in (alone, shared):
        check_speed(line.values, processes=2, rounds=1)
