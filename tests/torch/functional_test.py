"""Every rule, layout and type of the functions against the reference: O and all gradients."""

import pytest
import torch

import reference
import tilemoe
from checks import refused
from comparison import Limits, assert_close
from random_layers import E, K, T, check, d, is_gated, logits_layer, n, normal, weights
from target import DEVICE, DTYPE, DTYPES
from tilemoe.options import ACTIVATIONS, GATED

ROUTER_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["concatenated", "interleaved", "split"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_rounding = pytest.mark.parametrize("rounding", reference.ROUNDINGS)
GPT_OSS = dict(clamp=1.5, alpha=1.702, up_shift=1.0)


@every_dtype
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations(activation, dtype):
    tensors = logits_layer(dtype, activation=activation, bias=True)
    check("moe", tensors, K=K, activation=activation)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("gate_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_layouts(dtype, gate_layout, transposed, bias):
    kinds = dict(gate_layout=gate_layout, transposed=transposed, bias=bias)
    check("moe", logits_layer(dtype, **kinds), K=K, gate_layout=gate_layout)


@pytest.mark.cpu  # where the clamp cuts, 16 bits round H to the other side of the kink
@pytest.mark.parametrize("gate_layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [GPT_OSS, {"clamp": 0.5}, {"alpha": 0.7}, {"up_shift": -0.5}], ids=str
)
def test_gpt_oss_form(shape, gate_layout):
    tensors = logits_layer(DTYPE, gate_layout=gate_layout, bias=True, transposed=True)
    check("moe", tensors, K=K, gate_layout=gate_layout, **shape)


# The kink is out of reach.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate_layout", LAYOUTS)
def test_gpt_oss_form_in_16_bits(gate_layout, dtype):
    tensors = logits_layer(dtype, gate_layout=gate_layout, bias=True, transposed=True)
    check("moe", tensors, K=K, gate_layout=gate_layout, **GPT_OSS | {"clamp": 7.0})


@pytest.mark.parametrize("logits_dtype", ROUTER_DTYPES, ids=str)
@pytest.mark.parametrize("scoring", reference.SCORINGS)
def test_scorings(scoring, logits_dtype):
    check("moe", logits_layer(DTYPE, logits_dtype), K=K, scoring=scoring)


def some_tokens(tensors, T):
    """The same layer with as many of its tokens."""
    cut = {k: tensors[k].detach()[:T].requires_grad_() for k in ("x", "logits_or_scores")}
    return tensors | cut


def counter_of(rounding):
    return dict(seed=5, offset=9) if rounding == "stochastic" else {}


@every_rounding
@pytest.mark.parametrize(
    "groups, m",
    [(None, 1), (None, 4), (None, 16), (None, 64), (2, 4), (3, 4), (4, 1), (36, 1), (1, 8)],
)
def test_rounding(rounding, groups, m):
    """Token rounding of all tokens, or of each of several groups of tokens."""
    options = dict(K=K, rounding=rounding, m=m, **counter_of(rounding))
    tensors = logits_layer(DTYPE)
    if groups is not None:
        tensors, options["rounding_tokens"] = some_tokens(tensors, 36), 36 // groups
    check("moe", tensors, **options)
    _, aux = tilemoe.moe(**tensors, **options, return_aux=True)
    _, expected = reference.moe(**tensors, **options, return_aux=True)
    for name, got, want in zip(aux._fields, aux, expected):
        assert torch.equal(got, want), (name, got, want)


# Scores that differ in their last bit: 16 bits then round an element in a hundred the other way.
LAST_BIT = {
    torch.float32: Limits(whole=2**-23, row=2**-21, smallest=0.1),
    torch.bfloat16: Limits(whole=2**-10, row=2**-7, smallest=0.1),
    torch.float16: Limits(whole=2**-13, row=2**-10, smallest=0.1),
}


@every_rounding
@pytest.mark.parametrize("tokens", [None, 12])
def test_rounded_pairs_give_the_same_layer(rounding, tokens):
    how = dict(rounding=rounding, m=4, rounding_tokens=tokens, **counter_of(rounding))
    tensors = some_tokens(logits_layer(DTYPE), 36)
    wanted = [t for t in tensors.values() if t.requires_grad]
    out, aux = tilemoe.moe(**tensors, K=K, **how, return_aux=True)
    layer = {name: tensors[name] for name in ("x", "W1", "W2")}
    pairs = tilemoe.rounded_router(tensors["logits_or_scores"], K, **how)
    given = dict(zip(("tokens", "experts", "scores"), pairs))
    names = ["O", *(k for k, t in tensors.items() if t.requires_grad)]
    dO = normal(*out.shape, seed=30, dtype=DTYPE)

    def with_gradients(O):
        return dict(zip(names, [O, *torch.autograd.grad(O, wanted, dO, retain_graph=True)]))

    same, of_pairs = tilemoe.moe_general(**layer, **given, return_aux=True)
    there = int(36 * K - aux.dropped + aux.added)
    assert (pairs[0] < 36).sum() == (pairs[1] < E).sum() == there
    assert of_pairs.without == aux.without and of_pairs.expert_counts.sum() == there
    want = with_gradients(out)

    def compare(got):
        for name, tensor in got.items():
            assert_close(tensor, want[name].double(), name, LAST_BIT[tensor.dtype])

    compare(with_gradients(same))
    without_one = torch.where(given["experts"] == 2, E, given["experts"])
    spoiled = [with_gradients(tilemoe.moe_general(**layer, **given | {"experts": without_one}))]
    spoiled += [want | {name: torch.zeros_like(want[name])} for name in names]
    spoiled += [want | {name: want[name].roll(1, dims=0)} for name in names]
    for got in spoiled:
        with pytest.raises(AssertionError):
            compare(got)


def test_rounding_that_does_not_fit_is_refused():
    logits = torch.zeros(2, 3, 4, device=DEVICE)
    refused(ValueError, "logits has shape", tilemoe.rounded_router, logits, 2, rounding="up")
    for tokens in (0, 5, 36, 38):
        said = f"rounding_tokens must divide T = 37, got {tokens}"
        how = dict(K=K, rounding="up", rounding_tokens=tokens)
        refused(ValueError, said, tilemoe.moe, **logits_layer(DTYPE), **how)


def test_tokens_without_an_expert():
    """Rounded down to nothing; and of given pairs those that are all skipped."""
    tensors = logits_layer(DTYPE)
    _, aux = tilemoe.moe(**tensors, K=K, rounding="down", m=T, return_aux=True)
    counts = tilemoe.moe(**tensors, K=K, return_aux=True)[1].expert_counts
    assert counts.max() < T and aux.without == T and aux.dropped == T * K
    ids = torch.zeros(T, K, dtype=torch.int32, device=DEVICE)
    ids[::3] = -1
    ids[1] = E
    tensors["logits_or_scores"] = normal(T, K, seed=22, dtype=torch.float32)
    _, aux = tilemoe.moe(**tensors, ids=ids, return_aux=True)
    assert aux.without == len(range(0, T, 3)) + 1


def leaf(*shape, seed, dtype=DTYPE):
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def chosen(dtype=DTYPE, scores_dtype=torch.float32, **kinds):
    """Arguments of `moe` with scores and ids."""
    return {
        "x": leaf(T, d, seed=20, dtype=dtype),
        "logits_or_scores": leaf(T, K, seed=22, dtype=scores_dtype),
        "ids": normal(T, E, seed=23, dtype=torch.float32).argsort(dim=1)[:, :K],
        **weights(dtype, **kinds),
    }


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("scores_dtype", ROUTER_DTYPES, ids=str)
def test_given_ids(scores_dtype, ids_dtype):
    tensors = chosen(scores_dtype=scores_dtype) | {"addend": leaf(T, d, seed=24)}
    tensors["ids"] = tensors["ids"].to(ids_dtype)
    check("moe", tensors)


def test_bad_ids_are_skipped():
    tensors = chosen(bias=True)
    tensors["ids"][::3, 1] = -1
    tensors["ids"][1::5, 0] = E
    tensors["ids"][7] = E + 100
    check("moe", tensors)
    bad = (tensors["ids"] < 0) | (tensors["ids"] >= E)
    O, aux = tilemoe.moe(**tensors, return_aux=True)
    assert aux.skipped == bad.sum()
    assert aux.expert_counts.sum() == T * K - bad.sum()
    assert not O[7].any()
    O.sum().backward()
    assert not tensors["logits_or_scores"].grad[bad].any()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_general(index_dtype):
    pairs = 61
    generator = torch.Generator().manual_seed(1)
    between = dict(size=(pairs,), generator=generator, dtype=index_dtype, device="cpu")
    tensors = {
        "x": leaf(T, d, seed=20),
        "tokens": torch.randint(0, T, **between).sort()[0].to(DEVICE),
        "experts": torch.randint(-1, E + 1, **between).to(DEVICE),
        "scores": leaf(pairs, seed=25, dtype=torch.float32),
        "addend": leaf(T, d, seed=24),
        **weights(DTYPE, bias=True),
    }
    check("moe_general", tensors)
    _, aux = tilemoe.moe_general(**tensors, return_aux=True)
    bad = (tensors["experts"] < 0) | (tensors["experts"] >= E)
    assert aux.skipped == bad.sum() and bad.any()


@every_dtype
@pytest.mark.parametrize("scored", [False, True], ids=["unscored", "scored"])
@pytest.mark.parametrize("gate_layout", ["concatenated", "split"])
def test_grouped(gate_layout, scored, dtype):
    R = 50
    tensors = {
        "rows": leaf(R, d, seed=26, dtype=dtype),
        "counts": torch.tensor([9, 0, 13, 1, 5, 0, 11]),
        "addend": leaf(R, d, seed=24, dtype=dtype),
        **weights(dtype, gate_layout=gate_layout),
    }
    if scored:
        tensors["row_scores"] = leaf(R, seed=27, dtype=torch.float32)
    past = int(tensors["counts"].sum())
    check("grouped_experts", tensors, gate_layout=gate_layout)
    tensors["rows"].data[past:] = torch.nan
    O = tilemoe.grouped_experts(**tensors, gate_layout=gate_layout)
    O.sum().backward()
    assert not O[past:].any() and not tensors["rows"].grad[past:].any()
    assert not tensors["addend"].grad[past:].any() and tensors["addend"].grad[:past].all()
    assert tensors["W1"].grad.isfinite().all()


ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 7e-4}  # of a gradient
near = torch.testing.assert_close


@pytest.mark.parametrize("dtype", ROUTER_DTYPES, ids=str)
def test_router_losses(dtype):
    logits, counts = leaf(T, E, seed=21, dtype=dtype), torch.arange(E, dtype=torch.int32) * 5 % 11
    wide = logits.detach().double().requires_grad_()
    got, want = tilemoe.router_losses(logits, counts), reference.router_losses(wide, counts)
    for one, of_float64 in zip(got, want):
        near(one.double(), of_float64, rtol=1e-5, atol=0)
    for balance, z in (got, want):
        (0.3 * balance + 0.7 * z).backward()
    atol = 1e-7 if dtype != torch.float16 else 1e-6
    near(logits.grad.double(), wide.grad, rtol=ROUNDED[dtype], atol=atol)


def test_leading_shapes():
    tensors = logits_layer(DTYPE)
    x, logits = (tensors.pop(name)[:36] for name in ("x", "logits_or_scores"))
    flat = tilemoe.moe(x, logits, **tensors, K=K)
    O = tilemoe.moe(x.reshape(3, 4, 3, d), logits.reshape(3, 4, 3, E), **tensors, K=K)
    assert O.shape == (3, 4, 3, d) and torch.equal(O.reshape(36, d), flat)
    scores, ids = tilemoe.topk_router(logits.reshape(3, 12, E), K)
    assert scores.shape == ids.shape == (3, 12, K)
    given = tilemoe.moe(x[:36].reshape(3, 12, d), scores, **tensors, ids=ids)
    assert torch.equal(given.reshape(36, d), flat[:36])


@pytest.mark.parametrize("name", ["tokens", "experts", "scores"])
def test_general_reads_every_other_element(name):
    tensors = logits_layer(DTYPE)
    x, _ = (tensors.pop(of) for of in ("x", "logits_or_scores"))
    pairs = {"tokens": torch.arange(T), "experts": torch.arange(T) % E,
             "scores": torch.linspace(0.1, 1, T)}  # fmt: skip
    pairs = {of: tensor.to(DEVICE) for of, tensor in pairs.items()}
    apart = torch.stack((pairs[name], pairs[name].flip(0)), dim=1)[:, 0]
    assert apart.stride() == (2,)
    O = tilemoe.moe_general(x, **pairs, **tensors)
    assert torch.equal(tilemoe.moe_general(x, **pairs | {name: apart}, **tensors), O) and O.any()


@pytest.mark.parametrize("step", [0, 1])
def test_rows_that_lie_over_each_other(step):
    """Those of an expanded tensor, and windows that slide, in x, logits and dO."""
    tensors = logits_layer(DTYPE)
    x, logits = tensors.pop("x").detach(), tensors.pop("logits_or_scores").detach()
    over = [x.as_strided((T, d), (step, 1)), logits.as_strided((T, E), (step, 1)),
            normal(T + d, seed=22, dtype=DTYPE).as_strided((T, d), (step, 1))]  # fmt: skip

    def layer(x, logits, dO):
        x, logits = (tensor.requires_grad_() for tensor in (x.detach(), logits.detach()))
        O = tilemoe.moe(x, logits, **tensors, K=K)
        return O, *torch.autograd.grad(O, (x, logits, tensors["W1"], tensors["W2"]), dO)

    apart = layer(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in over))
    assert all(map(torch.equal, layer(*over), apart)) and all(t.isfinite().all() for t in apart)


