"""Layers with quantised weights, for their tests."""

import torch

import tilemoe
from checks import same_bits
from lora_test import adapted
from random_layers import normal, results

T, d, n, E, K = 37, 128, 96, 7, 3  # multiples of 32; two blocks of columns
WEIGHTS = ("W1", "W1_up", "W2")


def layer(dtype=torch.float32, gate_layout="concatenated", transposed=False, bias=False):
    """Tensors of `moe` with logits: x, logits and biases are leaves, the weights are frozen."""
    rows = n if gate_layout == "split" else 2 * n
    shapes = {"W1": (E, rows, d), "W2": (E, d, n)}
    if gate_layout == "split":
        shapes["W1_up"] = (E, n, d)
    made = {
        "x": normal(T, d, seed=20, dtype=dtype).requires_grad_(),
        "logits_or_scores": normal(T, E, seed=21, dtype=torch.float32).requires_grad_(),
    }
    for seed, (name, (_, out, width)) in enumerate(shapes.items()):
        stored = (E, width, out) if transposed else (E, out, width)
        W = normal(*stored, seed=seed, dtype=dtype, scale=width**-0.5)
        made[name] = W.mT if transposed else W
    if bias:
        made["b1"] = normal(E, rows, seed=10, dtype=dtype, scale=0.5).requires_grad_()
        made["b2"] = normal(E, d, seed=11, dtype=dtype, scale=0.5).requires_grad_()
    return made


def quantized(tensors, format, names=WEIGHTS, transposed=None):
    """-> the layer with quantised weights of these names, and that with their values."""
    narrow = {
        name: tilemoe.quantize_experts(tensors[name], format, transposed=transposed)
        for name in names
        if name in tensors
    }
    dtype = (tensors["x"] if "x" in tensors else tensors["rows"]).dtype
    values = {name: weight.dequantize(dtype) for name, weight in narrow.items()}
    return {**tensors, **narrow}, {**tensors, **values}


def factors(tensors, rank=8, seed=40):
    """{field: leaf} of adapters of all weights."""
    made = {}
    for i, name in enumerate(name for name in WEIGHTS if name in tensors):
        _, out, width = tensors[name].shape
        A = normal(E, rank, width, seed=seed + 2 * i, dtype=torch.float32, scale=width**-0.5)
        B = normal(E, out, rank, seed=seed + 2 * i + 1, dtype=torch.float32, scale=rank**-0.5)
        made |= {f"A{name[1:]}": A.requires_grad_(), f"B{name[1:]}": B.requires_grad_()}
    return made


def agree(narrow, values, lora=None, function=tilemoe.moe, plain=None, **how):
    """O and all gradients have the same bits; `plain` computes those of the values."""
    lora = lora or {}
    of = lambda f: adapted(f) if lora else f
    got = results(of(function), {**narrow, **lora}, **how)
    want = results(of(plain or function), {**values, **lora}, **how)
    same_bits(got, want)
    assert all(tensor.any() for tensor in got.values())


KINDS = {
    "concatenated": dict(),
    "interleaved, transposed": dict(gate_layout="interleaved", transposed=True),
    "split": dict(gate_layout="split"),
    "split, transposed": dict(gate_layout="split", transposed=True),
}


def agree_of_kind(kind, format, dtype, adapters, **how):
    """`agree` of a layer of KINDS."""
    tensors = layer(dtype, **kind)
    narrow, values = quantized(tensors, format, transposed=kind.get("transposed", False))
    layout = kind.get("gate_layout", "concatenated")
    agree(narrow, values, factors(tensors) if adapters else None, K=K, gate_layout=layout, **how)
