"""Collectives of ranks that share one GPU, which NCCL refuses: over gloo, whose tensors are the
CPU's, and done when the call returns. (gloo takes CUDA tensors in some collectives, but not in
those that DTensors call.)"""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

in_use = False


class Done:
    def wait(self):
        return True


def _apart(collective):
    """One that writes to another tensor than it reads."""

    def call(output, input, *args, async_op=False, **options):
        came = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        collective(came, input.detach().cpu(), *args, **options)
        output.data.copy_(came)  # as NCCL does, past autograd's counts of versions
        return Done() if async_op else None

    return call


def _in_place(collective):
    def call(tensor, *args, async_op=False, **options):
        on_cpu = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        collective(on_cpu, *args, **options)
        tensor.data.copy_(on_cpu)
        return Done() if async_op else None

    return call


def _to_list(collective):
    def call(outputs, input, *args, async_op=False, **options):
        came = [torch.empty(o.shape, dtype=o.dtype, device="cpu") for o in outputs]
        collective(came, input.detach().cpu(), *args, **options)
        for output, tensor in zip(outputs, came):
            output.data.copy_(tensor)
        return Done() if async_op else None

    return call


STAGED = {
    "all_gather_into_tensor": _apart,
    "all_to_all_single": _apart,
    "all_reduce": _in_place,
    "all_gather": _to_list,
}


def begin():
    """From here on these collectives of torch.distributed are staged, in this process."""
    global in_use
    in_use = True
    for name, how in STAGED.items():
        mock.patch.object(dist, name, how(getattr(dist, name))).start()


def full_tensor(tensor):
    """A DTensor's, over a mesh of one dimension."""
    mesh = DeviceMesh.from_group(tensor.device_mesh.get_group(), "cpu")
    on_cpu = DTensor.from_local(
        tensor.to_local().detach().cpu(), mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return on_cpu.full_tensor().to(tensor.to_local().device)
