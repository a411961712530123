"""Compute TileMoE's experts within torchtitan's DeepEP and HybridEP dispatchers.

These dispatchers move tokens with a library (see torchtitan.py). Both send a token's row once to a
rank, whatever the number of its experts there, and add the results. If they return the received
rows without copies per expert, in the *compact form*, nothing is copied or sorted by expert:
`tilemoe.moe` reads the rows with the ids of this rank's experts, and -1 for the token's other
experts. One row per token is returned.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _private, functional
from ..routing import narrowed_to_experts

Experts = Callable[..., Tensor]  # torchtitan.Computed, called with `routed`


def of_deepep(dispatcher: Any, x: Tensor, scores: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Compute x (T, D), scores and ids (T, K) -> (T, D), with DeepEP's compact form.

    The host waits for the number of rows, so the capacity is the exact number of pairs of this
    rank's experts.
    """
    _private.require("TileMoE with torchtitan's DeepEP dispatcher")
    from torchtitan.distributed.deepep import deepep

    buffer, T = deepep._buffer, x.shape[0]
    if T > buffer.num_max_tokens_per_rank:
        raise ValueError(
            f"DeepEP's buffer was allocated for {buffer.num_max_tokens_per_rank} tokens, "
            f"but the call has {T}"
        )
    will_backward = torch.is_grad_enabled()
    received, here, received_scores, counts, handle = torch.ops.deepep.dispatch(
        x,
        ids.masked_fill(scores == 0, -1).contiguous(),  # these are not sent, as in torchtitan
        scores.float().contiguous(),
        num_experts=dispatcher.num_experts,
        num_tokens_per_rank=T,
        cudagraphable=False,
    )
    here, received_scores = narrowed_to_experts(here, received_scores, counts.shape[0])
    out = experts(received, routed=_chosen(here, received_scores, int(counts.sum())))
    combined = torch.ops.deepep.combine(out, handle, will_backward)
    deepep.sync_combine()
    return combined


def of_hybridep(
    dispatcher: Any, x: Tensor, scores: Tensor, ids: Tensor, experts: Experts
) -> Tensor:
    """Compute the same with HybridEP.

    If HybridEP waits for the number of rows, the compact form is used, else its rows of pairs,
    whose number the dispatcher's non_blocking_capacity_factor sets.
    """
    _private.require("TileMoE with torchtitan's HybridEP dispatcher")
    from torchtitan.distributed.deepep import hybridep

    E, group = dispatcher.num_experts, dispatcher.ep_mesh.get_group()
    if dispatcher.non_blocking_capacity_factor is not None:
        rows, row_scores, counts, handle = torch.ops.hybridep.dispatch(
            x,
            ids.contiguous(),
            scores.contiguous(),
            E,
            group.size(),
            group.group_name,
            True,
            dispatcher.non_blocking_capacity_factor,
            dispatcher.pad_multiple,
        )
        # The down-projection applies the scores, so no unscaled result is saved for their gradient.
        routed = partial(functional.grouped_experts, counts=counts, row_scores=row_scores)
        out = experts(rows, routed=routed)
        return torch.ops.hybridep.combine(out, handle, x.shape[0], dispatcher.pad_multiple)

    buffer, E_local = hybridep._buffer, E // group.size()
    shape = x.shape[0], E
    is_chosen = torch.zeros(shape, dtype=torch.bool, device=x.device).scatter(1, ids, True)
    dense = scores.new_zeros(shape, dtype=torch.float32).scatter(1, ids, scores.float())
    received, dense, handle = _Dispatched.apply(x, dense, is_chosen, buffer)
    first = buffer.local_rank * E_local  # the columns are those of a node's experts
    received_scores = dense[:, first : first + E_local]
    is_here = handle[_IS_HERE][: received.shape[0]]  # (received, E_local)
    chosen, at = is_here.to(torch.int8).topk(min(ids.shape[1], E_local), dim=1)
    here = torch.where(chosen > 0, at, -1)
    routed = _chosen(here, received_scores.gather(1, at), int(is_here.sum()))
    return _Combined.apply(experts(received, routed=routed), buffer, handle, E)


def _chosen(ids: Tensor, scores: Tensor, pairs: int) -> Callable[..., Tensor]:
    """Return a tilemoe.moe of received tokens, ids and scores (received, K)."""
    return partial(functional.moe, logits_or_scores=scores, ids=ids, capacity=max(pairs, 1))


_IS_HERE = 4  # field in the handle of HybridEPBuffer.dispatch


class _Dispatched(torch.autograd.Function):
    """HybridEPBuffer.dispatch: x (T, D), dense scores (T, E) and is_chosen (T, E) -> received rows.

    It returns the rows of the received tokens, their scores (received, experts of the node), and
    the handle.
    """

    @staticmethod
    def forward(ctx, x, dense, is_chosen, buffer):
        rows, received, _, handle = buffer.dispatch(hidden=x, probs=dense, routing_map=is_chosen)
        ctx.buffer, ctx.handle = buffer, handle
        return rows, received, handle

    @staticmethod
    def backward(ctx, grad_rows, grad_received, _):
        dX, d_dense = ctx.buffer.combine(
            hidden=grad_rows.contiguous(), probs=grad_received.contiguous(), handle=ctx.handle
        )
        return dX, d_dense, None, None


class _Combined(torch.autograd.Function):
    """HybridEPBuffer.combine: rows of the received tokens -> (T, D), their sums."""

    @staticmethod
    def forward(ctx, rows, buffer, handle, E):
        ctx.buffer, ctx.handle, ctx.E = buffer, handle, E
        return buffer.combine(hidden=rows, handle=handle)[0]

    @staticmethod
    def backward(ctx, dO):
        rows = ctx.buffer.dispatch(hidden=dO.contiguous(), num_of_experts=ctx.E, handle=ctx.handle)[
            0
        ]
        return rows, None, None, None
