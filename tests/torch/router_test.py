"""The router alone: choice among groups of experts, scores of ids chosen elsewhere, the factor
of all scores; against the same in plain PyTorch (reference.py)."""


import pytest
import torch

from checks import refused, short
import reference
import tilemoe
from random_layers import check, compare, results
from random_layers import normal as normal_of
from target import DEVICE, DTYPE, DTYPES

T, d, n, E, K = 41, 24, 16, 24, 4
SOFTMAX = ["softmax_over_chosen", "softmax_over_all", "softmax_renormalized"]
SIGMOID = ["sigmoid", "sigmoid_renormalized"]
GROUPS = [(1, 1), (2, 1), (3, 2), (4, 2), (6, 1), (12, 5), (24, 7)]  # n_group, topk_group
FACTOR = 2.446  # of DeepSeek-V3's successors: no power of two


def normal(*shape, seed, dtype=torch.float32, scale=1.0):
    return normal_of(*shape, seed=seed, dtype=dtype, scale=scale)


def worths(scoring, n_group):
    """The scores of a group that go with the two."""
    if scoring in SOFTMAX or n_group == E:
        return ["max"]
    return ["top2_sum", "max"]


CHOICES = [
    (scoring, n_group, topk_group, group_score)
    for scoring in SOFTMAX + SIGMOID
    for n_group, topk_group in GROUPS
    for group_score in worths(scoring, n_group)
]
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
each_choice = pytest.mark.parametrize("scoring, n_group, topk_group, group_score", CHOICES)


def grouped(n_group, topk_group, group_score):
    return dict(n_group=n_group, topk_group=topk_group, group_score=group_score)


def score_bound(logits, of):
    """The relative error that a float32 score may have, by what docs/mathematics.md states of exp
    (1.01 ulp) and sigmoid (2.4 ulp), and for sums of `of` terms in 32 lanes. An ulp is 2^-23 of a
    value at most, a rounding 2^-24; x - max(x) rounds by that of itself, which exp makes
    relative."""
    spread = (logits.amax() - logits.amin()).item()
    value = max(2 * 2.4, 2 * 1.01 + spread)
    return 2.0**-24 * (2 * value + of / 32 + 5 + 3)  # sum, quotient, factor, and what is compared


def assert_scores(got, want, logits):
    """got, float32, next to want, float64: NaN and 0 in the same places."""
    assert torch.equal(got.isnan(), want.isnan())
    wrong = (got.double() - want).abs() > score_bound(logits.double(), E) * want.abs()
    assert not wrong.any(), (got[wrong], want[wrong])


# ---------------------------------------------------------------- groups


