"""Processes: who they are, and what of the model each of them holds."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import plan


def start():
    """Joins torchrun's processes, or is a job of one. -> the mesh of all of them, device."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone, MASTER_PORT="0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),)), device


def shard(model, mesh, precision, keep_gathered=False):
    """FSDP-2 over all processes, block by block: values, gradients and moments lie in shards.
    `keep_gathered`: the copies for computing stay from forward to backward."""
    policy = MixedPrecisionPolicy(
        param_dtype=plan.COMPUTE_DTYPE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotations stay float32
    )
    options = {"mesh": mesh, "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, **options, reshard_after_forward=not keep_gathered)
    return fully_shard(model, **options)
