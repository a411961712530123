"""Start processes, and shard the model over them."""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import plan
from configs import Refusal


# Active parameters below which the threads of a CPU wait longer than they compute.
SMALL = 1_000_000


def agree(why):
    """Raise an error in every process if one process has a reason.

    So no process waits for another. why: a sentence, or None.
    """
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    for reason in reasons:
        if reason is not None:
            raise Refusal(reason)


def are_finite(tensors):
    """Return whether every number is finite, in all shards, with one wait for the device."""
    # A parameter that is still gathered is not a DTensor.
    shards = [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]
    there = [t for t in shards if t.numel()]  # the maximum of no numbers does not exist
    there = there or [shards[0].new_zeros(1)]
    largest = torch.stack(torch._foreach_norm(there, math.inf, dtype=torch.float32))
    bad = 1 - torch.isfinite(largest).all().int()
    dist.all_reduce(bad)
    return bad.item() == 0


def norm_of(parameters):
    """Return the norm () float32 of the gradients of all shards.

    The shards are read directly: through DTensor the host needs milliseconds.
    """
    shards = [p.grad.to_local() for p in parameters]
    square = torch.stack(torch._foreach_norm(shards, 2.0, dtype=torch.float32)).square().sum()
    dist.all_reduce(square)
    return square.sqrt()


def clip(parameters, largest):
    """Scale gradients down to a norm, and return the norm before, ()."""
    norm = norm_of(parameters)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([p.grad.to_local() for p in parameters], factor)
    return norm


def start():
    """Join torchrun's processes, or start a job of one; return the mesh of all, and the device."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone, MASTER_PORT="0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return init_device_mesh(device.type, (dist.get_world_size(),)), device


def set_threads(active, device):
    """Use one thread for a model of few active parameters on a CPU, and return the thread count.

    OMP_NUM_THREADS has priority.
    """
    if device.type == "cpu" and active < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def report(why):
    """Make the sentence the end of torchrun's report of a failed process."""
    try:
        raise Refusal(why)
    except Refusal as error:
        get_error_handler().record_exception(error)


def leave(status):
    """End the process like sys.exit, but without Python's shutdown.

    A thread of gloo may still hold the data of the last collective, and if it releases them during
    the shutdown, torch aborts a process that has done all its work.
    """
    if not isinstance(status, int):  # sentence of an error
        report(status)
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def expert_mesh(together, device):
    """Return the mesh of groups of processes, each with `together` that share the experts."""
    shape = dist.get_world_size() // together, together
    return init_device_mesh(device.type, shape, mesh_dim_names=("group", "experts"))


def groups(blocks):
    """Return groups of blocks that are gathered together.

    A group has at least plan.GROUP parameters. Gathered one by one, small blocks would cost the
    host more time than their GEMMs cost the device.
    """
    group, size = [], 0
    for block in blocks:
        group.append(block)
        size += sum(p.numel() for p in block.parameters())
        if size >= plan.GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


class ReduceScatter:
    """Reduce-scatter of FSDP with the gradients' shards in memory of the computing stream.

    This memory is what activations release. FSDP allocates the shards in its own stream, whose
    memory nothing else may use from one backward pass to the next.
    """

    def allocate(self, size, *, dtype, device):
        # Deterministic algorithms fill empty tensors with NaN, in the order of their stream.
        if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
            return torch.empty(size, dtype=dtype, device=device)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            memory = torch.empty(size, dtype=dtype, device=device)
        # FSDP's stream may still add it to a shard when it is released.
        memory.record_stream(torch.cuda.current_stream(device))
        return memory

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def reshard(model):
    """Free the gathered copies that an evaluation left; those of --recipe fp8 have no values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard(model, mesh, precision, keep_gathered=False, spread=None):
    """Shard the model with FSDP-2 over all processes, in groups of blocks.

    Values, gradients and moments are sharded. With `keep_gathered` the copies for computation stay
    from forward to backward (run.py sets their number). `spread` is an `expert_mesh`, over whose
    groups each process' experts are sharded.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=plan.COMPUTE_DTYPE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotations stay float32
    )
    options = {"mesh": mesh, "mp_policy": policy}
    for group in groups(model.blocks):
        for block in group if spread is not None else ():
            own = options | {"mesh": spread["group"]}
            fully_shard(block.moe.experts, **own, reshard_after_forward=not keep_gathered)
        fully_shard(group, **options, reshard_after_forward=not keep_gathered)
    fully_shard(model, **options)
    reduce_scatter = ReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reduce_scatter)
    return model