@each_choice
@each_dtype
def test_choice_among_groups(scoring, n_group, topk_group, group_score, dtype):
    """Logits of few values, so that experts and groups tie: the lower comes first."""
    generator = torch.Generator("cpu").manual_seed(n_group)
    values = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.5, -1.5], device="cpu")  # no two sums of two tie
    picked = torch.randint(len(values), (400, E), generator=generator, device="cpu")
    logits = values[picked].to(DEVICE, dtype)
    options = dict(scoring=scoring, **grouped(n_group, topk_group, group_score))
    scores, ids = tilemoe.top_k(logits, K, **options)
    want_scores, want_ids = reference.top_k(logits.double(), K, **options)
    assert torch.equal(ids, want_ids)
    assert_scores(scores, want_scores, logits)
    # By their best, K groups have the K best experts.
    if n_group > topk_group and not (group_score == "max" and topk_group >= K):
        plain = tilemoe.top_k(logits, K, scoring=scoring)[1]
        assert not torch.equal(ids, plain)
    width = E // n_group
    of_token = torch.zeros(400, n_group, dtype=torch.bool).scatter(1, ids.long() // width, True)
    assert (of_token.sum(1) <= topk_group).all()


@pytest.mark.parametrize("scoring", SIGMOID)
@pytest.mark.parametrize("group_score", ["top2_sum", "max", None])
def test_a_bias_takes_part_in_groups_and_choice_alone(scoring, group_score):
    logits, bias = normal(T, E, seed=1), normal(E, seed=2, scale=0.7)
    options = dict(scoring=scoring, selection_bias=bias, **grouped(4, 2, group_score))
    scores, ids = tilemoe.top_k(logits, K, **options)
    options["selection_bias"] = bias.double()
    want_scores, want_ids = reference.top_k(logits.double(), K, **options)
    assert torch.equal(ids, want_ids)
    assert_scores(scores, want_scores, logits)
    assert not torch.equal(ids, tilemoe.top_k(logits, K, **options | {"selection_bias": None})[1])


def test_a_bias_below_every_score_keeps_the_choice_in_the_groups():
    """A mask of zeros in place of -inf, as some versions had it, would let other groups in here."""
    logits = normal(T, E, seed=3)
    bias = torch.full((E,), -2.0)
    options = dict(scoring="sigmoid", n_group=6, topk_group=1)
    ids = tilemoe.top_k(logits, K, selection_bias=bias, **options)[1]
    assert torch.equal(ids, tilemoe.top_k(logits, K, **options)[1])


@pytest.mark.parametrize("scoring", SOFTMAX + SIGMOID)
def test_what_a_group_is_worth_by_default(scoring):
    logits = normal(T, E, seed=4)
    default = {True: "top2_sum", False: "max"}[scoring in SIGMOID]
    options = dict(scoring=scoring, n_group=6, topk_group=2)
    ids = tilemoe.top_k(logits, K, **options)[1]
    assert torch.equal(ids, tilemoe.top_k(logits, K, group_score=default, **options)[1])


@pytest.mark.parametrize("scoring", SOFTMAX + SIGMOID)
def test_a_token_with_NaN_spoils_itself_alone(scoring):
    logits = normal(T, E, seed=5)
    options = dict(scoring=scoring, n_group=6, topk_group=2)
    want_scores, want_ids = tilemoe.top_k(logits, K, **options)
    bad = logits.clone()
    bad[3, 7], bad[5, :8], bad[9] = torch.nan, torch.nan, torch.nan
    scores, ids = tilemoe.top_k(bad, K, **options)
    assert torch.equal(ids, reference.top_k(bad, K, **options)[1])
    others = torch.ones(T, dtype=torch.bool)
    others[[3, 5, 9]] = False
    assert torch.equal(scores[others], want_scores[others])
    assert torch.equal(ids[others], want_ids[others])
    assert scores[~others].isnan().all()
    for token in (3, 5, 9):
        assert len(ids[token].unique()) == K and 0 <= ids[token].min() and ids[token].max() < E


# ---------------------------------------------------------------- the layer


def layer(dtype=DTYPE, logits_dtype=torch.float32):
    make = lambda *shape, seed, scale=1.0, dtype=dtype: normal(
        *shape, seed=seed, dtype=dtype, scale=scale
    ).requires_grad_()
    return {
        "x": make(T, d, seed=20),
        "logits_or_scores": make(T, E, seed=21, dtype=logits_dtype),
        "W1": make(E, 2 * n, d, seed=22, scale=d**-0.5),
        "W2": make(E, d, n, seed=23, scale=n**-0.5),
    }


@pytest.mark.parametrize("scoring", SOFTMAX + SIGMOID)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_with_groups_and_a_factor(scoring, dtype):
    check(
        "moe", layer(dtype), K=K, scoring=scoring, n_group=4, topk_group=2,
        routed_scaling_factor=FACTOR,
    )  # fmt: skip


def test_moe_with_a_bias_and_groups():
    check(
        "moe", layer(), K=K, scoring="sigmoid_renormalized", n_group=4, topk_group=2,
        selection_bias=normal(E, seed=6, scale=0.5), routed_scaling_factor=FACTOR,
    )  # fmt: skip


@pytest.mark.parametrize("scoring", SOFTMAX + SIGMOID)
@pytest.mark.parametrize("overwrite_H", [None, False, True])
def test_a_factor_of_two_doubles_scores_and_their_gradient(scoring, overwrite_H):
    """To the bit, by whichever operators backward takes."""
    tensors = layer(torch.float32 if DEVICE == "cpu" else DTYPE)
    logits = tensors["logits_or_scores"]
    once, twice = (
        tilemoe.top_k(logits, K, scoring=scoring, routed_scaling_factor=f)[0] for f in (1.0, 2.0)
    )
    assert torch.equal(twice, 2 * once)
    ds = normal(T, K, seed=7)
    gradients = [torch.autograd.grad(s, logits, ds)[0] for s in (once, twice)]
    assert gradients[0].any() and torch.equal(gradients[1], 2 * gradients[0])
    options = dict(K=K, scoring=scoring, overwrite_H=overwrite_H)
    got, want = (
        results(tilemoe.moe, tensors, routed_scaling_factor=f, **options) for f in (2.0, 1.0)
    )
    same = ("O", "dx", "dW2", "dlogits_or_scores")  # linear in the scores, rounded but at the end
    for name in same:
        assert want[name].any() and torch.equal(got[name], 2 * want[name]), name


@pytest.mark.parametrize("overwrite_H", [None, False, True])
@pytest.mark.parametrize("names", [["W1"], ["W1", "W2"]], ids=",".join)
def test_gradients_into_given_memory_know_the_factor(names, overwrite_H):
    """H as it is: the router's gradient is an operator of its own there."""
    tensors = layer()
    options = dict(K=K, scoring="sigmoid", n_group=3, topk_group=2, routed_scaling_factor=FACTOR)
    want = results(tilemoe.moe, tensors, overwrite_H=False, **options)
    given = tilemoe.WeightGradients(**{name: torch.zeros_like(tensors[name]) for name in names})
    options |= dict(weight_grad_out=given, overwrite_H=overwrite_H)
    got = results(tilemoe.moe, tensors, **options)
    for name in want.keys() - {f"d{name}" for name in names}:
        assert torch.equal(got[name], want[name]), name
    for name in names:
        assert torch.equal(getattr(given, name), want[f"d{name}"]), name


def test_counts_of_a_choice_among_groups():
    tensors = layer()
    options = dict(n_group=4, topk_group=1)
    _, aux = tilemoe.moe(**tensors, K=K, return_aux=True, **options)
    ids = tilemoe.top_k(tensors["logits_or_scores"], K, **options)[1]
    assert torch.equal(aux.expert_counts, torch.bincount(ids.flatten(), minlength=E).int())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_the_same_bits(dynamic):
    torch._dynamo.reset()
    tensors = layer()
    options = dict(
        K=K, scoring="sigmoid", n_group=4, topk_group=2, group_score="max",
        routed_scaling_factor=FACTOR,
    )  # fmt: skip

    def both(x, logits, W1, W2):
        out = tilemoe.moe(x, logits, W1, W2, **options)
        ids = torch.arange(T * K, device=x.device).reshape(T, K) % (E + 1) - 1
        how = dict(scoring="softmax_over_all", routed_scaling_factor=2.0)
        scores = tilemoe.scores_at(logits, ids, **how)
        return out.float().sum() + (scores * scores).sum()

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    leaves = list(tensors.values())
    got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, both))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


