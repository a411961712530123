"""Wrong arguments of `tilemoe.jax`: an error while JAX traces, which names the argument."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilemoe.jax as tilemoe
from jax_values import D, E, K, N, T

ones = jnp.ones
GOOD = dict(
    x=ones((T, D)), logits_or_scores=ones((T, E)), W1=ones((E, 2 * N, D)), W2=ones((E, D, N)), K=K
)  # fmt: skip
ROWS = dict(
    rows=ones((T, D)), counts=ones(E, jnp.int32), W1=GOOD["W1"], W2=GOOD["W2"]
)  # fmt: skip
IDS = dict(ids=ones((T, K), jnp.int32), logits_or_scores=ones((T, K)), K=None)
SPLIT = dict(W1=ones((E, N, D)), W1_up=ones((E, N, D)), gate_layout="split")
LORA = tilemoe.LoRA(A2=ones((E, 8, N)), B2=ones((E, D, 8)))


def refused(function, good, change, *words):
    arguments = {**good, **change}
    static = {k: arguments.pop(k) for k in list(arguments) if not hasattr(arguments[k], "shape")}
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        jax.jit(lambda a: function(**a, **static)).trace(arguments)
    for word in words:
        assert word in str(caught.value), caught.value


CASES = [
    (dict(x=ones((T, D + 8))), ["X has shape (13, 32)", "expected (13, 24)"]),
    (
        dict(x=ones((T, D), jnp.int32)),
        ["x must be float32, bfloat16 or float16, got int32 with shape (13, 24)"],
    ),
    (dict(x=1.0), ["x is a builtins.float"]),
    (dict(x=ones(())), ["x has shape ()"]),
    (dict(logits_or_scores=ones((T, E + 1))), ["logits has shape (13, 6)", "expected (13, 5)"]),
    (dict(logits_or_scores=ones((T + 1, E))), ["logits has shape (14, 5)"]),
    (dict(W1=ones((E, 2 * N + 8, D))), ["W1 has shape (5, 40, 24)", "(5, 32, 24)"]),
    (dict(W1=ones((E, D, 2 * N))), ["W1 has shape (5, 24, 32)"]),
    (dict(transposed=True), ["W1 has shape (5, 24, 32)"]),
    (dict(W1=ones((2 * N, D))), ["W1 has shape (32, 24)"]),
    (dict(W2=ones((E, D))), ["W2 is of shape (5, 24)", "three dimensions"]),
    (dict(W2=ones((E + 1, D, N))), ["logits has shape (13, 5)"]),
    (dict(W1=ones((E, 12, D)), W2=ones((E, D, 6))), ["n is 6"]),
    (dict(b1=ones((E, N))), ["b1 has shape (5, 16)"]),
    (dict(b2=ones((E, N))), ["b2 has shape (5, 16)"]),
    (dict(W1_up=ones((E, N, D))), ["W1_up", "split"]),
    (dict(SPLIT, W1_up=None), ["W1_up"]),
    (dict(SPLIT, b1=ones((E, N))), ["b1_up"]),
    (dict(addend=ones((T, N))), ["addend has shape (13, 16)"]),
    (dict(K=0), ["K must be in [1, 5] for E = 5, got 0"]),
    (dict(K=E + 1), ["K must be in [1, 5] for E = 5, got 6"]),
    (dict(K=None), ["K is required unless ids is given"]),
    (dict(recipe="fp8"), ["W1 has shape (5, 32, 24)", "multiples of 16 in FP8"]),
    (dict(recipe="fp9"), ["recipe must be one of", "got 'fp9'"]),
    (dict(rounding_tokens=8), ["moe() got an unexpected keyword argument 'rounding_tokens'"]),
    (dict(scoring="softmax"), ["scoring must be one of", "got 'softmax'"]),
    (dict(activation="swish"), ["activation must be one of", "got 'swish'"]),
    (dict(activation="gelu", clamp=1.0), ["clamp", "swiglu"]),
    (dict(colour="red"), ["colour"]),
    (dict(n_group=3), ["n_group must be in", "got 3"]),
    (dict(selection_bias=ones(E)), ["selection_bias", "sigmoid"]),
    (dict(scoring="sigmoid", selection_bias=ones(E + 1)), ["selection_bias has shape (6,)"]),
    (
        dict(scoring="sigmoid", selection_bias=ones(E, jnp.bfloat16)),
        ["selection_bias must be float32, got bfloat16"],
    ),
    (dict(capacity=0), ["capacity must be an int >= 1, got 0"]),
    (dict(overwrite_H=None), ["overwrite_H must be True or False, got None"]),
    (dict(transposed=1), ["transposed must be True or False, got 1"]),
    (dict(IDS, ids=ones((T, K))), ["ids must be int32 or int64, got float32 with shape (13, 3)"]),
    (dict(IDS, ids=ones((T, K + 1), jnp.int32)), ["scores has shape (13, 3)", "(13, 4)"]),
    (dict(IDS, selection_bias=ones(E)), ["selection_bias requires logits without ids, got ids"]),
    (dict(IDS, routed_scaling_factor=2.0), ["routed_scaling_factor must have its default if ids", "got 2.0"]),
    (dict(lora="none"), ["lora must be a tilemoe.jax.LoRA, got a builtins.str"]),
    (dict(lora=tilemoe.LoRA()), ["lora requires the factors of W1, of W2 or of both, got none"]),
    (dict(lora=tilemoe.LoRA(A2=LORA.A2)), ["lora.A2 requires lora.B2, got None"]),
    (dict(lora=tilemoe.LoRA(A1_up=LORA.A2, B1_up=LORA.B2)), ["lora.A1_up", "split"]),
    (
        dict(lora=tilemoe.LoRA(A2=ones((E, 257, N)), B2=ones((E, D, 257)))),
        ["lora.A2 must have a rank in [1, 256], got 257"],
    ),
    (dict(lora=tilemoe.LoRA(A2=ones((E, 8, D)), B2=LORA.B2)), ["lora.A2 has shape (5, 8, 24)"]),
    (
        dict(lora=tilemoe.LoRA(A2=LORA.A2, B2=LORA.B2, scale=float("nan"))),
        ["lora.scale must be a finite number", "got nan"],
    ),
]


@pytest.mark.parametrize("change, words", CASES, ids=[" ".join(words) for _, words in CASES])
def test_moe(change, words):
    refused(tilemoe.moe, GOOD, change, *words)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(rows=ones((2, T, D))), ["rows has shape (2, 13, 24)", "(R, d)"]),
        (dict(counts=ones(E)), ["counts must be int32 or int64, got float32 with shape (5,)"]),
        (dict(counts=ones(E + 1, jnp.int32)), ["counts has shape (6,)", "(5,)"]),
        (dict(row_scores=ones(T - 1)), ["row_scores has shape (12,)"]),
        (dict(K=2), ["K"]),
    ],
    ids=["rows", "counts' dtype", "counts' shape", "row_scores", "K"],
)
def test_grouped(change, words):
    refused(tilemoe.grouped_experts, ROWS, change, *words)


def test_router():
    logits, ids = ones((T, E)), ones((T, K), jnp.int32)
    refused(tilemoe.top_k_scores, dict(logits=logits, ids=ids), dict(ids=ids[1:]), "ids has shape (12, 3)")
    refused(
        tilemoe.top_k_scores, dict(logits=logits), dict(ids=ones((T, E + 1), jnp.int32)), "K = 6", "E = 5"
    )
    good = dict(logits=logits, expert_counts=ones(E, jnp.int32))
    refused(tilemoe.router_losses, good, dict(expert_counts=ones(E)), "expert_counts must be int32, got float32")
    refused(tilemoe.router_losses, good, dict(expert_counts=ones(3, jnp.int32)), "expert_counts has shape")
    refused(tilemoe.router_losses, good, dict(token_mask=ones(T)), "token_mask must be bool, got float32")


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: tilemoe.set_num_threads(-1), "threads is -1"),
        (lambda: tilemoe.set_ctas_per_sm(17), "ctas_per_sm must be an int in [1, 16], got 17"),
        (lambda: tilemoe.set_ctas_per_sm(True), "ctas_per_sm must be an int in [1, 16], got True"),
        (lambda: tilemoe.set_cuda_sms(0), "counts must be ints >= 1, got 0"),
    ],
    ids=["threads", "CTAs", "a bool", "SMs"],
)
def test_settings(call, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        call()


def test_good_calls_are_taken():
    assert tilemoe.moe(**GOOD, lora=LORA).shape == (T, D)
    assert tilemoe.moe(**{**GOOD, **IDS}).shape == (T, D)
    assert tilemoe.moe(**{**GOOD, **SPLIT}).shape == (T, D)
    assert tilemoe.grouped_experts(**ROWS).shape == (T, D)
    numpy = {name: np.asarray(a) if hasattr(a, "shape") else a for name, a in GOOD.items()}
    np.testing.assert_array_equal(tilemoe.moe(**numpy), tilemoe.moe(**GOOD))
