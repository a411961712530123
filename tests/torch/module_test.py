"""MoE alone: what it computes, what it returns, what it refuses."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from checks import refused, short
import reference
from module_support import E, K, SHAPE, batch, check, d, expected, make, n, run, same_bits
from target import DEVICE, DTYPE, DTYPES
from tilemoe.module import MoE, MoEAux

OPTIONS = {
    "plain": {},
    "biases": dict(bias=True),
    "losses": dict(balance_coefficient=0.3, z_coefficient=0.02),
    "over all": dict(scoring="softmax_over_all"),
    "sigmoid": dict(scoring="sigmoid", selection_bias=True),
    "renormalized": dict(scoring="sigmoid_renormalized", selection_bias=True, bias=True),
    "float32 router": dict(router_dtype=torch.float32),
    "nearest": dict(rounding="nearest", m=8, bias=True),
    "up": dict(rounding="up", m=8),
    "down": dict(rounding="down", m=4, balance_coefficient=0.1),
    "balanced": dict(rounding="balanced", m=8, z_coefficient=0.1),
    "stochastic": dict(rounding="stochastic", m=8),
    "shared": dict(shared_intermediate_size=40, router_bias=True),
    "shared by a gate": dict(
        shared_intermediate_size=16, shared_expert_gate=True, scoring="softmax_renormalized"
    ),
    "shared, not gated inside": dict(shared_intermediate_size=40, activation="relu_squared"),
    "shared and rounding": dict(
        shared_intermediate_size=24, shared_expert_gate=True, rounding="nearest", m=8
    ),
    "float32 router with a bias": dict(router_bias=True, router_dtype=torch.float32),
    "by groups": dict(rounding="nearest", m=4, rounding_tokens=13, balance_coefficient=0.1),
}


def key_of(options):
    return dict(seed=11, offset=3) if options.get("rounding") == "stochastic" else {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_and_gradients(options, dtype):
    moe = make(dtype=dtype, **options)
    x, dO = batch(dtype=dtype)
    check(run(moe, x, dO, **key_of(options)), expected(moe, x, dO, **key_of(options)))


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations(activation):
    moe = make(activation=activation, bias=True)
    x, dO = batch()
    check(run(moe, x, dO), expected(moe, x, dO))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 0), (2, 3, 4)], ids=str)
def test_leading_shapes(shape):
    moe = make(balance_coefficient=0.1)
    x, dO = batch(shape=shape)
    got = run(moe, x, dO)
    assert got["out"].shape == x.shape and got["dx"].shape == x.shape
    check(got, expected(moe, x, dO))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)], ids=str)
def test_no_output_with_a_gradient_is_a_view(shape):
    """FSDP-2 keeps its hooks on a module's outputs, and warns of views, whose in-place operations
    would lose them."""
    out, aux = make(balance_coefficient=0.1, z_coefficient=0.1)(batch(shape=shape)[0])
    for name, tensor in {"out": out, **aux._asdict()}.items():
        assert not tensor.requires_grad or tensor._base is None, name
    assert out.requires_grad and aux.balance.requires_grad


def test_widths_that_no_kernel_has_are_refused():
    for name, size, sizes in (("d", 33, (33, 16)), ("n", 20, (32, 20)), ("d", 0, (0, 16))):
        with pytest.raises(ValueError, match=f"^{name} must be a positive multiple of 8, got {size}$"):
            MoE(*sizes, E=4, K=2, dtype=DTYPE)


def test_non_contiguous_input():
    moe = make()
    x, dO = batch()
    strided = x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert not strided.is_contiguous()
    # Torch's own GEMM for the router may order its sums by the strides.
    check(run(moe, strided, dO.mT.contiguous().mT), expected(moe, x, dO))


def test_evaluation_is_plain_top_k():
    x, dO = batch()
    rounded, plain = make(rounding="stochastic", m=16), make()
    got = run(rounded.eval(), x, dO)  # no seed: nothing is drawn
    same_bits(got, run(plain, x, dO))
    assert got["dropped"] == 0 and got["added"] == 0
    rounded.train()
    assert not torch.equal(run(rounded, x, dO, seed=1, offset=0)["out"], got["out"])


def test_rounding_counts():
    T = SHAPE[0] * SHAPE[1]
    for rounding in ("nearest", "up", "down", "balanced"):
        moe = make(rounding=rounding, m=8)
        x, dO = batch()
        aux = run(moe, x, dO)
        total = T * K + aux["added"] - aux["dropped"]
        assert aux["expert_counts"].sum() == T * K and total % 8 == 0
        assert (aux["added"] > 0) == (rounding != "down")
        assert (aux["dropped"] > 0) == (rounding != "up")


def test_stochastic_rounding_follows_seed_and_offset():
    moe = make(rounding="stochastic", m=16)
    x, dO = batch()
    first = run(moe, x, dO, seed=5, offset=7)
    same_bits(run(moe, x, dO, seed=5, offset=7), first)
    tensors = dict(seed=torch.tensor([5]), offset=torch.tensor([7]))
    same_bits(run(moe, x, dO, **tensors), first)
    others = [run(moe, x, dO, seed=5, offset=8 + i)["out"] for i in range(4)]
    others += [run(moe, x, dO, seed=6 + i, offset=7)["out"] for i in range(4)]
    assert any(not torch.equal(out, first["out"]) for out in others[:4])
    assert any(not torch.equal(out, first["out"]) for out in others[4:])


def test_stochastic_rounding_without_seed_is_refused():
    moe = make(rounding="stochastic", m=16)
    x, _ = batch()
    for arguments in ({}, dict(seed=1), dict(offset=1)):
        refused(ValueError, "seed and offset are required in training", moe, x, **arguments)


def test_aux_is_a_pytree_of_tensors_on_the_device():
    x, _ = batch()
    out, aux = make(balance_coefficient=0.1)(x)
    assert isinstance(aux, MoEAux)
    leaves, spec = torch.utils._pytree.tree_flatten((out, aux))
    assert len(leaves) == 1 + len(MoEAux._fields)
    assert all(isinstance(leaf, torch.Tensor) and leaf.device == x.device for leaf in leaves)
    assert torch.utils._pytree.tree_unflatten(leaves, spec)[1] == aux
    assert aux.loss.requires_grad and not aux.expert_counts.requires_grad
    for counts in (aux.expert_counts, aux.dropped, aux.added, aux.without):
        assert counts.dtype == torch.int32


def test_parameters_have_hugging_face_names_and_shapes():
    shapes = lambda moe: {name: tuple(t.shape) for name, t in moe.state_dict().items()}
    assert shapes(MoE(d, n, E, K, dtype=DTYPE)) == {
        "gate.weight": (E, d),
        "experts.gate_up_proj": (E, 2 * n, d),
        "experts.down_proj": (E, d, n),
    }
    biased = MoE(d, n, E, K, dtype=DTYPE, bias=True, scoring="sigmoid", selection_bias=True)
    assert shapes(biased) == shapes(MoE(d, n, E, K, dtype=DTYPE)) | {
        "gate.e_score_correction_bias": (E,),
        "experts.gate_up_proj_bias": (E, 2 * n),
        "experts.down_proj_bias": (E, d),
    }
    assert shapes(MoE(d, n, E, K, dtype=DTYPE, activation="relu_squared", bias=True)) == {
        "gate.weight": (E, d),
        "experts.up_proj": (E, n, d),
        "experts.up_proj_bias": (E, n),
        "experts.down_proj": (E, d, n),
        "experts.down_proj_bias": (E, d),
    }
    shared = MoE(
        d, n, E, K, dtype=DTYPE, router_bias=True, shared_intermediate_size=40,
        shared_expert_gate=True,
    )  # fmt: skip
    assert shapes(shared) == shapes(MoE(d, n, E, K, dtype=DTYPE)) | {
        "gate.bias": (E,),
        "shared_experts.gate_proj.weight": (40, d),
        "shared_experts.up_proj.weight": (40, d),
        "shared_experts.down_proj.weight": (d, 40),
        "shared_expert_gate.weight": (1, d),
    }


@pytest.mark.cpu  # float32: a slope that steps at the clamp is no place for 16 bits
def test_gpt_oss_form():
    form = dict(clamp=1.25, alpha=1.702, up_shift=1.0)
    moe = make(bias=True, router_bias=True, shared_intermediate_size=16, **form)
    x, dO = batch()
    got = run(moe, x, dO)
    check(got, expected(moe, x, dO))
    for name in form:  # each of them counts
        plainer = form | {name: 0.0}
        other = make(bias=True, router_bias=True, shared_intermediate_size=16, **plainer)
        with pytest.raises(AssertionError):
            check(run(other, x, dO), expected(moe, x, dO))
    assert "activation='swiglu', clamp=1.25, alpha=1.702, up_shift=1.0, bias=True" in repr(moe)


def test_dtypes():
    moe = MoE(
        d, n, E, K, return_aux=True, dtype=torch.bfloat16, router_dtype=torch.float32,
        scoring="sigmoid", selection_bias=True,
    )  # fmt: skip
    assert moe.gate.weight.dtype == torch.float32
    assert moe.experts.gate_up_proj.dtype == moe.experts.down_proj.dtype == torch.bfloat16
    x, _ = batch(dtype=torch.bfloat16)
    assert moe.gate(x).dtype == torch.float32 and moe(x)[0].dtype == torch.bfloat16
    moe.gate.e_score_correction_bias.fill_(1 / 3)
    moe.to(torch.bfloat16)  # casts the router's weight, not its bias
    assert moe.gate.weight.dtype == torch.bfloat16
    assert torch.equal(moe.gate.e_score_correction_bias, torch.full((E,), 1 / 3))
    assert moe.gate(x).dtype == torch.float32


def test_reset_parameters():
    torch.manual_seed(0)
    moe = MoE(
        d, n, E, K, dtype=DTYPE, bias=True, scoring="sigmoid", selection_bias=True,
        router_bias=True, shared_intermediate_size=40, shared_expert_gate=True,
    )  # fmt: skip
    before = {name: t.clone() for name, t in moe.state_dict().items()}
    for name, t in before.items():
        if name.endswith("bias"):
            assert (t == 0).all()
        else:
            bound = t.shape[-1] ** -0.5
            assert t.abs().max() <= bound and abs(t.std() / bound - 3**-0.5) < 0.15
    with torch.no_grad():
        for t in moe.state_dict().values():
            t.fill_(7)
    torch.manual_seed(0)
    moe.reset_parameters()
    same_bits(moe.state_dict(), before)


def test_selection_bias_update():
    moe = MoE(d, n, 4, 2, dtype=DTYPE, scoring="sigmoid", selection_bias=True)
    moe.update_selection_bias(torch.tensor([10, 0, 4, 2], dtype=torch.int32), rate=0.5)  # mean 4
    assert moe.gate.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.0, 0.5]
    refused(ValueError, r"shape \(3,\), expected \(4,\)", moe.update_selection_bias, torch.zeros(3))
    with pytest.raises(ValueError, match="requires a module with selection_bias=True"):
        MoE(d, n, 4, 2, dtype=DTYPE, scoring="sigmoid").update_selection_bias(torch.zeros(4))


def test_selection_bias_balances():
    moe = make(scoring="sigmoid_renormalized", selection_bias=True)
    moe.gate.reset_parameters()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        randn = lambda *shape: torch.randn(shape, generator=g, device="cpu").to(DEVICE, DTYPE)
        moe.gate.weight.copy_(randn(E, d) * d**-0.5)
        x = randn(512, d) + 0.7 * randn(d)  # favours some
        max_loads = []
        for _ in range(80):
            _, aux = moe(x)
            max_loads.append(aux.expert_counts.max().item() / (512 * K / E))
            moe.update_selection_bias(aux.expert_counts, rate=0.01)
    assert max_loads[0] > 1.5 and max(max_loads[-10:]) < 1.15, max_loads


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(K=0), r"K must be in \[1, 6\] for E = 6, got 0"),
        (dict(K=7), r"K must be in \[1, 6\] for E = 6, got 7"),
        (dict(activation="swish"), "activation must be one of swiglu, geglu.*, got 'swish'"),
        (dict(scoring="softmax"), "scoring must be one of softmax_over_chosen.*, got 'softmax'"),
        (dict(rounding="nearst"), "rounding must be one of nearest.*, got 'nearst'"),
        (dict(rounding="up", m=0), "m must be >= 1, got 0"),
        (dict(rounding="up", scoring="sigmoid"), "scoring with token rounding must be one of .*, got 'sigmoid'"),
        (dict(selection_bias=True), "selection_bias requires a sigmoid scoring, got scoring='softmax_over_chosen'"),
        (dict(clamp=7.0, activation="geglu"), "clamp requires activation='swiglu', got clamp=7.0 and activation='geglu'"),
        (dict(clamp=-1.0), "clamp must be a finite number >= 0, got -1.0"),
        (dict(alpha=float("nan")), "alpha must be a finite number, got nan"),
        (dict(shared_intermediate_size=20), "shared_intermediate_size must be a positive multiple of 8, got 20"),
        (dict(shared_expert_gate=True), "shared_expert_gate=True requires shared_intermediate_size"),
        (dict(dtype=torch.float64), "^dtype must be float32, bfloat16 or float16, got torch.float64"),
        (dict(router_dtype=torch.int8), "router_dtype must be float32, bfloat16 or float16, got torch.int8"),
        (dict(column_blocks=0), "column_blocks must be >= 1, got 0"),
        (dict(z_coefficient=0.1), "z_coefficient=0.1 require return_aux=True"),
        (dict(balance_coefficient=0.2), "balance_coefficient=0.2 and .* require return_aux=True"),
    ],
    ids=short,
)
def test_wrong_options_are_refused(options, message):
    arguments = dict(d=d, n=n, E=E, K=K, dtype=DTYPE) | options
    refused(ValueError, message, MoE, **arguments)


def test_a_wrong_x_is_refused():
    moe = make()
    x = torch.zeros(5, d, dtype=DTYPE)
    for wrong in (x.double(), x.int()):
        refused((ValueError, NotImplementedError), f"x must be .*got {str(wrong.dtype)[6:]} with shape \\(5, 32", moe, wrong)
    refused(ValueError, f"x is torch.float16 and gate.weight is {DTYPE}, expected the same dtype", moe, x.half())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert moe(x.half())[0].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="x is a numpy.ndarray, expected a torch.Tensor"):
        moe(x.float().cpu().numpy())


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(5, 31\), expected \(..., 32\)"):
        make()(torch.zeros(5, 31, dtype=DTYPE))


def test_another_device_than_the_parameters_is_refused():
    x, _ = batch()
    with pytest.raises(ValueError, match=f"one device: x is on {x.device}, gate.weight is on meta"):
        MoE(d, n, E, K, device="meta")(x)


class Wrapper(torch.nn.Module):
    """In the place of a module, as tools that adapt weights put it: it shows none of the module's
    attributes, and its weight is another one while the module is called."""

    def __init__(self, wrapped, factor):
        super().__init__()
        self.base_layer, self.factor = wrapped, torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x, *args, **kwargs):
        weights = {"weight": self.base_layer.weight * self.factor.to(self.base_layer.weight.dtype)}
        return torch.func.functional_call(self.base_layer, weights, (x, *args), kwargs)


WRAPPED = {
    "gate": {},
    "gate, float32": dict(router_dtype=torch.float32),
    "gate, selection bias": dict(scoring="sigmoid", selection_bias=True),
    "shared_experts.gate_proj": dict(shared_intermediate_size=16),
    "shared_experts.down_proj": dict(shared_intermediate_size=16),
    "shared_expert_gate": dict(shared_intermediate_size=16, shared_expert_gate=True),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", WRAPPED)
def test_a_wrapped_part(where, training):
    """Whatever part is wrapped, the wrapper's weight is what is computed with, in both modes."""
    name, options = where.split(",")[0], WRAPPED[where]
    make_one = lambda: make(fused_decode=False, **options).train(training)  # noqa: E731
    plain, wrapped = make_one(), make_one()
    *parents, last = name.split(".")
    holder = wrapped.get_submodule(".".join(parents))
    wrapper = Wrapper(getattr(holder, last), 2.0)
    setattr(holder, last, wrapper)
    with torch.no_grad():
        plain.get_submodule(name).weight *= 2
    x, dO = batch()
    out, _ = wrapped(x)
    want, _ = plain(x)
    assert torch.equal(out, want)
    with torch.no_grad():
        assert torch.equal(wrapped(x)[0], want)
    got = torch.autograd.grad(out, [x, wrapper.factor, wrapper.base_layer.weight], dO)
    dx, dweight = torch.autograd.grad(want, [x, plain.get_submodule(name).weight], dO)
    assert torch.equal(got[2], 2 * dweight)
    if name == "gate":  # a wrapped gate is not in the layer's node, which rounds dX once less
        assert torch.linalg.vector_norm(got[0] - dx) <= 0.01 * torch.linalg.vector_norm(dx)
    else:
        assert torch.equal(got[0], dx)
    expected = (dweight * wrapper.base_layer.weight).sum(dtype=torch.float32)
    torch.testing.assert_close(got[1], expected, rtol=2e-2, atol=0.02 * float(dweight.norm()))
    if wrapped.get_submodule("gate") is wrapper and "selection_bias" in options:
        counts = torch.arange(E)
        wrapped.update_selection_bias(counts), plain.update_selection_bias(counts)
        changed = wrapper.base_layer.e_score_correction_bias
        assert torch.equal(changed, plain.gate.e_score_correction_bias)


