"""Whether and how TileMoE computes an experts module of transformers: everything that
the class does must be recognised, and followed when it changes."""

import types
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torch.nn.utils import parametrize
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import reference
from checks import refused
import tilemoe.transformers
from tilemoe.integrations import transformers_forms, transformers_loop, transformers_norm
from transformers_support import (
    E, assert_same, build, d, decorated_classes, fill, n, problem, refused_classes, relative_error,
    run, run_eager,
)  # fmt: skip

CLASSES = [cls for _, cls in decorated_classes()]
REFUSED_CLASSES = refused_classes()
KINDS = [MixtralExperts, GptOssExperts, NemotronHExperts]
each_kind = pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()


def tilemoe_module(cls):
    module = fill(cls(build(MixtralExperts).config) if cls not in CLASSES else build(cls))
    module.config._experts_implementation = "tilemoe"
    return module


def prepare(module):
    return tilemoe.transformers.prepare(torch.nn.ModuleList([module]))


# ---------------------------------------------------------------- a class's own forward


@use_experts_implementation
class Plain(torch.nn.Module):
    """Experts with a forward of their own, for stand-ins that do more in it."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.top_k = E, 2
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(E, 2 * n, d))
        self.down_proj = torch.nn.Parameter(torch.zeros(E, d, n))
        self.act_fn = torch.nn.SiLU()
        self.add(config)

    def add(self, config):
        pass

    def after(self, Y, expert):
        return Y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            H = torch.nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])
            Y = torch.nn.functional.linear(self._apply_gate(H), self.down_proj[expert])
            Y = self.after(Y, expert) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, Y.to(out.dtype))
        return out


def scaled(name, value):
    """An attribute, and a function that multiplies an expert's output by it."""
    make = {name: lambda: value}

    def after(self, Y, expert):
        factor = getattr(self, name)
        return Y * (factor[expert] if torch.is_tensor(factor) else factor)

    return make, after


THREES = torch.full((E,), 3.0)
# Name of the class: what its forward has, {attribute: function that makes it}; what it does with an
# expert's output; how it is refused.
OUTSIDE_THE_GATE = {
    "WithNorm": (
        {"post_norm": lambda: torch.nn.RMSNorm(d)}, lambda self, Y, e: self.post_norm(Y),
        "submodule post_norm",
    ),
    "WithBuffer": (*scaled("expert_scale", torch.nn.Buffer(THREES)), "buffer expert_scale"),
    "WithParameter": (
        *scaled("expert_scale", torch.nn.Parameter(THREES)), "parameter expert_scale",
    ),
    "WithFlag": (
        {"has_output_norm": lambda: True},
        lambda self, Y, e: Y / Y.norm(dim=-1, keepdim=True) if self.has_output_norm else Y,
        "flag has_output_norm",
    ),
    "WithNumber": (*scaled("output_scale", 3.0), "differ by 200 %.* may read its output_scale"),
    "WithSlightNumber": (
        *scaled("output_scale", 1.01), "differ by 1 %.* may read its output_scale",
    ),
    "WithTensor": (*scaled("scales", THREES), "differ by 200 %.* may read its scales"),
    "WithCap": (  # seen at large values alone
        {"cap": lambda: 1e6}, lambda self, Y, e: Y.clamp(-self.cap, self.cap),
        "differ by .* may read its cap",
    ),
    # Right values, and no gradient of the weights.
    "WithDetached": ({}, lambda self, Y, e: Y.detach() + (Y - Y.detach()) * 0.5, "differ by 50 %"),
    "WithDropout": (  # in training alone
        {"drop_rate": lambda: 0.5},
        lambda self, Y, e: torch.nn.functional.dropout(Y, self.drop_rate, self.training),
        "differ by .* may read its drop_rate",
    ),
}  # fmt: skip


def outside(name):
    """-> the class of that name."""
    make, after, _ = OUTSIDE_THE_GATE[name]

    def add(self, config):
        for attribute, value in make.items():
            setattr(self, attribute, value())

    return type(name, (Plain,), {"add": add, "after": after})


