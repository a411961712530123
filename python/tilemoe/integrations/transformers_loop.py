"""Run the forward of an experts class on random tokens and compare it with TileMoE's result.

See transformers.py.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import transformers_norm

# Attributes of an experts module that follow from its weights' shapes and the interface's flags.
KNOWN = {
    "config", "training", "act_fn", "num_experts", "hidden_dim", "hidden_size", "intermediate_dim",
    "intermediate_size", "has_gate", "has_bias", "is_transposed", "is_concatenated",
}  # fmt: skip
TOLERANCE = 1e-4  # relative to a row's norm: a forward may compute in float32


def dispatching_forward(cls: type) -> Callable | None:
    """Return the forward of `cls` that use_experts_implementation made; None if it has none.

    This forward calls the implementation that the configuration names.
    """
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe":
            return forward
    return None


def difference(module: torch.nn.Module, *between: Callable[[Tensor], Tensor]) -> float | None:
    """Compare the module's own forward with experts that compute `between` between their GEMMs.

    Both compute 8 tokens, of magnitudes from 2^-8 to 2^14, on the CPU, with random weights of a few
    experts and columns: the module's own tensors are not read, so that they may be on any device,
    sharded or quantized.

    Args:
        module: Experts module.
        *between: Functions (..., 2n) -> (..., n), or (..., n) -> (..., n) if the module has no
            gate; with several, the one that differs least counts.

    Returns:
        The largest relative difference of output and gradients, infinite if it is NaN; None if the
        module has no own forward, or if it cannot be run.
    """
    forward = dispatching_forward(type(module))
    if forward is None:
        return None
    for dtype in (torch.float64, torch.float32):
        weights, sizes = _weights(module, dtype)
        x, ids, scores, dO = _tokens(weights["down_proj"], module.is_transposed, dtype)
        given = [x, scores, *weights.values()]
        norm = transformers_norm.small(transformers_norm.norm_of(module), sizes, dtype)
        try:
            out = forward(_miniature(module, weights, norm, sizes), x, ids, scores)
            own = [out, *torch.autograd.grad(out, given, dO.to(out.dtype), allow_unused=True)]
        except Exception:  # for anything that a class requires and the miniature lacks
            continue
        ours = (_experts(module, weights, f, norm, x, ids, scores) for f in between)
        return min(_error(own, [out, *torch.autograd.grad(out, given, dO)]) for out in ours)
    return None


def unknown_attributes(module: torch.nn.Module) -> list[str]:
    """Return the numbers, flags, names and tensors that a forward of the module's own may read."""
    kinds = bool, int, float, str, Tensor
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, kinds) and name not in KNOWN and not name.startswith(("_", "has_"))
    )


def _weights(module: torch.nn.Module, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict]:
    """Return weights and biases of few experts and columns, and the map of sizes.

    The map is {size of the module's own weights: size in these}. Equal sizes stay equal.
    """
    real = module.down_proj.shape
    E, d, n, sizes = 3, 24, 8, {}
    if len(real) == 3:  # a tool may have flattened the weight
        of_experts, of_d, of_n = (real[0], *(real[:0:-1] if module.is_transposed else real[1:]))
        d = {of_n: n, 2 * of_n: 2 * n}.get(of_d, d)
        E = {of_n: n, 2 * of_n: 2 * n, of_d: d}.get(of_experts, E)
        sizes = {of_experts: E, 2 * of_n: 2 * n, of_n: n, of_d: d}
    first, rows = ("gate_up_proj", 2 * n) if module.has_gate else ("up_proj", n)
    shapes = {first: (E, rows, d), "down_proj": (E, d, n)}
    if module.is_transposed:
        shapes = {name: (E, columns, rows) for name, (E, rows, columns) in shapes.items()}
    if module.has_bias:
        shapes |= {first + "_bias": (E, rows), "down_proj_bias": (E, d)}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / 4
        for name, shape in shapes.items()
    }
    return {name: w.to(dtype).requires_grad_() for name, w in weights.items()}, sizes


def _tokens(down_proj: Tensor, is_transposed: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x (8, d), ids (8, 2), scores (8, 2), dO (8, d)."""
    E, d = down_proj.shape[0], down_proj.shape[2 if is_transposed else 1]
    generator = torch.Generator().manual_seed(1)
    magnitudes = 2.0 ** torch.tensor([[-8], [-3], [0], [0], [1], [3], [8], [14]])
    x, dO = torch.randn(2, 8, d, generator=generator, dtype=torch.float64)
    scores = torch.rand(8, 2, generator=generator, dtype=torch.float64) + 0.1
    ids = torch.rand(8, E, generator=generator).argsort(-1)[:, :2]
    x = (x * magnitudes).to(dtype).requires_grad_()
    return x, ids, scores.to(dtype).requires_grad_(), dO.to(dtype)


class _EagerConfig:
    """Configuration of the module that names the class's own forward.

    transformers' own property would set the name in nested configurations, too.
    """

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _miniature(
    module: torch.nn.Module,
    weights: dict[str, Tensor],
    norm: torch.nn.Module | None,
    sizes: dict[int, int],
) -> Any:
    """Return the module with other weights and the sizes that follow from them.

    The weights are attributes of a separate class: they hide the module's parametrizations and
    shards.
    """
    cls = type(module)
    mini = object.__new__(type(cls.__name__, (cls,), dict(weights)))
    state = dict(vars(module))
    for name, value in state.items():
        if type(value) is int:
            state[name] = sizes.get(value, value)
        elif inspect.ismethod(value) and value.__self__ is module:
            state[name] = types.MethodType(value.__func__, mini)
    children = {name: m for name, m in module._modules.items() if name != "parametrizations"}
    if norm is not None:
        children[transformers_norm.NORM] = norm
    state |= {"_parameters": {}, "_buffers": {}, "_modules": children}
    mini.__dict__.update(state, training=True, config=_EagerConfig(module.config))
    return mini


def _experts(
    module: torch.nn.Module,
    weights: dict[str, Tensor],
    between: Callable[[Tensor], Tensor],
    norm: torch.nn.Module | None,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
) -> Tensor:
    """Compute the reference in PyTorch: every expert of every token, (T, d) -> (T, d)."""
    W1, W2, *biases = weights.values()
    if module.is_transposed:
        W1, W2 = W1.mT, W2.mT
    b1, b2 = biases or (0, 0)
    A = between(torch.einsum("td,eid->tei", x, W1) + b1)
    Y = torch.einsum("ten,edn->ted", A, W2) + b2
    Y = Y if norm is None else norm(Y)
    chosen = Y.gather(1, ids[..., None].expand(-1, -1, Y.shape[-1]))
    return (chosen * scores[..., None]).sum(1)


def _error(got: list[Tensor | None], want: list[Tensor]) -> float:
    """Return the largest relative error.

    The error is that of output, dx and dscores by token, and of each weight's gradient, relative to
    the norm.
    """
    errors = []
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        g = torch.zeros_like(w) if g is None else g
        if g.shape != w.shape:
            return torch.inf
        rows = (len(w), -1) if i < 3 else (1, -1)
        g, w = g.detach().double().reshape(rows), w.detach().double().reshape(rows)
        # The gradient of a saturated gate may be 1e-40, and 0 in float32. In a row of dx with a
        # norm near 1, 1 - tanh^2 of float32 then leaves an error of 3e-7.
        smallest = 2.0**-4 if i == 1 else 1e-6
        errors.append(((g - w).norm(dim=1) / (w.norm(dim=1) + smallest)).max())
    return torch.stack(errors).max().nan_to_num(torch.inf).item()
