"""MoE modules to test, and what they should compute: the float64 reference on the module's own
parameters."""

import torch

import reference
import target
from checks import same_bits  # noqa: F401
from comparison import LIMITS, assert_close
from stored import rounded
from tilemoe.module import MoE

d, n, E, K = 32, 24, 6, 2
SHAPE = (3, 13)  # of a batch; with d at the end
CHOICE = ("ids", "scores")  # of an aux: aux_choice_test.py compares them


def make(seed=0, sizes=(d, n, E, K), **options):
    """A small MoE with unit-scale parameters, biases and selection bias included."""
    generator = torch.Generator().manual_seed(seed)
    dtype = options.pop("dtype", target.DTYPE)
    moe = MoE(*sizes, return_aux=True, dtype=dtype, **options)
    with torch.no_grad():
        for name, p in moe.named_parameters():
            scale = 0.5 if name.endswith("_bias") else p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * scale)
        bias = moe.gate.e_score_correction_bias
        if bias is not None:
            bias.copy_(torch.randn(moe.E, generator=generator, device="cpu") * 0.3)
    return moe


def batch(seed=1, dtype=None, shape=SHAPE, width=d):
    """x, dO (..., width)."""
    generator = torch.Generator().manual_seed(seed)
    x, dO = (torch.randn(*shape, width, generator=generator, device="cpu") for _ in range(2))
    x, dO = (t.to(target.DEVICE, dtype or target.DTYPE) for t in (x, dO))
    return x.requires_grad_(), dO


def run(moe, x, dO, **arguments):
    """-> {name: tensor}: out, every loss and count, and every gradient of <out, dO> + loss."""
    out, aux = moe(x, **arguments)
    parameters = {name: p for name, p in moe.named_parameters() if p.requires_grad}
    wanted = parameters | ({"x": x} if x.requires_grad else {})
    objective = (out * dO).sum(dtype=torch.float32) + aux.loss
    gradients = torch.autograd.grad(objective, list(wanted.values()))
    return {"out": out, **aux._asdict()} | {"d" + k: g for k, g in zip(wanted, gradients)}


def expected(moe, x, dO, seed=None, offset=None, ids=None, stored=None):
    """The same in float64, rounding to `stored` where the experts store, if that is given. The logits
    have the module's own values, so that the same experts are chosen, and the gradient of their
    float64 GEMM."""
    p = {k: v.detach().double().requires_grad_() for k, v in moe.named_parameters()}
    up = "experts.gate_up_proj" if "experts.gate_up_proj" in p else "experts.up_proj"
    x64 = x.detach().double().requires_grad_()
    flat = x64.reshape(-1, d)
    logits = flat @ p["gate.weight"].T
    if moe.gate.bias is not None:
        logits = logits + p["gate.bias"]
    with torch.no_grad():
        logits_of_module = moe.gate(x.reshape(-1, d)).double()
    logits = _with_value(logits, logits_of_module)
    names = ("activation", "clamp", "alpha", "up_shift")
    form = {name: getattr(moe.experts, name) for name in names}
    if ids is None:
        router = logits
        choice = dict(
            K=K, scoring=moe.scoring, selection_bias=moe.gate.e_score_correction_bias,
            n_group=moe.n_group, topk_group=moe.topk_group, group_score=moe.group_score,
            routed_scaling_factor=moe.routed_scaling_factor,
            rounding=moe.rounding if moe.training else None, m=moe.m,
            rounding_tokens=moe.rounding_tokens, seed=seed, offset=offset,
        )  # fmt: skip
    else:
        choice = dict(ids=ids.reshape(-1, K))
        how = dict(scoring=moe.scoring, routed_scaling_factor=moe.routed_scaling_factor)
        router = reference.scores_at(logits, choice["ids"], **how)
    out, aux = reference.moe(
        flat, router, p[up], p["experts.down_proj"], b1=p.get(up + "_bias"),
        b2=p.get("experts.down_proj_bias"), **form,
        addend=expected_of_shared(moe, p, x, flat, form, stored), **choice, return_aux=True,
        stored=stored,
    )  # fmt: skip
    balance, z = reference.router_losses(logits, aux.expert_counts)
    if moe.balance_coefficient == 0 and moe.z_coefficient == 0:
        balance, z = balance * 0, z * 0
    loss = moe.balance_coefficient * balance + moe.z_coefficient * z
    out = out.reshape(x.shape)
    objective = (out * dO.double()).sum() + loss
    gradients = torch.autograd.grad(objective, [*p.values(), x64])
    names = [*p, "x"]
    aux = dict(loss=loss, balance=balance, z=z) | {
        name: getattr(aux, name) for name in ("expert_counts", "dropped", "added", "without")
    }
    aux["overflow"] = torch.zeros_like(aux["without"])  # of one process
    return {"out": out, **aux} | {"d" + k: g for k, g in zip(names, gradients)}


def _with_value(result, value):
    """The value that a module computed, with the gradient of `result`."""
    return result + (value - result).detach()


def expected_of_shared(moe, p, x, flat, form, stored):
    """The shared experts' (T, d) in float64, as expected() has the rest; p: the parameters."""
    if moe.shared_experts is None:
        return None
    of = lambda name: p[f"shared_experts.{name}_proj.weight"].unsqueeze(0)
    gated, scores = moe.shared_experts.gate_proj is not None, None
    if moe.shared_expert_gate is not None:
        weight = p["shared_expert_gate.weight"][0]
        with torch.no_grad():
            logits = torch.nn.functional.linear(x.reshape(-1, d), moe.shared_expert_gate.weight)
        scores = _with_value(flat @ weight, logits[:, 0].double()).sigmoid()
    Y = reference.grouped_experts(
        flat, torch.tensor([flat.shape[0]]), of("gate" if gated else "up"), of("down"),
        W1_up=of("up") if gated else None, row_scores=scores, stored=stored, **form,
    )  # fmt: skip
    return rounded(Y, stored)


def check(got, want):
    """Counts to the bit, losses and out within the limits of their dtype, gradients of out's: a
    float32 router's gradient, too, comes from experts of 16 bits."""
    assert got.keys() - {*CHOICE} == want.keys()
    for name, wanted in want.items():
        tensor = got[name]
        if tensor.is_floating_point():
            dtype = got["out"].dtype if name.startswith("d") else tensor.dtype
            limits = LIMITS[dtype]
            if name == "dgate.weight":  # sums of a token's ds less their mean, which nearly cancel
                limits = limits._replace(row=4 * limits.row)
            assert_close(tensor, wanted, name, limits)
        else:
            assert torch.equal(tensor, wanted), (name, tensor, wanted)
