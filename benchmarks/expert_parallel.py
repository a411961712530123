#!/usr/bin/env python3
"""Measure expert parallelism over the GPUs of one host, compared with all experts on each GPU.

  python3 benchmarks/expert_parallel.py --json expert_parallel.jsonl

Run forward and backward from PyTorch in bfloat16 with random data, T tokens on each GPU. The script
starts one process per GPU, unless torchrun has started it. In a round every implementation runs one
step after a barrier on the device, and the time of the slowest rank is reported. The results of
each implementation are first compared with those of "own", the layer with all experts on one GPU.
The bandwidth that leaves a GPU is measured separately, in GB/s. With --graph, a step is timed in a
CUDA graph, unless the implementation waits for the host. T is halved until "usual" and the weights
fit into the GPU's memory. The status is 1 if an implementation failed. A run of one minute:
--layers qwen3-235b --tokens 4096 --graph --rounds 5. benchmarks/README.md describes the
implementations.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tilemoe.expert_parallel
from tilemoe.bench import compiled, machine, records
from tilemoe.bench.check import TOLERANCE, Wrong
from tilemoe.bench.peers import TorchGroupedMM
from tilemoe.bench.problem import CASES, DTYPES, Case, Problem

LAYERS = {
    "qwen3-235b": CASES["qwen3-235b"],
    "30b-n256": CASES["30b-n256"],
    "qwen3-next": CASES["qwen3-next"],
    "k2": Case("k2", 32768, 4096, 3072, 64, 2, device="cuda", dtype="bfloat16"),
    "small": Case("small", 64, 32, 16, 8, 2),  # for tests of this script on a CPU
}
AHEAD_CYCLES = 4_000_000  # about 2 ms of an SM, in which the host launches ahead
TIMEOUT_S = 120  # timeout of a collective, in case one rank failed
COPIES = 14  # tensors of T K d elements in the peak of "usual", with the experts' H and A


class Way:
    """One implementation of a step; NAME@N sets N CTAs per SM for its GEMMs (set_ctas_per_sm)."""

    all_experts = False  # True: each rank has all experts
    computes_in = None  # its GEMMs' dtype, if that is not the dtype of the problem
    waits = False  # True: the host waits for the device, so the step cannot be captured in a graph

    def __init__(self, problem, ctas_per_sm=1, **options):
        self.problem, self.ctas_per_sm, self.options = problem, ctas_per_sm, options
        self.W1, self.W2 = problem.W1, problem.W2
        if not self.all_experts:
            size = problem.case.E // dist.get_world_size()
            own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
            self.W1 = problem.W1.detach()[own].requires_grad_()
            self.W2 = problem.W2.detach()[own].requires_grad_()

    def weights(self):
        """Return the leaves of this rank's experts."""
        return [self.W1, self.W2]

    def step(self):
        """Return O, dX, drouter and the gradients of `weights`."""
        tilemoe.set_ctas_per_sm(self.ctas_per_sm)
        O = self.forward()
        leaves = [self.problem.X, self.problem.router, *self.weights()]
        return O, *torch.autograd.grad(O, leaves, self.problem.dO)

    def results(self):
        """Return a step's O, dX, dW1 and dW2, for a comparison."""
        O, dX, _, dW1, dW2 = self.step()
        return O.detach(), dX, dW1, dW2

    def plan_bytes(self):
        """Return a step's planned peak in bytes, O and dX included; None without a plan."""
        return None


class Own(Way):
    """No expert parallelism: this rank computes its tokens with all experts."""

    all_experts = True

    def forward(self):
        p = self.problem
        return tilemoe.moe(p.X, p.logits(), self.W1, self.W2, K=p.K)


