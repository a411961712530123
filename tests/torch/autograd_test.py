"""The layer among torch's own machinery: what is kept, what is computed, compiled, recomputed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilemoe
from comparison import assert_close
from layers import E, K, T, check, compare, d, logits_layer, n, normal, results
from target import DEVICE, DTYPE, DTYPES
from tilemoe import WeightGradients, _engine, _shapes

WANTED = {
    "x": _shapes.WANTED_X,
    "logits_or_scores": _shapes.WANTED_S,
    "W1": _shapes.WANTED_W1,
    "W2": _shapes.WANTED_W2,
    "b1": _shapes.WANTED_B1,
    "b2": _shapes.WANTED_B2,
}


def zeros(*shape):
    return torch.zeros(shape, dtype=DTYPE)


class Calls(TorchDispatchMode):
    """Records the operators of ours that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tilemoe":
            self.seen.append((function._opname, args))
        return function(*args, **(kwargs or {}))

    def of(self, name):
        return [args for seen, args in self.seen if seen == name]


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps, each storage once, and leaves `not_counted` out."""

    def __init__(self, *not_counted):
        super().__init__(self._pack, lambda kept: kept)
        self.not_counted = {t.untyped_storage().data_ptr() for t in not_counted}
        self.storages = {}

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.not_counted:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self):
        super().__enter__()
        return self

    def total(self):
        return sum(self.storages.values())


@pytest.mark.parametrize("subset", range(1, 64))
def test_only_what_is_asked_for_is_computed(subset):
    asked = [name for bit, name in enumerate(WANTED) if subset & 1 << bit]
    everything = logits_layer(DTYPE, bias=True)
    want = results(tilemoe.moe, everything, K=K)
    tensors = {name: t.detach().requires_grad_(name in asked) for name, t in everything.items()}
    with Calls() as calls:
        O = tilemoe.moe(**tensors, K=K)
        O.backward(normal(T, d, seed=30, dtype=DTYPE))
    (backward,) = calls.of("experts_backward_over_H")
    assert backward[-2] == sum(WANTED[name] for name in asked)
    for name, tensor in tensors.items():
        if name in asked:
            assert torch.equal(tensor.grad, want[f"d{name}"])
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("subset", [1, 2, 4, 8, 1 | 2, 4 | 8, 16 | 32, 1 | 8])
@pytest.mark.parametrize("how", ["grad", "backward", "of views"])
def test_only_what_a_walk_asks_for_is_computed(how, subset):
    """All tensors require gradients; the walk names some of them."""
    names = [name for bit, name in enumerate(WANTED) if subset & 1 << bit]
    tensors = logits_layer(DTYPE, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    given = tensors if how != "of views" else {name: t.view_as(t) for name, t in tensors.items()}
    O = tilemoe.moe(**given, K=K)
    inputs = [(given if subset == 1 else tensors)[name] for name in names]
    dO = normal(T, d, seed=30, dtype=DTYPE)
    with Calls() as calls:
        if how == "backward":
            O.backward(dO, inputs=inputs)
            got = [tensor.grad for tensor in inputs]
        else:
            got = torch.autograd.grad(O, inputs, dO)
    (backward,) = calls.of("experts_backward_over_H")
    assert backward[-2] == sum(WANTED[name] for name in names)
    for name, gradient in zip(names, got, strict=True):
        assert torch.equal(gradient, want[f"d{name}"])


def test_a_torch_that_cannot_tell_computes_everything(monkeypatch):
    tensors = logits_layer(DTYPE)
    want = results(tilemoe.moe, tensors, K=K)
    for name, answer in (("_running", None), ("_will_execute", True)):
        monkeypatch.setattr(_engine, name, lambda *node, answer=answer: answer)
        O = tilemoe.moe(**tensors, K=K)
        with Calls() as calls:
            (dx,) = torch.autograd.grad(O, tensors["x"], normal(T, d, seed=30, dtype=DTYPE))
        (backward,) = calls.of("experts_backward_over_H")
        assert backward[-2] == sum(WANTED[name] for name in tensors)
        assert torch.equal(dx, want["dx"])
        monkeypatch.undo()


def test_the_operators_compute_what_a_walk_asks_for():
    x, logits, W1, W2 = logits_layer(DTYPE).values()
    packed = ([0, K, 0, 1, 1, 0, 0, 0, 1], [1.0, 0.0, 0.0, 0.0])
    O, *_ = torch.ops.tilemoe.moe(
        x, logits, None, [W1, None, W2, None, None, None], None, *packed, True, False
    )
    with Calls() as calls:
        torch.autograd.grad(O.sum(), [x, W2])
    assert [args[-1] for args in calls.of("experts_backward")] == [
        _shapes.WANTED_X | _shapes.WANTED_W2
    ]


def test_a_node_called_inside_of_another_one_computes_everything():
    """The engine that runs knows nothing of its graph."""
    tensors = logits_layer(DTYPE)
    want = results(tilemoe.moe, tensors, K=K)
    O = tilemoe.moe(**tensors, K=K)
    dO = normal(T, d, seed=30, dtype=DTYPE)
    seen = []

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(O.grad_fn.apply(dO))
            return gradient

    Calls.apply(zeros(3).requires_grad_()).sum().backward()
    found = [gradient for gradient in seen if gradient is not None]
    for name, gradient in zip(tensors, found, strict=True):
        assert torch.equal(gradient, want[f"d{name}"]), name


def test_only_the_addend():
    tensors = {name: t.detach() for name, t in logits_layer(DTYPE).items()}
    addend = normal(T, d, seed=24, dtype=DTYPE).requires_grad_()
    with Calls() as calls:
        tilemoe.moe(**tensors, K=K, addend=addend).sum().backward()
    assert torch.equal(addend.grad, zeros(T, d) + 1)
    assert [name for name, _ in calls.seen] == ["moe"]


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_inference_keeps_nothing(inference):
    tensors = logits_layer(DTYPE)
    want = tilemoe.moe(**tensors, K=K)
    with inference(), Calls() as calls:
        O = tilemoe.moe(**tensors, K=K)
    (forward,) = calls.of("moe")
    assert forward[-2] is False and O.grad_fn is None and torch.equal(O, want)
    frozen = {name: t.detach() for name, t in tensors.items()}
    with Saved() as saved:
        O = tilemoe.moe(**frozen, K=K)
    assert saved.total() == 0 and O.grad_fn is None


@pytest.mark.parametrize("scoring", ["softmax_over_chosen", "sigmoid_renormalized"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("granularity", [1, 4])
def test_memory_kept_is_the_contract(granularity, gated, scoring):
    T, d, n, E, K = 512, 128, 128 // granularity, 16 * granularity, 2 * granularity
    bf16 = torch.bfloat16
    x = torch.randn(T, d, dtype=bf16, requires_grad=True)
    logits = torch.randn(T, E, requires_grad=True)
    W1 = torch.randn(E, 2 * n if gated else n, d, dtype=bf16, requires_grad=True)
    W2 = torch.randn(E, d, n, dtype=bf16, requires_grad=True)
    activation = "swiglu" if gated else "relu_squared"
    with Saved(W1, W2) as saved:
        tilemoe.moe(x, logits, W1, W2, K=K, activation=activation, scoring=scoring)
    pairs = T * K
    rows = 2 * T * d + (4 if gated else 2) * pairs * n
    logits_kept = 4 * T * E if scoring == "sigmoid_renormalized" else 0
    assert saved.total() >= rows + logits_kept
    assert saved.total() <= 1.02 * (rows + 16 * pairs + logits_kept)


def test_logits_are_kept_where_they_are_read():
    tensors = logits_layer(DTYPE)
    logits = tensors["logits_or_scores"]

    def keeps_logits(**options):
        with Saved() as saved:
            tilemoe.moe(**tensors, K=K, **options)
        return logits.untyped_storage().data_ptr() in saved.storages

    assert not keeps_logits()
    assert not keeps_logits(scoring="softmax_renormalized")
    assert keeps_logits(scoring="softmax_over_all")
    assert keeps_logits(scoring="sigmoid")
    assert keeps_logits(rounding="up", m=8)


def test_double_backward_raises():
    tensors = logits_layer(DTYPE)
    O = tilemoe.moe(**tensors, K=K)
    (dx,) = torch.autograd.grad(O.square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="tilemoe: gradients of gradients"):
        dx.sum().backward()
    scores, _ = tilemoe.topk_router(tensors["logits_or_scores"], K)
    (dlogits,) = torch.autograd.grad(
        scores.square().sum(), tensors["logits_or_scores"], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="tilemoe: gradients of gradients"):
        dlogits.sum().backward()
    balance, z = tilemoe.router_losses(
        tensors["logits_or_scores"], torch.ones(E, dtype=torch.int32)
    )
    (dlogits,) = torch.autograd.grad(balance + z, tensors["logits_or_scores"], create_graph=True)
    with pytest.raises(NotImplementedError, match="tilemoe: gradients of gradients"):
        dlogits.sum().backward()


def test_a_graph_of_gradients_in_given_memory_is_refused():
    tensors = logits_layer(DTYPE)
    O = tilemoe.moe(**tensors, K=K, overwrite_H=True)
    with pytest.raises(NotImplementedError, match="tilemoe: gradients of gradients"):
        torch.autograd.grad(O.sum(), tensors["x"], create_graph=True)


def test_backward_twice():
    tensors = logits_layer(DTYPE)
    O = tilemoe.moe(**tensors, K=K)
    dO = torch.ones_like(O)
    first = torch.autograd.grad(O, tensors["W1"], dO, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(O, tensors["W1"], dO)[0])


def test_dH_over_H():
    tensors = logits_layer(DTYPE)
    want = results(tilemoe.moe, tensors, K=K)
    compare_bits(results(tilemoe.moe, tensors, K=K, overwrite_H=True), want)
    O = tilemoe.moe(**tensors, K=K, overwrite_H=True)
    O.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumed by an earlier backward"):
        O.sum().backward()


def test_column_blocks():
    wide = 136  # of 64 columns, and a rest
    tensors = {
        "x": normal(T, wide, seed=1, dtype=DTYPE),
        "logits_or_scores": normal(T, E, seed=2, dtype=DTYPE),
        "W1": normal(E, 2 * n, wide, seed=3, dtype=DTYPE, scale=wide**-0.5),
        "W2": normal(E, wide, n, seed=4, dtype=DTYPE, scale=n**-0.5),
        "b2": normal(E, wide, seed=5, dtype=DTYPE),
    }
    for tensor in tensors.values():
        tensor.requires_grad_()
    want = results(tilemoe.moe, tensors, K=K)
    got = results(tilemoe.moe, tensors, K=K, column_blocks=3)
    for name in want:
        assert (got[name] - want[name]).norm() <= 1e-3 * want[name].norm(), name
    with pytest.raises(ValueError, match="column_blocks is -1"):
        tilemoe.moe(**tensors, K=K, column_blocks=-1)


def test_dH_over_H_of_some_gradients():
    tensors = logits_layer(DTYPE, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    for asked in (["x"], ["W1"], ["W1", "x"], ["W2", "logits_or_scores"], ["W1", "b1"]):
        given = {name: t.detach().requires_grad_(name in asked) for name, t in tensors.items()}
        with Calls() as calls:
            got = results(tilemoe.moe, given, K=K, overwrite_H=True)
        compare_bits(got, {name: want[name] for name in got})
        assert len(calls.of("experts_backward_over_H")) == 1


def compare_bits(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overwrite_H", [False, True])
def test_weight_gradients_into_given_memory(overwrite_H, gradient_dtype):
    tensors = logits_layer(torch.bfloat16, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    given = WeightGradients(
        W1=torch.ones(E, 2 * n, d, dtype=gradient_dtype),
        b1=torch.ones(E, 2 * n, dtype=gradient_dtype),
    )
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    for step in range(3):  # the first writes over the ones, the others add
        O = tilemoe.moe(
            **tensors, K=K, overwrite_H=overwrite_H, weight_grad_out=given, accumulate=step > 0
        )
        O.backward(dO)
    assert tensors["W1"].grad is None and tensors["b1"].grad is None
    for name in ("W1", "b1"):
        got, one = getattr(given, name), want[f"d{name}"].double()
        rounding = 2**-8 if gradient_dtype == torch.float32 else 2**-6
        assert (got.double() - 3 * one).norm() <= rounding * (3 * one).norm()
    for name in ("x", "logits_or_scores", "W2", "b2"):
        got, one = tensors[name].grad.double(), want[f"d{name}"].double()
        assert (got - 3 * one).norm() <= 2**-7 * (3 * one).norm(), name


def test_micro_batches_in_any_order():
    tensors = logits_layer(DTYPE)
    given = WeightGradients(W1=zeros(E, 2 * n, d), W2=zeros(E, d, n))
    one, two = (tilemoe.moe(**tensors, K=K, weight_grad_out=given) for _ in range(2))
    one.sum().backward()
    two.sum().backward()
    want = torch.autograd.grad(tilemoe.moe(**tensors, K=K).sum(), [tensors["W1"], tensors["W2"]])
    assert_close(given.W1, 2 * want[0], "dW1")
    assert_close(given.W2, 2 * want[1], "dW2")


def given_memory(dtype=DTYPE):
    shapes = {"W1": (E, 2 * n, d), "W2": (E, d, n)}
    return WeightGradients(**{k: torch.zeros(v, dtype=dtype) for k, v in shapes.items()})


@pytest.mark.parametrize("overwrite_H", [None, False])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_given_memory_is_written_where_the_walk_reaches_the_weight(checkpointed, overwrite_H):
    tensors = logits_layer(DTYPE)
    x, logits, W1, W2 = tensors.values()
    dx, _, dW1, dW2 = torch.autograd.grad(
        tilemoe.moe(**tensors, K=K), list(tensors.values()), zeros(T, d) + 1
    )
    given = given_memory()

    def layer(*args):
        return tilemoe.moe(*args, K=K, weight_grad_out=given, overwrite_H=overwrite_H)

    args = tuple(tensors.values())
    if checkpointed:
        O = torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False).sum()
    else:
        O = layer(*args).sum()
    walk = dict(retain_graph=True, allow_unused=True)
    assert torch.equal(torch.autograd.grad(O, x, **walk)[0], dx)
    torch.autograd.grad(O, logits, **walk)
    assert not given.W1.any() and not given.W2.any()
    assert torch.autograd.grad(O, W1, **walk) == (None,)
    assert torch.equal(given.W1, dW1) and not given.W2.any()
    O.backward(inputs=[W2], retain_graph=True)
    assert torch.equal(given.W1, dW1) and torch.equal(given.W2, dW2)
    O.backward()  # all of it once more
    assert_close(given.W1, 2 * dW1, "dW1")
    assert_close(given.W2, 2 * dW2, "dW2")
    assert torch.equal(x.grad, dx) and W1.grad is None and W2.grad is None


def test_given_memory_of_a_weight_that_is_used_twice():
    tensors = logits_layer(DTYPE)
    W1, W2 = tensors["W1"], tensors["W2"]
    given, options = given_memory(), dict(K=K)

    def two(**more):
        inner = tilemoe.moe(**tensors, **options, **more)
        return tilemoe.moe(inner, tensors["logits_or_scores"], W1, W2, **options, **more).sum()

    want = torch.autograd.grad(two(), [W1, W2])
    O = two(weight_grad_out=given)
    torch.autograd.grad(O, tensors["x"], retain_graph=True)
    assert not given.W1.any() and not given.W2.any()
    O.backward()
    assert_close(given.W1, want[0], "dW1")
    assert_close(given.W2, want[1], "dW2")


class Stage(torch.nn.Module):
    """A pipeline's stage; the norm's weight follows the block (docs/pytorch.md)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.moe = torch.nn.Linear(d, d), tilemoe.MoE(d, n, E, K, return_aux=False)
        self.norm = torch.nn.RMSNorm(d)

    def forward(self, x):
        h = self.first(x)
        return self.norm(h + self.moe(h))


