"""The table of docs/pytorch.md of recipe="fp8" with each feature, and the test of each row.

Run as a script it writes the table.
"""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilemoe
from checks import Calls, compiled, refused
from feature_table import PAGE, REFUSED, check_walked_twice, take_second_gradients
from random_layers import normal
from target import DEVICE

pytestmark = pytest.mark.cpu
MARKS = "<!-- fp8 features: written by tests/torch/fp8_features_test.py -->\n", "<!-- end -->\n"
HEADER = '| feature | `recipe="fp8"` |\n|---|---|\n'
T, d, n, E, K = 40, 144, 128, 4, 2
BF16 = torch.bfloat16


def layer(d=d, n=n, gate_layout="concatenated", gated=True, dtype=BF16, master=None, bias=False):
    """-> tensors of `moe` with logits, weights as codes of masters."""
    rows = 2 * n if gated and gate_layout != "split" else n
    shapes = {"W1": (rows, d), "W2": (d, n)}
    if gate_layout == "split":
        shapes["W1_up"] = (n, d)
    made = {
        "x": normal(T, d, seed=1, dtype=dtype).requires_grad_(),
        "logits_or_scores": normal(T, E, seed=2, dtype=torch.float32).requires_grad_(),
    }
    for seed, (name, (out, width)) in enumerate(shapes.items(), 3):
        W = normal(E, out, width, seed=seed, dtype=master or dtype, scale=width**-0.5)
        made[name] = tilemoe.fp8_weight(W.requires_grad_())
    if bias:
        made["b1"] = normal(E, rows, seed=8, dtype=dtype).requires_grad_()
        made["b2"] = normal(E, d, seed=9, dtype=dtype).requires_grad_()
    return made


def leaves(tensors):
    codes = [t.master for t in tensors.values() if isinstance(t, tilemoe.Fp8Weight)]
    plain = [t for t in tensors.values() if torch.is_tensor(t)]
    return [t for t in (*plain, *codes) if t is not None and t.requires_grad]


def gradients(function, tensors, **how):
    O = function(**tensors, **how)
    return [O, *torch.autograd.grad(O.float().square().sum(), leaves(tensors))]


def near(function=tilemoe.moe, tensors=None, plain=None, **how):
    """O and all gradients are near those of recipe="bf16", and not equal to them."""
    tensors = layer() if tensors is None else tensors
    how = {"K": K, **how}
    how = {name: value for name, value in how.items() if value is not None}
    got = gradients(function, tensors, recipe="fp8", **how)
    want = gradients(plain or function, tensors, recipe="bf16", **how)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        error = ((one.float() - other.float()).norm() / other.float().norm()).item()
        assert error < 0.12, error
    assert not torch.equal(got[1], want[1])
    return got


def exactly(function, **how):
    """The bits of the plain call."""
    tensors = layer()
    want = gradients(tilemoe.moe, tensors, recipe="fp8", K=K)
    for one, other in zip(gradients(function, tensors, recipe="fp8", K=K, **how), want, strict=True):
        assert torch.equal(one, other)


def with_ids():
    tensors = layer()
    scores, ids = tilemoe.top_k(tensors["logits_or_scores"].detach(), K)[:2]
    tensors["logits_or_scores"] = scores.requires_grad_()
    near(tensors=tensors, ids=ids, K=None)


def with_pairs():
    tensors = layer()
    del tensors["logits_or_scores"]
    tensors["scores"] = normal(2 * T, seed=3, dtype=torch.float32).requires_grad_()
    pairs = dict(tokens=torch.arange(T).repeat_interleave(2), experts=torch.arange(2 * T) % (E + 1))
    near(tilemoe.moe_general, tensors, K=None, **pairs)


def with_rows():
    tensors = layer()
    del tensors["logits_or_scores"]
    tensors["rows"] = tensors.pop("x")
    near(tilemoe.grouped_experts, tensors, K=None, counts=torch.tensor([9, 0, 25, 6]))


def with_router():
    tensors = layer()
    tensors["router_weight"] = normal(E, d, seed=7, dtype=BF16, scale=d**-0.5).requires_grad_()
    del tensors["logits_or_scores"]
    near(tilemoe.moe_with_router, tensors)


