"""Compute experts of transformers with a norm of each expert's output, before the score.

See use_experts_implementation(has_post_expert_norm=True) and transformers.py.
"""

import copy

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import gemms
from ..quantization import QuantizedExperts

NORM = "post_expert_norm"


def norm_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the norm of a module's experts, or None."""
    return getattr(module, NORM, None) if getattr(module, "has_post_expert_norm", False) else None


def computed(
    experts: torch.nn.Module,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    weights: list[Tensor | QuantizedExperts | None],
) -> Tensor:
    """Compute x (T, d), ids and scores (T, K) -> (T, d) with the module's own gate and norm.

    weights: W1, W2, b1, b2. In training x, H, A and the rows of the second GEMM are saved; the gate
    and the norm are computed again in backward.
    """
    W1, W2, b1, b2 = weights
    routing = gemms.route_ids(ids, scores, W2.shape[0])
    norm = norm_of(experts)
    gate = experts._apply_gate if experts.has_gate else experts.act_fn

    def summed(rows: Tensor, scores: Tensor) -> Tensor:
        return gemms.weighted_sum(norm(rows), routing._replace(scores=scores))

    H = gemms.gathered_mm(x, W1, routing, bias=b1)
    A = _recomputed(gate, H)
    Y = gemms.gathered_mm(A, W2, routing.of_rows(), bias=b2)
    return _recomputed(summed, Y, scores)


def _recomputed(function, *tensors: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def small(
    norm: torch.nn.Module | None, sizes: dict[int, int], dtype: torch.dtype
) -> torch.nn.Module | None:
    """Return the same norm with a smaller width and random weights.

    sizes: {size of the module: size in its place}.
    """
    if norm is None:
        return None
    made = copy.copy(norm)
    generator = torch.Generator().manual_seed(2)

    def drawn(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        shape = [sizes.get(size, size) for size in tensor.shape]
        return 1 + torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    state = {name: _resized(value, sizes) for name, value in vars(norm).items()}
    state["_parameters"] = {
        name: None if p is None else torch.nn.Parameter(drawn(p))
        for name, p in norm._parameters.items()
    }
    state["_buffers"] = {name: drawn(buffer) for name, buffer in norm._buffers.items()}
    made.__dict__ = state
    return made


def _resized(value, sizes):
    if type(value) is int:
        return sizes.get(value, value)
    if type(value) is tuple and all(type(size) is int for size in value):
        return tuple(sizes.get(size, size) for size in value)
    return value
