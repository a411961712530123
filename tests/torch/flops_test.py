"""FlopCounterMode counts the operators' GEMMs: forward 6 T K d n with a gated activation and
4 T K d n without one, backward twice that, less what no gradient is computed for."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilemoe
from checks import python
from target import DTYPE

T, d, n, E, K = 40, 32, 24, 6, 2
GEMM = 2 * T * K * d * n
GATE = 2 * T * d * E
FORWARD = {"swiglu": 3 * GEMM, "relu_squared": 2 * GEMM}


def normal(*shape):
    return torch.randn(shape, dtype=DTYPE)


def counted(function):
    with FlopCounterMode(display=False) as mode:
        found = function()
    return mode.get_total_flops(), found


def layer(activation="swiglu", **options):
    width = 2 * n if activation in ("swiglu", "geglu") else n
    leaves = dict(
        x=normal(T, d), logits_or_scores=normal(T, E).float(), W1=normal(E, width, d),
        W2=normal(E, d, n), b1=normal(E, width), b2=normal(E, d),
    )  # fmt: skip
    return {k: t.requires_grad_() for k, t in leaves.items()} | dict(activation=activation, K=K)


@pytest.mark.parametrize("overwrite_H", [None, False])
@pytest.mark.parametrize("activation", FORWARD)
def test_a_layer(activation, overwrite_H):
    given = layer(activation) | dict(overwrite_H=overwrite_H)
    forward, out = counted(lambda: tilemoe.moe(**given))
    assert forward == FORWARD[activation]
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 2 * forward


@pytest.mark.parametrize("name", ["x", "logits_or_scores", "W1", "b1", "W2", "b2", None])
def test_the_gemms_as_functions(name):
    """The GEMMs of the layer, of all gradients and of each alone."""
    given = {key: t for key, t in layer().items() if isinstance(t, torch.Tensor)}
    for key, tensor in given.items():
        tensor.requires_grad_(name in (key, None))

    def run():
        routing = tilemoe.route(given["logits_or_scores"], K)
        h = tilemoe.gathered_mm(given["x"], given["W1"], routing, bias=given["b1"])
        gate, up = h.chunk(2, -1)
        return tilemoe.combine_mm(gate * up, given["W2"], routing, bias=given["b2"])

    forward, out = counted(run)
    assert forward == 3 * GEMM
    backward = counted(lambda: out.backward(torch.ones_like(out)))[0]
    assert backward == (6 if name is None else OF_ONE[name]) * GEMM


@pytest.mark.parametrize("overwrite_H", [None, False])
def test_low_rank_adapters(overwrite_H):
    """Each factor once for a row in forward; in backward for its input's gradient and its own."""
    given = layer() | dict(overwrite_H=overwrite_H)
    for name in ("W1", "W2", "b1", "b2"):
        given[name].requires_grad_(False)
    shapes = dict(A1=(8, d), B1=(2 * n, 8), A2=(16, n), B2=(d, 16))
    factors = {name: torch.randn(E, *shape).requires_grad_() for name, shape in shapes.items()}
    narrow = 2 * T * K * (8 * (d + 2 * n) + 16 * (n + d))
    forward, out = counted(lambda: tilemoe.moe(**given, lora=tilemoe.LoRA(**factors)))
    assert forward == 3 * GEMM + narrow
    of_weights = counted(lambda: out.backward(torch.ones_like(out)))[0]
    assert of_weights == 3 * GEMM + 2 * narrow  # without those of W1 and W2
    factors = {name: factor.detach() for name, factor in factors.items()}
    given["x"].requires_grad_(False)
    given["logits_or_scores"].requires_grad_(False)
    factors["B2"].requires_grad_()
    out = tilemoe.moe(**given, lora=tilemoe.LoRA(**factors))
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 2 * T * K * 16 * d


# The only tensor that requires a gradient -> GEMMs of backward: dO @ W2, and each gradient's own.
OF_ONE = {"x": 1 + 2, "logits_or_scores": 1, "W1": 1 + 2, "b1": 1, "W2": 1, "b2": 0}


