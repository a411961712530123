"""Two processes that hold parts of a batch, a module or both, compared with one that holds all:

    python distributed_worker.py --device cuda      on two GPUs, NCCL, bfloat16
    python distributed_worker.py                    as distributed_test.py does: CPU, gloo, float32

Each process runs every scenario and writes FOLDER/RANK.json: {scenario: "" or the traceback}.
"""

import copy
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from comparison import LIMITS, assert_close
import module_support
from processes import expect, main_of
from tilemoe.distributed.dtensor import local_bfloat16

SHAPE = (4, 11)  # the whole batch: two sequences for each of two ranks


class Job:
    def __init__(self, rank, world, folder, device, dtype=None):
        self.rank, self.world, self.folder = rank, world, folder
        dtype = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
        self.device, self.dtype = device, dtype
        self.mesh = init_device_mesh(device, (world,))
        # For a gradient that ranks have averaged; one rank's own errors are no larger.
        self.limits = LIMITS[dtype]

    def make(self, dtype=None, **options):
        return module_support.make(dtype=dtype or self.dtype, **options).to(self.device)

    def batch(self, seed=1, dtype=None):
        tensors = module_support.batch(seed, dtype or self.dtype, SHAPE)
        return [t.detach().to(self.device).requires_grad_(t.requires_grad) for t in tensors]

    def mine(self, tensor):
        """This rank's sequences of a whole batch."""
        return tensor.detach().chunk(self.world)[self.rank].clone()


def whole(moe, x, dO, world):
    """One process, the whole batch -> out, {name: gradient of <out, dO> / world + loss}. What data
    parallel ranks average is the same, as the z loss is a mean over tokens."""
    out, aux = moe(x)
    objective = (out * dO).sum(dtype=torch.float32) / world + aux.loss
    names, parameters = zip(*moe.named_parameters())
    return out.detach(), dict(zip(names, torch.autograd.grad(objective, parameters)))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(called, x, dO):
    """Forward and backward of a rank's share, as a training loop does it -> out."""
    out, aux = called(x)
    ((out * dO).sum(dtype=torch.float32) + aux.loss).backward()
    return out.detach()


def compare_gradients(module, want, limits):
    got = {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name in want:
        assert_close(full(got[name]), want[name].double(), name, limits)


# ---------------------------------------------------------------- scenarios


def ddp(job):
    moe = job.make(bias=True, z_coefficient=0.1)
    x, dO = job.batch()
    want_out, want = whole(moe, x, dO, job.world)
    wrapped = DistributedDataParallel(moe)
    out = step(wrapped, job.mine(x), job.mine(dO))
    assert_close(out, job.mine(want_out).double(), "out")
    compare_gradients(wrapped, want, job.limits)


def fsdp(job, nested=False, recompute=False, **options):
    """Two steps of SGD, so that the second gathers what the first updated."""
    moe = job.make(bias=True, z_coefficient=0.1, **options)
    one = copy.deepcopy(moe)
    if nested:
        fully_shard(moe.experts, mesh=job.mesh)
        fully_shard(moe.gate, mesh=job.mesh)
        if moe.shared_experts is not None:
            fully_shard(moe.shared_experts, mesh=job.mesh)
    fully_shard(moe, mesh=job.mesh)
    assert all(isinstance(p, DTensor) for p in moe.parameters())
    called = (lambda x: checkpoint(moe, x, use_reentrant=False)) if recompute else moe
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (moe, one)]
    for seed in (1, 2):
        x, dO = job.batch(seed)
        want_out, want = whole(one, x, dO, job.world)
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = step(called, job.mine(x), job.mine(dO))
        assert_close(out, job.mine(want_out).double(), "out")
        compare_gradients(moe, want, job.limits)
        for name, p in one.named_parameters():
            p.grad = want[name]
        for optimizer in optimizers:
            optimizer.step()


SHARED = dict(shared_intermediate_size=16, shared_expert_gate=True, router_bias=True)


