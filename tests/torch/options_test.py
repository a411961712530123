"""The options of the layer (tilemoe.options): one list, which the functions' signatures, docstrings
and operators, and the table of docs/pytorch.md, agree with."""

import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import tilemoe
from checks import refused
from tilemoe import _options_table, _signatures, expert_parallel, functional, options
from tilemoe.options import Options

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(d=32, n=16, E=6, K=2)
KINDS = {name: kind for name, kind in vars(options).items() if name.startswith("Of")}
SHOWN = {
    "moe": (tilemoe.moe, options.OfMoe),
    "moe_general": (tilemoe.moe_general, options.OfRows),
    "grouped_experts": (tilemoe.grouped_experts, options.OfRows),
    "top_k": (tilemoe.top_k, options.OfTopK),
    "scores_at": (tilemoe.scores_at, options.OfScores),
    "rounded_router": (tilemoe.rounded_router, options.OfRounding),
    "expert_parallel.moe": (expert_parallel.moe, options.OfRanks),
    "plan": (expert_parallel.plan, options.OfPlan),
    "MoE": (tilemoe.MoE, options.OfModule),
}


def layer(T=5):
    torch.manual_seed(0)
    d, n, E = (SIZES[size] for size in "dnE")
    return torch.randn(T, d), torch.randn(T, E), torch.randn(E, 2 * n, d), torch.randn(E, d, n)


@pytest.mark.parametrize("kind", KINDS)
def test_a_functions_options_are_those_of_the_list(kind):
    """The types of keywords, for type checkers, have no names and no types of their own."""
    hints = get_type_hints(KINDS[kind])
    assert hints and hints == {name: options.TYPES[name] for name in hints}


def test_every_option_has_a_function_and_a_text():
    taken = {name for kind in KINDS.values() for name in get_type_hints(kind)}
    assert taken == set(options.FIELDS)
    for name, field in options.FIELDS.items():
        assert field.metadata["doc"].endswith("."), name
        assert field.metadata["pack"] in (None, "rule", "numbers", "reals"), name


@pytest.mark.parametrize("name", SHOWN)
def test_help_shows_every_option_once(name):
    function, kind = SHOWN[name]
    parameters = inspect.signature(function).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in get_type_hints(kind):
        shown = parameters[option]
        assert shown.kind is shown.KEYWORD_ONLY
        assert shown.default == options.DEFAULTS[option], option
        assert shown.annotation == options.TYPES[option], option
        (text,) = re.findall(rf"^    {option}: (.*)$", function.__doc__, re.MULTILINE)
        assert options.FIELDS[option].metadata["doc"].startswith(text), option
    assert max(map(len, function.__doc__.splitlines())) <= 100


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "pytorch.md").read_text()
    assert _options_table.written(page) == page, "python -m tilemoe.options docs/pytorch.md"
    tables = _options_table.tables()
    assert [*tables] == [*_options_table.TABLES]
    rows = re.findall(r"^\| `(\w+)`", "".join(tables.values()), re.MULTILINE)
    assert rows == [*options.FIELDS]


def test_an_unknown_name_is_a_type_error():
    x, logits, W1, W2 = layer()
    sentence = r"moe\(\) got an unexpected keyword argument 'scorings', did you mean 'scoring'\?"
    refused(TypeError, sentence, tilemoe.moe, x, logits, W1, W2, K=2, scorings="sigmoid")
    for call in (
        lambda: tilemoe.moe_general(x, *[logits] * 3, W1, W2, scoring="sigmoid"),
        lambda: tilemoe.grouped_experts(x, logits, W1, W2, K=2),
        lambda: tilemoe.moe(x, logits, W1, W2, K=2, capacity_factor=1.0),
        lambda: tilemoe.top_k(logits, 2, activation="silu"),
        lambda: tilemoe.MoE(**SIZES, gate_layout="split"),
        lambda: tilemoe.MoE(**SIZES, beneath=True),
    ):
        refused(TypeError, "got an unexpected keyword argument", call)


