"""Low-rank adapters: against float64 with the sums W + scale B A, against merged weights, and the
bits of the layer without adapters where B = 0."""

import pytest
import torch

import reference
import tilemoe
from checks import Calls, refused, same_bits
from comparison import assert_close, doubled
from random_layers import (
    E, K, T, compare, d, expected_errors, is_gated, logits_layer, n, normal, results, weights,
)  # fmt: skip
from tilemoe import _layout, options

FIELDS = ("A1", "B1", "A1_up", "B1_up", "A2", "B2")
SCALE = (0.5, 1.5)


def factors(tensors, ranks=(5, 16, 3), seed=40, dtype=torch.float32):
    """{field: leaf} for a layer's weights; ranks of W1, W2 and a split gate's W1_up; 0: absent."""
    made = {}
    rows = tensors["W1"].shape[1]
    of = {"1": (ranks[0], rows, d), "2": (ranks[1], d, n)}
    if "W1_up" in tensors:
        of["1_up"] = (ranks[2], n, d)
    for name, (rank, out, width) in of.items():
        if rank:
            A = normal(E, rank, width, seed=seed, dtype=dtype, scale=width**-0.5)
            B = normal(E, out, rank, seed=seed + 1, dtype=dtype, scale=rank**-0.5)
            made[f"A{name}"], made[f"B{name}"] = A.requires_grad_(), B.requires_grad_()
        seed += 2
    return made


def merged(tensors, lora, scale=SCALE):
    """The layer's tensors with W + scale B A for W."""
    made = dict(tensors)
    scales = {"1": scale[0], "1_up": scale[0], "2": scale[1]}
    for name, s in scales.items():
        weight = f"W{name}"
        if f"A{name}" in lora:
            made[weight] = tensors[weight] + s * lora[f"B{name}"] @ lora[f"A{name}"]
    return made


def adapted(function):
    """The function with the factors among its tensors."""

    def call(scale=SCALE, **given):
        lora = {field: given.pop(field) for field in FIELDS if field in given}
        return function(**given, lora=tilemoe.LoRA(**lora, scale=scale))

    return call


def check(name, tensors, lora, edit=None, frozen=True, **how):
    """Compares O and all gradients with the reference. edit: changes what tilemoe gets."""
    dtype = tensors["x" if "x" in tensors else "rows"].dtype
    every = {**(without_gradients(tensors) if frozen else tensors), **lora}
    yardstick = lambda **more: results(
        adapted(getattr(reference, name)), doubled(every), dO_dtype=dtype, **how, **more
    )
    want = yardstick()
    function = adapted(getattr(tilemoe, name))
    if edit is not None:
        inner = function
        function = lambda **given: inner(**edit(given))  # noqa: E731
    got = results(function, every, **how)
    limits = None
    if dtype != torch.float32:
        limits = expected_errors(got, want, yardstick(stored=dtype))
    compare(got, want, every, limits)
    for field in lora:
        assert got[f"d{field}"].dtype == lora[field].dtype


def without_gradients(tensors):
    """The layer with frozen weights and biases."""
    return {k: t.detach() if k.startswith(("W", "b")) else t for k, t in tensors.items()}


