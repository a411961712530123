"""dH over H: when a backward may write it, and what it does when it may not."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts,
)  # fmt: skip

import tilemoe
from checks import Calls, compiled, refused, same_bits
from random_layers import E, K, T, d, logits_layer, n, normal, results, weights
from target import DEVICE, DTYPE, DTYPES
from tilemoe import WeightGradients, _calls, _overwrite, _travel, autograd
from tilemoe.options import Options

OVER_H = "experts_backward_over_H"
KEEPS_H = "experts_backward"


USED_UP = "an earlier backward wrote dH over the saved H"
FREED = "backward through the graph a second time"
TWICE = "^double backward is not supported"


def dO_of(O):
    return normal(*O.shape, seed=30, dtype=O.dtype)


def gradients(O, tensors, **options):
    """-> {name: gradient} of tensors that require one."""
    names = [name for name, t in tensors.items() if t is not None and t.requires_grad]
    inputs = [tensors[name] for name in names]
    found = torch.autograd.grad(O, inputs, dO_of(O), **options)
    return {name: g for name, g in zip(names, found, strict=True)}


def expected(tensors, **options):
    """O's gradients with H left as it is."""
    return gradients(tilemoe.moe(**tensors, K=K, overwrite_H=False, **options), tensors)


def problem(**kinds):
    """-> a layer's tensors, and the gradients that they are to have."""
    tensors = logits_layer(DTYPE, **kinds)
    return tensors, expected(tensors)


# ------------------------------------------------------------ the same bits


def leaf(*shape, seed, dtype=torch.float32):
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def grouped(dtype):
    given = {
        "rows": leaf(T, d, seed=20, dtype=dtype),
        "counts": torch.tensor([5, 0, 9, 1, 7, 3, 6]),  # and rows past their sum
        "row_scores": leaf(T, seed=22),
        "addend": leaf(T, d, seed=23, dtype=dtype),
    }
    return tilemoe.grouped_experts, given | weights(dtype, bias=True), {}


def general(dtype):
    pairs = torch.arange(2 * T)
    given = {
        "x": leaf(T, d, seed=20, dtype=dtype),
        "tokens": pairs // 2,
        "experts": pairs * 5 % (E + 1) - 1,  # -1 is skipped
        "scores": leaf(2 * T, seed=22),
    }
    return tilemoe.moe_general, given | weights(dtype, bias=True), {}


def chosen(dtype):
    given = {
        "x": leaf(T, d, seed=20, dtype=dtype),
        "logits_or_scores": leaf(T, K, seed=21),
        "ids": torch.arange(T * K).view(T, K) % E,
    }
    return tilemoe.moe, given | weights(dtype), {}


def logits(dtype, options=None, **kinds):
    return tilemoe.moe, logits_layer(dtype, **kinds), dict(K=K, **(options or {}))


