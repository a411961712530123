"""Processes whose ranks have their own tokens and their part of the experts, compared with one
process that has all of both:

    python expert_parallel_worker.py --device cuda --world 2     on GPUs, NCCL, 16 bits
    ... --device cuda --only a_killed --dispatch pull            how a dead rank ends those that pull
    python expert_parallel_worker.py --world 4                   as expert_parallel_test.py does: gloo

Each process runs every scenario of its number of ranks and writes FOLDER/RANK.json.
"""

import contextlib
import copy
import datetime
import faulthandler
import functools
import itertools
import json
import math
import os
import signal
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint

import module_support
import reference
import tilemoe
from comparison import LIMITS, assert_close, errors
from peak_memory_test import allocations, live_sums
from processes import ENDS, TIMEOUT_S, expect, main_of, on
from stored import rounded
from tilemoe import expert_parallel
from tilemoe._pull import PulledRows
from tilemoe.routing import at_most_experts

d, n, E, K = 32, 24, 8, 3


class Job:
    def __init__(self, rank, world, folder, device, dispatch="all_gather"):
        self.dispatch = dispatch  # of a scenario that processes do not outlive
        self.rank, self.world, self.folder, self.device = rank, world, folder, device
        self.mesh = init_device_mesh(device, (world,), mesh_dim_names=("ep",))
        self.group = self.mesh.get_group()
        self.dtypes = [torch.bfloat16] + [torch.float32] * (device == "cpu")
        self.dtype = self.dtypes[-1]  # of a layer whose test is of something else

    def tell(self, scenario, result=""):
        """Writes the result of a process that will not."""
        file = self.folder / f"{self.rank}.json"
        results = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(results | {scenario: result}))

    def make(self, dtype, seed=0, mesh=None, **options):
        """The whole layer, and the same with its experts spread over a mesh."""
        whole = module_support.make(seed, dtype=dtype, sizes=(d, n, E, K), **options).to(self.device)
        torch.manual_seed(1)
        mesh = self.mesh if mesh is None else mesh
        options |= dict(expert_mesh=mesh, device=self.device)
        options.setdefault("capacity_factor", None)
        spread = tilemoe.MoE(d, n, E, K, return_aux=True, dtype=dtype, **options)
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(spread, whole.state_dict(), options=full)
        return whole, spread

    def batch(self, counts, dtype, seed=1):
        """x, dO of the tokens of all ranks (sum of counts, d); this rank's slice of them."""
        x, dO = module_support.batch(seed, dtype, (sum(counts),), width=d)
        first = sum(counts[: self.rank])
        own = slice(first, first + counts[self.rank])
        return x.detach().to(self.device), dO.to(self.device), own


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean(tensor):
    """What data parallel training makes of the ranks' gradients of a parameter that each has."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def step(moe, x, dO, factor=1.0, **arguments):
    """-> out, aux, {name: gradient of <out, dO> * factor + loss}, x's among them."""
    x = x.detach().clone().requires_grad_()
    out, aux = moe(x, **arguments)
    parameters = dict(moe.named_parameters())
    objective = (out * dO).sum(dtype=torch.float32) * factor + aux.loss
    gradients = torch.autograd.grad(objective, [*parameters.values(), x])
    return out.detach(), aux, dict(zip([*parameters, "x"], gradients))


def compare(job, whole, spread, counts, dtype, batch_seed=1, limits=None, **arguments):
    """One process with all tokens, and the ranks with theirs: outputs, counts and every gradient of
    the mean of the ranks' objectives. Ranks' partial sums are rounded once more."""
    x, dO, own = job.batch(counts, dtype, batch_seed)
    limits = limits or LIMITS[dtype]
    whole_ids = {k: v for k, v in arguments.items() if k != "ids"}
    own_ids = dict(whole_ids)
    if "ids" in arguments:
        whole_ids["ids"] = arguments["ids"]
        own_ids["ids"] = arguments["ids"][own]
    want_out, want_aux, want = step(whole, x, dO, 1 / job.world, **whole_ids)
    out, aux, got = step(spread, x[own], dO[own], **own_ids)
    assert_close(out, want_out[own].double(), "out", limits)
    assert_close(got.pop("x"), want.pop("x")[own].double() * job.world, "dx", limits)
    for name, gradient in got.items():
        of_experts = name.startswith("experts.")
        assert isinstance(gradient, DTensor) == of_experts, name
        gradient = full(gradient) if of_experts else mean(gradient)
        assert_close(gradient, want[name].double(), f"d{name}", limits)
    for name in ("balance", "z"):
        assert_close(getattr(aux, name), getattr(want_aux, name).double(), name)
    for name in ("expert_counts", "dropped", "added", "without"):
        total = getattr(aux, name).clone()
        dist.all_reduce(total)
        assert torch.equal(total, getattr(want_aux, name)), (name, total, getattr(want_aux, name))
    assert aux.overflow == 0
    return out, got


