"""README's block of PyTorch runs on a GPU as it stands there. Run by --device cuda."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_readmes_block():
    section = (ROOT / "README.md").read_text().split("\n## PyTorch\n")[1].split("\n## ")[0]
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    on_gpu = "\nassert out.is_cuda and {p.device.type for p in moe.parameters()} == {'cuda'}\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", block + on_gpu],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", done.stdout)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], done.stdout
