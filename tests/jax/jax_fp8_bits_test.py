"""The FP8 recipes of `tilemoe.jax` and of the PyTorch package: the same bits of outputs and
gradients."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="this environment has JAX alone")

import tilemoe
import tilemoe.jax
import jax_bits_test
from jax_bits_test import DTYPES, bits
from jax_fp8_values import D, E, FP8, K, N, T, arrays, values

WEIGHTS = "W1", "W1_up", "W2"
RECIPES = [*(dict(recipe=recipe) for recipe in FP8), dict(recipe="fp8", save_h="fp8")]
NAMES = [*FP8, "save_h"]


compare = functools.partial(jax_bits_test.compare, dO_shape=(T, D))


def coded(a):
    """PyTorch's functions take codes, JAX's make them."""
    return {name: tilemoe.fp8_weight(W) if name in WEIGHTS else W for name, W in a.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
@pytest.mark.parametrize(
    "how, sizes",
    [
        (dict(), dict(biases=True)),
        (dict(gate_layout="split", activation="geglu"), dict(n=208, split=True, biases=True)),
        (dict(clamp=0.5, alpha=1.7, up_shift=1.0, column_blocks=2), dict()),
        (dict(capacity=T, on_overflow="drop", scoring="sigmoid_renormalized"), dict()),
    ],
    ids=["biases", "split", "gpt-oss", "capacity"],
)
def test_routed(how, sizes, recipe, dtype):
    how = dict(how, K=K, **recipe)
    inputs = {**arrays(**sizes), "addend": values(8, T, D)}
    compare(
        inputs, dtype, lambda a: tilemoe.jax.moe(**a, **how), lambda a: tilemoe.moe(**coded(a), **how)
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_grouped(recipe):
    inputs = {"rows": values(0, T, D), "row_scores": values(7, T), **arrays()}
    for name in ("x", "logits_or_scores"):
        del inputs[name]
    counts = np.array([9, 0, 11, 2], np.int32)
    compare(
        inputs, "bfloat16",
        lambda a: tilemoe.jax.grouped_experts(**a, counts=jnp.asarray(counts), **recipe),
        lambda a: tilemoe.grouped_experts(**coded(a), counts=torch.tensor(counts), **recipe),
    )  # fmt: skip


def test_adapters():
    factors = {"A1": (E, 8, D), "B1": (E, 2 * N, 8), "A2": (E, 16, N), "B2": (E, D, 16)}
    made = {name: values(20 + i, *shape, scale=0.1) for i, (name, shape) in enumerate(factors.items())}
    how = dict(K=K, recipe="fp8_forward")

    def split(a, kind):
        rest = {name: array for name, array in a.items() if name not in factors}
        return rest, kind(**{name: a[name] for name in factors}, scale=0.5)

    def of_jax(a):
        rest, lora = split(a, tilemoe.jax.LoRA)
        return tilemoe.jax.moe(**rest, lora=lora, **how)

    def of_torch(a):
        rest, lora = split(a, tilemoe.LoRA)
        return tilemoe.moe(**coded(rest), lora=lora, **how)

    compare({**arrays(), **made}, "bfloat16", of_jax, of_torch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes(dtype):
    """Of float32 masters, too, and as frozen codes of a checkpoint."""
    W = values(2, E, 2 * N, D).astype(np.float32)
    ours = tilemoe.jax.fp8_weight(jnp.asarray(W, dtype))
    theirs = tilemoe.fp8_weight(torch.tensor(W).to(DTYPES[dtype]))
    pairs = [
        (ours.codes, theirs.weight.codes), (ours.transposed_codes, theirs.transposed.codes),
    ]  # fmt: skip
    for one, other in pairs:
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), other.view(torch.uint8))
    for one, other in ((ours.scales, theirs.weight), (ours.transposed_scales, theirs.transposed)):
        np.testing.assert_array_equal(one, other.scales)
    checkpoint = [theirs.weight.codes.float().numpy(), theirs.weight.scales.numpy()]
    frozen = tilemoe.jax.Fp8Weight(checkpoint[0].astype(jnp.float8_e4m3fn), checkpoint[1])
    made = {name: a.astype(np.float32) for name, a in arrays().items()}
    x, logits, _, W2 = made.values()
    O = tilemoe.jax.moe(x, logits, frozen, W2, K=K, recipe="fp8")
    x, logits, W2 = map(torch.tensor, (x, logits, W2))
    codes = (tilemoe.fp8_weight(theirs.weight), tilemoe.fp8_weight(W2))
    np.testing.assert_array_equal(bits(O), bits(tilemoe.moe(x, logits, *codes, K=K, recipe="fp8")))
