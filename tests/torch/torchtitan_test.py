"""torchtitan's experts, its own and TileMoE's in their place, against a float64 loop over experts.

Both compute in bfloat16, so the bound on ours is their error, over eight problems together.
"""

import importlib.util
import sys
import types
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import torchtitan.distributed.spmd_types
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

import tilemoe
import tilemoe.torchtitan
import torchtitan_worker
from processes import launch as launch_processes
from target import DEVICE
from tilemoe.state_dict import from_torchtitan, to_torchtitan

D, N, E = 24, 16, 5
COUNTS = torch.tensor([7, 0, 13, 1, 10])  # one expert has nothing to do
R = int(COUNTS.sum())


def normal(*shape, seed):
    """The same values on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(DEVICE)


def gpt_oss_experts():
    """GptOssGroupedExperts of its own file: its package's other parts want a newer torch."""
    name = "torchtitan.models.gpt_oss"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
        sys.modules[name] = package
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    return GptOssGroupedExperts


CLASSES = {"swiglu": lambda: GroupedExperts, "gpt_oss": gpt_oss_experts}
each_class = pytest.mark.parametrize("kind", CLASSES)


def build(kind, ours, reach=1.0):
    """torchtitan's experts of that kind, or ours as the override makes them; equal weights. `reach`
    is the scale of H: at 3 some of it is beyond gpt-oss's clamp.
    """
    cfg = CLASSES[kind]().Config(dim=D, hidden_dim=N, num_experts=E)
    module = (tilemoe.torchtitan.experts(cfg) if ours else cfg).build()
    g = torch.Generator().manual_seed(0)
    for name, p in module.named_parameters():
        scale = 0.5 if p.ndim == 2 else p.shape[-1] ** -0.5
        if name == "mlp1_weight_EGD":
            scale *= reach
        values = torch.randn(p.shape, generator=g, device="cpu") * scale
        p.data = values.bfloat16().float().to(DEVICE)
    return module.to(DEVICE)


def rows(seed=1, more=0):
    """x (R + more, D), dO of its shape."""
    x, dO = normal(2, R + more, D, seed=seed)
    return x.bfloat16(), dO.bfloat16()


def loop(module, x, counts):
    """The experts one by one, in x's dtype."""
    weights = {name: p.to(x.dtype) for name, p in module.named_parameters()}
    outs = []
    for e, rows_of_e in enumerate(x.split(counts.tolist())):
        w = {name: p[e] for name, p in weights.items()}
        if "w1_EFD" in w:
            A = F.silu(rows_of_e @ w["w1_EFD"].T) * (rows_of_e @ w["w3_EFD"].T)
            outs.append(A @ w["w2_EDF"].T)
        else:
            H = rows_of_e @ w["mlp1_weight_EGD"].T + w["mlp1_bias_EG"]
            gate, up = H[:, ::2].clamp(max=7.0), H[:, 1::2].clamp(-7.0, 7.0)
            A = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            outs.append(A @ w["mlp2_weight_EDF"].T + w["mlp2_bias_ED"])
    return torch.cat(outs)


def run(module, x, dO, forward=None):
    """-> {name: tensor}: the output and every gradient."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    out = (forward or module.__call__)(x, COUNTS)
    out.backward(dO.to(out.dtype))
    gradients = {f"d {name}": p.grad for name, p in module.named_parameters()}
    return {"output": out, "d x": x.grad} | gradients


def squared_errors(module, forward=None):
    """{name: sum over eight problems of the squared relative error}"""
    total = {}
    for seed in range(8):
        x, dO = rows(seed)
        want = run(module, x.double(), dO.double(), lambda x, counts: loop(module, x, counts))
        want = {name: tensor.detach().clone().double() for name, tensor in want.items()}
        for name, tensor in run(module, x, dO, forward).items():
            wrong = torch.zeros(()) if tensor is None else tensor.double()
            error = ((wrong - want[name]).norm() / want[name].norm()).item()
            total[name] = total.get(name, 0.0) + error**2
    return total


def out_of_bounds(found, theirs):
    """[name]: what is farther than theirs by 5 % and than 0.2 %, the error of one rounding: theirs
    has the last bias's gradient, a plain sum of dO, in float32 where ours is bfloat16 once."""
    return [
        name
        for name, bound in theirs.items()
        if not found[name] <= max(1.05**2 * bound, 8 * 2e-3**2)
    ]


@each_class
def test_as_near_as_torchtitans_own(kind):
    theirs, ours = squared_errors(build(kind, ours=False)), squared_errors(build(kind, ours=True))
    assert ours.keys() == theirs.keys()
    for name, bound in theirs.items():
        print(f"{kind} {name}: {(ours[name] / 8) ** 0.5:.3%}, theirs {(bound / 8) ** 0.5:.3%}")
    assert out_of_bounds(ours, theirs) == []


