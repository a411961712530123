"""The layer on a GPU: as on the CPU, in CUDA graphs, on streams, and its memory as torch's
allocator counts it. Run by --device cuda."""

import ctypes

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from checks import refused
import module_support
import reference
import tilemoe
from comparison import Limits, assert_close, doubled, limits_of_expected
from lora_test import adapted, factors
from random_layers import E, K, T, d, logits_layer, n, normal, results
from module_support import same_bits
from target import DTYPES
from tilemoe import WeightGradients, _library
from tilemoe.bench import memory
from tilemoe.bench.peers import TileMoE, TileMoEOverwriting, TileMoESmall
from tilemoe.bench.problem import CASES, Problem
from tilemoe.module import Router

MIB = 1 << 20
SCORINGS = ("softmax_over_chosen", "softmax_over_all", "sigmoid_renormalized")
ROUTINGS = {
    **{scoring: dict(scoring=scoring) for scoring in SCORINGS},
    **{name: dict(rounding=name, m=8) for name in ("nearest", "up", "down", "balanced")},
    "stochastic": dict(rounding="stochastic", m=8),
}
every_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def counter(seed=7, offset=3):
    return dict(seed=torch.tensor([seed]), offset=torch.tensor([offset]))


def key_of(routing):
    return counter() if routing.get("rounding") == "stochastic" else {}


def test_the_cuda_library_is_loaded():
    assert _library._no_cuda is None


def test_float32_parameters_are_a_choice():
    with pytest.raises(ValueError, match="pass dtype=torch.bfloat16, or dtype=torch.float32"):
        tilemoe.MoE(d, n, E, K)
    layer = tilemoe.MoE(d, n, E, K, dtype=torch.float32)
    x = torch.randn(5, d)
    refused(NotImplementedError, "pass dtype=torch.bfloat16 or use torch.autocast", layer, x)
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.experts.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("router_dtype", [None, torch.float32], ids=str)
def test_a_recomputation_in_evaluation_has_the_bits_of_its_forward(router_dtype, precision):
    """With a small T, with and without TF32, under a reentrant checkpoint."""
    torch.set_float32_matmul_precision(precision)
    try:
        layer = module_support.make(router_dtype=router_dtype).eval()
        x, dO = module_support.batch()
        first, _ = checkpoint(layer, x, use_reentrant=True)
        assert torch.equal(first, layer(x)[0])
        first.backward(dO)
        block = module_support.make(router_dtype=router_dtype, fused_decode=False).eval()
        with torch.no_grad():
            first, _ = block(x.detach())
        assert torch.equal(first, block(x)[0])
    finally:
        torch.set_float32_matmul_precision("highest")


# ---------------------------------------------------------------- as on the CPU


def on_cpu(arguments):
    """Leaves of their own, so that each device has its own gradients."""

    def moved(tensor):
        return tensor.detach().cpu().requires_grad_(tensor.requires_grad)

    return {k: moved(v) if torch.is_tensor(v) else v for k, v in arguments.items()}


@every_routing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_choices_and_results_as_on_the_cpu(dtype, routing):
    arguments = logits_layer(dtype, bias=True) | dict(K=K) | routing | key_of(routing)
    with torch.device("cpu"):
        O_of_cpu, aux_of_cpu = tilemoe.moe(**on_cpu(arguments), return_aux=True)
    O, aux = tilemoe.moe(**arguments, return_aux=True)
    for name, got, want in zip(aux._fields, aux, aux_of_cpu):
        assert torch.equal(got.cpu(), want), name
    wide = doubled(arguments)
    want = reference.moe(**wide)
    limits = limits_of_expected(O, want, reference.moe(**wide, stored=dtype))
    assert_close(O, want, "O", limits)
    assert_close(O_of_cpu.to(O.device), want, "O of the CPU", limits)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("logits_dtype", [torch.float32, *DTYPES], ids=str)