# ---------------------------------------------------------------- scores at given ids


def some_ids(seed=8, dtype=torch.int64):
    """(T, K): chosen by nobody, some absent, some repeated, a token that has none."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(-2, E + 2, (T, K), generator=generator, device="cpu")
    ids[0], ids[1], ids[2] = torch.tensor([-1, E, -5, E + 9]), 3, torch.tensor([2, 2, -1, 2])
    return ids.to(DEVICE, dtype)


@each_choice
@each_dtype
def test_scores_at_the_choice_have_its_bits(scoring, n_group, topk_group, group_score, dtype):
    logits = normal(T, E, seed=9, dtype=dtype).requires_grad_()
    options = dict(scoring=scoring, routed_scaling_factor=FACTOR)
    want, ids = tilemoe.top_k(logits, K, **options, **grouped(n_group, topk_group, group_score))
    got = tilemoe.scores_at(logits, ids, **options)
    assert torch.equal(got, want)
    ds = normal(T, K, seed=10)
    gradients = [torch.autograd.grad(scores, logits, ds)[0] for scores in (got, want)]
    assert gradients[0].any() and torch.equal(*gradients)


@pytest.mark.parametrize("scoring", SOFTMAX + SIGMOID)
@each_dtype
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_scores_at_any_ids(scoring, dtype, ids_dtype):
    logits, ids = normal(T, E, seed=11, dtype=dtype).requires_grad_(), some_ids(dtype=ids_dtype)
    options = dict(scoring=scoring, routed_scaling_factor=FACTOR)
    got = tilemoe.scores_at(logits, ids, **options)
    wide = logits.detach().double().requires_grad_()
    want = reference.scores_at(wide, ids, **options)
    assert got.dtype == torch.float32
    assert_scores(got, want, logits)
    absent = (ids < 0) | (ids >= E)
    assert absent[0].all() and absent.any(1).sum() > 5 and not got[absent].any()
    ds = normal(T, K, seed=12)
    (dlogits,) = torch.autograd.grad(got, logits, ds)
    (wanted,) = torch.autograd.grad(want, wide, ds.double())
    assert dlogits.dtype == dtype and not dlogits[0].any()
    whole = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for row in range(1, T):  # terms of a row cancel: its error is measured by what they add up to
        scale = (want[row].abs() * ds[row].abs()).sum() + wanted[row].norm()
        assert not (dlogits[row].double() - wanted[row]).norm() > 2 * whole * scale, row


def test_scores_at_of_any_leading_shape():
    logits, ids = normal(2, 5, E, seed=13), some_ids()[:10].reshape(2, 5, K)
    got = tilemoe.scores_at(logits, ids)
    flat = tilemoe.scores_at(logits.reshape(10, E), ids.reshape(10, K))
    assert got.shape == (2, 5, K) and torch.equal(got.reshape(10, K), flat)
    apart = tilemoe.scores_at(logits.transpose(0, 1), ids.transpose(0, 1))
    assert torch.equal(apart, got.transpose(0, 1))
    assert tilemoe.scores_at(logits[:0], ids[:0]).shape == (0, 5, K)


def test_scores_replayed_through_the_layer():
    """A rollout's ids, a trainer's logits: the gradient goes to the trainer's."""
    tensors = layer()
    options = dict(scoring="sigmoid_renormalized", routed_scaling_factor=FACTOR)
    logits = tensors["logits_or_scores"]
    ids = tilemoe.top_k(logits, K, n_group=4, topk_group=2, **options)[1]

    def replayed(logits_or_scores, **others):
        scores = tilemoe.scores_at(logits_or_scores, ids, **options)
        return tilemoe.moe(logits_or_scores=scores, ids=ids, **others)

    got = results(replayed, tensors)
    want = results(tilemoe.moe, tensors, K=K, n_group=4, topk_group=2, **options)
    assert torch.equal(got["O"], want["O"])
    compare(got, want, tensors)


