"""recipe="fp8" in both passes: every gradient against an independent evaluation in float64 that rounds
at the same points, and what the gradients may depend on."""

import pytest
import torch

import reference
import tilemoe
from fp8_emulation import codes, evaluate
from random_layers import normal
from target import DEVICE
from tilemoe.options import GATED

T, d, n, E, K = 93, 272, 256, 6, 2  # blocks of x are ragged; expert 4 has no token


def layer(dtype=torch.bfloat16, d=d, n=n, gate_layout="concatenated", bias=True, master=None):
    """-> (tensors of `moe` with ids, masters by name)."""
    rows = n if gate_layout == "split" else 2 * n
    shapes = {"W1": (rows, d), "W2": (d, n)}
    if gate_layout == "split":
        shapes["W1_up"] = (n, d)
    made = {"x": normal(T, d, seed=1, dtype=dtype).requires_grad_()}
    scores, ids = normal(T, E, seed=2, dtype=torch.float32).topk(K)
    made["logits_or_scores"] = scores.softmax(-1).requires_grad_()
    made["ids"] = torch.where(ids == 4, 5, ids)
    masters = {}
    for seed, (name, (out, width)) in enumerate(shapes.items(), 3):
        W = normal(E, out, width, seed=seed, dtype=master or dtype, scale=width**-0.5)
        masters[name] = W.requires_grad_()
        made[name] = tilemoe.fp8_weight(W)
    if bias:
        made["b1"] = normal(E, rows, seed=10, dtype=dtype, scale=0.5).requires_grad_()
        made["b2"] = normal(E, d, seed=11, dtype=dtype, scale=0.5).requires_grad_()
        if gate_layout == "split":
            made["b1_up"] = normal(E, n, seed=12, dtype=dtype, scale=0.5).requires_grad_()
    return made, masters


def gradients(function, made, masters, dO, **how):
    """-> {O, dX, ds, dW1, ...}, with gate and up of W1 and b1 together."""
    O = function(**made, recipe="fp8", **how)
    leaves = {name: t for name, t in made.items() if torch.is_tensor(t) and t.requires_grad}
    leaves |= masters
    found = torch.autograd.grad(O, list(leaves.values()), dO)
    of = {f"d{name}": g for name, g in zip(leaves, found)}
    for name in ("dW1", "db1"):
        if name + "_up" in of:
            of[name] = torch.cat([of[name], of.pop(name + "_up")], 1)
    renamed = {"dx": "dX", "drows": "dX", "dlogits_or_scores": "ds", "dscores": "ds"}
    renamed["drow_scores"] = "ds"
    return {"O": O.detach()} | {renamed.get(name, name): g for name, g in of.items()}


def pairs_of(made):
    ids, scores = made["ids"], made["logits_or_scores"].detach()
    token = torch.arange(T, device=DEVICE).repeat_interleave(K)
    return token, ids.flatten(), scores.double().flatten()


def both(made, masters, dO, activation, rounds, pairs=None, values=None, x=None, save_h=None):
    """The evaluation of these tensors; values: of the weights, by default those of their codes."""
    W = values or {name: made[name].weight.dequantize(torch.float32).double() for name in masters}
    W1 = torch.cat([W["W1"], W["W1_up"]], 1) if "W1_up" in W else W["W1"]
    b1 = made.get("b1")
    if "b1_up" in made:
        b1 = torch.cat([b1, made["b1_up"]], 1)
    biases = [None if b is None else b.detach().double() for b in (b1, made.get("b2"))]
    weights = W1, biases[0], W["W2"], biases[1]
    x = made["x"] if x is None else x
    function = lambda H: reference.activate(H, activation)  # noqa: E731
    given = x.detach().double(), pairs or pairs_of(made), weights, dO.double()
    return evaluate(*given, function, x.dtype, rounds, save_h=save_h)


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def check(got, rounded, exact):
    assert got.keys() == exact.keys()
    for name, value in exact.items():
        of_rounding = error(rounded[name], value)
        # db2 is summed in float32 and rounded once, which the evaluation does not do.
        bound = 1.05 * of_rounding if name != "db2" else 0.005
        found = error(got[name].reshape(value.shape), value)
        assert 0.95 * of_rounding <= found <= bound, (name, found, of_rounding)
        # The same roundings, not only as many: a backward in 16 bits would be near, too.
        apart = error(got[name].reshape(value.shape), rounded[name])
        assert apart <= max(0.25 * of_rounding, 0.005), (name, apart, of_rounding)