def limits_of(dtype):
    """Where ranks' partial sums are rounded once more."""
    limits = LIMITS[dtype]
    if dtype == torch.float32:
        return limits
    return limits._replace(whole=2 * limits.whole, row=0.3, smallest=0.3)


# ---------------------------------------------------------------- scenarios


LOSSES = dict(balance_coefficient=0.3, z_coefficient=0.1)
SHARED = dict(shared_intermediate_size=16, shared_expert_gate=True)


def layouts(world):
    """Tokens of each rank: the same, uneven, none on one rank, all on one."""
    even, uneven = [13] * world, [11 + 5 * r for r in range(world)]
    return {"even": even, "uneven": uneven, "an empty rank": [0] + uneven[1:],
            "all on the last": [0] * (world - 1) + [29]}  # fmt: skip


def module_equals_one_process(job):
    for dtype in job.dtypes:
        for options in ({}, dict(bias=True, scoring="sigmoid", selection_bias=True, **SHARED),
                        dict(scoring="softmax_over_all", keep_gathered=True, router_bias=True),
                        dict(chunks=3, bias=True, **SHARED),
                        dict(dispatch="pull", bias=True, **SHARED)):  # fmt: skip
            whole, spread = job.make(dtype, **options, **LOSSES)
            for counts in layouts(job.world).values():
                spread.rank_tokens = counts
                limits = LIMITS[dtype]._replace(whole=2 * LIMITS[dtype].whole, row=0.3, smallest=0.3)
                compare(job, whole, spread, counts, dtype, limits=limits)


def rounding_is_over_all_tokens(job):
    """Token rounding counts the tokens of all ranks, of each rounding_tokens of them in order."""
    options = dict(router_dtype=torch.float32, **LOSSES)
    for dtype in job.dtypes:
        for rounding, size in (("nearest", None), ("up", 6), ("down", None), ("balanced", None),
                               ("stochastic", 6)):  # fmt: skip
            whole, spread = job.make(dtype, rounding=rounding, m=4, rounding_tokens=size, **options)
            every = layouts(job.world).values() if size is None else [[12] * job.world, [12] * (job.world - 1) + [18]]
            for counts in every:
                spread.rank_tokens = counts
                drawn = dict(seed=3, offset=7) if rounding == "stochastic" else {}
                limits = LIMITS[dtype]._replace(whole=3 * LIMITS[dtype].whole, row=0.5, smallest=0.3)
                compare(job, whole, spread, counts, dtype, limits=limits, **drawn)
                whole.eval(), spread.eval()
                compare(job, whole, spread, counts, dtype, limits=limits)
                whole.train(), spread.train()
    spread.rank_tokens = 40
    x = job.batch([9] * job.world, dtype)[0][:9]
    expect("rounding needs the tokens of each rank", lambda: spread(x, seed=1, offset=1))


def ids_of_elsewhere(job):
    """Experts that a rollout chose, some of them none, of all ranks' experts."""
    for dispatch in ("all_gather", "pull"):
        ids_of_elsewhere_by(job, dispatch)


def ids_of_elsewhere_by(job, dispatch):
    dtype = job.dtype
    options = dict(scoring="sigmoid_renormalized", dispatch=dispatch, **LOSSES)
    whole, spread = job.make(dtype, **options)
    for counts in layouts(job.world).values():
        g = torch.Generator().manual_seed(7)
        ids = torch.rand(sum(counts), E, generator=g).argsort(-1)[:, :K].to(job.device)
        ids[::3, 0], ids[1::4, 1], ids[2::5] = -1, E + 5, 2**30
        for wide in (ids.int(), ids.long() + (ids == E + 5) * 2**33):
            spread.rank_tokens = counts
            compare(job, whole, spread, counts, dtype, ids=wide, limits=limits_of(dtype))


def parts_by_hand(x, dO, logits, layer, world, **choice):
    """What the ranks compute, one after the other in this process, from `tilemoe.moe` alone: O, dX,
    dlogits of all tokens, and every weight's gradient."""
    leaf = lambda t: t.detach().clone().requires_grad_()
    logits = leaf(logits)
    scores, ids = tilemoe.top_k(logits, K, **choice)
    size = E // world
    O = dX = ds = 0
    gradients = {name: [] for name in layer}
    for rank in range(world):
        own = {name: leaf(t[rank * size :][:size]) for name, t in layer.items()}
        x_of, s_of = leaf(x), leaf(scores)
        if K <= size:
            part = tilemoe.moe(x_of, s_of, ids=ids - rank * size, **own)
        else:  # fewer experts than a token chooses: its pairs in the order of the experts
            order = ids.argsort(1)
            tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(K)
            pairs = ids.gather(1, order).flatten() - rank * size, s_of.gather(1, order).flatten()
            part = tilemoe.moe_general(x_of, tokens, *pairs, **own)
        part.backward(dO)
        O = O + part.detach().float()
        dX = dX + x_of.grad.float()
        ds = ds + s_of.grad
        for name, t in own.items():
            gradients[name].append(t.grad)
    scores.backward(ds)
    made = {"O": O.to(x.dtype), "dX": dX.to(x.dtype), "dlogits": logits.grad}
    return made | {f"d{name}": torch.cat(of_ranks) for name, of_ranks in gradients.items()}


