"""Random layers of sizes that the FP8 recipes support."""

import jax.numpy as jnp
import numpy as np

from jax_values import cast, values

T, D, N, E, K = 24, 144, 128, 4, 2
RECIPES = "bf16", "fp8", "fp8_forward"
FP8 = RECIPES[1:]

__all__ = ["D", "E", "FP8", "K", "N", "RECIPES", "T", "arrays", "cast", "layer", "values"]


def arrays(n=N, E=E, split=False, biases=False):
    """{name: float64 array} of a call of `moe` with logits."""
    rows = n if split else 2 * n
    made = {
        "x": values(0, T, D),
        "logits_or_scores": values(1, T, E),
        "W1": values(2, E, rows, D, scale=D**-0.5),
        "W2": values(3, E, D, n, scale=n**-0.5),
    }
    if split:
        made["W1_up"] = values(4, E, n, D, scale=D**-0.5)
    if biases:
        made["b1"], made["b2"] = values(5, E, rows), values(6, E, D)
        if split:
            made["b1_up"] = values(7, E, n)
    return made


def layer(dtype, **how):
    """The same of a dtype, rounded to float32 first, as PyTorch's tensors are."""
    return {name: jnp.asarray(a.astype(np.float32), dtype) for name, a in arrays(**how).items()}
