"""torchtitan's experts, computed by TileMoE.

    torchtitan ... --override.imports tilemoe.torchtitan.experts

replaces every `GroupedExperts` of the model's configuration, gpt-oss's too, by a subclass that keeps
the parameters, their names, initialisation and sharding, and computes them as one grouped layer on
`tilemoe.grouped_experts`: w1, w3 and w2 are read where they lie, the activation between them is not
kept for backward. Routers, dispatchers (expert parallelism), combination and checkpoints stay
torchtitan's. As there, the products are bfloat16's.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts

from . import functional
from ._distributed import local_bfloat16


class TileMoEGroupedExperts(GroupedExperts):
    """SwiGLU experts of w1_EFD (gate), w3_EFD (up) and w2_EDF."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """x_RD (R, D), sorted by expert -> (R, D), zero past the sum of the counts."""
        out_RD = functional.grouped_experts(
            x_RD.bfloat16(),
            num_tokens_per_expert_E,
            local_bfloat16(self.w1_EFD),
            local_bfloat16(self.w2_EDF),
            W1_up=local_bfloat16(self.w3_EFD),
            gate_layout="split",
        )
        return out_RD.type_as(x_RD)


@override(target=GroupedExperts.Config, description="Compute grouped experts by TileMoE.")
def experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """The override's factory: torchtitan calls it for every experts configuration that it finds."""
    kind = type(cfg)
    if kind is GroupedExperts.Config:
        return derive(cfg, TileMoEGroupedExperts.Config)
    if (kind.__module__, kind.__qualname__) == (
        "torchtitan.models.gpt_oss.moe",
        "GptOssGroupedExperts.Config",
    ):
        # Imported where it is met: its package asks for more of torch than the others do.
        from ._torchtitan_gpt_oss import TileMoEGptOssGroupedExperts

        return derive(cfg, TileMoEGptOssGroupedExperts.Config)
    raise NotImplementedError(
        f"tilemoe cannot compute {kind.__module__}.{kind.__qualname__}: it replaces GroupedExperts "
        "and GptOssGroupedExperts themselves, not classes derived from them"
    )
