"""gathered_mm and combine_mm on a GPU: CUDA graphs, no wait for the host, and compiled code between
them. Run by --device cuda."""

import pytest
import torch

import tilemoe
from checks import compiled
from cuda_test import captured, steps
from gemms_test import gated_mish, gradients_of, layer_of, mish, plain_of, routed
from random_layers import E, K, T, d, normal
from target import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_of_both_passes_serves_any_routing(dtype):
    layer = layer_of(dtype)

    def both():
        out = routed(layer, mish)
        dO = (layer["x"].detach() * 0.5).sin()
        return [out.detach(), *gradients_of(out, layer, dO).values()]

    graph, out = captured(both)
    seen = []
    for step, logits in enumerate(steps()):
        with torch.no_grad():
            layer["logits"].copy_(logits)
            layer["x"].copy_(normal(T, d, seed=70 + step, dtype=dtype))
        graph.replay()
        replayed = [t.clone() for t in out]
        for got, want in zip(replayed, both(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        seen.append(replayed[0])
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


def test_a_graph_of_rows_takes_other_counts():
    """The rows past the sum of the counts are zero in every replay, whatever they were before."""
    layer = layer_of(torch.bfloat16)
    counts = torch.tensor([3, 0, 9, 1, 0, 8, 2])

    def forward():
        with torch.no_grad():
            routing = tilemoe.route_rows(counts, T)
            return tilemoe.gathered_mm(layer["x"], layer["W1"], routing), routed(
                layer, mish, routing
            )

    graph, (h, out) = captured(forward)
    for new in ([3, 0, 9, 1, 0, 8, 2], [T, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 2], [0] * E):
        counts.copy_(torch.tensor(new))
        h.fill_(torch.nan)
        graph.replay()
        assert (h[sum(new) :] == 0).all()
        assert (out[sum(new) :] == 0).all()
        want = forward()
        assert torch.equal(h, want[0])
        assert torch.equal(out, want[1])


def test_the_host_waits_for_nothing():
    layer = layer_of(torch.bfloat16)
    out = routed(layer, mish)
    dO = torch.ones_like(out)
    gradients_of(out, layer, dO)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_of(routed(layer, mish), layer, dO)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inductor_compiles_both_passes(dtype, transposed):
    layer = layer_of(dtype, gated=True, transposed=transposed)
    names = list(layer)
    graph = compiled(lambda *tensors: routed(dict(zip(names, tensors)), gated_mish), "inductor")
    out = graph(*layer.values())
    got = {"out": out, **gradients_of(out, layer)}
    exact = plain_of(layer, gated_mish, torch.float64)
    usual = plain_of(layer, gated_mish, dtype)
    for name, want in exact.items():
        error, expected = ((t[name].double() - want).norm() for t in (got, usual))
        assert error <= 2 * expected, name


def test_large_sizes_have_the_bits_of_the_layer():
    """Experts of several tiles, and of none."""
    tokens, width, inner, experts, k = 4096, 2048, 768, 32, 8
    kinds = dict(dtype=torch.bfloat16, scale=0.02)
    layer = {
        "x": normal(tokens, width, seed=1, dtype=torch.bfloat16).requires_grad_(),
        "logits": normal(tokens, experts, seed=2, dtype=torch.float32).requires_grad_(),
        "W1": normal(experts, inner, width, seed=3, **kinds).requires_grad_(),
        "W2": normal(experts, width, inner, seed=4, **kinds).requires_grad_(),
    }
    with torch.no_grad():
        layer["logits"][:, ::7] = -100
    routing = tilemoe.route(layer["logits"], k)
    out = routed(layer, torch.relu, routing)
    x, logits, W1, W2 = layer.values()
    want = tilemoe.moe(x, logits, W1, W2, K=k, activation="relu")
    assert torch.equal(out, want)
    usual = gradients_of(want, layer)
    for name, gradient in gradients_of(out, layer).items():
        assert torch.equal(gradient, usual[name]), name
