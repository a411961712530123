"""Detect the command `tilemoe`, which runs even if the package cannot be used."""

import sys
from pathlib import Path


def is_module(name: str) -> bool:
    """Return True in `python -m name`, while it imports the package of the module that it runs."""
    words = getattr(sys, "argv", None)  # missing in a program that embeds Python
    if not words or words[0] != "-m":
        return False
    return sys.orig_argv[len(sys.orig_argv) - len(words)] in (name, f"-m{name}")


def is_command() -> bool:
    """Return True in `python -m tilemoe` and in the console script `tilemoe`."""
    words = getattr(sys, "argv", None)
    if __package__ != "tilemoe" or not words:
        return False
    return is_module("tilemoe") or words[0] != "-m" and Path(words[0]).name == "tilemoe"
