"""benchmarks/gpu_expert_parallel.py in two processes on the CPU: every way computes the layer, and a
wrong one is not timed. Its graphs and peaks need GPUs."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import expert_parallel_ways as ways  # noqa: E402
import gpu_expert_parallel as bench  # noqa: E402

pytestmark = pytest.mark.cpu


def run(*arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_expert_parallel.py", "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        # What is compiled computes the same eagerly, in a tenth of the time.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHDYNAMO_DISABLE": "1"},
    )


def test_every_way_is_checked_and_timed(tmp_path):
    file = tmp_path / "figures.json"
    asked = [*ways.WAYS, "serial@4"]
    tokens = "--tokens", "64", "--high-priority"
    done = run(*tokens, "--rounds", "3", "--ways", *asked, "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    (entry,) = report["entries"]
    assert report["ranks"] == entry["ranks"] == 2 and entry["left_out"] == {}
    assert report["nccl"]["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert entry["shape"]["T"] == entry["asked_T"] == 64
    for way in asked:
        assert len(entry["round_ms"][way]) == 3 and min(entry["round_ms"][way]) > 0
        assert entry["over_own"][way] == entry["ms"][way] / entry["ms"]["own"]
        assert (entry["plan_bytes"][way] is None) == (way in ("own", "usual"))
        assert f"  {way:16} " in done.stdout
    assert all(link["GB_per_s"] > 0 for link in entry["links"].values())


def test_a_way_that_fails_is_named(tmp_path):
    done = run("--tokens", "64", "--rounds", "1", "--ways", "own", "serial@99")
    assert done.returncode == 1
    assert "left out: serial@99: ValueError: tilemoe: turns is 99" in done.stdout
    assert "  own " in done.stdout


@pytest.mark.parametrize("wrong", [None, "O", "dX", "dW1", "dW2"])
def test_a_wrong_way_is_refused(wrong):
    want = {name: torch.randn(9, 4) for name in ("O", "dX", "dW1", "dW2")}
    made = {name: t * (1 + (name == wrong)) for name, t in want.items()}
    step = lambda: (made["O"], made["dX"], None, made["dW1"], made["dW2"])
    way = types.SimpleNamespace(step=step, all_experts=False)
    if wrong is None:
        return bench.check(way, want)
    with pytest.raises(bench.Wrong, match=f"{wrong} is off"):
        bench.check(way, want)


def test_T_is_halved_until_the_largest_way_fits(monkeypatch):
    case = bench.LAYERS["qwen3-235b"]
    rank = types.SimpleNamespace(on_gpu=True, device="cuda")
    for gib, tokens in ((144, 32768), (79, 32768), (40, 16384), (24, 8192)):
        memory = types.SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        assert bench.fitting(case, rank) == dataclasses.replace(case, T=tokens)
