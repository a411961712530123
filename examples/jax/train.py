"""Train a small language model of bytes with Mixture-of-Experts layers in JAX.

The text is this repository's documentation or other files. The program runs in a minute on a CPU,
and on a GPU.

    python examples/jax/train.py
    python examples/jax/train.py --steps 2000 --text book.txt

A layer is a causal convolution and `tilemoe.jax.moe`; its backward overwrites saved activations,
and weights and the optimiser's state are donated to the step.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import tilemoe.jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY, WIDTH, HIDDEN, EXPERTS, CHOSEN, LAYERS, TAPS = 256, 128, 64, 16, 4, 2, 8
BALANCE = 0.01  # coefficient of the load balance loss


def initial(key):
    def normal(*shape, fan_in):
        nonlocal key
        key, now = jax.random.split(key)
        return jax.random.normal(now, shape) * fan_in**-0.5

    def layer():
        return {
            "taps": normal(TAPS, WIDTH, fan_in=TAPS),
            "router": normal(WIDTH, EXPERTS, fan_in=WIDTH),
            "W1": normal(EXPERTS, 2 * HIDDEN, WIDTH, fan_in=WIDTH),
            "W2": normal(EXPERTS, WIDTH, HIDDEN, fan_in=HIDDEN),
        }

    return {
        "embedding": normal(VOCABULARY, WIDTH, fan_in=WIDTH),
        "head": normal(WIDTH, VOCABULARY, fan_in=WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
    }


def normalised(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def logits_of(weights, tokens, dtype):
    """Compute logits (batch, length, VOCABULARY) and the sum of the router's losses."""
    x, losses = weights["embedding"][tokens].astype(dtype), 0.0
    for layer in weights["layers"]:
        padded = jnp.pad(normalised(x), ((0, 0), (TAPS - 1, 0), (0, 0)))
        taps = layer["taps"].astype(dtype)
        x = x + sum(padded[:, i : i + x.shape[1]] * taps[i] for i in range(TAPS))
        h = normalised(x)
        logits = h.astype(jnp.float32) @ layer["router"]
        # The weights are float32: the layer computes in h's dtype, with gradients in float32.
        x, aux = tilemoe.jax.moe(
            h, logits, layer["W1"], layer["W2"], K=CHOSEN, addend=x, return_aux=True
        )
        losses += tilemoe.jax.router_losses(logits, aux.expert_counts)[0]
    return normalised(x).astype(jnp.float32) @ weights["head"], losses


def loss_of(weights, tokens, dtype):
    logits, losses = logits_of(weights, tokens[:, :-1], dtype)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -chosen.mean() + BALANCE * losses, -chosen.mean()


@functools.partial(jax.jit, static_argnames=("rate", "dtype"), donate_argnums=(0, 1))
def step(weights, moments, tokens, rate, dtype):
    """Update the weights with Adam without bias correction."""
    gradients, loss = jax.grad(loss_of, has_aux=True)(weights, tokens, dtype)
    moments = jax.tree.map(
        lambda m, g: (0.9 * m[0] + 0.1 * g, 0.99 * m[1] + 0.01 * g * g),
        moments, gradients, is_leaf=lambda node: isinstance(node, tuple),
    )  # fmt: skip
    update = lambda w, m: w - rate * m[0] / (jnp.sqrt(m[1]) + 1e-8)  # noqa: E731
    return jax.tree.map(update, weights, moments), moments, loss


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", type=pathlib.Path, nargs="*", help="text files; default: docs/*.md"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-3)
    args = parser.parse_args()

    files = args.text or sorted((ROOT / "docs").glob("*.md"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    random = np.random.default_rng(0)
    weights = initial(jax.random.key(0))
    moments = jax.tree.map(lambda w: (jnp.zeros_like(w), jnp.zeros_like(w)), weights)
    print(f"{text.size} bytes, {jax.default_backend()}, {dtype.__name__}")
    for number in range(args.steps):
        begins = random.integers(0, text.size - args.length - 1, args.batch)
        tokens = np.stack([text[begin : begin + args.length + 1] for begin in begins])
        weights, moments, loss = step(weights, moments, tokens.astype(np.int32), args.rate, dtype)
        if number % 20 == 0 or number == args.steps - 1:
            print(f"step {number}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