PLAIN = dict(activation="relu_squared")
LAYERS = {
    "logits": logits,
    "sigmoid": lambda dtype: logits(dtype, dict(scoring="sigmoid")),
    "rounded": lambda dtype: logits(dtype, dict(rounding="nearest", m=8)),
    "biases": lambda dtype: logits(dtype, bias=True),
    "split": lambda dtype: logits(dtype, dict(gate_layout="split"), gate_layout="split", bias=True),
    "interleaved": lambda dtype: logits(dtype, dict(gate_layout="interleaved"), bias=True),
    "transposed": lambda dtype: logits(dtype, transposed=True),
    "plain": lambda dtype: logits(dtype, PLAIN, **PLAIN),
    "ids": chosen,
    "general": general,
    "grouped": grouped,
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_bits_wherever_dH_lies(layer, dtype):
    function, tensors, options = LAYERS[layer](dtype)
    want = results(function, tensors, overwrite_H=False, **options)
    for overwrite_H, operator in ((None, OVER_H), (True, OVER_H), (False, KEEPS_H)):
        with Calls() as calls:
            got = results(function, tensors, overwrite_H=overwrite_H, **options)
        assert calls.names == [operator]
        same_bits(got, want)
    assert all(g is not None and g.any() for g in want.values())


def test_the_module_leaves_it_open_and_takes_an_answer():
    x = normal(T, d, seed=20, dtype=DTYPE).requires_grad_()
    of_moe = "moe_with_router_backward"
    want = {None: of_moe + "_over_H", True: of_moe + "_over_H", False: of_moe}
    for overwrite_H, operator in want.items():
        torch.manual_seed(1)
        moe = tilemoe.MoE(d, n, E, K, return_aux=True, dtype=DTYPE, device=DEVICE, overwrite_H=overwrite_H)
        out, _ = moe(x)
        with Calls() as calls:
            out.sum().backward()
        assert calls.names == [operator]
    assert tilemoe.MoE(d, n, E, K, device="meta").overwrite_H is None


# ------------------------------------------------------- kept and used graphs


def test_a_kept_graph_is_used_again():
    tensors, want = problem(bias=True)
    O = tilemoe.moe(**tensors, K=K)
    with Calls() as calls:
        for keep in (True, True, False):
            same_bits(gradients(O, tensors, retain_graph=keep), want)
    assert calls.names == [KEEPS_H, KEEPS_H, OVER_H]
    refused(RuntimeError, FREED, gradients, O, tensors)


def test_parts_of_a_kept_graph_in_any_order():
    tensors, want = problem(bias=True)
    O = tilemoe.moe(**tensors, K=K)
    for order in (["W1"], ["x", "b2"], ["logits_or_scores"], ["b1", "W2"], ["x"]):
        got = torch.autograd.grad(O, [tensors[k] for k in order], dO_of(O), retain_graph=True)
        for name, gradient in zip(order, got):
            assert torch.equal(gradient, want[name])
    O.backward(dO_of(O), inputs=[tensors["W2"], tensors["x"]])
    assert torch.equal(tensors["W2"].grad, want["W2"]) and tensors["W1"].grad is None
    refused(RuntimeError, FREED, torch.autograd.grad, O, tensors["W1"], dO_of(O))


def test_answered_with_true_a_kept_graph_is_used_up():
    tensors, want = problem()
    O = tilemoe.moe(**tensors, K=K, overwrite_H=True)
    same_bits(gradients(O, tensors, retain_graph=True), want)
    for _ in range(2):
        refused(RuntimeError, USED_UP, gradients, O, tensors, retain_graph=True)


def test_two_layers_in_one_graph_and_one_output_used_twice():
    tensors = logits_layer(DTYPE)

    def stacked(overwrite_H):
        layer = lambda x: tilemoe.moe(**tensors | {"x": x}, K=K, overwrite_H=overwrite_H)
        inner = layer(tensors["x"])
        return (layer(inner) + inner * inner).float()

    want = gradients(stacked(False), tensors)
    with Calls() as calls:
        same_bits(gradients(stacked(None), tensors), want)
    assert calls.names == [OVER_H] * 2


def test_a_graph_of_gradients_keeps_H():
    tensors, want = problem()
    for keep in (True, False):  # False: no graph is kept, but one of this backward is made
        O = tilemoe.moe(**tensors, K=K)
        got = gradients(O, tensors, create_graph=True, retain_graph=keep)
        same_bits({name: g.detach() for name, g in got.items()}, want)
        refused(NotImplementedError, TWICE, got["x"].sum().backward)
    O = tilemoe.moe(**tensors, K=K, overwrite_H=True)
    refused(NotImplementedError, TWICE, gradients, O, tensors, create_graph=True)


def test_threads_with_graphs_of_their_own():
    tensors, want = problem()
    outputs = [tilemoe.moe(**tensors, K=K) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for options in (dict(retain_graph=True), {}):
            for got in threads.map(lambda O: gradients(O, tensors, **options), outputs):  # noqa: B023
                same_bits(got, want)


def test_a_node_called_by_hand_keeps_H():
    """No engine runs, so no one frees the graph after it."""
    tensors, want = problem()
    O = tilemoe.moe(**tensors, K=K)
    with Calls() as calls:
        O.grad_fn.apply(dO_of(O))
    assert calls.names == [KEEPS_H]
    same_bits(gradients(O, tensors), want)


# ------------------------------------------------------------- saved tensors


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_overwrite_what_they_recomputed(use_reentrant):
    tensors, want = problem()
    layer = lambda *args: tilemoe.moe(*args, K=K)
    args = list(tensors.values())
    O = checkpoint(layer, *args, use_reentrant=use_reentrant)
    with Calls() as calls:
        O.backward(dO_of(O), retain_graph=not use_reentrant)
    assert calls.names == [OVER_H if use_reentrant else KEEPS_H]
    assert torch.equal(O, tilemoe.moe(**tensors, K=K))
    same_bits({name: t.grad for name, t in tensors.items()}, want)
    if not use_reentrant:
        with Calls() as calls:
            same_bits(gradients(O, tensors), want)
        assert calls.names == [OVER_H]


def test_a_selective_checkpoint_that_puts_the_layer_by():
    tensors, want = problem()

    def policy(context, op, *args, **kwargs):
        ours = op is torch.ops.tilemoe.moe.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    O = checkpoint(
        lambda *args: tilemoe.moe(*args, K=K),
        *tensors.values(),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    same_bits(gradients(O, tensors), want)


def test_hooks_that_copy_have_right_gradients_each_time():
    tensors, want = problem()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.device, t.to("cpu", copy=True)), lambda kept: kept[1].to(kept[0], copy=True)
    )
    with hooks:
        O = tilemoe.moe(**tensors, K=K)
    with Calls() as calls:
        same_bits(gradients(O, tensors, retain_graph=True), want)
        same_bits(gradients(O, tensors), want)
    assert calls.names == [KEEPS_H, OVER_H]
    with torch.autograd.graph.save_on_cpu():
        O = tilemoe.moe(**tensors, K=K)
    same_bits(gradients(O, tensors), want)


def test_a_hook_that_keeps_the_tensor_sees_dH():
    """As the documentation says: what the hook holds is H itself."""
    tensors, want = problem()
    seen = []

    def pack(tensor):
        if tensor.shape == (T * K, 2 * n):
            seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        O = tilemoe.moe(**tensors, K=K)
    (H,) = seen
    before = H.clone()
    same_bits(gradients(O, tensors), want)
    assert not torch.equal(H, before)


def test_H_with_another_tensor_on_it_is_kept():
    tensors, want = problem()
    seen = []

    class Puts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.tilemoe.moe.default:
                seen.append(out[1].detach())
            return out

    with Puts():
        O = tilemoe.moe(**tensors, K=K)
    (H,) = seen
    before = H.clone()
    same_bits(gradients(O, tensors), want)
    assert torch.equal(H, before)


def refuses_to_count(storage):
    raise TypeError("another signature")


COUNTS = {  # how another torch might count the users of memory: whether H may be overwritten
    "one less": (lambda count: lambda storage: count(storage) - 1, True),
    "not at all": (None, False),
    "with an error": (lambda count: refuses_to_count, False),
    "always alike": (lambda count: lambda storage: 2, False),
    "always one": (lambda count: lambda storage: 1, False),
    "two for each": (lambda count: lambda storage: 2 * count(storage), False),
}


@pytest.mark.parametrize("how", COUNTS)
def test_H_is_kept_unless_torchs_count_of_users_is_understood(how, monkeypatch):
    make, overwrites = COUNTS[how]
    if make is None:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    else:
        monkeypatch.setattr(torch._C, "_storage_Use_Count", make(torch._C._storage_Use_Count))
    monkeypatch.setattr(_overwrite, "_uses_memory_alone", _overwrite._probe())
    expect(OVER_H if overwrites else KEEPS_H)


def test_H_is_kept_if_torch_reports_a_freed_graph_though_no_backward_runs(monkeypatch):
    monkeypatch.setattr(_overwrite, "_keeps_graph", lambda: False)
    monkeypatch.setattr(_overwrite, "_uses_memory_alone", _overwrite._probe())
    expect(KEEPS_H)


def expect(operator):
    """That a backward runs it, with the right gradients."""
    tensors, want = problem()
    O = tilemoe.moe(**tensors, K=K)
    with Calls() as calls:
        same_bits(gradients(O, tensors), want)
    assert calls.names == [operator]


def test_without_torchs_answer_H_is_kept(monkeypatch):
    monkeypatch.setattr(_overwrite, "_keeps_graph", lambda: True)  # as where torch lacks it
    expect(KEEPS_H)


def test_the_operators_leave_H_as_it_is():
    """They give H to their caller."""
    tensors, want = problem()
    x, logits, W1, W2 = tensors.values()
    weights = [W1, None, W2, None, None, None]
    packed = ([0, K, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0], [1.0, 0.0, 0.0, 0.0])
    O, H, routing, _ = torch.ops.tilemoe.moe(
        x, logits, None, weights, None, *packed, True, False
    )
    before = H.clone()
    same_bits(gradients(O, tensors), want)
    assert torch.equal(H, before)
    O, H = torch.ops.tilemoe.experts(
        x, logits, routing, weights, None, T * K, *packed, True, False
    )
    same_bits(gradients(O, tensors), want)
    assert torch.equal(H, before)


# ------------------------------------------------------------------- tracing


def refuse_reading_the_graph(monkeypatch):
    def called():
        raise AssertionError("a traced backward reads whether its graph is kept")

    monkeypatch.setattr(_overwrite, "_keeps_graph", called)


@pytest.mark.parametrize("how", ["real", "fake"])
def test_a_traced_backward_keeps_H(how, monkeypatch):
    tensors, want = problem()
    refuse_reading_the_graph(monkeypatch)

    def both(dO, *leaves):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        O = tilemoe.moe(*leaves, K=K)
        return torch.autograd.grad(O, leaves, dO)

    args = normal(T, d, seed=30, dtype=DTYPE), *tensors.values()
    graph = make_fx(both, tracing_mode=how)(*args)
    called = [str(node.target) for node in graph.graph.nodes if "tilemoe" in str(node.target)]
    assert called == ["tilemoe.moe.default", "tilemoe.experts_backward.default"]
    for got, name in zip(graph(*args), want):
        assert torch.equal(got, want[name])


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_compiled_layer_keeps_H(backend, monkeypatch):
    tensors, want = problem()
    refuse_reading_the_graph(monkeypatch)
    O = compiled(tilemoe.moe, backend)(**tensors, K=K)
    same_bits(gradients(O, tensors, retain_graph=True), want)
    same_bits(gradients(O, tensors), want)


@pytest.mark.parametrize("overwrite_H", [None, True])
@pytest.mark.parametrize("seen_by", ["the compiler", "a mode"])
def test_compiled_autograd(seen_by, overwrite_H):
    """Where a dispatch mode is on Dynamo leaves the traced graph to Python, node by node."""
    torch._dynamo.reset()
    tensors, want = problem()
    compiler = torch.compile(backend="aot_eager")

    def backward(O, keep):
        for tensor in tensors.values():
            tensor.grad = None
        with torch._dynamo.compiled_autograd._enable(compiler):
            O.backward(dO_of(O), retain_graph=keep)
        same_bits({name: t.grad for name, t in tensors.items()}, want)

    for keep in (False, True, False):  # traced, then run from the cache
        with Calls() if seen_by == "a mode" else contextlib.nullcontext() as mode:
            O = tilemoe.moe(**tensors, K=K, overwrite_H=overwrite_H)
            backward(O, keep)
            if keep and overwrite_H is None:
                backward(O, keep)
        assert overwrite_H or mode is None or OVER_H not in mode.names
        if keep and overwrite_H and mode is not None:
            refused(RuntimeError, USED_UP, O.backward, dO_of(O))


@pytest.mark.parametrize(
    ("forward", "backward", "operator"),
    [(None, None, OVER_H), (7, 7, OVER_H), (7, 8, KEEPS_H), (None, 8, KEEPS_H),
     (7, None, KEEPS_H)],
)  # fmt: skip
def test_H_of_another_capture_is_kept(forward, backward, operator, monkeypatch):
    """A captured graph is replayed and checks nothing then: cuda_test.py has graphs."""
    monkeypatch.setattr(autograd, "capture_of", lambda tensor: forward)
    monkeypatch.setattr(_overwrite, "capture_of", lambda tensor: backward)
    expect(operator)


# ------------------------------------------------------------- given memory


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "names", [["W1"], ["b1"], ["W2"], ["W1", "b1"], ["W1", "W2", "b1", "b2"]], ids=",".join
)
def test_given_memory_among_new(names, accumulate):
    tensors = logits_layer(DTYPE, bias=True)
    dO = normal(T, d, seed=30, dtype=DTYPE)
    found = {}
    for overwrite_H in (False, None):
        given = {name: torch.ones_like(tensors[name]) for name in names}
        O = tilemoe.moe(
            **tensors, K=K, overwrite_H=overwrite_H, weight_grad_out=WeightGradients(**given),
            accumulate=accumulate,
        )  # fmt: skip
        others = {name: t for name, t in tensors.items() if name not in names}
        with Calls() as calls:
            O.backward(dO)
        assert calls.names == [OVER_H if overwrite_H is None else "experts_backward_out"]
        found[overwrite_H] = given | {name: t.grad for name, t in others.items()}
        for tensor in tensors.values():
            tensor.grad = None
    same_bits(found[None], found[False])