@pytest.mark.parametrize("overwrite_H", [None, False])
@pytest.mark.parametrize("name", OF_ONE)
def test_what_is_frozen_is_left_out(name, overwrite_H):
    given = layer() | dict(overwrite_H=overwrite_H)
    for other in OF_ONE:
        given[other].requires_grad_(other == name)
    _, out = counted(lambda: tilemoe.moe(**given))
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == OF_ONE[name] * GEMM


def test_quantized_weights():
    """GEMMs of the frozen layer: the conversion counts nothing."""
    given = layer()
    for name in ("W1", "W2"):
        given[name] = tilemoe.quantize_experts(given[name], "fp8")
    for name in ("b1", "b2"):
        given[name].requires_grad_(False)
    forward, out = counted(lambda: tilemoe.moe(**given))
    assert forward == 3 * GEMM
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 3 * GEMM


def test_gate_and_up_apart():
    given = layer()
    W1 = given.pop("W1").detach()
    del given["b1"]
    gate, up = W1[:, :n].clone().requires_grad_(), W1[:, n:].clone()
    given |= dict(W1=gate, W1_up=up, gate_layout="split")
    for name in ("x", "logits_or_scores", "W2", "b2"):
        given[name].requires_grad_(False)
    forward, out = counted(lambda: tilemoe.moe(**given))
    assert forward == 3 * GEMM
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 2 * GEMM


def test_gradients_into_given_memory():
    given = layer()
    memory = tilemoe.WeightGradients(W1=torch.zeros_like(given["W1"]))
    _, out = counted(lambda: tilemoe.moe(**given, weight_grad_out=memory))
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 6 * GEMM


def test_other_entries():
    given = layer()
    weights = {name: given[name] for name in ("W1", "W2")}
    ids, scores = torch.randint(E, (T, K)), torch.rand(T, K)
    x, rows = given["x"], normal(T * K, d).requires_grad_()
    counts = torch.full((E,), T * K // E, dtype=torch.int32)
    pairs = torch.arange(T, dtype=torch.int32), torch.zeros(T, dtype=torch.int32), torch.rand(T)
    entries = {
        "ids": (lambda: tilemoe.moe(x, scores, ids=ids, **weights), T * K),
        "capacity": (lambda: tilemoe.moe(x, scores, ids=ids, capacity=9, **weights), 9),
        "general": (lambda: tilemoe.moe_general(x, *pairs, **weights), T),
        "grouped": (lambda: tilemoe.grouped_experts(rows, counts, **weights), T * K),
        "rounded": (
            lambda: tilemoe.moe(x, given["logits_or_scores"], K=K, rounding="up", m=8, **weights),
            T * K,
        ),
    }
    for name, (call, expected) in entries.items():
        forward, out = counted(call)
        assert forward == 6 * expected * d * n, name
        assert counted(lambda out=out: out.backward(torch.ones_like(out)))[0] == 2 * forward, name


def test_a_module():
    """With the gate, of torch; shared experts of width n are another expert of all tokens."""
    options = dict(shared_intermediate_size=n, dtype=DTYPE)
    moe = tilemoe.MoE(d, n, E, K, **options)
    x = normal(T, d).requires_grad_()
    forward, out = counted(lambda: moe(x))
    assert forward == GATE + 3 * GEMM + 3 * GEMM // K
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 2 * forward
    moe.eval()
    with torch.no_grad():
        assert counted(lambda: moe(x.detach()))[0] == forward
    out = counted(lambda: checkpoint(moe, x, use_reentrant=False))[1]
    assert counted(lambda: out.backward(torch.ones_like(out)))[0] == 3 * forward


@pytest.mark.parametrize("first", ["tilemoe", "torch.utils.flop_counter"])
def test_whichever_is_imported_first(first):
    program = f"import torch, {first}" + """
import tilemoe
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as mode, torch.device("meta"):
    tilemoe.MoE(32, 24, 6, 2, dtype=torch.bfloat16)(torch.empty(40, 32, dtype=torch.bfloat16))
print(mode.get_total_flops())
"""
    assert int(python("-c", program)) == GATE + 3 * GEMM
