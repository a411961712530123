"""Implement the expert parallelism of transformers 5.23 and newer.

See transformers.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementation

from .. import expert_parallel
from ..distributed.team import Team
from ..routing import counts_of_ids
from .transformers import computed, experts_forward


class TileMoEEP(EPImplementation):
    """Implementation of expert parallelism by TileMoE.

    Ranks with different batches use `tilemoe.expert_parallel.moe`: a token's row is sent once to
    every rank, and one row returns. Ranks that share one batch already have its rows: each rank
    computes the part of its own experts, as in AllReduceEP.

    With different batches the ranks first exchange the counts of their tokens and pairs, for which
    the host waits, as in transformers' AllToAllEP. Batches may therefore have any sizes, and the
    capacity is the maximum number of pairs over the ranks' experts.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.all_reduce = None
        if self.shares_batch:
            self.all_reduce = AllReduceEP(experts, ep_mesh, tp_mesh)
            self.all_reduce.experts_forward = self._forward

    def _forward(self, *args: Tensor) -> Tensor:
        """Compute the experts for any experts_implementation of the model."""
        return experts_forward(self.experts, *args, self.tp_mesh.get_group())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute hidden_states (T, d), top_k_index, top_k_weights (T, K) -> (T, d)."""
        if self.all_reduce is not None:
            return self.all_reduce(hidden_states, top_k_index, top_k_weights)
        given = hidden_states, top_k_index, top_k_weights
        x, ids, weights = (self._own_rows(tensor) for tensor in given)
        rank_tokens, factor = self._exchange_counts(ids)
        out = computed(
            expert_parallel.moe,
            self.experts,
            x,
            ids,
            weights,
            self.tp_mesh.get_group(),
            group=self.ep_mesh.get_group(),
            rank_tokens=rank_tokens,
            capacity_factor=factor,
        )
        if self.tp_mesh.size() == 1:
            return out
        shape = hidden_states.shape
        rows = DTensor.from_local(
            out, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
        )
        return rows.full_tensor()

    def _own_rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the rows, which all ranks of tp_mesh have."""
        if self.tp_mesh.size() == 1:
            return tensor
        same = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return same.redistribute(placements=[Shard(0)]).to_local()

    def _exchange_counts(self, ids: Tensor) -> tuple[list[int], float | None]:
        """Exchange ids (t, K) of this rank.

        Return the tokens of every rank, and the capacity_factor for the maximum number of pairs of
        a rank.
        """
        ranks = self.ep_mesh.size()
        of_experts = counts_of_ids(ids, ranks * self.num_local_experts)
        of_ranks = torch.cat([of_experts.view(ranks, -1).sum(1), of_experts.new_tensor([len(ids)])])
        counts = Team(self.ep_mesh.get_group(), ids.shape[0]).gather_flat(of_ranks)
        tokens, max_pairs = counts[:, ranks].tolist(), int(counts[:, :ranks].sum(0).max())
        mean = (
            max(tokens) * ids.shape[1]
        )  # mean pairs of a rank if all had the same number of tokens
        return tokens, max(max_pairs, 1) / mean if mean else None