def layer_of(dtype, seed=0):
    made = module_support.make(seed, dtype=dtype, sizes=(d, n, E, K), bias=True)
    names = {"W1": "gate_up_proj", "W2": "down_proj", "b1": "gate_up_proj_bias", "b2": "down_proj_bias"}
    return {letter: getattr(made.experts, name).detach() for letter, name in names.items()}


def spread_call(job, x, dO, logits, layer, own, **options):
    """The functional form of this rank's slice -> as parts_by_hand, the rank's own, and aux."""
    size = E // job.world
    leaf = lambda t: t.detach().clone().requires_grad_()
    mine = {name: leaf(t[job.rank * size :][:size]) for name, t in layer.items()}
    x, logits = leaf(x[own]), leaf(logits[own])
    options.setdefault("capacity_factor", None)
    O, aux = expert_parallel.moe(
        x, logits, group=job.group, return_aux=True, **mine, **(dict(K=K) | options)
    )
    O.backward(dO[own])
    made = {"O": O.detach(), "dX": x.grad, "dlogits": logits.grad}
    return made | {f"d{name}": t.grad for name, t in mine.items()}, aux


def own_of(job, name, tensor, own):
    size = E // job.world
    return tensor[own] if name in ("O", "dX", "dlogits") else tensor[job.rank * size :][:size]


def order_of_chunks(counts, chunks):
    """Tokens of all ranks as they are gathered in chunks: the first of every rank's, and so on."""
    most, firsts = max(counts), [sum(counts[:rank]) for rank in range(len(counts))]
    chunks = max(1, min(chunks, most))
    cuts = [most * chunk // chunks for chunk in range(chunks + 1)]
    return [
        first + row
        for begin, end in zip(cuts, cuts[1:])
        for first, count in zip(firsts, counts)
        for row in range(begin, min(end, count))
    ]


def bits_are_those_of_the_parts(job):
    """A rank's partial sums are the layer's own; the owner adds them in float32 in the order of the
    ranks, and rounds once. Whether gathered rows are kept changes no bit, nor does a second run; in
    chunks weights' gradients are sums in the chunks' order of the tokens, and that is all."""
    for dtype in [*job.dtypes, torch.float16]:
        layer = {name: t.to(job.device) for name, t in layer_of(dtype).items()}
        for counts in layouts(job.world).values():
            x, dO, own = job.batch(counts, dtype)
            g = torch.Generator().manual_seed(3)
            logits = torch.randn(sum(counts), E, generator=g).to(job.device)
            choice = dict(scoring="sigmoid", routed_scaling_factor=2.5)
            in_turn = parts_by_hand(x, dO, logits, layer, job.world, **choice)
            for how in ({}, dict(keep_gathered=True), dict(capacity_factor=float(job.world)),
                        dict(beside=False), dict(overwrite_H=False), dict(chunks=2),
                        dict(chunks=3, keep_gathered=True), dict(chunks=4, beside=False),
                        dict(chunks=2, overwrite_H=False), dict(chunks=1000),
                        dict(chunks="auto"), dict(dispatch="pull"),
                        dict(dispatch="pull", keep_gathered=True),
                        dict(dispatch="pull", beside=False, capacity_factor=float(job.world)),
                        dict(dispatch="pull", overwrite_H=False)):  # fmt: skip
                # Of so few tokens one chunk is what "auto" takes.
                chunks = how.get("chunks", 1)
                order = order_of_chunks(counts, 1 if chunks == "auto" else chunks)
                sums = parts_by_hand(x[order], dO[order], logits[order], layer, job.world, **choice)
                want = in_turn | {k: t for k, t in sums.items() if k[1:] in layer}
                both = how in ({}, dict(dispatch="pull"))
                for tokens in (counts, max(counts) + 3)[: 2 if both else 1]:
                    got, aux = spread_call(
                        job, x, dO, logits, layer, own, rank_tokens=tokens, **choice, **how
                    )
                    assert aux.overflow == 0
                    for name, tensor in got.items():
                        wanted = own_of(job, name, want[name], own)
                        assert torch.equal(tensor, wanted), (dtype, counts, how, name)


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, ctx.dtype), None


