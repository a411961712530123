"""Two processes, gloo: TileMoE's region of routed experts around torchtitan's dispatchers, compared
with torchtitan's own that has all experts. Each process runs every scenario and writes
FOLDER/RANK.json."""

import sys
import types
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher, DeepEPTokenDispatcher, HybridEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)  # fmt: skip

import tilemoe.torchtitan
import torchtitan_stand_ins
from processes import expect, main_of

D, N, E, K, T = 24, 16, 6, 2, 13
ALL_TO_ALL = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K)
SIZES = dict(num_experts=E, top_k=K, hidden_dim=D, num_max_tokens_per_rank=T)


class Job:
    def __init__(self, rank, world, folder, device):
        self.rank, self.world = rank, world
        self.mesh = init_device_mesh(device, (1, world), mesh_dim_names=("efsdp", "ep"))
        torchtitan_stand_ins.install()


def region(job, ours=True, dispatcher=ALL_TO_ALL, whole=False, sharded=False, **options):
    """-> RoutedExperts, with this rank's experts or with all, of equal values."""
    cfg = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(
            dim=D, hidden_dim=N, num_experts=E if whole else E // job.world
        ),
        token_dispatcher=dispatcher,
    )
    module = (tilemoe.torchtitan.routed_experts(cfg, **options) if ours else cfg).build()
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        every = torch.randn(E, *p.shape[1:], generator=generator) * p.shape[-1] ** -0.5
        p.data = (every if whole else own_of(job, every)).bfloat16().float()
    mesh = None if whole else job.mesh["ep"]
    module.parallelize(types.SimpleNamespace(get_optional_mesh=lambda name: mesh))
    if sharded:  # as torchtitan has it: the experts separately, gathered when they are called
        fully_shard(module.inner_experts, mesh=job.mesh["efsdp"])
    return module


def own_of(job, every):
    size = E // job.world
    return every[job.rank * size :][:size]


def step(job, module, last=False):
    """This rank's tokens -> out, dx, dscores and the gradients of its experts. last: all tokens
    choose the last rank's experts."""
    generator = torch.Generator().manual_seed(1 + job.rank)
    x, dO = torch.randn(2, 1, T, D, generator=generator).bfloat16().unbind()
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


def is_torchtitans(job, dispatcher, rounds=(False, True), **options):
    """To rounding in bfloat16, on every rank; experts have the gradients of all ranks' tokens. In
    the second of two rounds a rank has no token to compute."""
    for last in rounds:
        theirs = step(job, region(job, ours=False, whole=True), last)
        for i in range(3, len(theirs)):
            dist.all_reduce(theirs[i])
            theirs[i] = own_of(job, theirs[i])
        for is_sharded in (False, True):
            module = region(job, dispatcher=dispatcher, sharded=is_sharded, **options)
            ours = step(job, module, last)
            for got, want in zip(ours, theirs, strict=True):
                assert got.shape == want.shape and got.dtype == want.dtype
                got, want = got.float(), want.float()
                error = (got - want).norm() / max(want.norm(), 1e-9)  # of experts without a token 0
                assert error <= 2e-2, (is_sharded, last, want.shape, error)
            assert ours[0].norm() > 1


def kept(job, module):
    """Shapes of what forward keeps, each of the region's rows and pairs by D or by N."""
    shapes = []
    pack = lambda t: (shapes.append(tuple(t.shape)), t)[1]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step(job, module)
    return [shape for shape in shapes if len(shape) == 2 and shape[1] in (D, N, 2 * N)]


# ---------------------------------------------------------------- scenarios


def all_to_all_is_ours(job):
    is_torchtitans(job, ALL_TO_ALL)


def past_its_places_it_is_nan(job):
    """As many as any routing needs by default: all tokens with the last rank's experts."""
    out = step(job, region(job, capacity_factor=1.5), last=True)[0]
    assert out.isnan().all()
    assert step(job, region(job), last=True)[0].isfinite().all()


def _received(job):
    """Tokens that this rank's experts get, and pairs."""
    tokens = pairs = 0
    for rank in range(job.world):
        generator = torch.Generator().manual_seed(1 + rank)
        torch.randn(2, 1, T, D, generator=generator)
        ids = torch.rand(1, T, E, generator=generator).argsort(-1)[0, :, :K]
        here = ids // (E // job.world) == job.rank
        tokens, pairs = tokens + int(here.any(1).sum()), pairs + int(here.sum())
    assert tokens < pairs
    return tokens, pairs


