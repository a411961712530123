"""Read the timed layers by name from layers.inc, which C++ includes; without torch."""

import pathlib
import re
from typing import NamedTuple


class Layer(NamedTuple):
    """Sizes: T tokens, hidden size d, intermediate size n, E experts, K experts per token."""

    T: int
    d: int
    n: int
    E: int
    K: int


_ENTRY = re.compile(r'^LAYER\("([^"]+)", "(cuda|cpu)", (\d+), (\d+), (\d+), (\d+), (\d+)\)$')


def _read():
    found = {"cuda": {}, "cpu": {}}
    for line in pathlib.Path(__file__).with_name("layers.inc").read_text().splitlines():
        if line.startswith("LAYER"):
            name, device, *sizes = _ENTRY.match(line).groups()
            found[device][name] = Layer(*map(int, sizes))
    return found


LAYERS = _read()
"""{"cuda": {name: Layer}, "cpu": {name: Layer}}: the sizes meant for a GPU and for a CPU."""
