"""Compute torchtitan's experts and its layer of routed experts with TileMoE.

`tilemoe.torchtitan` has the overrides that replace them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)

from .. import expert_parallel, functional
from .._kept_codes import KeptCodes
from ..distributed.dtensor import local_bfloat16, local_of_rank
from ..distributed.fp8_shards import gather_in_fp8_
from ..fp8_weights import Fp8Weight
from ..options import FP8_RECIPES, Dispatch, Recipe, SaveH
from . import torchtitan_dispatchers as dispatchers


class Computed:
    """Base of classes that compute experts, for any routing.

    FSDP gathers parameters when forward is called, so TileMoERoutedExperts also calls forward.
    """

    def layer(self) -> dict[str, Any]:
        """Return weights and form, as arguments of `tilemoe.moe` and of `grouped_experts`."""
        raise NotImplementedError

    def forward(
        self,
        x_RD: torch.Tensor,
        num_tokens_per_expert_E: torch.Tensor | None = None,
        *,
        routed: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute x_RD (R, D), sorted by expert -> (R, D) bfloat16.

        The rows past the sum of the counts are zero. With `routed`, return its result for x in
        bfloat16 and the layer.
        """
        x = x_RD.bfloat16()
        if routed is not None:
            return routed(x, **self.layer())
        assert num_tokens_per_expert_E is not None
        return functional.grouped_experts(x, num_tokens_per_expert_E, **self.layer())


class TileMoEGroupedExperts(Computed, GroupedExperts):
    """SwiGLU experts with w1_EFD (gate), w3_EFD (up) and w2_EDF."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        recipe: Recipe = "bf16"
        save_h: SaveH | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe, self.save_h = config.recipe, config.save_h
        if config.recipe in FP8_RECIPES:
            self.fp8_codes = KeptCodes(("w1_EFD", "w3_EFD", "w2_EDF"))

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        if self.recipe in FP8_RECIPES:
            gather_in_fp8_(self)

    def layer(self) -> dict[str, Any]:
        if self.recipe in FP8_RECIPES:
            W1, W1_up, W2 = (self._in_fp8(name) for name in self.fp8_codes.names)
            how = dict(recipe=self.recipe, save_h=self.save_h)
            return dict(W1=W1, W1_up=W1_up, W2=W2, gate_layout="split", **how)
        return dict(
            W1=local_bfloat16(self.w1_EFD),
            W1_up=local_bfloat16(self.w3_EFD),
            W2=local_bfloat16(self.w2_EDF),
            gate_layout="split",
        )

    def _in_fp8(self, name: str) -> Fp8Weight:
        transposed = self.recipe == "fp8" and torch.is_grad_enabled()
        codes = self.fp8_codes.of(self, name, transposed)
        return codes._replace(master=local_of_rank(getattr(self, name)))

    def forward(self, x_RD: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return super().forward(x_RD, *args, **options).type_as(x_RD)


class TileMoERoutedExperts(RoutedExperts):
    """Dispatch, experts and combination as one layer, by the dispatcher of the configuration.

    - none (`LocalTokenDispatcher`, or no expert mesh): `tilemoe.moe`.
    - `AllToAllTokenDispatcher`, and `MinimalAsyncEPTokenDispatcher` if K is at least the number of
      ranks or `dispatch` is not "all_gather": `tilemoe.expert_parallel.moe` in its place, with
      `dispatch`, with memory for every routing, or for `capacity_factor` times the mean if it is
      set.
    - `DeepEPTokenDispatcher` and `HybridEPTokenDispatcher`: `tilemoe.moe` on the tokens that they
      receive (see torchtitan_dispatchers.py), except DeepEP's `cudagraphable` in inference.
    - any other dispatcher, and classes derived from these: its own dispatch and combine around the
      experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        capacity_factor: float | None = None
        dispatch: Dispatch = "all_gather"

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
        """Compute x_BLD (B, L, D), scores and ids (B, L, K) of this rank's tokens -> (B, L, D)."""
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
            # torchtitan has padded the sequences: all ranks have the same number of tokens.
            routed = expert_parallel.moe
            chosen |= dict(group=mesh.get_group(), dispatch=self.dispatch)
            chosen |= dict(capacity_factor=self.capacity_factor)
        routed = partial(routed, **chosen)
        with maybe_set_sparse_mesh():
            return self.inner_experts(x_BLD, routed=routed).type_as(x_BLD)

    def parallelize(self, parallel_dims: Any) -> None:
        dispatcher, mesh = self.token_dispatcher, parallel_dims.get_optional_mesh("ep")
        if type(dispatcher) is MinimalAsyncEPTokenDispatcher and mesh is not None:
            # torchtitan's dispatcher sends one row per pair. TileMoE sends one row to every rank,
            # or to each rank with an expert of the token, and does not need torchtitan's buffer.
            if mesh.size() <= dispatcher.top_k or self.dispatch != "all_gather":
                sizes = dict(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k)
                self.token_dispatcher = AllToAllTokenDispatcher.Config(**sizes).build()
        super().parallelize(parallel_dims)


def _around(dispatcher: LocalTokenDispatcher) -> Callable[..., torch.Tensor] | None:
    """Return the function that computes experts on received tokens, or None."""
    if type(dispatcher) is DeepEPTokenDispatcher:
        # The static form has one row per pair and is for inference only.
        is_static = dispatcher.cudagraphable and not torch.is_grad_enabled()
        return None if is_static else dispatchers.of_deepep
    if type(dispatcher) is HybridEPTokenDispatcher:
        return dispatchers.of_hybridep
    return None
