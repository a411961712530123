"""Low-rank adapters with each feature: docs/pytorch.md has the same rows."""

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
from lora_test import SCALE, adapted, factors, merged
from random_layers import E, K, T, d, logits_layer, n, normal, results


def layer(dtype=torch.float32, **kinds):
    tensors = logits_layer(dtype, **kinds)
    for key, tensor in tensors.items():
        if key.startswith(("W", "b")):
            tensors[key] = tensor.detach()
    return tensors


def agrees(function=tilemoe.moe, tensors=None, plain=None, **how):
    """O and all gradients are those of merged weights, of which `plain` computes O."""
    tensors = layer() if tensors is None else tensors
    lora = factors(tensors)
    got = results(adapted(function), {**tensors, **lora}, **how)
    of_merged = lambda **given: (plain or function)(
        **merged({k: given[k] for k in tensors}, {k: given[k] for k in lora}),
        **{k: v for k, v in given.items() if k not in tensors and k not in lora},
    )
    want = results(of_merged, {**tensors, **lora}, **how)
    for key in want:
        assert_close(got[key], want[key], key)


def with_checkpoint():
    recomputed = lambda **given: checkpoint(tilemoe.moe, use_reentrant=False, **given)
    agrees(recomputed, plain=tilemoe.moe, K=K)


def with_compile():
    agrees(compiled(tilemoe.moe), plain=tilemoe.moe, K=K)


def with_autocast():
    tensors = layer()
    lora = factors(tensors)
    with torch.autocast("cpu", torch.bfloat16):
        O = adapted(tilemoe.moe)(**tensors, **lora, K=K)
    assert O.dtype == torch.bfloat16
    O.sum().backward()
    assert lora["A1"].grad.dtype == torch.float32 and lora["A1"].grad.any()


def with_decode():
    made = tilemoe.MoE(d, n, E, K, lora_rank=8).eval()
    torch.nn.init.normal_(made.experts.lora_B1)
    x = normal(3, d, seed=1, dtype=torch.float32)
    with torch.no_grad():
        decoded = made(x)
    assert_close(decoded, made(x))


def used_twice():
    tensors = layer()
    lora = factors(tensors)
    call = lambda: adapted(tilemoe.moe)(**tensors, **lora, K=K).sum()
    (call() + call()).backward()
    twice = lora["B1"].grad.clone()
    lora["B1"].grad = None
    call().backward()
    assert_close(twice, 2 * lora["B1"].grad)


def with_memory():
    tensors = layer()
    given = tilemoe.WeightGradients(W1=torch.zeros_like(tensors["W1"]))
    lora = tilemoe.LoRA(**factors(tensors), scale=SCALE)
    tilemoe.moe(**tensors, K=K, lora=lora, weight_grad_out=given)


def with_ids():
    tensors, ids = with_given_ids(layer())
    agrees(tensors=tensors, **ids)


def with_pairs():
    tensors, pairs = of_pairs(layer())
    agrees(tilemoe.moe_general, tensors, **pairs)


def with_rows():
    tensors, counts = of_rows(layer())
    agrees(tilemoe.grouped_experts, tensors, **counts)


def with_kinds(**kinds):
    how = {"gate_layout": kinds["gate_layout"]} if "gate_layout" in kinds else {}
    return lambda: agrees(tensors=layer(**kinds), K=K, **how)


def with_addend():
    agrees(tensors=with_ones(layer()), K=K)


def walked_twice():
    tensors = layer()
    lora = factors(tensors)
    check_walked_twice(adapted(tilemoe.moe)(**tensors, **lora, K=K), lora["A1"])


def with_second_gradients():
    tensors = layer()
    lora = factors(tensors)
    take_second_gradients(adapted(tilemoe.moe)(**tensors, **lora, K=K), lora["A1"])


ELSEWHERE = {  # of several processes, or of a GPU
    "CUDA graphs": "works, not tested on the CPU",
    "experts spread over ranks": "works, tested by expert_parallel_values.py",
    "`chunks` of ranks above 1": REFUSED + "lora requires chunks=1",
}
FEATURES = {  # row of the table: (test, what the page says)
    "token rounding": (lambda: agrees(K=K, rounding="nearest", m=8), "works"),
    "given ids": (with_ids, "works"),
    "general routing": (with_pairs, "works"),
    "grouped rows": (with_rows, "works"),
    "biases": (with_kinds(bias=True), "works"),
    "interleaved gate": (with_kinds(gate_layout="interleaved"), "works"),
    "split gate": (with_kinds(gate_layout="split"), "works"),
    "transposed weights": (with_kinds(transposed=True), "works"),
    "`addend`": (with_addend, "works"),
    "`capacity`": (lambda: agrees(K=K, capacity=T * K), "works"),
    "`column_blocks`": (lambda: agrees(K=K, column_blocks=2), "works"),
    "`overwrite_H=True`": (lambda: agrees(K=K, overwrite_H=True), "works"),
    "`retain_graph`": (walked_twice, "works"),
    "double backward": (
        with_second_gradients, REFUSED + "double backward is not supported"
    ),
    "checkpointing": (with_checkpoint, "works"),
    "`torch.compile(fullgraph=True)`": (with_compile, "works"),
    "autocast": (with_autocast, "works"),
    "decode (`MoE`)": (with_decode, "works"),
    "one adapter in several calls": (used_twice, "works"),
    "`weight_grad_out`": (with_memory, REFUSED + "lora and weight_grad_out cannot be combined"),
}
ROWS = {feature: says for feature, (_, says) in FEATURES.items()} | ELSEWHERE


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    check(*FEATURES[feature])


@pytest.mark.parametrize("overwrite_H", [None, True, False])
def test_a_compiled_layer_keeps_H(overwrite_H):
    tensors = layer()
    lora = factors(tensors)
    function, leaves = compiled(adapted(tilemoe.moe)), [tensors["x"], *lora.values()]
    check_H_is_kept(function, {**tensors, **lora}, leaves, overwrite_H)


def test_the_page_has_these_rows():
    assert rows_of_page("adapters") == without_marks(ROWS)
