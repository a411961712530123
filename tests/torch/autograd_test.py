"""The layer among torch's own machinery: what is kept, what is computed, compiled, recomputed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilemoe
from checks import Calls, compiled, refused, same_bits
from comparison import assert_close
from random_layers import E, K, T, check, compare, d, logits_layer, n, normal, results
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
OVER_H = "experts_backward_over_H"


def zeros(*shape):
    return torch.zeros(shape, dtype=DTYPE)


def dO_of(dtype=DTYPE):
    return normal(T, d, seed=30, dtype=dtype)


def problem(dtype=DTYPE, options=None, **kinds):
    """-> a layer's tensors, and its results."""
    tensors = logits_layer(dtype, **kinds)
    return tensors, results(tilemoe.moe, tensors, K=K, **(options or {}))


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
def test_only_requested_gradients_are_computed(subset):
    wanted = [name for bit, name in enumerate(WANTED) if subset & 1 << bit]
    everything, want = problem(bias=True)
    for overwrite_H in (None, True):
        tensors = {key: t.detach().requires_grad_(key in wanted) for key, t in everything.items()}
        with Calls() as calls:
            O = tilemoe.moe(**tensors, K=K, overwrite_H=overwrite_H)
            O.backward(dO_of())
        (backward,) = calls.of(OVER_H)
        assert backward[-2] == sum(WANTED[name] for name in wanted)
        for name, tensor in tensors.items():
            assert (tensor.grad is not None) == (name in wanted)
            assert name not in wanted or torch.equal(tensor.grad, want[f"d{name}"])


@pytest.mark.parametrize("subset", [1, 2, 4, 8, 1 | 2, 4 | 8, 16 | 32, 1 | 8])
@pytest.mark.parametrize("how", ["grad", "backward", "of views"])
def test_only_inputs_of_a_walk_are_computed(how, subset):
    """All tensors require gradients; the walk names some of them."""
    names = [name for bit, name in enumerate(WANTED) if subset & 1 << bit]
    tensors, want = problem(bias=True)
    given = tensors if how != "of views" else {name: t.view_as(t) for name, t in tensors.items()}
    O = tilemoe.moe(**given, K=K)
    inputs = [(given if subset == 1 else tensors)[name] for name in names]
    with Calls() as calls:
        if how == "backward":
            O.backward(dO_of(), inputs=inputs)
            got = [tensor.grad for tensor in inputs]
        else:
            got = torch.autograd.grad(O, inputs, dO_of())
    (backward,) = calls.of(OVER_H)
    assert backward[-2] == sum(WANTED[name] for name in names)
    for name, gradient in zip(names, got, strict=True):
        assert torch.equal(gradient, want[f"d{name}"])


@pytest.mark.parametrize("name, answer", [("_running", None), ("_will_execute", True)])
def test_a_torch_without_the_answer_computes_everything(name, answer, monkeypatch):
    tensors, want = problem()
    monkeypatch.setattr(_engine, name, lambda *node: answer)
    O = tilemoe.moe(**tensors, K=K)
    with Calls() as calls:
        (dx,) = torch.autograd.grad(O, tensors["x"], dO_of())
    (backward,) = calls.of(OVER_H)
    assert backward[-2] == sum(WANTED[name] for name in tensors)
    assert torch.equal(dx, want["dx"])


def test_a_walk_of_the_whole_graph_does_not_check_each_input(monkeypatch):
    tensors, _ = problem()
    checked = []
    monkeypatch.setattr(_engine, "_will_execute", lambda node: checked.append(node) or True)
    tilemoe.moe(**tensors, K=K).backward(dO_of())
    assert not checked
    torch.autograd.grad(tilemoe.moe(**tensors, K=K), tensors["x"], dO_of())
    assert len(checked) == len(tensors)


