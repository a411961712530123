"""The blocks of the documentation run on a machine with a GPU as they stand there; README's block of
PyTorch, and that of fine-tuning, also use it. Run by --device cuda."""

import re

import pytest
import torch

from checks import python
from documented import ALONE, ROOT, need_packages


@pytest.fixture
def users_defaults():
    """The default device of a process that has not set it, not that of these tests."""
    device = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(device)


@pytest.mark.usefixtures("users_defaults")
@pytest.mark.parametrize("page, block", [block[:2] for block in ALONE], ids=[b[0] for b in ALONE])
def test_a_block(page, block):
    need_packages(block)
    exec(compile(block, page, "exec"), {})


def learns(block, on_gpu):
    """The block runs, ends with what is asserted of it, and its three losses fall."""
    out = python("-c", f"{block}\nassert {on_gpu}\n")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], out


def test_readmes_block():
    section = (ROOT / "README.md").read_text().split("\n## PyTorch\n")[1].split("\n## ")[0]
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    learns(block, "out.is_cuda and {p.device.type for p in moe.parameters()} == {'cuda'}")


def test_the_block_of_finetuning():
    pytest.importorskip("peft", reason="peft is not installed")
    page = (ROOT / "docs" / "finetuning.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    learns(block, "{p.device.type for p in model.parameters()} == {'cuda'}")
