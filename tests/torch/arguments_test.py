"""Arguments that cannot be intended: refused when the layer is called, under the name that the
caller gave them."""

import io
import re
import warnings

import pytest
import torch

import tilemoe
from random_layers import E, K, T, d, logits_layer, n, normal
from target import DEVICE, DTYPE
from tilemoe import WeightGradients

SHAPES = {"W1": (E, 2 * n, d), "W2": (E, d, n), "b1": (E, 2 * n), "b2": (E, d)}


def refused(kind, sentence, call, *args, **named):
    with pytest.raises(kind, match=re.escape(sentence)):
        call(*args, **named)


# ------------------------------------------------- memory for weights' gradients


def memory(name, dtype=DTYPE):
    return torch.zeros(SHAPES[name], dtype=dtype)


def part_of(tensor, name):
    """Memory of a gradient's shape inside of another tensor's."""
    shape = torch.Size(SHAPES[name])
    return tensor.detach().reshape(-1)[: shape.numel()].view(shape)


def off_16_bytes(name):
    shape = torch.Size(SHAPES[name])
    return torch.zeros(shape.numel() + 1, dtype=DTYPE)[1:].view(shape)


UNINTENDED = {
    "the weight": ("requires a gradient", lambda layer, name: layer[name]),
    "the weight, detached": ("shares memory with", lambda layer, name: layer[name].detach()),
    "a leaf": ("requires a gradient", lambda layer, name: memory(name).requires_grad_()),
    "a result": ("requires a gradient", lambda layer, name: memory(name).requires_grad_() * 2),
    "another weight": ("shares memory with W1", lambda layer, name: part_of(layer["W1"], name)),
    "off 16 bytes": ("or its rows are not aligned to 16 bytes", lambda layer, name: off_16_bytes(name)),
    "another shape": ("has shape", lambda layer, name: memory(name)[..., :-8]),
    "float64": ("must be .*, got torch.float64", lambda layer, name: memory(name, torch.float64)),
    "expanded": ("is expanded", lambda layer, name: memory(name)[:1].expand(SHAPES[name])),
    "on meta": ("is on meta", lambda layer, name: memory(name).to("meta")),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("what", UNINTENDED)
def test_memory_that_cannot_be_meant(what, name):
    layer = logits_layer(DTYPE, bias=True)
    sentence, make = UNINTENDED[what]
    given = WeightGradients(**{name: make(layer, name)})
    with pytest.raises(ValueError, match=f"weight_grad_out.{name} {sentence}"):
        tilemoe.moe(**layer, K=K, weight_grad_out=given)


def test_memory_of_two_gradients_or_of_another_input():
    layer = logits_layer(DTYPE)
    W1 = memory("W1")
    both = WeightGradients(W1=W1, W2=part_of(W1, "W2"))
    sentence = "weight_grad_out.W2 shares memory with weight_grad_out.W1"
    refused(ValueError, sentence, tilemoe.moe, **layer, K=K, weight_grad_out=both)
    layer["x"] = part_of(W1, "W2").view(-1)[: T * d].view(T, d).requires_grad_()
    sentence = "weight_grad_out.W1 shares memory with x"
    of_x = WeightGradients(W1=W1)
    refused(ValueError, sentence, tilemoe.moe, **layer, K=K, weight_grad_out=of_x)


def test_memory_of_an_absent_bias():
    layer = logits_layer(DTYPE)
    given = WeightGradients(b1=memory("b1"))
    sentence = "weight_grad_out.b1 requires b1, got None"
    refused(ValueError, sentence, tilemoe.moe, **layer, K=K, weight_grad_out=given)
    refused(
        TypeError, "weight_grad_out must be a tilemoe.WeightGradients, got a builtins.tuple",
        tilemoe.moe, **layer, K=K, weight_grad_out=(memory("W1"), memory("W2")),
    )  # fmt: skip


def test_memory_under_autocast_is_compared_with_the_weight_itself():
    layer = logits_layer(torch.float32)
    given = WeightGradients(W1=layer["W1"].detach())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        refused(
            ValueError, "weight_grad_out.W1 shares memory with W1", tilemoe.moe, **layer, K=K,
            weight_grad_out=given,
        )  # fmt: skip


def test_interleaved_memory_is_right():
    """Gradients of gate and up in one tensor, whose ranges of addresses meet."""
    layer = logits_layer(DTYPE, gate_layout="split")
    options = dict(K=K, gate_layout="split")
    names = ("W1", "W1_up")
    want = torch.autograd.grad(tilemoe.moe(**layer, **options).sum(), [layer[k] for k in names])
    whole = torch.zeros(E, 2 * n, d, dtype=DTYPE)
    given = WeightGradients(W1=whole[:, :n], W1_up=whole[:, n:])
    tilemoe.moe(**layer, **options, weight_grad_out=given).sum().backward()
    assert torch.equal(whole[:, :n], want[0]) and torch.equal(whole[:, n:], want[1])


def test_memory_under_transforms_is_refused():
    layer = logits_layer(DTYPE)
    given = WeightGradients(W2=memory("W2"))

    def loss(W1):
        return tilemoe.moe(**layer | {"W1": W1}, K=K, weight_grad_out=given).sum()

    with pytest.raises(NotImplementedError, match="^transforms of torch.func"):
        torch.func.grad(loss)(layer["W1"])


# --------------------------------------------------------------------- counts


@pytest.mark.cpu  # on a GPU the host does not read them
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_counts_that_the_rows_do_not_have(compiled, dtype):
    layer = logits_layer(DTYPE)
    rows, weights = layer["x"].detach()[:13], (layer["W1"].detach(), layer["W2"].detach())
    function = tilemoe.grouped_experts
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")

    def counts(*first):
        return torch.tensor([*first, *[0] * (E - len(first))], dtype=dtype)

    wrong = {
        (5, 5, 4): "counts[2] must be in [0, 3], got 4: rows has 13 rows, the counts before it use 10",
        (14,): "counts[0] must be in [0, 13], got 14",
        (5, -1, 5): "counts[1] must be in [0, 8], got -1",
        (-(2**31),): "counts[0] must be in [0, 13], got -2147483648",
        (13, 0, 0, 0, 1): "counts[4] must be in [0, 0], got 1",
    }
    if dtype is torch.int64:
        wrong[(2**32 + 5,)] = "counts[0] must be in [0, 13], got 4294967301"
        wrong[(2**63 - 1, 2**63 - 1)] = "counts[0] must be in [0, 13], got 9223372036854775807"
    for numbers, sentence in wrong.items():
        refused((ValueError, RuntimeError), sentence, function, rows, counts(*numbers), *weights)
        if not compiled:
            refused(ValueError, sentence, function, rows, counts(*numbers), *weights)
    for numbers in ((5, 5, 3), (13,), (2, 3), ()):
        out = function(rows, counts(*numbers), *weights)
        assert out.any(1).sum() == sum(numbers)


# ------------------------------------------------------------ unusual tensors


def jagged(dtype=None):
    parts = [torch.randn(3, d), torch.randn(4, d)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, dtype=dtype)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its interface, which may change
        return torch.nested.nested_tensor([torch.randn(3, d), torch.randn(4, d)])


UNUSUAL = {
    "jagged": (jagged, "NestedTensor (nested, torch.jagged)"),
    "nested": (nested, "(nested, torch.strided)"),
    "sparse": (lambda: torch.randn(7, d).to_sparse(), "(torch.sparse_coo)"),
    "compressed": (lambda: torch.randn(7, d).to_sparse_csr(), "(torch.sparse_csr)"),
    "oneDNN": (lambda: torch.randn(7, d).to_mkldnn(), "(torch._mkldnn)"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.randn(7, d), 0.1, 0, torch.qint8),
        "(torch.qint8)",
    ),
}


