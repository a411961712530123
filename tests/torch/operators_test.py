"""What torch knows about each operator: schema, fake kernel, autograd; and what the operators
refuse, in the same words whether a kernel runs or torch only traces."""

import os
import re

import numpy as np
import pytest
import torch
import torch.testing._internal.optests
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import tilemoe
from checks import refused
from random_layers import E, K, T, d, logits_layer, n, normal, weights
from target import DEVICE, DTYPE
from tilemoe import _calls, _layout, _library, ops, options
from tilemoe._quantized import operands

tm = torch.ops.tilemoe


def chosen_by(scoring=0, K=K, kind=0, groups=(1, 1, 0), factor=1.0):
    """An operator's rule and its factor; without arguments top-K, softmax over the chosen."""
    return [kind, K, scoring, *groups], factor


def packed(kind=0, K=K, scoring=0, gate_layout=0, **more):
    """An operator's numbers and reals; without arguments also swiglu, concatenated."""
    rule, factor = chosen_by(scoring, K, kind, **more)
    return [*rule, 0, gate_layout, 1, 1, 0, 0], [factor, 0.0, 0.0, 0.0]


def places(**given):
    """An operator's gradients, and their places."""
    assert given.keys() <= set(_layout.GRADIENTS)
    return _layout.pack_gradients([given.get(name) for name in _layout.GRADIENTS])


def zeros(*shape):
    return torch.zeros(shape, dtype=DTYPE)


def leaf(tensor):
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def example():
    """A layer and what its forward made, by name."""
    logits = normal(T, E, seed=1, dtype=torch.float32)
    X = normal(T, d, seed=2, dtype=DTYPE)
    W1, W2, b1, b2 = (
        weights(DTYPE, bias=True)[k].detach() for k in ("W1", "W2", "b1", "b2")
    )
    scores, ids, counts = tm.top_k(logits, None, *chosen_by(), torch.int32)
    routing, _ = tm.route_logits(logits, None, *chosen_by())
    layer = [W1, None, W2, b1, None, b2]
    O, H = tm.experts(X, logits, routing, layer, None, T * K, *packed(), True, False)
    return dict(
        logits=logits, X=X, layer=layer, scores=scores, ids=ids, counts=counts, routing=routing,
        H=H, ds=normal(T, K, seed=3, dtype=torch.float32),
        dO=normal(T, d, seed=4, dtype=DTYPE),
    )  # fmt: skip


def experts_arguments(x, X=None, layer=None, addend=None, keep_H=True):
    X = x["X"] if X is None else X
    layer = x["layer"] if layer is None else layer
    return X, x["logits"], x["routing"], layer, addend, T * K, *packed(), keep_H, False


def backward_out_arguments(x, consume):
    gradients = _layout.pack_gradients(
        [torch.zeros_like(t) if t is not None else None for t in (x["X"], x["ds"], *x["layer"])]
    )
    H = (None, x["H"]) if consume else (x["H"], None)
    return x["dO"], x["X"], *H, x["routing"], x["layer"], *gradients, *packed(), True


def _split_transposed():
    made = weights(DTYPE, gate_layout="split", transposed=True, bias=True)
    return [made[k] for k in ("W1", "W1_up", "W2", "b1", "b1_up", "b2")]


SOURCES = [normal(T, d, seed=seed, dtype=DTYPE) for seed in (6, 7)]  # whose addresses are given


