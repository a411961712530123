"""Where the operators' libraries are. Imports no torch."""

import os
from pathlib import Path


def directory() -> Path:
    """Where the libraries are: TILEMOE_LIBRARY_DIR (a build tree's bindings/torch), else here. A
    copy that goes by another name than tilemoe, as Hugging Face's kernels load it, has its own."""
    given = os.environ.get("TILEMOE_LIBRARY_DIR") if __package__ == "tilemoe" else None
    return Path(given) if given else Path(__file__).parent / "lib"