KINDS = [
    dict(activation=activation, gate_layout=layout)
    for activation in options.ACTIVATIONS
    for layout in ("concatenated", "interleaved", "split")
    if is_gated(activation) or layout == "concatenated"
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_every_activation_and_layout(kind):
    tensors = logits_layer(torch.float32, bias=True, **kind)
    check("moe", tensors, factors(tensors), K=K, **kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor_dtype", [torch.float32, None], ids=["float32", "16 bits"])
def test_16_bits(dtype, factor_dtype):
    tensors = logits_layer(dtype)
    check("moe", tensors, factors(tensors, dtype=factor_dtype or dtype), K=K)


@pytest.mark.parametrize(
    "ranks", [(8, 0, 0), (0, 8, 0), (0, 0, 8), (1, 7, 9), (256, 200, 256)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_ranks_of_a_split_gate(ranks, transposed):
    tensors = logits_layer(torch.float32, gate_layout="split", transposed=transposed)
    check("moe", tensors, factors(tensors, ranks), K=K, gate_layout="split")


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_transposed_weights(layout):
    tensors = logits_layer(torch.float32, gate_layout=layout, transposed=True)
    check("moe", tensors, factors(tensors), K=K, gate_layout=layout)


@pytest.mark.parametrize("ranks", [(8, 0, 0), (0, 8, 0)], ids=["W1", "W2"])
def test_one_weight_alone(ranks):
    tensors = logits_layer(torch.float32)
    check("moe", tensors, factors(tensors, ranks), K=K)


def test_weights_that_require_gradients_too():
    tensors = logits_layer(torch.float32, bias=True)
    check("moe", tensors, factors(tensors), frozen=False, K=K)


def test_strides_of_factors():
    tensors = logits_layer(torch.float32)
    lora = {k: t.detach().mT.contiguous().mT.requires_grad_() for k, t in factors(tensors).items()}
    assert not lora["A1"].is_contiguous()
    check("moe", tensors, lora, K=K)
    # As PEFT stores B: (out, r, E).
    lora["B1"] = lora["B1"].detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
    check("moe", tensors, lora, K=K)


@pytest.mark.parametrize("scored", [False, True])
def test_grouped(scored):
    tensors = {
        "rows": normal(50, d, seed=26, dtype=torch.float32).requires_grad_(),
        "counts": torch.tensor([9, 0, 13, 1, 5, 0, 11]),
        "addend": normal(50, d, seed=24, dtype=torch.float32).requires_grad_(),
        **weights(torch.float32),
    }
    if scored:
        tensors["row_scores"] = normal(50, seed=27, dtype=torch.float32).requires_grad_()
    check("grouped_experts", tensors, factors(tensors))


def test_general():
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "x": normal(T, d, seed=20, dtype=torch.float32).requires_grad_(),
        "tokens": torch.randint(0, T, (61,), generator=generator).sort()[0],
        "experts": torch.randint(-1, E + 1, (61,), generator=generator),
        "scores": normal(61, seed=25, dtype=torch.float32).requires_grad_(),
        **weights(torch.float32, bias=True),
    }
    check("moe_general", tensors, factors(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["concatenated", "split"])
def test_zero_B_has_the_bits_of_the_frozen_layer(dtype, layout):
    tensors = logits_layer(dtype, gate_layout=layout)
    lora = factors(tensors)
    for field in lora:
        if field.startswith("B"):
            lora[field] = torch.zeros_like(lora[field]).requires_grad_()
    for key in ("W1", "W2", "W1_up"):
        if key in tensors:
            tensors[key] = tensors[key].detach()
    how = dict(K=K, gate_layout=layout)
    got = results(adapted(tilemoe.moe), {**tensors, **lora}, **how)
    want = results(tilemoe.moe, tensors, **how)
    same_bits({key: got[key] for key in want}, want)
    assert not got["dA1"].any() and not got["dA2"].any()
    assert got["dB1"].any() and got["dB2"].any()


def test_merged_weights_agree():
    tensors = logits_layer(torch.float32)
    lora = factors(tensors)
    got = adapted(tilemoe.moe)(**tensors, **lora, K=K)
    assert_close(got, tilemoe.moe(**merged(tensors, lora), K=K))


@pytest.mark.parametrize("scoring", reference.SCORINGS)
def test_scorings(scoring):
    tensors = logits_layer(torch.float32)
    check("moe", tensors, factors(tensors), K=K, scoring=scoring)


def operators(tensors, lora, **how):
    """The operators that a forward and, of what requires one, a backward run."""
    with Calls() as calls:
        O = adapted(tilemoe.moe)(**tensors, **lora, K=K, **how)
        if O.requires_grad:
            O.sum().backward()
    return [name for name, _ in calls.seen], calls


@pytest.mark.parametrize("overwrite_H, way", [(True, "_over_H"), (False, "")])
def test_training_packs_once_and_has_one_call_of_backward(overwrite_H, way):
    tensors = logits_layer(torch.float32)
    names, calls = operators(without_gradients(tensors), factors(tensors), overwrite_H=overwrite_H)
    backward = f"experts_lora_backward{way}"
    assert names == ["route_logits", "pack_lora", "experts_lora", backward, "router_backward"]
    wanted = calls.of(backward)[0][-1]
    assert wanted == 0b11 | 0b110011 << len(_layout.GRADIENTS)  # dX, ds, A1, B1, A2, B2


def test_inference_keeps_nothing():
    tensors = logits_layer(torch.float32)
    with torch.no_grad():
        names, calls = operators(tensors, factors(tensors))
    assert names == ["route_logits", "pack_lora", "experts_lora"]
    (arguments,) = calls.of("experts_lora")
    assert arguments[-1] is False
    assert [t.numel() for t in torch.ops.tilemoe.experts_lora(*arguments)[1:]] == [0, 0, 0]


def test_a_consumed_H_is_an_error():
    tensors = logits_layer(torch.float32)
    O = adapted(tilemoe.moe)(**tensors, **factors(tensors), K=K, overwrite_H=True)
    O.sum().backward(retain_graph=True)
    refused(RuntimeError, "an earlier backward wrote dH over the saved H", O.sum().backward)


# ---------------------------------------------------------------- what the comparison finds


def swap_an_expert(given):
    A1 = given["A1"]
    return given | {"A1": torch.cat([A1[1:2], A1[:1], A1[2:]])}


def rank_major(given):
    """B1 (out, r, E) in memory, read as (E, out, r)."""
    B1 = given["B1"]
    return given | {"B1": B1.permute(1, 2, 0).reshape(B1.shape)}


def scaled_twice(given):
    return given | {"B2": given["B2"] * SCALE[1]}


def scaled_by_the_other(given):
    return given | {"scale": SCALE[::-1]}


@pytest.mark.parametrize("slip", [swap_an_expert, rank_major, scaled_twice, scaled_by_the_other])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_comparison_finds(slip, dtype):
    tensors = logits_layer(dtype)
    check("moe", tensors, factors(tensors), K=K)
    with pytest.raises(AssertionError, match="error"):
        check("moe", tensors, factors(tensors), edit=slip, K=K)


# ---------------------------------------------------------------- refusals


def wrong(**fields):
    tensors = {key: t.detach() for key, t in logits_layer(torch.float32).items()}
    lora = tilemoe.LoRA(**factors(tensors))._replace(**fields)
    return lambda: tilemoe.moe(**tensors, K=K, lora=lora)


WRONG = {
    "lora.A1 has shape .* expected three dimensions": dict(A1=torch.zeros(E, 8)),
    r"lora.A1 has shape \(7, 5, 32\), expected \(7, 5, 40\)": dict(A1=torch.zeros(E, 5, d - 8)),
    r"lora.B1 has shape \(7, 48, 6\), expected \(7, 48, 5\)": dict(B1=torch.zeros(E, 2 * n, 6)),
    r"lora.A2 has shape \(6, 16, 24\)": dict(A2=torch.zeros(E - 1, 16, n)),
    "lora.A1 requires lora.B1, got None": dict(B1=None),
    "lora.B2 requires lora.A2, got None": dict(A2=None),
    r"lora.A1 must have a rank in \[1, 256\], got 257": dict(
        A1=torch.zeros(E, 257, d), B1=torch.zeros(E, 2 * n, 257)
    ),
    r"lora.A1 must have a rank in \[1, 256\], got 0": dict(A1=torch.zeros(E, 0, d), B1=torch.zeros(E, 2 * n, 0)),
    "lora.B2 must be float32, bfloat16 or float16, got torch.float64": dict(B2=torch.zeros(E, d, 16, dtype=torch.float64)),
    "one device: lora.A1 is on meta, x is on cpu": dict(A1=torch.zeros(E, 5, d, device="meta")),
    "lora.A1_up requires gate_layout='split'": dict(
        A1_up=torch.zeros(E, 8, d), B1_up=torch.zeros(E, n, 8)
    ),
    "lora.scale must be .*, got nan": dict(scale=float("nan")),
    "lora requires the factors of W1, of W2 or of both, got none": dict(A1=None, B1=None, A2=None, B2=None),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_factors_are_named(sentence):
    refused(ValueError, sentence, wrong(**WRONG[sentence]))


def test_a_lora_that_is_none():
    tensors = {key: t.detach() for key, t in logits_layer(torch.float32).items()}
    sentence = "lora must be a tilemoe.LoRA, got a builtins.dict"
    refused(TypeError, sentence, tilemoe.moe, **tensors, K=K, lora={"A1": None})


# ---------------------------------------------------------------- the module


@pytest.mark.parametrize("rank", [8, 5, (8, 0), (0, 16)], ids=str)
def test_module(rank):
    layer = tilemoe.MoE(d, n, E, K, lora_rank=rank, lora_alpha=16)
    frozen = [name for name, p in layer.named_parameters() if not p.requires_grad]
    assert frozen == ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    plain = tilemoe.MoE(d, n, E, K)
    missing, unexpected = plain.load_state_dict(layer.state_dict(), strict=False)
    assert not missing and all("lora_" in name for name in unexpected)
    x = normal(T, d, seed=3, dtype=torch.float32)
    assert torch.equal(layer(x), plain(x))  # B is zero
    trained = [p for p in layer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for _ in range(2):
        layer(x).square().sum().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in trained)
    other = tilemoe.MoE(d, n, E, K, lora_rank=rank, lora_alpha=16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x)) and not torch.equal(layer(x), plain(x))
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), other.eval()(x))
        assert_close(layer(x), other.train()(x))


def test_module_initialises_as_peft():
    layer = tilemoe.MoE(d, n, E, K, lora_rank=64)
    for name, fan_in in (("lora_A1", d), ("lora_A2", n)):
        A = getattr(layer.experts, name)
        assert A.dtype == torch.float32 and A.abs().max() <= fan_in**-0.5
        expected = torch.empty(64, fan_in)
        torch.nn.init.kaiming_uniform_(expected, a=5**0.5)
        assert abs(A.std() / expected.std() - 1) < 0.1
    assert not layer.experts.lora_B1.any() and not layer.experts.lora_B2.any()


@pytest.mark.parametrize("rank", [-1, 257, (8, 8, 8), 0, True, (0, 0)], ids=str)
def test_module_refuses_ranks(rank):
    refused(ValueError, "lora_rank must", tilemoe.MoE, d, n, E, K, lora_rank=rank)