class TestLossesUnderCheckpoint:
    """A reentrant checkpoint differentiates flat outputs: a loss that it drops is an error."""

    @pytest.fixture
    def layer(self):
        return make(balance_coefficient=10.0, router_dtype=torch.float32)

    def gradient(self, layer, objective):
        layer.zero_grad()
        objective.backward()
        return layer.gate.weight.grad

    def test_a_dropped_loss_is_an_error(self, layer):
        x, _ = batch()

        def block(x):
            out, aux = layer(torch.nn.functional.layer_norm(x, (d,)))
            return x + out, [aux.loss]

        out, aux = checkpoint(layer, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="aux.loss has no gradient.*use_reentrant=False"):
            (out.sum() + aux.loss).backward()
        out, _ = checkpoint(block, x, use_reentrant=True)
        refused(RuntimeError, "aux.loss has no gradient.*use_reentrant=False", out.sum().backward)

    def test_what_keeps_the_loss_is_none(self, layer):
        x, _ = batch()
        sum_of = lambda out, aux: out.sum(dtype=torch.float32) + aux.loss  # noqa: E731

        def flat(x):
            out, aux = layer(x)
            return out, aux.loss

        def of_its_own(x):
            out, aux = layer(x)
            return out, 10 * aux.balance

        want = self.gradient(layer, sum_of(*layer(x)))
        with torch.no_grad():
            layer(x)  # without evaluation mode, before what follows
        got = [self.gradient(layer, sum_of(*checkpoint(layer, x, use_reentrant=False)))]
        for function in (flat, of_its_own):
            out, loss = checkpoint(function, x, use_reentrant=True)
            got.append(self.gradient(layer, out.sum(dtype=torch.float32) + loss))
        assert all(torch.equal(gradient, want) for gradient in got)

    def test_evaluation_and_no_losses_are_none(self, layer):
        x, _ = batch()
        for quiet in (layer.eval(), make()):
            out, _ = checkpoint(quiet, x, use_reentrant=True)
            out.sum().backward()


def test_repr():
    text = repr(make(rounding="up", m=8, balance_coefficient=0.01, bias=True))
    groups = dict(rounding="up", m=8, rounding_tokens=4)
    assert "rounding='up', m=8, rounding_tokens=4" in repr(make(**groups))
    for part in (
        "K=2, scoring='softmax_over_chosen', rounding='up', m=8, balance_coefficient=0.01",
        f"(gate): Router(d=32, E=6, dtype={DTYPE})",
        "(experts): Experts(d=32, n=24, E=6, activation='swiglu', bias=True)",
    ):
        assert part in text
    text = repr(make(shared_intermediate_size=40, shared_expert_gate=True, router_bias=True))
    for part in (
        f"(gate): Router(d=32, E=6, dtype={DTYPE}, bias=True)",
        "(shared_experts): SharedExperts(\n    d=32, n=40, activation='swiglu'",
        "(shared_expert_gate): SharedExpertGate(rows=1, columns=32)",
    ):
        assert part in text