class SizesInConfig(Plain):
    """Cannot run with other sizes than its own: what it contains decides alone."""

    def after(self, Y, expert):
        return Y.view(-1, self.config.hidden_size)


@pytest.mark.parametrize("name", OUTSIDE_THE_GATE)
def test_what_a_class_does_outside_its_gate_is_refused(name):
    module = tilemoe_module(outside(name)).eval()
    message = f"{name}: .*{OUTSIDE_THE_GATE[name][-1]}"
    refused(NotImplementedError, message, prepare, module)
    refused(NotImplementedError, message, module, *problem()[:3])


@pytest.mark.parametrize("cls", [Plain, SizesInConfig])
def test_a_forward_of_its_own_that_does_no_more_is_computed(cls):
    module = tilemoe_module(cls)
    assert_same(run(module, *problem()), run_eager(module, *problem()))


def test_a_number_that_is_added_later_is_noticed():
    module = tilemoe_module(outside("WithNumber"))
    module.output_scale = 1.0
    assert_same(run(module, *problem()), run_eager(module, *problem()))
    module.output_scale = 3.0
    refused(NotImplementedError, "output_scale", module, *problem()[:3])


def test_around_the_interface_a_subclass_may_do_anything():
    """Its forward calls TileMoE, and adds a result of its own."""

    class Scaled(MixtralExperts):
        @torch.no_grad()
        def forward(self, *args):
            return 3 * super().forward(*args)

    module, plain = tilemoe_module(Scaled), tilemoe_module(MixtralExperts)
    assert prepare(module)
    x, ids, scores, _ = problem()
    assert torch.equal(module(x, ids, scores), 3 * plain(x, ids, scores))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_own_forward_of_every_class_is_compared(cls):
    """Also if E, d and n are equal, or 2n and d; and whatever the tensors are: sharded or quantized
    ones cannot be copied."""
    module = fill(build(cls))
    try:
        form = prepare(module)["0"]
    except NotImplementedError as refusal:
        assert cls.__name__ in REFUSED_CLASSES
        print(refusal)
        return
    between = transformers_forms.between(form)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for sizes in [(E, d, n), (16, 16, 16), (16, 32, 16), (32, 32, 16)]:
        names = ("num_experts",), ("hidden_dim", "hidden_size"), ("intermediate_dim", "expert_dim")
        for attributes, size in zip(names, sizes, strict=True):
            for name in attributes:
                if hasattr(module, name):
                    setattr(module, name, size)
        of_E, of_d, of_n = sizes
        rows_1 = of_n * (1 + module.has_gate)
        shapes = {first: (of_E, rows_1, of_d), "down_proj": (of_E, of_d, of_n)}
        for name, (experts, rows, columns) in shapes.items():
            shape = (experts, columns, rows) if module.is_transposed else (experts, rows, columns)
            setattr(module, name, torch.nn.Parameter(torch.empty(shape, device="meta")))
        norm = transformers_norm.norm_of(module)
        if norm is not None:
            norm.weight = torch.nn.Parameter(torch.empty(of_d, device="meta"))
        error = transformers_loop.difference(module, between)
        assert error <= 1e-5, (sizes, error)
        # A norm removes a factor of all columns.
        other = lambda H: 1.01 * between(H) if norm is None else between(1.05 * H)
        assert transformers_loop.difference(module, other) >= 5e-3


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@each_kind
def test_parametrized_weights(cls):
    """As PEFT and bitsandbytes place what they add."""
    module = tilemoe_module(cls)
    prepare(module)
    parametrize.register_parametrization(module, "down_proj", Doubled())
    assert prepare(module)
    x, ids, scores, _ = problem()
    out = module(x, ids, scores)
    module.config._experts_implementation = "eager"
    assert relative_error(out, module(x, ids, scores).double()) <= 1e-6


# ---------------------------------------------------------------- the gate


def gelu_gate(self, H):
    gate, up = H.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