class Ours(Way):
    """tilemoe.expert_parallel with these options."""

    def forward(self):
        p = self.problem
        return tilemoe.expert_parallel.moe(
            p.X, p.logits(), self.W1, self.W2, group=dist.group.WORLD, K=p.K, **self.options
        )

    def plan_bytes(self):
        case = self.problem.case
        planned = tilemoe.expert_parallel.plan(
            **case.shape, ranks=dist.get_world_size(), **self.options, dtype=DTYPES[case.dtype],
            device=self.W1.device,
        )  # fmt: skip
        own = 2 * case.T * case.d * DTYPES[case.dtype].itemsize
        return max(planned.forward, planned.backward) + own


class _Exchange(torch.autograd.Function):
    """Exchange rows: (sum(sent), d) -> (sum(received), d).

    sent, received: the number of rows for and from each rank, lists on the host.
    """

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sizes = received, sent
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, *ctx.sizes), None, None


class _Reordered(torch.autograd.Function):
    """rows[order]; the gradient is gathered by the inverse order, without atomic additions."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.saved_tensors[0]], None, None


class Usual(Way):
    """The usual implementation: all-to-all of one copy of a token's row per pair, and grouped_mm.

    Rows are sorted by expert, sent by all_to_all_single with the numbers of rows on the host,
    sorted by expert again, computed by torch's grouped_mm, and sent back. Gather, SwiGLU and the
    weighted sum are those of torch-grouped_mm-compiled, without atomics.
    """

    waits = True

    def forward(self):
        p, E_local, ranks = self.problem, self.W1.shape[0], dist.get_world_size()
        s, order, ends = TorchGroupedMM(p).route()
        rows_of_pairs = inverse_of(order)
        counts = ends.diff(prepend=ends.new_zeros(1))  # (E)
        arriving = torch.empty_like(counts)  # rows from each rank for each local expert
        dist.all_to_all_single(arriving, counts)
        by_rank = torch.stack([counts, arriving]).view(2, ranks, E_local)
        sent, received = by_rank.sum(2).tolist()  # the host waits

        rows = compiled.Gather.apply(p.X, order, rows_of_pairs, p.K)
        rows = _Exchange.apply(rows, sent, received)
        expert = torch.arange(E_local, device=rows.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving, output_size=sum(received))
        by_expert = expert.sort(stable=True).indices
        back = inverse_of(by_expert)
        offs = by_rank[1].sum(0).cumsum(0).to(torch.int32)
        rows = _Reordered.apply(rows, by_expert, back)
        H = F.grouped_mm(rows, self.W1.transpose(1, 2), offs=offs)
        Y = F.grouped_mm(compiled.glu(H, None, "swiglu"), self.W2.transpose(1, 2), offs=offs)
        Y = _Exchange.apply(_Reordered.apply(Y, back, by_expert), received, sent)
        return compiled.Combine.apply(Y, None, s, order, rows_of_pairs)


class Torchtitan(Way):
    """torchtitan's routed experts: its AllToAllTokenDispatcher and its GroupedExperts.

    The dispatcher sends one row per pair and waits for the host. `compiled` compiles the experts;
    dispatch and combination are not compiled.
    """

    waits = True
    computes_in = torch.bfloat16

    def __init__(self, problem, ctas_per_sm=1, compiled=True):
        super().__init__(problem, ctas_per_sm)
        if importlib.util.find_spec("torchtitan") is None:
            raise ImportError("torchtitan is not installed: scripts/gpu/packages.sh")
        from torch.distributed.tensor import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        set_spmd_backend("partial_dtensor")  # torch's all_to_all_single, without a check of types
        if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # torch 2.11
            torch.compiler._is_non_strict_tracing = lambda: False
        case, ranks, device = problem.case, dist.get_world_size(), problem.X.device.type
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))
        inner = GroupedExperts.Config(dim=case.d, hidden_dim=case.n, num_experts=case.E // ranks)
        dispatcher = AllToAllTokenDispatcher.Config(num_experts=case.E, top_k=case.K)
        with torch.device("meta"):
            config = RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
            self.module = config.build()
        experts = self.module.inner_experts
        gate, up = self.W1.detach().split(case.n, 1)
        for name, part in {"w1_EFD": gate, "w3_EFD": up, "w2_EDF": self.W2.detach()}.items():
            setattr(experts, name, torch.nn.Parameter(part.contiguous()))
        self.module.parallelize(types.SimpleNamespace(get_optional_mesh=lambda name: mesh))
        if compiled:
            experts.compile()
        self.W1 = self.W2 = None  # the module's parameters replace them

    def weights(self):
        experts = self.module.inner_experts
        return [experts.w1_EFD, experts.w3_EFD, experts.w2_EDF]

    def results(self):
        O, dX, _, gate, up, dW2 = self.step()
        return O.detach(), dX, torch.cat([gate, up], 1), dW2

    def forward(self):
        p = self.problem
        top, ids = p.logits().float().topk(p.K, dim=-1)
        counts = torch.bincount(ids.flatten(), minlength=p.case.E)
        return self.module(p.X[None], top.softmax(-1)[None], ids[None], counts)[0]


def inverse_of(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


FACTOR = 1.5  # capacity_factor of the implementations without "lossless" in their name
WAYS = {
    "own": (Own, {}),
    "lossless": (Ours, {}),
    "serial": (Ours, dict(capacity_factor=FACTOR)),
    "serial-kept": (Ours, dict(capacity_factor=FACTOR, keep_gathered=True)),
    "no-overlap": (Ours, dict(capacity_factor=FACTOR, overlap=False)),
    "chunks-2": (Ours, dict(capacity_factor=FACTOR, chunks=2)),
    "chunks-4": (Ours, dict(capacity_factor=FACTOR, chunks=4)),
    "chunks-auto": (Ours, dict(capacity_factor=FACTOR, chunks="auto")),
    "chunks-4-kept": (Ours, dict(capacity_factor=FACTOR, chunks=4, keep_gathered=True)),
    "pull-lossless": (Ours, dict(dispatch="pull")),
    "pull": (Ours, dict(capacity_factor=FACTOR, dispatch="pull")),
    "pull-kept": (Ours, dict(capacity_factor=FACTOR, dispatch="pull", keep_gathered=True)),
    "usual": (Usual, {}),
    "torchtitan": (Torchtitan, {}),
    "torchtitan-eager": (Torchtitan, dict(compiled=False)),
}
DEFAULT_WAYS = ["own", "lossless", "lossless@4", "serial", "serial@4", "serial-kept", "chunks-auto",
                "chunks-auto@4", "pull-lossless", "pull", "pull@4", "usual", "torchtitan"]  # fmt: skip


def way_of(text, problem):
    """Return the implementation of a name in WAYS, or of NAME@N with N CTAs per SM."""
    name, _, ctas_per_sm = text.partition("@")
    kind, options = WAYS[name]
    return kind(problem, int(ctas_per_sm or 1), **options)


def timed(call, device):
    """Return the milliseconds of a call on this rank.

    The devices of all ranks begin together, and the hosts launch ahead of them.
    """
    one = torch.ones(1, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(AHEAD_CYCLES)
    dist.all_reduce(one)
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def slowest(numbers, device):
    """Return the maximum of each number over the ranks."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def link_gb_per_s(rows, rounds):
    """Return {collective: GB/s that leave a GPU}; each rank sends rows (T, d)."""
    ranks = dist.get_world_size()
    every = rows.new_empty(ranks * rows.shape[0], rows.shape[1])
    back = torch.empty_like(every)
    leaving = rows.numel() * rows.element_size() * (ranks - 1)
    calls = {"all_gather": lambda: dist.all_gather_into_tensor(every, rows),
             "all_to_all": lambda: dist.all_to_all_single(back, every)}  # fmt: skip
    found = {}
    for name, call in calls.items():
        call()
        times = slowest([timed(call, rows.device) for _ in range(rounds)], rows.device)
        found[f"{name}_gb_per_s"] = leaving / statistics.median(times) * 1e-6
    return found