def test_a_value_of_a_wrong_type_is_refused_by_its_name():
    x, logits, W1, W2 = layer()
    integers = ("K", "n_group", "topk_group", "column_blocks", "weight_blocks")
    for name in integers:
        for wrong in ("x", 1.5, True):
            sentence = rf"^{name} must be an int, got {wrong!r}$"
            refused(TypeError, sentence, tilemoe.moe, x, logits, W1, W2, **{"K": 2, name: wrong})
    for name in ("clamp", "alpha", "up_shift", "routed_scaling_factor"):
        for wrong in ("x", [1.0], None):
            sentence = rf"^{name} must be a number, got {re.escape(repr(wrong))}$"
            refused(TypeError, sentence, tilemoe.moe, x, logits, W1, W2, **{"K": 2, name: wrong})
    moe = tilemoe.MoE(**SIZES)
    sentence = "^column_blocks must be an int, got 'x'$"
    refused(TypeError, sentence, setattr, moe, "column_blocks", "x")


def test_a_wrong_value_is_refused_after_an_equal_one():
    """A reader keeps Options by their values; those of another type are not the same."""
    x, logits, W1, W2 = layer()
    given = dict(ids=torch.zeros(5, 2, dtype=torch.int64), capacity=1)
    tilemoe.moe(x, logits[:, :2], W1, W2, **given)
    for wrong in (True, 1.0, [1], torch.tensor(1)):
        with pytest.raises(ValueError, match="capacity must be an int >= 1, got "):
            tilemoe.moe(x, logits[:, :2], W1, W2, **given | dict(capacity=wrong))


def test_a_reader_keeps_what_it_made():
    reader = _signatures.Reader("f", options.OfMoe)
    made = reader(dict(K=2, clamp=7.0))
    assert made is reader(dict(K=2, clamp=7.0)) and made == Options(K=2, clamp=7.0)
    assert made is not reader(dict(K=3, clamp=7.0)) and reader({}) is reader({})
    for capacity in range(1, _signatures.MAX_KEPT + 2):
        reader(dict(capacity=capacity))
    assert len(reader._kept) <= _signatures.MAX_KEPT


def test_options_are_frozen_and_packed():
    made = Options(K=2, scoring="sigmoid", n_group=2, activation="geglu", column_blocks=3,
                   weight_blocks=4)  # fmt: skip
    assert made.numbers == [0, 2, 3, 2, 1, 0, 1, 0, 3, 4, 0, 0] and made.rule == made.numbers[:6]
    assert Options(n_group=2).rule[options.At.GROUP_SCORE] == 1  # "max" with a softmax
    assert Options(clamp=7.0, alpha=1.5, routed_scaling_factor=2.5).reals == [2.5, 7.0, 1.5, 0.0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.K = 3
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made and copy.numbers == made.numbers


def test_a_modules_options_are_attributes():
    moe = tilemoe.MoE(**SIZES, rounding="up", m=4)
    assert moe.rounding == "up" and moe.options.m == 4 and moe.K == 2
    moe.rounding, moe.overwrite_H = None, False
    assert moe.options == Options(K=2, m=4, overwrite_H=False)
    with pytest.raises(ValueError, match="rounding must be one of .*, got 'half'"):
        moe.rounding = "half"
    x = torch.randn(5, SIZES["d"])
    before = moe(x)
    moe.scoring = "sigmoid"
    assert not torch.equal(moe(x), before)
    assert moe.experts.activation == "swiglu" and moe.capacity_factor is None


@pytest.mark.parametrize("dynamic", [None, True])
def test_options_are_compiled(dynamic):
    torch._dynamo.reset()
    x, logits, W1, W2 = layer()
    call = torch.compile(functional.moe, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for given in (dict(K=2), dict(K=3, scoring="sigmoid"), dict(K=2, clamp=7.0, alpha=1.702)):
        want = tilemoe.moe(x, logits, W1, W2, **given)
        assert torch.equal(call(x, logits, W1, W2, **given), want)
    torch._dynamo.reset()
