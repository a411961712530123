"""Scenarios of expert_parallel_worker.py: with FSDP-2, and distributed checkpoints."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, init_device_mesh

import module_support
import tilemoe
from comparison import LIMITS, assert_close
from expert_parallel_job import E, K, LOSSES, SHARED, d, full, n
from processes import on
from tilemoe import expert_parallel


def plain_layer():
    return module_support.make(
        seed=9, dtype=torch.float32, sizes=(d, n, E, K), bias=True, scoring="sigmoid",
        selection_bias=True,
    )  # fmt: skip


def meshes(job):
    """(dp, ep): of one and two ranks every one, of four the one that has several of both."""
    for ep in {1: (1,), 2: (1, 2), 4: (2,)}[job.world]:
        yield init_device_mesh(job.device, (job.world // ep, ep), mesh_dim_names=("dp", "ep"))


def sharded(spread, mesh, nested=True, **options):
    """The experts over what is left of the mesh for each of them, everything else over all ranks."""
    everyone = mesh._flatten("everyone")
    fully_shard(spread.experts, mesh=mesh["dp"], **options)
    if nested:
        fully_shard(spread.gate, mesh=everyone, **options)
    return fully_shard(spread, mesh=everyone, **options)


def optimizers_of(name, module):
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    }
    return kinds[name](module.parameters())


@on("cpu")
def fsdp(job):
    """Two steps of training on every mesh, gradients clipped over both of its meshes, as one process
    with all tokens makes them."""
    for mesh in meshes(job):
        for kind in ("sgd", "foreach"):
            counts = [10] * job.world
            whole, spread = job.make(torch.float32, mesh=mesh["ep"], bias=True, **SHARED, **LOSSES)
            sharded(spread, mesh, nested=kind != "sgd")
            assert all(isinstance(p, DTensor) for p in spread.parameters())
            both = [optimizers_of(kind, layer) for layer in (spread, whole)]
            for seed in (1, 2):
                x, dO, own = job.batch(counts, torch.float32, seed)
                # The ranks' losses are means of their own tokens; training takes the ranks' mean.
                out, aux = spread(x[own])
                ((out * dO[own]).sum() / counts[0] + aux.loss).backward()
                of_groups(whole, x, dO, counts, mesh)
                for name, p in spread.named_parameters():
                    got, want = full(p.grad), whole.get_parameter(name).grad
                    limits = LIMITS[torch.float32]._replace(whole=1e-4, row=1e-2)
                    assert_close(got, want.double(), f"{mesh} {kind} {seed} d{name}", limits)
                norm = expert_parallel.clip_grad_norm_(spread.parameters(), 0.1)
                want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
                assert abs(norm - want) <= 1e-5 * want and want > 0.2, (norm, want)
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            for name, p in spread.named_parameters():
                limits = LIMITS[torch.float32]._replace(whole=3e-3, row=0.1)
                assert_close(full(p), whole.get_parameter(name).detach().double(), name, limits)


def of_groups(whole, x, dO, counts, mesh):
    """Gradients of one process: the mean over the ranks of their losses, the balance loss being that
    of each group of ranks that share the experts."""
    ep, world = mesh["ep"].size(), len(counts)
    size = sum(counts[:ep])
    objective = 0
    for first in range(0, sum(counts), size):
        out, aux = whole(x[first : first + size])
        objective = objective + (out * dO[first : first + size]).sum() / counts[0] + aux.loss * ep
    (objective / world).backward()


def fsdp_mixed_precision(job):
    """Gathered in bfloat16, reduced in float32, as a bfloat16 layer computes it."""
    for mesh in meshes(job):
        counts = [10] * job.world
        options = dict(router_dtype=torch.float32, expert_gradients="mean", **LOSSES)
        whole, spread = job.make(torch.float32, mesh=mesh["ep"], **options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded(spread, mesh, nested=False, mp_policy=policy)
        low = copy.deepcopy(whole).to(torch.bfloat16)
        x, dO, own = job.batch(counts, torch.bfloat16)
        out, aux = spread(x[own])
        assert out.dtype == torch.bfloat16
        ((out * dO[own]).sum(dtype=torch.float32) / counts[0] + aux.loss).backward()
        of_groups(low, x, dO, counts, mesh)
        for name, p in spread.named_parameters():
            assert p.dtype == p.grad.dtype == torch.float32
            limits = LIMITS[torch.bfloat16]._replace(whole=3e-2, row=0.5, smallest=0.3)
            assert_close(full(p.grad), low.get_parameter(name).grad.double(), name, limits)


@on("cpu")
def gradients_that_somebody_else_divides(job):
    """expert_gradients="sum", and fully_shard set to divide by all ranks: the same gradients."""
    for mesh in meshes(job):
        counts = [10] * job.world
        whole, spread = job.make(torch.float32, mesh=mesh["ep"], expert_gradients="sum")
        sharded(spread, mesh)
        # gloo knows no other reduction; torch 2.15 would divide twice where no rank shares a part.
        spread.experts.set_force_sum_reduction_for_comms(mesh["dp"].size() > 1)
        spread.experts.set_gradient_divide_factor(job.world)
        x, dO, own = job.batch(counts, torch.float32)
        (spread(x[own])[0] * dO[own]).sum().backward()
        (whole(x)[0] * dO).sum().div(job.world).backward()
        for name, p in spread.named_parameters():
            limits = LIMITS[torch.float32]._replace(whole=1e-5, row=1e-3)
            assert_close(full(p.grad), whole.get_parameter(name).grad.double(), name, limits)


def distributed_checkpoint(job):
    """Saved by the last mesh, experts over ranks and each over the rest of them; loaded by every mesh,
    and by the test in one process. Names and shapes are those of the whole layer."""
    whole = plain_layer().to(job.device)
    if job.rank == 0:
        torch.save(whole.state_dict(), job.folder / "whole.pt")
    options = dict(bias=True, scoring="sigmoid", selection_bias=True)
    options |= dict(device=job.device, dtype=torch.float32)
    full_state = StateDictOptions(full_state_dict=True)
    every = list(meshes(job))
    for mesh in [every[-1], *every]:
        spread = tilemoe.MoE(d, n, E, K, return_aux=True, expert_mesh=mesh["ep"], **options)
        assert {k: v.shape for k, v in spread.state_dict().items()} == {
            k: v.shape for k, v in whole.state_dict().items()
        }
        if not (job.folder / "checkpoint").exists():
            dist.barrier()
            set_model_state_dict(spread, whole.state_dict(), options=full_state)
            sharded(spread, mesh)
            dcp.save(spread.state_dict(), checkpoint_id=job.folder / "checkpoint")
        else:
            sharded(spread, mesh)
            state = spread.state_dict()
            dcp.load(state, checkpoint_id=job.folder / "checkpoint")
            spread.load_state_dict(state)
        module_support.same_bits(
            {k: full(t) for k, t in spread.state_dict().items()}, whole.state_dict()
        )
        dist.barrier()


def checkpoint_of_two_ranks_by_four(job):
    """And that of four ranks by one process, which is the test's."""
    whole = plain_layer()
    options = dict(bias=True, scoring="sigmoid", selection_bias=True, return_aux=True)
    two = DeviceMesh(job.device, [0, 1], mesh_dim_names=("ep",))
    if job.rank < 2:
        spread = tilemoe.MoE(d, n, E, K, expert_mesh=two, **options)
        state = StateDictOptions(full_state_dict=True)
        set_model_state_dict(spread, whole.state_dict(), options=state)
        saved = dict(checkpoint_id=job.folder / "of_two", process_group=two.get_group())
        dcp.save(spread.state_dict(), **saved)
    dist.barrier()
    spread = tilemoe.MoE(d, n, E, K, expert_mesh=job.mesh, **options)
    state = spread.state_dict()
    dcp.load(state, checkpoint_id=job.folder / "of_two")
    spread.load_state_dict(state)
    assert spread.experts.down_proj.to_local().shape[0] == E // 4
    module_support.same_bits({k: full(t) for k, t in spread.state_dict().items()}, whole.state_dict())
    dcp.save(spread.state_dict(), checkpoint_id=job.folder / "of_four")