def fitting(case, device):
    """Return the case with T halved until the largest implementation fits into the GPU's memory."""
    if device.type == "cpu":
        return case
    size = DTYPES[case.dtype].itemsize
    weights = 3 * case.E * case.d * case.n * size
    total = torch.cuda.get_device_properties(device).total_memory
    while COPIES * case.rows * case.d * size + 2.5 * weights > 0.9 * total:
        case = dataclasses.replace(case, T=case.T // 2)
    return case


def expected(problem):
    """Return O, dX and the ranks' sums of the local dW1 and dW2, by the layer of all experts."""
    O, dX, _, *of_weights = way_of("own", problem).step()
    size = problem.case.E // dist.get_world_size()
    sums = []
    for gradient in of_weights:
        dist.all_reduce(gradient)
        sums.append(gradient[dist.get_rank() * size :][:size].clone())
    return {"O": O.detach(), "dX": dX, "dW1": sums[0], "dW2": sums[1]}


def check(way, want):
    for name, got in zip(want, way.results()):
        if way.all_experts and name.startswith("dW"):
            continue  # the gradients of one rank's tokens alone
        error = ((got.double() - want[name].double()).norm() / want[name].double().norm()).item()
        # Both results are rounded.
        if not error <= 2 * TOLERANCE[way.computes_in or got.dtype]:
            raise Wrong(f"{name} has a relative error of {error:.1e}")


def peak_of(step):
    """Return the peak memory of a step in bytes, above what is allocated before it."""
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
    # NCCL's watchdog queries events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def prepared(name, problem, want, in_graph):
    """Check an implementation, and return what a round calls and its values."""
    way = way_of(name, problem)
    check(way, want)
    values = {"plan_bytes": way.plan_bytes(), "in_graph": False}
    if not problem.X.is_cuda:
        return way.step, values
    values["peak_bytes"] = peak_of(way.step)
    if in_graph and not way.waits:
        return graph_of(way.step).replay, values | {"in_graph": True}
    return way.step, values


def measure(name, tokens, args, device):
    """Measure a layer; return {way: values}, with "links", and {way: error} of failures."""
    case = LAYERS[name] if tokens is None else dataclasses.replace(LAYERS[name], T=tokens)
    case = fitting(case, device)
    problem = Problem(case)  # the same weights on every rank; the tokens differ
    own = torch.Generator(device).manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        for tensor in (problem.X, problem.dO):
            tensor.normal_(generator=own).mul_(0.2)
    ranks = {"ranks": dist.get_world_size()}
    links = link_gb_per_s(problem.X.detach(), args.rounds)
    want = expected(problem)
    calls, found, left_out = {}, {}, {}
    for way in args.ways:
        wrong = None
        try:
            calls[way], found[way] = prepared(way, problem, want, args.graph)
        except Exception as error:  # any exception, those of torch included
            sentence = (str(error) or "without a message").splitlines()[0]
            wrong = f"{type(error).__name__}: {sentence}"
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, wrong)
        if (wrong := next((reason for reason in every if reason is not None), None)) is not None:
            left_out[way] = wrong
            calls.pop(way, None)
            found.pop(way, None)
    times = {way: [] for way in calls}
    for index in range(args.rounds):
        for way in random.Random(index).sample(list(calls), len(calls)):  # equal on every rank
            times[way].append(timed(calls[way], device))
    times = {way: slowest(of, device) for way, of in times.items()}
    for way, values in found.items():
        values |= {**case.shape, "dtype": case.dtype, **ranks}
        values |= {"rounds": args.rounds, "step_ms": records.quartiles(times[way])}
        if "own" in times:
            ratios = (mine / own for mine, own in zip(times[way], times["own"]))
            values["time_over_own"] = records.quartiles(ratios)
    kept = {way: {k: v for k, v in of.items() if v is not None} for way, of in found.items()}
    return {"links": {"T": case.T, **ranks, **links}, **kept}, left_out


