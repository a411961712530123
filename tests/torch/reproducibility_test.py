"""Promises of docs/reinforcement_learning.md that no other test proves."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilemoe
from module_support import E, K, SHAPE, batch, d, make, n, run, same_bits
from random_layers import normal
from target import DTYPE

PAGE = Path(__file__).parents[2] / "docs" / "reinforcement_learning.md"


def test_the_page_names_tests_that_exist():
    named = re.findall(r"`(\w+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) >= 14
    for file, test in named:
        text = (Path(__file__).parent / file).read_text()
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), (file, test)


def checkpointed(moe):
    return lambda x, **named: checkpoint(moe, x, use_reentrant=False, **named)


def results(called, moe, x, dO):
    out, aux = called(x)
    gradients = torch.autograd.grad(out, [x, *moe.parameters()], dO)
    return {"out": out, "ids": aux.ids} | {str(i): g for i, g in enumerate(gradients)}


@pytest.mark.parametrize("scoring", ["softmax_over_chosen", "sigmoid_renormalized"])
def test_ties_are_recomputed_alike(scoring):
    """All logits are equal: any order of equal values would be a correct choice, once."""
    moe = make(scoring=scoring)
    torch.nn.init.zeros_(moe.gate.weight)
    x, dO = batch()
    want = results(moe, moe, x, dO)
    assert torch.equal(want["ids"], torch.arange(K, dtype=torch.int32).expand(*SHAPE, K))
    for _ in range(3):
        same_bits(results(checkpointed(moe), moe, x, dO), want)


def test_recomputation_counts_each_token_once():
    moe, plain = (make(scoring="sigmoid", selection_bias=True) for _ in range(2))
    x, dO = batch()
    for layer, called in ((moe, checkpointed(moe)), (plain, plain)):
        before = {name: b.clone() for name, b in layer.named_buffers()}
        out, aux = called(x)
        out.backward(dO)
        assert aux.expert_counts.sum() == SHAPE[0] * SHAPE[1] * K
        same_bits(dict(layer.named_buffers()), before)  # no pass changes them
        layer.update_selection_bias(aux.expert_counts, rate=0.5)
    same_bits(dict(moe.named_buffers()), dict(plain.named_buffers()))


def test_the_second_bias_is_scaled_by_the_score():
    """Small integers: with W2 = 0 the output is the sum of scores times b2, exactly."""
    T = 5
    x, W1 = normal(T, d, seed=1, dtype=DTYPE), normal(E, 2 * n, d, seed=2, dtype=DTYPE)
    b1, W2 = torch.zeros(E, 2 * n, dtype=DTYPE), torch.zeros(E, d, n, dtype=DTYPE)
    b2 = torch.arange(E * d).reshape(E, d).remainder(13).sub(6).to(DTYPE)
    ids = torch.stack([torch.arange(T) % E, (torch.arange(T) + 2) % E], dim=1)
    scores = torch.tensor([0.5, -2.0]).expand(T, 2).contiguous().requires_grad_()
    b2.requires_grad_()
    out = tilemoe.moe(x, scores, W1, W2, ids=ids, b1=b1, b2=b2)
    want = (scores.unsqueeze(-1) * b2[ids].float()).sum(1)
    assert torch.equal(out, want.to(DTYPE))
    dO = torch.ones_like(out)
    got = torch.autograd.grad(out, [scores, b2], dO)
    wanted = torch.autograd.grad(want, [scores, b2], dO.float())
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1].to(DTYPE))


@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_released_between_the_passes(accumulate):
    """FSDP frees a parameter's storage after forward and fills it again before backward."""
    x, logits = normal(9, d, seed=1, dtype=DTYPE), normal(9, E, seed=2, dtype=torch.float32)
    weights = [normal(E, 2 * n, d, seed=3, dtype=DTYPE), normal(E, d, n, seed=4, dtype=DTYPE)]
    weights = [w.requires_grad_() for w in weights]
    found = []
    for releases in (False, True):
        memory = [torch.ones(w.shape) for w in weights]
        given = tilemoe.WeightGradients(W1=memory[0], W2=memory[1])
        out = tilemoe.moe(
            x, logits, *weights, K=K, weight_grad_out=given, accumulate=accumulate
        )
        values = [w.detach().clone() for w in weights]
        if releases:
            sizes = [w.untyped_storage().nbytes() for w in weights]
            for w in weights:
                w.untyped_storage().resize_(0)
            for w, value, size in zip(weights, values, sizes):
                w.untyped_storage().resize_(size)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
                    w.copy_(value)
        out.backward(torch.ones_like(out))
        found.append(memory)
    assert all(torch.equal(a, b) and not (a == 1).all() for a, b in zip(*found))
    assert all(w.grad is None for w in weights)


def test_released_weights_are_refused_by_name():
    x, logits = normal(9, d, seed=1, dtype=DTYPE), normal(9, E, seed=2, dtype=torch.float32)
    W1, W2 = normal(E, 2 * n, d, seed=3, dtype=DTYPE), normal(E, d, n, seed=4, dtype=DTYPE)
    gone = torch.empty(0, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"W1 has shape \(0,?\), expected three dimensions"):
        tilemoe.moe(x, logits, gone, W2, K=K)
    with pytest.raises(ValueError, match=r"W2 has shape \(0,?\)"):
        tilemoe.moe(x, logits, W1, gone, K=K)
    with pytest.raises(ValueError, match=r"b2 has shape \(0,?\)"):
        tilemoe.moe(x, logits, W1, W2, K=K, b2=gone, b1=torch.zeros(E, 2 * n, dtype=DTYPE))


def test_a_step_repeats():
    moe = make(bias=True)
    x, dO = batch()
    same_bits(run(moe, x, dO), run(moe, x, dO))
