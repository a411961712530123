"""The yardstick itself: the reference agrees with a second writing of the layer, and the comparison
rejects every kind of error that the package's tests must find."""

import pytest
import torch
import torch.nn.functional as F

import reference
from comparison import LIMITS, assert_close, doubled

T, d, n, E, K = 37, 24, 16, 6, 3
ROUTER = "router_weight"


def problem(dtype=torch.float32, seed=0):
    """Unit-scale data: x, router_weight (E, d), W1, W2, b1, b2 by name; dO (T, d)."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    tensors = {
        "x": normal(T, d),
        ROUTER: normal(E, d) / d**0.5,
        "W1": normal(E, 2 * n, d) / d**0.5,
        "W2": normal(E, d, n) / n**0.5,
        "b1": normal(E, 2 * n) * 0.5,
        "b2": normal(E, d) * 0.5,
    }
    tensors = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    return tensors, normal(T, d).to(dtype)


def run(tensors, dO, **changes):
    """-> {name: tensor}: O and every gradient."""
    x, W1, W2 = tensors["x"], tensors["W1"], tensors["W2"]
    scores, ids = reference.topk_router(x @ tensors[ROUTER].T, K)
    edit = changes.pop("edit", lambda *call: call)
    scores, ids, W1, W2 = edit(scores, ids, W1, W2)
    arguments = dict(ids=ids, b1=tensors["b1"], b2=tensors["b2"], activation="swiglu") | changes
    O = reference.moe(x, scores, W1, W2, **arguments)
    names = list(tensors)
    gradients = torch.autograd.grad(
        O, [tensors[name] for name in names], dO.to(O.dtype), materialize_grads=True
    )
    return {"O": O} | {"d" + name: g for name, g in zip(names, gradients)}


def compare(got, want, limits=None):
    for name in want:
        assert_close(got[name], want[name], name, limits)


def swap_gate_and_up(scores, ids, W1, W2):
    return scores, ids, W1.roll(n, dims=1), W2


def drop_one_expert(scores, ids, W1, W2):
    return scores, torch.where(ids == E - 1, -1, ids), W1, W2


def ignore_scores(scores, ids, W1, W2):
    return torch.full_like(scores, 1 / K), ids, W1, W2


SLIPS = {
    "gate and up swapped": dict(edit=swap_gate_and_up),
    "one expert dropped": dict(edit=drop_one_expert),
    "scores ignored": dict(edit=ignore_scores),
    "b1 ignored": dict(b1=None),
    "b2 ignored": dict(b2=None),
    "geglu for swiglu": dict(activation="geglu"),
    "tanh form for erf": dict(activation="geglu_tanh"),
    "interleaved for concatenated": dict(gate_layout="interleaved"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_layer_passes(dtype):
    # In 16 bits every operation of plain PyTorch rounds, which the library does not: float32
    # arithmetic on 16-bit inputs stands for it, its results rounded once.
    tensors, dO = problem(dtype)
    single = {name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    got = {name: t.to(dtype) for name, t in run(single, dO).items()}
    compare(got, run(doubled(tensors), dO))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_fails(slip, dtype):
    tensors, dO = problem(dtype)
    want = run(doubled(tensors), dO)
    got = run(doubled(tensors), dO, **SLIPS[slip])
    with pytest.raises(AssertionError, match="^O "):
        compare(got, want, LIMITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["O", "dx", "d" + ROUTER, "dW1", "dW2", "db1", "db2"])
def test_a_zeroed_tensor_fails(name, dtype):
    tensors, dO = problem(dtype)
    want = run(doubled(tensors), dO)
    got = want | {name: torch.zeros_like(want[name])}
    with pytest.raises(AssertionError, match=f"^{name} "):
        compare(got, want, LIMITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swapped_or_lost_rows_and_nan_fail(dtype):
    tensors, dO = problem(dtype)
    want = run(doubled(tensors), dO)["O"]
    swapped = want.detach().clone()
    swapped[[4, 5]] = swapped[[5, 4]]
    lost = want.detach().clone()
    lost[T - 1] = 0
    spoiled = want.detach().clone()
    spoiled[0, 0] = torch.nan
    for got in (swapped, lost, spoiled):
        with pytest.raises(AssertionError):
            assert_close(got, want, "O", LIMITS[dtype])


def test_one_lost_row_among_many_fails():
    want = torch.randn(100_000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = want.clone()
    got[54_321] = 0  # 0.3 % of the norm
    with pytest.raises(AssertionError):
        assert_close(got, want, "O", LIMITS[torch.bfloat16])


def test_zero_yardstick_allows_only_zero():
    zero = torch.zeros(3, 4)
    assert_close(zero, zero)
    with pytest.raises(AssertionError):
        assert_close(zero + 1e-30, zero)


def test_a_missing_gradient_and_a_wrong_shape_fail():
    with pytest.raises(AssertionError, match="missing"):
        assert_close(None, torch.ones(3), "dX")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(1, 3), torch.ones(3), "dX")


# ---------------------------------------------------------------- the reference


def dense_layer(x, scores, ids, W1, W2, b1, b2):
    """The layer written once more: every expert on every token, weighted by (T, E)."""
    H = torch.einsum("td,ehd->teh", x, W1) + b1
    Y = torch.einsum("ten,edn->ted", F.silu(H[..., :n]) * H[..., n:], W2) + b2
    weight = torch.zeros(T, E, dtype=x.dtype).scatter(1, ids.long(), scores)
    return torch.einsum("te,ted->td", weight, Y)


def test_reference_equals_a_dense_writing():
    tensors, dO = problem(torch.float64)
    want = run(tensors, dO)
    x = tensors["x"]
    scores, ids = reference.topk_router(x @ tensors[ROUTER].T, K)
    O = dense_layer(x, scores, ids, *(tensors[name] for name in ("W1", "W2", "b1", "b2")))
    gradients = torch.autograd.grad(O, list(tensors.values()), dO)
    compare({"O": O} | {"d" + name: g for name, g in zip(tensors, gradients)}, want)


def test_general_and_grouped_are_the_same_pairs():
    tensors, _ = problem(torch.float64)
    x, W1, W2, b1, b2 = (tensors[name] for name in ("x", "W1", "W2", "b1", "b2"))
    scores, ids = reference.topk_router(x @ tensors[ROUTER].T, K)
    O, aux = reference.moe(x, scores, W1, W2, ids=ids, b1=b1, b2=b2, return_aux=True)
    tokens = torch.arange(T).repeat_interleave(K)
    general = reference.moe_general(
        x, tokens, ids.reshape(-1), scores.reshape(-1), W1, W2, b1=b1, b2=b2
    )
    assert_close(general, O)

    order = ids.reshape(-1).argsort(stable=True)
    rows = torch.cat([x[tokens[order]], torch.full((5, d), torch.nan, dtype=x.dtype)])
    row_scores = torch.cat([scores.reshape(-1)[order], torch.ones(5, dtype=x.dtype)])
    Y = reference.grouped_experts(
        rows, aux.expert_counts, W1, W2, row_scores=row_scores, b1=b1, b2=b2
    )
    assert (Y[T * K :] == 0).all()
    assert_close(torch.zeros_like(x).index_add(0, tokens[order], Y[: T * K]), O)


def test_ids_outside_are_skipped():
    tensors, dO = problem(torch.float64)
    x, W1, W2 = tensors["x"], tensors["W1"], tensors["W2"]
    scores, ids = reference.topk_router(x.detach() @ tensors[ROUTER].T, K)
    scores = scores.detach().requires_grad_()
    ids[:, 1], ids[3, 0] = -1, E
    O, aux = reference.moe(x, scores, W1, W2, ids=ids, return_aux=True)
    (dscores,) = torch.autograd.grad(O, scores, dO)
    assert aux.skipped == T + 1 and aux.expert_counts.sum() == T * K - T - 1
    assert (dscores[:, 1] == 0).all() and dscores[3, 0] == 0 and dscores[0, 0] != 0


@pytest.mark.parametrize("scoring", reference.SCORINGS)
def test_scorings(scoring):
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, -2.0, -3.0]], dtype=torch.float64)
    scores, ids = reference.topk_router(x, 2, scoring=scoring)
    assert ids.tolist() == [[1, 3], [0, 1]]  # a tie goes to the lower id
    p = x.sigmoid() if scoring.startswith("sigmoid") else x.softmax(-1)
    want = p.gather(1, ids.long())
    if scoring not in ("sigmoid", "softmax_over_all"):
        want = want / want.sum(-1, keepdim=True)
    assert_close(scores, want)


def test_selection_bias_chooses_but_does_not_score():
    x = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    scores, ids = reference.topk_router(x, 1, scoring="sigmoid", selection_bias=bias)
    assert ids.tolist() == [[2]] and scores.item() == 0.5


def test_nan_logits_choose_valid_ids_and_score_nan():
    x = torch.tensor([[torch.nan, 1.0, -torch.inf], [1.0, 2.0, 3.0]])
    scores, ids = reference.topk_router(x, 3)
    assert ids.tolist() == [[1, 2, 0], [2, 1, 0]]
    assert scores[0].isnan().all() and not scores[1].isnan().any()


def test_philox_known_answers():
    # Philox 4x32-10 of Random123's known answers: counter and key all zeros, all ones.
    assert reference.philox_bits(0, 0, 0) == 0x6627E8D5
    assert reference.philox_bits(2**64 - 1, 2**64 - 1, 2**64 - 1) == 0x408F276D


@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
def test_rounded_counts(rounding):
    f, many, m = [0, 3, 4, 9, 12, 20], 22, 8
    want = {
        "nearest": [0, 0, 8, 8, 16, 16],  # 20 goes up to 24, past T, so to floor(22/8)*8
        "up": [0, 8, 8, 16, 16, 16],
        "down": [0, 0, 0, 8, 8, 16],
        "balanced": [0, 0, 8, 8, 16, 16],  # remainders 0 3 4 1 4 4, sum 16: two go up
    }
    got = reference.rounded_counts(f, many, m, rounding, seed=5, step=7)
    if rounding == "stochastic":
        ups = sum(
            reference.rounded_counts(f, many, m, rounding, seed=5, step=step)[1] == 8
            for step in range(4000)
        )
        assert abs(ups / 4000 - 3 / 8) < 0.03  # four standard deviations
        assert all(abs(a - b) < m for a, b in zip(got, f)) and all(a % m == 0 for a in got)
    else:
        assert got == want[rounding]
    assert reference.rounded_counts(f, 7, m, rounding) == f  # T < m: plain top-K


@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
def test_rounded_pairs(rounding):
    logits = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens, experts, scores, aux = reference.rounded_pairs(logits, 2, rounding, 16, seed=1, step=2)
    counts = torch.bincount(experts, minlength=5)
    assert (counts % 16 == 0).all() and ((counts - aux.expert_counts).abs() < 16).all()
    assert counts.sum() == 64 * 2 + aux.added - aux.dropped
    p = logits.softmax(-1)
    top, ids = p.topk(2)
    for t, e, s in zip(tokens.tolist(), experts.tolist(), scores.tolist()):
        want = p[t, e] / top[t].sum() if e in ids[t] else p[t, e]
        assert abs(s - want) < 1e-12
    for e in range(5):  # nobody who did not choose e while one who did was dropped
        mine = tokens[experts == e]
        chose = (ids == e).any(-1)
        assert chose[mine].all() or chose.sum() <= counts[e]


def test_losses():
    logits = torch.zeros(8, 4, dtype=torch.float64)
    balance, z = reference.router_losses(logits, torch.full((4,), 4))
    assert_close(balance, torch.tensor(1.0, dtype=torch.float64))
    assert_close(z, torch.tensor(4.0, dtype=torch.float64).log() ** 2)


def test_gpt_oss_activation():
    H = torch.tensor([[9.0, -2.0, 8.0, -9.0]], dtype=torch.float64)
    A = reference.activate(H, "swiglu", clamp=7.0, alpha=1.702, up_shift=1.0)
    gate, up = torch.tensor([7.0, -2.0]).double(), torch.tensor([7.0, -7.0]).double()
    assert_close(A, gate * torch.sigmoid(1.702 * gate) * (up + 1)[None])
