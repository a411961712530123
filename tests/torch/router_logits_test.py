"""Logits with one order of the sum: a token's logits, its choice of experts and the gradient of x
do not depend on the other tokens, how many there are, or where it stands among them. On both
devices."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import target
import tilemoe
from checks import Calls, compiled, refused
from random_layers import normal
from target import DEVICE, DTYPE, DTYPES

ON_GPU = target.DEVICE == "cuda"
# On a GPU d has two chunks of the sum.
T, d, E, K = 100_000, 2184 if ON_GPU else 136, 40, 6
BATCHES = (1, 7, 64, 1000, 32768)
# Of x, of the weight, of the logits.
KINDS = [(dtype, dtype, None) for dtype in DTYPES]
KINDS += [(dtype, dtype, torch.float32) for dtype in DTYPES if dtype != torch.float32]
KINDS += [(torch.bfloat16, torch.float32, torch.float32)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def gate_of(kind, tokens, d=d, E=E):
    x_dtype, weight_dtype, _ = kind
    x = normal(tokens, d, seed=1, dtype=x_dtype)
    weight = normal(E, d, seed=2, dtype=weight_dtype, scale=d**-0.5)
    return x, weight, normal(E, seed=3, dtype=weight_dtype)


def batches(tokens):
    for size in BATCHES:
        if size > tokens:
            continue
        for first in (0, 5, (tokens - size) // 2, tokens - size):
            yield slice(first, first + size)


@every_kind
def test_logits_and_ids_are_the_same_in_every_batch(kind):
    x, weight, bias = gate_of(kind, T)
    logits = tilemoe.router_logits(x, weight, bias, dtype=kind[2])
    ids = tilemoe.top_k(logits, K)[1]
    for some in batches(T):
        of_some = tilemoe.router_logits(x[some], weight, bias, dtype=kind[2])
        assert torch.equal(of_some, logits[some]), some
        assert torch.equal(tilemoe.top_k(of_some, K)[1], ids[some]), some
    alone = [tilemoe.router_logits(x[t : t + 1], weight, bias, dtype=kind[2]) for t in range(64)]
    assert torch.equal(torch.cat(alone), logits[:64])
    order = torch.randperm(T, generator=torch.Generator().manual_seed(4), device="cpu").to(DEVICE)
    assert torch.equal(
        tilemoe.router_logits(x[order], weight, bias, dtype=kind[2]), logits[order]
    )


@every_kind
@pytest.mark.parametrize("sizes", [(50, 16, 3), (333, 1160, 13), (64, 256, 64), (70, 4168, 40)], ids=str)
def test_values_and_gradients_are_those_of_a_linear_layer(kind, sizes):
    tokens, d, E = sizes
    leaves = [tensor.requires_grad_() for tensor in gate_of(kind, tokens, d, E)]
    logits = tilemoe.router_logits(*leaves, dtype=kind[2])
    assert logits.dtype == (kind[2] or kind[0])
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = torch.nn.functional.linear(*exact)
    dlogits = normal(tokens, E, seed=5, dtype=logits.dtype)
    got = torch.autograd.grad(logits, leaves, dlogits)
    expected = torch.autograd.grad(wanted, exact, dlogits.double())
    for made, value in zip((logits, *got), (wanted, *expected)):
        unit = torch.finfo(made.dtype).eps
        if made is not logits:
            unit = max(unit, 2.0**-15)  # float32 gradients of logits have two terms
        scale = value.abs().amax().item()
        assert (made.double() - value).abs().amax().item() <= 2 * scale * (unit + 2.0**-18)
    for made, leaf in zip(got, leaves):
        assert made.dtype == leaf.dtype


@every_kind
def test_the_gradient_of_x_is_the_same_in_every_batch(kind):
    tokens = 3000
    x, weight, bias = gate_of(kind, tokens)
    weight.requires_grad_()
    dlogits = normal(tokens, E, seed=5, dtype=kind[2] or kind[0])

    def gradients(some):
        rows = x[some].detach().requires_grad_()
        logits = tilemoe.router_logits(rows, weight, bias, dtype=kind[2])
        return torch.autograd.grad(logits, (rows, weight), dlogits[some])

    dx, dweight = gradients(slice(None))
    for some in batches(tokens):
        assert torch.equal(gradients(some)[0], dx[some]), some
    for _ in range(3):
        assert torch.equal(gradients(slice(None))[1], dweight)


def make(dtype=DTYPE, **options):
    torch.manual_seed(0)
    options.setdefault("router", "fixed")
    return tilemoe.MoE(d, 24, E, K, dtype=dtype, **options)


LAYERS = {
    "plain": {},
    "sigmoid": dict(scoring="sigmoid", selection_bias=True),
    "float32": dict(router_dtype=torch.float32, router_bias=True),
    "float32, float16": dict(dtype=torch.float16) if not ON_GPU else {},
    "adapters": dict(lora_rank=4),
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_is_the_same_in_training_and_in_decode(options):
    """With DTYPE float32 the float32 router is that of the CPU alone."""
    dtype = options.get("dtype", torch.bfloat16)
    layer = make(**{"dtype": dtype, **options})
    x = normal(500, d, seed=6, dtype=dtype)
    trained = layer.train()(x.clone().requires_grad_()).detach()
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), trained)
        for size in (1, 2, 7, 33, 64, 65, 200):
            for first in (0, 13, 500 - size):
                some = slice(first, first + size)
                assert torch.equal(layer(x[some]), trained[some]), some


def test_decode_does_not_use_its_own_router():
    x = normal(3, d, seed=6, dtype=torch.bfloat16)
    for router, name in (("fixed", "router_logits"), ("linear", "moe_tokens")):
        layer = make(torch.bfloat16, router=router).eval()
        with torch.no_grad(), Calls() as calls:
            layer(x)
            layer(x)
        assert calls.of(name), [seen for seen, _ in calls.seen]
        assert bool(calls.of("moe_tokens")) == (router == "linear")


def test_a_layer_and_its_state_dict():
    layer = make(router_bias=True)
    assert "kind='fixed'" in repr(layer)
    linear = make(router="linear", router_bias=True)
    linear.load_state_dict(layer.state_dict())
    x = normal(30, d, seed=6, dtype=DTYPE)
    got, want = layer(x), linear(x)
    assert (got.float() - want.float()).abs().amax() <= 0.05 * want.float().abs().amax()
    same = copy.deepcopy(layer)
    assert torch.equal(same(x), got)


def test_under_checkpointing_and_compilation():
    layer = make()
    x = normal(30, d, seed=6, dtype=DTYPE).requires_grad_()
    want = layer(x)
    wanted = torch.autograd.grad(want.float().square().sum(), (x, *layer.parameters()))
    for call in (
        lambda: checkpoint(layer, x, use_reentrant=False),
        lambda: compiled(layer)(x),
    ):
        out = call()
        assert torch.equal(out, want)
        got = torch.autograd.grad(out.float().square().sum(), (x, *layer.parameters()))
        for one, other in zip(got, wanted):
            assert torch.equal(one, other)


def test_under_autocast():
    x, weight, bias = (
        tensor.float() for tensor in gate_of((torch.bfloat16, torch.bfloat16, None), 20)
    )
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = tilemoe.router_logits(x, weight, bias)
    cast = (tensor.bfloat16() for tensor in (x, weight, bias))
    assert torch.equal(logits, tilemoe.router_logits(*cast))
    layer = make(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_layer_in_another_dtype_than_x_is_refused():
    x = normal(3, d, seed=6, dtype=torch.bfloat16)
    refused(ValueError, "x is torch.bfloat16 and gate.weight is torch.float16", make(torch.float16), x)


def test_other_shapes():
    x, weight, _ = gate_of((DTYPE, DTYPE, None), 30)
    logits = tilemoe.router_logits(x, weight)
    assert torch.equal(tilemoe.router_logits(x.view(2, 3, 5, d), weight).view(30, E), logits)
    assert torch.equal(tilemoe.router_logits(x[3], weight), logits[3])
    assert tilemoe.router_logits(x[:0], weight).shape == (0, E)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(tilemoe.router_logits(wide[:, :d], weight), logits)
    assert torch.equal(tilemoe.router_logits(x, weight.mT.contiguous().mT), logits)


def test_refusals():
    x, weight, bias = gate_of((DTYPE, DTYPE, None), 30)
    of = tilemoe.router_logits
    refused(ValueError, r"weight has shape|weight", of, x, weight[:, :-8])
    refused(ValueError, r"bias", of, x, weight, bias[:-1])
    refused(ValueError, r"logits is int32|dtype", of, x, weight, dtype=torch.int32)
    refused(ValueError, r"d is 12", of, x[:, :12], weight[:, :12])
    refused(TypeError, r"weight is a", of, x, [1])
    refused(TypeError, r"x is a", of, None, weight)
    refused(ValueError, r"router must be 'linear' or 'fixed', got 'exact'", make, router="exact")
    if ON_GPU:
        refused(NotImplementedError, "X is float32", of, x.float(), weight.float())
        refused(NotImplementedError, "X is float16, expected bfloat16", of, x.half(), weight.float())
    else:
        refused(ValueError, r"weight", of, x.bfloat16(), weight.half())


def test_another_order_has_other_bits():
    """The comparison can fail: the same terms in another order."""
    x, weight, _ = gate_of((torch.bfloat16, torch.bfloat16, None), 2000, d=1160)
    flipped = [tensor.flip(1).contiguous() for tensor in (x, weight)]
    one, other = (
        tilemoe.router_logits(*tensors, dtype=torch.float32) for tensors in ((x, weight), flipped)
    )
    assert not torch.equal(one, other)