class OfGateAndUp(torch.nn.Module):
    """An act_fn of two columns, that computes in `dtype`."""

    def __init__(self, function, dtype):
        super().__init__()
        self.function, self.dtype = function, dtype

    def forward(self, gate, up):
        return self.function(gate.to(self.dtype), up.to(self.dtype)).to(gate.dtype)


GATED = [name for name, (gated, _) in reference.ACTIVATIONS.items() if gated]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GATED)
def test_an_activation_of_gate_and_up(name, dtype):
    """Each of the list, as Inkling 2 states its own."""
    module = tilemoe_module(Plain)
    module.act_fn = OfGateAndUp(reference.ACTIVATIONS[name][1], dtype)
    module._apply_gate = lambda H: module.act_fn(*H.chunk(2, dim=-1))
    assert prepare(module)["0"] == transformers_forms.Form(name)
    assert_same(run(module, *problem()), run_eager(module, *problem()))


@pytest.mark.parametrize("first", ["patched first", "computed first"])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "function"])
def test_a_gate_patched_on_one_instance(first, bound):
    patched, other = tilemoe_module(Plain), tilemoe_module(Plain)
    data = problem()
    if first == "computed first":
        run(patched, *data)
    gate = types.MethodType(gelu_gate, patched)
    patched._apply_gate = gate if bound else lambda H: gelu_gate(patched, H)
    got = run(patched, *data)
    assert_same(got, run_eager(patched, *data))
    assert_same(run(other, *data), run_eager(other, *data))
    assert relative_error(got["output"], run(other, *data)["output"].double()) > 0.1
    del patched._apply_gate
    assert_same(run(patched, *data), run_eager(patched, *data))


def test_a_gate_patched_where_the_own_forward_does_not_call_it():
    """The other implementations follow the gate, `eager` does not."""
    patched = tilemoe_module(MixtralExperts)
    data = problem()
    run(patched, *data)
    patched._apply_gate = types.MethodType(gelu_gate, patched)
    got = run(patched, *data)
    patched.config._experts_implementation = "batched_mm"
    want = run(patched, *data)
    assert all(relative_error(got[name], want[name].double()) <= 1e-6 for name in want)


class InFloat32(Plain):
    def _apply_gate(self, H):
        gate, up = H.chunk(2, dim=-1)
        return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


class ClampedInFloat32(Plain):
    def _apply_gate(self, H):
        gate, up = H.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(H.dtype)


class WithoutGateInFloat32(NemotronHExperts):
    def __init__(self, config):
        super().__init__(build(NemotronHExperts).config)
        act = self.act_fn
        del self.act_fn
        self.act_fn = lambda x: act(x.float()).to(x.dtype)


@pytest.mark.parametrize("cls", [InFloat32, ClampedInFloat32, WithoutGateInFloat32])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "relu"])
def test_gates_through_float32(cls, activation):
    module = tilemoe_module(cls)
    if cls is InFloat32:
        module.act_fn = transformers.activations.ACT2FN[activation]
    module.config._experts_implementation = "tilemoe"
    (form,) = prepare(module).values()
    print(form)
    if cls is ClampedInFloat32:
        assert form[2:] == (7.0, 1.702, 1.0)
    got, want = run(module, *problem()), run_eager(module, *problem())
    assert all(relative_error(got[name], want[name]) <= 2e-6 for name in want)


class AlmostSwiglu(Plain):
    def _apply_gate(self, H):
        gate, up = H.float().chunk(2, dim=-1)
        return (self.act_fn(gate) * up * (1 + 1e-5)).to(H.dtype)


class In16Bits(Plain):
    def _apply_gate(self, H):
        gate, up = H.bfloat16().chunk(2, dim=-1)
        return (self.act_fn(gate) * up).to(H.dtype)


@pytest.mark.parametrize(
    "cls, differs", [(AlmostSwiglu, "0.001 %"), (In16Bits, r"0\.[1-6]\d? %")], ids=["1e-5", "bf16"]
)
def test_a_refusal_says_by_how_much_a_gate_differs(cls, differs):
    with pytest.raises(NotImplementedError, match=f"nearest, swiglu, differ by {differs}"):
        prepare(tilemoe_module(cls))


