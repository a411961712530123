"""`capacity`: rows for fewer pairs than there are ids, where many of them are other GPUs' experts."""

import pytest
import torch

import random_layers as layers
import reference
import tilemoe
from checks import same_bits
from comparison import doubled
from target import DEVICE

T, E, K = layers.T, layers.E, layers.K
FIRST, LAST = 2, 5  # this GPU's experts of E
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.cpu)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def problem(dtype):
    """A layer's part of the experts: {name: leaf}, ids (T, K) outside of it and in it."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(T, E, generator=generator, device="cpu").argsort(-1)[:, :K]
    ids = (chosen.to(DEVICE) - FIRST).int()
    weights = {
        name: t.detach()[FIRST:LAST].clone().requires_grad_()
        for name, t in layers.weights(dtype, bias=True).items()
    }
    tensors = {
        "x": layers.normal(T, layers.d, seed=20, dtype=dtype).requires_grad_(),
        "logits_or_scores": layers.normal(T, K, seed=22, dtype=torch.float32).requires_grad_(),
        **weights,
    }
    return tensors, ids


def here(ids):
    return (ids >= 0) & (ids < LAST - FIRST)


def fitting(ids, capacity):
    """ids with -1 in place of those that do not fit: the highest experts' last tokens."""
    flat = ids.flatten().tolist()
    order = sorted((i for i, e in enumerate(flat) if 0 <= e < LAST - FIRST), key=lambda i: (flat[i], i))
    for i in order[capacity:]:
        flat[i] = -1
    return torch.tensor(flat, dtype=ids.dtype, device=ids.device).reshape(ids.shape)


@each_dtype
def test_bits_do_not_depend_on_a_capacity_that_suffices(dtype):
    tensors, ids = problem(dtype)
    M = int(here(ids).sum())
    assert 0 < M < T * K
    want = layers.results(tilemoe.moe, tensors, ids=ids)
    for capacity in (M, M + 1, T * K, 10 * T * K):
        same_bits(layers.results(tilemoe.moe, tensors, ids=ids, capacity=capacity), want)


@each_dtype
def test_from_logits_too(dtype):
    tensors = layers.logits_layer(dtype)
    want = layers.results(tilemoe.moe, tensors, K=K, scoring="sigmoid")
    same_bits(layers.results(tilemoe.moe, tensors, K=K, scoring="sigmoid", capacity=T * K), want)
    O, aux = tilemoe.moe(**tensors, K=K, capacity=T * K - 4, return_aux=True)
    assert O.isnan().all() and aux.overflow == 4
    assert aux.expert_counts.sum() == T * K  # chosen, whether they fit or not


@each_dtype
def test_past_it_pairs_are_dropped_on_request(dtype):
    tensors, ids = problem(dtype)
    capacity = int(here(ids).sum()) - 9
    left = fitting(ids, capacity)
    assert int(here(left).sum()) == capacity
    got = layers.results(tilemoe.moe, tensors, ids=ids, capacity=capacity, on_overflow="drop")
    same_bits(got, layers.results(tilemoe.moe, tensors, ids=left))
    want = layers.results(reference.moe, doubled(tensors), dO_dtype=dtype, ids=left)
    of = lambda **how: layers.results(  # noqa: E731
        reference.moe, doubled(tensors), dO_dtype=dtype, ids=left, **how
    )
    low = dtype != torch.float32
    limits = layers.expected_errors(got, want, of(stored=dtype)) if low else None
    layers.compare(got, want, tensors, limits)
    assert (got["dlogits_or_scores"][left != ids] == 0).all()


def test_past_it_the_output_is_nan_and_the_pairs_are_counted():
    tensors, ids = problem(torch.bfloat16)
    M = int(here(ids).sum())
    for capacity, over in ((M, 0), (M - 1, 1), (M - 9, 9)):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                O, aux = tilemoe.moe(**tensors, ids=ids, capacity=capacity, return_aux=True)
            assert O.isnan().all() if over else O.isfinite().all()
            assert aux.overflow == over and aux.skipped == T * K - M + over
            counts = [int((ids == e).sum()) for e in range(LAST - FIRST)]
            assert aux.expert_counts.tolist() == counts
            without = int((~here(fitting(ids, capacity)).any(1)).sum())
            assert aux.without == without
    # A spoilt output has no gradient that looks valid.
    (O.detach().requires_grad_() * 1).sum().backward()
    O = tilemoe.moe(**tensors, ids=ids, capacity=M - 9)
    (O * O).sum().backward()
    assert tensors["W1"].grad.isnan().any() and tensors["x"].grad.isnan().any()


def test_memory_follows_it():
    """H, the largest tensor that is kept, has a row for each pair of the capacity."""
    tensors, ids = problem(torch.bfloat16)
    kept = []
    for capacity in (40, 60, None):
        shapes = []
        pack = lambda t: (shapes.append(tuple(t.shape)), t)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            tilemoe.moe(**tensors, ids=ids, capacity=capacity, on_overflow="drop")
        kept.append([s for s in shapes if len(s) == 2 and s[1] == 2 * layers.n and s[0] != LAST - FIRST])
    assert kept == [[(rows, 2 * layers.n)] for rows in (40, 60, T * K)]


@pytest.mark.filterwarnings("ignore")
def test_compiles():
    tensors, ids = problem(torch.bfloat16)
    M = int(here(ids).sum())
    compiled = torch.compile(tilemoe.moe, fullgraph=True, backend="aot_eager")
    for capacity in (M, M - 2):
        for how in ("nan", "drop"):
            options = dict(ids=ids, capacity=capacity, on_overflow=how)
            got = layers.results(compiled, tensors, **options)
            want = layers.results(tilemoe.moe, tensors, **options)
            for name in want:
                assert torch.equal(got[name].nan_to_num(7.0), want[name].nan_to_num(7.0)) or (
                    how == "nan" and capacity < M
                ), name


def test_no_tokens():
    tensors, ids = problem(torch.bfloat16)
    tensors |= {"x": tensors["x"][:0], "logits_or_scores": tensors["logits_or_scores"][:0]}
    O, aux = tilemoe.moe(**tensors, ids=ids[:0], capacity=5, return_aux=True)
    assert O.shape == (0, layers.d) and aux.overflow == 0


def test_refusals():
    tensors, ids = problem(torch.bfloat16)
    for wrong in (0, -3, 1.5, True):
        with pytest.raises(ValueError, match=f"capacity must be an int >= 1, got {wrong}"):
            tilemoe.moe(**tensors, ids=ids, capacity=wrong)
    with pytest.raises(ValueError, match="on_overflow must be one of nan, drop, got 'zero'"):
        tilemoe.moe(**tensors, ids=ids, capacity=4, on_overflow="zero")
    logits = layers.logits_layer(torch.bfloat16)
    with pytest.raises(ValueError, match="capacity must be None with rounding='up', got 4"):
        tilemoe.moe(**logits, K=K, rounding="up", capacity=4)
    with pytest.raises(ValueError, match="capacity must be >= 1, got 0"):
        scores = tensors["logits_or_scores"].detach()
        tilemoe.ops.call(tilemoe._library.operators.route_top_k.default, ids, scores, E, 0)
