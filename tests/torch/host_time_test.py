"""One warm pass calls few functions of Python, adds one node to autograd, finds all parameters."""

import sys
from pathlib import Path

import pytest
import torch

import tilemoe
from target import DEVICE, DTYPE

T, d, n, E, K = 6, 16, 24, 4, 2
PACKAGE = str(Path(tilemoe.__file__).parent)
NODE = "WithRouterBackward"


def module(**options):
    torch.manual_seed(5)
    return tilemoe.MoE(d, n, E, K, device=DEVICE, dtype=DTYPE, **options)


def tokens(*leading):
    torch.manual_seed(6)
    return torch.randn(*leading, d).to(DEVICE, DTYPE).requires_grad_()


def gradients(layer, x):
    """Output and gradients of x and of the parameters."""
    inputs = [x, *layer.parameters()]
    out = layer(x)
    dO = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return out, torch.autograd.grad(out, inputs, dO)


def functions_called(work):
    """The functions of the package that `work` calls, in order; warm."""
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_name)

    for _ in range(3):
        work()
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    del result
    return called


# One more function costs the host about as much as a view or an allocation.
@pytest.mark.parametrize("leading", [(T,), (2, T // 2)], ids=["2-D", "3-D"])
def test_forward_calls_few_functions(leading):
    layer, x = module(), tokens(*leading)
    called = functions_called(lambda: layer(x))
    assert len(called) <= 24, called


@pytest.mark.skipif(DEVICE == "cuda", reason="backward runs in a thread of the engine")
def test_backward_calls_few_functions():
    layer, x = module(), tokens(T)
    outputs = [layer(x) for _ in range(4)]
    called = functions_called(lambda: outputs.pop().sum().backward())
    assert len(called) <= 18, called


@pytest.mark.parametrize("leading", [(T,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("return_aux", [False, True])
def test_the_node_reads_x_itself(leading, return_aux):
    x, layer = tokens(*leading), module(return_aux=return_aux)
    out = layer(x)[0] if return_aux else layer(x)
    assert out.shape == x.shape and type(out.grad_fn).__name__ == NODE
    accumulators = [node for node, _ in out.grad_fn.next_functions if hasattr(node, "variable")]
    assert any(node.variable is x for node in accumulators)
    out += 1  # not a view: it may change in place
    out.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("change", ["more dimensions", "strided", "function"])
def test_any_number_of_dimensions_has_the_same_bits(change):
    layer, flat = module(), tokens(T)
    want, (want_dx, *want_others) = gradients(layer, flat)
    x = flat.detach().view(2, 3, d)
    if change == "strided":
        x = torch.cat([x, x], dim=-1)[..., :d]
        assert not x.is_contiguous()
    x = x.requires_grad_()
    if change == "function":
        router, experts = layer.gate.weight, layer.experts
        inputs = [x, router, experts.gate_up_proj, experts.down_proj]
        out = tilemoe.moe_with_router(*inputs, K=K)
        dO = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        dx, *others = torch.autograd.grad(out, inputs, dO)
    else:
        out, (dx, *others) = gradients(layer, x)
    assert out.shape == dx.shape == x.shape
    assert torch.equal(out.view(-1, d), want) and torch.equal(dx.reshape(-1, d), want_dx)
    assert all(torch.equal(a, b) for a, b in zip(others, want_others, strict=True))


def test_a_gradient_of_the_logits_alone_has_the_shape_of_x():
    x = tokens(2, 3)
    layer = module(return_aux=True, balance_coefficient=0.1)
    out, aux = layer(x)
    (dx,) = torch.autograd.grad(aux.loss, x)
    flat = x.detach().view(-1, d).requires_grad_()
    (want,) = torch.autograd.grad(layer(flat)[1].loss, flat)
    assert dx.shape == x.shape and torch.equal(dx.view(-1, d), want) and want.any()


@pytest.mark.parametrize("of", ["gate", "experts", "buffer"])
def test_parameters_that_became_attributes_are_read(of):
    """As FSDP-1 and weight norm leave them: plain tensors, which are no longer parameters."""
    layer = module(selection_bias=True, scoring="sigmoid")
    with torch.no_grad():
        layer.gate.e_score_correction_bias.copy_(torch.arange(E) * 0.1)
    x = tokens(T)
    want, (want_dx, *_) = gradients(layer, x)
    part = layer.experts if of == "experts" else layer.gate
    names = {"gate": "weight", "experts": "down_proj", "buffer": "e_score_correction_bias"}
    tensor = getattr(part, names[of])
    delattr(part, names[of])
    plain = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    setattr(part, names[of], plain)
    assert names[of] in vars(part)
    out, (dx, *_) = gradients(layer, x)
    assert type(out.grad_fn).__name__ == NODE
    assert torch.equal(out, want) and torch.equal(dx, want_dx)
