"""Scenarios of expert_parallel_worker.py: what travels when, what waits for it, what is kept and
taken meanwhile, and how a rank that is gone ends it."""

import contextlib
import datetime
import faulthandler
import functools
import itertools
import math
import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

import tilemoe
from expert_parallel_job import E, K, LOSSES, SHARED, d, full, n, step
from peak_memory_test import allocations, live_sums
from processes import ENDS, TIMEOUT_S, on
from tilemoe import expert_parallel
from tilemoe.distributed.pull import PulledRows, _Link


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
    reads = job.device == "cuda" or job.reads_peers  # else the host reads sizes
    pulls = [dict(dispatch="pull")] if reads else []
    for options in ({}, dict(rounding="nearest", m=4), dict(keep_gathered=True, **SHARED),
                    dict(chunks=2), *pulls):  # fmt: skip
        _, spread = job.make(torch.bfloat16, **options, **LOSSES)
        with NoWaiting():
            step(spread, x[own], dO[own])
            spread.rank_tokens = [9] * job.world
            step(spread, x[own], dO[own])


def what_is_kept(job):
    """For backward: of X this rank's own rows, or those of all if that is required; H with the
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


def transfers_overlap_with_gemms(job):
    """Backward waits for X when all but dW1 is done, and sends dX before dW1. In chunks the choice
    waits for no more than the first, and GEMMs for the one that they read; O leaves by chunks.
    Without overlap, or if dH is not written over H, one step runs after another."""
    events = []

    def recorded(name, function):
        return lambda *args, **options: (events.append(name), function(*args, **options))[1]

    def gemms(op, *args):
        if "experts" in str(op):
            events.append("gemms")
        return computed(op, *args)

    def gather(rows, *args, **options):
        events.append("choice" if rows.dtype == torch.int32 else "gather")
        return all_gather(rows, *args, **options)

    computed, of_team = tilemoe.ops.call_undifferentiated, tilemoe.distributed.team
    all_gather = dist.all_gather_into_tensor
    alone = contextlib.nullcontext
    # (torch's check for NaN has no DTensors.)
    anomaly = functools.partial(torch.autograd.detect_anomaly, check_nan=False)
    whole = "gather choice wait gemms send"  # X; ids, scores and counts
    one_by_one = "gather wait gather wait gemms send send"  # dO and X
    by_chunk = "gather choice gather chunk gemms send chunk wait gemms send"
    both = "gather gather gather gather"  # two chunks of dO and of X
    both_one_by_one = "gather gather wait gather gather wait gemms send send send"
    for how, within, *want in (
        ({}, alone, whole, "gather wait gather gemms send wait gemms send"),
        (dict(keep_gathered=True), alone, whole, "gather wait gemms send gemms send"),
        (dict(overwrite_H=False), alone, whole, one_by_one),
        (dict(overlap=False), alone, whole, one_by_one),
        (dict(chunks=2), alone, by_chunk,
         f"{both} chunk gemms chunk wait gemms send send wait gemms send"),
        (dict(chunks=2, overwrite_H=False), alone, by_chunk,
         f"{both} wait wait gemms send send send"),
        (dict(chunks=2, overlap=False), alone, by_chunk, both_one_by_one),
        # The routing determines the rows to send.
        (dict(dispatch="pull"), alone, "choice send wait gemms send",
         "send wait send gemms send wait gemms send"),
        (dict(dispatch="pull", keep_gathered=True), alone, "choice send wait gemms send",
         "send wait gemms send gemms send"),
        (dict(dispatch="pull", overlap=False), alone, "choice send wait gemms send",
         "send wait send wait gemms send send"),
        # It reads dO before the GEMMs do.
        (dict(chunks=2), anomaly, by_chunk,
         "gather gather wait gather gather gemms gemms send send wait gemms send"),
    ):  # fmt: skip
        _, spread = job.make(job.dtype, **how)
        x, dO, own = job.batch([9] * job.world, job.dtype)
        events.clear()
        with (
            mock.patch.object(dist, "all_to_all_single", recorded("send", dist.all_to_all_single)),
            mock.patch.object(_Link, "_exchange", recorded("send", _Link._exchange)),
            mock.patch.object(dist, "all_gather_into_tensor", gather),
            mock.patch.object(of_team.Arrival, "wait", recorded("wait", of_team.Arrival.wait)),
            mock.patch.object(PulledRows, "wait", recorded("wait", PulledRows.wait)),
            mock.patch.object(
                of_team.Arrival, "wait_chunk", recorded("chunk", of_team.Arrival.wait_chunk)
            ),
            mock.patch.object(tilemoe.ops, "call_undifferentiated", gemms),
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
    thread they would be missing in the profiler's report. Meanwhile gloo has copies of its own."""

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


