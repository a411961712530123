"""tilemoe.from_modules against the loops over expert modules that it replaces: outputs, and every
gradient of every module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilemoe
from comparison import LIMITS, assert_close
from target import DEVICE, DTYPE, DTYPES

d, n, E, K, T = 32, 24, 6, 2, 50


def linear(*sizes, bias=False):
    return nn.Linear(*sizes, bias=bias, device="cpu").to(DEVICE)  # the same numbers on every device


class Mixtral(nn.Module):
    """w1, w3, w2, with act_fn a module."""

    def __init__(self, act_fn=None, bias=False):
        super().__init__()
        self.w1, self.w2, self.w3 = (linear(*s, bias=bias) for s in ((d, n), (n, d), (d, n)))
        self.act_fn = nn.SiLU() if act_fn is None else act_fn

    def forward(self, x):
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class DeepSeek(nn.Module):
    """gate_proj, up_proj, down_proj, with an activation that is a function."""

    def __init__(self, act_fn=F.silu, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(d, n, bias=bias) for _ in range(2))
        self.down_proj = linear(n, d, bias=bias)
        self.act = act_fn

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Fused(nn.Module):
    """gate_up_proj, down_proj, cut at a width of its own, with the activation in the code."""

    def __init__(self, bias=False):
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(d, 2 * n, bias=bias), linear(n, d, bias=bias)
        self.width = n

    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(self.width, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Clamped(DeepSeek):
    """gpt-oss's form."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        return self.down_proj(gate * torch.sigmoid(1.702 * gate) * (up + 1))


class Plain(nn.Module):
    """No gate."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = linear(d, n), linear(n, d)

    def forward(self, x):
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Gate(nn.Module):
    """DeepSeek-V3's router."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(E, d, device="cpu") * d**-0.5).to(DEVICE))
        self.register_buffer("e_score_correction_bias", torch.linspace(-0.3, 0.3, E, device=DEVICE))


def chosen(logits, gate, scoring):
    """-> probabilities (T, E), ids (T, K), as the models' own code has them."""
    if not scoring.startswith("sigmoid"):
        p = logits.softmax(-1)
        return p, p.topk(K, dim=-1).indices
    p = logits.sigmoid()  # DeepSeek-V3
    return p, (p + gate.e_score_correction_bias).topk(K, dim=-1).indices


def loop(gate, experts, x, ids, scoring, factor):
    """out (T, d) by a loop over the modules, in their dtype; ids (T, K): None where they choose."""
    logits = F.linear(x, gate.weight, getattr(gate, "bias", None))
    p, own_ids = chosen(logits, gate, scoring)
    ids = own_ids if ids is None else ids
    scores = p.gather(1, ids)
    if scoring != "softmax_over_all":  # all but OLMoE
        scores = factor * scores / scores.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, place = (ids == e).nonzero(as_tuple=True)
        if len(token):
            out = out.index_add(0, token, expert(x[token]) * scores[token, place, None])
    return out


def gradients(gate, experts, out, x, dO, names):
    """-> {our name: gradient}, the experts' stacked by `names`."""
    out.backward(dO)
    found = {"x": x.grad, "gate.weight": gate.weight.grad}
    if getattr(gate, "bias", None) is not None:
        found["gate.bias"] = gate.bias.grad
    zero = lambda p: torch.zeros_like(p) if p.grad is None else p.grad  # noqa: E731
    for ours, theirs in names.items():
        of, suffix = ("bias", "_bias") if ours.endswith("_bias") else ("weight", "")
        parts = [[zero(getattr(getattr(m, name), of)) for name in theirs] for m in experts]
        found["experts." + ours] = torch.stack([torch.cat(tensors) for tensors in parts])
    return found


def names_of(up, down, bias=False, ours="gate_up_proj"):
    found = {ours: up, "down_proj": down}
    return found | ({ours + "_bias": up, "down_proj_bias": down} if bias else {})


THREE = names_of(("gate_proj", "up_proj"), ("down_proj",))
CASES = {
    "Mixtral": (Mixtral, lambda: linear(d, E), {}, names_of(("w1", "w3"), ("w2",))),
    "DeepSeek-V3": (
        DeepSeek, Gate, dict(scoring="sigmoid_renormalized", routed_scaling_factor=2.5), THREE,
    ),
    "OLMoE": (
        lambda: DeepSeek(nn.SiLU()), lambda: linear(d, E), dict(scoring="softmax_over_all"), THREE,
    ),
    "biases": (
        lambda: Mixtral(nn.GELU(), bias=True), lambda: linear(d, E, bias=True), {},
        names_of(("w1", "w3"), ("w2",), bias=True),
    ),
    "fused": (
        lambda: Fused(bias=True), lambda: linear(d, E), {},
        names_of(("gate_up_proj",), ("down_proj",), bias=True),
    ),
    "gpt-oss's activation": (Clamped, lambda: linear(d, E), {}, THREE),
    "no gate": (
        Plain, lambda: linear(d, E), {}, names_of(("up_proj",), ("down_proj",), ours="up_proj"),
    ),
}  # fmt: skip
FORMS = {
    "Mixtral": "swiglu", "DeepSeek-V3": "swiglu", "OLMoE": "swiglu", "biases": "geglu",
    "fused": "geglu_tanh", "gpt-oss's activation": "swiglu", "no gate": "relu_squared",
}  # fmt: skip


