"""DTensors at the module's border: the operators take plain tensors, so a DTensor's local part goes
in and the results are wrapped again.

FSDP-2 needs none of this: inside `fully_shard` the module sees plain, gathered parameters.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; torch.distributed.tensor is imported only if it may be one."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


class Spread:
    """The placement of the tokens of a DTensor x (..., d) on its mesh: on each axis every rank has
    the same tokens (`Replicate`) or its own (`Shard` of a dimension before the last)."""

    def __init__(self, x):
        from torch.distributed.tensor import Partial, Replicate

        self.mesh, self.placements, self.shape = x.device_mesh, x.placements, x.shape
        for placement in self.placements:
            whole_rows = placement.is_replicate() or (
                placement.is_shard() and placement.dim != x.ndim - 1
            )
            if not whole_rows:
                raise ValueError(
                    f"tilemoe: x has placements {self.placements}: a token's {x.shape[-1]} values "
                    "must be on one rank: redistribute x to Replicate() or Shard() of its tokens"
                )
        self._sum = tuple(
            Partial() if placement.is_shard() else Replicate() for placement in self.placements
        )
        self._whole = tuple(Replicate() for _ in self.placements)
        self.parts = 1  # ranks among which the tokens are divided
        for axis, placement in enumerate(self.placements):
            if placement.is_shard():
                self.parts *= self.mesh.size(axis)

    def parameter(self, name, tensor):
        """The whole parameter as a plain tensor. If ranks have different tokens, its gradient is
        the sum of the ranks' gradients."""
        if tensor is None or not is_dtensor(tensor):
            return tensor
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"tilemoe: {name} is on {tensor.device_mesh} and x on {self.mesh}, expected one "
                "mesh"
            )
        return tensor.redistribute(placements=self._whole).to_local(grad_placements=self._sum)

    def local_like_x(self, name, tensor):
        """This rank's part of a DTensor whose placements, except of the last dimension, are x's."""
        if not is_dtensor(tensor) or (tensor.device_mesh, tensor.placements) != (
            self.mesh,
            self.placements,
        ):
            raise ValueError(
                f"tilemoe: x is a DTensor with placements {self.placements}: {name} must be one "
                "with the same, on the same mesh"
            )
        return tensor.to_local()

    def output(self, local):
        """A rank's rows (..., width) as a DTensor with x's placements."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size((*self.shape[:-1], local.shape[-1]))
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def mean(self, local):
        """The mean of the ranks' scalars, as a DTensor still to be summed."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local / self.parts, self.mesh, self._sum, run_check=False)

    def total(self, local):
        """The sum of the ranks' counts, as a DTensor still to be summed."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, self._sum, run_check=False)


class OnMesh:
    """Parameters (E, ...) whose experts are spread over a mesh of one dimension: rank r has
    E / ranks experts, from r * E / ranks on. If fully_shard shards them over another mesh, it
    gathers them before they are used."""

    def __init__(self, mesh, E, gradients):
        if mesh.ndim != 1:
            raise ValueError(
                f"tilemoe: expert_mesh has {mesh.ndim} dimensions, expected one: give it one "
                "dimension of the mesh by its name"
            )
        self.mesh, self.size = mesh, mesh.size()
        if E % self.size:
            raise ValueError(
                f"tilemoe: E is {E}, which is no multiple of expert_mesh's {self.size} ranks"
            )
        if gradients not in ("mean", "sum"):
            raise ValueError(
                f"tilemoe: expert_gradients is {gradients!r}, expected one of mean, sum"
            )
        self._factor = 1 / self.size if gradients == "mean" else 1

    def empty(self, E, *shape, **how):
        from torch.distributed.tensor import DTensor, Shard

        how["device"] = how.get("device") or torch.get_default_device()
        local = torch.empty(E // self.size, *shape, **how)
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    def uniform_(self, parameter, low, high):
        """Every rank draws the values of all experts and keeps its own, so that ranks with the same
        seed have different experts, and no number of ranks changes what a CPU draws."""
        with torch.no_grad():
            if not is_dtensor(parameter) or parameter.device_mesh != self.mesh:
                return torch.nn.init.uniform_(parameter, low, high)  # also under fully_shard
            local = parameter.to_local()
            first = self.mesh.get_local_rank() * local.shape[0]
            drawn = torch.empty_like(local[0])
            for expert in range(parameter.shape[0]):
                drawn.uniform_(low, high)
                if first <= expert < first + local.shape[0]:
                    local[expert - first].copy_(drawn)
        return parameter

    def own(self, name, parameter):
        """This rank's experts as a plain tensor, whose gradient is the sum over the ranks' tokens,
        or their mean."""
        if parameter is None:
            return None
        if not is_dtensor(parameter) or parameter.device_mesh != self.mesh:
            raise ValueError(
                f"tilemoe: {name} is no DTensor on the expert mesh: under fully_shard call the "
                "module that it wraps, and load state dicts by torch.distributed.checkpoint"
            )
        from .team import gradient_scaled

        return gradient_scaled(parameter.to_local(), self._factor)


def local_bfloat16(parameter):
    """This rank's part in bfloat16, the type of torchtitan's GEMMs."""
    return (parameter.to_local() if is_dtensor(parameter) else parameter).bfloat16()


def plain(name, tensor):
    """The parameter if x is no DTensor; it must not be a DTensor either."""
    if tensor is not None and is_dtensor(tensor):
        raise ValueError(
            f"tilemoe: {name} is a DTensor and x is not: make x a DTensor, whose placements define "
            "the tokens of a rank, or shard the module by fully_shard"
        )
    return tensor