def test_the_operators_compute_the_inputs_of_a_walk():
    x, logits, W1, W2 = logits_layer(DTYPE).values()
    packed = ([0, K, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0], [1.0, 0.0, 0.0, 0.0])
    O, *_ = torch.ops.tilemoe.moe(
        x, logits, None, [W1, None, W2, None, None, None], None, *packed, True, False
    )
    with Calls() as calls:
        torch.autograd.grad(O.sum(), [x, W2])
    wanted = [args[-1] for args in calls.of("experts_backward")]
    assert wanted == [_shapes.WANTED_X | _shapes.WANTED_W2]


def test_a_node_called_inside_of_another_one_computes_everything():
    """The engine that runs knows nothing of its graph."""
    tensors, want = problem()
    O = tilemoe.moe(**tensors, K=K)
    seen = []

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(O.grad_fn.apply(dO_of()))
            return gradient

    Outer.apply(zeros(3).requires_grad_()).sum().backward()
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
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_inference_keeps_nothing(how, inference):
    tensors, want = problem()
    layer = compiled(tilemoe.moe) if how == "compiled" else tilemoe.moe
    with inference(), Calls() as calls:
        O = layer(**tensors, K=K)
    (forward,) = calls.of("moe")
    assert forward[-2] is False and O.grad_fn is None and torch.equal(O, want["O"])
    with Saved() as saved:
        O = layer(**{name: t.detach() for name, t in tensors.items()}, K=K)
    assert saved.total() == 0 and O.grad_fn is None


