"""Whether this process is the command `tilemoe`, which runs even if the package cannot be used."""

import sys
from pathlib import Path


def is_command() -> bool:
    """True in `python -m tilemoe` and in the console script `tilemoe`."""
    words = getattr(sys, "argv", None)  # a program that embeds Python may have none
    if __package__ != "tilemoe" or not words:
        return False
    if words[0] == "-m":  # while `python -m` imports the package of the module that it runs
        return sys.orig_argv[len(sys.orig_argv) - len(words)] in ("tilemoe", "-mtilemoe")
    return Path(words[0]).name == "tilemoe"
