"""Small T in inference: `moe_tokens` contains the router's GEMM. Its logits are those of a
linear layer but for the order of the sum; all else has the bits of what takes these logits."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from checks import refused
import target
import tilemoe
from target import DTYPE, DTYPES
from tilemoe import _layout, functional
from tilemoe.options import TOP_K
from tilemoe.module import Router

tm = torch.ops.tilemoe
ROOT = Path(__file__).resolve().parents[2]
d, n, E, K = 520, 24, 40, 6  # d is no multiple of what a warp reads at a time
COUNTS = (1, 2, 5, 16, 17, 33, 64)
ROUTERS = {
    "plain": {},
    "over all": dict(scoring="softmax_over_all", routed_scaling_factor=2.5),
    "sigmoid": dict(scoring="sigmoid_renormalized", selection_bias=True, n_group=4, topk_group=2),
    "biased": dict(router_bias=True),
    "float32": dict(router_dtype=torch.float32, router_bias=True),
    "expert biases": dict(bias=True, activation="gelu"),
    "shared": dict(shared_intermediate_size=16, column_blocks=2),
}
every_router = pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)


def make(dtype=DTYPE, seed=0, **options):
    torch.manual_seed(seed)
    options.setdefault("return_aux", False)
    layer = tilemoe.MoE(d, n, E, K, dtype=dtype, **options).eval()
    with torch.no_grad():
        for name, tensor in layer.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.5)
        correction = layer.gate.e_score_correction_bias
        if correction is not None:
            correction.normal_(0, 0.3)
    return layer


def tokens(T, dtype=DTYPE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, d, generator=generator, device="cpu").to(target.DEVICE, dtype)


@pytest.fixture
def taken(monkeypatch):
    """The calls of moe_tokens, by how many tokens they had."""
    calls, original = [], functional.moe_tokens

    def spy(x, *args, **options):
        calls.append(x.shape[0])
        return original(x, *args, **options)

    monkeypatch.setattr(functional, "moe_tokens", spy)
    return calls


def logits_of(layer, x):
    """The logits by which the operator chose, and its other results: O, routing, expert_counts."""
    gate = layer._gate_of_decode(x)
    W1, W2, b1, b2 = layer.experts._weights(lambda _, weight: weight)
    O, routing, counts, logits = tm.moe_tokens(
        x, gate.weight, gate.bias, layer.gate.e_score_correction_bias,
        [W1, None, W2, b1, None, b2], None, layer.options.numbers, layer.options.reals,
        gate.logits_dtype, True,
    )  # fmt: skip
    return logits, (O, routing, counts), layer.options.rule


def parts(routing, T):
    """Its arrays, without the gaps between them, which nobody fills."""
    places, _ = _layout.places_of(TOP_K, T, E, T * K)
    assert list(places) == ["offsets", "row_score", "row_token", "pair_row", "counters"]
    return [routing[begin : begin + elements] for begin, elements in places.values()]


@every_router
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_has_the_bits_of_what_takes_its_logits(dtype, options, taken):
    layer = make(dtype, **options)
    for T in COUNTS:
        x = tokens(T, dtype, seed=T)
        logits, (O, routing, counts), rule = logits_of(layer, x)
        assert logits.shape == (T, E) and logits.dtype == (layer.gate.dtype or dtype)
        correction = layer.gate.e_score_correction_bias
        args = logits, correction, rule, layer.routed_scaling_factor
        other_routing, other_counts = tm.route_logits(*args)
        assert torch.equal(counts, other_counts)
        for a, b in zip(parts(routing, T), parts(other_routing, T)):
            assert torch.equal(a, b)
        expected = layer.experts(
            x, logits, addend=layer._shared(x, None), return_aux=False, options=layer.options,
            selection_bias=correction,
        )  # fmt: skip
        assert torch.equal(layer(x), expected)
        if layer.shared_experts is None and layer.column_blocks == 1:
            assert torch.equal(O, expected)
    assert taken == list(COUNTS)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("router_dtype", [None, torch.float32], ids=str)
def test_a_recomputation_has_the_bits_of_its_forward(router_dtype, precision, taken):
    """A reentrant checkpoint runs a layer in evaluation without gradients, and with them later."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        layer = make(torch.bfloat16, router_dtype=router_dtype)
        x = tokens(64, torch.bfloat16).requires_grad_()
        first = checkpoint(layer, x, use_reentrant=True)
        assert torch.equal(first, layer(x)) and taken == []
        first.sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def test_a_switch_turns_it_off(taken):
    layer, other = make(), make(fused_decode=False)
    x = tokens(16)
    out = other(x)
    assert taken == []
    layer(x)
    assert taken == [16]
    layer.fused_decode = False
    assert torch.equal(layer(x), out) and taken == [16]
    with torch.enable_grad():
        assert torch.equal(layer(x), out)  # a block in a reentrant checkpoint relies on this


@every_router
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_logits_are_those_of_a_linear_layer(dtype, options):
    layer = make(dtype, **options)
    x = tokens(64, dtype)
    logits, *_ = logits_of(layer, x)
    gate = layer.gate
    exact = x.double() @ gate.weight.double().T + (0 if gate.bias is None else gate.bias.double())
    error = (logits.double() - exact).norm() / exact.norm()
    rounded = (exact.to(logits.dtype).double() - exact).norm() / exact.norm()
    assert error <= 1.02 * rounded + 2e-7
    by_linear = gate(x)
    assert by_linear.dtype == logits.dtype
    assert (logits.double() - by_linear.double()).norm() / exact.norm() <= 2 * rounded + 4e-7


