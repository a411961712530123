"""Random layers for the tests of `tilemoe.jax`, and the comparison with float64."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_reference as reference
import tilemoe.jax as tilemoe

T, D, N, E, K = 13, 24, 16, 5, 3
# Relative errors of a tensor; a tensor of zeros has the error 1.
BOUNDS = {"float32": 2e-6, "bfloat16": 1.2e-2, "float16": 1.6e-3}


def values(seed, *shape, scale=1.0):
    return scale * np.random.default_rng(seed).standard_normal(shape)


def weights(activation="swiglu", gate_layout="concatenated", transposed=False, biases=False, seed=1):
    """{name: float64 array}."""
    gated = reference.ACTIVATIONS[activation][0]
    split = gate_layout == "split"
    rows = 2 * N if gated and not split else N
    made = {
        "W1": values(seed, E, rows, D, scale=D**-0.5),
        "W2": values(seed + 1, E, D, N, scale=N**-0.5),
    }
    if split:
        made["W1_up"] = values(seed + 2, E, N, D, scale=D**-0.5)
    if transposed:
        made = {name: W.swapaxes(1, 2) for name, W in made.items()}
    if biases:
        made["b1"], made["b2"] = values(seed + 3, E, rows), values(seed + 4, E, D)
        if split:
            made["b1_up"] = values(seed + 5, E, N)
    return made


def lora(ranks=(8, 16), rows=2 * N, up_rank=0, scale=(0.5, 2.0), seed=20):
    r1, r2 = ranks
    factors = {}
    if r1:
        factors |= {"A1": values(seed, E, r1, D, scale=D**-0.5), "B1": values(seed + 1, E, rows, r1)}
    if up_rank:
        factors |= {"A1_up": values(seed + 4, E, up_rank, D), "B1_up": values(seed + 5, E, N, up_rank)}
    if r2:
        factors |= {"A2": values(seed + 2, E, r2, N, scale=N**-0.5), "B2": values(seed + 3, E, D, r2)}
    return tilemoe.LoRA(**factors, scale=scale)


def cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def rounded(tree, dtype):
    """float64 values that the dtype has."""
    return jax.tree.map(lambda a: np.asarray(jnp.asarray(a, dtype), np.float64), tree)


def error(found, expected):
    found = np.asarray(jnp.asarray(found, jnp.float32), np.float64)
    assert found.shape == expected.shape
    size = np.linalg.norm(expected)
    assert size > 0, "an expected tensor of zeros shows nothing"
    return np.linalg.norm(found - expected) / size


def compare(layer, expected, inputs, dtype="float32", dO_seed=9):
    """layer, expected: functions of `inputs`, a dict of float64 arrays, that return O. Compares O
    and the gradients of all inputs, under jit."""
    inputs = rounded(inputs, dtype)

    def run(function, arguments, dO):
        O, vjp = jax.vjp(function, arguments)
        return O, vjp(dO.astype(O.dtype))[0]

    shape = jax.eval_shape(layer, cast(inputs, dtype)).shape
    dO = rounded(values(dO_seed, *shape), dtype)
    found = jax.jit(lambda a, dO: run(layer, a, dO))(cast(inputs, dtype), cast(dO, dtype))
    with jax.enable_x64(True):
        exact = jax.jit(lambda a, dO: run(expected, a, dO))(cast(inputs, jnp.float64), jnp.asarray(dO))
        exact = jax.tree.map(np.asarray, exact)
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for path, array in jax.tree_util.tree_leaves_with_path(found):
        other = exact
        for key in path:
            other = getattr(other, key.name) if hasattr(key, "name") else other[
                key.key if hasattr(key, "key") else key.idx
            ]
        of = error(array, other)
        assert of <= BOUNDS[dtype], f"{jax.tree_util.keystr(path)} has the error {of:.2e}"
