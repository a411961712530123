"""MoE with the rest of PyTorch: compiled, under autocast, recomputed, frozen in part, copied,
stored, made on the meta device. Bits, wherever the same sums are taken in the same order."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from checks import WITHOUT_PRECOMPILED_HEADERS
from comparison import LIMITS, assert_close
from module_support import E, K, batch, check, d, expected, make, n, run, same_bits
from target import DEVICE, DTYPE
from tilemoe.module import MoE

OPTIONS = {
    "plain": dict(bias=True),
    "losses": dict(balance_coefficient=0.3, z_coefficient=0.02),
    "sigmoid": dict(scoring="sigmoid_renormalized", selection_bias=True),
    "not gated": dict(activation="relu_squared"),
    "shared": dict(shared_intermediate_size=16, shared_expert_gate=True, router_bias=True),
    "rounded": dict(rounding="balanced", m=8, balance_coefficient=0.1),
    "stochastic": dict(rounding="stochastic", m=8),
    "fixed router": dict(router="fixed", router_bias=True),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def key_of(options):
    if options.get("rounding") != "stochastic":
        return {}
    return dict(seed=torch.tensor([11]), offset=torch.tensor([3]))


# ---------------------------------------------------------------- torch.compile


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_option
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_compiles_without_a_graph_break(options, training, fresh_compiler):
    moe = make(**options).train(training)
    x, dO = batch()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        x, dO = batch(seed)
        got = run_module(compiled, moe, x, dO, **key_of(options))
        same_bits(got, run(moe, x, dO, **key_of(options)))


def run_module(called, moe, x, dO, **arguments):
    """run(), calling a wrapped module with the parameters' names of the bare one."""
    out, aux = called(x, **arguments)
    parameters = dict(moe.named_parameters()) | {"x": x}
    objective = (out * dO).sum(dtype=torch.float32) + aux.loss
    gradients = torch.autograd.grad(objective, list(parameters.values()))
    return {"out": out, **aux._asdict()} | {"d" + k: g for k, g in zip(parameters, gradients)}


def test_compiles_with_inductor(fresh_compiler):
    moe = make(balance_coefficient=0.1)
    x, dO = batch()
    compiled = torch.compile(moe, fullgraph=True)
    with torch._inductor.config.patch(WITHOUT_PRECOMPILED_HEADERS):
        check(run_module(compiled, moe, x, dO), expected(moe, x, dO))


def test_another_batch_size_or_offset_does_not_recompile(fresh_compiler):
    moe = make(rounding="stochastic", m=8)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    seed = torch.tensor([1])
    batches = [batch(shape=(rows,)) for rows in (16, 24, 40)]
    first = run_module(compiled, moe, *batches[0], seed=seed, offset=torch.tensor([0]))
    assert first["out"].shape[0] == 16
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, (x, dO) in enumerate(batches):
            key = dict(seed=seed, offset=torch.tensor([step]))
            same_bits(run_module(compiled, moe, x, dO, **key), run(moe, x, dO, **key))