def test_as_near_where_the_clamp_is_met(monkeypatch):
    """By the output: a value that rounds across the clamp changes its slope from 1 to 0, and a
    few such decide a gradient's error, theirs as ours."""
    theirs = squared_errors(build("gpt_oss", ours=False, reach=3.0))
    module = build("gpt_oss", ours=True, reach=3.0)
    assert squared_errors(module)["output"] <= 1.05**2 * theirs["output"]
    real = tilemoe.grouped_experts
    monkeypatch.setattr(
        tilemoe.functional,
        "grouped_experts",
        lambda *args, **k: real(*args, **(k | {"clamp": 0.0})),
    )
    assert not squared_errors(module)["output"] <= 1.05**2 * theirs["output"]


SLIPS = {
    "zeros": lambda real, x, c, W1, W2, **k: real(x, c, W1, W2, **k) * 0,
    "gate and up are swapped": lambda real, x, c, W1, W2, **k: (
        real(x, c, k.pop("W1_up"), W2, W1_up=W1, **k)
        if "W1_up" in k
        else real(x, c, W1.unflatten(1, (N, 2)).flip(2).flatten(1, 2), W2, **k)
    ),
    "an expert is dropped": lambda real, x, c, W1, W2, **k: real(
        x, c, W1, W2 * (torch.arange(E) != 2).view(E, 1, 1), **k
    ),
    "rows are given to the wrong expert": lambda real, x, c, W1, W2, **k: real(
        x, c.roll(1), W1, W2, **k
    ),
    "another activation": lambda real, x, c, W1, W2, **k: real(
        x, c, W1, W2, **(k | {"activation": "geglu", "clamp": 0.0, "alpha": 0.0, "up_shift": 0.0})
    ),
    "no gradient of x": lambda real, x, c, W1, W2, **k: real(x.detach(), c, W1, W2, **k),
    "no gradient of W1": lambda real, x, c, W1, W2, **k: real(x, c, W1.detach(), W2, **k),
    "no gradient of W2": lambda real, x, c, W1, W2, **k: real(x, c, W1, W2.detach(), **k),
}
GPT_OSS_SLIPS = {
    "b1 is ignored": lambda real, x, c, W1, W2, **k: real(x, c, W1, W2, **(k | {"b1": None})),
    "b2 is ignored": lambda real, x, c, W1, W2, **k: real(x, c, W1, W2, **(k | {"b2": None})),
}


@each_class
def test_every_slip_is_noticed(kind, monkeypatch):
    bounds = squared_errors(build(kind, ours=False))
    module = build(kind, ours=True)
    real = tilemoe.grouped_experts
    for slip, function in (SLIPS | (GPT_OSS_SLIPS if kind == "gpt_oss" else {})).items():
        with monkeypatch.context() as patch:
            patch.setattr(
                tilemoe.functional,
                "grouped_experts",
                lambda *args, function=function, **k: function(real, *args, **k),
            )
            found = squared_errors(module)
        assert out_of_bounds(found, bounds), slip


@each_class
def test_rows_past_the_counts_are_zero_and_not_read(kind):
    module = build(kind, ours=True)
    x, dO = rows(more=9)
    x[R:] = torch.nan
    got = run(module, x, dO)
    assert (got["output"][R:] == 0).all() and (got["d x"][R:] == 0).all()
    want = run(module, x[:R], dO[:R])
    assert torch.equal(got["output"][:R], want["output"])
    assert all(torch.equal(got[name], want[name]) for name in got if "EDF" in name or "ED" in name)


def layer_config():
    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=D,
                hidden_dim=N,
                num_experts=E,
                param_init={
                    name: lambda t: torch.nn.init.normal_(t, std=0.2)
                    for name in ("w1_EFD", "w2_EDF", "w3_EFD")
                },
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=2),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E,
            gate=Linear.Config(
                in_features=D, out_features=E, param_init={"weight": torch.nn.init.normal_}
            ),
            top_k=2,
        ),
    )


def overridden(name):
    """-> torchtitan's layer, and the same with an override, of equal weights."""
    theirs, cfg = layer_config().build(), layer_config()
    log = apply_overrides(OverrideConfig(imports=[f"tilemoe.torchtitan.{name}"]), cfg)
    assert len(log) == 1 and {"experts": "TileMoEGroupedExperts"}.get(name, "TileMoERouted") in log[0]
    ours = cfg.build()
    theirs.init_states()
    ours.init_states()  # the initialisers came along
    std = ours.routed_experts.inner_experts.w3_EFD.detach().std().item()
    assert std == pytest.approx(0.2, rel=0.1)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # torchtitan's router requires float32
