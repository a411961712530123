#!/usr/bin/env python3
"""Read a checkpoint of `tilemoe train` with the safetensors package, and run its model in NumPy.

    read_checkpoint.py runs/1/step-00001000.safetensors "The text to continue"

prints the contents of the file and the bytes that the model expects next. The whole model is below;
weights are applied as `x @ W.T`. The formulas of the activations are in the library's list,
include/tilemoe/activations.inc.
"""

import json
import math
import pathlib
import re
import sys

import numpy as np
from safetensors import safe_open


def load(path, dtype=np.float32):
    """Return the weights by name, and the trainer's state: step, configuration, SHA-256."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        if metadata.get("format") != "tilemoe-checkpoint" or metadata["format_version"] != "2":
            raise ValueError(f"{path} must be a checkpoint of tilemoe train in format version 2")
        weights = {name: file.get_tensor(name).astype(dtype) for name in file.keys()
                   if not name.startswith("optimizer.")}
    return weights, json.loads(metadata["state"])


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(z):
    return 0.5 * (1 + np.tanh(0.5 * z))


def gelu(z):
    return 0.5 * z * (1 + np.vectorize(math.erf, otypes=[z.dtype])(z / math.sqrt(2)))


def gelu_tanh(z):
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def relu(z):
    return np.maximum(z, 0)


def silu(z):
    return z * sigmoid(z)


FUNCTIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "sigmoid": sigmoid,
             "tanh": np.tanh}
LIST = pathlib.Path(__file__).resolve().parents[1] / "include/tilemoe/activations.inc"


def activation(name):
    """Return whether the activation has a gate, and its function of gate and up, or of h.

    The formula is that of the library's list.
    """
    row = rf'^TILEMOE_ACTIVATION\({name.replace("-", "_")}, .* (true|false), +"(.*)"\)$'
    gated, formula = re.search(row, LIST.read_text(), re.MULTILINE).groups()
    arguments = "gate, up" if gated == "true" else "h"
    return gated == "true", eval(f"lambda {arguments}: {formula}", dict(FUNCTIONS))


def rms_norm(x, gain):  # (T, d), (d)
    return gain * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def shifted(rows, by):
    """Return rows whose row t is row t - by; zeros if that row does not exist."""
    result = np.zeros_like(rows)
    result[by:] = rows[: len(rows) - by]
    return result


def embed(data, tables):  # bytes (T), (W, 256, d) -> (T, d)
    x = 0
    for j, table in enumerate(tables):
        before = np.zeros_like(data)  # zeros before the text
        before[j:] = data[: len(data) - j]
        x = x + table[before]
    return x


def convolution(u, filters):  # (T, d), (taps, d)
    return sum(tap * shifted(u, j) for j, tap in enumerate(filters))


def attention(u, qkv_weight, out_weight, heads):  # (T, d), (3 D, d), (d, D)
    q, k, v = np.split(u @ qkv_weight.T, 3, axis=1)  # (T, D) each
    k = shifted(k, 1)  # the key of a token is computed from the token before
    T, width = len(u), q.shape[1] // heads
    distance = np.arange(T)[:, None] - np.arange(T)  # (T, T)
    attended = []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        slope = 0 if h == 0 else 2.0 ** (-2 * h - 1)
        scores = q[:, part] @ k[:, part].T / math.sqrt(width) - slope * distance
        attended.append(softmax(np.where(distance >= 0, scores, -np.inf)) @ v[:, part])
    return np.concatenate(attended, axis=1) @ out_weight.T


def choose(logits, config, selection_bias):
    """Return the experts of each token (T, K), and their scores."""
    scoring = config["scoring"]
    if config["routing"] != "top-k":  # trained with token rounding, which has these scores
        scoring = "softmax-renormalized"
    p = sigmoid(logits) if scoring.startswith("sigmoid") else softmax(logits)
    rank = p + selection_bias if scoring.startswith("sigmoid") else logits
    ids = np.argsort(-rank, axis=1, kind="stable")[:, : config["top-k"]]
    chosen = np.take_along_axis(p, ids, axis=1)
    if scoring in ("softmax-all", "sigmoid"):
        return ids, chosen
    return ids, chosen / chosen.sum(axis=1, keepdims=True)


def expert(v, w1, w2, name):  # (rows, d), (2n or n, d), (d, n)
    h = v @ w1.T
    gated, function = activation(name)
    a = function(*np.split(h, 2, axis=1)) if gated else function(h)
    return a @ w2.T


def mixture(v, weights, name, config):  # (T, d)
    w1, w2 = weights[name + "experts.w1"], weights[name + "experts.w2"]
    if config["dense"]:
        return expert(v, w1[0], w2[0], config["activation"])
    router = weights[name + "router.weight"]
    bias = weights.get(name + "router.selection_bias", 0)
    ids, scores = choose(v @ router.T, config, bias)
    out = np.zeros_like(v)
    for e in range(len(router)):
        token, k = np.nonzero(ids == e)
        out[token] += scores[token, k, None] * expert(v[token], w1[e], w2[e], config["activation"])
    return out


def logits(weights, config, data):
    """Return the logits (T, 256) of the byte after each byte of `data`."""
    x = embed(np.frombuffer(data, np.uint8), weights["embedding.weight"])
    for layer in range(config["layers"]):
        block = f"blocks.{layer}."
        u = rms_norm(x, weights[block + "mixer_norm.weight"])
        x = (x + convolution(u, weights[block + "mixer.conv.weight"])
             + attention(u, weights[block + "mixer.attention.qkv.weight"],
                         weights[block + "mixer.attention.out.weight"], config["heads"]))
        if not config["experts-off"]:
            v = rms_norm(x, weights[block + "moe_norm.weight"])
            x = x + mixture(v, weights, block + "moe.", config)
    x = rms_norm(x, weights["head_norm.weight"])
    return x @ weights["head.weight"].T + weights["head.bias"]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    weights, state = load(sys.argv[1])
    print(f"step {state['step']}, text {state['text']['sha256'][:16]}...")
    for name, values in weights.items():
        print(f"  {name:40} {values.shape}")
    p = softmax(logits(weights, state["config"], sys.argv[2].encode())[-1])
    for byte in np.argsort(-p)[:5]:
        print(f"  {p[byte]:6.1%} {bytes([byte])!r}")


if __name__ == "__main__":
    main()
