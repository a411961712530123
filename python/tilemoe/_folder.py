"""Find the folder of the operators' libraries. Imports no torch."""

import os
from pathlib import Path


def directory() -> Path:
    """Return the folder of the libraries.

    The folder is TILEMOE_LIBRARY_DIR (bindings/torch of a build tree), else `lib` in this package.
    A copy of the package with another name, as Hugging Face's kernels load it, uses its own folder.
    """
    given = os.environ.get("TILEMOE_LIBRARY_DIR") if __package__ == "tilemoe" else None
    return Path(given) if given else Path(__file__).parent / "lib"
