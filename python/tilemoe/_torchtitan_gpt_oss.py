"""gpt-oss's experts of torchtitan, computed by TileMoE (see torchtitan.py)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from ._distributed import local_bfloat16
from .torchtitan import Computed


class TileMoEGptOssGroupedExperts(Computed, GptOssGroupedExperts):
    """gpt-oss's experts: gate and up in alternate rows of mlp1, clamped, with biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def layer(self) -> dict[str, Any]:
        # Each tensor-parallel rank adds its share of mlp2's bias.
        mlp2_bias_ED = ScaleBiasForward.apply(
            local_bfloat16(self.mlp2_bias_ED),
            _tensor_parallel_degree(self.mlp1_weight_EGD),
            torch.bfloat16,
        )
        return dict(
            W1=local_bfloat16(self.mlp1_weight_EGD),
            W2=local_bfloat16(self.mlp2_weight_EDF),
            b1=local_bfloat16(self.mlp1_bias_EG),
            b2=mlp2_bias_ED,
            gate_layout="interleaved",
            clamp=self.swiglu_limit,
            alpha=1.702,  # a constant of torchtitan's swiglu
            up_shift=1.0,
        )


def _tensor_parallel_degree(parameter: torch.Tensor) -> int:
    """Ranks whose results are added up."""
    if not isinstance(parameter, DTensor):
        # Under torchtitan's spmd_types parameters are plain, and the region's mesh tells. Of a
        # region whose experts are on several ranks it has no tensor parallelism.
        return spmd_mesh_size("tp")
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index("tp")) if "tp" in names else 1