class _RoundedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, dtype):
        return rounded(part, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def in_float64(x, dO, logits, layer, world, dtype):
    """parts_by_hand in float64; with a dtype it rounds where the library stores, and each rank's
    partial O and dX once."""
    leaf = lambda t: t.detach().double().requires_grad_()
    x, logits, layer = leaf(x), leaf(logits), {name: leaf(t) for name, t in layer.items()}
    scores, ids = reference.top_k(logits, K)
    size, O = E // world, 0
    for rank in range(world):
        own = {name: t[rank * size :][:size] for name, t in layer.items()}
        part = reference.moe(
            _RoundedGradient.apply(x, dtype), scores, ids=ids - rank * size, stored=dtype, **own
        )
        O = O + _RoundedOutput.apply(part, dtype)
    tensors = {"X": x, "logits": logits} | layer
    gradients = torch.autograd.grad(O, list(tensors.values()), dO.double())
    return {"O": O.detach()} | {f"d{name}": g for name, g in zip(tensors, gradients)}


def errors_are_those_of_one_more_rounding(job):
    """By the whole, over four problems together: at most 1.05 times the float64 evaluation's."""
    for dtype in (torch.bfloat16, torch.float16):
        squares = {}
        for seed in range(4):
            counts = [61 + 7 * r for r in range(job.world)]
            layer = {name: t.to(job.device) for name, t in layer_of(dtype, seed).items()}
            x, dO, own = job.batch(counts, dtype, seed)
            g = torch.Generator().manual_seed(seed)
            logits = torch.randn(sum(counts), E, generator=g).to(job.device)
            want, rounding = (
                in_float64(x, dO, logits, layer, job.world, of) for of in (None, dtype)
            )
            got, _ = spread_call(job, x, dO, logits, layer, own, rank_tokens=counts)
            for name, tensor in got.items():
                mine = own_of(job, name, want[name], own)
                stored = own_of(job, name, rounding[name], own).to(tensor.dtype)
                norm = mine.norm() ** 2
                both = squares.setdefault(name, torch.zeros(2, dtype=torch.float64))
                both += torch.stack([(t.double() - mine).norm() ** 2 / norm for t in (tensor, stored)]).cpu()
        for name, (ours, bar) in squares.items():
            if job.rank == 0:
                print(f"{dtype} {name}: {(ours / 4).sqrt():.4%}, evaluation {(bar / 4).sqrt():.4%}")
            assert ours.sqrt() <= 1.05 * bar.sqrt(), (dtype, name, ours.sqrt() / bar.sqrt())
            assert 0.1 * bar <= ours, name


def overflow_is_nan_or_dropped(job):
    """All tokens choose the last rank's experts: as many places as it takes hold them all, one less
    spoils the outputs of every rank, or drops one pair."""
    layer = {name: t.to(job.device) for name, t in layer_of(job.dtype).items()}
    counts = [9] * job.world
    x, dO, own = job.batch(counts, job.dtype)
    logits = torch.randn(sum(counts), E, generator=torch.Generator().manual_seed(1)) / 8
    size = E // job.world
    used = min(size, K)
    logits[:, -used:] += 9.0
    pairs = sum(counts) * used  # of the last rank
    if used < K:
        logits[:, :size] -= 9.0 * (job.world > 2)
    logits = logits.to(job.device)
    exactly = pairs * job.world / (sum(counts) * K)
    assert exactly <= job.world
    want = parts_by_hand(x, dO, logits, layer, job.world)
    ways = dict(), dict(dispatch="pull")
    for factor, how in itertools.product((exactly, float(job.world), None), ways):
        got, aux = spread_call(job, x, dO, logits, layer, own, capacity_factor=factor, **how)
        assert aux.overflow == 0
        for name, tensor in got.items():
            assert torch.equal(tensor, own_of(job, name, want[name], own)), (name, factor, how)
    less = (pairs - 1) * job.world / (sum(counts) * K) - 1e-9
    for how in (*ways, dict(chunks=4)):
        how |= dict(capacity_factor=less)
        got, aux = spread_call(job, x, dO, logits, layer, own, **how)
        assert aux.overflow >= 1 and got["O"].isnan().all()
        got, aux = spread_call(job, x, dO, logits, layer, own, **how, on_overflow="drop")
        assert aux.overflow >= 1 and all(t.isfinite().all() for t in got.values())
        same = torch.tensor([torch.equal(got["O"], want["O"][own])], device=job.device)
        everyone = [torch.zeros_like(same) for _ in range(job.world)]
        dist.all_gather(everyone, same)
        # What is left out is the last token's of the highest expert: the last rank's token.
        assert [bool(s) for s in everyone] == [True] * (job.world - 1) + [False]
        assert torch.equal(got["O"][:-1], want["O"][own][:-1])
    # Places for fewer pairs than tokens that need a rank: its last ones are not pulled.
    few = 5
    how = dict(capacity_factor=(few - 0.5) * job.world / (sum(counts) * K), on_overflow="drop")
    got, aux = spread_call(job, x, dO, logits, layer, own, dispatch="pull", **how)
    _, of_gathered = spread_call(job, x, dO, logits, layer, own, **how)
    assert aux.overflow == of_gathered.overflow > 0
    assert all(t.isfinite().all() for t in got.values())
    scores, ids = tilemoe.top_k(logits, K)
    O = torch.zeros(x.shape, device=job.device)
    for rank in range(job.world):
        mine = {name: t[rank * size :][:size] for name, t in layer.items()}
        at = (ids // size == rank).any(1).nonzero()[:few, 0]
        of_rank, s = at_most_experts(ids[at] - rank * size, scores[at], size)
        part = tilemoe.moe(x[at], s, ids=of_rank, capacity=few, on_overflow="drop", **mine)
        O[at] += part.float()
    assert torch.equal(got["O"], O.to(x.dtype)[own])


@on("cpu")
def values_are_drawn_alike(job):
    """Ranks with one seed have the layer that one process has with it, and none of its experts twice."""
    torch.manual_seed(11)
    whole = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True)
    torch.manual_seed(11)
    spread = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True, expert_mesh=job.mesh)
    module_support.same_bits({k: full(t) for k, t in spread.state_dict().items()}, whole.state_dict())
    torch.manual_seed(11)
    late = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True, expert_mesh=job.mesh, device="meta")
    assert late.experts.down_proj.device.type == "meta"
    late.to_empty(device="cpu")
    torch.manual_seed(11)
    late.reset_parameters()
    module_support.same_bits({k: full(t) for k, t in late.state_dict().items()}, whole.state_dict())


