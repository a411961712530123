"""DTensors at the module's border: the operators take plain tensors, so a DTensor's local part goes
in and the results are wrapped again.

FSDP-2 needs none of this: inside `fully_shard` the module sees plain, gathered parameters.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; torch.distributed.tensor is imported only where one may be."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


class Spread:
    """How the tokens of a DTensor x (..., d) lie on its mesh: on each axis every rank holds the
    same ones (`Replicate`) or its own (`Shard` of a dimension before the last)."""

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
                    "must lie on one rank: redistribute x to Replicate() or Shard() of its tokens"
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
        """The whole parameter as a plain tensor. Where ranks hold different tokens its gradient is
        the sum of theirs."""
        if tensor is None or not is_dtensor(tensor):
            return tensor
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"tilemoe: {name} lies on {tensor.device_mesh} and x on {self.mesh}, expected one "
                "mesh"
            )
        return tensor.redistribute(placements=self._whole).to_local(grad_placements=self._sum)

    def local_like_x(self, name, tensor):
        """This rank's part of a DTensor whose dimensions but the last lie as x's do."""
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
        """A rank's rows (..., d) as a DTensor that lies as x does."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def mean(self, local):
        """The mean of the ranks' scalars, as a DTensor still to be summed."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local / self.parts, self.mesh, self._sum, run_check=False)

    def total(self, local):
        """The sum of the ranks' counts, as a DTensor still to be summed."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, self._sum, run_check=False)


def local_bfloat16(parameter):
    """This rank's part, in the type of the products, as torchtitan's own experts take it."""
    return (parameter.to_local() if is_dtensor(parameter) else parameter).bfloat16()


def plain(name, tensor):
    """The parameter where x is no DTensor: it must be none either."""
    if tensor is not None and is_dtensor(tensor):
        raise ValueError(
            f"tilemoe: {name} is a DTensor and x is not: make x a DTensor, whose placements say "
            "which tokens a rank holds, or shard the module by fully_shard"
        )
    return tensor