def modules_of(case, dtype):
    torch.manual_seed(0)
    make_expert, make_gate, options, names = CASES[case]
    gate, experts = make_gate().to(dtype), nn.ModuleList(make_expert() for _ in range(E)).to(dtype)
    return gate, experts, options, names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_the_loops(case, dtype):
    """In float64 for the loop, whose choice is its own, but in 16 bits the layer's."""
    gate, experts, options, names = modules_of(case, dtype)
    moe = tilemoe.from_modules(gate, experts, top_k=K, **options)
    assert moe.experts.activation == FORMS[case]
    is_clamped = case == "gpt-oss's activation"
    form = moe.experts.clamp, moe.experts.alpha, moe.experts.up_shift
    assert form == ((7.0, 1.702, 1.0) if is_clamped else (0.0, 0.0, 0.0))
    assert all(p.dtype == dtype and p.requires_grad for p in moe.parameters())
    x, dO = (torch.randn(T, d, device="cpu").to(DEVICE, dtype) for _ in range(2))
    wide_gate, wide = copy.deepcopy(gate).double(), copy.deepcopy(experts).double()
    x64 = x.double().requires_grad_()
    scoring = options.get("scoring", "softmax_over_chosen")
    ids = None
    if dtype != torch.float32:
        bias = getattr(gate, "e_score_correction_bias", None)
        bias = None if bias is None else bias.float()
        how = dict(scoring=scoring, selection_bias=bias, ids_dtype=torch.int64)
        _, ids = tilemoe.top_k(moe.gate(x).detach(), K, **how)
    factor = options.get("routed_scaling_factor", 1.0)
    want = loop(wide_gate, wide, x64, ids, scoring, factor)
    expected = gradients(wide_gate, wide, want, x64, dO.double(), names)
    out = moe(x.requires_grad_())
    assert_close(out, want.detach(), "out", LIMITS[dtype])
    out.backward(dO)
    got = {"x": x.grad} | {name: p.grad for name, p in moe.named_parameters()}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        limits = LIMITS[dtype]
        if name.startswith("gate."):  # sums that nearly cancel
            limits = limits._replace(row=4 * limits.row, whole=4 * limits.whole)
        assert_close(gradient, expected[name], name, limits)


def test_it_copies_weights_and_keeps_mode_and_requires_grad():
    gate, experts, options, _ = modules_of("Mixtral", DTYPE)
    gate.eval().requires_grad_(False)
    for expert in experts:
        expert.w2.requires_grad_(False)
    moe = tilemoe.from_modules(gate, experts, top_k=K, return_aux=True, **options)
    assert not moe.training and moe.return_aux
    wanted = {name: p.requires_grad for name, p in moe.named_parameters()}
    assert wanted == {
        "gate.weight": False, "experts.gate_up_proj": True, "experts.down_proj": False,
    }  # fmt: skip
    before = [p.clone() for p in (*gate.parameters(), *experts.parameters())]
    with torch.no_grad():
        for p in moe.parameters():
            p.zero_()
    assert all(map(torch.equal, before, (*gate.parameters(), *experts.parameters())))


def test_a_gate_of_another_dtype():
    gate, experts, _, _ = modules_of("Mixtral", torch.bfloat16)
    moe = tilemoe.from_modules(gate.float(), experts, top_k=K)
    assert moe.gate.weight.dtype == torch.float32 and moe.router_dtype == torch.float32
    x = torch.randn(T, d, device=DEVICE).bfloat16()
    assert moe(x).dtype == torch.bfloat16 and moe.gate(x).dtype == torch.float32
    moe = tilemoe.from_modules(gate.bfloat16(), experts, top_k=K, router_dtype=torch.float32)
    assert moe.gate.weight.dtype == torch.float32
    assert torch.equal(moe.gate.weight, gate.weight.float())


class WithNorm(DeepSeek):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(d)

    def forward(self, x):
        return super().forward(self.norm(x))


class Residual(DeepSeek):
    def forward(self, x):
        return x + super().forward(x)


class Scaled(DeepSeek):
    def forward(self, x):
        return 3 * super().forward(x)


class Normed(DeepSeek):
    """Before its linear layers, without a module."""

    def forward(self, x):
        return super().forward(F.normalize(x, dim=-1))


class Tuple(DeepSeek):
    def forward(self, x):
        return super().forward(x), None