def deepep_brings_tokens(job):
    """By a stand-in of its buffer. The received rows, once a token, and H are all that is kept."""
    dispatcher = DeepEPTokenDispatcher.Config(**SIZES)
    is_torchtitans(job, dispatcher)
    tokens, pairs = _received(job)
    assert sorted(kept(job, region(job, dispatcher=dispatcher))) == [(tokens, D), (pairs, 2 * N)]
    theirs = kept(job, region(job, ours=False, dispatcher=dispatcher))
    assert theirs.count((pairs, D)) >= 2 and theirs.count((pairs, N)) >= 2
    module = region(job, dispatcher=dispatcher)
    x = torch.zeros(1, T + 1, D, dtype=torch.bfloat16)
    ids = torch.zeros(1, T + 1, K, dtype=torch.int64)
    call = lambda: module(x, ids.float(), ids, None)  # noqa: E731
    expect(f"DeepEP's buffer was allocated for {T} tokens, but the call has {T + 1}", call)


def deepep_where_a_token_has_more_experts_than_a_rank(job):
    with mock.patch.dict(globals(), E=2):
        dispatcher = DeepEPTokenDispatcher.Config(**(SIZES | dict(num_experts=2)))
        is_torchtitans(job, dispatcher, rounds=[False])


def deepeps_static_form_stays(job):
    """In inference only; the stand-in raises an error, which shows that it is called."""
    module = region(job, dispatcher=DeepEPTokenDispatcher.Config(**SIZES, cudagraphable=True))
    want = step(job, region(job, dispatcher=DeepEPTokenDispatcher.Config(**SIZES)))
    for got, one in zip(step(job, module), want, strict=True):
        assert torch.equal(got, one)
    ids = torch.zeros(1, T, K, dtype=torch.int64)
    with torch.no_grad():
        try:
            module(torch.zeros(1, T, D, dtype=torch.bfloat16), ids.float(), ids, None)
        except AssertionError:
            return
    raise AssertionError("the compact form was called")


def hybridep_brings_tokens(job):
    """The same, by its dispatch without a permutation."""
    from torchtitan.distributed.deepep import hybridep

    dispatcher = HybridEPTokenDispatcher.Config(**SIZES)
    is_torchtitans(job, dispatcher)
    assert set(hybridep._buffer.calls) == {"dispatch", "combine"}
    tokens, pairs = _received(job)
    assert sorted(kept(job, region(job, dispatcher=dispatcher))) == [(tokens, D), (pairs, 2 * N)]


def hybridep_that_does_not_wait_brings_pairs(job):
    """Rows of pairs, as many as there can be, scored in the experts: their results are not kept."""
    from torchtitan.distributed.deepep import hybridep

    dispatcher = HybridEPTokenDispatcher.Config(**SIZES, non_blocking_capacity_factor=1.0)
    region(job, dispatcher=dispatcher)
    hybridep._buffer.calls.clear()
    is_torchtitans(job, dispatcher)
    calls = {"dispatch_with_permute", "combine_with_unpermute"}
    assert set(hybridep._buffer.calls) == calls
    places = T * job.world * K
    assert sorted(kept(job, region(job, dispatcher=dispatcher))) == [(places, D), (places, 2 * N)]


def minimal_async_ep_is_ours(job):
    """TileMoE replaces it if K is at least the number of ranks, or if rows go only to the ranks of
    their experts; otherwise it stays, with its buffer."""
    own = dict(dtype=torch.bfloat16, device=torch.device("cpu"))
    is_torchtitans(job, MinimalAsyncEPTokenDispatcher.Config(**SIZES, **own))
    fewer = MinimalAsyncEPTokenDispatcher.Config(**(SIZES | dict(top_k=1)), **own)
    with mock.patch.object(token_dispatcher, "minimal_async_ep_init_buffer") as init_buffer:
        module = region(job, dispatcher=fewer)
    assert type(module.token_dispatcher) is MinimalAsyncEPTokenDispatcher
    init_buffer.assert_called_once()
    is_torchtitans(job, fewer, dispatch="pull")


SCENARIOS = {
    all_to_all_is_ours: (2,),
    past_its_places_it_is_nan: (2,),
    deepep_brings_tokens: (2,),
    deepep_where_a_token_has_more_experts_than_a_rank: (2,),
    deepeps_static_form_stays: (2,),
    minimal_async_ep_is_ours: (2,),
}
OF_HYBRIDEP = {hybridep_brings_tokens: (2,), hybridep_that_does_not_wait_brings_pairs: (2,)}
if torchtitan_stand_ins.HAS_HYBRIDEP:
    SCENARIOS |= OF_HYBRIDEP


if __name__ == "__main__":
    sys.exit(main_of(__file__, __doc__, SCENARIOS, Job))