@pytest.mark.parametrize("override", ["experts", "routed_experts"])
def test_an_override_in_a_layer(override, monkeypatch):
    """Of the routed experts one call of tilemoe.moe, of tokens that nobody sorted. X is kept once,
    not once a pair, and next to it H, and neither rows nor results of pairs."""
    theirs, ours = overridden(override)
    calls, moe = [], tilemoe.functional.moe
    called = lambda *args, **k: calls.append(args[0].shape) or moe(*args, **k)  # noqa: E731
    monkeypatch.setattr(tilemoe.functional, "moe", called)
    x, dO = (normal(2, 19, D, seed=seed) for seed in (3, 4))
    results, kept = [], []
    for layer in (theirs, ours):
        leaf, shapes = x.clone().requires_grad_(), []
        pack = lambda t: (shapes.append(tuple(t.shape)), t)[1]  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(leaf)
        out.backward(dO)
        results.append([out.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
        kept.append(shapes)
    for got, want in zip(results[1], results[0], strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm() > 0
    if override == "experts":
        inner = ours.routed_experts.inner_experts
        assert isinstance(inner, tilemoe.torchtitan.TileMoEGroupedExperts)
        return
    pairs = 2 * 38
    assert calls == [x.shape]
    assert (pairs, D) in kept[0] and (pairs, D) not in kept[1] and (pairs, N) not in kept[1]
    assert kept[1].count((pairs, 2 * N)) == 1


@pytest.mark.cpu  # gloo
def test_its_dispatchers_over_two_processes(tmp_path):
    """HybridEP's, too, if this torch has what torchtitan's part of it requires."""
    names = [scenario.__name__ for scenario in torchtitan_worker.SCENARIOS]
    for rank, result in enumerate(launch_processes(torchtitan_worker.__file__, names, 2, tmp_path, "cpu")):
        assert not any(result.values()), f"rank {rank}: {result}"


def test_a_dispatcher_that_is_not_known_stays():
    class Counting(LocalTokenDispatcher):
        calls = 0

        @dataclass(kw_only=True, slots=True)
        class Config(LocalTokenDispatcher.Config):
            pass

        def dispatch(self, *args):
            Counting.calls += 1
            return super().dispatch(*args)

    cfg = layer_config().routed_experts
    cfg.token_dispatcher = Counting.Config(num_experts=E, top_k=2)
    module = tilemoe.torchtitan.routed_experts(cfg).build().to(DEVICE)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    x = normal(1, 7, D, seed=5)
    ids = torch.arange(14, device=DEVICE).view(1, 7, 2) % E
    scores = normal(1, 7, 2, seed=6)
    counts = torch.bincount(ids.flatten(), minlength=E)
    out = module(x, scores, ids, counts)
    module.token_dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=2).build()
    routed = module(x, scores, ids, counts)
    assert Counting.calls == 1
    assert (out - routed).norm() <= 2e-2 * routed.norm()


def test_a_derived_region_is_refused():
    class Derived(RoutedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(RoutedExperts.Config):
            pass

    cfg = layer_config().routed_experts
    parts = dict(inner_experts=cfg.inner_experts, token_dispatcher=cfg.token_dispatcher)
    with pytest.raises(NotImplementedError, match="Derived.Config"):
        tilemoe.torchtitan.routed_experts(Derived.Config(**parts))


def test_a_bias_is_added_once_over_tensor_parallel_ranks(monkeypatch):
    """Under torchtitan's spmd_types: parameters are plain, and the region's mesh has the ranks."""
    whole = build("gpt_oss", ours=True)
    x, _ = rows()
    want = whole(x, COUNTS.to(DEVICE)).float()
    parts = 0
    for half in (slice(0, N // 2), slice(N // 2, N)):
        cfg = gpt_oss_experts().Config(dim=D, hidden_dim=N // 2, num_experts=E)
        part = tilemoe.torchtitan.experts(cfg).build().to(DEVICE)
        both = slice(2 * half.start, 2 * half.stop)
        for name, own in (("mlp1_weight_EGD", both), ("mlp1_bias_EG", both), ("mlp2_weight_EDF", half)):
            of = getattr(whole, name).data
            getattr(part, name).data = of[:, own] if own is both else of[..., own].contiguous()
        part.mlp2_bias_ED.data = whole.mlp2_bias_ED.data
        mesh = types.SimpleNamespace(mesh_dim_names=("dp", "tp"), size=lambda axis: (3, 2)[axis])
        monkeypatch.setattr(torchtitan.distributed.spmd_types, "current_spmd_mesh", lambda: mesh)
        parts = parts + part(x, COUNTS.to(DEVICE)).float()
        monkeypatch.undo()
    assert (parts - want).norm() <= 5e-3 * want.norm()
    once = whole.mlp2_bias_ED.detach().repeat_interleave(COUNTS.to(DEVICE), 0)
    assert once.norm() > 0.1 * want.norm()


@pytest.mark.cpu  # in float32
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_a_layers_state_dict_is_the_modules_too():
    theirs = layer_config().build()
    theirs.init_states()
    theirs.expert_bias_E.copy_(torch.linspace(-0.3, 0.3, E))
    ours = tilemoe.MoE(D, N, E, 2, return_aux=True, scoring="sigmoid", selection_bias=True)
    ours.load_state_dict(from_torchtitan(theirs.state_dict()))
    x = normal(2, 19, D, seed=3)
    want = theirs(x).detach()
    assert (ours(x)[0] - want).norm() <= 2e-2 * want.norm()  # torchtitan's experts are in bfloat16
    back = to_torchtitan(ours.state_dict())
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


def test_a_derived_class_is_refused():
    class Derived(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    with pytest.raises(NotImplementedError, match="Derived.Config"):
        tilemoe.torchtitan.experts(Derived.Config(dim=D, hidden_dim=N, num_experts=E))