class NoWaiting(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what would make the host wait for a GPU, or a shape depend on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        assert not name.startswith(self.REFUSED), f"{func} waits for the device"
        if name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1]):
            raise AssertionError(f"{func} has a shape that depends on values")
        return func(*args, **(kwargs or {}))


def nothing_waits_for_the_device(job):
    x, dO, own = job.batch([9] * job.world, torch.bfloat16)
    on_gpus = [dict(dispatch="pull")] if job.device == "cuda" else []  # else the host reads sizes
    for options in ({}, dict(rounding="nearest", m=4), dict(keep_gathered=True, **SHARED),
                    dict(chunks=2), *on_gpus):  # fmt: skip
        _, spread = job.make(torch.bfloat16, **options, **LOSSES)
        with NoWaiting():
            step(spread, x[own], dO[own])
            spread.rank_tokens = [9] * job.world
            step(spread, x[own], dO[own])


def what_is_kept(job):
    """For backward: of X this rank's own rows, or those of all where that is asked for; H with the
    rows of the capacity. Nothing else has a row for each rank's token,
    but for bits of the choice where a rank has fewer experts than K."""
    t, factor = 18, 1.25
    N = t * job.world
    x, dO, own = job.batch([t] * job.world, torch.bfloat16)
    capacity = math.ceil(factor * t * K)
    for keep, how in itertools.product((False, True), (dict(), dict(chunks=3), dict(dispatch="pull"))):
        came = min(N, capacity) if "dispatch" in how else N
        options = dict(keep_gathered=keep, capacity_factor=factor, **how)
        _, spread = job.make(torch.bfloat16, **options, on_overflow="drop")
        shapes = []
        pack = lambda tensor: (shapes.append(tuple(tensor.shape)), tensor)[1]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = spread(x[own].clone().requires_grad_())
        assert shapes.count((capacity, 2 * n)) == 1, shapes
        own_kept = 1 + (not keep)  # the router's and, the same tensor, X
        assert shapes.count((came, d)) == keep + own_kept * (came == t), shapes
        assert shapes.count((t, d)) == own_kept + keep * (came == t), shapes
        others = (E // job.world, K), (2 * n,)  # which expert is which place's; H
        of_all = [s for s in shapes if s and s[0] == came and s[1:] not in others]
        tokens = [(came,)] * ("dispatch" in how)  # whose rows came
        assert came == t or sorted(of_all) == sorted([(came, d)] * keep + tokens), shapes
        out.backward(dO[own])


def transfers_are_beside_products(job):
    """Backward waits for X when all but dW1 is done, and sends dX before dW1. In chunks the choice
    waits for no more than the first, and products for the one that they read; O leaves by chunks. Where it is told to, or where dH does
    not lie over H, it does so in turn."""
    events = []

    def told(name, function):
        return lambda *args, **options: (events.append(name), function(*args, **options))[1]

    def products(op, *args):
        if "experts" in str(op):
            events.append("products")
        return computed(op, *args)

    def gather(rows, *args, **options):
        events.append("choice" if rows.dtype == torch.int32 else "gather")
        return all_gather(rows, *args, **options)

    computed, of_team = tilemoe.ops.call_undifferentiated, tilemoe._team
    all_gather = dist.all_gather_into_tensor
    alone = contextlib.nullcontext
    # (torch's check for NaN has no DTensors.)
    anomaly = functools.partial(torch.autograd.detect_anomaly, check_nan=False)
    whole = "gather choice wait products send"  # X; ids, scores and counts
    in_turn = "gather wait gather wait products send send"  # dO and X
    by_chunk = "gather choice gather chunk products send chunk wait products send"
    both = "gather gather gather gather"  # two chunks of dO and of X
    both_in_turn = "gather gather wait gather gather wait products send send send"
    for how, within, *want in (
        ({}, alone, whole, "gather wait gather products send wait products send"),
        (dict(keep_gathered=True), alone, whole, "gather wait products send products send"),
        (dict(overwrite_H=False), alone, whole, in_turn),
        (dict(beside=False), alone, whole, in_turn),
        (dict(chunks=2), alone, by_chunk,
         f"{both} chunk products chunk wait products send send wait products send"),
        (dict(chunks=2, overwrite_H=False), alone, by_chunk,
         f"{both} wait wait products send send send"),
        (dict(chunks=2, beside=False), alone, by_chunk, both_in_turn),
        # What was chosen says which rows are sent.
        (dict(dispatch="pull"), alone, "choice send wait products send",
         "send wait send products send wait products send"),
        (dict(dispatch="pull", keep_gathered=True), alone, "choice send wait products send",
         "send wait products send products send"),
        (dict(dispatch="pull", beside=False), alone, "choice send wait products send",
         "send wait send wait products send send"),
        # It looks at dO before the products do.
        (dict(chunks=2), anomaly, by_chunk,
         "gather gather wait gather gather products products send send wait products send"),
    ):  # fmt: skip
        _, spread = job.make(job.dtype, **how)
        x, dO, own = job.batch([9] * job.world, job.dtype)
        events.clear()
        with (
            mock.patch.object(dist, "all_to_all_single", told("send", dist.all_to_all_single)),
            mock.patch.object(dist, "all_gather_into_tensor", gather),
            mock.patch.object(of_team.Arrival, "wait", told("wait", of_team.Arrival.wait)),
            mock.patch.object(PulledRows, "wait", told("wait", PulledRows.wait)),
            mock.patch.object(of_team.Arrival, "wait_chunk", told("chunk", of_team.Arrival.wait_chunk)),
            mock.patch.object(tilemoe.ops, "call_undifferentiated", products),
            within(),
        ):
            out, _ = spread(x[own].requires_grad_())
            seen = [" ".join(events)]
            events.clear()
            out.backward(dO[own])
            seen.append(" ".join(events))
        assert seen == want, (how, seen)


def settled(collective):
    """It to its end, and then time in which gloo's thread lets go of the tensors: freed by that
    thread they would be missing in what the profiler tells. Meanwhile gloo has copies of its own."""

    def call(*args, async_op=False, **options):
        collective(*args, **options)
        time.sleep(0.02)
        return mock.Mock()  # to wait for

    return call


@mock.patch.object(dist, "all_gather_into_tensor", settled(dist.all_gather_into_tensor))
@mock.patch.object(dist, "all_to_all_single", settled(dist.all_to_all_single))
def peaks_on_a_cpu(forward, backward):
    """Bytes that stay after forward, the most in it, the most in backward, of torch's allocator."""
    of_forward = live_sums(allocations(forward))
    of_backward = live_sums(allocations(backward))
    return of_forward[-1], max(of_forward), of_forward[-1] + max(of_backward)


def peaks_on_a_gpu(forward, backward):
    most = []
    begin = torch.cuda.memory_allocated()
    for call in (forward, backward):
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        torch.cuda.synchronize()
        most.append(torch.cuda.max_memory_allocated() - begin)
        if call is forward:
            stays = torch.cuda.memory_allocated() - begin
        del kept
    return stays, *most


def peak_is_the_plans(job):
    """What torch's allocator gives a rank in forward and in backward is what the plan says, or up
    to a fifth less. Each with the capacity's places, and with those of every routing."""
    t, width, of_expert = 4000, 128, 64
    sizes = dict(d=width, n=of_expert, E=E, K=K)
    for options in ({}, dict(keep_gathered=True, bias=True), dict(capacity_factor=None, beside=False),
                    dict(chunks=4), dict(chunks=2, keep_gathered=True), dict(dispatch="pull"),
                    dict(dispatch="pull", keep_gathered=True, bias=True)):  # fmt: skip
        plan = expert_parallel.plan(t, **sizes, ranks=job.world, **options, device=job.device)
        options |= dict(expert_mesh=job.mesh, on_overflow="drop", return_aux=False)
        spread = tilemoe.MoE(**sizes, **options, dtype=torch.bfloat16, device=job.device)
        x, dO = torch.randn(2, t, width, dtype=torch.bfloat16, device=job.device).unbind()
        x.requires_grad_()
        inputs, out = [x, *spread.experts.parameters()], []
        forward = lambda: out.append(spread(x))
        backward = lambda: torch.autograd.grad(out.pop(), inputs, dO)
        if job.device == "cuda":  # what a first call takes for good
            forward(), backward()
        peaks = peaks_on_a_gpu if job.device == "cuda" else peaks_on_a_cpu
        stays, in_forward, in_backward = peaks(forward, backward)
        own = 2 * t * width  # O; and dX
        router = 4 * t * (E + K)  # logits, and what top-K takes
        seen = {"kept": stays - own, "forward": in_forward - own, "backward": in_backward - 2 * own}
        if job.rank == 0:
            print(options, {k: (v, getattr(plan, k)) for k, v in seen.items()})
        for name, most in seen.items():
            said = getattr(plan, name)
            assert most <= said + router + 2**16, (options, name, most, said)
            assert most >= 0.8 * said, (options, name, most, said)


@on("cuda")
def a_graph_has_all_of_it(job):
    """Forward and backward in a CUDA graph, which nothing that waits for the host gets into; replayed
    with other tokens it computes what the calls do."""
    x, dO, own = job.batch([9] * job.world, job.dtype)
    for options in ({}, dict(keep_gathered=True), dict(beside=False), dict(chunks=2),
                    dict(dispatch="pull"), dict(rounding="nearest", m=4)):  # fmt: skip
        _, spread = job.make(job.dtype, **options, **LOSSES)
        given = x[own].clone()
        call = lambda: step(spread, given, dO[own])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out, _, gradients = call()
        for scale in (1.0, -0.5):
            given.copy_(x[own] * scale)
            graph.replay()
            torch.cuda.synchronize()
            want_out, _, want = call()
            assert torch.equal(out, want_out), options
            for name, gradient in want.items():
                assert torch.equal(full(gradients[name]), full(gradient)), (options, name)
        del graph  # before the group's communicators


def no_tokens_anywhere(job):
    for how in (dict(), dict(chunks=2), dict(dispatch="pull")):
        _, spread = job.make(job.dtype, **how, **LOSSES)
        x = torch.zeros(0, d, dtype=job.dtype, device=job.device, requires_grad=True)
        out, aux = spread(x)
        assert out.shape == (0, d) and aux.loss == 0
        (out.sum() + aux.loss).backward()
        assert all((full(p.grad) == 0).all() for p in spread.parameters() if p.grad is not None)


def composes(job):
    """Checkpointing, autocast, few tokens in evaluation, leading shapes, a frozen router."""
    for how in (dict(), dict(chunks=2), dict(dispatch="pull")):
        composes_with(job, *job.make(job.dtype, **how, **SHARED))


def composes_with(job, whole, spread):
    counts = [12] * job.world
    x, dO, own = job.batch(counts, job.dtype)
    mine = x[own].reshape(3, 4, d)
    leaf = mine.clone().requires_grad_()
    out, aux = spread(leaf)
    assert out.shape == mine.shape
    wanted = [p for p in spread.parameters()]
    want = torch.autograd.grad(out, [leaf, *wanted], dO[own].reshape(out.shape))
    again, _ = checkpoint(spread, leaf, use_reentrant=False)
    got = torch.autograd.grad(again, [leaf, *wanted], dO[own].reshape(out.shape))
    assert torch.equal(out, again) and all(torch.equal(full(a), full(b)) for a, b in zip(got, want))
    with torch.autocast(job.device, torch.bfloat16):
        low, _ = spread(mine)
        want_low, _ = whole(x)
    assert low.dtype == torch.bfloat16
    limits = limits_of(torch.bfloat16)
    assert_close(low.reshape(-1, d), want_low[own].double(), "autocast", limits)
    spread.eval(), whole.eval()
    with torch.no_grad():
        out, want = spread(mine)[0].reshape(-1, d), whole(x)[0][own]
        assert_close(out, want.double(), "evaluation", limits_of(job.dtype))
    spread.train(), whole.train()
    for layer in (spread, whole):
        layer.gate.requires_grad_(False)
    out, _ = spread(mine)
    out.backward(dO[own].reshape(out.shape))
    assert spread.gate.weight.grad is None and spread.experts.down_proj.grad is not None


def refusals(job):
    make = lambda **options: tilemoe.MoE(  # noqa: E731
        **(dict(d=d, n=n, E=E, K=K, return_aux=False, expert_mesh=job.mesh) | options),
        dtype=job.dtype,
        device=job.device,
    )
    expect("E is 7, and the experts do not go evenly", lambda: make(E=7))
    expect("capacity_factor is 0, expected None or a number above 0", lambda: make(capacity_factor=0))
    for chunks in (0, True, 2.0, "all"):
        message = f"chunks is {chunks!r}, expected 'auto' or an int of at least 1"
        expect(message, lambda chunks=chunks: make(chunks=chunks))
    expect("dispatch is 'push'", lambda: make(dispatch="push"))
    expect("chunks is 2, but dispatch is 'pull'", lambda: make(dispatch="pull", chunks=2))
    expect("on_overflow is 'zero'", lambda: make(on_overflow="zero"))
    expect("expert_gradients is 'max'", lambda: make(expert_gradients="max"))
    moe = make()
    x = torch.zeros(5, d, dtype=job.dtype, device=job.device)
    for tokens, message in (
        (4, "has 5 tokens, and rank_tokens says 4 at most"),
        ([5] * (job.world + 1), f"expected the tokens of each of {job.world} ranks"),
        ([6] * job.world, f"rank {job.rank} has 5 tokens, and rank_tokens says 6"),
    ):
        moe.rank_tokens = tokens
        expect(message, lambda: moe(x))
    moe.rank_tokens = None
    expect("x is a DTensor", lambda: moe(DTensor.from_local(x, job.mesh, [Shard(0)])))


# ---------------------------------------------------------------- training


def plain_layer():
    return module_support.make(
        seed=9, dtype=torch.float32, sizes=(d, n, E, K), bias=True, scoring="sigmoid", selection_bias=True
    )


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
    """expert_gradients="sum", and fully_shard told to divide by all ranks: the same gradients."""
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
    options = dict(bias=True, scoring="sigmoid", selection_bias=True, device=job.device)
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
        module_support.same_bits({k: full(t) for k, t in spread.state_dict().items()}, whole.state_dict())
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


@on("cpu")
def a_killed_rank_is_an_error_on_the_others(job):
    """Within the group's timeout, and no step gives a number after it. The last scenario: the group
    is gone with the rank."""
    _, spread = job.make(job.dtype)
    x, dO, own = job.batch([9] * job.world, job.dtype)
    step(spread, x[own], dO[own])
    begin = time.monotonic()
    if job.rank == job.world - 1:
        out, _ = spread(x[own].requires_grad_())
        job.tell("a_killed_rank_is_an_error_on_the_others")
        os.kill(os.getpid(), signal.SIGKILL)  # the others are in backward, or will be
    try:
        for _ in range(2):
            step(spread, x[own], dO[own])
    except RuntimeError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}")
        assert time.monotonic() - begin <= TIMEOUT_S + 10
    else:
        raise AssertionError("a step went on without one of its ranks")