def fsdp_selection_bias(job):
    """The counts are summed over the ranks before the bias is updated: all ranks keep one bias."""
    options = dict(scoring="sigmoid_renormalized", selection_bias=True)
    moe = fully_shard(job.make(**options), mesh=job.mesh)
    one = job.make(**options)
    x, _ = job.batch()
    _, aux = moe(job.mine(x))
    counts = aux.expert_counts.clone()
    dist.all_reduce(counts)
    _, want = one(x)
    assert torch.equal(counts, want.expert_counts)
    moe.update_selection_bias(counts)
    one.update_selection_bias(want.expert_counts)
    assert torch.equal(moe.gate.e_score_correction_bias, one.gate.e_score_correction_bias)


def fsdp_mixed_precision(job, **options):
    """Gathered in bfloat16, reduced in float32: as a bfloat16 module computes it."""
    moe = job.make(torch.float32, z_coefficient=0.1, **options)
    low = copy.deepcopy(moe).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(moe, mesh=job.mesh, mp_policy=policy)
    x, dO = job.batch(dtype=torch.float32)
    dO = dO.to(torch.bfloat16)
    want_out, want = whole(low, x.to(torch.bfloat16), dO, job.world)
    out = step(moe, job.mine(x), job.mine(dO))
    assert out.dtype == torch.bfloat16
    assert_close(out, job.mine(want_out).double(), "out")
    for p in moe.parameters():
        assert p.dtype == p.grad.dtype == torch.float32
    compare_gradients(moe, want, LIMITS[torch.bfloat16])


def dtensor(job, **options):
    """Parameters spread over the ranks in every way, tokens spread or the same on all ranks."""
    for x_placement in (Shard(0), Shard(1), Replicate()):
        for parameter_placement in (Replicate(), Shard(0), Shard(1)):
            moe = job.make(bias=True, z_coefficient=0.1, **options)
            x, dO = job.batch()
            want_out, want = whole(moe, x, dO, 1)
            for module in list(moe.modules()):
                for name, p in list(module.named_parameters(recurse=False)):
                    along = Shard(0) if p.ndim == 1 else parameter_placement
                    spread = distribute_tensor(p.detach(), job.mesh, [along])
                    setattr(module, name, torch.nn.Parameter(spread))
            x = distribute_tensor(x.detach(), job.mesh, [x_placement]).requires_grad_()
            out, aux = moe(x)
            assert out.placements == x.placements and out.shape == x.shape
            if x_placement != Shard(1):  # 11 over 2: means of unequal parts are not the mean
                ((out * distribute_tensor(dO, job.mesh, [x_placement])).sum() + aux.loss).backward()
                compare_gradients(moe, want, job.limits)
                assert x.grad.placements == x.placements
            assert_close(out.full_tensor(), want_out.double(), "out")
            pairs = SHAPE[0] * SHAPE[1] * moe.K
            assert aux.expert_counts.full_tensor().sum() == pairs


def dtensor_ids(job):
    """Experts that were chosen elsewhere lie as the tokens do."""
    moe = job.make(scoring="sigmoid_renormalized", z_coefficient=0.1)
    x, dO = (t.detach() for t in job.batch())
    g = torch.Generator().manual_seed(7)
    ids = torch.rand(*SHAPE, moe.E, generator=g).argsort(-1)[..., : moe.K].to(job.device)
    want_out, want_aux = moe(x, ids=ids)
    for placement in (Shard(0), Replicate()):
        spread = [distribute_tensor(t, job.mesh, [placement]) for t in (x, ids)]
        out, aux = moe(spread[0], ids=spread[1])
        assert_close(out.full_tensor(), want_out.double(), "out")
        assert torch.equal(aux.expert_counts.full_tensor(), want_aux.expert_counts)
        for got, want in zip(aux[-2:], (ids.int(), want_aux.scores)):  # ids and scores
            assert got.placements == out.placements and torch.equal(got.full_tensor(), want)
        expect("ids must be a DTensor with x's placements", lambda: moe(spread[0], ids=ids))
    expect("ids is a DTensor, but x is not", lambda: moe(x, ids=spread[1]))


