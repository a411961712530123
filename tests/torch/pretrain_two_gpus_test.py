"""scripts/gpu/pretrain_two_gpus.py: what it compares, and in two processes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu" / "pretrain_two_gpus.py"
sys.path.append(str(SCRIPT.parent))
import pretrain_two_gpus as script  # noqa: E402

pytestmark = pytest.mark.cpu


def runs(names, **changed):
    """Runs with equal losses, but for another seed's; changed: the losses of some, by name."""
    losses = [3.0 - step / 10 for step in range(script.STEPS)]
    found = {}
    for name in names:
        own = [loss + 0.1 for loss in losses] if name == "another seed" else losses
        own = changed.get(name.replace(" ", "_").replace(",", ""), own)
        said = ["reduce-scatters: 7"] if name == "own memory" else []
        found[name] = {"losses": own, "norms": own, "said": said}
    return found


def test_a_named_run_has_those_that_it_is_compared_with():
    assert list(script.chosen(set())) == list(script.VARIANTS)
    shared = script.chosen({"shared experts"})
    assert list(shared) == ["another seed", "shared experts", "one GPU, twice the micro-batch"]
    assert "shared experts" not in script.chosen({"deterministic", "own memory"})


@pytest.mark.parametrize("only", [set(), {"shared experts"}, {"deterministic", "own memory"}])
def test_equal_runs_pass_and_each_difference_is_found(only):
    names = list(script.chosen(only))
    assert script.judge(runs(names)) == []
    off = [2.9 - step / 10 for step in range(script.STEPS)]
    for name in set(names) - {"another seed"}:
        found = script.judge(runs(names, **{name.replace(" ", "_").replace(",", ""): off}))
        assert any(f"{name} and " in line or f" and {name} differ" in line for line in found), name
    constant = runs(names) | {"another seed": runs(["own memory"])["own memory"]}
    assert any("another seed agree" in line for line in script.judge(constant))


@pytest.mark.long
def test_processes_that_share_the_experts_train_as_one(tmp_path):
    file = tmp_path / "losses.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--json", file, "--work", tmp_path / "work",
         "--only", "shared experts"],
        capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["wrong"] == []
