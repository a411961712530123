"""`tilemoe.jax` and the PyTorch package in one process: the same bits of outputs and gradients."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="this environment has JAX alone")

import tilemoe
import tilemoe.jax
from jax_values import D, E, K, N, T, lora, values, weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_torch(array, dtype):
    """float64 -> a tensor that requires a gradient, rounded to float32 first, as below."""
    return torch.tensor(array).float().to(DTYPES[dtype]).requires_grad_()


def bits(array):
    """The bits of an array of JAX, or of a tensor, as integers."""
    width = array.dtype.itemsize
    if isinstance(array, torch.Tensor):
        return array.detach().contiguous().view(torch.int32 if width == 4 else torch.int16).numpy()
    return np.asarray(array).view(np.int32 if width == 4 else np.int16)


def equal(found, expected, name):
    assert found.dtype.name == str(expected.dtype).removeprefix("torch."), name
    np.testing.assert_array_equal(bits(found), bits(expected), err_msg=name)
    assert bits(found).any(), f"{name} is zero"


def compare(inputs, dtype, of_jax, of_torch, dO_shape=(T, D)):
    """inputs: {name: float64 array}; of_jax, of_torch: functions of the casted ones."""
    dO = values(9, *dO_shape)
    ours = {name: jnp.asarray(a.astype(np.float32), dtype) for name, a in inputs.items()}
    theirs = {name: to_torch(a, dtype) for name, a in inputs.items()}

    @jax.jit
    def run(arguments, dO):
        O, vjp = jax.vjp(of_jax, arguments)
        return O, vjp(dO)[0]

    O, gradients = run(ours, jnp.asarray(dO.astype(np.float32), dtype))
    expected = of_torch(theirs)
    expected.backward(torch.tensor(dO).float().to(expected.dtype))
    equal(O, expected, "O")
    for name, tensor in theirs.items():
        equal(gradients[name], tensor.grad, f"the gradient of {name}")


def routed(dtype="float32", transposed=False, choice=None, adapters=False, **options):
    biases = options.pop("biases", True)
    layer = {key: options[key] for key in ("activation", "gate_layout") if key in options}
    made = weights(biases=biases, transposed=transposed, **layer)
    inputs = {"x": values(0, T, D), "logits": values(7, T, E), "addend": values(8, T, D), **made}
    names = {}
    if adapters:
        factors = lora()
        names = {f"lora.{name}": getattr(factors, name) for name in ("A1", "B1", "A2", "B2")}
        inputs |= names
    how = dict(K=K, **options, **(choice or {}))
    bias = values(11, E).astype(np.float32) if how.get("scoring", "").startswith("sig") else None

    def split(arguments, make):
        arguments = dict(arguments)
        x, logits = arguments.pop("x"), arguments.pop("logits")
        factors = {name.removeprefix("lora."): arguments.pop(name) for name in names}
        if factors:
            arguments["lora"] = make(**factors, scale=(0.5, 2.0))
        return x, logits, arguments

    def of_jax(arguments):
        x, logits, rest = split(arguments, tilemoe.jax.LoRA)
        if bias is not None:
            rest["selection_bias"] = jnp.asarray(bias)
        return tilemoe.jax.moe(x, logits, **rest, transposed=transposed, **how)

    def of_torch(arguments):
        x, logits, rest = split(arguments, tilemoe.LoRA)
        if transposed:
            rest |= {name: rest[name].mT for name in ("W1", "W1_up", "W2") if name in rest}
        if bias is not None:
            rest["selection_bias"] = torch.tensor(bias)
        return tilemoe.moe(x, logits, **rest, **how)

    compare(inputs, dtype, of_jax, of_torch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(gate_layout="interleaved", transposed=True, clamp=0.5, alpha=1.7, up_shift=1.0),
        dict(gate_layout="split", choice=dict(scoring="sigmoid_renormalized", routed_scaling_factor=2.5)),
        dict(activation="relu_squared", choice=dict(scoring="softmax_over_all")),
        dict(adapters=True, biases=False),
    ],
    ids=["plain", "gpt-oss", "deepseek", "squared", "adapters"],
)
def test_routed(how, dtype):
    routed(dtype, **how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped(dtype):
    inputs = {"rows": values(0, T, D), "row_scores": values(7, T), **weights()}
    counts = np.array([4, 0, 5, 1, 0], np.int32)

    def call(function, make):
        return lambda a: function(a["rows"], make(counts), a["W1"], a["W2"], row_scores=a["row_scores"])

    of_jax, of_torch = (
        call(tilemoe.jax.grouped_experts, jnp.asarray), call(tilemoe.grouped_experts, torch.tensor)
    )  # fmt: skip
    compare(inputs, dtype, of_jax, of_torch)


@pytest.mark.parametrize("scoring", ["softmax_over_chosen", "sigmoid"])
def test_router(scoring):
    logits = values(3, 40, 8).astype(np.float32)
    how = dict(scoring=scoring, n_group=4, topk_group=2)
    scores, ids, counts = tilemoe.jax.top_k(jnp.asarray(logits), 3, **how)
    of_torch, ids_of_torch = tilemoe.top_k(torch.tensor(logits), 3, **how)
    equal(scores, of_torch, "scores")
    np.testing.assert_array_equal(ids, ids_of_torch)
    again = tilemoe.jax.top_k_scores(jnp.asarray(logits), ids, scoring=scoring)
    equal(again, of_torch, "scores of given ids")
    losses = tilemoe.jax.router_losses(jnp.asarray(logits), counts)
    for loss, expected in zip(losses, tilemoe.router_losses(torch.tensor(logits), torch.tensor(np.asarray(counts)))):
        equal(loss[None], expected[None], "a loss")


def test_aux():
    ids = np.random.default_rng(2).integers(-1, E, (T, 2))
    made, x = weights(), values(0, T, D)
    ours = {name: jnp.asarray(a, jnp.float32) for name, a in made.items()}
    theirs = {name: torch.tensor(a).float() for name, a in made.items()}
    for capacity in (None, 9):
        how = dict(return_aux=True, capacity=capacity, on_overflow="drop")
        scores = np.ones((T, 2), np.float32)
        _, aux = tilemoe.jax.moe(
            jnp.asarray(x, jnp.float32), jnp.asarray(scores), ids=jnp.asarray(ids), **ours, **how
        )
        _, expected = tilemoe.moe(
            torch.tensor(x).float(), torch.tensor(scores), ids=torch.tensor(ids), **theirs, **how
        )
        for name in aux._fields:
            np.testing.assert_array_equal(getattr(aux, name), getattr(expected, name), err_msg=name)


def test_torch_imported_first():
    """This process has imported JAX first."""
    test = f"{Path(__file__)}::test_routed[plain-bfloat16]"
    program = f"import sys, torch, tilemoe, pytest; sys.path[:0] = {sys.path!r}; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    ["bits", "bits --recipe fp8 --steps 1", "bits --recipe fp8 --save-h fp8 --steps 1", "memory",
     "time --rounds 1 --reps 1 --peer-tokens 16"],
)
def test_the_program_for_gpus(words, tmp_path):
    """The stage of scripts/gpu/run.py, with a small layer on the CPU."""
    file, program = tmp_path / "found.json", Path(__file__).with_name("jax_on_gpu.py")
    n = "128" if "fp8" in words else "16"
    command = [sys.executable, program, *words.split(), "--shape", "32", "32", n, "8", "2", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert all(name.startswith("jax/") and values["T"] == 32 for name, values in found.items())
    if words == "memory":
        assert found["jax/memory"]["copies of H"] == 0 < found["jax/memory"]["jax MiB"]