# ---------------------------------------------------------------- dtypes and devices


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_float32_biases_of_16_bit_weights(autocast):
    """As PEFT's prepare_model_for_kbit_training leaves them."""
    module = fill(build(GptOssExperts), meets_clamp=False).bfloat16()
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        setattr(module, name, torch.nn.Parameter(getattr(module, name).data.float()))
    module.config._experts_implementation = "tilemoe"
    assert prepare(module)
    x, ids, scores, dO = problem()
    data = x.bfloat16(), ids, scores.bfloat16(), dO.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got = run(module, *data)
    want = run_eager(module, *data)
    for name, tensor in got.items():
        assert relative_error(tensor, want[name]) <= 1e-2, name
    assert got["d gate_up_proj_bias"].dtype == got["d down_proj_bias"].dtype == torch.float32
    assert got["d gate_up_proj"].dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", ["first", "down_proj"])
@each_kind
def test_weights_of_two_dtypes_are_refused_by_name(cls, name, autocast):
    module = tilemoe_module(cls).bfloat16()
    name = {True: "gate_up_proj", False: "up_proj"}[module.has_gate] if name == "first" else name
    setattr(module, name, torch.nn.Parameter(getattr(module, name).data.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        if autocast:  # casts both
            assert prepare(module) and module(*problem()[:3]).isfinite().all()
            return
        with pytest.raises(NotImplementedError, match=f"{cls.__qualname__}: expected one dtype: its ") as refusal:
            prepare(module)
        assert f"its {name} is torch.float32" in str(refusal.value)


def test_weights_on_two_devices_are_refused_by_name():
    on = {name: types.SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
          for name, device in (("gate_up_proj", "cpu"), ("down_proj", "cuda:0"))}  # fmt: skip
    seen = types.SimpleNamespace(_parameters=on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilemoe._library, "_no_cuda", None)
        with pytest.raises(NotImplementedError, match="its gate_up_proj is on cpu, its down_proj is on cuda:0"):
            transformers_forms.refuse_weights(seen)


@pytest.mark.parametrize("used", [False, True], ids=["before its first use", "after it"])
def test_a_quantized_weight_is_refused_by_name(used):
    """A weight's replacement, as bitsandbytes' Params4bit is."""

    class Params4bit(torch.nn.Parameter):
        pass

    module = tilemoe_module(MixtralExperts)
    if used:
        run(module, *problem())
    packed = torch.zeros(module.down_proj.numel() // 2, 1, dtype=torch.uint8)
    module.down_proj = Params4bit(packed, requires_grad=False)
    for call in (lambda: prepare(module), lambda: module(*problem()[:3])):
        refused(NotImplementedError, "down_proj is a Params4bit of torch.uint8", call)


# ---------------------------------------------------------------- nothing is computed


class UndecoratedExperts(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    "module, why",
    [
        (UndecoratedExperts(), "0 is a UndecoratedExperts, which is not decorated with"),
        (torch.nn.Linear(2, 2), "it has no experts module"),
        (torch.nn.ModuleDict({"experts": torch.nn.ModuleList()}), "0.experts is a ModuleList"),
    ],
    ids=["undecorated", "none", "list"],
)
def test_a_model_of_which_nothing_is_computed(module, why):
    with pytest.warns(UserWarning, match=f"computes nothing in this ModuleList: {why}") as seen:
        assert prepare(module) == {}
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(tilemoe_module(MixtralExperts))


# ---------------------------------------------------------------- compiled


def test_compiled_after_one_forward():
    """In place of prepare(): what the forward found is a constant of the graph."""
    module = tilemoe_module(GptOssExperts)
    x, ids, scores, _ = problem()
    want = module(x, ids, scores)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x, ids, scores), want.double()) <= 1e-6


def test_compiled_before_any_forward():
    module = tilemoe_module(GptOssExperts)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    message = r"call tilemoe.transformers.prepare\(model\), or the model"
    refused(Exception, message, compiled, *problem()[:3])