def test_scores_at_a_token_with_NaN():
    logits, ids = normal(T, E, seed=14), some_ids()
    logits[1, 20] = torch.nan  # not among its ids
    logits[2, 2] = torch.nan
    for scoring in SOFTMAX + SIGMOID:
        scores = tilemoe.scores_at(logits, ids, scoring=scoring)
        clean = tilemoe.scores_at(logits.nan_to_num(), ids, scoring=scoring)
        assert scores[1].isnan().all() and scores[2, [0, 1, 3]].isnan().all() and scores[2, 2] == 0
        assert torch.equal(scores[3:], clean[3:])


# ---------------------------------------------------------------- the older name


def test_the_older_name_is_the_same_function():
    logits = normal(T, E, seed=15)
    for got, want in zip(tilemoe.topk_router(logits, K), tilemoe.top_k(logits, K)):
        assert torch.equal(got, want)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("device", ["here", "meta"])
@pytest.mark.parametrize(
    "sentence, options",
    [
        ("n_group must be in .*, got 5", dict(n_group=5)),
        ("n_group must be in .*, got 0", dict(n_group=0)),
        ("n_group must be in .*, got -1", dict(n_group=-1)),
        ("n_group must be in .*, got 48", dict(n_group=48)),
        ("topk_group must be in .*, got 5", dict(n_group=4, topk_group=5)),
        ("topk_group must be in .*, got 0", dict(n_group=4, topk_group=0)),
        ("topk_group is 1", dict(n_group=12, topk_group=1)),
        ("topk_group must be in .*, got 2", dict(topk_group=2)),
        ("group_score", dict(n_group=4, topk_group=2, group_score="top2_sum")),
        (
            "group_score",
            dict(n_group=24, topk_group=9, scoring="sigmoid", group_score="top2_sum"),
        ),
        ("group_score must be one of .*, got 'mean'", dict(group_score="mean")),
        ("routed_scaling_factor must be .*, got 0", dict(routed_scaling_factor=0.0)),
        ("routed_scaling_factor must be .*, got nan", dict(routed_scaling_factor=float("nan"))),
        ("routed_scaling_factor must be .*, got inf", dict(routed_scaling_factor=float("inf"))),
        ("routed_scaling_factor must be .*, got -1", dict(routed_scaling_factor=-1.0)),
    ],
    ids=short,
)
def test_wrong_groups_and_factors_are_refused(sentence, options, device):
    tensors = {name: tensor.detach() for name, tensor in layer().items()}
    if device == "meta":
        tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
    logits = tensors["logits_or_scores"]
    for call in (
        lambda: tilemoe.top_k(logits, K, **options),
        lambda: tilemoe.moe(**tensors, K=K, **options),
    ):
        refused(ValueError, sentence, call)
    if "n_group" not in options and "routed_scaling_factor" in options:
        with pytest.raises(ValueError, match=sentence):
            ids = torch.zeros(T, K, dtype=torch.int32, device=logits.device)
            tilemoe.scores_at(logits, ids, **options)