@pytest.mark.cpu  # these kinds are not the device's
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_in_every_place(kind):
    make, seen = UNUSUAL[kind]
    layer = {name: t.detach() for name, t in logits_layer(DTYPE, bias=True).items()}
    W1, W2, x = layer["W1"], layer["W2"], layer["x"]
    chosen = {"logits_or_scores": torch.rand(T, K), "ids": torch.zeros(T, K, dtype=torch.int64)}
    counts, tokens, scores = torch.zeros(E, dtype=torch.int32), torch.arange(T), torch.rand(T)
    module = tilemoe.MoE(d, n, E, K, return_aux=False)

    def is_refused(name, call, *args, **named):
        with pytest.raises(NotImplementedError, match=rf"^{name} is a .*{re.escape(seen)}"):
            call(*args, **named)

    for name in layer:
        called = "logits" if name == "logits_or_scores" else name
        is_refused(called, tilemoe.moe, **layer | {name: make()}, K=K)
    is_refused("addend", tilemoe.moe, **layer, K=K, addend=make())
    is_refused("scores", tilemoe.moe, **layer | chosen | {"logits_or_scores": make()})
    is_refused("ids", tilemoe.moe, **layer | chosen | {"ids": make()})
    is_refused("logits", tilemoe.top_k, make(), K)
    is_refused("logits", tilemoe.router_losses, make(), counts)
    is_refused("logits", tilemoe.scores_at, make(), tokens[:, None])
    is_refused("logits", tilemoe.rounded_router, make(), K, rounding="up", m=8)
    is_refused("rows", tilemoe.grouped_experts, make(), counts, W1, W2)
    is_refused("counts", tilemoe.grouped_experts, x, make(), W1, W2)
    is_refused("W2", tilemoe.grouped_experts, x, counts, W1, make())
    is_refused("tokens", tilemoe.moe_general, x, make(), tokens, scores, W1, W2)
    is_refused("x", module, make())
    is_refused("x", module.eval(), make())


