"""recipe="fp8_forward" and quantize_fp8: values against float64 that rounds at the same points, gradients
against those of the dequantised layer, and what is refused."""

import pytest
import torch

import tilemoe
from checks import compiled, same_bits
from fp8_emulation import amax_of_blocks, evaluate
from random_layers import normal, results
from target import DEVICE
from tilemoe.options import ACTIVATIONS, GATED

T, d, n, E, K = 61, 208, 256, 6, 2  # blocks of x are ragged; split gates have ragged blocks of A


def layer(dtype=torch.bfloat16, n=n, gate_layout="concatenated", bias=True):
    rows = n if gate_layout == "split" else 2 * n
    weights = {"W1": (rows, d), "W2": (d, n)}
    if gate_layout == "split":
        weights["W1_up"] = (n, d)
    made = {
        "x": normal(T, d, seed=1, dtype=dtype).requires_grad_(),
        "logits_or_scores": normal(T, E, seed=2, dtype=torch.float32).requires_grad_(),
    }
    for seed, (name, (out, width)) in enumerate(weights.items(), 3):
        W = normal(E, out, width, seed=seed, dtype=dtype, scale=width**-0.5)
        made[name] = tilemoe.quantize_experts(W, "fp8")
    if bias:
        made["b1"] = normal(E, rows, seed=10, dtype=dtype, scale=0.5).requires_grad_()
        made["b2"] = normal(E, d, seed=11, dtype=dtype, scale=0.5).requires_grad_()
        if gate_layout == "split":
            made["b1_up"] = normal(E, n, seed=12, dtype=dtype, scale=0.5).requires_grad_()
    return made


def in_float64(made, activation, rounds):
    """O, or the same rounded where the recipe rounds, from float64 values of the weights."""
    W = {name: made[name].dequantize(torch.float32).double() for name in ("W1", "W1_up", "W2")
         if name in made}  # fmt: skip
    W1 = torch.cat([W["W1"], W["W1_up"]], 1) if "W1_up" in W else W["W1"]
    b1 = torch.cat([made["b1"], made["b1_up"]], 1) if "b1_up" in made else made["b1"]
    x, b1, b2 = (t.detach().double() for t in (made["x"], b1, made["b2"]))
    scores, ids = made["logits_or_scores"].detach().topk(K)
    token = torch.arange(T, device=DEVICE).repeat_interleave(K)
    chosen = token, ids.flatten(), scores.softmax(-1).double().flatten()
    weights = W1, b1, W["W2"], b2
    return evaluate(x, chosen, weights, torch.zeros_like(x), activation, made["x"].dtype, rounds)["O"]