def without_tokens():
    tensors = layer()
    tensors["x"] = torch.zeros(0, d, dtype=BF16).requires_grad_()
    tensors["logits_or_scores"] = torch.zeros(0, E).requires_grad_()
    O, *found = gradients(tilemoe.moe, tensors, K=K, recipe="fp8")
    assert O.shape == (0, d) and not any(g.any() for g in found)


def module(**how):
    torch.manual_seed(3)
    return tilemoe.MoE(d, n, E, K, **{"recipe": "fp8", "dtype": BF16, **how})


def of_module(**how):
    def use():
        x = normal(T, d, seed=1, dtype=BF16)
        made = module(**how)
        made(x).float().square().sum().backward()
        plain = copy.deepcopy(made)
        plain.recipe = "bf16"
        assert 0.001 < (made(x) - plain(x)).norm() / plain(x).norm() < 0.1
        assert all(p.grad.abs().max() > 0 for p in made.parameters())

    return use


def wide_masters():
    tensors = layer(master=torch.float32)
    got = gradients(tilemoe.moe, tensors, K=K, recipe="fp8")
    assert [g.dtype for g in got[-2:]] == [torch.float32] * 2
    assert all((g != g.to(BF16)).any() for g in got[-2:])


def with_autocast():
    made, x = module(dtype=torch.float32), normal(T, d, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        O = made(x)
    O.float().sum().backward()
    assert O.dtype == BF16 and made.experts.down_proj.grad.dtype == torch.float32


def decode():
    made, x = module().eval(), normal(3, d, seed=1, dtype=BF16)
    with torch.no_grad(), Calls() as calls:
        O = made(x)
    assert not calls.of("moe_tokens") and torch.equal(O, made(x))


def on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensors = layer_of_fakes()
        got = gradients(tilemoe.moe, tensors, K=K, recipe="fp8")
    assert [g.shape for g in got] == [(T, d), (T, d), (T, E), (E, 2 * n, d), (E, d, n)]


def layer_of_fakes():
    W1, W2 = (torch.empty(E, *shape, dtype=BF16).requires_grad_() for shape in ((2 * n, d), (d, n)))
    x = torch.empty(T, d, dtype=BF16).requires_grad_()
    codes = dict(W1=tilemoe.fp8_weight(W1), W2=tilemoe.fp8_weight(W2))
    return dict(x=x, logits_or_scores=torch.empty(T, E).requires_grad_(), **codes)


def frozen():
    tensors = layer()
    for name in ("W1", "W2"):
        tensors[name] = tilemoe.fp8_weight(tensors[name].weight)
    want = gradients(tilemoe.moe, layer(), K=K, recipe="fp8")
    got = gradients(tilemoe.moe, tensors, K=K, recipe="fp8")
    assert all(torch.equal(one, other) for one, other in zip(got, want))


def with_weights(change, **how):
    def use():
        tensors = layer()
        for name in ("W1", "W2"):
            tensors[name] = change(name, tensors[name])
        tilemoe.moe(**tensors, K=K, recipe="fp8", **how)

    return use


def with_memory():
    tensors = layer()
    given = tilemoe.WeightGradients(W1=torch.zeros(E, 2 * n, d, dtype=BF16))
    tilemoe.moe(**tensors, K=K, recipe="fp8", weight_grad_out=given)


def with_adapters():
    A, B = (normal(E, *shape, seed=4, dtype=torch.float32) for shape in ((8, d), (2 * n, 8)))
    tilemoe.moe(**layer(), K=K, recipe="fp8", lora=tilemoe.LoRA(A1=A, B1=B))


def walked_twice():
    tensors = layer()
    check_walked_twice(tilemoe.moe(**tensors, K=K, recipe="fp8"), tensors["x"])


def twice_differentiated():
    tensors = layer()
    take_second_gradients(tilemoe.moe(**tensors, K=K, recipe="fp8"), tensors["x"])


def with_tangents():
    tensors = layer()
    with forward_ad.dual_level():
        tensors["x"] = forward_ad.make_dual(tensors["x"].detach(), torch.ones(T, d, dtype=BF16))
        tilemoe.moe(**tensors, K=K, recipe="fp8")


def refuses(kind, text, use):
    """An error that is no NotImplementedError."""
    return lambda: refused(kind, text, use)


def kind(**kinds):
    how = {"gate_layout": kinds["gate_layout"]} if "gate_layout" in kinds else {}
    return lambda: near(tensors=layer(**kinds), **how)


def option(**how):
    return lambda: near(**how)


def use(**how):
    kinds = {name: how.pop(name) for name in ("n", "gated") if name in how}
    return lambda: tilemoe.moe(**layer(**kinds), K=K, recipe="fp8", **how)


ELSEWHERE = {
    "CUDA graphs": "works after `quantize_weights()`, not tested on the CPU",
    "archs `sm80` and `sm100`, GPUs other than Hopper": "refused, not tested on the CPU",
    "`expert_parallel.moe`, `expert_mesh`": "works, tested by fp8_shards_worker.py",
    "FSDP-2 after `gather_in_fp8_`": "works, tested by fp8_shards_worker.py",
    "FSDP-2 without `gather_in_fp8_`": REFUSED + "requires tilemoe.gather_in_fp8_(model) before",
    "FSDP-2, ranks that do not divide E": REFUSED + "requires a number of experts that is a multiple",
    "FSDP-2 and `torch.compile` of the layer": REFUSED + "does not support FP8 codes",
    "transformers, `set_recipe`": "works, tested by fp8_integrations_test.py",
    "torchtitan, override with `recipe`": "works, tested by fp8_integrations_test.py without ranks",
    'torchtitan, `recipe="auto"`': REFUSED + "where FSDP-2 gathers one format",
    "[JAX](cpp.md#jax)": "works, tested by jax_fp8_test.py",
    '`save_h="fp8"` in transformers and torchtitan': "works, tested by fp8_integrations_test.py",
    '`save_h="fp8"` in JAX': "works, tested by jax_fp8_test.py",
    "torchtitan's gpt-oss": REFUSED + "gate and up rows are interleaved",
}
FEATURES = {  # row of the table: (test, what the page says)
    "`moe` with logits": (option(), "works"),
    "`moe` with ids": (with_ids, "works"),
    "`moe_general`": (with_pairs, "works"),
    "`grouped_experts`": (with_rows, "works"),
    "`moe_with_router`": (with_router, "works, with the router as a linear layer"),
    "`MoE`": (of_module(), "works"),
    "shared experts": (of_module(shared_intermediate_size=64), "works, in 16 bits"),
    "no tokens, experts without tokens": (without_tokens, "works"),
    "activations with a gate": (option(activation="geglu"), "works"),
    "`clamp`, `alpha`, `up_shift`": (option(clamp=7.0, alpha=1.702, up_shift=1.0), "works"),
    "activations without a gate": (
        use(gated=False, activation="relu"), REFUSED + "requires an activation with a gate"
    ),
    "split gate, n a multiple of 16": (kind(gate_layout="split", n=208), "works"),
    "concatenated gate, n no multiple of 128": (use(n=144), REFUSED + "n to be a multiple of 128"),
    "interleaved gate": (
        use(gate_layout="interleaved"), REFUSED + "does not support the gate_layout interleaved"
    ),
    "widths that are no multiples of 16": (
        refuses(ValueError, "must be a multiple of 16", lambda: layer(d=24)),
        "refused by `fp8_weight`: `must be a multiple of 16`",
    ),
    "biases": (kind(bias=True), "works"),
    "float16": (kind(dtype=torch.float16), "works"),
    "float32 tokens": (kind(dtype=torch.float32), "works on the CPU"),
    "float32 masters": (wide_masters, "works, with float32 gradients"),
    "autocast": (with_autocast, "works"),
    "frozen codes of a checkpoint": (frozen, "works with `fp8_weight`, or `quantize_weights`"),
    "`QuantizedExperts` in training": (
        refuses(ValueError, "has no transposed codes", with_weights(lambda name, W: W.weight)),
        "refused: `has no transposed codes`; works in inference",
    ),
    "other quantised formats, 16-bit weights": (
        with_weights(lambda name, W: W.master if name == "W1" else W),
        REFUSED + "requires weights of the format fp8",
    ),
    "adapters": (with_adapters, REFUSED + "does not support adapters; use recipe='fp8_forward'"),
    "`weight_grad_out`": (
        with_memory, REFUSED + "weight_grad_out requires weights that are not quantised"
    ),
    "`addend`": (
        lambda: near(tensors=layer() | {"addend": torch.ones(T, d, dtype=BF16).requires_grad_()}),
        "works",
    ),
    "`capacity`": (option(capacity=T * K), "works"),
    "token rounding": (option(rounding="nearest", m=8), "works"),
    "groups of experts": (option(n_group=2, topk_group=1), "works"),
    "`column_blocks`": (
        lambda: near(tensors=layer(d=256), column_blocks=2), "works, of multiples of 128 columns"
    ),
    "`overwrite_H=True`": (option(overwrite_H=True), "works"),
    '`save_h="fp8"`': (use(save_h="fp8"), "works, tested by fp8_save_h_test.py"),
    "`retain_graph`": (walked_twice, "works"),
    "double backward": (twice_differentiated, REFUSED + "double backward is not supported"),
    "forward-mode differentiation": (with_tangents, REFUSED + "forward-mode differentiation"),
    "checkpointing": (
        lambda: exactly(lambda **given: checkpoint(tilemoe.moe, use_reentrant=False, **given)),
        "works",
    ),
    "`torch.compile(fullgraph=True)`": (
        lambda: exactly(compiled(tilemoe.moe)), "works; `MoE` after `quantize_weights()`"
    ),
    "fake tensors": (on_fake_tensors, "works"),
    "decode (`MoE`)": (decode, "works, by the router's linear layer and `moe`"),
    "`chunks` of ranks above 1": (None, REFUSED + "quantised weights require chunks=1"),
}  # fmt: skip
ROWS = {feature: says for feature, (_, says) in FEATURES.items()} | ELSEWHERE


def in_chunks():
    from tilemoe._travel import Chunks, Comm

    comm = Comm(None, None, Chunks(None, [0, T]))
    tensors = layer()
    names = ("W1", "W1_up", "W2", "b1", "b1_up", "b2")
    from tilemoe import _calls, options

    scores, ids = tilemoe.top_k(tensors["logits_or_scores"].detach(), K)[:2]
    chosen = options.Options(recipe="fp8")
    weights = _calls.Layer([tensors.get(name) for name in names], chosen)
    given = (tensors["x"], scores, ids, E, weights, None, None, "nan", False, comm)
    _calls.of_ids(*given)


FEATURES["`chunks` of ranks above 1"] = in_chunks, ROWS["`chunks` of ranks above 1"]


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    use, says = FEATURES[feature]
    if says.startswith(REFUSED) and "QuantizedExperts" not in feature:
        refused(NotImplementedError, says.removeprefix(REFUSED), use)
    else:
        use()


@pytest.mark.parametrize("feature", ELSEWHERE)
def test_the_files_that_test_other_rows(feature):
    """A refusal is in the source of a test, and a file that tests a row exists."""
    folder, says = PAGE.parents[1] / "tests" / "torch", ELSEWHERE[feature]
    if "tested by" in says:
        name = says.split("tested by ")[1].split()[0]
        assert any((place / name).exists() for place in (folder, folder.parent / "jax"))
    elif says.startswith(REFUSED):
        tests = "fp8_shards_worker.py", "fp8_integrations_test.py"
        assert any(says.removeprefix(REFUSED) in (folder / name).read_text() for name in tests)
    else:
        assert says.endswith("not tested on the CPU")


def table():
    lines = []
    for feature, says in ROWS.items():
        if says.startswith(REFUSED) and "`" not in says:
            says = f"{REFUSED}`{says.removeprefix(REFUSED)}`"
        lines.append(f"| {feature} | {says} |\n")
    return HEADER + "".join(lines)


def parts_of_page():
    before, begin, rest = PAGE.read_text().partition(MARKS[0])
    written, end, after = rest.partition(MARKS[1])
    assert begin and end, before[-80:]
    return before + begin, written, end + after


def test_the_page_has_these_rows():
    assert parts_of_page()[1] == table()
    assert DEVICE


if __name__ == "__main__":
    before, _, after = parts_of_page()
    PAGE.write_text(before + table() + after)
