"""Processes: who they are, and what of the model each of them holds."""

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


# Active parameters below which a CPU's threads would wait for each other longer than they compute.
SMALL = 1_000_000


def agree(why):
    """Refuses in every process what one of them has a reason to refuse, so that no other waits for
    it. why: a sentence, or None."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    for reason in reasons:
        if reason is not None:
            raise Refusal(reason)


def are_finite(tensors):
    """Whether every number is finite, in all shards. One wait for the device."""
    # After an evaluation a parameter may still be gathered, and no DTensor.
    shards = [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]
    there = [t for t in shards if t.numel()]  # the largest of none is no number
    there = there or [shards[0].new_zeros(1)]
    largest = torch.stack(torch._foreach_norm(there, math.inf, dtype=torch.float32))
    bad = 1 - torch.isfinite(largest).all().int()
    dist.all_reduce(bad)
    return bad.item() == 0


def norm_of(parameters):
    """-> () float32, of the gradients of all shards. On the shards themselves: through DTensor the
    host takes milliseconds."""
    shards = [p.grad.to_local() for p in parameters]
    square = torch.stack(torch._foreach_norm(shards, 2.0, dtype=torch.float32)).square().sum()
    dist.all_reduce(square)
    return square.sqrt()


def clip(parameters, largest):
    """Scales gradients down to a norm. -> the norm before, ()."""
    norm = norm_of(parameters)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([p.grad.to_local() for p in parameters], factor)
    return norm


def start():
    """Joins torchrun's processes, or is a job of one. -> the mesh of all of them, device."""
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
    """One thread for a model of so few active parameters on a CPU, unless OMP_NUM_THREADS says how
    many. -> the threads of this process."""
    if device.type == "cpu" and active < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def report(why):
    """The sentence as what torchrun's own account of a process that failed ends with."""
    try:
        raise Refusal(why)
    except Refusal as error:
        get_error_handler().record_exception(error)


def leave(status):
    """Ends the process with it, as sys.exit does, but for what Python does at its end: a thread of
    gloo's may still hold the data of the last collective, and if it releases them meanwhile,
    torch aborts a process that has done all its work."""
    if not isinstance(status, int):  # the sentence of an error
        report(status)
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def expert_mesh(together, device):
    """-> the mesh of groups of processes, each with `together` that share the experts."""
    shape = dist.get_world_size() // together, together
    return init_device_mesh(device.type, shape, mesh_dim_names=("group", "experts"))


def groups(blocks):
    """Blocks that are gathered at once: as many as have plan.GROUP parameters together. One by one
    small ones would cost the host more time than their GEMMs cost the device."""
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
    """FSDP's own but for the place of gradients' shards: in memory of the stream that computes,
    where they take what activations give back. FSDP takes them from its own stream's, which nobody
    else may use from one backward pass to the next."""

    def allocate(self, size, *, dtype, device):
        # Deterministic algorithms fill what is empty with NaN, in the order of the stream it is of.
        if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
            return torch.empty(size, dtype=dtype, device=device)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            memory = torch.empty(size, dtype=dtype, device=device)
        # FSDP's stream may still add it to a shard when it is given back.
        memory.record_stream(torch.cuda.current_stream(device))
        return memory

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def shard(model, mesh, precision, keep_gathered=False, spread=None):
    """FSDP-2 over all processes, in groups of blocks: values, gradients and moments lie in shards.
    `keep_gathered`: the copies for computing stay from forward to backward (for how many of them,
    run.py says). `spread`: an `expert_mesh`, over whose groups each process' experts are sharded."""
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
