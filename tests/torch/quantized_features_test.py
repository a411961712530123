"""Quantised weights with each feature: docs/pytorch.md has the same rows."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilemoe
from checks import compiled
from comparison import assert_close
from feature_table import (
    REFUSED, take_second_gradients, check, check_H_is_kept, check_walked_twice, of_pairs, of_rows,
    rows_of_page, with_given_ids, with_ones, without_marks,
)  # fmt: skip
from quantized_support import WEIGHTS, E, K, T, agree, d, factors, layer, n, quantized
from random_layers import normal

FORMAT = "nf4_double"  # has all arrays


def agrees(function=tilemoe.moe, tensors=None, plain=None, lora=True, names=WEIGHTS, **how):
    """O and all gradients have the bits of the layer with the values, of which `plain` computes
    them. lora: with adapters."""
    tensors = layer() if tensors is None else tensors
    narrow, values = quantized(tensors, FORMAT, names)
    agree(narrow, values, factors(tensors) if lora else None, function, plain, **how)


def both(**how):
    return lambda: [agrees(lora=lora, **how) for lora in (True, False)]


def one_trained():
    tensors = layer()
    tensors["W2"].requires_grad_()
    both(tensors=tensors, names=("W1",), K=K)()


def with_checkpoint():
    recomputed = lambda **given: checkpoint(tilemoe.moe, use_reentrant=False, **given)
    both(function=recomputed, plain=tilemoe.moe, K=K)()


def with_compile():
    both(function=compiled(tilemoe.moe), plain=tilemoe.moe, K=K)()


def with_autocast():
    tensors = layer()
    narrow, values = quantized(tensors, FORMAT)
    with torch.autocast("cpu", torch.bfloat16):
        O = tilemoe.moe(**narrow, K=K)
        values |= {name: narrow[name].dequantize(torch.bfloat16) for name in ("W1", "W2")}
        want = tilemoe.moe(**values, K=K)
    assert O.dtype == torch.bfloat16 and torch.equal(O, want)
    O.sum().backward()
    assert tensors["x"].grad.dtype == torch.float32 and tensors["x"].grad.any()


def with_decode():
    made = tilemoe.quantize_(tilemoe.MoE(d, n, E, K), FORMAT).eval()
    x = normal(3, d, seed=1, dtype=torch.float32)
    with torch.no_grad():
        decoded = made(x)
    assert torch.equal(decoded, made(x)) and decoded.any()


def with_memory():
    narrow, _ = quantized(layer(), FORMAT, ("W2",))
    given = tilemoe.WeightGradients(W1=torch.zeros_like(narrow["W1"]))
    tilemoe.moe(**narrow, K=K, weight_grad_out=given)


def with_ids():
    tensors, ids = with_given_ids(layer())
    both(tensors=tensors, **ids)()


def with_pairs():
    tensors, pairs = of_pairs(layer())
    both(function=tilemoe.moe_general, tensors=tensors, **pairs)()


def with_rows():
    tensors, counts = of_rows(layer())
    both(function=tilemoe.grouped_experts, tensors=tensors, **counts)()


def with_kinds(**kinds):
    how = {"gate_layout": kinds["gate_layout"]} if "gate_layout" in kinds else {}
    return both(tensors=layer(**kinds), K=K, **how)


def with_addend():
    both(tensors=with_ones(layer()), K=K)()


def walked_twice():
    tensors = layer()
    narrow, _ = quantized(tensors, FORMAT)
    check_walked_twice(tilemoe.moe(**narrow, K=K), tensors["x"])


def with_second_gradients():
    tensors = layer()
    narrow, _ = quantized(tensors, FORMAT)
    take_second_gradients(tilemoe.moe(**narrow, K=K), tensors["x"])


def with_recipe():
    narrow, _ = quantized(layer(gate_layout="split"), "fp8")
    fp8, plain = (
        tilemoe.moe(**narrow, K=K, gate_layout="split", recipe=recipe)
        for recipe in ("fp8_forward", "bf16")
    )
    fp8.sum().backward()
    assert 0.005 < (fp8 - plain).norm() / plain.norm() < 0.08


def without_gradients():
    tensors = layer()
    narrow, values = quantized(tensors, FORMAT)
    with torch.no_grad():
        assert torch.equal(tilemoe.moe(**narrow, K=K), tilemoe.moe(**values, K=K))


def on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = tilemoe.quantize_(tilemoe.MoE(d, n, E, K, lora_rank=8), "mxfp4")
        O = made(torch.empty(T, d))
        O.sum().backward()
    assert O.shape == (T, d) and made.experts.lora_B1.grad.shape == (E, 2 * n, 8)


ELSEWHERE = {  # of several processes, or of a GPU
    "CUDA graphs": "works, not tested on the CPU",
    "experts spread over ranks": "works, tested by expert_parallel_values.py",
    "`chunks` of ranks above 1": REFUSED + "quantised weights require chunks=1",
}
FEATURES = {  # row of the table: (test, what the page says)
    "adapters": (lambda: agrees(K=K), "works"),
    "one quantised weight, the other trained": (one_trained, "works"),
    "token rounding": (both(K=K, rounding="nearest", m=8), "works"),
    "given ids": (with_ids, "works"),
    "general routing": (with_pairs, "works"),
    "grouped rows": (with_rows, "works"),
    "biases": (with_kinds(bias=True), "works"),
    "interleaved gate": (with_kinds(gate_layout="interleaved"), "works"),
    "split gate": (with_kinds(gate_layout="split"), "works"),
    "transposed weights": (with_kinds(transposed=True), "works"),
    "`addend`": (with_addend, "works"),
    "`capacity`": (both(K=K, capacity=T * K), "works"),
    "`column_blocks`": (both(K=K, column_blocks=2), "works"),
    "`weight_blocks`": (both(K=K, weight_blocks=3), "works"),
    "`overwrite_H=True`": (both(K=K, overwrite_H=True), "works"),
    "`retain_graph`": (walked_twice, "works"),
    "double backward": (
        with_second_gradients, REFUSED + "double backward is not supported"
    ),
    "`recipe=\"fp8_forward\"`": (with_recipe, "works, in the format `fp8`"),
    "inference": (without_gradients, "works"),
    "checkpointing": (with_checkpoint, "works"),
    "`torch.compile(fullgraph=True)`": (with_compile, "works"),
    "fake tensors": (on_fake_tensors, "works"),
    "autocast": (with_autocast, "works"),
    "decode (`MoE`)": (with_decode, "works, by the router's linear layer and `moe`"),
    "`weight_grad_out`": (
        with_memory, REFUSED + "weight_grad_out requires weights that are not quantised"
    ),
}  # fmt: skip
ROWS = {feature: says for feature, (_, says) in FEATURES.items()} | ELSEWHERE


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    check(*FEATURES[feature])


@pytest.mark.parametrize("overwrite_H", [None, True, False])
def test_a_compiled_layer_keeps_H(overwrite_H):
    tensors = layer()
    narrow, _ = quantized(tensors, FORMAT)
    leaves = [tensors["x"], tensors["logits_or_scores"]]
    check_H_is_kept(compiled(tilemoe.moe), narrow, leaves, overwrite_H)


def test_a_compiled_module():
    made = tilemoe.quantize_(tilemoe.MoE(d, n, E, K, lora_rank=8), FORMAT)
    torch.nn.init.normal_(made.experts.lora_B1)
    x = normal(T, d, seed=2, dtype=torch.float32)
    assert_close(compiled(made)(x), made(x))


def test_the_page_has_these_rows():
    assert rows_of_page("quantised weights") == without_marks(ROWS)
