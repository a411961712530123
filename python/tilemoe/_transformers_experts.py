"""Computes transformers' experts modules with their own weights (see transformers.py)."""

from collections.abc import Callable

import torch

from . import functional
from ._transformers_forms import form_of, refuse_quantized
from .routing import narrowed_to_experts


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """hidden_states (T, d), top_k_index (T, K), top_k_weights (T, K) -> (T, d).

    An id outside [0, E), which expert parallelism passes for experts of other ranks, adds nothing
    to the output and gets no gradient.
    """
    here = narrowed_to_experts(top_k_index, top_k_weights, self.down_proj.shape[0])
    return computed(functional.moe, self, hidden_states, *here)


def computed(
    moe: Callable,
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    **options,
) -> torch.Tensor:
    """Calls `moe` (tilemoe.moe or tilemoe.expert_parallel.moe) with the tokens, the module's
    weights and the options."""
    refuse_quantized(experts)
    form = form_of(experts)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    W1, W2 = getattr(experts, first), experts.down_proj
    b1, b2 = None, None
    if experts.has_bias:
        b1, b2 = getattr(experts, first + "_bias"), experts.down_proj_bias
    if experts.is_transposed:
        W1, W2 = W1.mT, W2.mT  # (E, d, 2n) -> (E, 2n, d), (E, n, d) -> (E, d, n): views
    if b1 is not None:  # float32 next to weights in 16 bits, as PEFT prepares a quantized model
        b1, b2 = b1.to(W1.dtype), b2.to(W1.dtype)
    # A norm in float32 may precede experts in 16 bits; the weights' type decides, and the result
    # has the caller's type.
    out = moe(
        hidden_states.to(W1.dtype),
        top_k_weights.float(),
        W1,
        W2,
        ids=top_k_index,
        b1=b1,
        b2=b2,
        **form._asdict(),
        **options,
    )
    return out.to(hidden_states.dtype)