def cases():
    x = example()
    logits, routing, layer = x["logits"], x["routing"], x["layer"]
    one = torch.tensor([1])
    split = _split_transposed()
    yield "top_k", *((leaf(logits), None, *chosen_by(s), torch.int64) for s in range(5))
    yield "top_k", (leaf(logits), torch.ones(E), *chosen_by(4, factor=2.5), torch.int32)
    groups = (E, 4, 1)  # E is prime: groups of one expert
    yield "top_k", (leaf(logits), None, *chosen_by(0, groups=groups), torch.int32)
    ids = torch.arange(T * K).reshape(T, K) % (E + 2) - 1
    yield "scores_at", *((leaf(logits), ids, s, 2.5) for s in range(5))
    yield "scores_at", (logits, ids.int(), 0, 1.0)
    yield "top_k_backward", (x["ds"], x["ids"], x["scores"], None, E, 0, 1.0, torch.float32)
    yield "top_k_backward", (x["ds"], x["ids"], x["scores"], logits, E, 3, 2.5, torch.float32)
    yield "route_logits", (logits, None, *chosen_by(1)), (logits, torch.ones(E), *chosen_by(3))
    yield "route_top_k", *((x["ids"], x["scores"], E, rows) for rows in (T * K, T))
    tokens = torch.tensor([0, 0, 2])
    yield "route_general", (tokens, torch.tensor([1, 2, -1]), torch.rand(3), T, E)
    yield "route_rounded", *((logits, None, None, K, 4, r, 0) for r in (0, 1, 2, 4))
    yield "route_rounded", (logits, one, one, K, 4, 3, 0), (logits, one, one, K, 4, 3, T)
    counts = torch.arange(E)
    yield "route_grouped", (counts, torch.rand(T), T), (counts, None, T)
    yield "experts", experts_arguments(x), experts_arguments(x, keep_H=False)
    yield (
        "experts",
        experts_arguments(x, leaf(x["X"]), [leaf(w) for w in layer], leaf(x["X"])),
        (leaf(x["X"]), leaf(logits), routing, split, None, T * K, *packed(gate_layout=2), True,
         False),
    )  # fmt: skip
    all_scores = (*packed(scoring=1), True, False)
    yield "moe", (x["X"], logits, None, layer, None, *all_scores)
    leaves = [leaf(w) for w in layer]
    yield "moe", (leaf(x["X"]), leaf(logits), None, leaves, leaf(x["X"]), *all_scores)
    yield "moe", (x["X"], logits, torch.ones(E), layer, None, *packed(scoring=3), False, False)
    scaled = packed(scoring=4, groups=groups, factor=2.5)
    yield "moe", (leaf(x["X"]), leaf(logits), None, leaves, None, *scaled, True, False)
    router = normal(E, d, seed=5, dtype=DTYPE)
    of_tokens = (x["X"], router, zeros(E), None, layer, None)
    yield "moe_with_router", (*of_tokens, *all_scores), (leaf(x["X"]), *of_tokens[1:], *all_scores)
    leaves_of_router = leaf(router), leaf(zeros(E)), None
    yield "moe_with_router", (x["X"], *leaves_of_router, leaves, leaf(x["X"]), *scaled, True, False)
    saved = (x["dO"], None, x["X"], x["H"], routing, router, layer)
    given = logits.to(DTYPE)
    with_losses = (x["dO"], given, *saved[2:])
    of_some = packed(), (1, 2, 4, 16, 1 | 2 | 256, 1 | 32 | 128)
    for name in ("moe_with_router_backward", "moe_with_router_backward_over_H"):
        yield name, *((*saved, None, *of_some[0], wanted) for wanted in of_some[1])
        yield name, (*with_losses, given, *packed(scoring=3, factor=2.5), 1 | 2 | 4 | 16 | 256)
    yield "router_logits", (x["X"], router, None, torch.float32)
    yield "router_logits", (leaf(x["X"]), leaf(router), leaf(zeros(E)), DTYPE)
    yield "moe_tokens", (*of_tokens, *packed(), DTYPE, True)
    wide = (x["X"], router.float(), None, torch.ones(E), layer, x["X"])
    yield "moe_tokens", (*wide, *packed(scoring=3, factor=2.5), torch.float32, False)
    saved = (x["dO"], x["X"], x["H"], routing)
    chosen = (*packed(), torch.float32)
    yield (
        "experts_backward",
        *((*saved, layer, None, *chosen, w) for w in (1, 2, 4, 16, 1 | 32 | 128)),
    )
    of_sigmoid = packed(scoring=3, factor=2.5)
    yield "experts_backward", (*saved, layer, logits, *of_sigmoid, torch.float32, 3)
    split = [w.detach() for w in split]
    yield "experts_backward", (*saved, split, None, *packed(gate_layout=2), torch.float32, 255)
    over_H, dW1 = (*saved, layer, None), torch.zeros_like(layer[0])
    yield (
        "experts_backward_over_H",
        *((*over_H, *places(), *chosen, w, False) for w in (1, 2, 4, 16, 1 | 4 | 32)),
        (*over_H, *places(dW1=dW1), *chosen, 1 | 2 | 16 | 32, True),
        (None, *over_H[1:], *places(), *chosen, 4 | 32, False),
    )
    yield "experts_backward_out", *(backward_out_arguments(x, consume) for consume in (False, True))
    second = (None, x["X"], None, x["H"], routing, layer, *places(dW1=dW1), *packed(), False)
    yield "experts_backward_out", second
    yield from parts(x)
    yield from other_kinds(x)
    yield from adapters(x)
    yield from quantized(x)
    yield from one_gemm(x)
    yield "router_backward", (x["ds"], routing, None, E, *chosen_by(), torch.float32)
    yield "router_backward", (x["ds"], routing, logits, E, *chosen_by(1, factor=2.5), torch.float32)
    yield "router_losses", (leaf(logits), x["counts"])
    yield "router_losses_backward", (logits, x["counts"], 1.0, 0.5)
    sums = [s.data_ptr() for s in SOURCES], T, torch.arange(2 * T, dtype=torch.int32).view(T, 2)
    yield "sum_rows", (*sums, None, zeros(T, d)), (*sums, x["X"], zeros(T, d))


def one_gemm(x):
    """gathered_mm and combine_mm, of a top-K routing and of a grouped one."""
    X, routing, dO, (W1, _, W2, b1, _, b2) = x["X"], x["routing"], x["dO"], x["layer"]
    W2 = torch.cat([W2, W2], -1)  # as wide as H
    grouped = tm.route_grouped(torch.full((E,), 4), None, T)
    leaves = [leaf(t) for t in (X, W1, b1)]
    yield (
        "gathered_mm",
        (X, routing, W1, None, T * K, 0, K),
        (leaves[0], routing, *leaves[1:], T * K, 0, K),
        (leaf(X), grouped, W1, b1, T, 3, 0),
    )
    h, rows = x["H"], torch.zeros_like(x["H"][:T])
    yield "gathered_mm_backward", *((h, X, routing, W1, 0, K, w) for w in (1, 2, 4, 7))
    yield (
        "combine_mm",
        (h, x["scores"], routing, W2, None, None, T, 0, K),
        (leaf(h), leaf(x["scores"]), routing, leaf(W2), leaf(b2), leaf(X), T, 0, K),
        (leaf(rows), None, grouped, W2, b2, leaf(X), T, 3, 0),
    )
    yield "combine_mm_backward", *((dO, h, routing, W2, b2, 0, K, w) for w in (1, 2, 4, 8, 15))


