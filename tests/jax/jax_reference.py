"""The layer in plain JAX, in float64: every token through every expert, times its score or zero.

T tokens of width d, E experts of width n; weights in the layouts of `tilemoe.jax.moe`."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

LIST = Path(__file__).parents[2] / "include" / "tilemoe" / "activations.inc"
FUNCTIONS = {  # of the formulas in the list
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def _activations():
    """{name: (gated, function of gate and up, or of h)}: the formulas of the library's list."""
    row = r'^TILEMOE_ACTIVATION\((\w+), .* (true|false), +"(.*)"\)$'
    found = {}
    for name, gated, formula in re.findall(row, LIST.read_text(), re.MULTILINE):
        arguments = "gate, up" if gated == "true" else "h"
        found[name] = gated == "true", eval(f"lambda {arguments}: {formula}", dict(FUNCTIONS))
    return found


ACTIVATIONS = _activations()


def _gate_and_up(h, gate_layout):
    if gate_layout == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    return jnp.split(h, 2, axis=-1)


def _sum(weight, A, B, scale):
    return weight if A is None else weight + scale * B @ A


def outputs(x, W1, W2, *, W1_up=None, b1=None, b1_up=None, b2=None, activation="swiglu",
            gate_layout="concatenated", transposed=False, clamp=0.0, alpha=0.0, up_shift=0.0,
            lora=None):  # fmt: skip
    """x (T, d) -> what every expert makes of it (T, E, d)."""
    if transposed:
        W1, W2 = W1.mT, W2.mT
        W1_up = None if W1_up is None else W1_up.mT
    if lora is not None:
        scale = lora.scale if isinstance(lora.scale, tuple) else (lora.scale, lora.scale)
        W1, W2 = _sum(W1, lora.A1, lora.B1, scale[0]), _sum(W2, lora.A2, lora.B2, scale[1])
        W1_up = None if W1_up is None else _sum(W1_up, lora.A1_up, lora.B1_up, scale[0])
    h = jnp.einsum("td,ehd->teh", x, W1)
    h = h if b1 is None else h + b1
    gated, function = ACTIVATIONS[activation]
    if W1_up is not None:
        gate, up = h, jnp.einsum("td,ehd->teh", x, W1_up)
        up = up if b1_up is None else up + b1_up
    elif gated:
        gate, up = _gate_and_up(h, gate_layout)
    if clamp or alpha or up_shift:
        if clamp:
            gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
        A = gate * jax.nn.sigmoid((alpha or 1.0) * gate) * (up + up_shift)
    else:
        A = function(gate, up) if gated else function(h)
    y = jnp.einsum("ten,edn->ted", A, W2)
    return y if b2 is None else y + b2


def scores_of(logits, ids, scoring="softmax_over_chosen", factor=1.0):
    """logits (T, E), ids (T, K) -> (T, K)."""
    chosen = jnp.take_along_axis(logits, ids, 1)
    if scoring == "softmax_over_chosen":
        scores = jax.nn.softmax(chosen, -1)
    elif scoring.startswith("softmax"):
        scores = jnp.take_along_axis(jax.nn.softmax(logits, -1), ids, 1)
    else:
        scores = jax.nn.sigmoid(chosen)
    if scoring.endswith("renormalized"):
        scores = scores / scores.sum(-1, keepdims=True)
    return factor * scores


def combined(y, ids, scores, addend=None):
    """y (T, E, d), ids and scores (T, K) -> O (T, d); an id outside [0, E) adds nothing."""
    E = y.shape[1]
    of_expert = (jax.nn.one_hot(ids, E, dtype=y.dtype) * scores[..., None]).sum(1)  # (T, E)
    O = jnp.einsum("te,ted->td", of_expert, y)
    return O if addend is None else O + addend


def grouped(x, counts, W1, W2, row_scores=None, addend=None, **options):
    """Rows sorted by expert -> rows; counts: numbers of the host."""
    ids = jnp.repeat(jnp.arange(len(counts)), jnp.asarray(counts), total_repeat_length=sum(counts))
    ids = jnp.pad(ids, (0, x.shape[0] - sum(counts)), constant_values=-1)[:, None]
    scores = jnp.ones_like(x[:, 0]) if row_scores is None else row_scores
    return combined(outputs(x, W1, W2, **options), ids, scores[:, None], addend)