def test_memory_for_a_gradient_that_is_not_wanted():
    """The gradients that are wanted do not depend on what their new memory contained."""
    tensors, want = problem()
    given = torch.zeros_like(tensors["W1"])
    for overwrite_H in (False, None):
        O = tilemoe.moe(
            **tensors, K=K, overwrite_H=overwrite_H, weight_grad_out=WeightGradients(W1=given)
        )
        spoilt = [torch.full_like(tensors["W2"], torch.nan) for _ in range(8)]
        del spoilt  # memory that the allocator returns next
        (found,) = torch.autograd.grad(O, tensors["W2"], dO_of(O))
        assert torch.equal(found, want["W2"]) and not given.any()


# ------------------------------------------------------------- travel


class OneProcess(_travel.Travel):
    """X and dO, which are there from the beginning."""

    overlap = True

    def begin(self, source):
        return source


def travelling_layer(tensors, travel, overwrite_H=None, given=None):
    """-> O of experts whose X and dO `travel` brings, or of a layer that does not travel (None)"""
    x, scores, W1, W2, b1, b2 = map(tensors.get, ("x", "scores", "W1", "W2", "b1", "b2"))
    ids = (torch.arange(T * K).view(T, K) % E).to(DEVICE)
    routing = torch.ops.tilemoe.route_top_k(ids, scores.detach(), E, T * K)
    return autograd.differentiated(
        torch.ops.tilemoe.experts.default, (x, scores, W1, None, W2, b1, None, b2, None), routing,
        (T * K, [0, K, -1, 1, 1, 0, 0, 0, 1, 1, 0, 0], [1.0, 0.0, 0.0, 0.0]), overwrite_H, False, given,
        given is not None, travel and _travel.Comm(travel, x),
    )  # fmt: skip