@pytest.mark.cpu  # float32
def test_a_pipelines_split_backward():
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    stage = Stage()
    x = normal(T, d, seed=20, dtype=torch.float32).requires_grad_()
    dO = normal(T, d, seed=30, dtype=torch.float32)
    want = torch.autograd.grad(stage(x), [x, *stage.parameters()], dO)
    O = stage(x)
    with Calls() as calls:
        _, groups = stage_backward_input([O], [dO], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    (of_input,), (of_weights,) = calls.of("experts_backward"), calls.of("experts_backward_over_H")
    assert of_input[-1] == _shapes.WANTED_X | _shapes.WANTED_S
    assert of_weights[-2] == _shapes.WANTED_W1 | _shapes.WANTED_W2
    for got, expected in zip([x.grad, *(p.grad for p in stage.parameters())], want, strict=True):
        assert_close(got, expected.double(), "a gradient")


def test_a_frozen_weight_leaves_its_given_memory_alone():
    tensors = logits_layer(DTYPE)
    tensors["W1"].requires_grad_(False)
    given = WeightGradients(W1=zeros(E, 2 * n, d) + 1, W2=zeros(E, d, n))
    tilemoe.moe(**tensors, K=K, weight_grad_out=given).sum().backward()
    assert torch.equal(given.W1, zeros(E, 2 * n, d) + 1) and given.W2.any()


def test_gradients_have_their_weights_layout():
    tensors = logits_layer(DTYPE, transposed=True)
    assert tensors["W1"].stride(1) == 1
    got = results(tilemoe.moe, tensors, K=K)
    assert got["dW1"].stride() == tensors["W1"].stride()
    assert got["dW2"].stride() == tensors["W2"].stride()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_tensors_that_lie_badly(dtype):
    tensors = logits_layer(dtype)
    want = results(tilemoe.moe, tensors, K=K)
    wide = torch.zeros(T, 3 * d + 1, dtype=dtype)
    lying = {
        "every third column": wide[:, : 3 * d : 3],
        "rows off 16 bytes": wide[:, 1 : d + 1],
        "rows on 8 bytes": torch.zeros(T, d + 8 // dtype.itemsize, dtype=dtype)[:, :d],
        "columns first": torch.zeros(d, T, dtype=dtype).t(),
        "a first element off 16 bytes": torch.zeros(T * d + 1, dtype=dtype)[1:].view(T, d),
    }
    for how, x in lying.items():
        x = x.copy_(tensors["x"].detach()).requires_grad_()
        logits = tensors["logits_or_scores"].detach().t().contiguous().t().requires_grad_()
        given = tensors | {"x": x, "logits_or_scores": logits}
        got = results(tilemoe.moe, given, K=K)
        for name in want:
            assert torch.equal(got[name], want[name]), (how, name)


def off_16_bytes(tensor, how):
    """The same values and layout where the library does not take them on a GPU."""
    turned = tensor.dim() == 3 and tensor.stride(2) != 1
    source = tensor.detach().transpose(1, 2) if turned else tensor.detach()
    if how == "rows":
        moved = source.new_zeros(*source.shape[:-1], source.shape[-1] + 1)[..., :-1]
    else:
        off = {"one element": 1, "8 bytes": 8 // source.itemsize}[how]
        moved = source.new_zeros(source.numel() + off)[off:].view(source.shape)
    moved = moved.copy_(source)
    return (moved.transpose(1, 2) if turned else moved).requires_grad_()


@pytest.mark.cpu  # on a GPU they are refused
@pytest.mark.parametrize("how", ["one element", "8 bytes", "rows"])
@pytest.mark.parametrize(
    "kinds", [{}, {"gate_layout": "split"}, {"transposed": True}], ids=["plain", "split", "turned"]
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_weights_off_16_bytes(dtype, kinds, how):
    tensors = logits_layer(dtype, bias=True, **kinds)
    options = dict(K=K, gate_layout=kinds.get("gate_layout", "concatenated"))
    want = results(tilemoe.moe, tensors, **options)
    moved = {
        name: off_16_bytes(t, how) if name[0] in "Wb" else t for name, t in tensors.items()
    }
    assert how == "rows" or all(t.data_ptr() % 16 for name, t in moved.items() if name[0] in "Wb")
    got = results(tilemoe.moe, moved, **options)
    compare_bits(got, want)
    for name in ("W1", "W2"):
        assert got[f"d{name}"].stride() == want[f"d{name}"].stride()
    compare_bits(results(tilemoe.moe, moved, overwrite_H=False, **options), want)


@pytest.mark.cpu
def test_compile_of_weights_off_16_bytes():
    torch._dynamo.reset()
    tensors = logits_layer(DTYPE, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    moved = {name: off_16_bytes(t, "8 bytes") for name, t in tensors.items()}
    layer = torch.compile(tilemoe.moe, fullgraph=True, backend="aot_eager")
    compare_bits(results(layer, moved, K=K), want)


@pytest.mark.cpu
@pytest.mark.parametrize("training", [True, False], ids=["training", "few tokens"])
def test_a_mapped_checkpoint_that_is_assigned(training):
    """A file of safetensors begins a tensor on 8 bytes."""
    torch.manual_seed(1)
    moe = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True, router_bias=True).train(training)
    x = normal(T, d, seed=20, dtype=torch.float32)
    with torch.set_grad_enabled(training):
        want = moe(x)
    state = {name: off_16_bytes(t, "8 bytes") for name, t in moe.state_dict().items()}
    moe.load_state_dict(state, assign=True)
    assert all(p.data_ptr() % 16 == 8 for p in moe.parameters())
    with torch.set_grad_enabled(training):
        out = moe(x)
    assert torch.equal(out, want)
    if training:
        out.sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in moe.experts.parameters())
    else:
        exported = torch.export.export(moe, (x,))
        assert torch.equal(exported.module()(x), moe(x))


def test_gradients_that_lie_badly():
    tensors = logits_layer(DTYPE)
    names = [name for name in tensors]
    O = tilemoe.moe(**tensors, K=K)
    inputs = [tensors[name] for name in names]
    of_sum = torch.autograd.grad(O.sum(), inputs, retain_graph=True)  # dO is one number, expanded
    of_ones = torch.autograd.grad(O, inputs, zeros(T, d) + 1, retain_graph=True)
    turned = torch.autograd.grad(O, inputs, (zeros(d, T) + 1).t())
    for a, b, c in zip(of_sum, of_ones, turned):
        assert torch.equal(a, b) and torch.equal(a, c)


COMPILED = {
    "top-K": dict(),
    "sigmoid": dict(scoring="sigmoid"),
    "rounded": dict(rounding="nearest", m=8),
    "dH over H": dict(overwrite_H=True),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", COMPILED)
def test_compile(how, backend):
    torch._dynamo.reset()
    tensors = logits_layer(DTYPE, bias=True)
    options = dict(K=K, **COMPILED[how])
    want = results(tilemoe.moe, tensors, **options)

    @torch.compile(fullgraph=True, backend=backend)
    def layer(**given):
        if backend == "inductor":  # nothing but the operators: elementwise work is a C++ compiler's
            return tilemoe.moe(**given, **options)
        O, aux = tilemoe.moe(**given, return_aux=True, **options)
        return O * (aux.skipped == 0)

    compare_bits(results(layer, tensors), want)


def test_compile_with_any_number_of_tokens():
    torch._dynamo.reset()
    tensors = logits_layer(DTYPE)
    layer = torch.compile(
        lambda x, logits: tilemoe.moe(x, logits, tensors["W1"], tensors["W2"], K=K),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    torch._dynamo.utils.counters.clear()
    for tokens in (T, 12, 29, 5):
        x = tensors["x"].detach()[:tokens].clone().requires_grad_()
        logits = tensors["logits_or_scores"].detach()[:tokens].clone().requires_grad_()
        O = layer(x, logits)
        assert torch.equal(O, tilemoe.moe(x, logits, tensors["W1"], tensors["W2"], K=K))
        O.sum().backward()
        assert x.grad.any()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compile_of_every_entry():
    torch._dynamo.reset()
    tensors = logits_layer(DTYPE)
    W1, W2 = tensors["W1"], tensors["W2"]
    counts = torch.tensor([5] * E)
    tokens, experts = torch.arange(T), torch.arange(T) % E

    def entries(x, logits):
        scores, ids = tilemoe.topk_router(logits, K)
        balance, z = tilemoe.router_losses(logits, counts.int())
        routed = tilemoe.moe(x, scores, W1, W2, ids=ids)
        grouped = tilemoe.grouped_experts(x, counts, W1, W2, row_scores=scores[:, 0])
        general = tilemoe.moe_general(x, tokens, experts, scores[:, 1], W1, W2)
        return routed + 2 * grouped + 3 * general + balance + z

    given = {"x": tensors["x"], "logits": tensors["logits_or_scores"]}
    want = results(entries, given)
    got = results(torch.compile(entries, fullgraph=True, backend="aot_eager"), given)
    compare(got, {name: t.double() for name, t in want.items()}, given)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    tensors = logits_layer(DTYPE)
    want = results(tilemoe.moe, tensors, K=K)

    def checkpointed(x, logits_or_scores, W1, W2):
        layer = lambda *args: tilemoe.moe(*args, K=K)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(
            layer, x, logits_or_scores, W1, W2, use_reentrant=use_reentrant
        )

    if not use_reentrant:
        return compare_bits(results(checkpointed, tensors), want)
    O = checkpointed(**tensors)  # reentrant checkpoints know of .backward() alone
    O.backward(normal(T, d, seed=30, dtype=DTYPE))
    compare_bits({"O": O, **{f"d{name}": t.grad for name, t in tensors.items()}}, want)


def test_checkpoint_of_stochastic_rounding_makes_the_same_choice():
    tensors = logits_layer(DTYPE)
    options = dict(
        K=K, rounding="stochastic", m=8, seed=torch.tensor([1]), offset=torch.tensor([2])
    )
    want = results(tilemoe.moe, tensors, **options)

    def checkpointed(x, logits_or_scores, W1, W2):
        layer = lambda *args: tilemoe.moe(*args, **options)  # noqa: E731
        args = (x, logits_or_scores, W1, W2)
        return torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)

    compare_bits(results(checkpointed, tensors), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    tensors = logits_layer(torch.float32, bias=True)
    tensors["addend"] = normal(T, d, seed=22, dtype=torch.float32).requires_grad_()
    cast = {
        name: t if name == "logits_or_scores" else t.detach().to(dtype).requires_grad_()
        for name, t in tensors.items()
    }
    want = results(tilemoe.moe, cast, K=K)
    with torch.autocast(DEVICE, dtype=dtype):
        O = tilemoe.moe(**tensors, K=K)
    assert O.dtype == dtype and torch.equal(O, want["O"])
    O.backward(normal(T, d, seed=30, dtype=dtype))
    for name, tensor in tensors.items():
        assert tensor.grad.dtype == torch.float32
        assert torch.equal(tensor.grad, want[f"d{name}"].float()), name
    with torch.autocast(DEVICE, enabled=False):
        assert tilemoe.moe(**logits_layer(DTYPE), K=K).dtype == DTYPE


def test_deterministic_algorithms():
    tensors = logits_layer(DTYPE, bias=True)
    want = results(tilemoe.moe, tensors, K=K)
    torch.use_deterministic_algorithms(True)
    try:
        compare_bits(results(tilemoe.moe, tensors, K=K), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.cpu
def test_threads_follow_torch():
    tensors = logits_layer(DTYPE)
    want = results(tilemoe.moe, tensors, K=K)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            compare_bits(results(tilemoe.moe, tensors, K=K), want)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_python_threads_at_once():
    tensors = logits_layer(DTYPE, bias=True)
    want = results(tilemoe.moe, tensors, K=K)

    def repeat(_):
        # A thread of Python's has torch's default number of threads: the pool changes under way.
        return [results(tilemoe.moe, tensors, K=K) for _ in range(10)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(4) as executor:
            for many in executor.map(repeat, range(4)):
                for got in many:
                    compare_bits(got, want)
    finally:
        torch.set_num_threads(before)


def test_weights_go_through_as_they_lie():
    tensors = logits_layer(DTYPE, transposed=True)
    whole = zeros(2 * E, d, 2 * n)  # a checkpoint's tensor of two layers, stored (E, d, 2n)
    whole[::2].copy_(tensors["W1"].detach().transpose(1, 2))
    tensors["W1"] = whole[::2].transpose(1, 2).requires_grad_()
    with Calls() as calls:
        tilemoe.moe(**tensors, K=K).sum().backward()
    (forward,), (backward,) = calls.of("moe"), calls.of("experts_backward_over_H")
    for W1, *_ in (forward[3], backward[4]):
        assert W1.data_ptr() == whole.data_ptr() and W1.stride() == tensors["W1"].stride()
    check("moe", tensors, K=K)


def test_compile_into_given_memory():
    torch._dynamo.reset()
    tensors = logits_layer(DTYPE)
    want = results(tilemoe.moe, tensors, K=K)
    given = WeightGradients(W1=zeros(E, 2 * n, d))
    layer = torch.compile(tilemoe.moe, fullgraph=True, backend="aot_eager")
    got = results(layer, tensors, K=K, weight_grad_out=given)
    assert got.pop("dW1") is None and torch.equal(given.W1, want.pop("dW1"))
    compare_bits(got, want)


def test_compile_under_autocast():
    torch._dynamo.reset()
    tensors = logits_layer(torch.float32)

    def layer(**given):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return tilemoe.moe(**given, K=K)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compare_bits(results(compiled, tensors), results(layer, tensors))


def test_compile_of_inference():
    torch._dynamo.reset()
    tensors = logits_layer(DTYPE)
    compiled = torch.compile(tilemoe.moe, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), Calls() as calls:
        O = compiled(**tensors, K=K)
    assert torch.equal(O, tilemoe.moe(**tensors, K=K))
    assert [args[-2] for args in calls.of("moe")] == [False]


@pytest.mark.cpu
def test_directions_by_differences():
    """A direction's derivative by differences, without the reference: in float32, so coarse."""
    tensors = logits_layer(DTYPE, bias=True)
    dO = normal(T, d, seed=30, dtype=DTYPE)
    gradients = results(tilemoe.moe, tensors, K=K)
    step = 1e-2
    for name in ("x", "W1", "W2", "b1", "b2"):
        direction = normal(*tensors[name].shape, seed=31, dtype=torch.float32)
        moved = [
            (tilemoe.moe(**tensors | {name: tensors[name] + h * direction}, K=K) * dO)
            .sum()
            .double()
            for h in (step, -step)
        ]
        slope = (moved[0] - moved[1]) / (2 * step)
        expected = (gradients[f"d{name}"] * direction).sum().double()
        assert abs(slope - expected) <= 2e-2 * abs(expected) + 0.1, name


def test_check_is_the_reference():
    check("moe", logits_layer(DTYPE), K=K)
