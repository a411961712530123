"""Random layers, and their comparison with the reference: O and every gradient."""

import torch

import reference
import target
import tilemoe
from comparison import LIMITS, assert_close, doubled, limits_of_expected

T, d, n, E, K = 37, 40, 24, 7, 3  # different from each other, off every tile


def normal(*shape, seed, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale
    return values.to(target.DEVICE, dtype)


def is_gated(activation):
    return reference.ACTIVATIONS[activation][0]


def weights(dtype, activation="swiglu", gate_layout="concatenated", bias=False, transposed=False):
    """-> {W1, W2, ...}: unit-scale leaves of the given layout."""
    rows = 2 * n if is_gated(activation) and gate_layout != "split" else n
    shapes = {"W1": (E, rows, d, d**-0.5), "W2": (E, d, n, n**-0.5)}
    if gate_layout == "split":
        shapes["W1_up"] = (E, n, d, d**-0.5)
    made = {}
    for seed, (name, (*shape, scale)) in enumerate(shapes.items()):
        if transposed:
            shape = (shape[0], shape[2], shape[1])
        made[name] = normal(*shape, seed=seed, dtype=dtype, scale=scale)
        if transposed:
            made[name] = made[name].transpose(1, 2)
    if bias:
        made["b1"] = normal(E, rows, seed=10, dtype=dtype, scale=0.5)
        made["b2"] = normal(E, d, seed=11, dtype=dtype, scale=0.5)
        if gate_layout == "split":
            made["b1_up"] = normal(E, n, seed=12, dtype=dtype, scale=0.5)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def logits_layer(dtype, logits_dtype=torch.float32, **kinds):
    """Arguments of `moe` with logits."""
    return {
        "x": normal(T, d, seed=20, dtype=dtype).requires_grad_(),
        "logits_or_scores": normal(T, E, seed=21, dtype=logits_dtype).requires_grad_(),
        **weights(dtype, **kinds),
    }


def limits_of(name, tensor):
    """Those of a tensor's dtype, but for rows that are sums of few terms, or of unlike ones. A row
    of a weight's gradient sums one number of each of an expert's tokens, few here: one number that
    an activation's slope nearly cancelled is the row's error, and a lost row still errs by 1. A row
    of dlogits is of differences of a token's ds, which may nearly all cancel too."""
    limits = LIMITS[tensor.dtype]
    if name.startswith(("W", "b", "A", "B")):  # the latter two of adapters
        return limits._replace(row=0.25)
    if name not in ("logits", "logits_or_scores"):
        return limits
    return limits._replace(whole=4 * limits.whole, row=10 * limits.row, smallest=0.1)


def results(function, tensors, dO_dtype=None, **options):
    """-> {name: tensor}: O, and the gradient of every tensor that requires one. dO has values of
    `dO_dtype`, where that is not O's own: a yardstick differentiates by what the layer was given."""
    O = function(**tensors, **options)
    dO = normal(*O.shape, seed=30, dtype=dO_dtype or O.dtype).to(O.dtype)
    names = [k for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients = torch.autograd.grad(O, [tensors[name] for name in names], dO, allow_unused=True)
    return {"O": O, **{f"d{name}": g for name, g in zip(names, gradients)}}


def expected_errors(got, want, rounding):
    """{name: limits} by what float64 gives that rounds where the library stores."""
    return {
        name: limits_of_expected(got[name], want[name], tensor)
        for name, tensor in rounding.items()
        if tensor is not None and got[name] is not None
    }


def compare(got, want, tensors, limits_by_name=None):
    """limits_by_name: where a test has the layer's expected_errors; else those of the dtypes."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor is None:
            assert got[name] is None or not got[name].any(), f"{name} is not zero"
            continue
        if limits_by_name is not None:
            assert_close(got[name], tensor, name, limits_by_name.get(name))
            continue
        limits = None
        # 16-bit layers have float32 logits and scores: what they are compared by is x's.
        source = tensors[name[1:]] if name != "O" else tensors["x" if "x" in tensors else "rows"]
        rows = tensors["x" if "x" in tensors else "rows"]
        coarse = max((source, rows), key=lambda t: LIMITS[t.dtype].whole)
        limits = limits_of(name[1:], coarse)
        assert_close(got[name], tensor, name, limits)


def check(name, tensors, edit=None, **options):
    """Compares `tilemoe.<name>` with the reference. `edit` changes what tilemoe is given."""
    dtype = tensors["x" if "x" in tensors else "rows"].dtype
    yardstick = lambda **how: results(
        getattr(reference, name), doubled(tensors), dO_dtype=dtype, **how, **options
    )
    want = yardstick()
    function = getattr(tilemoe, name)
    if edit is not None:
        inner = function
        function = lambda **given: inner(**edit(given))  # noqa: E731
    got = results(function, tensors, **options)
    limits = None
    if dtype in (torch.bfloat16, torch.float16):
        limits = expected_errors(got, want, yardstick(stored=dtype))
    compare(got, want, tensors, limits)
