"""gpt-oss's experts of torchtitan, computed by TileMoE (see torchtitan.py)."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from . import functional
from ._distributed import local_bfloat16


class TileMoEGptOssGroupedExperts(GptOssGroupedExperts):
    """gpt-oss's experts: gate and up in alternate rows of mlp1, clamped, with biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """x_RD (R, D), sorted by expert -> (R, D) bfloat16, zero past the sum of the counts."""
        # Each tensor-parallel rank adds its share of mlp2's bias.
        mlp2_bias_ED = ScaleBiasForward.apply(
            local_bfloat16(self.mlp2_bias_ED),
            _tensor_parallel_degree(self.mlp1_weight_EGD),
            torch.bfloat16,
        )
        return functional.grouped_experts(
            x_RD.bfloat16(),
            num_tokens_per_expert_E,
            local_bfloat16(self.mlp1_weight_EGD),
            local_bfloat16(self.mlp2_weight_EDF),
            b1=local_bfloat16(self.mlp1_bias_EG),
            b2=mlp2_bias_ED,
            gate_layout="interleaved",
            clamp=self.swiglu_limit,
            alpha=1.702,  # a constant of torchtitan's swiglu
            up_shift=1.0,
        )


def _tensor_parallel_degree(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1