def travelling_tensors():
    tensors = {"x": leaf(T, d, seed=20, dtype=DTYPE), "scores": leaf(T, K, seed=21)}
    return {k: t for k, t in (tensors | weights(DTYPE, bias=True)).items() if t is not None}


@pytest.mark.cpu  # torch's engine runs the nodes of a GPU in one thread
def test_of_two_threads_with_one_graph_only_one_writes_dH():
    class Waits(OneProcess):
        """The first backward waits, after it has claimed H, until the second has failed."""

        def __init__(self):
            self.claimed, self.other_failed = threading.Event(), threading.Event()

        def gradient_arrived(self, chunk=None):
            self.claimed.set()
            assert self.other_failed.wait(30)

    tensors, travel = travelling_tensors(), Waits()
    want = gradients(travelling_layer(tensors, None, overwrite_H=False), tensors)
    O = travelling_layer(tensors, travel, overwrite_H=True)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(gradients, O, tensors, retain_graph=True)
        try:
            assert travel.claimed.wait(30)
            refused(RuntimeError, USED_UP, gradients, O, tensors, retain_graph=True)
        finally:
            travel.other_failed.set()
        same_bits(first.result(), want)


@pytest.mark.parametrize("names", [["W1"], ["b1"], ["W2"], ["W1", "b1"]], ids=",".join)
def test_given_memory_of_a_travelling_layer_is_added_to_once(names):
    tensors = travelling_tensors()
    others = [tensor for name, tensor in tensors.items() if name not in names]
    found = {}
    for travel in (None, OneProcess()):
        given = {name: torch.ones_like(tensors[name]) for name in names}
        O = travelling_layer(tensors, travel, given=WeightGradients(**given))
        of_given = [tensors[name] for name in names]
        new = torch.autograd.grad(O, others + of_given, dO_of(O), allow_unused=True)
        found[travel] = [*new[: len(others)], *given.values()]
    for plain, travelling in zip(*found.values(), strict=True):
        assert torch.equal(plain, travelling)


