"""moe_with_router, and MoE, whose router's GEMM is in the layer's autograd node, against the layer with
a linear layer of its own: the same bits but those of dX, which is rounded once less."""

import pytest
import torch

import tilemoe
from checks import Calls, compiled
from target import DEVICE, DTYPE, DTYPES

T, d, n, E, K = 37, 40, 24, 7, 3
SCORINGS = ("softmax_over_chosen", "softmax_over_all", "softmax_renormalized", "sigmoid")
OPERATORS = ("moe_with_router", "moe_with_router_backward", "moe_with_router_backward_over_H")


def leaf(*shape, dtype, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def problem(dtype, bias=False):
    torch.manual_seed(3)
    made = dict(
        x=leaf(T, d, dtype=dtype),
        router_weight=leaf(E, d, dtype=dtype, scale=d**-0.5),
        W1=leaf(E, 2 * n, d, dtype=dtype, scale=d**-0.5),
        W2=leaf(E, d, n, dtype=dtype, scale=n**-0.5),
    )
    if bias:
        made |= dict(router_bias=leaf(E, dtype=dtype), b1=leaf(E, 2 * n, dtype=dtype))
        made |= dict(b2=leaf(E, d, dtype=dtype), addend=leaf(T, d, dtype=dtype))
    return made


def apart(x, router_weight, W1, W2, router_bias=None, return_aux=False, **options):
    """The same with a linear layer of its own."""
    logits = torch.nn.functional.linear(x, router_weight, router_bias)
    found = tilemoe.moe(x, logits, W1, W2, return_aux=return_aux, **options)
    return (found[0], logits, found[1]) if return_aux else found


def results(function, tensors, losses=False, wanted=None, **options):
    """Output, logits, Aux and gradients by name."""
    O, logits, aux = function(**tensors, K=K, return_aux=True, **options)
    dO = torch.linspace(-1, 1, O.numel()).view(O.shape).to(O.dtype)
    outputs, gradients = [O], [dO]
    if losses:
        balance, z = tilemoe.router_losses(logits, aux.expert_counts)
        outputs, gradients = [O, balance + 0.1 * z], [dO, None]
    wanted = list(wanted or tensors)
    found = torch.autograd.grad(outputs, [tensors[name] for name in wanted], gradients)
    return (O, logits, *aux), dict(zip(wanted, found))


def distance(a, b):
    return float(torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double()))


def check(tensors, names=(OPERATORS[2],), **options):
    with Calls() as calls:
        outputs, got = results(tilemoe.moe_with_router, tensors, **options)
    assert calls.names == list(names)
    expected, want = results(apart, tensors, **options)
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(one, other)
    for name in want:
        if name != "x":
            assert torch.equal(got[name], want[name]), name
    if "x" in want:  # in 16 bits, dX has two roundings instead of three
        bound = 1e-6 if tensors["x"].dtype == torch.float32 else 6e-3
        assert distance(got["x"], want["x"]) < bound
    return got, want


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_a_linear_layer_of_its_own(dtype, bias, scoring):
    for losses in (False, True):
        check(problem(dtype, bias), losses=losses, scoring=scoring)


@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dX_is_closer_to_float64(dtype, bias):
    """Than the sum of two rounded parts; and the other gradients are as close."""
    tensors = problem(dtype, bias)
    got, want = check(tensors)
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    exact_dX = in_float64(exact, dtype)
    assert distance(got["x"], exact_dX) < distance(want["x"], exact_dX)
    assert distance(torch.zeros_like(got["x"]), exact_dX) > 0.5
    router = torch.nn.functional.linear(tensors["x"], tensors["router_weight"])
    assert router.shape == (T, E) and 0.1 < distance(got["x"] * 0 + 1, exact_dX)


