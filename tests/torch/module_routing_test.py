"""MoE's choice among groups of experts, the factor on its scores, and experts that were chosen
elsewhere."""

import copy

import pytest
import torch

from checks import refused, short
import tilemoe
from module_support import E, K, SHAPE, batch, check, d, expected, make, n, run, same_bits
from target import DEVICE, DTYPE, DTYPES
from tilemoe.module import MoE

OPTIONS = {
    "deepseek_v3": dict(
        scoring="sigmoid_renormalized", selection_bias=True, n_group=3, topk_group=2,
        routed_scaling_factor=2.5, router_dtype=torch.float32, shared_intermediate_size=16,
        balance_coefficient=0.1,
    ),
    "deepseek_v2": dict(
        scoring="softmax_over_all", n_group=2, topk_group=1, routed_scaling_factor=16.0,
        z_coefficient=0.1,
    ),
    "the best of a group": dict(scoring="sigmoid", n_group=3, group_score="max"),
    "a factor alone": dict(routed_scaling_factor=0.5, bias=True),
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_option
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_gradients(options, dtype):
    moe = make(dtype=dtype, **options)
    x, dO = batch(dtype=dtype)
    want = expected(moe, x, dO)
    check(run(moe, x, dO), want)
    plain = dict(n_group=1, topk_group=1, routed_scaling_factor=1.0, group_score=None)
    for name, value in plain.items():
        if getattr(moe, name) != value:  # it counts
            other = copy.deepcopy(moe)
            setattr(other, name, value)
            if name == "n_group":
                other.topk_group = 1
            with pytest.raises(AssertionError):
                check(run(other, x, dO), want)


# ---------------------------------------------------------------- chosen elsewhere


def chosen_by(moe, x):
    """The choice of the layer itself: ids (..., K)."""
    with torch.no_grad():
        _, ids = tilemoe.top_k(
            moe.gate(x), K, scoring=moe.scoring, selection_bias=moe.gate.e_score_correction_bias,
            n_group=moe.n_group, topk_group=moe.topk_group, group_score=moe.group_score,
        )  # fmt: skip
    return ids


def any_ids(dtype):
    """K different experts for each token, a fifth of them none, all of the first token's."""
    g = torch.Generator().manual_seed(4)
    ids = torch.rand(*SHAPE, E, generator=g, device="cpu").argsort(-1)[..., :K]
    absent = torch.rand(*SHAPE, K, generator=g, device="cpu") < 0.2
    absent[0, 0] = True
    return ids.masked_fill(absent, -1).to(DEVICE, dtype)


PLAIN = {
    scoring: dict(scoring=scoring, balance_coefficient=0.1)
    for scoring in (
        "softmax_over_chosen", "softmax_over_all", "softmax_renormalized", "sigmoid",
        "sigmoid_renormalized",
    )
}  # fmt: skip


@pytest.mark.parametrize("options", (PLAIN | OPTIONS).values(), ids=PLAIN | OPTIONS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_experts_chosen_elsewhere(options, ids_dtype):
    moe = make(**options)
    x, dO = batch()
    ids = any_ids(ids_dtype)
    got, want = run(moe, x, dO, ids=ids), expected(moe, x, dO, ids=ids)
    assert got["dgate.weight"].abs().sum() > 0
    assert got["expert_counts"].sum() == (ids >= 0).sum() and got["without"] >= 1
    check(got, want)
    with pytest.raises(AssertionError):  # other ids are other experts
        check(run(moe, x, dO, ids=(ids + 1) % E), want)


@every_option
def test_a_replay_of_the_layers_own_choice_changes_no_bit_of_the_output(options):
    moe = make(**options)
    x, dO = batch()
    own, replayed = run(moe, x, dO), run(moe, x, dO, ids=chosen_by(moe, x))
    for name in ("out", "loss", "expert_counts", "without"):
        assert torch.equal(own[name], replayed[name]), name
    check(replayed, expected(moe, x, dO))


def test_ids_in_evaluation_and_without_aux():
    moe = make(rounding="stochastic", m=8)
    x, dO = batch()
    ids = any_ids(torch.int32)
    with pytest.raises(ValueError, match="ids must be None in training with rounding='stochastic', which"):
        moe(x, seed=1, offset=0, ids=ids)
    plain = make()
    same_bits(run(moe.eval(), x, dO, ids=ids), run(plain, x, dO, ids=ids))
    alone = MoE(d, n, E, K, return_aux=False, dtype=DTYPE)
    alone.load_state_dict(plain.state_dict())
    assert torch.equal(alone(x, ids=ids), plain(x, ids=ids)[0])


def test_ids_compile_and_are_recomputed():
    torch._dynamo.reset()
    moe = make(**OPTIONS["deepseek_v3"])
    x, dO = batch()
    ids = any_ids(torch.int64)
    want = run(moe, x, dO, ids=ids)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    out, aux = compiled(x, ids=ids)
    objective = (out * dO).sum(dtype=torch.float32) + aux.loss
    gradients = torch.autograd.grad(objective, [moe.gate.weight, x])
    assert torch.equal(out, want["out"])
    assert torch.equal(gradients[0], want["dgate.weight"]) and torch.equal(gradients[1], want["dx"])
    torch._dynamo.reset()


def test_wrong_ids_are_refused():
    moe = make()
    x, _ = batch()
    ids = any_ids(torch.int32)
    for wrong, message in (
        (ids[..., :1], r"ids has shape \(3, 13, 1\), expected \(3, 13, 2\)"),
        (ids.reshape(-1, K), r"ids has shape \(39, 2\), expected \(3, 13, 2\)"),
        (ids.float(), "ids must be int32 or int64, got torch.float32"),
        (ids.to("meta"), "one device: ids is on meta, x is on"),
    ):
        refused(ValueError, message, moe, x, ids=wrong)
    refused(TypeError, "ids is a builtins.list, expected a torch.Tensor", moe, x, ids=ids.tolist())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_group=0), r"n_group must be in \[1, 32\] and divide E = 6, got 0"),
        (dict(E=66, n_group=33), r"n_group must be in \[1, 32\] and divide E = 66, got 33"),
        (dict(n_group=4, topk_group=4), r"n_group must be in \[1, 32\] and divide E = 6, got 4"),
        (dict(n_group=3, topk_group=4), r"topk_group must be in \[1, 3\] for n_group = 3, got 4"),
        (dict(n_group=3, topk_group=0), r"topk_group must be in \[1, 3\] for n_group = 3, got 0"),
        (dict(topk_group=2), r"topk_group must be in \[1, 1\] for n_group = 1, got 2"),
        (dict(n_group=3, K=3), "topk_group is 1, but 1 groups of 2 experts have fewer"),
        (dict(n_group=2, group_score="sum"), "group_score must be one of top2_sum, max, got 'sum'"),
        (dict(n_group=2, group_score="top2_sum"), "group_score='top2_sum' requires a sigmoid scoring"),
        (dict(n_group=6, topk_group=2, scoring="sigmoid"), "requires groups of at least two experts, got n_group = 6"),
        (dict(routed_scaling_factor=0.0), "routed_scaling_factor must be a finite number > 0, got 0.0"),
        (dict(routed_scaling_factor=float("inf")), "routed_scaling_factor must be a finite number > 0, got inf"),
        (dict(routed_scaling_factor=2.0, rounding="up"), "routed_scaling_factor must have its default with rounding='up'"),
        (dict(n_group=2, rounding="up"), "n_group must have its default with rounding='up', got 2"),
    ],
    ids=short,
)
def test_options_that_do_not_fit_are_refused(options, message):
    arguments = dict(d=d, n=n, E=E, K=K, return_aux=True, dtype=DTYPE) | options
    refused(ValueError, message, MoE, **arguments)
    refused(TypeError, "n_group must be an int, got 2.0", MoE, d, n, E, K, n_group=2.0, dtype=DTYPE)


def test_repr():
    text = repr(make(**OPTIONS["deepseek_v3"]))
    assert "n_group=3, topk_group=2, routed_scaling_factor=2.5, balance_coefficient=0.1" in text
    text = repr(make(**OPTIONS["the best of a group"]))
    assert "n_group=3, group_score='max'" in text
