"""Train a MoE layer with experts on several processes: tilemoe.MoE(expert_mesh=) and FSDP-2.

    torchrun --nproc-per-node 4 examples/expert_parallel.py

Two processes share the experts; FSDP-2 shards each expert over the others, and everything else over
all. The program runs on GPUs if the machine has enough of them, else on the CPU.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilemoe
from tilemoe import expert_parallel

d, n, E, K, T, STEPS = 64, 32, 8, 2, 512, 40  # T: tokens of a process in a step


def main():
    world, local = dist_sizes()
    on_gpus = torch.cuda.device_count() >= world
    device = f"cuda:{local}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    ep = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(device.split(":")[0], (world // ep, ep), mesh_dim_names=("dp", "ep"))

    dtype = torch.bfloat16 if on_gpus else torch.float32
    torch.manual_seed(0)  # the same on every process: the experts belong to one layer
    layer = tilemoe.MoE(
        d, n, E, K, balance_coefficient=0.01, return_aux=True, expert_mesh=mesh["ep"],
        device=device, dtype=dtype,
    )  # fmt: skip
    target = torch.randn(d, d, device=device, dtype=dtype)  # the function to learn
    fully_shard(layer.experts, mesh=mesh["dp"])
    fully_shard(layer, mesh=mesh._flatten("all"))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())  # each process has different tokens
    for step in range(STEPS):
        x = torch.randn(T, d, device=device, dtype=dtype)
        out, aux = layer(x)
        loss = (out - torch.tanh(x @ target / 8)).float().square().mean()
        (loss + aux.loss).backward()
        expert_parallel.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, STEPS - 1):
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item() / world:.4f}")
    dist.destroy_process_group()
    sys.stdout.flush()
    # Exit without Python's own shutdown: a thread of gloo may still release the data of the last
    # collective, and torch would then abort this process.
    os._exit(0)


def dist_sizes():
    return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


if __name__ == "__main__":
    main()
