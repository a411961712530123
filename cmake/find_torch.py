"""Finds torch without importing it, which takes seconds. Run: prints its version and its folder."""

import importlib.metadata
import site
import sys


def find_torch():
    """-> (version, folder), or None. A build in isolation has the packages of the environment that it
    is for hidden from its path, so that environment's folders are searched too."""
    path = [*sys.path, *site.getsitepackages()]
    for found in importlib.metadata.distributions(name="torch", path=path):
        return found.version, str(found.locate_file("torch"))
    return None


if __name__ == "__main__":
    torch = find_torch() or sys.exit("no torch")
    print(*torch, sep="\n")