def requested(which="current"):
    """Bytes that were requested of torch's allocator, whose blocks may be up to 1 MiB larger."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def in_use():
    """The bytes that are in use once autograd's thread has let go of what a call before had."""
    torch.cuda.synchronize()
    seen = [requested()]
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        time.sleep(0.01)
        seen.append(requested())
    return seen[-1]


def peaks_on_a_gpu(forward, backward):
    peaks = []
    begin = in_use()
    for call in (forward, backward):
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        torch.cuda.synchronize()
        peaks.append(requested("peak") - begin)
        if call is forward:
            stays = requested() - begin
        del kept
    return stays, *peaks


def peak_is_the_plans(job):
    """What torch's allocator gives a rank in forward and in backward is what the plan says, or up
    to a fifth less: with memory for every routing, and with a capacity_factor's."""
    t, width = 2000, 128
    less, save_h = dict(capacity_factor=1.5), dict(recipe="fp8", save_h="fp8")
    of_codes = (dict(recipe="fp8"), save_h, dict(recipe="fp8_forward", **less), dict(save_h, **less),
                dict(save_h, overlap=False, keep_gathered=True),
                dict(save_h, dispatch="pull", **less))  # fmt: skip
    if job.device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        of_codes = ()
    for options in ({}, less, dict(keep_gathered=True, bias=True, **less), dict(overlap=False),
                    dict(chunks=4), dict(chunks=4, **less), dict(chunks=2, keep_gathered=True),
                    dict(dispatch="pull"), dict(dispatch="pull", **less),
                    dict(dispatch="pull", keep_gathered=True, bias=True, **less),
                    *of_codes):  # fmt: skip
        sizes = dict(d=width, n=128 if "recipe" in options else 64, E=E, K=K)
        plan = expert_parallel.plan(t, **sizes, ranks=job.world, **options, device=job.device)
        options |= dict(expert_mesh=job.mesh, on_overflow="drop", return_aux=False)
        spread = tilemoe.MoE(**sizes, **options, dtype=torch.bfloat16, device=job.device)
        if "recipe" in options:
            tilemoe.quantize_weights(spread)  # codes belong to the weights
        x, dO = torch.randn(2, t, width, dtype=torch.bfloat16, device=job.device).unbind()
        x.requires_grad_()
        inputs, out = [x, *spread.experts.parameters()], []
        forward = lambda: out.append(spread(x))
        backward = lambda: torch.autograd.grad(out.pop(), inputs, dO)
        if job.device == "cuda":  # a first call takes memory for good
            forward(), backward()
        peaks = peaks_on_a_gpu if job.device == "cuda" else peaks_on_a_cpu
        stays, in_forward, in_backward = peaks(forward, backward)
        own = 2 * t * width  # O; and dX
        router = 4 * t * (E + K)  # logits, and what top-K takes
        seen = {"kept": stays - own, "forward": in_forward - own, "backward": in_backward - 2 * own}
        if job.rank == 0:
            print(options, {k: (v, getattr(plan, k)) for k, v in seen.items()})
        for name, peak in seen.items():
            said = getattr(plan, name)
            assert peak <= said + router + 2**16, (options, name, peak, said)
            assert peak >= 0.8 * said, (options, name, peak, said)


def warm_up(call):
    """A first call on a stream of its own, before a graph captures the next."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


@on("cuda")
def a_graph_has_all_of_it(job):
    """Forward and backward in a CUDA graph, which nothing that waits for the host gets into; replayed
    with other tokens it computes what the calls do."""
    x, dO, own = job.batch([9] * job.world, job.dtype)
    for options in ({}, dict(keep_gathered=True), dict(overlap=False), dict(chunks=2),
                    dict(dispatch="pull"), dict(rounding="nearest", m=4)):  # fmt: skip
        _, spread = job.make(job.dtype, **options, **LOSSES)
        given = x[own].clone()
        call = lambda: step(spread, given, dO[own])
        warm_up(call)
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
        job.report("a_killed_rank_is_an_error_on_the_others")
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
        job.report(name)
        os.kill(os.getpid(), signal.SIGKILL)
    job.report(
        name, ENDS + "Watchdog caught collective operation timeout|NCCL error|ncclRemote|CUDA error"
    )
    # Whoever still waits after that is ended by this, and says nothing of NCCL.
    faulthandler.dump_traceback_later(timeout_s + 60, exit=True)
    for _ in range(2):
        step(spread, x[own], dO[own])
    torch.cuda.synchronize()
    raise AssertionError("a step went on without one of its ranks")