def dtensor_token_mask(job):
    """So does which of them are padding."""
    moe = job.make()
    x, _ = (t.detach() for t in job.batch())
    mask = (torch.arange(SHAPE[0] * SHAPE[1], device=job.device) % 3 > 0).reshape(SHAPE)
    want_out, want_aux = moe(x, token_mask=mask)
    for placement in (Shard(0), Replicate()):
        spread = [distribute_tensor(t, job.mesh, [placement]) for t in (x, mask)]
        out, aux = moe(spread[0], token_mask=spread[1])
        assert_close(out.full_tensor(), want_out.double(), "out")
        assert torch.equal(aux.expert_counts.full_tensor(), want_aux.expert_counts)
        assert aux.without.full_tensor() == 0
        expect("token_mask must be a DTensor with x's placements", lambda: moe(spread[0], token_mask=mask))
    expect("token_mask is a DTensor, but x is not", lambda: moe(x, token_mask=spread[1]))


def dtensor_refusals(job):
    moe = job.make()
    x, _ = job.batch()
    x = x.detach()
    expect("all 32 values of a token must be on one rank", lambda: moe(distribute_tensor(x, job.mesh, [Shard(2)])))
    weight = moe.gate.weight.detach()
    moe.gate.weight = torch.nn.Parameter(distribute_tensor(weight, job.mesh, [Replicate()]))
    expect("gate.weight is a DTensor, but x is not", lambda: moe(x))


def local_part(job):
    """The tensors of torchtitan's experts under expert parallelism."""
    weight = torch.arange(32.0, device=job.device).reshape(4, 8).requires_grad_()
    spread = distribute_tensor(weight.detach(), job.mesh, [Shard(0)]).requires_grad_()
    for parameter, want in (weight, weight), (spread, weight.chunk(job.world)[job.rank]):
        got = local_bfloat16(parameter)
        assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())
        got.sum().backward()
        assert torch.equal(full(parameter.grad), torch.ones_like(weight))


def distributed_checkpoint(job):
    """Saved by two, sharded: the test loads it in one process and compares with whole.pt."""
    moe = job.make(bias=True, scoring="sigmoid", selection_bias=True)
    if job.rank == 0:
        torch.save(moe.state_dict(), job.folder / "whole.pt")
    fully_shard(moe, mesh=job.mesh)
    dcp.save(moe.state_dict(), checkpoint_id=job.folder / "checkpoint")
    other = job.make(seed=9, bias=True, scoring="sigmoid", selection_bias=True)
    fully_shard(other, mesh=job.mesh)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=job.folder / "checkpoint")
    other.load_state_dict(state)
    for name, t in moe.state_dict().items():
        assert torch.equal(full(t), full(other.state_dict()[name])), name


def named(name, scenario, **options):
    def call(job):
        scenario(job, **options)

    call.__name__ = name
    return call


FLOAT32 = dict(router_dtype=torch.float32)
SCENARIOS = dict.fromkeys(
    (
        ddp, fsdp, fsdp_selection_bias, fsdp_mixed_precision, dtensor, dtensor_ids,
        dtensor_token_mask, dtensor_refusals, local_part, distributed_checkpoint,
        named("fsdp_nested", fsdp, nested=True),
        named("fsdp_recomputed", fsdp, recompute=True),
        named("fsdp_shared", fsdp, **SHARED),
        named("fsdp_shared_nested", fsdp, nested=True, **SHARED),
        named("fsdp_mixed_precision_float32_router", fsdp_mixed_precision, **FLOAT32),
        named("fsdp_mixed_precision_shared", fsdp_mixed_precision, **FLOAT32, **SHARED),
        named("dtensor_shared", dtensor, **SHARED),
    ),
    {2},  # the numbers of processes
)  # fmt: skip


if __name__ == "__main__":
    dtypes = ["float32", "bfloat16", "float16"]
    sys.exit(main_of(__file__, __doc__, SCENARIOS, Job, dtype={"choices": dtypes}))
