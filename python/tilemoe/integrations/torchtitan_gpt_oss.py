"""Compute torchtitan's experts of gpt-oss with TileMoE (see torchtitan.py)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from ..distributed.dtensor import local_bfloat16
from .torchtitan import Computed


class TileMoEGptOssGroupedExperts(Computed, GptOssGroupedExperts):
    """Experts of gpt-oss: gate and up in alternate rows of mlp1, clamped, with biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def layer(self) -> dict[str, Any]:
        return dict(
            W1=local_bfloat16(self.mlp1_weight_EGD),
            W2=local_bfloat16(self.mlp2_weight_EDF),
            b1=local_bfloat16(self.mlp1_bias_EG),
            b2=self._part_of_mlp2_bias(),
            gate_layout="interleaved",
            clamp=self.swiglu_limit,
            alpha=1.702,  # constant in torchtitan's swiglu
            up_shift=1.0,
        )

    def _part_of_mlp2_bias(self) -> torch.Tensor:
        """Return this rank's part of the bias; tensor-parallel ranks add their results."""
        weight, bias = self.mlp1_weight_EGD, local_bfloat16(self.mlp2_bias_ED)
        if not isinstance(weight, DTensor):
            # With torchtitan's spmd_types parameters are plain, and the degree is from the region's
            # mesh, which has no tensor parallelism if experts are sharded over ranks. The ranks'
            # gradients are also added.
            return bias / spmd_mesh_size("tp")
        mesh = weight.device_mesh
        names = mesh.mesh_dim_names or ()
        degree = mesh.size(names.index("tp")) if "tp" in names else 1
        # Every rank has the whole gradient.
        return ScaleBiasForward.apply(bias, degree, torch.bfloat16)
