"""save_h="fp8": every gradient against an evaluation in float64 that rounds at the same points, the
bytes that are saved, and the options that it can be combined with."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import tilemoe
from checks import compiled
from fp8_training_test import KINDS, E, K, T, both, check, d, error, gradients, layer, n
from random_layers import normal
from target import DEVICE
from tilemoe import ops
from tilemoe.options import GATED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_rounding(dtype, kind):
    made, masters = layer(dtype, **KINDS[kind])
    how = dict(gate_layout=KINDS[kind].get("gate_layout", "concatenated"))
    dO = normal(*made["x"].shape, seed=30, dtype=dtype)
    got = gradients(tilemoe.moe, made, masters, dO, save_h="fp8", **how)
    rounded, exact = (
        both(made, masters, dO, "swiglu", rounds, save_h="fp8") for rounds in (True, False)
    )
    check(got, rounded, exact)
    other = gradients(tilemoe.moe, made, masters, dO, **how)
    assert torch.equal(got["O"], other["O"])
    assert not torch.equal(got["dX"], other["dX"])


@pytest.mark.parametrize("activation", GATED)
def test_all_gates(activation):
    made, masters = layer()
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    got = gradients(tilemoe.moe, made, masters, dO, activation=activation, save_h="fp8")
    rounded, exact = (
        both(made, masters, dO, activation, rounds, save_h="fp8") for rounds in (True, False)
    )
    check(got, rounded, exact)


def test_error_with_that_of_the_weights():
    """Unit-scale data, against the unrounded arithmetic of the masters (dX without save_h: 6.7 %)."""
    made, masters = layer(d=512, n=512, bias=False)
    dO = normal(T, 512, seed=30, dtype=torch.bfloat16)
    got = gradients(tilemoe.moe, made, masters, dO, save_h="fp8")
    values = {name: W.detach().double() for name, W in masters.items()}
    exact = both(made, masters, dO, "swiglu", False, values=values)
    limits = {"O": 0.072, "dX": 0.077, "ds": 0.1, "dW1": 0.068, "dW2": 0.072}
    for name, value in exact.items():
        found = error(got[name].reshape(value.shape), value)
        assert 0.01 < found <= limits[name], (name, found)


# ---------------------------------------------------------------- memory


def saved_bytes(**how):
    """Bytes of the largest saved tensor, which is H."""
    made, _ = layer()
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    names = ("x", "logits_or_scores", "ids", "W1", "W2")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tilemoe.moe(**{name: made[name] for name in names}, recipe="fp8", **how)
    return sizes


def test_saved_bytes():
    rows, blocks = T * K, n // 128
    assert rows * 2 * n * 2 in saved_bytes()
    of_codes = saved_bytes(save_h="fp8")
    assert rows * (2 * n + 8 * blocks) in of_codes and rows * 2 * n * 2 not in of_codes


@pytest.mark.parametrize("overwrite_H", [None, True])
def test_codes_are_freed_before_dW1(monkeypatch, overwrite_H):
    made, masters = layer()
    codes, freed, call = [], [], ops.call_undifferentiated

    def watch(op, dO, X, H, *rest):
        if dO is None:
            freed.append(codes[0].expired())
        elif "backward_over_H" in op.name():
            codes.append(StorageWeakRef(rest[-1].untyped_storage()))
        return call(op, dO, X, H, *rest)

    monkeypatch.setattr(ops, "call_undifferentiated", watch)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    gradients(tilemoe.moe, made, masters, dO, save_h="fp8", overwrite_H=overwrite_H)
    assert freed == [True]


@pytest.mark.parametrize("overwrite_H", [None, False, True])
def test_bits_of_every_backward(overwrite_H):
    made, masters = layer(gate_layout="split", n=336)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    how = dict(gate_layout="split", save_h="fp8")
    expected = gradients(tilemoe.moe, made, masters, dO, overwrite_H=False, **how)
    got = gradients(tilemoe.moe, made, masters, dO, overwrite_H=overwrite_H, **how)
    assert all(torch.equal(got[name], of) for name, of in expected.items())


def test_backward_may_run_again():
    made, masters = layer()
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    O = tilemoe.moe(**made, recipe="fp8", save_h="fp8")
    leaves = [made["x"], *masters.values()]
    first = torch.autograd.grad(O, leaves, dO, retain_graph=True)
    second = torch.autograd.grad(O, leaves, dO)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(O, leaves, dO)


@pytest.mark.parametrize("only", ["x", "W1", "W2"])
def test_gradients_one_by_one(only):
    made, masters = layer(bias=False)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    O = tilemoe.moe(**made, recipe="fp8", save_h="fp8")
    leaves = {"x": made["x"], **masters}
    expected = dict(zip(leaves, torch.autograd.grad(O, list(leaves.values()), dO)))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == only)
    made |= {name: tilemoe.fp8_weight(W) for name, W in masters.items()}
    O = tilemoe.moe(**made, recipe="fp8", save_h="fp8")
    (got,) = torch.autograd.grad(O, leaves[only], dO)
    assert torch.equal(got, expected[only])


# ---------------------------------------------------------------- other entries


def module(**how):
    torch.manual_seed(3)
    made = tilemoe.MoE(256, 128, 8, 2, dtype=torch.bfloat16, device=DEVICE, recipe="fp8", **how)
    tilemoe.quantize_weights(made)
    return made


def of_module(call, made):
    x = normal(64, 256, seed=5, dtype=torch.bfloat16).requires_grad_()
    O = call(x)
    leaves = [x, *(p for p in made.parameters() if p.requires_grad)]
    return [O.detach(), *torch.autograd.grad(O.float().square().sum(), leaves)]


def test_module():
    plain, codes = module(), module(save_h="fp8")
    expected, got = of_module(plain, plain), of_module(codes, codes)
    assert codes.options.save_h == "fp8" and torch.equal(got[0], expected[0])
    apart = (got[1].float() - expected[1].float()).norm() / expected[1].float().norm()
    assert 0.001 < apart < 0.1


def test_checkpoint():
    made = module(save_h="fp8")
    expected = of_module(made, made)
    got = of_module(lambda x: checkpoint(made, x, use_reentrant=False), made)
    assert all(map(torch.equal, got, expected))


def test_compile():
    made = module(save_h="fp8")
    expected = of_module(made, made)
    got = of_module(compiled(made), made)
    assert all(map(torch.equal, got, expected))


def test_grouped_rows():
    made, masters = layer(bias=False)
    counts = torch.tensor([40, 0, 1, 30, 0, 22], device=DEVICE)
    leaves = [made["x"], *masters.values()]
    weights = {name: made[name] for name in masters}

    def of(**how):
        O = tilemoe.grouped_experts(made["x"], counts, **weights, recipe="fp8", **how)
        return O, torch.autograd.grad(O, leaves, torch.ones_like(O))

    (O, expected), (other, got) = of(), of(save_h="fp8")
    assert torch.equal(O, other)
    for g, e in zip(got, expected):
        apart = (g.float() - e.float()).norm() / e.float().norm()
        assert 0.001 < apart < 0.1


# ---------------------------------------------------------------- choices and errors


@pytest.mark.parametrize("recipe", ["bf16", "fp8_forward"])
def test_other_recipes(recipe):
    made, _ = layer()
    with pytest.raises(ValueError, match="save_h='fp8' requires recipe='fp8' or 'auto'"):
        tilemoe.moe(**made, recipe=recipe, save_h="fp8")


def test_unknown_format():
    made, _ = layer()
    with pytest.raises(ValueError, match="save_h"):
        tilemoe.moe(**made, recipe="fp8", save_h="bf16")


def test_auto_without_codes():
    """The choice is "bf16": H has 16 bits."""
    made, masters = layer(bias=False)
    made |= {name: W.detach() for name, W in masters.items()}
    plain = tilemoe.moe(**made)
    assert torch.equal(tilemoe.moe(**made, recipe="auto", save_h="fp8"), plain)
    assert E == len(made["W1"])
