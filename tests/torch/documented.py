"""The code blocks of the documentation, as pages have them."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
CONTINUES = "# continues the block above\n"
# (page, block of Python, what the page says that it prints)
BLOCKS = [
    (page, block, printed)
    for page, text in PAGES.items()
    for block, printed in re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```)?", text, re.DOTALL)
]
# A block that continues the one above runs after it.
BLOCKS = [
    (page, above[1] + block if CONTINUES in block else block, printed)
    for above, (page, block, printed) in zip([BLOCKS[-1], *BLOCKS], BLOCKS)
]
OF_TRANSFORMERS = [block for block in BLOCKS if ".from_pretrained(" in block[1]]
# tests/jax/jax_documentation_test.py runs those of JAX.
ALONE = [block for block in BLOCKS if block not in OF_TRANSFORMERS and "tilemoe.jax" not in block[1]]


def need_packages(block):
    """Skip the test if a package that the block imports is not installed."""
    for package in ("transformers", "peft", "torchtitan"):
        if re.search(rf"^(from|import) .*\b{package}\b", block, re.MULTILINE):
            pytest.importorskip(package, reason=f"{package} is not installed")
