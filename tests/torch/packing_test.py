"""The order of the lists that operators take is defined twice: in packing.h, by which they
read them, and in tilemoe._layout, by which they are written."""

import re
from pathlib import Path

from tilemoe import _layout, _shapes, options

HEADER = Path(__file__).parents[2] / "bindings" / "torch" / "packing.h"
TEXT = re.sub(r"//.*", "", HEADER.read_text())


def names(array):
    (found,) = re.findall(rf"{array}\[\] = {{(.*?)}};", TEXT, re.DOTALL)
    return tuple(re.findall(r'"(\w+)"', found))


def fields(record, kind):
    """Those of a record within one in their place."""
    (found,) = re.findall(rf"struct {record} {{(.*?)}};", TEXT, re.DOTALL)
    declared = re.findall(r"(\w+) (\w+);", found)
    assert len(declared) == found.count(";") > 0
    made = ()
    for of, name in declared:
        made += (name,) if of == kind else fields(of, kind)
    return made


def test_lists_of_tensors():
    assert names("kWeightNames") == _layout.WEIGHTS
    assert names("kGradientNames") == _layout.GRADIENTS


def test_lists_of_numbers():
    assert fields("Rule", "int64_t") == options.RULE
    assert fields("Numbers", "int64_t") == options.NUMBERS
    assert fields("Sizes", "int64_t") == _layout.SIZES
    assert fields("Reals", "double") == options.REALS


def test_places_in_them():
    places = {name: at for name, at in vars(options.At).items() if name.isupper()}
    of_lists = [*enumerate(options.NUMBERS), *enumerate(options.REALS)]
    assert places == {name.upper(): i for i, name in of_lists}
    assert options.NUMBERS[: len(options.RULE)] == options.RULE


def test_bits_of_gradients():
    """The header holds its places to tilemoe.h's bits as it is compiled."""
    bits = {name: bit for name, bit in vars(_shapes).items() if name.startswith("WANTED_")}
    wanted = {f"WANTED_{name[1:].upper()}": 1 << i for i, name in enumerate(_layout.GRADIENTS)}
    assert bits == wanted
