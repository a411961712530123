"""Compute the layer with its experts sharded over ranks.

Each rank has its own tokens and E / ranks experts. The row of a token is sent once to every rank,
whatever the number of its experts there ("all_gather"), or only to the ranks that have an expert of
the token ("pull"). The experts of a rank gather from these rows as from the rank's own rows,
combine adds the results of a token on this rank, and the sum is returned to the token's rank, which
adds the sums of the ranks in float32. No rank sorts or copies rows by expert, shapes do not depend
on the routing, and the host never waits.

`tilemoe.MoE(expert_mesh=)` is the module. Start the processes and create the process group of
torch.distributed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import MoE as _MoE  # noqa: F401  first: loads the package's modules in their order
from . import _calls, _library
from ._quantized import Weight
from ._signatures import Reader
from .distributed import layer as spread
from .distributed.cost import Memory, plan
from .distributed.team import RankTokens
from .lora import LoRA
from .options import OfRanks
from .routing import Counter, rows_of, shaped_like

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Memory", "clip_grad_norm_", "moe", "plan"]

_moe = Reader("moe", OfRanks)


@_moe.shows
def moe(
    x: Tensor,
    logits_or_scores: Tensor,
    W1: Weight,
    W2: Weight,
    *,
    group: dist.ProcessGroup,
    ids: Tensor | None = None,
    W1_up: Weight | None = None,
    b1: Tensor | None = None,
    b1_up: Tensor | None = None,
    b2: Tensor | None = None,
    selection_bias: Tensor | None = None,
    seed: Counter | None = None,
    offset: Counter | None = None,
    rank_tokens: RankTokens = None,
    addend: Tensor | None = None,
    lora: LoRA | None = None,
    return_aux: bool = False,
    **options: Unpack[OfRanks],
) -> Any:
    """Compute `tilemoe.moe` with experts that are sharded over the ranks of a group.

    Every rank of the group calls this function. The gradients of x, logits, scores and weights are
    those of the sum of the ranks' objectives: if the loss is averaged over the ranks, scale the
    weights' gradients by 1 / ranks.

    Args:
        x: This rank's tokens, shape (..., d).
        logits_or_scores: With `K` the logits of these tokens, shape (..., E); with `ids` the scores
            of the chosen experts, shape (..., K).
        W1: First weights of this rank's experts, as in `moe`. A rank has the E / ranks experts
            from rank * E / ranks on.
        W2: Second weights of this rank's experts.
        group: Process group of torch.distributed.
        ids: Experts of each token among all E experts, shape (..., K); a pair with an id outside
            [0, E) is skipped.
        W1_up: Up rows of this rank's experts.
        b1: Biases of this rank's experts.
        b1_up: Biases of the up rows of this rank's experts.
        b2: Biases of the second GEMM of this rank's experts.
        selection_bias: As in `moe`, shape (E).
        seed: As in `moe`, the same on every rank. Rounding is over the tokens of all ranks, in the
            order of the ranks.
        offset: As in `moe`, the same on every rank.
        rank_tokens: Tokens of each rank, or their maximum, which must be the same number on all
            ranks. None: every rank has the same number of tokens, which is not checked.
        addend: As in `moe`, for this rank's tokens, shape of x.
        lora: Adapters of this rank's experts, as in `moe`. Adapters and quantised weights require
            chunks=1.
        return_aux: Also return the counts of the routing.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        O, shape and dtype of x; with `return_aux` O and an `Aux` of this rank's tokens, except
        `overflow`, which counts the pairs of all ranks.

    Raises:
        ValueError: An argument is wrong. The other ranks then wait for this one.
    """
    chosen = _moe(options)  # type: ignore[arg-type]
    layer = _calls.Layer([W1, W1_up, W2, b1, b1_up, b2], chosen, lora=lora)
    _library.require_device(x, "x")
    rows = rows_of(x, "x", "(..., d)")
    router = rows_of(logits_or_scores, "logits" if ids is None else "scores", "(..., E or K)")
    if ids is None and chosen.K is None:
        raise ValueError(_calls.NO_K)
    rounds = chosen.rounding is not None and ids is None
    E = W1.shape[0] * dist.get_world_size(group)
    sizes = W2.shape[1], W2.shape[2], E, chosen.K if ids is None else router.shape[1]
    team = spread.team_of(group, rows, chosen, rank_tokens, sizes, rounds)
    if addend is not None:
        addend = _calls.shaped_as(addend, rows)
    arrival = None if rounds else spread.start(rows, team)
    if ids is not None:
        ids = rows_of(ids, "ids", "(..., K)")
        _calls.check_shape("ids", ids, team.t, router.shape[1])
    else:
        _calls.check_shape("logits", router, team.t, E)
    out, aux, _ = spread.computed(
        rows, router, layer, addend, team, arrival, ids=ids, selection_bias=selection_bias,
        counter=(seed, offset), rounds=rounds,
    )  # fmt: skip
    out = shaped_like(out, x)
    return (out, _calls.shaped_choice(aux, x)) if return_aux else out


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip the norm of gradients like `torch.nn.utils.clip_grad_norm_`, with several meshes.

    The experts' parameters may be on one mesh and all others on another. Every rank calls the
    function. A gradient that is not a DTensor is assumed to be the same on all ranks.

    Args:
        parameters: Parameters whose gradients are scaled in place.
        max_norm: Upper bound of the norm of all gradients together.
        norm_type: 2, or another number, or inf.

    Returns:
        The norm of all gradients before clipping, a scalar, the same on every rank.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            key = getattr(parameter.grad, "device_mesh", None)
            by_mesh.setdefault(key, []).append(parameter)
    norms = []
    for of_mesh in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in of_mesh if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, max_norm, total)
    return total
