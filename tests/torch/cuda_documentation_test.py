"""README's block of PyTorch runs on a GPU as it stands there. Run by --device cuda."""

import pathlib
import re

from checks import python

ROOT = pathlib.Path(__file__).parents[2]


def test_readmes_block():
    section = (ROOT / "README.md").read_text().split("\n## PyTorch\n")[1].split("\n## ")[0]
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    on_gpu = "\nassert out.is_cuda and {p.device.type for p in moe.parameters()} == {'cuda'}\n"
    out = python("-c", block + on_gpu)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", out)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], out
