"""gathered_mm and combine_mm: activations of the user between the two GEMMs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilemoe
from checks import Calls, compiled, refused, same_bits
from random_layers import E, K, T, d, n, normal, weights
from target import DEVICE, DTYPE, DTYPES

NAMES = ("x", "logits", "W1", "W2", "b1", "b2")
TRANSPOSED = [False, True]


def mish(h):
    return F.mish(h)


def gated_mish(h):
    gate, up = h.chunk(2, -1)
    return F.mish(gate) * torch.tanh(up)


def layer_of(dtype, gated=False, transposed=False):
    """Leaves: {name: tensor}."""
    kinds = {"activation": "swiglu" if gated else "silu", "bias": True, "transposed": transposed}
    return {
        "x": normal(T, d, seed=20, dtype=dtype).requires_grad_(),
        "logits": normal(T, E, seed=21, dtype=torch.float32).requires_grad_(),
        **weights(dtype, **kinds),
    }


def routed(layer, act, routing=None, addend=None):
    routing = tilemoe.route(layer["logits"], K) if routing is None else routing
    h = tilemoe.gathered_mm(layer["x"], layer["W1"], routing, bias=layer.get("b1"))
    return tilemoe.combine_mm(act(h), layer["W2"], routing, bias=layer.get("b2"), addend=addend)


def gradients_of(out, layer, dO=None):
    dO = normal(*out.shape, seed=30, dtype=out.dtype) if dO is None else dO
    wanted = {name: tensor for name, tensor in layer.items() if tensor.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dO)))


def plain(layer, act, ids, scores):
    """The same in PyTorch: one expert after the other, in the dtype of the layer."""
    x, W1, W2 = layer["x"], layer["W1"], layer["W2"]
    out = torch.zeros(x.shape, dtype=scores.dtype, device=x.device)
    for e in range(W1.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        h = F.linear(x[t], W1[e], layer["b1"][e])
        y = F.linear(act(h), W2[e], layer["b2"][e])
        out = out.index_add(0, t, y.to(out.dtype) * scores[t, k, None])
    return out.to(x.dtype)


def plain_of(layer, act, dtype):
    """-> {name: tensor} of `plain` and its gradients in this dtype."""
    ids = tilemoe.top_k(layer["logits"].detach(), K)[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    copies = {name: t.detach().to(dtype).requires_grad_() for name, t in layer.items()}
    copies["logits"] = layer["logits"].detach().to(wide).requires_grad_()
    scores = copies["logits"].gather(1, ids.long()).softmax(-1)
    out = plain(copies, act, ids, scores)
    dO = normal(*out.shape, seed=30, dtype=layer["x"].dtype).to(dtype)
    return {"out": out, **gradients_of(out, copies, dO)}


def error(got, want):
    assert torch.isfinite(got).all()
    want = want.detach().double()
    return ((got.detach().double() - want).norm() / want.norm()).item()


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("act", [mish, gated_mish])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_within_twice_that_of_torch(dtype, act, transposed):
    layer = layer_of(dtype, act is gated_mish, transposed)
    out = routed(layer, act)
    got = {"out": out, **gradients_of(out, layer)}
    exact, usual = plain_of(layer, act, torch.float64), plain_of(layer, act, dtype)
    for name in exact:
        limit = 2 * error(usual[name], exact[name]) + 1e-7
        assert error(got[name], exact[name]) <= limit, name


def whole_numbers(*shape, seed, low=-1, high=1, dtype=DTYPE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(DEVICE, dtype)


def clipped_gate(h):
    gate, up = h.chunk(2, -1)
    return gate.clamp(-2, 2) * up.clamp(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_are_exact(dtype):
    """No number exceeds 256, so nothing is rounded in any dtype."""
    width, inner = 16, 8
    layer = {
        "x": whole_numbers(T, width, seed=1),
        "W1": whole_numbers(E, 2 * inner, width, seed=2) * whole_numbers(E, 1, width, seed=3),
        "W2": whole_numbers(E, width, inner, seed=4),
        "b1": whole_numbers(E, 2 * inner, seed=5),
        "b2": whole_numbers(E, width, seed=6),
    }
    layer = {name: tensor.to(dtype).requires_grad_() for name, tensor in layer.items()}
    scores = whole_numbers(T, K, seed=7, low=-2, high=2, dtype=torch.float32).requires_grad_()
    ids = torch.stack([torch.randperm(E, device=DEVICE)[:K] for _ in range(T)])
    ids[:, 0] = torch.where(ids[:, 0] == 2, -1, ids[:, 0])  # a bad id
    ids[ids == 3] = E  # an expert without a token
    dO = whole_numbers(T, width, seed=8, dtype=dtype)
    out = routed(layer, clipped_gate, tilemoe.route_ids(ids, scores, E))
    got = {"out": out, **gradients_of(out, {"scores": scores, **layer}, dO)}
    exact = {name: t.detach().double().requires_grad_() for name, t in layer.items()}
    wide = scores.detach().double().requires_grad_()
    want = plain(exact, clipped_gate, ids, wide)
    want = {"out": want, **gradients_of(want, {"scores": wide, **exact}, dO.double())}
    for name, tensor in want.items():
        assert 0 < tensor.abs().max() <= 256, name
        assert torch.equal(got[name].double(), tensor), name


ACTIVATIONS = {"identity": lambda h: h, "relu": torch.relu}


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_layer(dtype, activation, transposed):
    """The layer computes A from the unrounded H: both agree if rounding and activation commute."""
    layer = layer_of(dtype, transposed=transposed)
    out = routed(layer, ACTIVATIONS[activation])
    x, logits, W1, W2, b1, b2 = (layer[name] for name in NAMES)
    want = tilemoe.moe(x, logits, W1, W2, K=K, b1=b1, b2=b2, activation=activation)
    assert torch.equal(out, want)
    same_bits(gradients_of(out, layer), gradients_of(want, layer))


@pytest.mark.cpu
def test_bits_are_those_of_the_layer_with_a_gate_in_float32():
    def reglu(h):
        gate, up = h.chunk(2, -1)
        return torch.relu(gate) * up

    layer = layer_of(torch.float32, gated=True)
    out = routed(layer, reglu)
    x, logits, W1, W2, b1, b2 = (layer[name] for name in NAMES)
    want = tilemoe.moe(x, logits, W1, W2, K=K, b1=b1, b2=b2, activation="reglu")
    assert torch.equal(out, want)
    same_bits(gradients_of(out, layer), gradients_of(want, layer))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_any_batch(dtype):
    def act(h):  # torch's own functions may have other bits at another place
        return h * torch.relu(h)

    layer = layer_of(dtype)
    whole = routed(layer, act)
    for part in (slice(0, 1), slice(5, 19)):
        some = {**layer, "x": layer["x"][part], "logits": layer["logits"][part]}
        assert torch.equal(routed(some, act), whole[part])


# ---------------------------------------------------------------- routings


def test_other_routings_are_those_of_the_layer():
    layer = layer_of(DTYPE)
    x, logits, W1, W2 = (layer[name].detach() for name in NAMES[:4])
    scores, ids = tilemoe.top_k(logits, K)
    how = {"activation": "relu"}

    def both(routing, rows=x):
        return tilemoe.combine_mm(
            torch.relu(tilemoe.gathered_mm(rows, W1, routing)), W2, routing
        )

    few = tilemoe.route_ids(ids, scores, E, capacity=T)
    assert torch.equal(
        both(few), tilemoe.moe(x, scores, W1, W2, ids=ids, capacity=T, on_overflow="drop", **how)
    )
    assert few.skipped == T * K - T
    pairs = tilemoe.rounded_router(logits, K, rounding="nearest", m=4)
    assert torch.equal(
        both(tilemoe.route_pairs(*pairs, T, E)),
        tilemoe.moe_general(x, *pairs, W1, W2, **how),
    )
    counts, row_scores = torch.tensor([3, 0, 9, 1, 0, 8, 2]), torch.rand(T)
    assert torch.equal(
        both(tilemoe.route_rows(counts, T, row_scores)),
        tilemoe.grouped_experts(x, counts, W1, W2, row_scores=row_scores, **how),
    )
    assert torch.equal(
        both(tilemoe.route_rows(counts, T)), tilemoe.grouped_experts(x, counts, W1, W2, **how)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_given_scores_get_their_gradient_in_their_dtype(dtype):
    layer = layer_of(DTYPE)
    scores, ids = tilemoe.top_k(layer["logits"].detach(), K)
    scores = scores.to(dtype).requires_grad_()
    out = routed(layer, torch.relu, tilemoe.route_ids(ids, scores, E))
    x, _, W1, W2, b1, b2 = (layer[name] for name in NAMES)
    want = tilemoe.moe(x, scores, W1, W2, ids=ids, b1=b1, b2=b2, activation="relu")
    (got,), (usual,) = (torch.autograd.grad(o.sum(), [scores]) for o in (out, want))
    assert got.dtype == dtype
    assert torch.equal(got, usual)


def test_a_routing_shows_its_rows():
    ids = torch.tensor([[2, 0], [2, -1], [0, 2]])
    routing = tilemoe.route_ids(ids, torch.ones(3, 2), 4)
    assert routing.offsets.tolist() == [0, 2, 2, 5, 5]
    assert routing.row_experts.tolist() == [0, 0, 2, 2, 2, 4]
    assert (routing.capacity, routing.skipped) == (6, 1)


def test_rows_of_the_second_gemm():
    """A second GEMM's rows, of all pairs, and their sum: combine_mm with float32's rounding."""
    layer = layer_of(DTYPE)
    routing = tilemoe.route(layer["logits"], K)
    h = mish(tilemoe.gathered_mm(layer["x"], layer["W1"], routing))
    y = tilemoe.gathered_mm(h, layer["W2"], routing.of_rows(), bias=layer["b2"])
    assert y.shape == (T * K, d)
    got = tilemoe.gemms.weighted_sum(y, routing)
    want = tilemoe.combine_mm(h, layer["W2"], routing, bias=layer["b2"])
    torch.testing.assert_close(got, want, rtol=0, atol=torch.finfo(DTYPE).eps * want.abs().max().item())


# ---------------------------------------------------------------- rows without a token


class Spoil(torch.autograd.Function):
    """NaN in the rows from M on, of the values and of the gradient."""

    @staticmethod
    def forward(ctx, rows, M, from_combine=False):
        ctx.M, ctx.from_combine = M, from_combine
        rows = rows.clone()
        rows[M:] = torch.nan
        return rows

    @staticmethod
    def backward(ctx, gradient):
        if ctx.from_combine:
            assert (gradient[ctx.M :] == 0).all(), "combine_mm's gradient is not zero there"
        gradient = gradient.clone()
        gradient[ctx.M :] = torch.nan
        return gradient, None, None


def with_spare_rows(kind, scores):
    if kind == "pairs":
        tokens = torch.arange(T).repeat_interleave(2)
        experts = torch.arange(2 * T) % E
        experts[3::7] = E + 1  # skipped
        return tilemoe.route_pairs(tokens, experts, scores[: 2 * T], T, E)
    if kind == "ids":
        ids = torch.arange(T * K).reshape(T, K) % (E + 2) - 1
        return tilemoe.route_ids(ids, scores.reshape(T, K), E)
    return tilemoe.route_rows(torch.tensor([3, 0, 9, 1, 0, 8, 2]), T, scores[:T])


@pytest.mark.parametrize("kind", ["pairs", "ids", "rows"])
def test_rows_without_a_token_reach_nothing(kind):
    layer = layer_of(DTYPE)
    del layer["logits"]
    scores = torch.rand(T * K).requires_grad_()
    addend = normal(T, d, seed=9, dtype=DTYPE).requires_grad_()
    leaves = {"scores": scores, "addend": addend, **layer}
    routing = with_spare_rows(kind, scores)
    M = int(routing.offsets[-1])
    assert 0 < M < routing.capacity
    h = tilemoe.gathered_mm(layer["x"], layer["W1"], routing)
    assert (h[M:] == 0).all()
    assert (h[:M] != 0).any(1).all()
    clean = routed(layer, mish, routing, addend)
    act = lambda h: Spoil.apply(mish(Spoil.apply(h, M)), M, True)  # noqa: E731
    spoilt = routed(layer, act, routing, addend)
    assert torch.equal(clean, spoilt)
    assert torch.isfinite(clean).all()
    same_bits(gradients_of(spoilt, leaves), gradients_of(clean, leaves))


# ---------------------------------------------------------------- gradients


def test_frozen_tensors_have_no_gradient_computed():
    """Every set of tensors has the gradients, bit for bit, that all have together."""
    layer = layer_of(DTYPE)
    everything = gradients_of(routed(layer, mish), layer)
    for size in range(1, len(NAMES) + 1):
        for names in itertools.combinations(NAMES, size):
            some = {name: t.detach().requires_grad_(name in names) for name, t in layer.items()}
            with Calls() as calls:
                out = routed(some, mish)
                got = gradients_of(out, some)
            same_bits(got, {name: everything[name] for name in names})
            second = sum(args[-1] for args in calls.of("combine_mm_backward"))
            first = sum(args[-1] for args in calls.of("gathered_mm_backward"))
            bits = [("W2", 4), ("b2", 8), ("logits", 2)]
            assert second & 14 == sum(bit for name, bit in bits if name in names)
            bits = [("x", 1), ("W1", 2), ("b1", 4)]
            assert first == sum(bit for name, bit in bits if name in names)
            assert bool(second & 1) == bool(first)


def test_a_walk_computes_what_it_needs():
    layer = layer_of(DTYPE)
    out = routed(layer, mish)
    with Calls() as calls:
        torch.autograd.grad(out.sum(), [layer["x"]])
    assert [args[-1] for args in calls.of("combine_mm_backward")] == [1]
    assert [args[-1] for args in calls.of("gathered_mm_backward")] == [1]


def test_backward_may_run_again():
    layer = layer_of(DTYPE)
    out = routed(layer, mish)
    dO = torch.ones_like(out)
    first = torch.autograd.grad(out, list(layer.values()), dO, retain_graph=True)
    again = torch.autograd.grad(out, list(layer.values()), dO)
    assert all(map(torch.equal, first, again))


def test_parameters_between_the_gemms_are_trained():
    """A scale for each expert, by the expert of each row, and one for all."""
    layer = layer_of(DTYPE)
    per_expert = normal(E + 1, 1, seed=5, dtype=DTYPE).requires_grad_()
    slope = torch.tensor(0.7, dtype=DTYPE, device=DEVICE, requires_grad=True)
    routing = tilemoe.route(layer["logits"], K)
    experts = routing.row_experts
    out = routed(layer, lambda h: F.silu(slope * h) * per_expert[experts], routing)
    dO = out.detach()  # most terms of the slope's gradient, a sum over all rows, are then positive
    got = gradients_of(out, {"per_expert": per_expert, "slope": slope}, dO)
    wide = {name: t.detach().double() for name, t in layer.items()}
    scales = [t.detach().double().requires_grad_() for t in (per_expert, slope)]
    ids = tilemoe.top_k(layer["logits"].detach(), K)[1]
    scores = wide["logits"].gather(1, ids.long()).softmax(-1)
    out = torch.zeros(T, d, dtype=torch.float64, device=DEVICE)
    for e in range(E):
        one = {name: wide[name][e : e + 1] for name in ("W1", "W2", "b1", "b2")}
        act = lambda h, e=e: F.silu(scales[1] * h) * scales[0][e]  # noqa: E731
        out = out + plain({"x": wide["x"], **one}, act, torch.where(ids == e, 0, -1), scores)
    want = torch.autograd.grad(out, scales, dO.double())
    limit = 1e-4 if DTYPE == torch.float32 else 2e-2  # the slope's gradient is a long sum
    assert error(got["per_expert"], want[0]) <= limit
    assert error(got["slope"], want[1]) <= limit


def test_an_addend_has_the_gradient_of_the_output():
    layer = layer_of(DTYPE)
    x = layer["x"].detach().reshape(1, T, d)
    addend = normal(1, T, d, seed=9, dtype=DTYPE).requires_grad_()
    out = routed({**layer, "x": x}, mish, addend=addend)
    assert out.shape == addend.shape
    without = routed({**layer, "x": x}, mish)
    assert without.shape == (T, d)
    torch.testing.assert_close(out[0] - addend[0], without, rtol=2e-2, atol=2e-2)
    dO = normal(1, T, d, seed=1, dtype=DTYPE)
    assert torch.equal(torch.autograd.grad(out, addend, dO)[0], dO)


def test_no_token_and_empty_experts():
    layer = layer_of(DTYPE)
    none = {**layer, "x": layer["x"].detach()[:0].requires_grad_(),
            "logits": layer["logits"].detach()[:0].requires_grad_()}  # fmt: skip
    out = routed(none, mish)
    assert out.shape == (0, d)
    gradients = gradients_of(out, none)
    assert all((g == 0).all() for g in gradients.values())
    ids = torch.full((T, 1), 4)
    routing = tilemoe.route_ids(ids, torch.ones(T, 1), E)
    out = routed(layer, mish, routing)
    del layer["logits"]
    for name, gradient in gradients_of(out, layer).items():
        if name != "x":
            assert (gradient[[0, 1, 2, 3, 5, 6]] == 0).all()
            assert (gradient[4] != 0).any()


def test_gradients_of_gradients_are_refused():
    layer = layer_of(DTYPE)
    out = routed(layer, mish)
    (gradient,) = torch.autograd.grad(out.sum(), [layer["x"]], create_graph=True)
    refused(NotImplementedError, "double backward is not supported", gradient.sum().backward)


def test_tangents_and_transforms_are_refused():
    layer = {name: t.detach() for name, t in layer_of(DTYPE).items()}
    with forward_ad.dual_level():
        dual = {**layer, "x": forward_ad.make_dual(layer["x"], torch.ones_like(layer["x"]))}
        refused(NotImplementedError, "forward-mode", routed, dual, mish)
    loss = lambda x: routed({**layer, "x": x}, mish).sum()  # noqa: E731
    refused(NotImplementedError, "transforms", torch.func.grad(loss), layer["x"])


def test_checkpointing_recomputes_the_same_bits():
    layer = layer_of(DTYPE)
    dO = normal(T, d, seed=30, dtype=DTYPE)
    want = gradients_of(routed(layer, mish), layer, dO)
    names = list(layer)

    def run(*tensors):
        return routed(dict(zip(names, tensors)), mish)

    out = checkpoint(run, *layer.values(), use_reentrant=False)
    same_bits(gradients_of(out, layer, dO), want)


def test_autocast_casts_what_a_linear_layer_casts():
    layer = layer_of(torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    low = {name: t.detach() if name == "logits" else t.detach().bfloat16()
           for name, t in layer.items()}  # fmt: skip
    with torch.autocast(DEVICE, torch.bfloat16):
        out = routed(layer, mish)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, routed(low, mish))


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiles_in_one_graph(backend):
    layer = layer_of(DTYPE, gated=True)
    names = list(layer)

    def run(*tensors):
        return routed(dict(zip(names, tensors)), gated_mish)

    out = run(*layer.values())
    traced = compiled(run, backend)(*layer.values())
    limit = 2e-5 if DTYPE == torch.float32 else 2e-2
    assert error(traced, out) <= limit
    want = gradients_of(out, layer)
    for name, gradient in gradients_of(traced, layer).items():
        assert error(gradient, want[name]) <= limit, name


def test_a_compiled_graph_takes_any_number_of_tokens():
    layer = {name: t.detach() for name, t in layer_of(DTYPE).items()}
    graph = compiled(routed, dynamic=True)
    for tokens in (T, 11, 23):
        some = {**layer, "x": layer["x"][:tokens], "logits": layer["logits"][:tokens]}
        assert torch.equal(graph(some, torch.relu), routed(some, torch.relu))


def test_a_meta_layer_has_the_shapes():
    layer = {name: t.detach().to("meta") for name, t in layer_of(DTYPE).items()}
    assert routed(layer, mish).shape == (T, d)


# ---------------------------------------------------------------- refusals


def test_wrong_arguments_are_named():
    layer = {name: t.detach() for name, t in layer_of(DTYPE).items()}
    x, logits, W1, W2, b1, b2 = (layer[name] for name in NAMES)
    routing = tilemoe.route(logits, K)
    h = tilemoe.gathered_mm(x, W1, routing)
    first, second = tilemoe.gathered_mm, tilemoe.combine_mm
    refused(ValueError, "x has shape .*expected 37 rows", first, x[1:], W1, routing)
    refused(ValueError, "W has shape .*the first 7", first, x, W1[:3], routing)
    refused(ValueError, "W has shape .*three dimensions", first, x, W1[0], routing)
    refused(ValueError, "X has shape", first, x[:, :32].contiguous(), W1, routing)
    refused(ValueError, "b has shape", first, x, W1, routing, bias=b2)
    refused(ValueError, r"W\b.*(float|bf)", first, x, W1.double(), routing)
    refused(ValueError, "a has shape .*expected .111, n.", second, h[1:], W2, routing)
    refused(ValueError, "A has shape", second, h[:, :16].contiguous(), W2, routing)
    refused(ValueError, "b has shape", second, h, W2, routing, bias=b1)
    refused(ValueError, "addend has shape", second, h, W2, routing, addend=x[1:])
    refused(TypeError, "routing must be a tilemoe.Routing, got a .*Tensor", first, x, W1, logits)
    refused(TypeError, "W is a .*list", first, x, [W1], routing)
    refused(TypeError, "x is a .*list", first, [x], W1, routing)
    quantized = tilemoe.quantize_experts(torch.ones(E, 32, 64, dtype=DTYPE), "nf4")
    refused(NotImplementedError, "got W as a QuantizedExperts; pass W.dequantize", first, x, quantized, routing)
    refused(ValueError, r"K must be in \[1, 7\] for E = 7, got 9", tilemoe.route, logits, 9)
    refused(TypeError, "unexpected keyword", tilemoe.route, logits, K, scorings="sigmoid")
    refused(ValueError, "scores", tilemoe.route_ids, torch.zeros(T, K).int(), torch.ones(T, 1), E)


def test_another_routing_of_the_same_sizes_is_found_by_its_memory():
    layer = {name: t.detach() for name, t in layer_of(DTYPE).items()}
    routing = tilemoe.route(layer["logits"], K)
    bad = routing._replace(memory=routing.memory[:-4])
    refused(ValueError, "routing is", tilemoe.gathered_mm, layer["x"], layer["W1"], bad)