@torch.no_grad()
def test_results_are_those_of_the_ordinary_path(taken):
    """Where no token's choice hangs on a rounding, as here in float32."""
    layer = make(DTYPE, return_aux=True, balance_coefficient=0.01, z_coefficient=0.001,
                 router_dtype=torch.float32)  # fmt: skip
    x = tokens(30).reshape(5, 6, d)
    out, aux = layer(x)
    assert taken == [30] and out.shape == x.shape
    hook = layer.gate.register_forward_hook(lambda *_: None)
    expected, expected_aux = layer(x)
    hook.remove()
    assert taken == [30]
    tolerance = 1e-5 if DTYPE == torch.float32 else 1e-2
    assert (out - expected).norm() <= tolerance * expected.norm() and expected.norm() > 0
    for name, value in aux._asdict().items():
        torch.testing.assert_close(value, getattr(expected_aux, name), rtol=1e-5, atol=1e-6)
    assert aux.expert_counts.sum() == 30 * K and aux.loss > 0


def observed(layer):
    layer.gate.register_forward_hook(lambda *_: None)


def observed_experts(layer):
    layer.experts.register_forward_pre_hook(lambda *_: None)


def own_forward(layer):
    forward = layer.gate.forward
    layer.gate.forward = lambda *args: forward(*args)


def other_gate(layer):
    class Other(Router):
        pass

    other = Other(d, E, module_dtype=layer.gate.weight.dtype)
    other.load_state_dict(layer.gate.state_dict())
    layer.gate = other


def parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer.gate, "weight", nn.Identity())


ELSEWHERE = {f.__name__: f for f in (observed, observed_experts, own_forward, other_gate,
                                     parametrized)}  # fmt: skip


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
@torch.no_grad()
def test_who_looks_at_the_parts_sees_them_called(change, taken):
    layer = make()
    x = tokens(9)
    expected = layer(x)
    assert taken == [9]
    change(layer)
    torch.testing.assert_close(layer(x), expected)
    assert taken == [9]


def test_is_taken_in_inference_alone(taken):
    layer, x = make(), tokens(64)
    layer(x)
    assert not taken, "gradients are on"
    with torch.no_grad():
        layer(tokens(65))
        assert not taken, "too many tokens"
        layer(x, ids=torch.arange(64 * K).reshape(64, K) % E)
        assert not taken, "the experts are given"
        with torch.autocast(target.DEVICE, torch.bfloat16):
            layer(x)
        assert not taken, "autocast"
        rounded = make(rounding="up", m=8)
        rounded.train()(x)
        assert not taken, "rounding"
        layer(x)
        rounded.eval()(x)
    with torch.inference_mode():
        layer(x.clone())
    assert taken == [64] * 3


@torch.no_grad()
def test_a_router_of_another_dtype_keeps_its_linear_layer(taken):
    layer = make(torch.bfloat16)
    layer.gate.float()
    refused(ValueError, "gate.weight is torch.float32", layer, tokens(3, torch.bfloat16))
    assert not taken


@torch.no_grad()
def test_a_weight_elsewhere_is_an_error(taken):
    layer = make()
    layer.gate.to("meta")
    refused(ValueError, "one device: x is on .*, gate.weight is on meta", layer, tokens(3))
    assert not taken


@torch.no_grad()
def test_no_tokens():
    out = make()(tokens(0))
    assert out.shape == (0, d)


@torch.no_grad()
def test_a_nan_spoils_its_own_token_alone():
    layer, x = make(), tokens(20)
    expected = layer(x)
    x[7] = float("nan")
    out = layer(x)
    assert out[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_on_either_side_of_the_limit(dynamic, taken):
    layer = make()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for T in (2, 64, 65, 3, 90):
            x = tokens(T)
            torch.testing.assert_close(compiled(x), layer(x))
    assert taken, "the layer itself takes it"


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_layer_serves_any_number_of_tokens(strict, taken):
    layer = make()
    shapes = {"x": {0: torch.export.Dim("tokens", min=2)}}
    exported = torch.export.export(layer, (tokens(7),), dynamic_shapes=shapes, strict=strict)
    assert not taken
    for T in (3, 64, 70):
        torch.testing.assert_close(exported.module()(tokens(T)), layer(tokens(T)))


def test_limits_are_the_headers():
    header = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()
    limits = dict(re.findall(r"#define TILEMOE_ROUTE_TOKENS_MOST_(\w) (\d+)", header))
    ours = {name: str(getattr(functional, f"_MAX_{name}")) for name in "TEKD"}
    assert limits == ours


def test_it_has_no_gradient():
    layer, x = make(), tokens(4).requires_grad_()
    with torch.no_grad():
        gate = layer._gate_of_decode(x)
    W1, W2, *_ = layer.experts._weights(lambda _, weight: weight)
    found = tm.moe_tokens(
        x, gate.weight, None, None, [W1, None, W2, None, None, None], None,
        [0, K, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0], [1.0, 0.0, 0.0, 0.0], x.dtype, False,
    )  # fmt: skip
    refused(NotImplementedError, "moe_tokens has no gradient; call moe", found[0].sum().backward)


@torch.no_grad()
def test_past_its_limits_the_operator_says_so():
    layer, x = make(), tokens(65)
    W1, W2, *_ = layer.experts._weights(lambda _, weight: weight)
    with pytest.raises(RuntimeError, match="T is 65, route_tokens takes at most 64"):
        tm.moe_tokens(
            x, layer.gate.weight, None, None, [W1, None, W2, None, None, None], None,
            [0, K, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0], [1.0, 0.0, 0.0, 0.0], x.dtype, False,
        )  # fmt: skip
