#!/usr/bin/env python3
"""A layer whose experts are spread over the GPUs of one host: each way beside the layer on one GPU.

  python3 benchmarks/gpu_expert_parallel.py --json build/gpu/gpu_expert_parallel.json

Forward and backward from PyTorch, bfloat16, random data, T tokens on each GPU. It starts a process
for every GPU; torchrun may do that too. In a round every way runs a step, after a barrier on the
device; the slowest rank counts, and numbers are medians over the rounds. Each way first computes
what "own" does, the layer of all experts on one GPU. What travels is measured by itself: GB/s that
leave a GPU. Peaks of torch's allocator stand beside what tilemoe.expert_parallel.plan says.

The layer of T=4096 is timed in a CUDA graph, which nothing that waits for the host gets into. Where
half of a GPU's memory does not hold "usual" and a layer's weights, T is halved, and the file says
so. The status is 1 where a way failed. A minute: --layers qwen3-235b-graph --rounds 5.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import tilemoe.expert_parallel
from expert_parallel_ways import DEFAULT_WAYS, WAYS, Usual, way_of
from tilemoe.bench import machine
from tilemoe.bench.cases import CASES, DTYPES, Case
from tilemoe.bench.check import TOLERANCE
from tilemoe.bench.problem import Problem

LAYERS = {
    "qwen3-235b": CASES["qwen3-235b"],
    "30b-n256": CASES["30b-n256"],
    "qwen3-235b-graph": dataclasses.replace(CASES["qwen3-235b"], T=4096),
    "k2": Case("k2", 32768, 4096, 3072, 64, 2, device="cuda", dtype="bfloat16"),
    "small": Case("small", 64, 32, 16, 8, 2),  # on a CPU, to try this script itself
}
ON = {"cuda": ["qwen3-235b", "30b-n256", "qwen3-235b-graph", "k2"], "cpu": ["small"]}
IN_GRAPH = "qwen3-235b-graph"
LEADS_CYCLES = 4_000_000  # about 2 ms of an SM: for the host to be ahead
TIMEOUT_S = 200  # of a collective: where a rank failed alone
# Rows of pairs, T K d, that "usual" has at once, of the experts' H and A as well.
COPIES = 14
NCCL_SETTINGS = ("NCCL_", "TORCH_NCCL_")  # of the environment


class Wrong(Exception):
    """It ran, and computed something else."""


class Rank:
    """This process among those of a group."""

    def __init__(self, device):
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.on_gpu = device == "cuda"
        self.device = torch.device(device, torch.cuda.current_device() if self.on_gpu else None)
        self._one = torch.ones(1, device=self.device)

    def meet(self):
        """The ranks' devices begin what follows together, the hosts ahead of them."""
        if self.on_gpu:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(LEADS_CYCLES)
        dist.all_reduce(self._one)

    def timed(self, call):
        """Milliseconds of a call on this rank."""
        self.meet()
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def slowest(self, numbers):
        """Each the largest of all ranks'."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()

    def failed(self, sentence):
        """The sentence of the first rank that has one, on all of them; else None."""
        every = [None] * self.size
        dist.all_gather_object(every, sentence)
        return next((said for said in every if said is not None), None)


class Link:
    """What the ranks move by themselves: rows (T, d) of each."""

    def __init__(self, rank, rows):
        self.rank, self.rows = rank, rows
        self.all_rows = rows.new_empty(rank.size * rows.shape[0], rows.shape[1])
        self.back = torch.empty_like(self.all_rows)

    def figures(self, times=7):
        leaving = self.rows.numel() * self.rows.element_size() * (self.rank.size - 1)
        found = {}
        for name, call in (
            ("all_gather", lambda: dist.all_gather_into_tensor(self.all_rows, self.rows)),
            ("all_to_all", lambda: dist.all_to_all_single(self.back, self.all_rows)),
        ):
            call()
            ms = statistics.median(self.rank.slowest([self.rank.timed(call) for _ in range(times)]))
            found[name] = {"ms": ms, "GB_per_s": leaving / ms * 1e-6}
        return found


def problem_of(case, rank):
    """Weights as on every rank, tokens of this one."""
    problem = Problem(case, seed=0)
    own = torch.Generator(rank.device).manual_seed(1 + rank.rank)
    with torch.no_grad():
        for tensor in (problem.X, problem.dO):
            tensor.normal_(generator=own).mul_(0.2)
    return problem


def fitting(case, rank):
    """The case with T halved until the largest way fits into the GPU's memory."""
    if not rank.on_gpu:
        return case
    size = DTYPES[case.dtype].itemsize
    weights = 3 * case.E * case.d * case.n * size
    free = torch.cuda.get_device_properties(rank.device).total_memory
    while COPIES * case.rows * case.d * size + 2.5 * weights > 0.9 * free:
        case = dataclasses.replace(case, T=case.T // 2)
    return case


def expected(problem, rank):
    """O, dX, and the sums over the ranks of this rank's dW1 and dW2, from the layer of all experts."""
    O, dX, _, *of_weights = way_of("own", problem, rank.group).step()
    size = problem.case.E // rank.size
    sums = []
    for gradient in of_weights:
        dist.all_reduce(gradient)
        sums.append(gradient[rank.rank * size :][:size].clone())
    return {"O": O.detach(), "dX": dX, "dW1": sums[0], "dW2": sums[1]}


def check(way, want):
    O, dX, _, dW1, dW2 = way.step()
    for name, got in zip(want, (O.detach(), dX, dW1, dW2)):
        if way.all_experts and name.startswith("dW"):
            continue  # of one rank's tokens
        error = ((got.double() - want[name].double()).norm() / want[name].double().norm()).item()
        if not error <= 2 * TOLERANCE[got.dtype]:  # both round
            raise Wrong(f"{name} is off by {error:.1e} of its norm")


class Measured:
    """A way that was checked: its step, on a GPU of T=4096 as a graph, and what memory it took."""

    def __init__(self, name, problem, rank, want, in_graph):
        self.name, self.graph = name, None
        self.way = way_of(name, problem, rank.group)
        check(self.way, want)
        self.peak_bytes = peak_of(self.way.step) if rank.on_gpu else None
        self.run = self.way.step
        if in_graph and rank.on_gpu and not self.way.waits:
            self.graph = graph_of(self.way.step)
            self.run = self.graph.replay

    def plan(self, rank):
        """What tilemoe.expert_parallel.plan says of a step, with O and dX; None of other ways."""
        case, options = self.way.problem.case, self.way.options
        if self.way.all_experts or self.way.waits:
            return None
        sizes = dict(T=case.T, d=case.d, n=case.n, E=case.E, K=case.K, ranks=rank.size)
        planned = tilemoe.expert_parallel.plan(
            **sizes, **options, dtype=DTYPES[case.dtype], device=rank.device
        )
        own = 2 * case.T * case.d * DTYPES[case.dtype].itemsize
        return max(planned.forward, planned.backward) + own


def peak_of(step):
    """Bytes above what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graph_of(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def measure(name, names, rounds, rank, tokens=None):
    """The entry of a layer."""
    asked = LAYERS[name]
    if tokens is not None:
        asked = dataclasses.replace(asked, T=tokens)
    case = fitting(asked, rank)
    problem = problem_of(case, rank)
    links = Link(rank, problem.X.detach()).figures()
    want = expected(problem, rank)
    ways, left_out = [], {}
    for way in names:
        wrong = Usual.missing() if way == "usual" else None
        if wrong is None:
            try:
                ways.append(Measured(way, problem, rank, want, name == IN_GRAPH))
            except Exception as error:  # torch's, too: whatever it raises
                sentence = (str(error) or "no more was said").splitlines()[0]
                wrong = f"{type(error).__name__}: {sentence}"
        if (wrong := rank.failed(wrong)) is not None:
            left_out[way] = wrong
            ways = [measured for measured in ways if measured.name != way]
    del want
    times = {way.name: [] for way in ways}
    for index in range(rounds):
        for way in random.Random(index).sample(ways, len(ways)):  # as on every rank
            times[way.name].append(rank.timed(way.run))
    times = {way: rank.slowest(of) for way, of in times.items()}
    ms = {way: statistics.median(of) for way, of in times.items()}
    return {
        "layer": name,
        "shape": case.shape,
        "asked_T": asked.T,
        "dtype": case.dtype,
        "ranks": rank.size,
        "in_graph": [way.name for way in ways if way.graph is not None],
        "links": links,
        "ms": ms,
        "over_own": {way: of / ms["own"] for way, of in ms.items()} if "own" in ms else {},
        "round_ms": times,
        "peak_bytes": {way.name: way.peak_bytes for way in ways},
        "plan_bytes": {way.name: way.plan(rank) for way in ways},
        "left_out": left_out,
    }


def sentences(entry):
    shape = " ".join(f"{letter}={size}" for letter, size in entry["shape"].items())
    links = ", ".join(f"{k} {v['ms']:.2f} ms, {v['GB_per_s']:.0f} GB/s"
                      for k, v in entry["links"].items())  # fmt: skip
    yield f"{entry['layer']}: {shape}, {entry['ranks']} ranks; {links}"
    for way, ms in entry["ms"].items():
        line = f"  {way:16} {ms:9.3f} ms"
        if way in entry["over_own"]:
            line += f", {entry['over_own'][way]:.3f} of own"
        for what in ("peak_bytes", "plan_bytes"):
            if entry[what][way] is not None:
                line += f", {what.removesuffix('_bytes')} {entry[what][way] / 2**30:.3f} GiB"
        yield line + (", in a graph" if way in entry["in_graph"] else "")
    for way, why in entry["left_out"].items():
        yield f"  left out: {way}: {why}"


def work(args):
    """What every rank does. -> whether all ways ran."""
    rank, report = Rank(args.device), None
    if rank.rank == 0:
        facts = machine.describe(args.device, ("torch", "tilemoe"))
        if rank.on_gpu:
            facts["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        nccl = {k: v for k, v in sorted(os.environ.items()) if k.startswith(NCCL_SETTINGS)}
        report = {**facts, "ranks": rank.size, "rounds": args.rounds, "nccl": nccl, "entries": []}
    complete = True
    for name in args.layers or ON[args.device]:
        entry = measure(name, args.ways, args.rounds, rank, args.tokens)
        complete = complete and not entry["left_out"]
        if report is not None:
            report["entries"].append(entry)
            print("\n".join(sentences(entry)), flush=True)
            if args.json:  # after each, for a run that is cut off
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
        if rank.on_gpu:
            torch.cuda.empty_cache()
    return complete


def joined(place, world, args, rendezvous):
    """A rank from its start to its end; place: which of this host. Ends the process."""
    on_gpu, how = args.device == "cuda", {}
    if rendezvous is not None:
        how = {"init_method": f"file://{rendezvous}", "rank": place, "world_size": world}
    if on_gpu:
        torch.cuda.set_device(place)
        how["device_id"] = torch.device("cuda", place)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, **how)
    complete = work(args)
    dist.destroy_process_group()
    sys.exit(0 if complete else 1)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", nargs="+", choices=LAYERS, metavar="LAYER", help=", ".join(LAYERS))
    add("--ways", nargs="+", default=DEFAULT_WAYS, metavar="WAY",
        help=f"of {', '.join(WAYS)}; NAME@4: with 4 block turns")  # fmt: skip
    add("--rounds", type=int, default=11)
    add("--tokens", type=int, help="T of a rank, in place of each layer's")
    add("--world", type=int, help="ranks; else one for every GPU, or 2 on a CPU")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script itself")
    add("--high-priority", action="store_true",
        help="NCCL's kernels go before products that wait for the same multiprocessors")  # fmt: skip
    add("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_expert_parallel.py: error: torch sees no GPU here")
    if args.high_priority:
        os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    if "RANK" in os.environ:  # of torchrun
        joined(int(os.environ["LOCAL_RANK"]), None, args, None)
    world = args.world or (torch.cuda.device_count() if args.device == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(joined, (world, args, f"{folder}/rendezvous"), world)
        except torch.multiprocessing.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
