"""The FP8 recipes of `tilemoe.jax`: codes, the ways in which a call gets them, transformations, and
what is refused. jax_fp8_bits_test.py compares with the PyTorch package."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilemoe.jax as tilemoe
from jax_fp8_values import D, E, FP8, K, N, RECIPES, T, cast, layer, values
from tilemoe.jax import Fp8Weight, fp8_weight

BLOCK = 128


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def moe(a, recipe="fp8", **how):
    """The layer of a dict of arrays, some of which are FP8 weights."""
    return tilemoe.moe(**{"recipe": recipe, **({} if "ids" in a else {"K": K}), **how, **a})


def loss(a, **how):
    return jnp.sin(moe(a, **how).astype(jnp.float32)).sum()


def gradients(a, **how):
    return jax.jit(jax.value_and_grad(lambda a: loss(a, **how)))(a)


def coded(a, **how):
    """Codes in place of weights, with the weights as their masters."""
    return {name: fp8_weight(W, **how) if name in ("W1", "W1_up", "W2") else W for name, W in a.items()}


def frozen(a):
    return {name: W.with_master(None) if isinstance(W, Fp8Weight) else W for name, W in a.items()}


def without(a, *names):
    return {name: W for name, W in a.items() if name not in names}


# ---------------------------------------------------------------- codes


def reference(W, float_scales):
    """TransformerEngine's formula in NumPy -> codes and scales of (E, R, C)."""
    E, R, C = W.shape
    codes = np.zeros(W.shape, jnp.float8_e4m3fn)
    scales = np.zeros((E, -(-R // BLOCK), -(-C // BLOCK)), np.float32)
    for e, i, j in np.ndindex(scales.shape):
        at = e, slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        largest = np.abs(W[at]).max()
        factor = np.float32(448) / largest if largest else np.float32(1)
        if not float_scales:
            factor = np.exp2(np.floor(np.log2(factor)))
        codes[at] = (W[at] * factor).astype(jnp.float8_e4m3fn)
        scales[e, i, j] = 1 / factor
    return codes, scales


@pytest.mark.parametrize("float_scales", [False, True], ids=["powers of two", "float scales"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes(dtype, float_scales):
    W = jnp.asarray(values(1, 2, 208, 144).astype(np.float32), dtype).at[0, :128, :128].set(0)
    codes, scales = reference(np.asarray(W, np.float32), float_scales)
    made = jax.jit(lambda W: fp8_weight(W, float_scales=float_scales))(W)
    equal(made.codes.view(jnp.uint8), codes.view(np.uint8))
    equal(made.scales, scales)
    equal(made.transposed_codes.view(jnp.uint8), codes.swapaxes(1, 2).view(np.uint8))
    equal(made.transposed_scales, scales.swapaxes(1, 2))
    equal(made.master, W)
    assert made.shape == W.shape and float(made.scales[0, 0, 0]) == 1


def test_layouts_of_codes():
    W = cast(values(2, 3, 208, 144), jnp.float32)
    made = fp8_weight(W)
    equal(fp8_weight(W, backward=False), Fp8Weight(made.codes, made.scales, master=W))
    equal(fp8_weight(W, backward=False).with_transposed(), made)
    of_transposed = fp8_weight(W.mT, transposed=True)
    equal(of_transposed, made.with_master(W.mT))
    equal(fp8_weight(W.mT, transposed=True, backward=False).transposed_codes, None)
    stacked = fp8_weight(jnp.stack([W, 2 * W]))
    assert stacked.codes.shape == (2, *W.shape) and stacked.transposed_scales.shape == (2, 3, 2, 2)
    equal(jax.tree.map(lambda array: array[0], stacked), made)
    equal(jax.tree.map(lambda array: array[1], stacked), fp8_weight(2 * W))


# ---------------------------------------------------------------- ways to give codes


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ways_have_the_same_bits(recipe, dtype):
    """Codes that the call makes, that the loss makes, and that are made before it."""
    a = layer(dtype)
    expected = gradients(a, recipe=recipe)
    equal(jax.jit(jax.value_and_grad(lambda a: loss(coded(a), recipe=recipe)))(a), expected)
    codes = frozen(coded(a))

    def given(a):
        masters = {name: W.with_master(a[name]) for name, W in codes.items() if isinstance(W, Fp8Weight)}
        return loss({**a, **masters}, recipe=recipe)

    equal(jax.jit(jax.value_and_grad(given))(a), expected)
    found, of_pytree = gradients(coded(a), recipe=recipe)  # a gradient for every leaf of the pytree
    for name in ("W1", "W2"):
        equal(of_pytree[name].master, expected[1][name])
        assert not any(g.astype(jnp.float32).any() for g in jax.tree.leaves(of_pytree[name].with_master(None)))
    swapped = {**a, "W1": a["W1"].mT, "W2": a["W2"].mT}
    for made in (swapped, coded(swapped, transposed=True)):
        found = gradients(made, recipe=recipe, transposed=True)
        of = [getattr(g, "master", g) for g in (found[1]["W1"], found[1]["W2"])]
        equal([found[0], *(g.mT for g in of)], [expected[0], expected[1]["W1"], expected[1]["W2"]])


@pytest.mark.parametrize("recipe", FP8)
def test_differs_from_16_bits(recipe):
    """By the rounding of the recipe, in all outputs that read codes."""
    a = layer("bfloat16", biases=True)
    run = lambda recipe: (moe(a, recipe), gradients(a, recipe=recipe)[1])  # noqa: E731
    found, expected = run(recipe), run("bf16")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        error = jnp.linalg.norm(one - other) / jnp.linalg.norm(other)
        assert 1e-4 < error < 0.12, error


def test_frozen_codes():
    a = layer("float32")
    expected = gradients(a)
    fixed = frozen(coded(a))
    run = jax.jit(jax.value_and_grad(lambda x: loss({**fixed, "x": x})))
    equal(run(a["x"]), (expected[0], expected[1]["x"]))
    checkpoint = {name: Fp8Weight(fixed[name].codes, fixed[name].scales) for name in ("W1", "W2")}
    equal(moe({**fixed, **checkpoint}), moe(a))
    with pytest.raises(ValueError, match=r"W1 has no transposed codes.*with_transposed\(\).*fp8_forward"):
        jax.grad(lambda x: loss({**a, **checkpoint, "x": x}))(a["x"])
    both = {name: W.with_transposed() for name, W in checkpoint.items()}
    equal(jax.grad(lambda x: loss({**a, **both, "x": x}))(a["x"]), expected[1]["x"])
    for recipe in RECIPES:
        with pytest.raises(ValueError, match="W1 is an Fp8Weight without a master.*no gradient"):
            jax.grad(lambda W1: loss({**fixed, "W1": W1}, recipe=recipe))(fixed["W1"])


def test_16_bits_with_codes():
    """recipe="bf16": the masters, or the values of frozen codes."""
    a = layer("float32")
    equal(gradients(coded(a), recipe="bf16")[1]["W1"].master, gradients(a, recipe="bf16")[1]["W1"])

    def dequantised(W):
        scales = W.scales.repeat(BLOCK, 1).repeat(BLOCK, 2)
        return W.codes.astype(jnp.float32) * scales[:, : W.shape[1], : W.shape[2]]

    fixed = frozen(coded(a))
    rounded = {**a, "W1": dequantised(fixed["W1"]), "W2": dequantised(fixed["W2"])}
    run = lambda weights: jax.value_and_grad(lambda x: loss({**weights, "x": x}, recipe="bf16"))(a["x"])  # noqa: E731
    equal(run(fixed), run(rounded))
    equal(run({**fixed, "W2": rounded["W2"]}), run(rounded))  # one of both


def test_dtypes_of_gradients():
    a = {**layer("bfloat16"), "W1": layer("float32")["W1"]}
    expected, _ = gradients(a)
    for made in (a, coded(a)):
        found, of = gradients(made)
        equal(found, expected)  # codes of float32 values in both cases
        W1, W2 = (getattr(of[name], "master", of[name]) for name in ("W1", "W2"))
        assert (W1.dtype, W2.dtype, of["x"].dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
        assert (W1 != W1.astype(jnp.bfloat16)).any()  # written in float32


# ---------------------------------------------------------------- transformations


def quantisations(text):
    return len(re.findall(r'custom_call_target="tilemoe\.quantize_fp8\.v1"', text))


def compiled(function, *arguments, **how):
    return jax.jit(function, **how).lower(*arguments).compile()


def test_quantisations_of_a_program():
    """Once per weight and pass if the call makes the codes; never if it gets them."""
    a, codes = layer("float32"), coded(layer("float32"))
    assert quantisations(compiled(moe, a).as_text()) == 2
    assert quantisations(compiled(moe, codes).as_text()) == 0
    assert quantisations(compiled(jax.grad(loss), a).as_text()) == 4
    assert quantisations(compiled(jax.grad(loss), codes).as_text()) == 0

    def step(a):
        of_batch = frozen(coded(a))
        total = jnp.zeros_like(a["W1"])
        for i in range(3):
            weights = {name: of_batch[name].with_master(a[name]) for name in ("W1", "W2")}
            total += jax.grad(lambda w, i=i: loss({**a, **w, "x": a["x"] * (i + 1)}))(weights)["W1"].master
        return total

    assert quantisations(compiled(step, a).as_text()) == 2


@pytest.mark.parametrize("ways", [lambda a: a, coded], ids=["arrays", "codes"])
def test_H_and_codes_are_not_copied(ways):
    """dH is in the memory of H, and gradients of W1 are a call of their own, as in 16 bits."""
    text = compiled(jax.grad(loss), ways(layer("float32"))).as_text()
    backward = [line for line in text.splitlines() if 'custom_call_target="tilemoe.backward.v1"' in line]
    assert len(backward) == 2 and sum("output_to_operand_aliasing" in line for line in backward) == 1
    assert not re.findall(rf"(f32\[{T * K},{2 * N}\]|f8e4m3fn\[[\d,]+\])\S* copy\(", text)


def kinds(tree):
    """Dtypes and shapes of a tree's arrays that have elements."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") and leaf.size]
    return Counter((array.dtype.name, *array.shape) for array in arrays)


def residuals(function, a):
    """What backward keeps, and what of it is not among the arguments."""
    kept = kinds(jax.vjp(function, a)[1])
    return kept, kept - kinds(a)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("wide", [False, True], ids=["16-bit weights", "float32 weights"])
def test_residuals_are_those_of_16_bits(recipe, wide):
    """H and the routing as with recipe="bf16", and no codes of weights or of x."""
    a = layer("bfloat16")
    if wide:
        a |= {name: layer("float32")[name] for name in ("W1", "W2")}
    _, in_16_bits = residuals(lambda a: moe(a, "bf16"), a)
    assert ("bfloat16", T * K, 2 * N) in in_16_bits  # H
    copies = Counter({("bfloat16", E, 2 * N, D): 1, ("bfloat16", E, D, N): 1}) if wide else Counter()
    assert in_16_bits & copies == copies
    for made in (a, coded(a)):
        kept, more = residuals(lambda a: moe(a, recipe), made)
        assert more == in_16_bits - copies
    assert not kept & kinds([a["W1"], a["W2"]])  # codes, and no masters


def test_donation():
    """New codes in the memory of old ones."""
    a = layer("bfloat16")
    codes = frozen(coded(a))["W1"]
    quantise = lambda W, old: fp8_weight(W).with_master(None)  # noqa: E731
    text = compiled(quantise, a["W1"], codes, donate_argnums=1, keep_unused=True).as_text()
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1]
    assert aliased.count("may-alias") == len(jax.tree.leaves(codes)) == 4


@pytest.mark.parametrize("names", [tilemoe.RESIDUALS, ("tilemoe_H",), ()], ids=len)
def test_checkpoint(names):
    a = layer("float32")
    expected = gradients(a)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    for ways in (lambda a: a, coded):
        remat = jax.checkpoint(lambda a, ways=ways: loss(ways(a)), policy=policy)
        equal(jax.jit(jax.value_and_grad(remat))(a), expected)


def test_scan():
    """Layers whose codes are stacked, and made at once."""
    a = layer("float32")
    masters = {name: jnp.stack([a[name], -a[name]]) for name in ("W1", "W2")}
    rest = without(a, "W1", "W2", "x")

    def scanned(masters):
        weights = {name: fp8_weight(W) for name, W in masters.items()}
        run = lambda x, w: (x + moe({**rest, **w, "x": x}), None)  # noqa: E731
        return jnp.sin(jax.lax.scan(run, a["x"], weights)[0]).sum()

    def unrolled(masters):
        x = a["x"]
        for i in range(2):
            x = x + moe({**rest, **{name: W[i] for name, W in masters.items()}, "x": x})
        return jnp.sin(x).sum()

    found, expected = (jax.jit(jax.grad(f))(masters) for f in (scanned, unrolled))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    assert quantisations(compiled(scanned, masters).as_text()) == 2


@pytest.mark.parametrize("way", ["in the call", "per device", "before"])
def test_shard_map(way):
    """Experts over four devices: codes of each device's experts, and gradients of its masters."""
    a, ranks = layer("float32", E=8), 4
    mesh = jax.make_mesh((ranks,), ("ranks",), axis_types=(AxisType.Auto,))
    scores, ids, _ = tilemoe.top_k(a.pop("logits_or_scores"), K)
    a = {**a, "logits_or_scores": scores}
    specs = {name: P("ranks") if name in ("W1", "W2") else P() for name in a}

    def spread(a):
        here = coded(a) if way == "per device" else a
        first = jax.lax.axis_index("ranks") * (8 // ranks)
        return jax.lax.psum(moe({**here, "ids": ids - first}), "ranks")

    of_masters = lambda a: coded(a) if way == "before" else a  # noqa: E731
    whole = jax.shard_map(spread, mesh=mesh, in_specs=(specs,), out_specs=P())
    found = jax.jit(jax.value_and_grad(lambda a: jnp.sin(whole(of_masters(a))).sum()))(a)
    expected = jax.jit(jax.value_and_grad(lambda a: loss({**a, "ids": ids})))(a)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name in a:
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=1e-4, atol=1e-4, err_msg=name)
    in_16_bits = jax.jit(jax.grad(lambda a: loss({**a, "ids": ids}, recipe="bf16")))(a)
    assert not np.allclose(found[1]["x"], in_16_bits["x"], rtol=1e-3, atol=1e-3)


def test_export():
    pytest.importorskip("flatbuffers")
    from jax import export

    a = layer("float32")
    step = jax.jit(lambda a: gradients(a))
    program = export.export(step, disabled_checks=tilemoe.export_checks())(a)
    equal(export.deserialize(program.serialize()).call(a), step(a))


def test_vmap():
    W = layer("float32")["W1"]
    with pytest.raises(NotImplementedError, match=r"vmap over quantize_fp8.*\(..., E, out, in\)"):
        jax.vmap(fp8_weight)(jnp.stack([W, W]))
    with pytest.raises(NotImplementedError, match="vmap over forward is not supported"):
        a = layer("float32")
        jax.vmap(lambda x: moe({**a, "x": x}))(jnp.stack([a["x"], a["x"]]))


def test_second_derivatives():
    a = layer("float32")
    first = lambda x: jax.grad(lambda x: loss({**a, "x": x}))(x).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="derivatives of the gradient"):
        jax.grad(first)(a["x"])


# ---------------------------------------------------------------- H in FP8


SAVE_H = dict(save_h="fp8")


@pytest.mark.parametrize("ways", [lambda a: a, coded], ids=["arrays", "codes"])
def test_residuals_with_codes_of_H(ways):
    """Bytes of codes and scales in place of H, and nothing else."""
    a = ways(layer("bfloat16"))
    _, plain = residuals(moe, a)
    _, codes = residuals(lambda a: moe(a, **SAVE_H), a)
    assert plain - codes == Counter({("bfloat16", T * K, 2 * N): 1})
    assert codes - plain == Counter({("uint8", T * K, 2 * N): 1, ("float32", T * K, 1, 2): 1})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_with_codes_of_H(dtype):
    """The same O; gradients near those of H in x's dtype; the same bits in every way of backward."""
    a = layer(dtype, biases=True)
    plain, found = gradients(a), gradients(a, **SAVE_H)
    equal(found[0], plain[0])
    for name in ("x", "W1", "W2", "b1", "logits_or_scores"):
        one, other = (g[1][name].astype(jnp.float32) for g in (found, plain))
        error = jnp.linalg.norm(one - other) / jnp.linalg.norm(other)
        assert 1e-3 < error < 0.1, (name, error)
    equal(gradients(a, overwrite_H=False, **SAVE_H), found)
    for only in ("x", "W1", "W2"):
        one = jax.grad(lambda one, only=only: loss({**a, only: one}, **SAVE_H))(a[only])
        equal(one, found[1][only])


def test_codes_of_H_may_be_read_again():
    """XLA copies them before backward overwrites them."""
    a = layer("float32")
    O, vjp = jax.vjp(jax.jit(lambda a: moe(a, **SAVE_H)), a)
    first, second = vjp(O), vjp(O)
    equal(first, second)

    @jax.jit
    def both(a):
        O, vjp = jax.vjp(lambda a: moe(a, **SAVE_H), a)
        return vjp(O), vjp(2 * O)

    found, of_twice = both(a)
    equal(found, first)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-5), found, of_twice)


def test_backward_with_codes_of_H():
    """The first call writes over the codes and makes dH, which the second reads; no array is copied."""
    step = jax.grad(lambda a: loss(a, **SAVE_H))
    text = compiled(step, coded(layer("float32"))).as_text()
    backward = [line for line in text.splitlines() if 'custom_call_target="tilemoe.backward.v1"' in line]
    aliases = [re.search(r"output_to_operand_aliasing=\{(.*?)\}, api", line) for line in backward]
    assert [found[1].count(":") if found else 0 for found in aliases] == [2, 0]
    codes = rf"u8\[{T * K},{2 * N}\]"
    assert [bool(re.search(codes, line)) for line in backward] == [True, False]
    assert not re.findall(rf"({codes}|f32\[{T * K},1,2\]|f32\[{T * K},{2 * N}\])\S* copy\(", text)


@pytest.mark.parametrize("names", [tilemoe.RESIDUALS, ("tilemoe_H",), ()], ids=len)
def test_checkpoint_with_codes_of_H(names):
    a = layer("float32")
    expected = gradients(a, **SAVE_H)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    remat = jax.checkpoint(lambda a: loss(a, **SAVE_H), policy=policy)
    equal(jax.jit(jax.value_and_grad(remat))(a), expected)
    of_H = {("uint8", T * K, 2 * N), ("float32", T * K, 1, 2)}
    assert of_H & residuals(remat, a)[0].keys() == (of_H if names else set())


def test_scan_with_codes_of_H():
    """Codes of all layers are stacked; the bits are those of unrolled layers."""
    a = layer("bfloat16")
    stacked = {name: jnp.stack([a[name], -a[name], 2 * a[name]]) for name in ("W1", "W2")}
    rest = without(a, "W1", "W2", "x")

    def run(unroll):
        def step(x, w):
            return x + moe({**rest, **w, "x": x}, **SAVE_H), None

        def whole(weights):
            out = jax.lax.scan(step, a["x"], weights, unroll=unroll)[0]
            return out.astype(jnp.float32).sum()

        return jax.jit(jax.grad(whole))

    equal(run(1)(stacked), run(3)(stacked))
    assert f"u8[3,{T * K},{2 * N}]" in compiled(run(1), stacked).as_text()


def test_no_rows_with_codes_of_H():
    a = layer("float32")
    a |= {"x": a["x"][:0], "logits_or_scores": a["logits_or_scores"][:0]}
    _, found = gradients(a, **SAVE_H)
    assert not any(g.any() for g in jax.tree.leaves(found))


# ---------------------------------------------------------------- refusals


def refused(kind, words, use):
    with pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words))):
        use()


