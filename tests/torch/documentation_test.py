"""What the documentation shows runs as it stands there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import tilemoe

ROOT = pathlib.Path(__file__).parents[2]


PAGE = (ROOT / "docs" / "pytorch.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_its_blocks():
    assert len(BLOCKS) >= 2
    ten_lines = PAGE.split("## Ten lines that work\n")[1].split("\n## ")[0]
    assert BLOCKS[0] in ten_lines


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block(block):
    names = {}
    exec(compile(block, "docs/pytorch.md", "exec"), names)
    assert names["out"].shape == names["x"].shape


def test_every_public_name_is_told_of():
    assert [name for name in tilemoe.__all__ if name not in PAGE] == []


def run_example(name):
    """What it prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_functions_example_learns():
    before, after = map(float, re.findall(r"loss (\S+) nats", run_example("pytorch_functions.py")))
    assert after < before - 2


def test_the_module_example_learns():
    losses = re.findall(r"loss (\S+) -> (\S+)", run_example("pytorch_module.py"))
    assert len(losses) == 2
    assert all(float(last) < 0.6 * float(first) for first, last in losses), losses
