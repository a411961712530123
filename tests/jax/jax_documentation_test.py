"""The code blocks of the documentation that use JAX, the example, and the examples in docstrings."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tilemoe.jax

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (file.name, block, printed)
    for file in (ROOT / "README.md", ROOT / "docs" / "cpp.md")
    for block, printed in re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```)?", file.read_text(), re.DOTALL)
    if "tilemoe.jax" in block
]


def test_the_pages_have_their_blocks():
    assert [page for page, *_ in BLOCKS] == ["README.md", "cpp.md", "cpp.md"]


@pytest.mark.parametrize("page, block, printed", BLOCKS, ids=[page for page, *_ in BLOCKS])
def test_a_block(page, block, printed, capsys):
    names = {}
    exec(compile(block, page, "exec"), names)
    assert names.get("out", names["x"]).shape == names["x"].shape
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", tilemoe.jax.__all__)
def test_public_names(name):
    """Each has a docstring whose examples hold."""
    public = getattr(tilemoe.jax, name)
    if not callable(public):
        return
    assert public.__doc__
    names = {"tilemoe": tilemoe, "jax": jax, "jnp": jnp}
    for test in doctest.DocTestFinder(recurse=False).find(public, name, globs=names):
        assert doctest.DocTestRunner().run(test).failed == 0


def test_the_example_trains():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "jax" / "train.py", "--steps", "41"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[0] > 5 and losses[-1] < 2.6, done.stdout