class StopsAt(OneProcess):
    """The same in chunks; the one of number `chunk` cannot be had once."""

    def __init__(self, chunk):
        self.chunk = chunk

    def gradient_arrived(self, chunk=None):
        if chunk is not None and chunk == self.chunk:
            self.chunk = None
            raise torch.OutOfMemoryError("no memory for a chunk")


@pytest.mark.parametrize("stopped_at", [0, 1, 2])
def test_chunks_that_were_interrupted_give_no_wrong_gradient(stopped_at):
    def layer(travel):
        x, scores = leaf(T, d, seed=20, dtype=DTYPE), leaf(T, K, seed=21)
        of = weights(DTYPE)
        comm = _travel.Comm(travel, x)
        ids = torch.arange(T * K).view(T, K) % E
        experts = _calls.Layer([of["W1"], None, of["W2"], None, None, None], Options())
        out, _ = _calls.of_ids(
            x, scores, ids.to(DEVICE), E, experts, None, None, "nan", False, comm, [0, 3, 5, T]
        )
        return out, {"x": x, "scores": scores, **{k: w for k, w in of.items() if w is not None}}

    out, tensors = layer(StopsAt(None))
    want = gradients(out, tensors)
    out, tensors = layer(StopsAt(stopped_at))
    if stopped_at == 0:  # nothing was written yet
        refused(torch.OutOfMemoryError, "no memory for a chunk", gradients, out, tensors)
        same_bits(gradients(out, tensors), want)
        return
    for said in (f"overwritten with dH for {stopped_at} of 3 chunks", "an earlier backward wrote dH over"):
        refused(RuntimeError, said, gradients, out, tensors)
