"""torchtitan's experts, computed by TileMoE. torchtitan 0.3.0's trainer requires torch 2.15.

    torchrun --nproc-per-node 1 -m torchtitan.train --module qwen3 --config qwen3_moe_debug \\
      --override.imports tilemoe.torchtitan.experts

replaces every `GroupedExperts` of the model's configuration, gpt-oss's too, by a subclass that
keeps the parameters, their names, initialisation and sharding, and computes them as one grouped
layer with `tilemoe.grouped_experts`: w1, w3 and w2 are read in place, and the activation is not
kept for backward. Routers, dispatchers (expert parallelism), combination and checkpoints stay
torchtitan's. The GEMMs are in bfloat16, as torchtitan's are.

`--override.imports tilemoe.torchtitan.routed_experts` replaces every `RoutedExperts`, with the
dispatch of tokens and the combination of results: experts gather a token's row when they load it,
and one kernel scores and adds up their results. This applies without expert parallelism, in place
of torchtitan's all-to-all, and around DeepEP and HybridEP. With other dispatchers it is the same as
`experts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)

from . import _library, _torchtitan_dispatchers, expert_parallel, functional
from ._distributed import local_bfloat16
from ._torchtitan_experts import Computed


class TileMoEGroupedExperts(Computed, GroupedExperts):
    """SwiGLU experts of w1_EFD (gate), w3_EFD (up) and w2_EDF."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def layer(self) -> dict[str, Any]:
        return dict(
            W1=local_bfloat16(self.w1_EFD),
            W1_up=local_bfloat16(self.w3_EFD),
            W2=local_bfloat16(self.w2_EDF),
            gate_layout="split",
        )

    def forward(self, x_RD: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return super().forward(x_RD, *args, **options).type_as(x_RD)


class TileMoERoutedExperts(RoutedExperts):
    """Dispatch, experts and combination as one layer, by the dispatcher of the configuration:

    none (`LocalTokenDispatcher`, or no expert mesh): `tilemoe.moe`;
    `AllToAllTokenDispatcher`, and `MinimalAsyncEPTokenDispatcher` if K is at least the number of
    ranks, or `dispatch` is not "all_gather": `tilemoe.expert_parallel.moe` in its place, by
    `dispatch`, with memory for every routing, or for `capacity_factor` times the mean if it is set;
    `DeepEPTokenDispatcher` and `HybridEPTokenDispatcher`: `tilemoe.moe` of the tokens that they
    receive (see _torchtitan_dispatchers.py), except DeepEP's `cudagraphable` in inference;
    any other, and classes derived from these: its own dispatch and combine around the experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        capacity_factor: float | None = None
        dispatch: expert_parallel.Dispatch = "all_gather"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.capacity_factor, self.dispatch = config.capacity_factor, config.dispatch

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """x_BLD (B, L, D), scores and ids (B, L, K) of this rank's tokens -> (B, L, D)."""
        dispatcher = self.token_dispatcher
        mesh = getattr(dispatcher, "ep_mesh", None)
        around = _around(dispatcher)
        if around is not None:
            flat = (t.flatten(0, 1) for t in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
            with maybe_set_sparse_mesh():
                out_TD = around(dispatcher, *flat, self.inner_experts)
            return out_TD.view(x_BLD.shape).type_as(x_BLD)
        if type(dispatcher) not in (LocalTokenDispatcher, AllToAllTokenDispatcher):
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        chosen: dict[str, Any] = dict(logits_or_scores=topk_scores_BLK, ids=topk_expert_ids_BLK)
        routed: Callable[..., torch.Tensor] = functional.moe
        if mesh is not None:
            # torchtitan has padded the sequences: every rank has as many tokens.
            routed = expert_parallel.moe
            chosen |= dict(group=mesh.get_group(), dispatch=self.dispatch)
            chosen |= dict(capacity_factor=self.capacity_factor)
        routed = partial(routed, **chosen)
        with maybe_set_sparse_mesh():
            return self.inner_experts(x_BLD, routed=routed).type_as(x_BLD)

    def parallelize(self, parallel_dims: Any) -> None:
        dispatcher, mesh = self.token_dispatcher, parallel_dims.get_optional_mesh("ep")
        if type(dispatcher) is MinimalAsyncEPTokenDispatcher and mesh is not None:
            # It sends a row for every pair. Ours sends one row to every rank, or to each rank with
            # an expert of the token, and does not need its buffer.
            if mesh.size() <= dispatcher.top_k or self.dispatch != "all_gather":
                sizes = dict(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k)
                self.token_dispatcher = AllToAllTokenDispatcher.Config(**sizes).build()
        super().parallelize(parallel_dims)


def _around(dispatcher: LocalTokenDispatcher) -> Callable[..., torch.Tensor] | None:
    """The function that computes experts on the tokens that the dispatcher receives, or None."""
    if type(dispatcher) is DeepEPTokenDispatcher:
        # Its static form has a row for every pair and is for inference only.
        is_static = dispatcher.cudagraphable and not torch.is_grad_enabled()
        return None if is_static else _torchtitan_dispatchers.of_deepep
    if type(dispatcher) is HybridEPTokenDispatcher:
        return _torchtitan_dispatchers.of_hybridep
    return None


@override(target=RoutedExperts.Config, description="Route, compute and combine by TileMoE.")
def routed_experts(
    cfg: RoutedExperts.Config,
    capacity_factor: float | None = None,
    dispatch: expert_parallel.Dispatch = "all_gather",
) -> RoutedExperts.Config:
    """Make the replacing configuration, as the override's factory. capacity_factor: under expert
    parallelism by all-to-all, the capacity as a multiple of the mean of a rank's pairs, past which
    the output is NaN; None: memory for every routing. dispatch: as in
    `tilemoe.expert_parallel.moe`.
    """
    if type(cfg) is not RoutedExperts.Config:
        raise NotImplementedError(
            f"tilemoe cannot compute {_library.class_of(cfg)}: it replaces "
            "RoutedExperts itself, not classes derived from it"
        )
    own = dict(inner_experts=experts(cfg.inner_experts), capacity_factor=capacity_factor)
    return derive(cfg, TileMoERoutedExperts.Config, **own, dispatch=dispatch)


@override(target=GroupedExperts.Config, description="Compute grouped experts by TileMoE.")
def experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """Make the replacing configuration, as the override's factory: torchtitan calls it for every
    experts configuration that it finds."""
    kind = type(cfg)
    if kind is GroupedExperts.Config:
        return derive(cfg, TileMoEGroupedExperts.Config)
    if (kind.__module__, kind.__qualname__) == (
        "torchtitan.models.gpt_oss.moe",
        "GptOssGroupedExperts.Config",
    ):
        # Imported only if it is used: its package requires a newer torch than the others.
        from ._torchtitan_gpt_oss import TileMoEGptOssGroupedExperts

        return derive(cfg, TileMoEGptOssGroupedExperts.Config)
    raise NotImplementedError(
        f"tilemoe cannot compute {kind.__module__}.{kind.__qualname__}: it replaces GroupedExperts "
        "and GptOssGroupedExperts themselves, not classes derived from them"
    )
