"""Compute adapters of experts that are sharded over ranks.

Each rank has the whole parameters of PEFT, reads those of its own experts, and gets their
gradients. Ranks with the same batch get the sum of their gradients here, because no data
parallelism covers them. Ranks with different batches leave theirs to data parallelism: the mean
over ranks is the gradient of the mean loss, since the rank of an expert computes the tokens of all
ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from .expert_adapters import Adapter


def of_this_rank(adapter: Adapter, name: str, W: Tensor, same_batch: Any) -> Adapter:
    """Return the part of an adapter for W's experts.

    Args:
        adapter: Adapter of all experts; `sharded` is the DTensor whose local part is W.
        name: Name of W.
        W: (E / ranks, out, in) of this rank, or (E, out, in) if FSDP has gathered it.
        same_batch: Group of the ranks that have this rank's tokens; None: unknown.
    """
    A, B, weight = adapter.A, adapter.B, adapter.sharded
    if (A.shape[2], B.shape[1]) != (W.shape[2], W.shape[1]):
        raise NotImplementedError(
            f"ranks have parts of each expert's {name} ({_placed(weight)}), expected whole "
            "experts; use expert parallelism, not tensor parallelism"
        )
    mine = W.shape[0]
    if mine == A.shape[0]:
        return adapter
    mesh, dims = weight.device_mesh, [d for d, p in enumerate(weight.placements) if p == Shard(0)]
    if len(dims) != 1 or mine * mesh.size(dims[0]) != A.shape[0]:
        raise NotImplementedError(
            f"this rank has {mine} of {A.shape[0]} experts of {name} ({_placed(weight)}), "
            "expected one dimension of ranks with the same number of experts"
        )
    if same_batch is None:
        if _has_implementations():
            raise NotImplementedError(
                "adapters of experts that are sharded over ranks require "
                "ep_implementation='tilemoe' in DistributedConfig"
            )
        same_batch = mesh.get_group(dims[0])  # before 5.23 these ranks always have one batch
    first = mesh.get_local_rank(dims[0]) * mine
    return adapter._replace(
        A=_OfExperts.apply(A, first, mine, same_batch),
        B=_OfExperts.apply(B, first, mine, same_batch),
        sharded=None,
    )


def _placed(weight: Any) -> str:
    return f"its placements are {', '.join(map(str, weight.placements))}"


def _has_implementations() -> bool:
    """Return whether transformers has selectable implementations of expert parallelism."""
    try:
        import transformers.distributed.expert_parallel  # noqa: F401
    except ImportError:
        return False
    return True


class _OfExperts(torch.autograd.Function):
    """Function factor[first : first + count] whose gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, first: int, count: int, group: Any) -> Tensor:
        ctx.shape, ctx.first, ctx.group = factor.shape, first, group
        return factor[first : first + count]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.first : ctx.first + gradient.shape[0]] = gradient
        if dist.get_world_size(ctx.group) > 1:
            dist.all_reduce(whole, group=ctx.group)
        return whole, None, None, None