def error(O, exact):
    return ((O.detach().double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["swiglu", "reglu"])
@pytest.mark.parametrize("kind", [{}, dict(gate_layout="split", n=336)], ids=["", "split"])
def test_errors_are_those_of_the_rounding(dtype, activation, kind):
    made = layer(dtype, **kind)
    how = {"gate_layout": kind["gate_layout"]} if kind else {}
    O = tilemoe.moe(**made, K=K, recipe="fp8_forward", activation=activation, **how)
    exact = in_float64(made, activation, rounds=False)
    of_rounding = error(in_float64(made, activation, rounds=True), exact)
    assert error(O, exact) <= min(1.05 * of_rounding, 0.072)
    assert error(O, exact) >= 0.5 * of_rounding
    with torch.no_grad():
        inferred = tilemoe.moe(**made, K=K, recipe="fp8_forward", activation=activation, **how)
    assert torch.equal(inferred, O)


@pytest.mark.parametrize("activation", GATED)
def test_all_gates(activation):
    made = layer()
    O, plain = (
        tilemoe.moe(**made, K=K, activation=activation, recipe=recipe) for recipe in ("fp8_forward", "bf16")
    )
    assert 0.005 < error(O, plain.detach().double()) < 0.08


def test_gradients_are_those_of_the_dequantized_layer_near_its_H():
    made = layer()
    fp8, plain = (results(tilemoe.moe, made, K=K, recipe=recipe) for recipe in ("fp8_forward", "bf16"))
    assert fp8.keys() == plain.keys()
    for name, value in fp8.items():
        assert value.isfinite().all() and error(value, plain[name].double()) < 0.1, name
    same_bits(results(tilemoe.moe, made, K=K, recipe="fp8_forward"), fp8)


def test_other_entries():
    made = layer()
    of_experts = {k: v for k, v in made.items() if k != "logits_or_scores"}
    pairs = dict(
        tokens=torch.arange(T, device=DEVICE), experts=torch.arange(T, device=DEVICE) % E,
        scores=torch.ones(T, device=DEVICE),
    )  # fmt: skip
    O, plain = (
        tilemoe.moe_general(**of_experts, **pairs, recipe=recipe) for recipe in ("fp8_forward", "bf16")
    )
    assert 0.005 < error(O, plain.detach().double()) < 0.08
    of_experts["rows"] = of_experts.pop("x")
    counts = torch.tensor([9, 0, 30, 1, 0, 21], device=DEVICE)
    O, plain = (
        tilemoe.grouped_experts(**of_experts, counts=counts, recipe=recipe)
        for recipe in ("fp8_forward", "bf16")
    )
    assert 0.005 < error(O, plain.detach().double()) < 0.08
    traced = compiled(tilemoe.moe)(**made, K=K, recipe="fp8_forward")
    assert torch.equal(traced, tilemoe.moe(**made, K=K, recipe="fp8_forward"))


def test_tokens_alone():
    """The bits of a token do not depend on the others, and x with an outlier has no NaN."""
    made = layer()
    with torch.no_grad():
        O = tilemoe.moe(**made, K=K, recipe="fp8_forward")
        x = made["x"].clone()
        x[::2] *= 3e4
        x[0, 3], x[2] = 3e38, 0
        other = tilemoe.moe(**{**made, "x": x}, K=K, recipe="fp8_forward")
        x[0, 3] = 1e18  # its square is finite
        assert tilemoe.moe(**{**made, "x": x}, K=K, recipe="fp8_forward").isfinite().all()
    assert torch.equal(O[1::2], other[1::2]) and not torch.equal(O[::2], other[::2])


def test_module():
    made = tilemoe.quantize_(tilemoe.MoE(d, n, E, K, recipe="fp8_forward"), "fp8").to(DEVICE)
    x = normal(T, d, seed=1, dtype=torch.float32)
    if DEVICE != "cpu":
        made, x = made.bfloat16(), x.bfloat16()
    O = made(x)
    made.recipe = "bf16"
    assert 0.005 < error(O, made(x).detach().double()) < 0.08


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (3, 130, 264), (2, 3, 4, 136)])
def test_quantize_fp8(shape, power_of_two, rows):
    x = normal(*shape, seed=7, dtype=torch.bfloat16)
    x[..., 0, :] = 0
    codes, scales = tilemoe.quantize_fp8(x, rows, power_of_two)
    assert codes.shape == shape and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // 128))
    amax = amax_of_blocks(x.float(), rows)
    factor = torch.full_like(amax, 448) / amax  # 448 / amax rounds twice
    if power_of_two:
        factor = torch.exp2(torch.floor(torch.log2(factor)))
    factor = torch.where(amax > 0, factor, 1.0)
    assert torch.equal(codes.float(), (x.float() * factor).to(torch.float8_e4m3fn).float())
    wide = scales.repeat_interleave(rows, -2)[..., : shape[-2], :]
    wide = wide.repeat_interleave(128, -1)[..., : shape[-1]]
    assert torch.equal(wide, 1 / factor)


def test_an_outlier_changes_its_block_alone():
    x = normal(4, 384, seed=8, dtype=torch.bfloat16)
    codes, scales = tilemoe.quantize_fp8(x)
    x[1, 130] = 1e30
    others, other_scales = tilemoe.quantize_fp8(x)
    changed = (others.view(torch.uint8) != codes.view(torch.uint8)).nonzero()
    assert set(changed[:, 0].tolist()) == {1} and set((changed[:, 1] // 128).tolist()) == {1}
    assert (other_scales != scales).nonzero().tolist() == [[1, 1]]


REFUSED = {
    "requires an activation with a gate": dict(activation="silu"),
    "n to be a multiple of 128 with the gate_layout concatenated": dict(n=144),
    "gate_layout interleaved": dict(gate_layout="interleaved"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    how = dict(REFUSED[reason])
    width = how.pop("n", n)
    made = layer(n=width, bias=False)
    if how.get("activation") in set(ACTIVATIONS) - set(GATED):
        made["W1"] = tilemoe.quantize_experts(normal(E, n, d, seed=3, dtype=torch.bfloat16), "fp8")
    with pytest.raises(NotImplementedError, match=f"recipe is fp8.*{reason}"):
        tilemoe.moe(**made, K=K, recipe="fp8_forward", **how)


def test_refused_weights():
    made = layer(bias=False)
    plain = {**made, "W2": made["W2"].dequantize()}
    with pytest.raises(NotImplementedError, match="recipe is fp8.*format_2 is none"):
        tilemoe.moe(**plain, K=K, recipe="fp8_forward")
    plain["W1"] = made["W1"].dequantize()
    with pytest.raises(NotImplementedError, match="recipe is fp8.*format_1 is none"):
        tilemoe.moe(**plain, K=K, recipe="fp8_forward")
    W1 = tilemoe.quantize_experts(made["W1"].dequantize(), "fp8", transposed=True)
    with pytest.raises(NotImplementedError, match="W1.transposed is 1"):
        tilemoe.moe(**{**made, "W1": W1}, K=K, recipe="fp8_forward")
    with pytest.raises(ValueError, match="recipe must be one of bf16, fp8"):
        tilemoe.moe(**made, K=K, recipe="e4m3")
    with pytest.raises(ValueError, match="rows must be 1 or 128"):
        tilemoe.quantize_fp8(made["x"], rows=64)