def test_groups_and_factors_go_with_a_choice_from_logits():
    tensors = layer()
    ids = torch.zeros(T, K, dtype=torch.int64)
    scores = tensors | {"logits_or_scores": torch.ones(T, K)}
    for options in (dict(n_group=4, topk_group=2), dict(routed_scaling_factor=2.0)):
        (name, *_) = options
        refused(ValueError, f"^{name} must have its default if ids", tilemoe.moe, **scores, ids=ids, **options)
        with pytest.raises(ValueError, match=f"{name}.*rounding"):
            tilemoe.moe(**tensors, K=K, rounding="up", m=4, **options)


def test_ids_of_other_shapes_are_refused():
    logits = normal(T, E, seed=16)
    for ids in (torch.zeros(T - 1, K), torch.zeros(K), torch.zeros(2, T, K)):
        refused(ValueError, "ids has shape", tilemoe.scores_at, logits, ids.int())
    refused(ValueError, "ids is float32", tilemoe.scores_at, logits, torch.zeros(T, K))
    refused(ValueError, "ids has shape", tilemoe.scores_at, logits, torch.zeros(T, 0).int())
    with pytest.raises(ValueError, match="ids is on meta"):
        tilemoe.scores_at(logits, torch.zeros(T, K, device="meta").int())
    refused(TypeError, "ids is a builtins.list", tilemoe.scores_at, logits, [[0] * K] * T)
