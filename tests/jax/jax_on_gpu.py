"""`tilemoe.jax` next to the PyTorch package in one process, on a GPU: the stage `jax` of
scripts/gpu/run.py.

    python tests/jax/jax_on_gpu.py bits --json FILE     # the same bits, step after step
    python tests/jax/jax_on_gpu.py captured --json FILE # the same with all calls in command buffers
    python tests/jax/jax_on_gpu.py memory --json FILE   # peak above inputs, and with an optimiser
    python tests/jax/jax_on_gpu.py time --json FILE     # forward + backward, next to jax.lax.ragged_dot

The layer's T, d, n, E and K are options; with --recipe fp8, bits and captured are of an FP8 layer,
whose H --save-h fp8 saves in FP8. Writes {name: {quantity: value}}. The exit status is 1 if bits
differ, if a handler is not captured, if H is copied, or if JAX needs over 1.1 times PyTorch's memory.
"""

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

CAPTURED = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch allocates next to it
if "captured" in sys.argv:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CAPTURED}"
    # What XLA converts to command buffers and when it records them, on stderr.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    os.environ["TF_CPP_VMODULE"] = "command_buffer_conversion_pass=2,command_buffer_thunk=3"

import jax  # noqa: E402
import jax.ffi  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_handlers  # noqa: E402
import torch  # noqa: E402

CALLS = jax_handlers.Calls(jax.ffi) if "captured" in sys.argv else None

import tilemoe  # noqa: E402
import tilemoe.jax  # noqa: E402

NAMES = ("x", "logits", "W1", "W2")
MAX_MEMORY = 1.1  # of PyTorch's


class Layer:
    """A layer's inputs in both frameworks, in the same memory, and its steps."""

    def __init__(self, shape, seed=0, recipe="bf16", save_h=None):
        self.recipe, self.how = recipe, dict(K=shape[-1], recipe=recipe, save_h=save_h)
        self.T, self.d, self.n, self.E, self.K = shape
        self.device, self.dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else (
            "cpu", torch.float32
        )  # fmt: skip
        torch.manual_seed(seed)
        T, d, n, E = shape[:4]
        sizes = {"x": (T, d), "logits": (T, E), "W1": (E, 2 * n, d), "W2": (E, d, n)}
        scales = {"x": 0.2, "logits": 1.0, "W1": 0.02, "W2": 0.02}
        self.tensors = {name: self._random(sizes[name], scales[name]) for name in NAMES}
        self.dO = self._random((T, d), 0.2)
        if self.device == "cuda":
            torch.cuda.synchronize()  # JAX has other streams
        self.arrays = {name: from_torch(tensor) for name, tensor in self.tensors.items()}
        self.dO_array = from_torch(self.dO)

    def _random(self, size, scale):
        return (scale * torch.randn(size, device=self.device)).to(self.dtype)

    def in_torch(self):
        """O and the gradients of all inputs."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.tensors.items()}
        x, logits, *weights = leaves.values()
        if self.recipe != "bf16":
            weights = map(tilemoe.fp8_weight, weights)
        O = tilemoe.moe(x, logits, *weights, **self.how)
        return O.detach(), torch.autograd.grad(O, list(leaves.values()), self.dO)

    def function(self, x, logits, W1, W2):
        return tilemoe.jax.moe(x, logits, W1, W2, **self.how)

    def step(self, function):
        """The same in JAX, as a function of the inputs and of dO."""

        def run(arrays, dO):
            O, pull = jax.vjp(function, *(arrays[name] for name in NAMES))
            return O, pull(dO)

        return run

    def compiled(self, **options):
        step = jax.jit(self.step(self.function))
        return step.lower(self.arrays, self.dO_array).compile(compiler_options=options)


def from_torch(tensor):
    return jax.dlpack.from_dlpack(tensor.detach())


def to_torch(array):
    return torch.from_dlpack(jax.block_until_ready(array))


def same_bits(array, tensor):
    width = torch.int16 if tensor.dtype.itemsize == 2 else torch.int32
    return bool(torch.equal(to_torch(array).view(width), tensor.contiguous().view(width)))


def bits(shape, steps, how, compiled=None):
    """Steps with new inputs, so at new addresses: {name: {quantity: value}}, and what is wrong."""
    found, wrong = {}, []
    for seed in range(steps):
        layer = Layer(shape, seed, *how)
        O, gradients = layer.in_torch()
        compiled = compiled or layer.compiled()
        for _ in range(3):  # XLA captures a command buffer at the first step, and updates it at the next ones
            O_, gradients_ = compiled(layer.arrays, layer.dO_array)
            pairs = zip(("O", *NAMES), (O_, *gradients_), (O, *gradients))
            differ = [name for name, array, tensor in pairs if not same_bits(array, tensor)]
            wrong += [f"seed {seed}: {name} has other bits" for name in differ]
        found[f"jax/bits/{seed}"] = {"differ": ", ".join(differ), "O": float(O.float().abs().mean())}
    return found, wrong


def captured(shape, steps, how, more=6):
    """Bits in command buffers. XLA makes them from thunks, so a program's text has none: what proves
    them is that each handler ran in a capture, and that none of the last steps ran it outside."""
    layer = Layer(shape, steps, *how)
    compiled = layer.compiled()
    # XLA runs a program's first step outside of command buffers, to warm up.
    jax.block_until_ready(compiled(layer.arrays, layer.dO_array))
    found, wrong = bits(shape, steps, how, compiled)
    before, outside = CALLS.all.total(), CALLS.all.total() - CALLS.captured.total()
    for _ in range(more):  # each frees its results, so the next has the same addresses
        jax.block_until_ready(compiled(layer.arrays, layer.dO_array))
    values = {"steps": 1 + 3 * steps + more, f"calls in the last {more}": CALLS.all.total() - before}
    values["of these outside"] = CALLS.all.total() - CALLS.captured.total() - outside
    for name, count in sorted(CALLS.all.items()):
        values |= {f"{name} calls": count, f"{name} captured": CALLS.captured[name]}
        if not CALLS.captured[name]:
            wrong.append(f"{name} was called {count} times, never in a command buffer")
    if values["of these outside"] or not CALLS.all:
        wrong.append(f"the last {more} steps ran handlers outside of command buffers")
    return {"jax/captured": values, **found}, wrong


def copies_of_H(text, layer):
    """Copies in a program of arrays of H's size."""
    elements = layer.T * layer.K * 2 * layer.n
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    return sum(eval(size.replace(",", "*")) == elements for size in sizes)


