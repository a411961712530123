"""Quantised weights on a GPU: codes and values as on the CPU, the layer with the bits of the
dequantised one, and CUDA graphs. Run by --device cuda."""

import pytest
import torch

import tilemoe
from checks import compiled
from cuda_test import captured, steps
from lora_test import adapted
from quantized_support import KINDS, K, T, agree, agree_of_kind, d, factors, layer, quantized
from random_layers import normal
from target import DTYPES
from tilemoe._formats import FORMATS


def same(narrow, other):
    for field, array, expected in zip(
        narrow.arrays._fields, narrow.arrays, other.arrays, strict=True
    ):
        assert (array is None) == (expected is None), field
        if array is not None:
            got, want = (t.cpu().contiguous().view(torch.uint8) for t in (array, expected))
            assert torch.equal(got, want), field


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_codes_and_values_are_those_of_the_cpu(format, dtype):
    W = normal(3, 1024, 2048, seed=1, dtype=dtype)
    W[0, :5] = 0
    W[1] *= torch.exp2(torch.arange(1024) % 16 - 8).unsqueeze(1).to(dtype)
    here, there = (tilemoe.quantize_experts(w, format) for w in (W, W.cpu()))
    same(here, there)
    for out in (torch.float32, *DTYPES):
        assert torch.equal(here.dequantize(out).cpu(), there.dequantize(out))


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_codes_of_a_parameter_are_those_of_the_cpu(dtype):
    W = normal(3, 1040, 2000, seed=1, dtype=dtype)
    W[1] *= torch.exp2(torch.arange(1040) % 16 - 8).unsqueeze(1).to(dtype)
    here, there = (tilemoe.fp8_weight(weight) for weight in (W, W.cpu()))
    same(here.weight, there.weight)
    same(here.transposed, there.transposed)


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_dequantized_layer(format, kind, adapters):
    for dtype in DTYPES:
        for blocks in (1, 3):
            agree_of_kind(KINDS[kind], format, dtype, adapters, weight_blocks=blocks)


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_of_both_passes(format):
    """A replay dequantises the experts that its own routing has."""
    tensors = layer(torch.bfloat16)
    narrow, _ = quantized(tensors, format)
    lora = factors(tensors)
    wanted = [tensors["x"], *lora.values()]

    def both():
        O = adapted(tilemoe.moe)(**narrow, **lora, K=K)
        gradients = torch.autograd.grad(O, wanted, (tensors["x"].detach() * 0.5).sin())
        return [O.detach(), *gradients]

    tensors["logits_or_scores"].requires_grad_(False)
    graph, out = captured(both)
    for logits in steps():
        tensors["logits_or_scores"].copy_(logits)
        graph.replay()
        replayed = [t.clone() for t in out]
        for got, want in zip(replayed, both(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_the_host_does_not_wait():
    tensors = layer(torch.bfloat16)
    narrow, _ = quantized(tensors, "nf4_double")
    lora = factors(tensors)
    call = lambda: adapted(tilemoe.moe)(**narrow, **lora, K=K).sum().backward()
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_layer():
    tensors = layer(torch.bfloat16)
    narrow, values = quantized(tensors, "mxfp4")
    how = dict(K=K, overwrite_H=False)  # as a trace
    agree(narrow, values, factors(tensors), compiled(tilemoe.moe), tilemoe.moe, **how)


def test_memory():
    """Forward and backward have one weight in 16 bits at a time."""
    n, E = 512, 64  # 16 MiB of W1
    x = normal(T, d, seed=2, dtype=torch.bfloat16).requires_grad_()
    logits = normal(T, E, seed=3, dtype=torch.float32).requires_grad_()
    W1 = normal(E, 2 * n, d, seed=4, dtype=torch.bfloat16)
    W2 = normal(E, d, n, seed=5, dtype=torch.bfloat16)
    narrow = [tilemoe.quantize_experts(W, "nf4") for W in (W1, W2)]

    def peak(weights):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(tilemoe.moe(x, logits, *weights, K=K).sum(), [x, logits])
        return torch.cuda.max_memory_allocated() - before

    peak(narrow)
    above = peak(narrow) - peak((W1, W2))
    assert W1.nbytes / 2 < above <= W1.nbytes + (1 << 20)
