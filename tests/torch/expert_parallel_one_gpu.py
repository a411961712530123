"""Ranks that share one GPU and pull rows through symmetric memory, as ranks with a GPU each do:

    python expert_parallel_one_gpu.py --device cuda --world 4     values, not times
    ... --device cuda --world 4 --links nccl                      the same with a GPU for each rank
    python expert_parallel_one_gpu.py                             on a CPU, whose files stand in

torch allows symmetric memory of several ranks on one GPU if an option allows it. NCCL does not: the
collectives go by the CPU (staged.py). The GPU's processes take turns, so a barrier takes as long as
its ranks' turns. Scenarios are those of expert_parallel_worker.py that pull, and some more; what a
whole step in a CUDA graph does is left to ranks with NCCL.
"""

import argparse
import datetime
import faulthandler
import functools
import os
import signal
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.tensor import DeviceMesh

import expert_parallel_job
import expert_parallel_travel as travel
import expert_parallel_values as values
import shared_memory
import staged
from expert_parallel_job import E, K, d, layer_of, layouts, spread_call, step
from processes import main_of, on
from tilemoe.distributed import pull as pulling
from tilemoe.distributed.team import Team

# Multicast is between GPUs; gloo's own choice would be the address that the host's name has.
ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


class LinkedJob(expert_parallel_job.Job):
    """Ranks with a GPU each, whose collectives are NCCL's."""

    def __init__(self, rank, world, folder, device, links):
        super().__init__(rank, world, folder, device)
        self.place = torch.device(device, getattr(self, "gpu", rank))
        if device == "cpu":
            self.reads_peers = True
            shared_memory.begin(folder, rank)
        self.exchanges, exchange = 0, pulling._Link._exchange

        @functools.wraps(exchange)
        def counted(link, *args):
            self.exchanges += 1
            return exchange(link, *args)

        def sent(*_):
            raise AssertionError("rows were sent by a collective")

        for where, name, what in (
            (pulling._Link, "_exchange", counted),
            (pulling._Collectives, "spread", sent),
            (pulling._Collectives, "collect", sent),
        ):
            mock.patch.object(where, name, what).start()


class Job(LinkedJob):
    """Ranks that share a GPU, whose collectives go by the CPU."""

    gpu = 0
    backend = "cpu:gloo,cuda:gloo"  # "gloo" alone: a mesh of GPUs would require NCCL

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        staged.begin()


def memory_is_the_peers(job):
    """torch's part alone: a rank reads what the others wrote, and waits for them."""
    size, timeout_ms = 2**20, 30000
    memory = symmetric.empty(size, dtype=torch.uint8, device=job.place)
    handle = symmetric.rendezvous(memory, job.group)
    assert (handle.rank, handle.world_size) == (job.rank, job.world)
    assert len(set(handle.buffer_ptrs)) == job.world
    for turn in range(3):
        handle.get_buffer(job.rank, (size,), torch.uint8).fill_(10 * turn + job.rank)
        handle.barrier(0, timeout_ms)
        seen = [handle.get_buffer(r, (size,), torch.uint8).clone() for r in range(job.world)]
        handle.barrier(0, timeout_ms)
        for rank, bytes_of in enumerate(seen):
            assert (bytes_of == 10 * turn + rank).all(), (turn, rank)
    torch.cuda.synchronize()
    begin, times = time.monotonic(), 20
    for _ in range(times):
        handle.barrier(0, timeout_ms)
    torch.cuda.synchronize()
    if job.rank == 0:
        print(f"a barrier: {1e3 * (time.monotonic() - begin) / times:.2f} ms", flush=True)
    dist.barrier()  # before the memory goes


def calls_of_other_sizes(job):
    """The memory grows where a call has more tokens than those before, and serves smaller ones; two
    layers take turns. Bits are the all-gather's."""
    dtype = torch.bfloat16
    layers = [
        {name: t.to(job.device) for name, t in layer_of(dtype, seed).items()} for seed in (0, 1)
    ]
    for tokens in (3, 90, 5, 400, 1, 64):
        counts = [tokens + 7 * r for r in range(job.world)]
        x, dO, own = job.batch(counts, dtype, seed=tokens)
        g = torch.Generator().manual_seed(tokens)
        logits = torch.randn(sum(counts), E, generator=g).to(job.device)
        for layer in layers:
            args = (job, x, dO, logits, layer, own)
            want, _ = spread_call(*args, rank_tokens=counts)
            got, _ = spread_call(*args, rank_tokens=counts, dispatch="pull")
            for name, tensor in got.items():
                assert torch.equal(tensor, want[name]), (tokens, name)


def the_same_bits_on_every_run(job):
    """However the ranks' turns come."""
    counts = layouts(job.world)["an empty rank"]  # and uneven
    layer = {name: t.to(job.device) for name, t in layer_of(job.dtype).items()}
    x, dO, own = job.batch(counts, job.dtype)
    logits = torch.randn(sum(counts), E, generator=torch.Generator().manual_seed(2)).to(job.device)
    call = lambda: spread_call(  # noqa: E731
        job, x, dO, logits, layer, own, rank_tokens=counts, dispatch="pull"
    )[0]
    want = call()
    for turn in range(30):
        time.sleep(0.002 * ((turn * 7 + job.rank * 3) % 5))  # another rank is the last each time
        for name, tensor in call().items():
            assert torch.equal(tensor, want[name]), (turn, name)