def memory(shape):
    """MiB above the inputs: of gradients alone, and with Adam in the same program."""
    layer = Layer(shape)
    compiled = layer.compiled()
    used = compiled.memory_analysis()
    of_jax = used.temp_size_in_bytes + used.output_size_in_bytes
    copies = copies_of_H(compiled.as_text(), layer)

    def train(weights, moments, x, logits, dO):
        _, pull = jax.vjp(lambda W1, W2: layer.function(x, logits, W1, W2), *weights)
        gradients = [g.astype(jnp.float32) for g in pull(dO)]
        moments = [
            (0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g) for (m, v), g in zip(moments, gradients)
        ]
        update = lambda W, m, v: W - (1e-3 * m / (jnp.sqrt(v) + 1e-8)).astype(W.dtype)  # noqa: E731
        return [update(W, *m) for W, m in zip(weights, moments)], moments

    weights = [layer.arrays[name] for name in ("W1", "W2")]
    wide = [jax.ShapeDtypeStruct(W.shape, jnp.float32) for W in weights]
    lowered = jax.jit(train, donate_argnums=(0, 1)).lower(
        weights, [(w, w) for w in wide], layer.arrays["x"], layer.arrays["logits"], layer.dO_array
    )
    trained = lowered.compile()
    copies += copies_of_H(trained.as_text(), layer)
    values = {
        "jax MiB": of_jax / 2**20, "copies of H": copies,
        "with Adam, temporaries MiB": trained.memory_analysis().temp_size_in_bytes / 2**20,
    }  # fmt: skip
    if layer.device == "cuda":
        layer.in_torch()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = layer.in_torch()
        torch.cuda.synchronize()
        values["torch MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        values["ratio"] = values["jax MiB"] / values["torch MiB"]
        del kept
    wrong = [f"H is copied {copies} times"] if copies else []
    if values.get("ratio", 0) > MAX_MEMORY:
        wrong.append(f"memory is {values['ratio']:.3f} times PyTorch's, expected at most {MAX_MEMORY}")
    return {"jax/memory": values}, wrong


# ---------------------------------------------------------------- times


def ragged_dot_layer(layer):
    """A layer of jax.lax.ragged_dot, as a user of plain JAX writes it: sort, gather, two grouped GEMMs,
    and the sum over a token's experts. Its weights are transposed beforehand."""

    def function(x, logits, W1, W2):
        T, K, n = x.shape[0], layer.K, W2.shape[1]
        top, ids = jax.lax.top_k(logits, K)
        scores = jax.nn.softmax(top.astype(jnp.float32), -1)
        order = jnp.argsort(ids.ravel(), stable=True)
        counts = jnp.bincount(ids.ravel(), length=W1.shape[0]).astype(jnp.int32)
        dot = lambda a, W: jax.lax.ragged_dot(a, W, counts, preferred_element_type=x.dtype)  # noqa: E731
        h = dot(x[order // K], W1)
        y = dot((jax.nn.silu(h[:, :n].astype(jnp.float32)) * h[:, n:]).astype(x.dtype), W2)
        rows = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(T, K, -1)
        return jnp.einsum("tk,tkd->td", scores, rows.astype(jnp.float32)).astype(x.dtype)

    return function


def timed(call, wait, reps):
    wait(call())
    begin = time.perf_counter()
    last = None
    for _ in range(reps):
        last = call()
    wait(last)
    return (time.perf_counter() - begin) / reps * 1e3


def medians(calls, rounds, reps):
    """ms of each of {name: (call, wait)}, interleaved."""
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, wait) in calls.items():
            found[name].append(timed(call, wait, reps))
    return {name: statistics.median(of) for name, of in found.items()}


def peer_ms(shape, rounds, reps):
    """ms of ragged_dot."""
    layer = Layer(shape)
    arrays, dO = layer.arrays, layer.dO_array
    for name in ("W1", "W2"):
        arrays[name] = jax.block_until_ready(arrays[name].mT.copy())
        del layer.tensors[name]
    torch.cuda.empty_cache()
    peer = jax.jit(layer.step(ragged_dot_layer(layer))).lower(arrays, dO).compile()
    return medians({"ragged_dot": (lambda: peer(arrays, dO), jax.block_until_ready)}, rounds, reps)


def times(shape, rounds, reps, peer_tokens):
    """ms of forward + backward: tilemoe.jax and PyTorch interleaved, then ragged_dot, whose temporaries
    leave no room for them."""
    layer = Layer(shape)
    # By default XLA captures five calls in a row, which is as many as this program has.
    ours, uncaptured = layer.compiled(), layer.compiled(xla_gpu_graph_min_graph_size=1000)
    synchronize = lambda _: torch.cuda.synchronize() if layer.device == "cuda" else None  # noqa: E731
    ms = medians({
        "tilemoe.jax": (lambda: ours(layer.arrays, layer.dO_array), jax.block_until_ready),
        "tilemoe (torch)": (layer.in_torch, synchronize),
        "tilemoe.jax without command buffers": (
            lambda: uncaptured(layer.arrays, layer.dO_array), jax.block_until_ready
        ),
    }, rounds, reps)  # fmt: skip
    ratio = ms["tilemoe.jax"] / ms["tilemoe (torch)"]
    values, wrong = {f"{name} ms": of for name, of in ms.items()} | {"ratio to torch": ratio}, []
    del layer, ours, uncaptured
    gc.collect()
    torch.cuda.empty_cache()
    if peer_tokens:
        try:
            ms |= peer_ms((peer_tokens, *shape[1:]), rounds, reps)
            per_token = ms["ragged_dot"] / peer_tokens / (ms["tilemoe.jax"] / shape[0])
            values |= {f"{name} ms": of for name, of in ms.items()}
            values |= {"ragged_dot's tokens": peer_tokens, "ragged_dot per token": per_token}
        except jax.errors.JaxRuntimeError as error:
            wrong.append(f"ragged_dot at {peer_tokens} tokens: {str(error).splitlines()[0]}")
    return {"jax/time": values}, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bits", "captured", "memory", "time"))
    parser.add_argument("--shape", type=int, nargs=5, metavar=("T", "d", "n", "E", "K"),
                        default=[8192, 2048, 3072, 8, 2])  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="of bits")
    parser.add_argument("--recipe", choices=("bf16", "fp8", "fp8_forward"), default="bf16", help="of bits")
    parser.add_argument("--save-h", choices=("fp8",), help="of bits, with --recipe fp8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--peer-tokens", type=int, default=0, help="T of ragged_dot; 0: without it")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    shape, how = tuple(args.shape), (args.recipe, args.save_h)
    if args.what == "bits":
        found, wrong = bits(shape, args.steps, how)
    elif args.what == "captured":
        found, wrong = captured(shape, args.steps, how)
    elif args.what == "memory":
        found, wrong = memory(shape)
    else:
        found, wrong = times(shape, args.rounds, args.reps, args.peer_tokens)
    size = dict(zip("TdnEK", shape))
    found = {name: {**size, **values} for name, values in found.items()}
    args.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