def parts(x):
    """A first and a last part of forward and of backward."""
    cuts, numbers = [0, T // 3, T], packed()[0]
    bounds = _calls.chunks_of(x["ids"], E, x["routing"], cuts).bounds
    batch = (x["routing"], x["layer"])
    for part, H in ((0, zeros(T * K, 2 * n)), (1, None)):
        out = zeros(T, d), H
        yield "experts_part", (x["X"], *batch, bounds, cuts, part, T * K, *packed(), *out)
    *_, size, _ = tm.layer_bytes(x["X"], [T, E, d, n, T * K], numbers, [])
    workspace = torch.zeros(size, dtype=torch.uint8)
    given = places(dX=zeros(T, d), ds=torch.zeros(T, K), dW2=torch.zeros_like(x["layer"][2]))
    for part in (0, 1):
        of_part = (bounds, cuts, part, *packed(), workspace)
        yield "experts_backward_part", (x["dO"], x["X"], x["H"], *batch, *given, *of_part)


def other_kinds(x):
    """Rounded, general and grouped routings through the same operators."""
    logits, X, layer, dO = x["logits"], x["X"], x["layer"], x["dO"]
    rounded, _ = tm.route_rounded(logits, None, None, K, 4, 1, 0)
    capacity = min(T * K + E * 3, T * E)
    pairs = torch.arange(20)
    general = tm.route_general(pairs, pairs % E, torch.ones(20), T, E)
    grouped = tm.route_grouped(torch.full((E,), 4), None, T)
    for kind, k, scoring, rows, routing in (
        (2, K, 2, capacity, rounded),
        (1, 0, -1, 20, general),
        (3, 0, -1, T, grouped),
    ):
        what = packed(kind, k, scoring)
        forward = (X, None, routing, layer, None, rows, *what)
        yield "experts", (*forward, False, False)  # with H, its rows past the last would be NaN
        _, H = tm.experts(*forward, True, False)
        read = logits if scoring >= 0 else None
        yield "experts_backward", (dO, X, H, routing, layer, read, *what, torch.float32, 1 | 2 | 4)
    ds = normal(capacity, seed=5, dtype=torch.float32)
    yield "router_backward", (ds, rounded, logits, E, *chosen_by(2, kind=2), torch.float32)


def adapters(x):
    """Both, that of W2 alone, and those of a split gate."""
    X, dO, routing, logits = x["X"], x["dO"], x["routing"], x["logits"]
    split = [None if w is None else w.detach() for w in _split_transposed()]
    both, of_W2, of_split = [8, 0, 16], [0, 0, 8], [8, 16, 8]
    own = x["layer"]
    for layer, ranks, layout in ((own, both, 0), (own, of_W2, 0), (split, of_split, 2)):
        rows = layer[0].shape[1]
        lora = []
        for rank, out, width in zip(ranks, (rows, n, d), (d, d, n)):
            made = (normal(E, rank, width, seed=8, dtype=torch.float32), torch.ones(E, out, rank))
            lora += made if rank else (None, None)
        scales, (numbers, reals) = [2.0, 0.5], packed(gate_layout=layout)
        yield "pack_lora", (lora, layer, ranks, scales, [], numbers, DTYPE)
        how = (ranks, scales, [], numbers, reals)
        memory = tm.pack_lora(lora, layer, ranks, scales, [], numbers, DTYPE)
        forward = (routing, layer, None, lora, memory, [], T * K, *how)
        _, *saved = tm.experts_lora(X, logits, *forward, True)
        leaves = (routing, [leaf(w) for w in layer], leaf(X), [leaf(t) for t in lora])
        yield "experts_lora", (X, logits, *forward, False), (X, None, *forward, True)
        leaves = (*leaves, memory, [], T * K, *how, True)
        yield "experts_lora", (leaf(X), leaf(logits), *leaves)
        backward = (dO, X, *saved, routing, layer, memory, [], *how)
        of_W1 = 0b11 if ranks[0] else 0
        bits = (of_W1 | 0b110000) << len(_layout.GRADIENTS)
        for wanted, dtype in ((1 | 2 | bits, torch.float32), (1 | 4 | 16 | bits, DTYPE)):
            yield "experts_lora_backward", (*backward, dtype, wanted)
            yield "experts_lora_backward_over_H", (*backward, dtype, wanted)


def written_codes(W):
    """Arguments of quantize_fp8_into, without and with transposed codes."""
    E, R, C = W.shape
    byte = lambda *shape: torch.zeros(E, *shape, dtype=torch.uint8)  # noqa: E731
    scales = torch.zeros(E, -(-R // 128), -(-C // 128))
    one = W, False, byte(R, C), scales
    return (*one, None, None), (*one, byte(C, R), scales.mT.contiguous())


def W1_of_fp8():
    return normal(E, 2 * 128, 2 * d, seed=8, dtype=torch.float32)


def with_fp8(x):
    """The recipe fp8 with codes as bytes: opcheck compares no float8. A master has a gradient."""
    n, d = W1_of_fp8().shape[1] // 2, W1_of_fp8().shape[2]
    X, dO = (normal(T, d, seed=seed, dtype=DTYPE) for seed in (2, 3))
    masters = W1_of_fp8(), normal(E, d, n, seed=9, dtype=DTYPE)
    given = [tilemoe.fp8_weight(leaf(W)) for W in masters]
    layer, arrays, formats = operands([given[0], None, given[1], None, None, None], X, "fp8")
    arrays = [a.view(torch.uint8) if a is not None and a.dtype.itemsize == 1 else a for a in arrays]
    numbers, reals = packed()
    numbers[options.At.RECIPE] = options.LITERALS["recipe"].index("fp8")
    memory, routing = torch.empty(0, dtype=torch.uint8), x["routing"]
    how = [0, 0, 0], [1.0, 1.0], formats, numbers, reals
    none = [None] * 6
    frozen = [None if W is None else W.detach() for W in layer]
    forward = memory, arrays, T * K, *how
    _, *saved = tm.experts_lora(X, x["logits"], routing, frozen, None, none, *forward, True)
    yield "experts_lora", (
        leaf(X), leaf(x["logits"]), routing, layer, None, none, *forward, True
    )  # fmt: skip
    backward = dO, X, *saved, routing, frozen, memory, arrays, *how
    yield "experts_lora_backward", (*backward, torch.float32, 1 | 2 | 4 | 16)
    yield "experts_lora_backward_over_H", (*backward, torch.float32, 1 | 2 | 4 | 16)


def quantized(x):
    """A quantised W1, transposed, with an adapter, and quantised weights without adapters."""
    X, dO, routing, logits = x["X"], x["dO"], x["routing"], x["logits"]
    W1, _, W2, *biases = x["layer"]
    W1 = tilemoe.quantize_experts(W1, "nf4", transposed=True)
    yield "dequantize", (list(W1.arrays), 3, list(W1.stored_shape), DTYPE)
    yield "quantize_fp8", (W2.detach(), 128, False), (W2.detach(), 1, True)
    yield "quantize_fp8_into", *written_codes(W2.detach()), *written_codes(W1_of_fp8())
    yield from with_fp8(x)
    lora = [normal(E, 8, d, seed=8, dtype=torch.float32), torch.ones(E, 2 * n, 8), *[None] * 4]
    # No float8: opcheck compares arguments in arithmetic that torch 2.11 does not have for it.
    narrow = tilemoe.quantize_experts(W2, "nf4_double")
    for weights_, ranks in (([W1, None, W2], [8, 0, 0]), ([W1, None, narrow], [0, 0, 0])):
        layer, arrays, formats = operands([*weights_, *biases], X)
        scales, (numbers, reals) = [2.0, 0.5], packed()
        own = lora if ranks[0] else [None] * 6
        memory = torch.empty(0, dtype=torch.uint8)
        if ranks[0]:
            yield "pack_lora", (own, layer, ranks, scales, formats, numbers, DTYPE)
            memory = tm.pack_lora(own, layer, ranks, scales, formats, numbers, DTYPE)
        how = (ranks, scales, formats, numbers, reals)
        forward = (routing, layer, None, own, memory, arrays, T * K, *how)
        _, *saved = tm.experts_lora(X, logits, *forward, True)
        yield "experts_lora", (X, logits, *forward, False), (leaf(X), leaf(logits), *forward, True)
        backward = (dO, X, *saved, routing, layer, memory, arrays, *how)
        bits = 0b11 << len(_layout.GRADIENTS) if ranks[0] else 0
        yield "experts_lora_backward", (*backward, torch.float32, 3 | bits)
        yield "experts_lora_backward_over_H", (*backward, torch.float32, 3 | bits)


# State of the process, the library and a stream: no kernel computes with a tensor.
WITHOUT_TENSORS = {
    "set_ctas_per_sm", "set_arch", "arch_of", "capture_id", "layer_bytes", "version",
    "option_names", "routing_layout", "activation_formulas",
    "device_description", "verification_cases", "verify_case",  # `like` only names a device
}  # fmt: skip

CASES = [(name, arguments) for name, *many in cases() for arguments in many]


def checks_of(name):
    """All that torch has, but where an operator writes H and returns new tensors: AOTAutograd
    traces no such one, and no trace meets it (overwrite_test.py)."""
    every = torch.testing._internal.optests.generate_tests.ALL_TEST_UTILS
    traces = not name.endswith("backward_over_H")
    return [check for check in every if traces or "aot_dispatch" not in check]


@pytest.mark.parametrize(
    "i", range(len(CASES)), ids=[f"{name}{i}" for i, (name, _) in enumerate(CASES)]
)
def test_opcheck(i):
    name, arguments = CASES[i]
    # A routing's arrays are as large as their bound: what lies past their end is not written.
    # Deterministic algorithms have torch fill new memory, so that two runs can be compared.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.library.opcheck(getattr(tm, name).default, arguments, test_utils=checks_of(name))
    finally:
        torch.use_deterministic_algorithms(before)


def test_opcheck_is_of_every_operator():
    defined = {
        s.name.split("::")[1]
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("tilemoe::")
    }
    assert defined == {name for name, _ in CASES} | WITHOUT_TENSORS


# ---------------------------------------------------------------- refusals

LAYER = {name: t.detach() for name, t in logits_layer(DTYPE, bias=True).items()}
WRONG = {
    "W1, too narrow": dict(W1=LAYER["W1"][..., :-8]),
    "W1, of more experts": dict(W1=zeros(E + 1, 2 * n, d), logits_or_scores=zeros(T, E + 1)),
    "W2, of fewer experts": dict(W2=LAYER["W2"][1:]),
    "W2, too narrow": dict(W2=LAYER["W2"][..., :-8]),
    "W2, too low": dict(W2=LAYER["W2"][:, 8:]),
    "X, too wide": dict(x=zeros(T, d + 8)),
    "b1, too long": dict(b1=zeros(E, 2 * n + 8)),
    "b2, a vector": dict(b2=zeros(d)),
    "W2, a matrix": dict(W2=zeros(d, n)),
    "K, past E": dict(K=E + 1),
    "K, of 0": dict(K=0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shapes_in_the_same_words(wrong):
    arguments = dict(LAYER, K=K) | WRONG[wrong]
    on_meta = {k: t.to("meta") if torch.is_tensor(t) else t for k, t in arguments.items()}
    raised, traced = (refused(ValueError, "", tilemoe.moe, **of) for of in (arguments, on_meta))
    name = wrong.split(",")[0]
    if name == "K":
        seen = f"K must be in [1, 7] for E = 7, got {arguments['K']}"
    elif "experts" in wrong or "too" in wrong and name in ("W1", "W2"):  # which one is not known
        shapes = [tuple(arguments[name].shape) for name in ("W1", "W2")]
        seen = f"W1 has shape {shapes[0]}, W2 has shape {shapes[1]}, expected (E, 2n, d) and (E, d, n)"
    else:
        seen = f"{name} has shape ("
    # The library adds the place where it checks.
    assert seen in str(traced) and re.sub(r" \[\S+: \w+\]$", "", str(raised)) == str(traced)


HELD = str(DTYPE).removeprefix("torch.")
WIDE = 10**12  # 2^32 would be 0 in 32 bits, and accepted
IDS = torch.zeros(T, K, dtype=torch.int32)
FEWER = torch.zeros(T - 1, E)
NONE = torch.tensor(0.0)  # without dimensions
REFUSED = [
    ("activation must be one of swiglu", dict(activation="swish")),
    ("gate_layout must be one of concatenated, interleaved, split, got 'mixed'", dict(gate_layout="mixed")),
    ("got 'max'", dict(scoring="max")),
    ("rounding must be one of nearest, up, down, stochastic, balanced, got 'half'", dict(rounding="half")),
    ("scoring with token rounding must be one of", dict(rounding="up", scoring="sigmoid")),
    ("seed and offset are required with rounding='stochastic'", dict(rounding="stochastic")),
    ("seed and offset require rounding='stochastic', got rounding='up'",
     dict(rounding="up", seed=1, offset=1)),
    ("K is required unless ids is given", dict(K=None)),
    ("it requires a sigmoid scoring", dict(selection_bias=torch.zeros(E))),
    ("alpha requires activation='swiglu', got alpha=1.0", dict(activation="geglu", alpha=1.0)),
    ("clamp must be a finite number >= 0, got -1.0", dict(clamp=-1.0)),
    ("has no gate", dict(activation="relu", gate_layout="split")),
    (f"weights.W1 is {HELD} (7, 48, 40), expected float16", dict(x=LAYER["x"].half())),
    (
        "expected 1 in that dimension or the one before",
        dict(W1=zeros(E, 2 * n, 2 * d)[..., ::2]),
    ),
    (f"column_blocks is {WIDE}, expected a 32-bit integer", dict(column_blocks=WIDE)),
    (f"column_blocks is {2**32}, expected a 32-bit integer", dict(column_blocks=2**32)),
    ("ids is int16 (37, 3), expected int32 or int64", dict(K=None, logits_or_scores=IDS.float(),
                                                           ids=IDS.short())),
    ("addend has shape (2), expected the shape of x", dict(addend=zeros(2))),
    ("x has shape (), expected (..., d)", dict(x=NONE)),
    ("logits has shape (), expected (..., E)", dict(logits_or_scores=NONE)),
    ("expected three dimensions", dict(W1=NONE)),
    ("logits has shape (36, 7), expected (37, 7)", dict(logits_or_scores=FEWER)),
    ("logits has shape (37, 9), expected (37, 7)", dict(logits_or_scores=torch.zeros(T, 9))),
    ("scores has shape (37, 7), expected (37, 3)", dict(K=None, ids=IDS)),
    ("ids has shape (36, 3), expected (37, 3)", dict(K=None, ids=IDS[1:], logits_or_scores=FEWER)),
]  # fmt: skip
if DEVICE == "cuda":  # the CPU's operators copy it
    REFUSED.append(("not a multiple of 16 bytes", dict(W1=zeros(E, 2 * n, d + 1)[..., :d])))


@pytest.mark.parametrize("sentence, change", REFUSED, ids=[sentence[:40] for sentence, _ in REFUSED])
def test_a_wrong_argument(sentence, change):
    refused(ValueError, re.escape(sentence), tilemoe.moe, **dict(LAYER, K=K) | change)


@pytest.mark.cpu  # on a GPU Python refuses every type but two
@pytest.mark.parametrize(
    "name, dtype, seen",
    [
        ("x", torch.float64, "x must be float32, bfloat16 or float16, got float64 with shape (37, 40)"),
        ("logits_or_scores", torch.float64, "logits is float64 (37, 7), expected float32, bfloat16 or float16"),
        ("W1", torch.int8, "W1 is int8 (7, 48, 40), expected float32, bfloat16 or float16"),
    ],
)
def test_a_type_that_no_kernel_has(name, dtype, seen):
    sentence = re.escape(seen)
    refused(ValueError, sentence, tilemoe.moe, **LAYER | {name: LAYER[name].to(dtype)}, K=K)


def test_what_is_no_tensor_is_refused():
    def of(name, function, *arguments, **named):
        said = f"{name} is a numpy.ndarray, expected a torch.Tensor"
        refused(TypeError, said, function, *arguments, **named)

    logits, x = np.zeros((T, E), np.float32), np.zeros((T, d), np.float32)
    of("x", tilemoe.moe, **LAYER | {"x": x}, K=K)
    of("scores", tilemoe.moe, **LAYER | {"logits_or_scores": logits}, ids=LAYER["x"])
    of("logits", tilemoe.top_k, logits, K)
    of("counts", tilemoe.grouped_experts, LAYER["x"], logits[0], LAYER["W1"], LAYER["W2"])
    of("x", tilemoe.MoE(d, n, E, K, device="meta"), x)
    for name in ("W1", "W2", "b1", "b2", "addend", "logits_or_scores"):
        for grad in (True, False):
            called = "logits" if name == "logits_or_scores" else name
            with torch.set_grad_enabled(grad):
                of(called, tilemoe.moe, **dict(LAYER, K=K) | {name: np.zeros((E, 4, 4), np.float32)})


def test_a_tensor_without_dimensions_is_refused():
    weights, ones = (LAYER["W1"], LAYER["W2"]), torch.ones(E, dtype=torch.int32)
    module = tilemoe.MoE(d, n, E, K, return_aux=True, dtype=DTYPE)
    pairs = NONE.int(), ones, ones.float()
    for of, call, *arguments in (
        ("logits", tilemoe.top_k, NONE, K),
        ("logits", tilemoe.router_losses, NONE, ones),
        ("rows", tilemoe.grouped_experts, NONE, ones, *weights),
        ("tokens", tilemoe.moe_general, LAYER["x"], *pairs, *weights),
        ("x", module, NONE.to(DTYPE)),
    ):
        said = rf"{of} has shape \(\)" + r", expected \(..., 40\)" * (call is module)
        refused(ValueError, said, call, *arguments)


# ---------------------------------------------------------------- devices

DEVICES = ["meta"] + ["cpu"] * (DEVICE == "cuda")  # where a tensor should not be
OPERATORS = sorted(
    schema.name.split("::")[1]
    for schema in torch._C._jit_get_all_schemas()
    # Neither has an argument that is computed with.
    if schema.name.startswith("tilemoe::")
    and schema.name.removeprefix("tilemoe::") not in WITHOUT_TENSORS
)


NAMES_IN = {
    "weights": _layout.WEIGHTS, "gradients": _layout.GRADIENTS, "lora": _layout.FACTORS,
    "quantized": _layout.QUANTIZED, "arrays": _layout.ARRAYS,
}  # fmt: skip


def placeholders(schema):
    """Something for every argument, the optional ones too, by name: what is refused before anything
    is looked at needs no right shape."""
    by_type = {"int": 1, "SymInt": 1, "float": 0.0, "bool": False, "ScalarType": torch.float32}
    of_list = {
        "rule": [1] * len(options.RULE),
        "numbers": [1] * len(options.NUMBERS),
        "reals": [0.0] * len(options.REALS),
        "cuts": [0, 1],
        "sources": [0],
        "ranks": [8, 0, 8],
        "scales": [1.0, 1.0],
        "formats": [3, 0, 3, 0, 0, 0],
        "shape": [1, 1, 64],
    }

    def of(argument):
        if argument.name in NAMES_IN:
            return [torch.ones(2, 2) for _ in NAMES_IN[argument.name]]
        if argument.name == "places":
            return 2 ** len(_layout.GRADIENTS) - 1
        if argument.name in of_list:
            return of_list[argument.name]
        return torch.ones(2, 2) if "Tensor" in str(argument.type) else by_type[str(argument.type)]

    return {argument.name: of(argument) for argument in schema.arguments}


def tensors_in(arguments):
    """{the name that an error has: (argument, place in it or None)}"""
    found = {}
    for name, value in arguments.items():
        if name in NAMES_IN:
            found |= {of: (name, i) for i, of in enumerate(NAMES_IN[name])}
        elif torch.is_tensor(value):
            found[name] = (name, None)
    return found


def changed(arguments, where, change):
    """The values of `arguments`, one tensor of them changed."""
    name, i = where
    value = arguments[name]
    if i is None:
        return (arguments | {name: change(value)}).values()
    return (arguments | {name: [*value[:i], change(value[i]), *value[i + 1 :]]}).values()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_tensor_on_another_device_is_refused_by_its_name(name):
    """By what runs where torch sees one on meta, and by the kernel itself."""
    op = getattr(tm, name).default
    arguments = placeholders(op._schema)
    tensors = tensors_in(arguments)
    first, *others = tensors
    here, start = torch.ones(()).device, "^expected all tensors on one device: "
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, DEVICE.upper()))
    for other in DEVICES:
        for moved, where in tensors.items():
            values = changed(arguments, where, lambda tensor: tensor.to(other))
            if moved == first:
                if not others:
                    continue
                sentence = f"{start}{others[0]} is on {here}, {moved} is on {other}$"
            else:
                sentence = f"{start}{moved} is on {other}, {first} is on {here}$"
            for calling in (op, lambda *values: op.redispatch(key, *values)):
                refused(ValueError, sentence, ops.call, calling, *values)


LISTS = {"weights", "gradients", "rule", "numbers", "reals", "lora", "ranks", "scales",
         "quantized", "arrays", "formats"}  # fmt: skip
WITH_LISTS = [
    name
    for name in OPERATORS
    if LISTS & {argument.name for argument in getattr(tm, name).default._schema.arguments}
]


@pytest.mark.parametrize("name", WITH_LISTS)
def test_lists_of_another_length_are_refused(name):
    """In the same words by what is traced and by the kernel; and weights without W1 or W2."""
    op = getattr(tm, name).default
    here = placeholders(op._schema)
    on_meta = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), here)
    for arguments in (here, on_meta):
        for changed_list in LISTS & arguments.keys():
            value = arguments[changed_list]
            for wrong in (value[:-1], [*value, value[-1]]):
                sentence = f"{changed_list} has length {len(wrong)}, expected {len(value)}"
                given = (arguments | {changed_list: wrong}).values()
                refused(ValueError, sentence, ops.call, op, *given)
        for i, absent in ((0, "W1"), (2, "W2")) if "weights" in arguments else ():
            weights = [*arguments["weights"]]
            weights[i] = None
            given = (arguments | {"weights": weights}).values()
            refused(ValueError, f"^{absent} is required$", ops.call, op, *given)


def test_a_function_names_the_tensor_that_is_elsewhere():
    x, logits, W1, W2, *_ = LAYER.values()
    weights = dict(W1=W1, W2=W2)
    pairs, counts = torch.arange(4) % E, torch.ones(E, dtype=torch.int32)
    seed, scores = torch.ones(1, dtype=torch.int64), torch.ones(T, K)
    gradients = tilemoe.WeightGradients(W2=torch.zeros_like(W2))
    layer, chosen = LAYER | {"K": K}, dict(x=x, logits_or_scores=scores, ids=IDS, **weights)
    of_pairs = dict(x=x, tokens=pairs, experts=pairs, scores=scores.flatten()[:4], **weights)
    rows = dict(rows=x, counts=counts, row_scores=scores[:, 0], **weights)
    rounded = layer | dict(rounding="stochastic", m=4, seed=seed, offset=seed)
    biased = layer | dict(scoring="sigmoid", selection_bias=torch.zeros(E))
    called = {"logits_or_scores": "logits"}
    for function, arguments, names in (
        (tilemoe.moe, layer | {"addend": x}, ("logits_or_scores", "W2", "b1", "addend")),
        (tilemoe.moe, chosen, ("logits_or_scores", "ids")),
        (tilemoe.moe, biased, ("selection_bias",)),
        (tilemoe.moe, rounded, ("seed", "offset")),
        (tilemoe.moe, layer | {"weight_grad_out": gradients}, ("weight_grad_out",)),
        (tilemoe.moe_general, of_pairs, ("tokens", "experts", "scores")),
        (tilemoe.grouped_experts, rows, ("counts", "row_scores")),
        (tilemoe.router_losses, dict(logits=logits, expert_counts=counts), ("expert_counts",)),
    ):
        for name in names:
            value = arguments[name]
            if name == "weight_grad_out":
                moved, seen = value._replace(W2=value.W2.to("meta")), "weight_grad_out.W2"
            else:
                moved, seen = value.to("meta"), called.get(name, name)
                if seen == "logits" and "ids" in arguments:
                    seen = "scores"
            said = f"one device: {seen} is on meta, [A-Za-z0-9]+ is on "
            refused(ValueError, said, function, **arguments | {name: moved})


def test_a_bias_that_stayed_on_meta_is_refused():
    moe = tilemoe.MoE(d, n, E, K, return_aux=True, scoring="sigmoid", selection_bias=True, dtype=DTYPE)
    moe.gate.e_score_correction_bias = moe.gate.e_score_correction_bias.to("meta")
    refused(ValueError, "gate.e_score_correction_bias is on meta", moe, LAYER["x"])


# ---------------------------------------------------------------- differentiation


def differentiable_calls():
    """(function of one tensor, that tensor) by name, for every function and its kinds of inputs."""
    x, logits, W1, W2 = (LAYER[name] for name in ("x", "logits_or_scores", "W1", "W2"))
    counts = torch.full((E,), 4, dtype=torch.int32)
    pairs = torch.arange(T)
    ids = torch.zeros(T, K, dtype=torch.int64)
    moe = tilemoe.moe
    given = dict(rounding="up", m=4)
    modules = [tilemoe.MoE(d, n, E, K, return_aux=True, dtype=DTYPE, router_dtype=t) for t in (None, torch.float32)]
    return {
        "moe, x": (lambda t: moe(t, logits, W1, W2, K=K), x),
        "moe, logits": (lambda t: moe(x, t, W1, W2, K=K), logits),
        "moe, W2": (lambda t: moe(x, logits, W1, t, K=K), W2),
        "moe, b2": (lambda t: moe(x, logits, W1, W2, K=K, b2=t), LAYER["b2"]),
        "moe, addend": (lambda t: moe(x, logits, W1, W2, K=K, addend=t), x),
        "moe, scores": (lambda t: moe(x, t, W1, W2, ids=ids), torch.ones(T, K)),
        "moe, rounded": (lambda t: moe(x, t, W1, W2, K=K, **given), logits),
        "moe_general": (
            lambda t: tilemoe.moe_general(x, pairs, pairs % E, t, W1, W2),
            torch.ones(T),
        ),
        "grouped_experts": (lambda t: tilemoe.grouped_experts(t, counts, W1, W2), x),
        "grouped_experts, scores": (
            lambda t: tilemoe.grouped_experts(x, counts, W1, W2, row_scores=t),
            torch.ones(T),
        ),
        "top_k": (lambda t: tilemoe.top_k(t, K)[0], logits),
        "scores_at": (lambda t: tilemoe.scores_at(t, ids), logits),
        "rounded_router": (lambda t: tilemoe.rounded_router(t, K, **given)[2], logits),
        "router_losses": (lambda t: tilemoe.router_losses(t, counts)[1], logits),
        "MoE": (lambda t: modules[0](t)[0], x),
        "MoE, float32 router": (lambda t: modules[1](t)[0], x),
    }


CALLS = differentiable_calls()


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_and_transforms_are_refused(name):
    """A tangent that is lost would be zero."""
    function, tensor = CALLS[name]
    forward, transforms = "forward-mode differentiation", "transforms of torch.func"
    either = f"^({forward}|{transforms})"
    jvp = torch.func.jvp, function, (tensor,), (torch.ones_like(tensor),)
    refused(NotImplementedError, either, *jvp)
    of_sum = torch.func.grad(lambda t: function(t).float().sum())
    refused(NotImplementedError, f"^{transforms}", of_sum, tensor)
    for leaf in (tensor, tensor.clone().requires_grad_()):
        for grad in (True, False):
            with forward_ad.dual_level(), torch.set_grad_enabled(grad):
                dual = forward_ad.make_dual(leaf, torch.ones_like(leaf))
                refused(NotImplementedError, "^forward-mode", function, dual)
    with forward_ad.dual_level():  # nothing has a tangent
        assert torch.equal(function(tensor), function(tensor))


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_loses_a_tangent(name):
    op = getattr(tm, name).default
    arguments = placeholders(op._schema)
    for where in tensors_in(arguments).values():
        with forward_ad.dual_level():
            dual = lambda tensor: forward_ad.make_dual(tensor, torch.ones(2, 2))
            refused(NotImplementedError, "forward-mode", op, *changed(arguments, where, dual))


def test_rows_of_several_arrays_are_summed():
    place = torch.tensor([[0, T + 1, -1], [2 * T - 1, 3, 3], [-1, 2 * T, 1 << 30]]).int()
    rows = torch.cat([*SOURCES, zeros(1, d)]).float()  # the last is no row
    terms = torch.where((place < 0) | (place >= 2 * T), 2 * T, place).long()
    addend = normal(3, d, seed=8, dtype=DTYPE)
    addresses = [source.data_ptr() for source in SOURCES]
    for given in (None, addend):
        expected = rows[terms[:, 0]] if given is None else given.float() + rows[terms[:, 0]]
        for k in (1, 2):
            expected = expected + rows[terms[:, k]]
        out = torch.full((3, d + 8), 7, dtype=DTYPE)
        ops.call(tm.sum_rows.default, addresses, T, place, given, out[:, :d])
        assert torch.equal(out[:, :d], expected.to(DTYPE))
        assert (out[:, d:] == 7).all()
    in_place = addend.clone()
    ops.call(tm.sum_rows.default, addresses, T, place, in_place, in_place)
    assert torch.equal(in_place, out[:, :d])


def test_wrong_sums_of_rows_are_refused():
    addresses = [source.data_ptr() for source in SOURCES]
    place, out = torch.zeros(3, 1, dtype=torch.int32), zeros(3, d)
    wrong = [
        ((addresses, T, of(p), None if a is None else of(a), of(out)), sentence)
        # In the same words by the kernel and by what is traced.
        for of in (lambda tensor: tensor.to(DEVICE), lambda tensor: tensor.to("meta"))
        for p, a, sentence in (
            (place[:2], None, r"place has shape \(2, 1\), expected \(3, 1\)"),
            (place, out[:2], r"addend has shape \(2, .*expected \(3, "),
        )
    ]
    wrong += [
        (([], T, place, None, out), "sources is 0"),
        (([0], T, place, None, out), r"source\[0\] .* null"),
        ((addresses, -1, place, None, out), "source_rows is -1"),
        ((addresses, T, place.long(), None, out), "place is int64"),
        (([out.data_ptr()], 3, place, None, out), r"out shares memory with source\[0\]"),
    ]
    for arguments, sentence in wrong:
        refused(ValueError, sentence, ops.call, tm.sum_rows.default, *arguments)


def test_a_routing_of_other_sizes_is_refused():
    x = example()
    routing, arguments = x["routing"], list(experts_arguments(x))
    is_int32 = "routing is int32 .* expected a contiguous int32 tensor"
    for wrong, sentence in (
        (tm.route_logits(x["logits"][:-8], None, *chosen_by())[0], is_int32),
        (routing.float(), "routing is float32"),
        (torch.stack((routing, routing), dim=1)[:, 0], is_int32),
    ):
        arguments[2] = wrong
        refused(ValueError, sentence, ops.call, tm.experts.default, *arguments)


def test_statuses_become_exceptions():
    def fails(text):
        raise RuntimeError(text)

    for kind, text, said in (
        (ValueError, "invalid argument: the sentence", "^the sentence$"),
        (NotImplementedError, "unsupported: the sentence", "^the sentence$"),
        (RuntimeError, "internal error: x", "^internal error: x$"),
    ):
        assert type(refused(kind, said, ops.call, fails, text)) is kind


def test_ctas_per_sm_and_archs_out_of_range_are_refused():
    for count in (0, 17, -1, 2.0, None):
        said = r"ctas_per_sm must be an int in \[1, 16\], got "
        refused(ValueError, said, tilemoe.set_ctas_per_sm, count)
    for arch in ("", "SM80", "sm70", "hopper", 80, b"sm80"):
        refused(ValueError, "arch must be 'auto', 'sm80', 'sm90' or 'sm100', got ", tilemoe.set_arch, arch)
    if _library.why_no_cuda() is None:
        try:
            tilemoe.set_arch("sm100")
        except NotImplementedError as error:  # a build without it; this GPU is checked later
            assert "this build has no arch sm100" in str(error)
    selected = os.environ.get("TILEMOE_ARCH") or os.environ.get("TILEMOE_KIT")
    for arch in ("auto", None, selected or "auto"):  # the last for the following tests
        tilemoe.set_arch(arch)


def test_vmap_is_refused():
    layer = lambda one: tilemoe.moe(LAYER["x"], one, LAYER["W1"], LAYER["W2"], K=K)
    refused(NotImplementedError, "vmap", torch.vmap(layer), torch.zeros(2, T, E))


# Fake tensors: they are of a GPU wherever the test runs, and nothing is computed.
def on_gpu(dtype):
    return {name: torch.empty(t.shape, dtype=dtype, device="cuda:0") for name, t in LAYER.items()}


def test_a_gpu_without_its_library_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(tilemoe._library, "_no_cuda", "the reason")
    with FakeTensorMode():
        layer = on_gpu(torch.bfloat16)
        x, logits, W1, W2, *_ = layer.values()
        counts = torch.empty(E, dtype=torch.int32, device="cuda:0")
        for function, *arguments in (
            (lambda: tilemoe.moe(**layer, K=K),),
            (tilemoe.top_k, logits, K),
            (tilemoe.scores_at, logits, counts),
            (lambda: tilemoe.rounded_router(logits, K, rounding="nearest"),),
            (tilemoe.router_losses, logits, counts),
            (tilemoe.grouped_experts, x, counts, W1, W2),
            (tilemoe.moe_general, x, counts, counts, logits[0], W1, W2),
        ):
            said = r"^the reason \(got a tensor on cuda:0\)$"
            refused(NotImplementedError, said, function, *arguments)


def test_float32_on_a_gpu_is_refused_with_what_is_supported(monkeypatch):
    monkeypatch.setattr(tilemoe._library, "_no_cuda", None)
    sentence = r"x must be bfloat16 or float16 on CUDA, got float32 with shape \(37, 40\); pass dtype"
    with FakeTensorMode():
        refused(NotImplementedError, sentence, tilemoe.moe, **on_gpu(torch.float32), K=K)
        O = tilemoe.moe(**on_gpu(torch.float16), K=K)
        assert O.shape == (T, d) and O.device.type == "cuda"


@pytest.mark.cpu  # a torch with CUDA makes not even a fake tensor of another GPU
def test_other_devices_are_refused():
    said = "logits must be on cpu or cuda, got xpu"
    with FakeTensorMode():
        refused(NotImplementedError, said, tilemoe.top_k, torch.empty(T, E, device="xpu"), K)
