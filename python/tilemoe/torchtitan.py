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

from . import _private

_private.require("tilemoe.torchtitan", ImportError)

from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from . import _library
from .integrations.torchtitan import TileMoEGroupedExperts, TileMoERoutedExperts
from .options import Dispatch

__all__ = ["experts", "routed_experts"]


@override(target=RoutedExperts.Config, description="Route, compute and combine by TileMoE.")
def routed_experts(
    cfg: RoutedExperts.Config,
    capacity_factor: float | None = None,
    dispatch: Dispatch = "all_gather",
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
        _private.require("torchtitan's gpt-oss by tilemoe")
        # Imported only if it is used: its package requires a newer torch than the others.
        from .integrations.torchtitan_gpt_oss import TileMoEGptOssGroupedExperts

        return derive(cfg, TileMoEGptOssGroupedExperts.Config)
    raise NotImplementedError(
        f"tilemoe cannot compute {kind.__module__}.{kind.__qualname__}: it replaces GroupedExperts "
        "and GptOssGroupedExperts themselves, not classes derived from them"
    )
