"""aux.ids and aux.scores: the choice of each token, as top_k and scores_at give it, bit for bit."""

import pytest
import torch

import tilemoe
from module_support import E, K, SHAPE, batch, d, make, n
from random_layers import normal
from target import DEVICE, DTYPE

SIGMOID = dict(scoring="sigmoid_renormalized", routed_scaling_factor=2.5)
GROUPS = SIGMOID | dict(n_group=3, topk_group=2, group_score="top2_sum")


def assert_choice(aux, ids, scores):
    for got, want, dtype in ((aux.ids, ids, torch.int32), (aux.scores, scores, torch.float32)):
        assert got.dtype == dtype and not got.requires_grad
        assert torch.equal(got, want.detach()), (got, want)


def choice(moe, x, **options):
    """ids and scores (..., K) by the functions."""
    bias = moe.gate.e_score_correction_bias
    scores, ids = tilemoe.top_k(
        torch.nn.functional.linear(x, moe.gate.weight), K, selection_bias=bias, **options
    )
    return ids, scores


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "options, rule",
    [
        ({}, {}),
        (SIGMOID | dict(selection_bias=True), SIGMOID),
        (GROUPS | dict(selection_bias=True), GROUPS),
        (dict(lora_rank=2), {}),
        (dict(balance_coefficient=0.1), {}),
    ],
    ids=["plain", "sigmoid", "groups", "lora", "losses"],
)
def test_of_a_choice(options, rule, training):
    moe = make(**options).train(training)
    x, _ = batch()
    _, aux = moe(x)
    assert aux.ids.shape == aux.scores.shape == (*SHAPE, K)
    assert_choice(aux, *choice(moe, x, **rule))
    assert torch.equal(torch.bincount(aux.ids.flatten().long(), minlength=E), aux.expert_counts)


def test_of_decode():
    """The decode path computes its logits in another order: its choice is that of these logits."""
    moe = make(balance_coefficient=0.1).eval()
    x = batch()[0].detach()
    assert moe._gate_of_decode(x.reshape(-1, d)) is None  # gradients are enabled
    with torch.no_grad():
        gate = moe._gate_of_decode(x.reshape(-1, d))
        out, aux = moe(x)
        _, _, logits = moe._decode(x.reshape(-1, d), gate)
        scores, ids = tilemoe.top_k(logits, K)
        assert_choice(aux, ids.view(*SHAPE, K), scores.view(*SHAPE, K))
        again, _ = moe(x, ids=aux.ids)
    torch.testing.assert_close(again, out)


@pytest.mark.parametrize("rounding", ["nearest", "down", "up", "balanced"])
def test_of_rounding_is_the_choice_before_it(rounding):
    moe = make(rounding=rounding, m=8)
    x, _ = batch()
    _, aux = moe(x)
    assert aux.dropped + aux.added > 0
    assert_choice(aux, *choice(moe, x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_of_given_ids(dtype):
    moe = make(**SIGMOID)
    x, _ = batch()
    ids = torch.randint(E, (*SHAPE, K), dtype=dtype)
    ids[0, 0, 0], ids[0, 1] = -1, E
    if dtype == torch.int64:
        ids[0, 2, 1] = 2**32  # 0 in 32 bits
    _, aux = moe(x, ids=ids)
    here = (ids >= 0) & (ids < E)
    assert torch.equal((aux.ids >= 0) & (aux.ids < E), here)
    logits = torch.nn.functional.linear(x, moe.gate.weight)
    scores = tilemoe.scores_at(logits, ids, **SIGMOID)
    assert_choice(aux._replace(ids=aux.ids[here]), ids[here].int(), scores)
    assert (aux.scores[~here] == 0).all() and (aux.scores[here] != 0).all()


def test_of_a_mask():
    moe = make()
    x, _ = batch()
    mask = torch.arange(SHAPE[1]) % 3 > 0
    mask = mask.expand(SHAPE)
    ids, scores = choice(moe, x)
    absent = ~mask.unsqueeze(-1)
    _, aux = moe(x, token_mask=mask)
    assert_choice(aux, ids.masked_fill(absent, -1), scores.masked_fill(absent, 0))


def test_of_a_capacity_is_the_choice_before_it():
    x, logits = normal(15, d, seed=1, dtype=DTYPE), normal(15, E, seed=2, dtype=torch.float32)
    W1, W2 = normal(E, 2 * n, d, seed=3, dtype=DTYPE), normal(E, d, n, seed=4, dtype=DTYPE)
    how = dict(K=K, capacity=11, on_overflow="drop", return_aux=True)
    _, aux = tilemoe.moe(x, logits, W1, W2, **how)
    assert aux.overflow > 0
    assert_choice(aux, *tilemoe.top_k(logits, K)[::-1])


def test_of_the_functions():
    x, logits = normal(5, 3, d, seed=1, dtype=DTYPE), normal(5, 3, E, seed=2, dtype=torch.float32)
    W1, W2 = normal(E, 2 * n, d, seed=3, dtype=DTYPE), normal(E, d, n, seed=4, dtype=DTYPE)
    scores, ids = tilemoe.top_k(logits, K)
    _, aux = tilemoe.moe(x, logits, W1, W2, K=K, return_aux=True)
    assert_choice(aux, ids, scores)
    given = scores.bfloat16().requires_grad_()
    _, aux = tilemoe.moe(x, given, W1, W2, ids=ids.long(), return_aux=True)
    assert_choice(aux, ids, given.float())
    pairs = torch.arange(15, device=DEVICE), ids[..., 0].flatten(), scores[..., 0].flatten()
    _, aux = tilemoe.moe_general(x.reshape(15, d), *pairs, W1, W2, return_aux=True)
    assert_choice(aux, *pairs[1:])


def test_ids_replay_the_layer():
    """A replay of its own ids changes no bit of a training step."""
    moe = make(**GROUPS, selection_bias=True)
    x, dO = batch()
    out, aux = moe(x)
    again, aux_again = moe(x, ids=aux.ids)
    assert torch.equal(out, again) and torch.equal(aux.scores, aux_again.scores)
    parameters = [p for p in moe.parameters() if p.requires_grad]
    want, got = (torch.autograd.grad(o, parameters, dO) for o in (out, again))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_costs_one_call_of_an_operator():
    """Without return_aux the choice is not computed again; with it one operator is called more."""
    moe, called = make(), []
    x, _ = batch()

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called.append(str(op))
            return op(*args, **(kwargs or {}))

    for moe.return_aux, top_k in ((False, 0), (True, 1)):
        called.clear()
        with Calls():
            moe(x)
        assert sum("top_k" in name for name in called) == top_k
