"""Padding: a token that token_mask leaves out changes nothing but its own output."""

import pytest
import torch

import module_support
import tilemoe
from module_support import E, K, SHAPE, batch, expected, make, run
from target import DEVICE, DTYPE, DTYPES

LOSSES = dict(balance_coefficient=0.3, z_coefficient=0.02)
OPTIONS = {
    "plain": {},
    "sigmoid": dict(scoring="sigmoid_renormalized", selection_bias=True, bias=True),
    "groups": dict(scoring="softmax_over_all", n_group=3, topk_group=2, routed_scaling_factor=2.0),
    "float32 router": dict(router_dtype=torch.float32, router_bias=True),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def some(seed=3):
    """(3, 13): padding at the end of two sequences, one of which is padding alone."""
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[0, 9:], mask[2] = False, False
    return mask


def of_real_tokens(results, mask):
    """The results of the real tokens, after a check of the padding's."""
    for name in ("out", "dx"):
        assert (results[name][~mask] == 0).all(), name
    return results | {name: results[name][mask] for name in ("out", "dx")}


@every_option
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_layer_of_the_real_tokens(options, dtype):
    """Output, losses, counts and gradients are those of float64 for a batch without padding."""
    moe, mask = make(dtype=dtype, **options, **LOSSES), some()
    x, dO = batch(dtype=dtype)
    got = of_real_tokens(run(moe, x, dO, token_mask=mask), mask)
    x_real, dO_real = x.detach()[mask].requires_grad_(), dO[mask]
    module_support.check(got, expected(moe, x_real, dO_real))
    assert got["expert_counts"].sum() == mask.sum() * K and got["without"] == 0
    without_mask = run(moe, x, dO)
    for name in ("balance", "z"):  # the padding would count
        assert not torch.allclose(got[name], without_mask[name], rtol=1e-3, atol=0)


@every_option
def test_a_mask_that_leaves_nothing_out_changes_no_result(options):
    moe = make(**options, **LOSSES)
    x, dO = batch()
    got = run(moe, x, dO, token_mask=torch.ones(SHAPE, dtype=torch.bool))
    module_support.check(got, expected(moe, x, dO))


def test_padding_alone():
    moe = make(**LOSSES)
    x, dO = batch()
    got = run(moe, x, dO, token_mask=torch.zeros(SHAPE, dtype=torch.bool))
    assert (got.pop("ids") == -1).all()
    for name, tensor in got.items():
        assert (tensor == 0).all(), name


def test_shared_experts_compute_every_token():
    moe, mask = make(shared_intermediate_size=16), some()
    x, _ = batch()
    out, _ = moe(x, token_mask=mask)
    shared = moe.shared_experts(x.reshape(-1, moe.d)).reshape(x.shape)
    assert torch.equal(out[~mask], shared[~mask]) and not torch.equal(out[mask], shared[mask])


def test_given_ids():
    """Those of padding are not looked at."""
    moe, mask = make(**LOSSES), some()
    x, dO = batch()
    ids = torch.randint(E, (*SHAPE, K))
    got = run(moe, x, dO, ids=ids, token_mask=mask)
    other = ids.masked_fill(~mask.unsqueeze(-1), E - 1)
    module_support.same_bits(run(moe, x, dO, ids=other, token_mask=mask), got)
    got = of_real_tokens(got, mask)
    x_real = x.detach()[mask].requires_grad_()
    module_support.check(got, expected(moe, x_real, dO[mask], ids=ids[mask]))


def test_small_T_in_evaluation():
    """They take the linear layer, with and without gradients."""
    moe, mask = make(**LOSSES).eval(), some()
    x, _ = batch()
    want, want_aux = moe(x, token_mask=mask)
    with torch.no_grad():
        out, aux = moe(x.detach(), token_mask=mask)
    assert torch.equal(out, want) and (out[~mask] == 0).all() and (out[mask] != 0).any()
    module_support.same_bits(aux._asdict(), want_aux._asdict())


def test_the_losses_function():
    logits, mask = torch.randn(*SHAPE, E), some()
    counts = torch.arange(E, dtype=torch.int32)
    leaf, real = logits.clone().requires_grad_(), logits[mask].clone().requires_grad_()
    masked = tilemoe.router_losses(leaf, counts, mask)
    compact = tilemoe.router_losses(real, counts)
    for of, want in zip(masked, compact):
        torch.testing.assert_close(of, want, rtol=1e-6, atol=0)
        (gradient,) = torch.autograd.grad(of, leaf, retain_graph=True)
        (expected_gradient,) = torch.autograd.grad(want, real, retain_graph=True)
        torch.testing.assert_close(gradient[mask], expected_gradient, rtol=1e-5, atol=1e-8)
        assert (gradient[~mask] == 0).all()


def test_what_does_not_fit_is_refused():
    moe = make()
    x, _ = batch()
    for wrong in (some().int(), some()[0], some().unsqueeze(-1)):
        with pytest.raises(ValueError, match=r"token_mask is .*, expected torch.bool \(3, 13\)"):
            moe(x, token_mask=wrong)
    with pytest.raises(TypeError, match="token_mask is a builtins.list, expected a torch.Tensor"):
        moe(x, token_mask=[True])
    with pytest.raises(ValueError, match=f"one device: token_mask is on meta, x is on {DEVICE}"):
        moe(x, token_mask=some().to("meta"))
    rounded = make(rounding="up", m=8)
    with pytest.raises(ValueError, match="token_mask must be None in training with rounding='up', which rounds all tokens"):
        rounded(x, token_mask=some())
    assert rounded.eval()(x, token_mask=some())[0].dtype == DTYPE


def test_under_compile():
    moe, mask = make(**LOSSES), some()
    x, _ = batch()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    out, aux = compiled(x, token_mask=mask)
    want, want_aux = moe(x, token_mask=mask)
    assert torch.equal(out, want) and torch.equal(aux.loss, want_aux.loss)