def sentences(found, left_out):
    links, *ways = found.items()
    yield "  " + ", ".join(f"{name} {links[1][f'{name}_gb_per_s']:.0f} GB/s"
                           for name in ("all_gather", "all_to_all"))  # fmt: skip
    for way, values in ways:
        line = f"  {way:18} {values['step_ms'][1]:9.3f} ms"
        if "time_over_own" in values:
            line += f", {values['time_over_own'][1]:.3f}x the time of own"
        for what in ("peak_bytes", "plan_bytes"):
            if what in values:
                line += f", {what.removesuffix('_bytes')} {values[what] / 2**30:.3f} GiB"
        yield line + (", in a graph" if values["in_graph"] else "")
    for way, why in left_out.items():
        yield f"  left out: {way}: {why}"


def work(args, device):
    """Measure all layers on this rank; return whether every implementation ran."""
    measurements, complete = [], True
    facts = machine.describe(device.type, ("torch", "tilemoe", "torchtitan"))
    if device.type == "cuda":
        facts["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    nccl = {key: value for key, value in os.environ.items()
            if key.startswith(("NCCL_", "TORCH_NCCL_"))}  # fmt: skip
    default = ["small"] if device.type == "cpu" else [name for name in LAYERS if name != "small"]
    ranks = dist.get_world_size()
    cases = [(name, tokens) for tokens in args.tokens for name in args.layers or default]
    for name, tokens in cases:
        found, left_out = measure(name, tokens, args, device)
        complete = complete and not left_out
        measurements += [
            records.Measurement(f"expert-parallel/{name}/T={values['T']}/R={ranks}/{way}",
                                f"{ranks} x {facts['device']}", facts["versions"], facts["commit"],
                                values | nccl)
            for way, values in found.items()
        ]  # fmt: skip
        if dist.get_rank() == 0:
            T = found["links"]["T"]
            print(f"{name}, T = {T}: {ranks} ranks of {facts['device']}")
            print("\n".join(sentences(found, left_out)), flush=True)
            if args.json:  # after each layer, in case the run is interrupted
                args.json.parent.mkdir(parents=True, exist_ok=True)
                records.write(args.json, measurements)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return complete


