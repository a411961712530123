"""Convert DTensors at the module's boundary.

The operators compute with plain tensors, so they receive the local part of a DTensor, and their
results are wrapped again. FSDP-2 does not need this: inside `fully_shard` the module has plain,
gathered parameters.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return whether it is a DTensor; import torch.distributed.tensor only if it may be one."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


class Spread:
    """Placement of the tokens of a DTensor x (..., d) on its mesh.

    On each axis every rank has the same tokens (`Replicate`) or different ones (`Shard` of a
    dimension before the last).
    """

    def __init__(self, x):
        from torch.distributed.tensor import Partial, Replicate

        self.mesh, self.placements, self.shape = x.device_mesh, x.placements, x.shape
        for placement in self.placements:
            whole_rows = placement.is_replicate() or (
                placement.is_shard() and placement.dim != x.ndim - 1
            )
            if not whole_rows:
                raise ValueError(
                    f"x has placements {self.placements}, but all {x.shape[-1]} values of "
                    "a token must be on one rank; redistribute x to Replicate() or to "
                    "Shard() of a dimension before the last"
                )
        self._sum = tuple(
            Partial() if placement.is_shard() else Replicate() for placement in self.placements
        )
        self._whole = tuple(Replicate() for _ in self.placements)
        self.parts = 1  # ranks with different tokens
        for axis, placement in enumerate(self.placements):
            if placement.is_shard():
                self.parts *= self.mesh.size(axis)

    def parameter(self, name, tensor):
        """Return the whole parameter as a plain tensor.

        If ranks have different tokens, its gradient is the sum of the ranks' gradients.
        """
        if tensor is None or not is_dtensor(tensor):
            return tensor
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"expected one mesh: {name} is on {tensor.device_mesh}, x is on {self.mesh}"
            )
        return tensor.redistribute(placements=self._whole).to_local(grad_placements=self._sum)

    def local_like_x(self, name, tensor):
        """Return this rank's part of a DTensor with x's placements (last dimension excepted)."""
        if not is_dtensor(tensor) or (tensor.device_mesh, tensor.placements) != (
            self.mesh,
            self.placements,
        ):
            raise ValueError(
                f"{name} must be a DTensor with x's placements {self.placements} on x's mesh"
            )
        return tensor.to_local()

    def output(self, local):
        """Return a rank's rows (..., width) as a DTensor with x's placements."""
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
        """Return the mean of the ranks' scalars, as a DTensor with a pending sum."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local / self.parts, self.mesh, self._sum, run_check=False)

    def total(self, local):
        """Return the sum of the ranks' counts, as a DTensor with a pending sum."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, self._sum, run_check=False)


class OnMesh:
    """Parameters (E, ...) whose experts are sharded over a mesh of one dimension.

    Rank r has the E / ranks experts from r * E / ranks on. If fully_shard shards them over another
    mesh, it gathers them before they are used.
    """

    def __init__(self, mesh, E, gradients):
        if mesh.ndim != 1:
            raise ValueError(
                f"expert_mesh must have one dimension, got {mesh.ndim}; pass one dimension "
                "by its name, for example mesh['ep']"
            )
        self.mesh, self.size = mesh, mesh.size()
        if E % self.size:
            raise ValueError(f"E must be a multiple of expert_mesh's {self.size} ranks, got {E}")
        if gradients not in ("mean", "sum"):
            raise ValueError(f"expert_gradients must be 'mean' or 'sum', got {gradients!r}")
        self._factor = 1 / self.size if gradients == "mean" else 1

    def empty(self, E, *shape, **how):
        from torch.distributed.tensor import DTensor, Shard

        how["device"] = how.get("device") or torch.get_default_device()
        local = torch.empty(E // self.size, *shape, **how)
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    def uniform_(self, parameter, low, high):
        """Draw the values of all experts on every rank and keep the rank's own.

        Ranks with the same seed then have different experts, and the values on a CPU do not depend
        on the number of ranks.
        """
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
        """Return this rank's experts as a plain tensor with the summed or averaged gradient."""
        if parameter is None:
            return None
        if not is_dtensor(parameter) or parameter.device_mesh != self.mesh:
            raise ValueError(
                f"{name} must be a DTensor on the expert mesh; under fully_shard call the "
                "wrapped module, and load state dicts with torch.distributed.checkpoint"
            )
        from .team import gradient_scaled

        return gradient_scaled(parameter.to_local(), self._factor)


def local_of_rank(parameter):
    """Return this rank's part of a parameter."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def local_bfloat16(parameter):
    """Return this rank's part in bfloat16, the dtype of torchtitan's GEMMs."""
    return local_of_rank(parameter).bfloat16()


def plain(name, tensor):
    """Return the parameter, which must not be a DTensor if x is not a DTensor."""
    if tensor is not None and is_dtensor(tensor):
        raise ValueError(
            f"{name} is a DTensor, but x is not; pass x as a DTensor, or shard the module "
            "with fully_shard"
        )
    return tensor
