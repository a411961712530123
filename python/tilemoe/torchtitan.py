r"""Compute torchtitan's experts with TileMoE.

Launch (torchtitan 0.3.0's trainer requires torch 2.15)::

    torchrun --nproc-per-node 1 -m torchtitan.train --module qwen3 --config qwen3_moe_debug \
        --override.imports tilemoe.torchtitan.experts

This override replaces every `GroupedExperts` of the model's configuration, also gpt-oss's, by a
subclass that keeps the parameters with their names, initialisation and sharding. The subclass
computes them as one grouped layer with `tilemoe.grouped_experts`: w1, w3 and w2 are read in place,
and the activation is not saved for backward. Routers, dispatchers (expert parallelism), combination
and checkpoints are torchtitan's. The GEMMs are in bfloat16, as torchtitan's are.

`--override.imports tilemoe.torchtitan.routed_experts` replaces every `RoutedExperts`, including the
dispatch of tokens and the combination of results: the GEMM gathers a token's row while it loads the
row, and one kernel scores and adds the results. This applies without expert parallelism, in place
of torchtitan's all-to-all, and around DeepEP and HybridEP. With other dispatchers the override is
the same as `experts`.
"""

from . import _private

_private.require("tilemoe.torchtitan", ImportError)

from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from . import _library
from .integrations.torchtitan import TileMoEGroupedExperts, TileMoERoutedExperts
from .options import Dispatch, Options, Recipe, SaveH

__all__ = ["experts", "routed_experts"]


@override(target=RoutedExperts.Config, description="Route, compute and combine with TileMoE.")
def routed_experts(
    cfg: RoutedExperts.Config,
    capacity_factor: float | None = None,
    dispatch: Dispatch = "all_gather",
    recipe: Recipe = "bf16",
    save_h: SaveH | None = None,
) -> RoutedExperts.Config:
    """Return the replacing configuration; this is the override's factory.

    Args:
        cfg: Configuration that torchtitan found.
        capacity_factor: With expert parallelism by all-to-all, the capacity as a multiple of the
            mean number of pairs of a rank, above which the output is NaN. None: memory for every
            routing.
        dispatch: As in `tilemoe.expert_parallel.moe`.
        recipe: As in `experts`.
        save_h: As in `experts`.

    Raises:
        ValueError: As in `experts`.
        NotImplementedError: The configuration is that of a class derived from RoutedExperts.
    """
    if type(cfg) is not RoutedExperts.Config:
        raise NotImplementedError(
            f"TileMoE replaces RoutedExperts but not derived classes, got {_library.class_of(cfg)}"
        )
    inner = experts(cfg.inner_experts, recipe, save_h)
    own = dict(inner_experts=inner, capacity_factor=capacity_factor, dispatch=dispatch)
    return derive(cfg, TileMoERoutedExperts.Config, **own)


@override(target=GroupedExperts.Config, description="Compute grouped experts with TileMoE.")
def experts(
    cfg: GroupedExperts.Config, recipe: Recipe = "bf16", save_h: SaveH | None = None
) -> GroupedExperts.Config:
    """Return the replacing configuration; this is the override's factory.

    torchtitan calls it for every experts configuration that it finds.

    Args:
        cfg: Configuration that torchtitan found.
        recipe: "bf16", "fp8" or "fp8_forward", as in `tilemoe.moe`. FSDP-2 then gathers FP8 codes.
        save_h: Format of the saved H, None or "fp8", as in `tilemoe.moe`.

    Raises:
        ValueError: The recipe or save_h is unknown, or the recipe does not support save_h.
        NotImplementedError: The recipe is "auto", or the configuration is that of a class derived
            from GroupedExperts or GptOssGroupedExperts, or is gpt-oss's with an FP8 recipe.
    """
    Options(recipe=recipe, save_h=save_h)  # raises the errors of `tilemoe.moe`
    if recipe == "auto":
        raise NotImplementedError(
            "recipe='auto' does not support torchtitan, where FSDP-2 gathers one format; pass the "
            "recipe that tilemoe.choose_recipe returns"
        )
    kind = type(cfg)
    if kind is GroupedExperts.Config:
        return derive(cfg, TileMoEGroupedExperts.Config, recipe=recipe, save_h=save_h)
    if (kind.__module__, kind.__qualname__) == (
        "torchtitan.models.gpt_oss.moe",
        "GptOssGroupedExperts.Config",
    ):
        if recipe != "bf16":
            raise NotImplementedError(
                f"recipe={recipe!r} does not support torchtitan's gpt-oss, whose gate and up rows "
                "are interleaved"
            )
        _private.require("TileMoE for torchtitan's gpt-oss")
        # Imported only if used: its package requires a newer torch than the others.
        from .integrations.torchtitan_gpt_oss import TileMoEGptOssGroupedExperts

        return derive(cfg, TileMoEGptOssGroupedExperts.Config)
    raise NotImplementedError(
        "TileMoE replaces GroupedExperts and GptOssGroupedExperts but not derived "
        f"classes, got {kind.__module__}.{kind.__qualname__}"
    )