KINDS = {
    "": {},
    "split": dict(gate_layout="split", n=336),
    "no bias": dict(bias=False),
    "blocks": dict(d=512),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_rounding(dtype, kind):
    made, masters = layer(dtype, **KINDS[kind])
    how = dict(gate_layout=KINDS[kind].get("gate_layout", "concatenated"))
    how["column_blocks"] = 2 if kind == "blocks" else 1
    dO = normal(*made["x"].shape, seed=30, dtype=dtype)
    got = gradients(tilemoe.moe, made, masters, dO, **how)
    rounded, exact = (both(made, masters, dO, "swiglu", rounds) for rounds in (True, False))
    check(got, rounded, exact)
    for name, W in masters.items():
        assert W.grad is None and not got["dW1" if "W1" in name else "dW2"][4].any()


@pytest.mark.parametrize("activation", GATED)
def test_all_gates(activation):
    made, masters = layer()
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    got = gradients(tilemoe.moe, made, masters, dO, activation=activation)
    rounded, exact = (both(made, masters, dO, activation, rounds) for rounds in (True, False))
    check(got, rounded, exact)


def test_error_with_that_of_the_weights():
    """Unit-scale data, against the unrounded arithmetic of the masters."""
    made, masters = layer(d=512, n=512, bias=False)
    dO = normal(T, 512, seed=30, dtype=torch.bfloat16)
    got = gradients(tilemoe.moe, made, masters, dO)
    values = {name: W.detach().double() for name, W in masters.items()}
    exact = both(made, masters, dO, "swiglu", False, values=values)
    errors = {name: error(got[name].reshape(value.shape), value) for name, value in exact.items()}
    assert errors["O"] <= 0.072 and errors["dX"] <= 0.072, errors
    assert max(errors["dW1"], errors["dW2"]) <= 0.072 and min(errors.values()) > 0.01, errors


def test_pairs():
    made, masters = layer(bias=False)
    token, expert, score = pairs_of(made)
    of = {name: t for name, t in made.items() if name not in ("ids", "logits_or_scores")}
    of |= dict(tokens=token, experts=expert, scores=score.float().requires_grad_())
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    got = gradients(tilemoe.moe_general, of, masters, dO)
    check(got, *(both(made, masters, dO, "swiglu", rounds) for rounds in (True, False)))


def test_rows():
    made, masters = layer()
    counts = torch.tensor([40, 0, 30, 1, 0, 17], device=DEVICE)
    R = int(counts.sum())
    of = {name: t for name, t in made.items() if name not in ("ids", "logits_or_scores", "x")}
    of |= dict(rows=made["x"].detach()[:R].requires_grad_(), counts=counts)
    of["row_scores"] = (normal(R, seed=9, dtype=torch.float32).abs() + 0.1).requires_grad_()
    dO = normal(R, d, seed=30, dtype=torch.bfloat16)
    got = gradients(tilemoe.grouped_experts, of, masters, dO)
    expert = torch.arange(E, device=DEVICE).repeat_interleave(counts)
    pairs = torch.arange(R, device=DEVICE), expert, of["row_scores"].detach().double()
    check(
        got,
        *(both(made, masters, dO, "swiglu", rounds, pairs, x=of["rows"]) for rounds in (True, False)),
    )


def test_the_same_bits_and_tokens_alone():
    """The gradient of a token does not depend on the others, and outliers give no NaN."""
    made, masters = layer()
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    first, again = (gradients(tilemoe.moe, made, masters, dO) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
    dO[::2] *= 3e4
    dO[0, 3], dO[2] = 1e18, 0
    x = made["x"].detach().clone()
    x[::2] *= 100
    other = gradients(tilemoe.moe, {**made, "x": x.requires_grad_()}, masters, dO)
    assert torch.equal(first["dX"][1::2], other["dX"][1::2])
    assert torch.equal(first["ds"][1::2], other["ds"][1::2])
    assert not torch.equal(first["dX"][::2], other["dX"][::2])
    assert all(value.isfinite().all() for value in other.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_has_the_dtype_of_its_master(dtype):
    """In float32 it is rounded once less; a master in the other 16-bit type gets a rounded one."""
    made, masters = layer(dtype)
    dO = normal(T, d, seed=30, dtype=dtype)
    own = gradients(tilemoe.moe, made, masters, dO)
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    for master in (torch.float32, other):
        wide = {name: W.detach().to(master).requires_grad_() for name, W in masters.items()}
        of = {name: made[name]._replace(master=W) for name, W in wide.items()}
        got = gradients(tilemoe.moe, {**made, **of}, wide, dO)
        for name in ("dW1", "dW2"):
            assert got[name].dtype == master
            if master is torch.float32:
                assert torch.equal(got[name].to(dtype), own[name])
                assert not torch.equal(got[name], own[name].float())
            else:
                assert torch.equal(got[name], own[name].to(master))


def test_codes_of_a_master():
    """Those of quantize_fp8, of a float32 master without a rounding, and the same transposed."""
    W = normal(E, 336, 208, seed=3, dtype=torch.float32)
    made = tilemoe.fp8_weight(W)
    found, scales = tilemoe.quantize_fp8(W, 128)
    assert torch.equal(made.weight.codes.view(torch.uint8), found.view(torch.uint8))
    assert torch.equal(made.weight.scales, scales) and made.master is None
    assert torch.equal(made.weight.dequantize(torch.float32), codes(W.double(), 128).float())
    of = tilemoe.fp8_weight(made.weight)
    for transposed in (made.transposed, of.transposed):
        assert torch.equal(transposed.codes.view(torch.uint8), found.view(torch.uint8).mT)
        assert torch.equal(transposed.scales, scales.mT)
    frozen = tilemoe.quantize_experts(W, "fp8")
    assert tilemoe.fp8_weight(frozen).weight is frozen
    assert tilemoe.fp8_weight(W, transposed=False).transposed is None


def test_update():
    W = torch.nn.Parameter(normal(E, 64, 144, seed=3, dtype=torch.bfloat16))
    made = tilemoe.fp8_weight(W)
    before = [made.weight.codes.data_ptr(), made.transposed.scales.data_ptr()]
    version = made.weight.codes._version
    with torch.no_grad():
        W.mul_(-3)
    assert made.update_() is made and made.weight.codes._version > version
    again = tilemoe.fp8_weight(W)
    for got, want in zip(made[:2], again[:2]):
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scales, want.scales)
    assert before == [made.weight.codes.data_ptr(), made.transposed.scales.data_ptr()]
    with pytest.raises(ValueError, match="update_ requires a weight with a master"):
        tilemoe.fp8_weight(made.weight).update_()


def test_codes_that_changed_before_backward():
    made, masters = layer()
    O = tilemoe.moe(**made, recipe="fp8")
    made["W1"].update_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        O.sum().backward()


def test_saved_bytes_are_those_of_bf16():
    """Codes and the sizes of masters are saved, and the codes are the caller's own."""
    made, masters = layer(bias=False)
    saved = {}
    for recipe in ("fp8", "bf16"):
        seen = {}

        def pack(tensor, seen=seen):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            tilemoe.moe(**made, recipe=recipe)
        for W in (made["W1"], made["W2"]):
            for t in (*W.weight.arrays, *W.transposed.arrays, W.master):
                if t is not None:
                    seen.pop(t.untyped_storage().data_ptr(), None)
        saved[recipe] = sum(seen.values())
    assert saved["fp8"] <= saved["bf16"] + 64  # scalars that have the masters' shapes


WRONG = {
    "expected \\(E, out, in\\)": lambda W: tilemoe.fp8_weight(W[0]),
    "must be contiguous": lambda W: tilemoe.fp8_weight(W.mT),
    "out must be a multiple of 16 in FP8, got 8": lambda W: tilemoe.fp8_weight(W[:, :8].contiguous()),
    "float32, bfloat16 or float16, got torch.float64": lambda W: tilemoe.fp8_weight(W.double()),
    "format 'fp8', not transposed": lambda W: tilemoe.fp8_weight(tilemoe.quantize_experts(W, "nf4")),
    "W1 has no transposed codes": lambda W: use(W, fp8=tilemoe.quantize_experts(W, "fp8")),
    "W2 has no transposed codes": lambda W: use(W, W2=tilemoe.fp8_weight(W2(W), transposed=False)),
}


def W2(W):
    return W[:, :32].mT.contiguous()


def use(W, fp8=None, **how):
    x = torch.ones(3, W.shape[2], dtype=W.dtype).requires_grad_()
    weights = dict(W1=fp8 or tilemoe.fp8_weight(W), W2=tilemoe.fp8_weight(W2(W))) | how
    up = weights["W1"]
    tilemoe.moe(x, torch.ones(3, E), **weights, W1_up=up, K=1, gate_layout="split", recipe="fp8")


@pytest.mark.cpu
@pytest.mark.parametrize("reason", WRONG)
def test_wrong_weights(reason):
    with pytest.raises(ValueError, match=reason):
        WRONG[reason](normal(E, 32, 32, seed=1, dtype=torch.bfloat16))