def test_the_same_ids_as_on_the_cpu(logits_dtype, scoring):
    logits = normal(4096, 64, seed=50, dtype=torch.float32).to(logits_dtype)  # with many ties
    scores, ids = tilemoe.topk_router(logits, 8, scoring=scoring)
    scores_of_cpu, ids_of_cpu = tilemoe.topk_router(logits.cpu(), 8, scoring=scoring)
    assert torch.equal(ids.cpu(), ids_of_cpu)
    torch.testing.assert_close(scores.cpu(), scores_of_cpu, rtol=1e-6, atol=0)


def test_a_float32_routers_gemms():
    """Logits are float32's, and the gradients no further from float64's than rounding them is."""
    router = Router(d, E, dtype=torch.float32, device="cuda").to(torch.bfloat16)
    router.reset_parameters()
    x = normal(512, d, seed=1, dtype=torch.bfloat16).requires_grad_()
    scales = torch.logspace(-6, 1, 512, device="cuda")[:, None]
    dlogits = normal(512, E, seed=2, dtype=torch.float32) * scales
    logits = router(x)
    logits.backward(dlogits)
    wide_x, weight, wide_dlogits = x.double(), router.weight.double(), dlogits.double()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wide_x @ weight.mT, rtol=1e-5, atol=1e-5)
    gradients = [(x.grad, wide_dlogits @ weight), (router.weight.grad, wide_dlogits.mT @ wide_x)]
    for got, want in gradients:
        assert got.dtype == torch.bfloat16
        off = lambda values: ((values.double() - want).norm(dim=1) / want.norm(dim=1)).mean()
        assert not (off(got) > 1.1 * off(want.bfloat16()))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_types_are_refused_with_what_is_supported(dtype):
    got = str(dtype).removeprefix("torch.")
    with pytest.raises(NotImplementedError, match=f"x must be bfloat16 or float16 on CUDA, got {got}"):
        tilemoe.moe(**logits_layer(dtype), K=K)


def test_tensors_of_two_devices_are_refused():
    layer = {name: t.detach() for name, t in logits_layer(torch.bfloat16, bias=True).items()}
    for name in layer:
        with pytest.raises(ValueError, match="expected all tensors on one device: .* is on (cpu|cuda:0), "):
            tilemoe.moe(**layer | {name: layer[name].cpu()}, K=K)


def test_too_little_memory_is_torch_s_own_error():
    make = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    T, d, n, E, K = 1 << 20, 8, 1 << 14, 8, 8
    x, logits, W1, W2 = make(T, d).requires_grad_(), make(T, E), make(E, 2 * n, d), make(E, d, n)
    with pytest.raises(torch.OutOfMemoryError, match=f"cannot allocate a tensor with shape \\({T * K}, {2 * n}\\)"):
        tilemoe.moe(x, logits, W1, W2, K=K)  # whose H would be 512 GiB
    O = tilemoe.moe(x[:64], logits[:64], W1, W2, K=K)
    assert O.shape == (64, d)


# ---------------------------------------------------------------- CUDA graphs