A = layer("float32")
Q = coded(A)
LORA = tilemoe.LoRA(A2=jnp.ones((E, 8, N)), B2=jnp.ones((E, D, 8)))


def of_W1(**changed):
    fields = {name: changed.get(name, getattr(Q["W1"], name)) for name in Q["W1"].__dataclass_fields__}
    return dict(W1=Fp8Weight(**fields))


CASES = {
    "auto": (NotImplementedError, ["recipe='auto' is not supported in JAX"], {}, dict(recipe="auto")),
    "H in FP8, 16 bits": (
        ValueError, ["save_h='fp8' requires recipe='fp8'", "got 'bf16'"], {},
        dict(recipe="bf16", save_h="fp8"),
    ),
    "H in FP8, forward": (
        ValueError, ["save_h='fp8' requires recipe='fp8'", "got 'fp8_forward'"], {},
        dict(recipe="fp8_forward", save_h="fp8"),
    ),
    "H in FP8, auto": (
        NotImplementedError, ["recipe='auto' is not supported in JAX"], {},
        dict(recipe="auto", save_h="fp8"),
    ),
    "another format of H": (
        ValueError, ["save_h must be one of fp8, got 'mxfp4'"], {}, dict(save_h="mxfp4")
    ),
    "adapters": (
        NotImplementedError, ["does not support adapters; use recipe='fp8_forward'"], {}, dict(lora=LORA)
    ),
    "no gate": (
        NotImplementedError, ["requires an activation with a gate"], dict(W1=A["W1"][:, :N]),
        dict(activation="relu"),
    ),
    "interleaved": (
        NotImplementedError, ["does not support the gate_layout interleaved"], {},
        dict(gate_layout="interleaved"),
    ),
    "n": (
        NotImplementedError, ["n to be a multiple of 128"],
        dict(W1=A["W1"][:, : 2 * 112], W2=A["W2"][..., :112]), {},
    ),
    "width": (
        ValueError, ["W2 has shape (4, 144, 120)", "multiples of 16"],
        dict(W1=A["W1"][:, :240], W2=A["W2"][..., :120]), {},
    ),
    "layout": (ValueError, ["W1.master has shape (4, 256, 144), expected (4, 144, 256)"], Q, dict(transposed=True)),
    "codes' shape": (ValueError, ["W1.codes has shape (4, 256)"], of_W1(codes=Q["W1"].codes[..., 0]), {}),
    "codes' dtype": (
        ValueError, ["W1.codes must be float8_e4m3fn, got uint8"], of_W1(codes=Q["W1"].codes.view(jnp.uint8)), {}
    ),
    "scales": (
        ValueError, ["W1.scales has shape (4, 2, 1), expected (4, 2, 2)"], of_W1(scales=Q["W1"].scales[..., :1]), {}
    ),
    "half of a layout": (
        ValueError, ["W1 has transposed_codes or transposed_scales"], of_W1(transposed_scales=None), {}
    ),
    "transposed codes": (
        ValueError, ["W1.transposed_codes has shape (4, 256, 144), expected (4, 144, 256)"],
        of_W1(transposed_codes=Q["W1"].codes), {},
    ),
    "transposed scales": (
        ValueError, ["W1.transposed_scales has shape (4, 1, 2)"],
        of_W1(transposed_scales=Q["W1"].transposed_scales[:, :1]), {},
    ),
    "sizes of two weights": (ValueError, ["W1 has shape (4, 272, 144), expected (4, 256, 144)"], dict(W1=jnp.ones((E, 272, D))), {}),
    "a bias": (TypeError, ["b2 is a tilemoe.jax"], dict(b2=Q["W2"]), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    kind, words, changed, how = CASES[case]
    refused(kind, words, lambda: jax.jit(lambda: moe({**A, **changed}, **how))())


def test_fp8_weight_refuses():
    W = A["W1"]
    refused(ValueError, ["W has shape (256, 144), expected (..., E, out, in)"], lambda: fp8_weight(W[0]))
    refused(ValueError, ["expected (..., E, in, out)"], lambda: fp8_weight(W[0], transposed=True))
    refused(ValueError, ["W has shape (4, 256, 136)", "multiples of 16"], lambda: fp8_weight(W[..., :136]))
    refused(ValueError, ["W must be float32, bfloat16 or float16, got int32"], lambda: fp8_weight(W.astype(int)))
    refused(TypeError, ["W is a builtins.float"], lambda: fp8_weight(1.0))
    refused(TypeError, ["transposed must be True or False, got 1"], lambda: fp8_weight(W, transposed=1))
    refused(TypeError, ["float_scales must be"], lambda: fp8_weight(W, float_scales=None))
    mesh = jax.make_mesh((4,), ("ranks",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = jax.device_put(W, jax.sharding.NamedSharding(mesh, P("ranks")))
        refused(ValueError, ["W is sharded", "jax.shard_map"], lambda: jax.jit(fp8_weight)(spread))


def test_both_layouts_of_a_gate():
    """W1 and W1_up with codes, and without."""
    a = layer("float32", n=208, split=True)
    expected = gradients(a, gate_layout="split")
    mixed = {**a, "W1": fp8_weight(a["W1"])}
    found = gradients(mixed, gate_layout="split")
    equal(found[1]["W1_up"], expected[1]["W1_up"])
    equal(found[1]["W1"].master, expected[1]["W1"])
    assert T == a["x"].shape[0]
