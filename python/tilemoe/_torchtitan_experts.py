"""What torchtitan's experts have in common when TileMoE computes them (see torchtitan.py)."""

from collections.abc import Callable
from typing import Any

import torch

from . import functional


class Computed:
    """Computes experts, for any routing. FSDP gathers parameters when forward is called, so
    TileMoERoutedExperts calls forward, too."""

    def layer(self) -> dict[str, Any]:
        """Weights and form, as arguments of `tilemoe.moe` and of `grouped_experts`."""
        raise NotImplementedError

    def forward(
        self,
        x_RD: torch.Tensor,
        num_tokens_per_expert_E: torch.Tensor | None = None,
        *,
        routed: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x_RD (R, D), sorted by expert -> (R, D) bfloat16, zero past the sum of the counts; or the
        result of `routed` for x, in bfloat16, and the layer."""
        x = x_RD.bfloat16()
        if routed is not None:
            return routed(x, **self.layer())
        assert num_tokens_per_expert_E is not None
        return functional.grouped_experts(x, num_tokens_per_expert_E, **self.layer())