def joined(place, world, args, rendezvous):
    """Run one rank (place: its number on this host) and end the process."""
    how, device = {}, torch.device(args.device)
    if rendezvous is not None:
        how = {"init_method": f"file://{rendezvous}", "rank": place, "world_size": world}
    if args.device == "cuda":
        torch.cuda.set_device(place)
        how["device_id"] = device = torch.device("cuda", place)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=timeout, **how)
    complete = work(args, device)
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
        help=f"implementations: {', '.join(WAYS)}; NAME@4: 4 CTAs per SM")  # fmt: skip
    add("--rounds", type=int, default=11)
    add("--tokens", nargs="+", type=int, default=[None], metavar="T",
        help="T of a rank, one case each; default: that of each layer")  # fmt: skip
    add("--graph", action="store_true", help="time a step in a CUDA graph")
    add("--world", type=int, help="ranks; default: one per GPU, or 2 on a CPU")
    add("--device", choices=["cuda", "cpu"], default="cuda",
        help="default: cuda; cpu only tests this script")
    add("--high-priority", action="store_true",
        help="give NCCL's streams a higher priority than the GEMMs'")  # fmt: skip
    add("--json", type=pathlib.Path, help="write a results file of JSON lines")
    args = parser.parse_args()
    if unknown := [way for way in args.ways if way.partition("@")[0] not in WAYS]:
        parser.error(f"--ways: {unknown[0]!r} must be one of {', '.join(WAYS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("expert_parallel.py: error: torch finds no GPU")
    if args.high_priority:
        os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    if "RANK" in os.environ:  # set by torchrun
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