@pytest.mark.parametrize("options", [{}, dict(router_dtype=torch.float32)], ids=["plain", "wide"])
def test_compiles_under_autocast(options, fresh_compiler):
    moe = make(bias=True, dtype=torch.float32, **options)
    x, dO = batch(dtype=torch.float32)

    def called(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return moe(x)

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    dO = dO.to(torch.bfloat16)
    same_bits(run_module(compiled, moe, x, dO), run_module(called, moe, x, dO))


@every_option
def test_exports_for_inference(options, fresh_compiler):
    moe = make(**options).eval()
    x, _ = batch()
    tokens = torch.export.Dim("tokens", min=2)
    with torch.no_grad():
        exported = torch.export.export(moe, (x.detach(),), dynamic_shapes={"x": {1: tokens}})
        for length in (22, 30):  # fewer tokens take another operator where nothing is exported
            x, _ = batch(shape=(3, length))
            got, want = exported.module()(x), moe(x)
            assert all(torch.equal(a, b) for a, b in zip((got[0], *got[1]), (want[0], *want[1])))


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("router_dtype", [None, torch.float32], ids=str)
def test_autocast(dtype, router_dtype):
    moe = make(router_dtype=router_dtype, bias=True, dtype=torch.float32)
    x, dO = batch(dtype=dtype)
    x = x.detach().float().requires_grad_()  # float32, of values that the cast leaves as they are
    with torch.autocast(DEVICE, dtype=dtype):
        logits = moe.gate(x)
        got = run(moe, x, dO)
    assert logits.dtype == (router_dtype or dtype)
    assert got["out"].dtype == dtype
    assert all(got["d" + k].dtype == torch.float32 for k, _ in moe.named_parameters())
    # The same layer kept in 16 bits, its router in float32 if required.
    low = copy.deepcopy(moe)
    low.experts.to(dtype)
    if router_dtype is None:
        low.gate.to(dtype)
    want = expected(low, x.detach().to(dtype), dO)
    for name in ("out", "dx", "dexperts.gate_up_proj", "dexperts.down_proj", "dgate.weight"):
        assert_close(got[name], want[name], name, LIMITS[dtype])


# ---------------------------------------------------------------- recomputation


@every_option
def test_checkpoint(options):
    moe = make(**options)
    x, dO = batch()
    called = lambda x, **key: checkpoint(moe, x, use_reentrant=False, **key)
    key = key_of(options)
    same_bits(run_module(called, moe, x, dO, **key), run(moe, x, dO, **key))


@every_option
def test_reentrant_checkpoint(options):
    # It differentiates tensors of a flat tuple alone, so the loss is taken out of aux.
    moe = make(**options)
    x, dO = batch()
    key = key_of(options)

    def flat(x):
        out, aux = moe(x, **key)
        return out, aux.loss

    out, loss = checkpoint(flat, x, use_reentrant=True)
    ((out * dO).sum() + loss).backward()
    want = run(moe, x.detach().requires_grad_(), dO, **key)
    got = {"out": out, "dx": x.grad} | {"d" + k: p.grad for k, p in moe.named_parameters()}
    same_bits(got, {name: want[name] for name in got})


def test_checkpoint_in_a_compiled_model(fresh_compiler):
    moe = make(rounding="stochastic", m=8)
    x, dO = batch()
    key = key_of(OPTIONS["stochastic"])
    called = torch.compile(
        lambda x, **key: checkpoint(moe, x, use_reentrant=False, **key),
        fullgraph=True,
        backend="aot_eager",
    )
    same_bits(run_module(called, moe, x, dO, **key), run(moe, x, dO, **key))


# ---------------------------------------------------------------- what is required


def test_requires_grad_subsets():
    moe = make(bias=True, balance_coefficient=0.1)
    x, dO = batch()
    everything = run(moe, x, dO)
    names = [name for name, _ in moe.named_parameters()] + ["x"]
    for chosen in range(1, 2 ** len(names)):
        wanted = {name for i, name in enumerate(names) if chosen >> i & 1}
        for name, p in moe.named_parameters():
            p.requires_grad_(name in wanted)
        got = run(moe, x.detach().requires_grad_("x" in wanted), dO)
        assert {key for key in got if key[1:] in names} == {"d" + name for name in wanted}
        same_bits(got, {key: everything[key] for key in got})


def test_deterministic_algorithms():
    moe = make(bias=True, balance_coefficient=0.1)
    x, dO = batch()
    want = run(moe, x, dO)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            same_bits(run(moe, x, dO), want)
    finally:
        torch.use_deterministic_algorithms(False)


@every_option
@pytest.mark.parametrize("router_dtype", [None, torch.float32], ids=str)
def test_memory_from_forward_to_backward(options, router_dtype):
    """X, H and the routing, and where the logits' gradient needs them the logits: to 2 %, counted
    by storage, so that a view costs nothing and a copy does."""
    moe = make(**options, dtype=torch.bfloat16, router_dtype=router_dtype)
    x, dO = batch(dtype=torch.bfloat16, shape=(512,))
    parameters = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, aux = moe(x, **key_of(options))
    T, m = 512, 8
    rows = T * K + {"balanced": m, "stochastic": E * (m - 1)}.get(moe.rounding, 0)
    width = n if moe.experts.activation == "relu_squared" else 2 * n
    wanted = 2 * T * d + 2 * rows * width + 16 * rows + 32 * E
    if moe.shared_experts is not None:  # their H, the sigmoid and the rows' scores; X is kept
        wanted += 2 * T * 2 * moe.shared_experts.up_proj.weight.shape[0] + 8 * T
    dense_in_E = moe.rounding or moe.balance_coefficient or moe.scoring != "softmax_over_chosen"
    if dense_in_E:
        wanted += T * E * moe.gate(x).element_size()
    assert sum(kept.values()) <= 1.02 * wanted, (sum(kept.values()) / wanted, kept)
    assert sum(kept.values()) >= 0.8 * wanted  # the hooks did see what is kept


def test_gradients_accumulate():
    moe = make(bias=True)
    x, dO = batch()
    want = run(moe, x, dO)
    for _ in range(2):
        (moe(x)[0] * dO).sum().backward()
    for name, p in moe.named_parameters():
        assert torch.equal(p.grad, 2 * want["d" + name]), name


# ---------------------------------------------------------------- copies and storage


@every_option
def test_deepcopy_pickle_and_state_dict(options):
    moe = make(**options)
    x, dO = batch()
    key = key_of(options)
    want = run(moe, x, dO, **key)
    same_bits(run(copy.deepcopy(moe), x, dO, **key), want)
    same_bits(run(pickle.loads(pickle.dumps(moe)), x, dO, **key), want)
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    file.seek(0)
    loaded = make(seed=9, **options)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    same_bits(run(loaded, x, dO, **key), want)


@every_option
def test_meta_device(options):
    with torch.device("meta"):
        moe = MoE(d, n, E, K, dtype=DTYPE, return_aux=True, **options)
    assert all(t.is_meta for t in moe.state_dict().values())
    moe.to_empty(device=DEVICE)
    with torch.no_grad():
        for t in moe.state_dict().values():
            t.fill_(torch.nan)
    torch.manual_seed(3)
    moe.reset_parameters()
    torch.manual_seed(3)
    same_bits(moe.state_dict(), MoE(d, n, E, K, dtype=DTYPE, return_aux=True, **options).state_dict())


def test_meta_tensors_and_fake_tensors_go_through():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, _ = batch()
    want, _ = make()(x)
    with torch.device("meta"):
        out, aux = MoE(d, n, E, K, return_aux=True)(torch.empty(x.shape))
    assert out.is_meta and out.shape == want.shape and aux.expert_counts.shape == (E,)
    with FakeTensorMode():
        moe = MoE(d, n, E, K, return_aux=True, dtype=x.dtype)
        out, aux = moe(torch.empty(x.shape, dtype=x.dtype))
    assert out.shape == want.shape and out.dtype == want.dtype


def test_functional_call():
    moe = make()
    x, _ = batch()
    other = make(seed=5)
    out, _ = torch.func.functional_call(moe, dict(other.named_parameters()), (x,))
    assert torch.equal(out, other(x)[0])
