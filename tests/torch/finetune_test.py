"""The fine-tuning example, run as its page says: it learns, and as with `eager` experts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, and Trainer needs it")

ROOT = Path(__file__).parents[2]


def losses(experts, output):
    program = [sys.executable, str(ROOT / "examples" / "finetune_transformers.py")]
    options = ["--steps", "40", "--experts", experts, "--output", str(output)]
    run = subprocess.run(
        program + options,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    before, after = re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", run.stdout).groups()
    return float(before), float(after)


def test_the_example_learns_as_eager_does(tmp_path):
    before, after = losses("tilemoe", tmp_path / "tilemoe")
    assert after <= before - 1.5  # log(256) = 5.5 at the start, 3.2 of letters' frequencies alone
    assert (tmp_path / "tilemoe" / "model.safetensors").exists()
    eager_before, eager_after = losses("eager", tmp_path / "eager")
    assert before == pytest.approx(eager_before, abs=2e-3)
    assert after == pytest.approx(eager_after, abs=2e-2)
