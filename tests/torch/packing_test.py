"""The lists that operators take, and the routing's tensor: the operators read them in the order of
options.inc, packing.h and the library's table; tilemoe.options and tilemoe._layout write them."""

import re
from pathlib import Path

import pytest
import torch

import tilemoe
from tilemoe import _layout, _library, _shapes, options

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.sub(r"//.*", "", (ROOT / "bindings" / "torch" / "packing.h").read_text())


def names(array):
    (found,) = re.findall(rf"{array}\[\] = {{(.*?)}};", TEXT, re.DOTALL)
    return tuple(re.findall(r'"(\w+)"', found))


def test_lists_of_tensors():
    assert names("kWeightNames") == _layout.WEIGHTS
    assert names("kGradientNames") == _layout.GRADIENTS
    assert names("kFactorNames") == _layout.FACTORS


@pytest.mark.parametrize(
    "record, fields",
    [("Sizes", _layout.SIZES), ("LoraRanks", _layout.RANKS), ("LoraScales", _layout.SCALES)],
)
def test_records(record, fields):
    (found,) = re.findall(rf"struct {record} {{(.*?)}};", TEXT, re.DOTALL)
    assert tuple(re.findall(r"(?:int64_t|double) (\w+);", found)) == fields


def test_options():
    rule, numbers, reals = map(tuple, _library.operators.option_names())
    assert rule == options.RULE and rule + numbers == options.NUMBERS and reals == options.REALS


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


@pytest.mark.cpu
def test_a_routings_arrays():
    """The general routing of given pairs, and the sizes that the operators allocate."""
    T, E, pairs = 5, 3, 6
    tokens, experts = torch.tensor([0, 0, 1, 3, 3, 4]), torch.tensor([1, 2, 1, 0, 2, 1])
    scores = torch.arange(1.0, pairs + 1)
    routing = _library.operators.route_general(tokens, experts, scores, T, E)
    sizes = (options.GENERAL, T, E, pairs)
    assert routing.numel() == _layout.routing_elements(*sizes)
    array = lambda name: _layout.array_of(name, routing, *sizes)  # noqa: E731
    assert array("offsets").tolist() == _layout.offsets_of(routing, E).tolist() == [0, 1, 4, 6]
    assert array("row_token").tolist() == [3, 0, 1, 4, 0, 3]
    assert array("row_score").view(torch.float32).tolist() == [4.0, 1.0, 3.0, 6.0, 2.0, 5.0]
    assert array("pair_row").tolist() == [1, 4, 2, 0, 5, 3]
    assert array("token_offsets").tolist() == [0, 2, 3, 3, 5, 6]
    assert array("counters").tolist() == _layout.counters_of(routing).tolist() == [0] * 4
    with pytest.raises(RuntimeError, match="kind must be a tilemoe_routing_kind, got 4"):
        tilemoe._library.operators.routing_layout(4)