def in_float64(tensors, dtype):
    """dX of the layer in float64; the choice is that of the rounded logits."""
    x, router_weight, W1, W2 = (tensors[name] for name in ("x", "router_weight", "W1", "W2"))
    logits = torch.nn.functional.linear(x, router_weight, tensors.get("router_bias"))
    ids = logits.topk(K).indices
    scores = logits.gather(1, ids).softmax(-1)
    O = torch.zeros_like(x)
    for k in range(K):
        H = torch.einsum("tnd,td->tn", W1[ids[:, k]], x)
        H = H + tensors["b1"][ids[:, k]] if "b1" in tensors else H
        gate, up = H.chunk(2, -1)
        Y = torch.einsum("tdn,tn->td", W2[ids[:, k]], torch.nn.functional.silu(gate) * up)
        Y = Y + tensors["b2"][ids[:, k]] if "b2" in tensors else Y
        O = O + scores[:, k : k + 1] * Y
    dO = torch.linspace(-1, 1, O.numel()).view(O.shape).to(dtype).double()
    (dX,) = torch.autograd.grad(O, [x], dO)
    return dX


@pytest.mark.parametrize("overwrite_H", [None, True, False])
@pytest.mark.parametrize(
    "wanted",
    [["x"], ["router_weight"], ["router_bias"], ["x", "W1"], ["W1"], ["W2", "router_bias"],
     ["x", "router_weight"], ["b1", "b2"], ["addend", "router_weight"]],
    ids="+".join,
)  # fmt: skip
def test_some_gradients(wanted, overwrite_H):
    operator = OPERATORS[1] if overwrite_H is False else OPERATORS[2]
    for losses in (False, True):
        tensors = problem(torch.bfloat16, bias=True)
        check(tensors, [operator], wanted=wanted, losses=losses, overwrite_H=overwrite_H)
        frozen = {k: t if k in wanted else t.detach() for k, t in tensors.items()}
        has_losses = losses and not {"x", "router_weight", "router_bias"}.isdisjoint(wanted)
        check(frozen, [operator], wanted=wanted, losses=has_losses, overwrite_H=overwrite_H)


def test_logits_require_a_gradient_as_those_of_a_linear_layer():
    for wanted in ("x", "router_weight", "router_bias", "W1", "addend"):
        tensors = problem(DTYPE, bias=True)
        frozen = {k: t if k == wanted else t.detach() for k, t in tensors.items()}
        for function in (tilemoe.moe_with_router, apart):
            O, logits, _ = function(**frozen, K=K, return_aux=True)
            of_router = wanted in ("x", "router_weight", "router_bias")
            assert O.requires_grad and logits.requires_grad == of_router


def test_losses_alone():
    """No gradient of O: no operator of the experts runs."""
    for function in (tilemoe.moe_with_router, apart):
        tensors = problem(torch.bfloat16, bias=True)
        _, logits, aux = function(**tensors, K=K, return_aux=True)
        balance, z = tilemoe.router_losses(logits, aux.expert_counts)
        names = ["x", "router_weight", "router_bias"]
        with Calls() as calls:
            found = torch.autograd.grad(balance + z, [tensors[name] for name in names])
        assert calls.names == []
        if function is tilemoe.moe_with_router:
            got = found
    for one, other in zip(got, found):
        assert torch.equal(one, other) and other.any()


@pytest.mark.parametrize("column_blocks", [1, 3])
def test_the_two_backwards_have_equal_bits(column_blocks):
    tensors = problem(torch.bfloat16, bias=True)
    options = dict(losses=True, column_blocks=column_blocks)
    over_H, _ = check(tensors, **options)
    kept, _ = check(tensors, [OPERATORS[1]], overwrite_H=False, **options)
    for name in kept:
        assert torch.equal(over_H[name], kept[name])


def test_a_kept_graph():
    tensors = problem(torch.bfloat16)
    O = tilemoe.moe_with_router(**tensors, K=K)
    leaves, dO = list(tensors.values()), torch.ones_like(O)
    with Calls() as calls:
        first = torch.autograd.grad(O, leaves, dO, retain_graph=True)
        second = torch.autograd.grad(O, leaves, dO)
    assert calls.names == list(OPERATORS[1:])
    for one, other in zip(first, second):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(O, leaves, dO)
    O = tilemoe.moe_with_router(**tensors, K=K, overwrite_H=True)
    torch.autograd.grad(O, leaves, dO, retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward wrote dH"):
        torch.autograd.grad(O, leaves, dO)
    O = tilemoe.moe_with_router(**tensors, K=K, overwrite_H=False)
    gradients = torch.autograd.grad(O, leaves, dO.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradients[0].sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant):
    tensors = problem(torch.bfloat16)
    call = lambda *args: tilemoe.moe_with_router(*args, K=K)  # noqa: E731
    leaves = list(tensors.values())
    O = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=use_reentrant)
    O.sum().backward()
    want = torch.autograd.grad(call(*leaves).sum(), leaves)
    for one, other in zip(leaves, want):
        assert torch.equal(one.grad, other)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("losses", [False, True])
