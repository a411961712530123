"""Two processes, gloo: TileMoE's region of routed experts where torchtitan has its all-to-all,
compared with torchtitan's own that has all experts. Each process runs every scenario and writes
FOLDER/RANK.json."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

import tilemoe.torchtitan
from processes import main_of

D, N, E, K, T = 24, 16, 6, 2, 13


class Job:
    def __init__(self, rank, world, folder, device):
        self.rank, self.world = rank, world
        self.mesh = init_device_mesh(device, (1, world), mesh_dim_names=("efsdp", "ep"))


def region(job, ours, sharded=False, **options):
    """-> RoutedExperts: ours with this rank's experts, torchtitan's with all, of equal values."""
    experts = E // job.world if ours else E
    cfg = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=N, num_experts=experts),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=E, top_k=K),
    )
    module = (tilemoe.torchtitan.routed_experts(cfg, **options) if ours else cfg).build()
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        whole = torch.randn(E, *p.shape[1:], generator=generator) * p.shape[-1] ** -0.5
        p.data = own_of(job, whole, ours).bfloat16().float()
    module.token_dispatcher.wire_meshes(ep_mesh=job.mesh["ep"] if ours else None)
    if sharded:  # as torchtitan has it: the experts by themselves, gathered where they are called
        fully_shard(module.inner_experts, mesh=job.mesh["efsdp"])
    return module


def own_of(job, whole, ours):
    size = E // job.world
    return whole[job.rank * size :][:size] if ours else whole


def step(job, module, last=False):
    """This rank's tokens -> out, dx, dscores and the gradients of its experts. last: all tokens
    choose the last rank's experts."""
    generator = torch.Generator().manual_seed(1 + job.rank)
    x, dO = torch.randn(2, 1, T, D, generator=generator).unbind()
    ids = torch.rand(1, T, E, generator=generator).argsort(-1)[..., :K]
    if last:
        own = E // job.world
        ids = torch.rand(1, T, own, generator=generator).argsort(-1)[..., :K] + own * (job.world - 1)
    ids = ids.contiguous()
    scores = torch.rand(1, T, K, generator=generator)
    leaves = x.requires_grad_(), scores.requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=E)
    out = module(*leaves, ids, counts)
    out.backward(dO)
    of_parameters = (p.grad for p in module.parameters())
    grads = [g.to_local() if hasattr(g, "to_local") else g for g in of_parameters]
    return [out.detach(), *(t.grad for t in leaves), *grads]


def all_to_all_is_ours(job):
    """To rounding in bfloat16, on every rank; experts have the gradients of all ranks' tokens."""
    for sharded in (False, True):
        for last in (False, True):
            theirs = step(job, region(job, False), last)
            for i in range(3, len(theirs)):
                dist.all_reduce(theirs[i])
                theirs[i] = own_of(job, theirs[i], True)
            ours = step(job, region(job, True, sharded), last)
            for got, want in zip(ours, theirs, strict=True):
                assert got.shape == want.shape and got.dtype == want.dtype
                error = (got - want).norm() / max(want.norm(), 1e-9)  # of experts without a token 0
                assert error <= 2e-2, (sharded, last, want.shape, error)
            assert ours[0].norm() > 1


def past_its_places_it_is_nan(job):
    """As many as every routing takes unless told: all tokens with the last rank's experts."""
    out = step(job, region(job, True, False, capacity_factor=1.5), last=True)[0]
    assert out.isnan().all()
    assert step(job, region(job, True, False), last=True)[0].isfinite().all()


SCENARIOS = {all_to_all_is_ours: (2,), past_its_places_it_is_nan: (2,)}


if __name__ == "__main__":
    sys.exit(main_of(__file__, __doc__, SCENARIOS, Job))
