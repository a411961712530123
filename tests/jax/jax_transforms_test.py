"""`tilemoe.jax` under JAX's transformations: what the compiled programs contain, and what is
refused."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilemoe.jax as tilemoe
import tilemoe.jax._library as library
from jax_values import D, E, K, N, T, cast, values, weights

W = cast(weights(biases=True), jnp.float32)
X, LOGITS = cast((values(0, T, D), values(7, T, E)), jnp.float32)


def layer(x, logits, W, **options):
    return tilemoe.moe(x, logits, **W, K=K, **options)


def loss(x, logits, W, **options):
    return jnp.sin(layer(x, logits, W, **options)).sum()


def compiled(function, *arguments):
    """The optimised program as text."""
    return jax.jit(function).lower(*arguments).compile().as_text()


def calls(text, handler):
    """How often a program calls a handler."""
    return len(re.findall(rf'custom_call_target="tilemoe\.{handler}\.v1"', text))


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ---------------------------------------------------------------- gradients


SUBSETS = [("x",), ("logits",), ("W1",), ("W2", "b2"), ("x", "b1"), ("logits", "W2")]


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_unwanted_gradients_are_not_computed(wanted):
    every = {"x": X, "logits": LOGITS, **W}

    def run(some, others):
        arguments = {**some, **others}
        return loss(arguments.pop("x"), arguments.pop("logits"), arguments)

    expected = jax.jit(jax.grad(run))(every, {})
    some = {name: every[name] for name in wanted}
    others = {name: array for name, array in every.items() if name not in wanted}
    equal(jax.jit(jax.grad(run))(some, others), {name: expected[name] for name in wanted})
    text = compiled(jax.grad(run), some, others)
    found = [line for line in text.splitlines() if 'target="tilemoe.backward.v1"' in line]
    assert len(found) == (2 if wanted == ("x", "b1") else 1)  # gradients of W1 are in a call of their own
    shapes = {"W1": f"f32[{E},{2 * N},{D}]", "W2": f"f32[{E},{D},{N}]", "b1": f"f32[{E},{2 * N}]"}
    results = " ".join(line.split("custom-call(")[0] for line in found)
    for name, shape in shapes.items():
        assert (shape in results) == (name in wanted), (name, results)
    of_X = f"f32[{T},{D}]" in results
    assert of_X == ("x" in wanted)
    assert ("output_to_operand_aliasing" in found[0]) == bool({"x", "W1", "b1"} & {*wanted})  # dH


def test_H_is_not_copied():
    def copies(overwrite_H):
        run = lambda *a: loss(*a, overwrite_H=overwrite_H)  # noqa: E731
        text = compiled(jax.grad(run, argnums=(0, 2)), X, LOGITS, W)
        assert (calls(text, "forward"), calls(text, "backward")) == (1, 2 if overwrite_H else 1)
        return len(re.findall(rf"f32\[{T * K},{2 * N}\]\S* copy\(", text)), "output_to_operand_aliasing" in text

    assert copies(overwrite_H=True) == (0, True)
    assert copies(overwrite_H=False) == (0, False)


def test_H_that_is_read_again_is_copied():
    """Two pullbacks of one forward: XLA keeps H for the second."""

    def twice(x):
        O, pull = jax.vjp(lambda x: layer(x, LOGITS, W), x)
        return pull(O)[0], pull(2 * O)[0]

    first, second = jax.jit(twice)(X)
    equal(first, twice(X)[0])
    np.testing.assert_allclose(second, 2 * first, rtol=1e-4, atol=1e-5)
    O, pull = jax.vjp(lambda x: layer(x, LOGITS, W), X)
    equal(pull(O), pull(O))
    equal(pull(O)[0], first)


def test_eager_equals_jitted():
    equal(jax.grad(loss, argnums=(0, 1, 2))(X, LOGITS, W), jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(X, LOGITS, W))
    assert calls(compiled(layer, X, LOGITS, W), "forward") == 1


def test_memory_is_that_of_an_inference():
    """Without a gradient H is no result."""
    assert f"f32[{T * K},{2 * N}]" not in compiled(layer, X, LOGITS, W)


def test_donation():
    step = jax.jit(lambda x: x + layer(x, LOGITS, W), donate_argnums=0)
    expected = X + layer(X, LOGITS, W)
    np.testing.assert_allclose(step(X + 0), expected, rtol=1e-6)


# ---------------------------------------------------------------- checkpoint, scan, optimiser


def test_checkpoint(capsys):
    """Names of the residuals: with all of them forward runs once."""

    def gradient(names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        remat = jax.checkpoint(lambda x, W: layer(x, LOGITS, W), policy=policy)
        jax.ad_checkpoint.print_saved_residuals(remat, X, W)
        printed = capsys.readouterr().out
        for name in tilemoe.RESIDUALS[:2]:  # the next two are constants here, the others of adapters
            assert (f"named '{name}'" in printed) == (name in names), printed
        return jax.grad(lambda x, W: jnp.sin(remat(x, W)).sum(), argnums=(0, 1))

    expected = jax.jit(jax.grad(lambda x, W: loss(x, LOGITS, W), argnums=(0, 1)))(X, W)
    for names in (tilemoe.RESIDUALS, ("tilemoe_H",), ()):
        equal(jax.jit(gradient(names))(X, W), expected)
    text = jax.jit(gradient(tilemoe.RESIDUALS)).lower(X, W).as_text()
    assert (text.count("@tilemoe.forward.v1"), text.count("@tilemoe.backward.v1")) == (1, 2)


def test_scan():
    layers = jax.tree.map(lambda a: jnp.stack([a, -a]), W)

    def scanned(layers):
        return jnp.sin(jax.lax.scan(lambda x, W: (x + layer(x, LOGITS, W), None), X, layers)[0]).sum()

    def unrolled(layers):
        x = X
        for i in range(2):
            x = x + layer(x, LOGITS, jax.tree.map(lambda a: a[i], layers))
        return jnp.sin(x).sum()

    found, expected = jax.jit(jax.grad(scanned))(layers), jax.jit(jax.grad(unrolled))(layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_threads():
    expected = jax.jit(jax.grad(loss, argnums=2))(X, LOGITS, W)
    step = jax.jit(jax.grad(loss, argnums=2)).lower(X, LOGITS, W).compile()
    for count in (1, 3, 0):
        tilemoe.set_num_threads(count)
        equal(jax.block_until_ready(step(X, LOGITS, W)), expected)


# ---------------------------------------------------------------- export

EXPORTED = """
import sys, jax, jax.numpy as jnp
from jax import export
{first}
program = export.deserialize(open(sys.argv[1], "rb").read())
print(float(program.call(jnp.ones(({T}, {D})))))
"""


def test_export(tmp_path):
    pytest.importorskip("flatbuffers")
    from jax import export

    step = jax.jit(lambda x: loss(x, LOGITS, W))
    program = export.export(step, disabled_checks=tilemoe.export_checks())(X)
    path = tmp_path / "program"
    path.write_bytes(program.serialize())
    run = lambda first: subprocess.run(
        [sys.executable, "-c", EXPORTED.format(first=first, T=T, D=D), path], capture_output=True, text=True
    )
    done = run("import tilemoe.jax")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == float(step(jnp.ones((T, D))))
    assert "No FFI handler registered for tilemoe." in run("").stderr


# ---------------------------------------------------------------- what is refused


def refuses(kind, *words):
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


def test_vmap():
    batch = jnp.stack([X, X])
    with refuses(NotImplementedError, "vmap", "not supported"):
        jax.vmap(lambda x: layer(x, LOGITS, W))(batch)
    with refuses(NotImplementedError, "vmap"):
        jax.vmap(jax.grad(loss), (0, None, None))(batch, LOGITS, W)
    with refuses(NotImplementedError, "vmap over top_k"):
        jax.vmap(lambda logits: tilemoe.top_k(logits, K))(jnp.stack([LOGITS, LOGITS]))
    # An axis that the layer does not have.
    scaled = jax.vmap(lambda factor: factor * layer(X, LOGITS, W))(jnp.arange(3.0))
    equal(scaled[1], layer(X, LOGITS, W))


def test_forward_mode():
    with refuses(TypeError, "forward-mode"):
        jax.jvp(lambda x: layer(x, LOGITS, W), (X,), (X,))


def test_second_derivatives():
    with refuses(NotImplementedError, "derivatives of the gradient"):
        jax.grad(lambda x: jax.grad(loss)(x, LOGITS, W).sum())(X)
    with refuses(NotImplementedError, "derivatives of the gradient"):
        jax.grad(lambda l: jax.grad(lambda l: tilemoe.top_k(l, K)[0].sum())(l).sum())(LOGITS)


def test_symbolic_shapes():
    pytest.importorskip("flatbuffers")
    from jax import export

    (T_,) = export.symbolic_shape("T")
    shapes = jax.ShapeDtypeStruct((T_, D), jnp.float32), jax.ShapeDtypeStruct((T_, E), jnp.float32)
    with refuses(NotImplementedError, "x has the symbolic shape (T, 24)"):
        export.export(jax.jit(lambda x, l: layer(x, l, W)), disabled_checks=tilemoe.export_checks())(*shapes)


def test_float64():
    with jax.enable_x64(True), refuses(ValueError, "x must be float32, bfloat16 or float16, got float64"):
        layer(np.ones((T, D)), LOGITS, W)


def test_int64_ids():
    with jax.enable_x64(True):
        scores, ids, _ = tilemoe.top_k(LOGITS, K)
        assert ids.dtype == jnp.int32
        rest = {name: array for name, array in W.items()}
        wide = tilemoe.moe(X, scores, **rest, ids=ids.astype(jnp.int64))
        equal(wide, tilemoe.moe(X, scores, **rest, ids=ids))


def test_rounding():
    with refuses(NotImplementedError, "rounding"):
        layer(X, LOGITS, W, rounding="nearest")


# ---------------------------------------------------------------- GPUs


class OfGpus:
    """Stands for the CUDA library: a workspace of a byte for each SM, of bfloat16 alone."""

    def plan(self, handler, operands, attributes, sms):
        if "X float32" in operands:
            raise NotImplementedError("float32")
        sizes = library._cpu.plan(handler, operands, attributes, 0)
        return sizes._replace(workspace=sms)


def test_the_workspace_is_that_of_the_largest_gpu(monkeypatch):
    """And a handler of the CPU ignores it."""
    monkeypatch.setattr(library, "_cuda", OfGpus())
    monkeypatch.setattr(library, "_elsewhere", ())
    library._planned.cache_clear()
    tilemoe.set_cuda_sms(108, 77, 132)
    narrow = cast((X, LOGITS, W), jnp.bfloat16)
    gradient = jax.jit(jax.grad(loss))
    for arrays, expected in (narrow, True), ((X, LOGITS, W), False):
        text = jax.jit(gradient).lower(*arrays).as_text()
        forward, backward = (line for line in text.splitlines() if "v1(" in line and "ward" in line)
        assert ("tensor<132xui8>" in forward, "tensor<132xui8>" in backward) == (expected, expected)
    found = gradient(*narrow)
    tilemoe.set_cuda_sms()
    monkeypatch.setattr(library, "_sms_here", lambda: ())
    equal(found, jax.jit(jax.grad(loss))(*narrow))
    library._planned.cache_clear()


def test_the_workspaces_are_in_the_memory_of_dW1(monkeypatch):
    """XLA has the temporaries of the PyTorch package: H, and nothing for a workspace of dW1's size."""
    d, n, rows = 256, 256, 64
    MiB = E * 2 * n * d * 2 / 2**20

    class OfGpu(OfGpus):
        def plan(self, handler, operands, attributes, sms):
            has = handler == "forward" or "\nmode 1\n" in attributes
            return super().plan(handler, operands, attributes, int(MiB * 2**20) if has else 0)

    monkeypatch.setattr(library, "_cuda", OfGpu())
    monkeypatch.setattr(library, "_elsewhere", (132,))
    library._planned.cache_clear()
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731

    def step(x, logits, W1, W2):
        O, pull = jax.vjp(lambda *a: tilemoe.moe(*a, K=K), x, logits, W1, W2)
        return O, pull(O)

    lowered = jax.jit(step).lower(of(rows, d), of(rows, E), of(E, 2 * n, d), of(E, d, n))
    library._planned.cache_clear()
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    H = rows * K * 2 * n * 2
    assert H < temporaries < H + 2**20 / 8 < MiB * 2**20, (temporaries, H)