@pytest.mark.parametrize("scoring", ["softmax_over_chosen", "sigmoid_renormalized"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("granularity", [1, 4])
def test_memory_kept_is_the_contract(granularity, gated, scoring):
    T, d, n, E, K = 512, 128, 128 // granularity, 16 * granularity, 2 * granularity
    leaf = lambda *shape, dtype=torch.bfloat16: torch.randn(shape, dtype=dtype).requires_grad_()
    x, logits = leaf(T, d), leaf(T, E, dtype=torch.float32)
    W1, W2 = leaf(E, 2 * n if gated else n, d), leaf(E, d, n)
    activation = "swiglu" if gated else "relu_squared"
    with Saved(W1, W2) as saved:
        tilemoe.moe(x, logits, W1, W2, K=K, activation=activation, scoring=scoring)
    pairs = T * K
    rows = 2 * T * d + (4 if gated else 2) * pairs * n
    logits_kept = 4 * T * E if scoring == "sigmoid_renormalized" else 0
    assert rows + logits_kept <= saved.total() <= 1.02 * (rows + 16 * pairs + logits_kept)


def test_logits_are_kept_where_they_are_read():
    tensors = logits_layer(DTYPE)
    for kept, options in (
        (False, {}),
        (False, dict(scoring="softmax_renormalized")),
        (True, dict(scoring="softmax_over_all")),
        (True, dict(scoring="sigmoid")),
        (True, dict(rounding="up", m=8)),
    ):
        with Saved() as saved:
            tilemoe.moe(**tensors, K=K, **options)
        at = tensors["logits_or_scores"].untyped_storage().data_ptr()
        assert (at in saved.storages) == kept, options


TWICE = {
    "moe": lambda x, logits, W1, W2: tilemoe.moe(x, logits, W1, W2, K=K).square().sum(),
    "router": lambda x, logits, *_: tilemoe.topk_router(logits, K)[0].square().sum(),
    "losses": lambda x, logits, *_: sum(
        tilemoe.router_losses(logits, torch.ones(E, dtype=torch.int32))
    ),
}


@pytest.mark.parametrize("what", TWICE)
def test_double_backward_raises(what):
    tensors = list(logits_layer(DTYPE).values())
    of = tensors[0] if what == "moe" else tensors[1]
    (gradient,) = torch.autograd.grad(TWICE[what](*tensors), of, create_graph=True)
    twice = "^double backward is not supported"
    refused(NotImplementedError, twice, gradient.sum().backward)


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
    refused(ValueError, "column_blocks must be >= 1, got -1", tilemoe.moe, **tensors, K=K, column_blocks=-1)


# ---------------------------------------------------------------- given memory


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overwrite_H", [False, True])
def test_weight_gradients_into_given_memory(overwrite_H, gradient_dtype):
    tensors, want = problem(torch.bfloat16, bias=True)
    ones = lambda *shape: torch.ones(shape, dtype=gradient_dtype)
    given = WeightGradients(W1=ones(E, 2 * n, d), b1=ones(E, 2 * n))
    for step in range(3):  # the first writes over the ones, the others add
        O = tilemoe.moe(
            **tensors, K=K, overwrite_H=overwrite_H, weight_grad_out=given, accumulate=step > 0
        )
        O.backward(dO_of(torch.bfloat16))
    assert tensors["W1"].grad is None and tensors["b1"].grad is None
    rounding = 2**-8 if gradient_dtype == torch.float32 else 2**-6
    for name, tensor in tensors.items():
        got, limit = getattr(given, name, None), rounding
        if got is None:
            got, limit = tensor.grad, 2**-7
        three = 3 * want[f"d{name}"].double()
        assert (got.double() - three).norm() <= limit * three.norm(), name


def test_micro_batches_in_any_order():
    tensors = logits_layer(DTYPE)
    given = given_memory()
    one, two = (tilemoe.moe(**tensors, K=K, weight_grad_out=given) for _ in range(2))
    one.sum().backward()
    two.sum().backward()
    want = torch.autograd.grad(tilemoe.moe(**tensors, K=K).sum(), [tensors["W1"], tensors["W2"]])
    assert_close(given.W1, 2 * want[0], "dW1")
    assert_close(given.W2, 2 * want[1], "dW2")


def given_memory():
    return WeightGradients(W1=zeros(E, 2 * n, d), W2=zeros(E, d, n))


@pytest.mark.parametrize("overwrite_H", [None, False])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_given_memory_is_written_where_the_walk_reaches_the_weight(checkpointed, overwrite_H):
    tensors = logits_layer(DTYPE)
    args = x, logits, W1, W2 = tuple(tensors.values())
    dx, _, dW1, dW2 = torch.autograd.grad(tilemoe.moe(*args, K=K), args, zeros(T, d) + 1)
    given = given_memory()

    def layer(*args):
        return tilemoe.moe(*args, K=K, weight_grad_out=given, overwrite_H=overwrite_H)

    O = (checkpoint(layer, *args, use_reentrant=False) if checkpointed else layer(*args)).sum()
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
    x, logits, W1, W2 = tensors.values()
    given = given_memory()

    def two(**more):
        inner = tilemoe.moe(**tensors, K=K, **more)
        return tilemoe.moe(inner, logits, W1, W2, K=K, **more).sum()

    want = torch.autograd.grad(two(), [W1, W2])
    O = two(weight_grad_out=given)
    torch.autograd.grad(O, x, retain_graph=True)
    assert not given.W1.any() and not given.W2.any()
    O.backward()
    assert_close(given.W1, want[0], "dW1")
    assert_close(given.W2, want[1], "dW2")


def test_a_frozen_weight_leaves_its_given_memory_alone():
    tensors = logits_layer(DTYPE)
    tensors["W1"].requires_grad_(False)
    given = given_memory()
    given.W1.fill_(1)
    tilemoe.moe(**tensors, K=K, weight_grad_out=given).sum().backward()
    assert (given.W1 == 1).all() and given.W2.any()


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

    stage, dO = Stage(), dO_of(torch.float32)
    x = normal(T, d, seed=20, dtype=torch.float32).requires_grad_()
    want = torch.autograd.grad(stage(x), [x, *stage.parameters()], dO)
    O = stage(x)
    with Calls() as calls:
        _, groups = stage_backward_input([O], [dO], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    of_moe = "moe_with_router_backward"
    (of_input,), (of_weights,) = calls.of(of_moe), calls.of(of_moe + "_over_H")
    assert of_input[-1] == _shapes.WANTED_X
    of_router = _shapes.WANTED_S
    assert of_weights[-1] == of_router | _shapes.WANTED_W1 | _shapes.WANTED_W2
    for got, expected in zip([x.grad, *(p.grad for p in stage.parameters())], want, strict=True):
        assert_close(got, expected.double(), "a gradient")


# ---------------------------------------------------------------- how tensors lie


def test_weights_go_through_as_they_lie_and_gradients_lie_as_they_do():
    tensors = logits_layer(DTYPE, transposed=True)
    whole = zeros(2 * E, d, 2 * n)  # a checkpoint's tensor of two layers, stored (E, d, 2n)
    whole[::2].copy_(tensors["W1"].detach().transpose(1, 2))
    got = results(tilemoe.moe, tensors, K=K)
    for name in ("W1", "W2"):
        assert tensors[name].stride(1) == 1 and got[f"d{name}"].stride() == tensors[name].stride()
    tensors["W1"] = whole[::2].transpose(1, 2).requires_grad_()
    with Calls() as calls:
        tilemoe.moe(**tensors, K=K).sum().backward()
    (forward,), (backward,) = calls.of("moe"), calls.of(OVER_H)
    for W1, *_ in (forward[3], backward[4]):
        assert W1.data_ptr() == whole.data_ptr() and W1.stride() == tensors["W1"].stride()
    check("moe", tensors, K=K)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_tensors_that_lie_badly(dtype):
    tensors, want = problem(dtype)
    wide = torch.zeros(T, 3 * d + 1, dtype=dtype)
    lying = {
        "every third column": wide[:, : 3 * d : 3],
        "rows off 16 bytes": wide[:, 1 : d + 1],
        "rows on 8 bytes": torch.zeros(T, d + 8 // dtype.itemsize, dtype=dtype)[:, :d],
        "columns first": torch.zeros(d, T, dtype=dtype).t(),
        "a first element off 16 bytes": torch.zeros(T * d + 1, dtype=dtype)[1:].view(T, d),
    }
    for x in lying.values():
        x = x.copy_(tensors["x"].detach()).requires_grad_()
        logits = tensors["logits_or_scores"].detach().t().contiguous().t().requires_grad_()
        same_bits(results(tilemoe.moe, tensors | {"x": x, "logits_or_scores": logits}, K=K), want)


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
    options = dict(gate_layout=kinds.get("gate_layout", "concatenated"))
    tensors, want = problem(dtype, options, bias=True, **kinds)
    moved = {
        name: off_16_bytes(t, how) if name[0] in "Wb" else t for name, t in tensors.items()
    }
    assert how == "rows" or all(t.data_ptr() % 16 for name, t in moved.items() if name[0] in "Wb")
    for overwrite_H in (None, False):
        got = results(tilemoe.moe, moved, K=K, overwrite_H=overwrite_H, **options)
        same_bits(got, want)
        assert all(got[name].stride() == want[name].stride() for name in ("dW1", "dW2"))
    if dtype == DTYPE and how == "8 bytes":
        same_bits(results(compiled(tilemoe.moe), moved, K=K, **options), want)


@pytest.mark.cpu
@pytest.mark.parametrize("training", [True, False], ids=["training", "small T"])
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
    inputs = list(logits_layer(DTYPE).values())
    O = tilemoe.moe(*inputs, K=K)
    of_sum = torch.autograd.grad(O.sum(), inputs, retain_graph=True)  # dO is one number, expanded
    of_ones = torch.autograd.grad(O, inputs, zeros(T, d) + 1, retain_graph=True)
    turned = torch.autograd.grad(O, inputs, (zeros(d, T) + 1).t())
    for a, b, c in zip(of_sum, of_ones, turned):
        assert torch.equal(a, b) and torch.equal(a, c)


# ---------------------------------------------------------------- compiled

COMPILED = {
    "top-K": dict(),
    "sigmoid": dict(scoring="sigmoid"),
    "rounded": dict(rounding="nearest", m=8),
    "dH over H": dict(overwrite_H=True),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", COMPILED)
def test_compile(how, backend):
    tensors, want = problem(options=COMPILED[how], bias=True)

    def layer(**given):
        if backend == "inductor":  # nothing but the operators: elementwise work is a C++ compiler's
            return tilemoe.moe(**given, K=K, **COMPILED[how])
        O, aux = tilemoe.moe(**given, K=K, return_aux=True, **COMPILED[how])
        return O * (aux.skipped == 0)

    same_bits(results(compiled(layer, backend), tensors), want)


def test_compile_with_any_number_of_tokens():
    _, _, W1, W2 = logits_layer(DTYPE).values()
    plain = lambda x, logits: tilemoe.moe(x, logits, W1, W2, K=K)
    layer = compiled(plain, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for tokens in (T, 12, 29, 5):
        tensors = logits_layer(DTYPE)
        x, logits = (tensors[k].detach()[:tokens].clone().requires_grad_() for k in list(tensors)[:2])
        O = layer(x, logits)
        assert torch.equal(O, plain(x, logits))
        O.sum().backward()
        assert x.grad.any()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compile_of_every_entry():
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
    got = results(compiled(entries), given)
    compare(got, {name: t.double() for name, t in want.items()}, given)


def test_compile_into_given_memory():
    tensors, want = problem()
    given = WeightGradients(W1=zeros(E, 2 * n, d))
    got = results(compiled(tilemoe.moe), tensors, K=K, weight_grad_out=given)
    assert got.pop("dW1") is None and torch.equal(given.W1, want.pop("dW1"))
    same_bits(got, want)


def test_compile_under_autocast():
    tensors = logits_layer(torch.float32)

    def layer(**given):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return tilemoe.moe(**given, K=K)

    same_bits(results(compiled(layer), tensors), results(layer, tensors))


# ---------------------------------------------------------------- autocast, threads, differences


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
    O.backward(dO_of(dtype))
    for name, tensor in tensors.items():
        assert tensor.grad.dtype == torch.float32
        assert torch.equal(tensor.grad, want[f"d{name}"].float()), name
    with torch.autocast(DEVICE, enabled=False):
        assert tilemoe.moe(**logits_layer(DTYPE), K=K).dtype == DTYPE


@pytest.fixture
def torchs_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.cpu
def test_threads_follow_torch(torchs_threads):
    tensors, want = problem()
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        same_bits(results(tilemoe.moe, tensors, K=K), want)
        assert torch.get_num_threads() == threads


def test_python_threads_at_once(torchs_threads):
    tensors, want = problem(bias=True)

    def repeat(_):
        # A thread of Python's has torch's default number of threads: the pool changes under way.
        return [results(tilemoe.moe, tensors, K=K) for _ in range(10)]

    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as executor:
        for many in executor.map(repeat, range(4)):
            for got in many:
                same_bits(got, want)


@pytest.mark.cpu
def test_directions_by_differences():
    """A direction's derivative by differences, without the reference: in float32, so coarse."""
    tensors, gradients = problem(bias=True)
    step, dO = 1e-2, dO_of()
    for name in ("x", "W1", "W2", "b1", "b2"):
        direction = normal(*tensors[name].shape, seed=31, dtype=torch.float32)
        at = lambda h: tilemoe.moe(**tensors | {name: tensors[name] + h * direction}, K=K)  # noqa: B023
        up, down = ((at(h) * dO).sum().double() for h in (step, -step))
        slope = (up - down) / (2 * step)
        expected = (gradients[f"d{name}"] * direction).sum().double()
        assert abs(slope - expected) <= 2e-2 * abs(expected) + 0.1, name
