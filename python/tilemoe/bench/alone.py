"""Runs worker.py as a part of this folder alone: `python alone.py --peer NAME --case JSON`, in any
Python that has torch and the peer."""

import importlib.util
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
NAME = "tilemoe_bench"


def load():
    """This folder as a package of its own."""
    spec = importlib.util.spec_from_file_location(
        NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose file names are no modules
    load()
    importlib.import_module(NAME + ".worker").main()