def captured(call):
    """A graph of `call` and what it gives, after two calls outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def steps():
    """Logits (T, E) of very different routings."""
    yield normal(T, E, seed=60, dtype=torch.float32)
    everyone = torch.zeros(T, E)
    everyone[:, 2] = 9  # and every token ties for the others
    yield everyone
    yield normal(T, E, seed=61, dtype=torch.float32) - 8 * (torch.arange(E) % 2)
    yield torch.full((T, E), torch.nan)


@every_routing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_of_both_passes_serves_any_routing(dtype, routing):
    tensors = logits_layer(dtype, bias=True)
    options = dict(K=K, **routing, **key_of(routing))

    def both():
        O, aux = tilemoe.moe(**tensors, **options, return_aux=True)
        dO = (tensors["x"].detach() * 0.5).sin()
        gradients = torch.autograd.grad(O, list(tensors.values()), dO)
        return [O.detach(), *aux, *gradients]

    graph, out = captured(both)
    seen = []
    for step, logits in enumerate(steps()):
        with torch.no_grad():
            tensors["logits_or_scores"].copy_(logits)
            tensors["x"].copy_(normal(T, d, seed=70 + step, dtype=dtype))
            if "offset" in options:
                options["offset"].fill_(step)
        graph.replay()
        replayed = [t.clone() for t in out]
        for got, want in zip(replayed, both(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        seen.append(replayed[0])
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_with_adapters_reads_the_factors_as_they_are(dtype):
    """A replay packs the factors again."""
    tensors = {key: t.detach() for key, t in logits_layer(dtype, bias=True).items()}
    lora = factors(tensors)
    wanted = [tensors["x"].requires_grad_(), *lora.values()]

    def both():
        O = adapted(tilemoe.moe)(**tensors, **lora, K=K)
        gradients = torch.autograd.grad(O, wanted, (tensors["x"].detach() * 0.5).sin())
        return [O.detach(), *gradients]

    graph, out = captured(both)
    seen = []
    for step, logits in enumerate(steps()):
        with torch.no_grad():
            tensors["logits_or_scores"].copy_(logits)
            for factor in lora.values():
                factor.mul_(0.5 + step)
        graph.replay()
        replayed = [t.clone() for t in out]
        for got, want in zip(replayed, both(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        seen.append(replayed[0])
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


def test_a_replay_draws_what_seed_and_offset_say():
    tensors = {k: t.detach() for k, t in logits_layer(torch.bfloat16).items()}
    at = counter()
    options = dict(K=K, rounding="stochastic", m=16, return_aux=True)
    graph, (O, aux) = captured(lambda: tilemoe.moe(**tensors, **options, **at))
    changes = set()
    for seed, offset in [(7, 3), (7, 4), (8, 3), (2**40, 2**50), *((1, i) for i in range(8))]:
        at["seed"].fill_(seed), at["offset"].fill_(offset)
        first = [None, None]
        for i in range(2):
            graph.replay()
            first[i] = O.clone()
        want, want_aux = tilemoe.moe(**tensors, **options, seed=seed, offset=offset)
        assert torch.equal(first[0], want) and torch.equal(first[1], want)
        assert torch.equal(aux.added, want_aux.added)
        changes.add((aux.added.item(), aux.dropped.item()))
    assert len(changes) > 1


def test_a_graph_adds_gradients_to_given_memory():
    tensors = logits_layer(torch.bfloat16)
    given = WeightGradients(W1=torch.zeros(E, 2 * n, d), W2=torch.zeros(E, d, n))

    def both():
        O = tilemoe.moe(**tensors, K=K, weight_grad_out=given, overwrite_H=True)
        # Given memory is written only for weights that backward is called for.
        return torch.autograd.grad(O.sum(), inputs, allow_unused=True)[2:]

    inputs = [tensors["W1"], tensors["W2"], tensors["x"]]
    graph, (dx,) = captured(both)
    ones = torch.ones(T, d, dtype=torch.bfloat16)
    want = torch.autograd.grad(tilemoe.moe(**tensors, K=K), inputs, ones)

    def added(call, times):
        for memory_given in given.W1, given.W2:
            memory_given.zero_()
        for _ in range(times):
            call()
        return given.W1.clone(), given.W2.clone()

    ones_of_eager = added(both, 1)
    replayed = added(graph.replay, 3)
    assert torch.equal(dx, want[2])
    for got, one, in_16_bits in zip(replayed, ones_of_eager, want):
        assert_close(got, 3 * one.double(), "gradient", Limits(2e-7, 1e-6, 1e-2))
        # A bit of one number in a row of 24 may differ where float32's sum is half-way.
        assert_close(in_16_bits, one.bfloat16().double(), "gradient", Limits(2e-4, 2e-3, 0.1))


@pytest.mark.parametrize(
    "options",
    [dict(), dict(balance_coefficient=0.1, z_coefficient=0.01), dict(rounding="nearest", m=8)],
    ids=["plain", "losses", "rounded"],
)
def test_a_graph_of_a_training_step_of_the_module(options):
    moe = module_support.make(**options)
    x, dO = module_support.batch()
    step = lambda: list(module_support.run(moe, x, dO).values())  # noqa: E731
    graph, out = captured(step)
    for seed in (2, 3):
        fresh, _ = module_support.batch(seed)
        x.data.copy_(fresh)
        graph.replay()
        for got, want in zip([t.clone() for t in out], step(), strict=True):
            assert torch.equal(got, want)


def nodes_of(graph):
    """How many nodes a captured graph has."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    return count.value


