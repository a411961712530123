"""benchmarks/expert_parallel.py in two processes on the CPU: every way computes the layer, and a wrong
one is not timed. Its graphs and peaks need GPUs."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tilemoe.bench import records

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import expert_parallel as bench  # noqa: E402

pytestmark = pytest.mark.cpu


def run(*arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "expert_parallel.py", "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        # What is compiled computes the same eagerly, in a tenth of the time.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHDYNAMO_DISABLE": "1"},
    )


def test_every_way_is_checked_and_timed(tmp_path):
    """And one that fails is named."""
    file, ways = tmp_path / "figures.jsonl", [*bench.WAYS, "serial@4"]
    if importlib.util.find_spec("torchtitan") is None:  # as on the newest Python's own packages
        ways = [way for way in ways if not way.startswith("torchtitan")]
    done = run("--tokens", "64", "48", "--high-priority", "--rounds", "3", "--json", str(file),
               "--ways", *ways, "serial@99")  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "left out: serial@99: ValueError: ctas_per_sm must be an int in [1, 16], got 99" in done.stdout
    lines = {one.name: one for one in records.read(file)}
    assert len(lines) == 2 * (1 + len(ways)) and "expert-parallel/small/T=48/R=2/own" in lines
    start = "expert-parallel/small/T=64/R=2/"
    found = {name.removeprefix(start): one for name, one in lines.items() if start in name}
    links = found.pop("links").values
    assert links["ranks"] == 2 and links["all_gather_gb_per_s"] > 0 < links["all_to_all_gb_per_s"]
    assert list(found) == ways
    for way, one in found.items():
        assert one.values["ranks"] == 2 and one.values["T"] == 64
        assert one.device.startswith("2 x ")
        assert one.values["TORCH_NCCL_HIGH_PRIORITY"] == "1"
        assert 0 < one.values["step_ms"][0] <= one.median("step_ms")
        assert one.median("time_over_own") > 0 and (way != "own" or one.median("time_over_own") == 1)
        kind, _ = bench.WAYS[way.partition("@")[0]]
        assert ("plan_bytes" in one.values) == (kind is bench.Ours)
        assert f"  {way:18} " in done.stdout


def test_an_unknown_way_is_an_error():
    done = run("--ways", "own", "teleport")
    assert done.returncode == 2 and "--ways: 'teleport' must be one of own, lossless" in done.stderr


@pytest.mark.parametrize("wrong", [None, "O", "dX", "dW1", "dW2"])
def test_a_wrong_way_is_refused(wrong):
    want = {name: torch.randn(9, 4) for name in ("O", "dX", "dW1", "dW2")}
    made = {name: t * (1 + (name == wrong)) for name, t in want.items()}
    way = types.SimpleNamespace(results=made.values, all_experts=False, computes_in=None)
    if wrong is None:
        return bench.check(way, want)
    with pytest.raises(bench.Wrong, match=f"{wrong} has a relative error"):
        bench.check(way, want)


def test_T_is_halved_until_the_largest_way_fits(monkeypatch):
    case = bench.LAYERS["qwen3-235b"]
    for gib, tokens in ((144, 32768), (79, 32768), (40, 16384), (24, 8192)):
        memory = types.SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        assert bench.fitting(case, torch.device("cuda")) == dataclasses.replace(case, T=tokens)