def test_compile(backend, losses):
    tensors = problem(torch.bfloat16, bias=True)
    names = list(tensors)

    def function(*values):
        given = dict(zip(names, values))
        O, logits, aux = tilemoe.moe_with_router(**given, K=K, return_aux=True)
        balance, z = tilemoe.router_losses(logits, aux.expert_counts)
        return O.float().sum() + (balance + z if losses else 0)

    leaves = list(tensors.values())
    with Calls() as calls:
        want = torch.autograd.grad(function(*leaves), leaves)
    assert calls.names == [OPERATORS[2]]
    got = torch.autograd.grad(compiled(function, backend)(*leaves), leaves)
    for name, one, other in zip(names, got, want):
        assert torch.equal(one, other), name


def test_autocast():
    tensors = problem(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        _, got = results(tilemoe.moe_with_router, tensors)
        _, want = results(apart, tensors)
    for name in ("router_weight", "W1", "W2"):
        assert got[name].dtype == torch.float32 and torch.equal(got[name], want[name])
    assert distance(got["x"], want["x"]) < 6e-3


APART = {
    "token rounding": dict(rounding="nearest", m=4),
    "capacity": dict(capacity=T * K),
    "weight_grad_out": dict(weight_grad_out=lambda t: tilemoe.WeightGradients(W2=torch.zeros_like(t["W2"]))),
    "lora": dict(lora=lambda t: tilemoe.LoRA(torch.randn(E, 8, d), torch.randn(E, 2 * n, 8))),
}  # fmt: skip


@pytest.mark.parametrize("feature", APART)
def test_what_the_node_does_not_support_is_computed_apart(feature):
    results_of = []
    for function in (tilemoe.moe_with_router, apart):
        torch.manual_seed(5)
        tensors = problem(DTYPE)
        options = {k: v(tensors) if callable(v) else v for k, v in APART[feature].items()}
        with Calls() as calls:
            O = function(**tensors, K=K, **options)
            O.square().sum().backward()
        assert not any("with_router" in name for name, _ in calls.seen)
        results_of.append([O, *(t.grad for t in tensors.values() if t.grad is not None)])
    for one, other in zip(*results_of, strict=True):
        assert torch.equal(one, other)


def test_leading_shape_and_frozen_inference():
    tensors = {name: t.detach() for name, t in problem(torch.bfloat16).items()}
    want = tilemoe.moe_with_router(**tensors, K=K)
    x = tensors.pop("x")[:36]
    O, logits, aux = tilemoe.moe_with_router(x.view(3, 4, 3, d), **tensors, K=K, return_aux=True)
    assert torch.equal(O.view(36, d), want[:36])
    assert logits.shape == (3, 4, 3, E) and aux.ids.shape == aux.scores.shape == (3, 4, 3, K)
    for tokens in (0, 1):
        assert tilemoe.moe_with_router(x[:tokens], **tensors, K=K).shape == (tokens, d)


WRONG = {
    "K": (dict(K=None), "K is required"),
    "router_weight of another width": (dict(router_weight=torch.zeros(E, d + 8, dtype=DTYPE)), "shape|size"),
    "router_weight of another E": (dict(router_weight=torch.zeros(E + 1, d, dtype=DTYPE)), "E|shape"),
    "router_weight on meta": (dict(router_weight=torch.zeros(E, d, device="meta", dtype=DTYPE)), "one device"),
    "router_weight of another dtype": (dict(router_weight=torch.zeros(E, d, dtype=torch.float64)), "dtype"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refusals(what):
    changes, words = WRONG[what]
    tensors = {"K": K} | problem(DTYPE) | changes
    with pytest.raises((ValueError, RuntimeError), match=words):
        tilemoe.moe_with_router(**tensors)


# ---------------------------------------------------------------- MoE


def layer(**options):
    torch.manual_seed(1)
    return tilemoe.MoE(d, n, E, K, dtype=torch.bfloat16, **options)


def run(moe, x):
    moe.zero_grad()
    with Calls() as calls:
        out = moe(x)
        loss = 0
        if moe.return_aux:
            out, aux = out
            loss = aux.loss
        (out.float().square().sum() + loss).backward()
    gradients = {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}
    return [name for name, _ in calls.seen], out, gradients


LOSSES = dict(return_aux=True, balance_coefficient=0.1, z_coefficient=0.01)


@pytest.mark.parametrize("options", [
    {}, LOSSES, dict(router_bias=True), dict(shared_intermediate_size=16),
    dict(scoring="sigmoid", selection_bias=True), dict(bias=True, overwrite_H=False),
], ids=str)  # fmt: skip
def test_the_module_uses_it(options):
    torch.manual_seed(2)
    x = torch.randn(2, 9, d).bfloat16().requires_grad_()
    names, out, gradients = run(layer(**options), x)
    assert names.count("moe_with_router") == 1 and "moe" not in names
    observed = layer(**options)
    observed.gate.register_forward_hook(lambda *_: None)
    apart_names, apart_out, apart_gradients = run(observed, x)
    assert "moe" in apart_names and not any("with_router" in name for name in apart_names)
    assert torch.equal(out, apart_out)
    for name, gradient in apart_gradients.items():
        assert torch.equal(gradients[name], gradient), name


def hooked(moe, part, register):
    getattr(getattr(moe, part), register)(lambda *_: None)


def parametrized(moe):
    torch.nn.utils.parametrize.register_parametrization(moe.gate, "weight", torch.nn.Identity())


def replaced(moe):
    moe.gate = torch.nn.Linear(d, E, bias=False, dtype=torch.bfloat16)
    moe.gate.forward = lambda x, spread=None, of=moe.gate: torch.nn.functional.linear(x, of.weight)


CHANGES = {
    "a forward hook of the gate": lambda moe: hooked(moe, "gate", "register_forward_hook"),
    "a pre-hook of the gate": lambda moe: hooked(moe, "gate", "register_forward_pre_hook"),
    "a backward hook of the gate": lambda moe: hooked(moe, "gate", "register_full_backward_hook"),
    "a hook of the experts": lambda moe: hooked(moe, "experts", "register_forward_hook"),
    "a parametrised gate": parametrized,
    "another gate": replaced,
    "quantised experts": lambda moe: tilemoe.quantize_(moe, "nf4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_module_calls_a_gate_that_is_not_plain(change):
    moe = layer()
    CHANGES[change](moe)
    names, _, gradients = run(moe, torch.randn(5, d).bfloat16().requires_grad_())
    assert not any("with_router" in name for name in names)
    assert any("gate" in name and gradient.any() for name, gradient in gradients.items())


@pytest.mark.parametrize("options", [
    dict(router="fixed"), dict(router_dtype=torch.float32), dict(lora_rank=8),
    dict(rounding="nearest", m=4),
], ids=str)  # fmt: skip
def test_modules_whose_router_is_apart(options):
    names, _, gradients = run(layer(**options), torch.randn(5, d).bfloat16().requires_grad_())
    assert not any("with_router" in name for name in names) and gradients


def test_given_ids_and_masks_are_apart():
    x = torch.randn(5, d).bfloat16()
    for how in (dict(ids=torch.zeros(5, K, dtype=torch.int64)), dict(token_mask=torch.arange(5) < 3)):
        with Calls() as calls:
            layer()(x, **how)
        assert not any("with_router" in name for name, _ in calls.seen)


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for function in (tilemoe.moe_with_router, apart):
        tensors = problem(DTYPE)
        with FlopCounterMode(display=False) as counter:
            function(**tensors, K=K).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