class Packed(torch.nn.Parameter):
    """As bitsandbytes' Params4bit: two numbers of 4 bits in a byte."""

    def __new__(cls):
        return super().__new__(cls, torch.zeros(E * d * n // 2, 1, dtype=torch.uint8), False)


@pytest.mark.parametrize("name", SHAPES)
def test_packed_weights_are_refused_by_their_class(name):
    layer = logits_layer(DTYPE, bias=True)
    seen = f"{name} is a {__name__}.Packed, torch.uint8 ({E * d * n // 2}, 1)"
    refused(NotImplementedError, seen, tilemoe.moe, **layer | {name: Packed()}, K=K)
    names = {"W1": "gate_up_proj", "W2": "down_proj"} | {
        "b1": "gate_up_proj_bias", "b2": "down_proj_bias",
    }  # fmt: skip
    module = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True, dtype=DTYPE).eval()
    setattr(module.experts, names[name], Packed())
    for tokens in (3, 100):  # few, and not
        with torch.no_grad():
            x = normal(tokens, d, seed=1, dtype=DTYPE)
            refused(NotImplementedError, seen, module, x)


class OneArgument(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_is_refused():
    layer = {name: t.detach() for name, t in logits_layer(DTYPE).items()}
    W1, W2, logits = layer["W1"], layer["W2"], layer["logits_or_scores"]
    counts = torch.zeros(E, dtype=torch.int32)
    module = tilemoe.MoE(d, n, E, K, return_aux=False).eval()
    functions = (
        module,
        lambda x: tilemoe.moe(x, logits, W1, W2, K=K),
        lambda x: tilemoe.grouped_experts(x, counts, W1, W2),
        lambda x: tilemoe.top_k(x, K)[0],
    )
    sentence = "torch.jit.trace and torch.onnx.export(dynamo=False) are not supported"
    for function in functions:
        refused(NotImplementedError, sentence, torch.jit.trace, OneArgument(function), layer["x"])
    refused(
        NotImplementedError, sentence, torch.onnx.export, OneArgument(module), (layer["x"],),
        io.BytesIO(), dynamo=False,
    )  # fmt: skip