@pytest.mark.parametrize("T", [0, 1])
def test_small_T(T):
    tensors = some_tokens(logits_layer(DTYPE, bias=True), T)
    O = tilemoe.moe(**tensors, K=K)
    O.sum().backward()
    assert O.shape == (T, d)
    for name in ("W1", "W2", "b1", "b2"):
        gradient = tensors[name].grad
        assert gradient.shape == tensors[name].shape and gradient.isfinite().all()
        assert gradient.any() == bool(T)


def swap_gate_and_up(given):
    gate, up = given["W1"].chunk(2, dim=1)
    return given | {"W1": torch.cat([up, gate], dim=1)}


def drop_an_expert(given):
    keep = (torch.arange(E) != 2).to(given["W2"].dtype)
    return given | {"W2": given["W2"] * keep[:, None, None], "b2": given["b2"] * keep[:, None]}


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


SLIPS = {
    "zeros": lambda given: given | {"x": given["x"] * 0, "b2": given["b2"] * 0},
    "gate and up swapped": swap_gate_and_up,
    "an expert dropped": drop_an_expert,
    "scores ignored": lambda given: (
        given | {"logits_or_scores": torch.full_like(given["logits_or_scores"], 1 / K)}
    ),
    "b1 ignored": lambda given: given | {"b1": None},
    "b2 ignored": lambda given: given | {"b2": None},
    "wrong activation": lambda given: given | {"activation": "geglu"},
    "dX zeroed": lambda given: given | {"x": _ZeroGradient.apply(given["x"])},
    "router's gradient zeroed": lambda given: (
        given | {"logits_or_scores": _ZeroGradient.apply(given["logits_or_scores"])}
    ),
    "dW1 zeroed": lambda given: given | {"W1": _ZeroGradient.apply(given["W1"])},
    "two rows swapped": lambda given: given | {"x": given["x"][torch.tensor([1, 0, *range(2, T)])]},
}


@every_dtype
@pytest.mark.parametrize("slip", SLIPS)
def test_comparison_finds(slip, dtype):
    tensors = chosen(dtype, bias=True)
    check("moe", tensors, activation="swiglu")
    with pytest.raises(AssertionError):
        check("moe", tensors, edit=SLIPS[slip], activation="swiglu")


def test_every_activation_has_its_kind():
    kinds = {name: name in GATED for name in ACTIVATIONS}
    assert {name: is_gated(name) for name in reference.ACTIVATIONS} == kinds
    assert weights(DTYPE, activation="relu")["W1"].shape == (E, n, d)