@on("cuda")
def a_killed_rank_ends_the_others(job):
    """Within the group's timeout NCCL's watchdog, or that of a barrier in symmetric memory, ends
    every process that waits for the rank, with an error. The last scenario there."""
    name, timeout_s = "a_killed_rank_ends_the_others", 15
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    mesh = DeviceMesh.from_group(group, job.device, mesh_dim_names=("ep",))
    _, spread = job.make(job.dtype, mesh=mesh, dispatch=job.dispatch)
    x, dO, own = job.batch([9] * job.world, job.dtype)
    step(spread, x[own], dO[own])
    torch.cuda.synchronize()
    if job.rank == job.world - 1:
        job.tell(name)
        os.kill(os.getpid(), signal.SIGKILL)
    job.tell(name, ENDS + "Watchdog caught collective operation timeout|NCCL error|ncclRemote|CUDA error")
    # Whoever still waits after that is ended by this, and says nothing of NCCL.
    faulthandler.dump_traceback_later(timeout_s + 60, exit=True)
    for _ in range(2):
        step(spread, x[own], dO[own])
    torch.cuda.synchronize()
    raise AssertionError("a step went on without one of its ranks")


SCENARIOS = {
    module_equals_one_process: (1, 2, 4),
    rounding_is_over_all_tokens: (2, 4),
    ids_of_elsewhere: (2, 4),
    bits_are_those_of_the_parts: (1, 2, 4),
    errors_are_those_of_one_more_rounding: (2, 4),
    overflow_is_nan_or_dropped: (2, 4),
    values_are_drawn_alike: (1, 2, 4),
    nothing_waits_for_the_device: (2,),
    what_is_kept: (2, 4),
    transfers_are_beside_products: (2,),
    peak_is_the_plans: (2, 4),
    a_graph_has_all_of_it: (1, 2, 4),
    no_tokens_anywhere: (2,),
    composes: (1, 2),
    refusals: (2,),
    fsdp: (1, 2, 4),
    fsdp_mixed_precision: (2, 4),
    gradients_that_somebody_else_divides: (2, 4),
    distributed_checkpoint: (1, 2, 4),
    checkpoint_of_two_ranks_by_four: (4,),
    a_killed_rank_is_an_error_on_the_others: (2, 4),
    a_killed_rank_ends_the_others: (2, 4),
}


if __name__ == "__main__":
    dispatch = dict(choices=["all_gather", "pull"], help="of a_killed_rank_ends_the_others")
    sys.exit(main_of(__file__, __doc__, SCENARIOS, Job, dispatch=dispatch))