@pytest.mark.parametrize("router", [{}, dict(router_dtype=torch.float32, router_bias=True)])
@torch.no_grad()
def test_small_T_is_four_kernels(router):
    """The router, the up-projection, the down-projection and the combine; nothing is set or copied."""
    moe = tilemoe.MoE(256, 128, 32, 4, return_aux=False, dtype=torch.bfloat16, **router).eval()
    for T in (1, 16, 64):
        x = normal(T, 256, seed=T, dtype=torch.bfloat16)
        expected = moe(x)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            out = moe(x)
        assert nodes_of(graph) == 4
        graph.instantiate()
        for seed in range(5):
            x.copy_(normal(T, 256, seed=seed, dtype=torch.bfloat16))
            graph.replay()
            assert torch.equal(out, moe(x))
        assert out.shape == expected.shape and not torch.equal(out, expected)


def test_compiled_into_cuda_graphs():
    torch._dynamo.reset()
    moe = module_support.make(router_dtype=torch.float32)
    compiled = torch.compile(moe, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x, dO = module_support.batch(seed)
        want = module_support.run(moe, x, dO)
        torch.compiler.cudagraph_mark_step_begin()
        out, _ = compiled(x)
        (dx,) = torch.autograd.grad(out, x, dO)
        exact = module_support.expected(moe, x, dO)
        rounding = module_support.expected(moe, x, dO, stored=torch.bfloat16)
        for name, got in {"out": out, "dx": dx}.items():
            limits = limits_of_expected(got, exact[name], rounding[name])
            assert_close(got, want[name].double(), name, limits)


@pytest.mark.parametrize("tokens", [None, 1024], ids=["whole", "groups"])
def test_compiled_rounding_chooses_the_same(tokens):
    """Many experts, so that a search in the wrong place finds wrong ones."""
    torch._dynamo.reset()
    many, how = 64, dict(rounding="nearest", m=16, rounding_tokens=tokens)
    logits = normal(4096, many, seed=3, dtype=torch.float32)
    x = normal(4096, d, seed=4, dtype=torch.bfloat16)
    W1 = normal(many, 2 * n, d, seed=5, dtype=torch.bfloat16) / 8
    W2 = normal(many, d, n, seed=6, dtype=torch.bfloat16) / 8
    router = lambda logits: tilemoe.rounded_router(logits, 4, **how)
    got = torch.compile(router, fullgraph=True)(logits)
    want = router(logits)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    torch.testing.assert_close(got[2], want[2])
    layer = lambda x: tilemoe.moe(x, logits, W1, W2, K=4, **how)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


# ---------------------------------------------------------------- streams


def test_a_side_stream():
    """The inputs are written late on the same stream: a kernel on another stream would be early."""
    tensors = logits_layer(torch.bfloat16, bias=True)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)  # made here: a copy from the host waits

    def both():
        O = tilemoe.moe(**tensors, K=K)
        return [O, *torch.autograd.grad(O, list(tensors.values()), dO)]

    want = both()
    x = tensors["x"].detach().clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad():
        tensors["x"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # a quarter of a second
        with torch.no_grad():
            tensors["x"].copy_(x)
        got = both()
    assert not stream.query()  # nothing has waited for the GPU
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_two_streams_at_once():
    layers = [logits_layer(torch.bfloat16, bias=True) for _ in range(2)]
    with torch.no_grad():
        layers[1]["x"].mul_(-0.5)
    want = [results(tilemoe.moe, layer, K=K) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(results(tilemoe.moe, layers[i], K=K))
    torch.cuda.synchronize()
    for i in range(2):
        for one in got[i]:
            same_bits(one, want[i])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
def test_another_gpu_than_the_current_one():
    tensors = logits_layer(torch.bfloat16, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    moved = {name: t.detach().to("cuda:1").requires_grad_() for name, t in tensors.items()}
    O = tilemoe.moe(**moved, K=K)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16).to("cuda:1")
    got = [O, *torch.autograd.grad(O, list(moved.values()), dO)]
    assert torch.cuda.current_device() == 0
    for one, other in zip(got, want.values(), strict=True):
        assert one.device.index == 1 and torch.equal(one.to("cuda:0"), other)
    mixed = moved | {"W1": tensors["W1"]}
    refused(ValueError, "W1 .* is on another device", tilemoe.moe, **mixed, K=K)


def test_no_call_waits_for_the_gpu():
    tensors = logits_layer(torch.bfloat16, bias=True)
    x, _ = module_support.batch()
    moe = module_support.make(balance_coefficient=0.1, rounding="stochastic", m=8)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for routing in ROUTINGS.values():
            at = {k: v for k, v in zip(("seed", "offset"), torch.ones(2, 1, dtype=torch.int64))}
            at = at if routing.get("rounding") == "stochastic" else {}
            O, _ = tilemoe.moe(**tensors, K=K, return_aux=True, **routing, **at)
            O.sum().backward()
        out, aux = moe(x, seed=1, offset=2)
        (out.sum() + aux.loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ---------------------------------------------------------------- memory


def kept_and_left(call):
    """Bytes that are allocated more after a call, its output aside, and what the call gave."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    own = out.untyped_storage().nbytes()
    return torch.cuda.memory_allocated() - before - own, out


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("granularity", [1, 4])
def test_memory_kept_is_the_contract(granularity, gated, scoring):
    T, d, n, E, K = 8192, 512, 512 // granularity, 16 * granularity, 2 * granularity
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    x, logits, W1, W2 = make(T, d), make(T, E), make(E, n * (1 + gated), d), make(E, d, n)
    options = dict(K=K, scoring=scoring, activation="swiglu" if gated else "relu")
    call = lambda: tilemoe.moe(x, logits, W1, W2, **options)  # noqa: E731
    kept, O = kept_and_left(call)
    H = (4 if gated else 2) * T * K * n
    contract = 2 * T * d + H + 16 * T * K  # x is the caller's, and so are the logits
    assert H <= kept <= 1.02 * contract - 2 * T * d, (kept, contract)
    O.backward(torch.ones_like(O))
    with torch.no_grad():
        kept, _ = kept_and_left(call)
    assert kept == 0


def test_memory_of_the_7b_configuration():
    """Above weights, x and dO, of the whole layer: kept, and the most in both passes."""
    problem = Problem(CASES["7b-n256"])
    case = problem.case
    pairs = case.T * case.K
    peaks = {}
    for peer in (TileMoE, TileMoEOverwriting, TileMoESmall):
        made = peer(problem)
        made.backward(made.forward())
        torch.cuda.empty_cache()
        found = memory.measure(made)
        assert found["saved_bytes"] <= 1.02 * (
            2 * case.T * case.d + 4 * pairs * case.n + 16 * pairs
        )
        peaks[peer.name] = (found["peak_bytes"] - found["resident_bytes"]) / MIB
    print(peaks)
    assert peaks["tilemoe-dh-over-h"] <= 1030 and peaks["tilemoe-small-peak"] <= 700, peaks


def test_deterministic_on_a_busy_gpu():
    tensors = logits_layer(torch.bfloat16, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    noise = torch.randn(2048, 2048, dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        same_bits(results(tilemoe.moe, tensors, K=K), want)


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_same_bits_with_any_ctas_per_sm(count):
    tensors = logits_layer(torch.bfloat16, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    tilemoe.set_ctas_per_sm(count)
    try:
        same_bits(results(tilemoe.moe, tensors, K=K), want)
    finally:
        tilemoe.set_ctas_per_sm(1)


def test_a_second_call_takes_no_new_memory():
    tensors = logits_layer(torch.bfloat16, bias=True)
    results(tilemoe.moe, tensors, K=K)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    after = []
    for _ in range(5):
        results(tilemoe.moe, tensors, K=K)
        after.append(torch.cuda.memory_allocated())
    # autograd's thread lets go of its last tensors a moment after a call, the first one too; what
    # stays would add up.
    assert min(after) <= before, (before, after)