class Dropping(DeepSeek):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class TwoInputs(DeepSeek):
    def forward(self, x, weights):
        return super().forward(x) * weights


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = linear(d, n), linear(n, d)


class Quantized(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def with_child(expert, name, child):
    setattr(expert, name, child)
    return expert


def hooked(expert):
    expert.w1.register_forward_hook(lambda *_: None)
    return expert


REFUSED = {
    "norm": (WithNorm, r"experts.0.norm.weight has shape \(32,\), but .* weights and biases of gate_proj"),
    "residual": (Residual, r"cannot compute .*Residual"),
    "scaled": (Scaled, r"cannot compute .*Scaled: its forward must be a swiglu"),
    "normed": (Normed, r"experts.0, a Normed, computes something before gate_proj and up_proj or"),
    "tuple": (Tuple, r"cannot compute .*Tuple"),
    "two inputs": (TwoInputs, r"cannot compute .*TwoInputs: .*missing 1 required"),
    "functional dropout": (lambda: Dropping().eval(), r"cannot compute .*Dropping"),
    "dropout": (
        lambda: with_child(DeepSeek(), "drop", nn.Dropout(0.1)),
        r"experts.0.drop is a Dropout\(p=0.1",
    ),
    "activation": (lambda: Mixtral(nn.Mish()), r"cannot compute .*Mixtral: its forward must be a swi"),
    "names": (Other, "experts.0 is a Other with the children fc1, fc2, expected gate_proj/"),
    "a linear layer's class": (
        lambda: with_child(Mixtral(), "w3", Quantized(d, n, bias=False)),
        r"experts.0.w3 must be a torch.nn.Linear, got a Quantized",
    ),
    "a bias": (
        lambda: with_child(Mixtral(), "w3", linear(d, n, bias=True)),
        r"experts.0.w3 has one, w1 has none, expected all with a bias or none",
    ),
    "a shape": (
        lambda: with_child(Mixtral(), "w2", linear(n + 8, d)),
        r"experts.0.w2.weight has shape \(32, 32\), expected \(32, 24\)",
    ),
    "a hook": (lambda: hooked(Mixtral()), "experts.0.w1 has hooks or its own forward"),
    "meta": (lambda: Mixtral().to("meta"), "experts.0.w1.weight is on meta, expected loaded weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_its_name(case):
    make, message = REFUSED[case]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tilemoe.from_modules(linear(d, E), [make() for _ in range(E)], top_k=K)


DIFFERENT = {
    "a class": (DeepSeek, "experts.4 is a DeepSeek, expected the class of experts.0, Mixtral"),
    "an activation": (lambda: Mixtral(nn.GELU()), "experts.4 and experts.0 have different"),
    "a dtype": (lambda: Mixtral().half(), "experts.4.w1.weight is torch.float16 .*, expected .*, as in experts.0"),
    "biases": (lambda: Mixtral(bias=True), "w1.bias exists in only one of experts.4 and experts.0"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_experts_that_differ_are_refused(case):
    make, message = DIFFERENT[case]
    experts = [Mixtral() for _ in range(E)]
    experts[4] = make()
    with pytest.raises(ValueError, match=message):
        tilemoe.from_modules(linear(d, E), experts, top_k=K)


def test_gates_and_options_that_do_not_fit_are_refused():
    experts = [Mixtral() for _ in range(E)]

    def refused(kind, message, gate=None, given=experts, **options):
        with pytest.raises(kind, match=message):
            tilemoe.from_modules(gate or linear(d, E), given, **(dict(top_k=K) | options))

    shape = r"gate.weight has shape \(5, 32\) on .*, expected \(6, 32\)"
    refused(ValueError, shape, gate=linear(d, 5))
    refused(ValueError, r"gate must have a parameter `weight` \(6, 32\), got a ReLU", gate=nn.ReLU())
    extra = linear(d, E)
    extra.register_buffer("temperature", torch.ones(()))
    refused(ValueError, r"gate.temperature has shape \(\), but from_modules supports only weight, bias", gate=extra)
    refused(ValueError, "experts must have at least one torch.nn.Module, got none", given=[])
    refused(TypeError, "experts.0 must be a torch.nn.Module, got a builtins.int", given=[3])
    wrong = "activation is 'geglu', but the experts compute 'swiglu'"
    refused(ValueError, wrong, activation="geglu")
    refused(TypeError, "keyword argument 'hidden_size': its value follows from the modules", hidden_size=d)
    refused(TypeError, "keyword argument 'shared_intermediate_size'; add the", shared_intermediate_size=8)
    refused(ValueError, r"K must be in \[1, 6\] for E = 6, got 7", top_k=7)
    refused(ValueError, "pass return_aux=True", balance_coefficient=0.1)
    experts[2].w1.requires_grad_(False)
    refused(ValueError, "weight of w1 and w3 requires a gradient in some experts but not in others")