@on("cuda")
def a_graph_has_the_exchange(job):
    """Rows there and sums back, captured once and replayed with other rows."""
    t = 11
    N = t * job.world
    g = torch.Generator().manual_seed(5)
    ids = torch.rand(N, E, generator=g).argsort(-1)[:, :K].int().to(job.device)
    X = torch.randn(N, d, generator=g).to(job.device, torch.bfloat16)
    mine = slice(job.rank * t, (job.rank + 1) * t)
    pull = pulling.Pull(ids, E // job.world, N, Team(job.group, t, pulls=True))
    own = X[mine].clone()

    def exchange():
        rows = pull.start(own).wait()
        return rows, pull.depart(rows).sum()

    travel.warm_up(exchange)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rows, sums = exchange()
    there = pull.tokens < N
    ranks_of = (pull.places >= 0).sum(1, keepdim=True)
    for scale in (1.0, -0.5, 3.0):
        scaled = X * scale
        own.copy_(scaled[mine])
        graph.replay()
        torch.cuda.synchronize()
        wanted = scaled[pull.tokens.clamp(max=N - 1).long()] * there[:, None]
        assert torch.equal(rows, wanted), scale
        assert torch.equal(sums, (scaled[mine].float() * ranks_of).bfloat16()), scale
    dist.barrier()


@on("cuda")
def peak_is_the_plans(job):
    travel.peak_is_the_plans(job)


def exchanges_were_through_symmetric_memory(job):
    """All that scenarios before this one pulled."""
    links = [link for of_group in pulling._links.values() for link in of_group.values()]
    links = [link for link in links if link._memory is not None]
    assert job.exchanges > 100 and links, job.exchanges
    for link in links:
        handle = link._memory[1]
        if job.device == "cuda":
            assert symmetric.get_backend(link.device) == "CUDA"
            assert type(handle).__name__ == "_SymmetricMemory" and handle.device == link.device
            assert handle.multicast_ptr == 0
        assert len(set(handle.buffer_ptrs)) == job.world
    print(f"{job.exchanges} exchanges", flush=True)


@on("cuda")
def a_killed_rank_ends_a_barrier(job):
    """The others wait for its rows, in a kernel: that ends with an error after the group's timeout,
    and with it all that the process does on the GPU. The last scenario."""
    timeout_s = 10
    name = "a_killed_rank_ends_a_barrier"
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    mesh = DeviceMesh.from_group(group, job.device, mesh_dim_names=("ep",))
    _, spread = job.make(job.dtype, mesh=mesh, dispatch="pull")
    x, dO, own = job.batch([9] * job.world, job.dtype)
    step(spread, x[own], dO[own])
    torch.cuda.synchronize()
    faulthandler.dump_traceback_later(timeout_s + 40, exit=True)  # whoever still waits then
    dist.barrier()

    def gone(*_):
        job.report(name)
        time.sleep(1)  # the others have what it gave to the choice
        os.kill(os.getpid(), signal.SIGKILL)

    if job.rank == job.world - 1:
        mock.patch.object(pulling._Link, "_exchange", gone).start()
    begin, said = time.monotonic(), []
    for call in (lambda: step(spread, x[own], dO[own]), torch.cuda.synchronize):
        try:
            call()
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}".splitlines()[0])
    seconds = time.monotonic() - begin
    print(f"after {seconds:.1f} s: {said}", flush=True)
    in_time = timeout_s - 1 <= seconds <= timeout_s + 15
    said_cuda = any("CUDA error" in words for words in said)
    job.report(name, "" if in_time and said_cuda else f"after {seconds:.1f} s: {said}")
    os._exit(0)  # its GPU's context is gone, and whatever ends with it would fail


SCENARIOS = {
    memory_is_the_peers: (2, 4),
    calls_of_other_sizes: (2, 4),
    values.bits_are_those_of_the_parts: (2, 4),
    values.errors_are_those_of_one_more_rounding: (2, 4),
    values.module_equals_one_process: (2, 4),
    values.ids_of_elsewhere: (2, 4),
    values.overflow_is_nan_or_dropped: (2, 4),
    the_same_bits_on_every_run: (2, 4),
    a_graph_has_the_exchange: (2, 4),
    travel.what_is_kept: (2, 4),
    peak_is_the_plans: (2, 4),
    travel.nothing_waits_for_the_device: (2,),
    travel.transfers_overlap_with_gemms: (2,),
    values.composes: (2,),
    values.no_tokens_anywhere: (2, 4),
    exchanges_were_through_symmetric_memory: (2, 4),
    # With four ranks, one that had its error once waited forever in a copy to the host.
    a_killed_rank_ends_a_barrier: (2,),
}
# NCCL's own watchdog ends the ranks: expert_parallel_worker.py has that.
WITH_LINKS = {s: of for s, of in SCENARIOS.items() if s is not a_killed_rank_ends_a_barrier}
LINKS = dict(choices=["shared", "nccl"], default="shared", help="whether ranks share one GPU")


if __name__ == "__main__":
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--links", **LINKS)
    linked = before.parse_known_args()[0].links == "nccl"
    os.environ |= ENVIRONMENT if linked else ENVIRONMENT | SHARED  # torch reads it when it needs it
    chosen = (WITH_LINKS, LinkedJob) if linked else (SCENARIOS, Job)
    sys.exit(main_of(__file__, __doc__, *chosen, links=LINKS))
