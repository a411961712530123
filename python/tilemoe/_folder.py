"""The folder of the operators' libraries. Imports no torch."""

import os
from pathlib import Path


def directory() -> Path:
    """The folder of the libraries: TILEMOE_LIBRARY_DIR (a build tree's bindings/torch), else `lib`
    here. A copy with another package name, as Hugging Face's kernels load it, uses its own."""
    given = os.environ.get("TILEMOE_LIBRARY_DIR") if __package__ == "tilemoe" else None
    return Path(given) if given else Path(__file__).parent / "lib"
