"""What the documentation shows runs as it stands there."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("title", ["The module", "The functions"])
def test_a_section(title):
    page = (ROOT / "docs" / "pytorch.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    for block in blocks:
        names = {}
        exec(compile(block, "docs/pytorch.md", "exec"), names)
        assert names["out"].shape == names["x"].shape


def test_the_example_learns():
    script = ROOT / "examples" / "pytorch_module.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    losses = re.findall(r"loss (\S+) -> (\S+)", done.stdout)
    assert len(losses) == 2
    assert all(float(last) < 0.6 * float(first) for first, last in losses), done.stdout
