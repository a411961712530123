"""What the documentation shows of the module runs as it stands there."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_the_module_s_section():
    page = (ROOT / "docs" / "pytorch.md").read_text()
    section = page.split("## The module\n")[1].split("\n## ")[0]
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
