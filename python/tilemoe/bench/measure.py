"""Measure one peer on a case.

A measurement has rounds of a forward and a backward with cold caches, by the CPU's clock or CUDA
events, and the peer's memory, host time and kernels.
"""

import time

import torch

from . import machine, memory
from .check import Wrong, check
from .problem import DTYPES, Case, Problem

PASSES = ("both", "forward", "backward", "inference")


class LeftOut(Exception):
    """The reason why a peer is not measured."""


class CpuClock:
    FLUSH_BYTES = 64 << 20  # many times the L2 of a core
    REST_SECONDS = 0.03  # threads of OpenMP spin for about 5 ms after their last work

    def __init__(self):
        self.flush = torch.zeros(self.FLUSH_BYTES, dtype=torch.uint8)

    def timed(self, work):
        """Return the milliseconds of a call with cold caches, and its result."""
        self.flush.add_(1)
        time.sleep(self.REST_SECONDS)
        return self.host(work)

    @staticmethod
    def host(work):
        begin = time.perf_counter()
        result = work()
        return (time.perf_counter() - begin) * 1e3, result

    untimed = host

    def release(self):
        pass


class CudaClock:
    FLUSH_BYTES = 256 << 20  # five times the L2
    CYCLES_PER_MS = 1_900_000  # an SM of an H100 at its highest clock
    MIN_AHEAD_MS, MAX_AHEAD_MS = 7, 100

    def __init__(self):
        self.flush = torch.zeros(self.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.ahead_ms = self.MIN_AHEAD_MS

    def timed(self, work):
        """Return the milliseconds on the device with cold caches, and the call's result.

        The device sleeps while the host queues the work, so that launches from Python do not count.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.add_(1)
        torch.cuda._sleep(int(self.ahead_ms * self.CYCLES_PER_MS))
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), result

    @staticmethod
    def untimed(work):
        """Run a call that may compile, and so does not show how far the host must be ahead."""
        result = work()
        torch.cuda.synchronize()
        return None, result

    def host(self, work):
        """Return the milliseconds until a call returns, on an idle device."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = work()
        elapsed = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        self.ahead_ms = min(max(self.ahead_ms, 2 * elapsed), self.MAX_AHEAD_MS)
        return elapsed, result

    @staticmethod
    def release():
        """Return the allocator's cache: the other peers' processes share the device."""
        torch.cuda.empty_cache()


def make_clock(device):
    return CudaClock() if device == "cuda" else CpuClock()


class Measured:
    """Peer on a case. The constructor warms it up, checks it and measures its memory."""

    TINY_CALLS, PROFILED_CALLS, WARM_UP = 50, 3, 3

    def __init__(self, make_peer, problem, clock, passes="both", host=False):
        self.clock, self.passes, case = clock, passes, problem.case
        self.values, self.host_peer = {}, None
        if host and case.device == "cpu":  # for a layer of eight tokens it is the time of the call
            self.host_peer = make_peer(Problem(Case("tiny", 8, 8, 8, 4, 2, dtype=case.dtype)))
            self._first_call(self.host_peer)
        self.peer = make_peer(problem)
        if host and self.host_peer is None:
            self.host_peer = self.peer
            self._first_call(self.peer)
        for _ in range(self.WARM_UP):
            self._run(clock.untimed)
        self._run(clock.host)
        if reason := self.peer.wrong_kernels():
            raise Wrong(reason)
        if self.peer.is_layer:
            self.values |= memory.measure(self.peer, passes)
        clock.release()

    def _first_call(self, peer):
        first = self._run(self.clock.host, peer)
        self.values |= {f"host_first_{key}": ms for key, ms in first.items()}

    def _run(self, clock, peer=None):
        """Return {"forward_ms", "backward_ms"}, or one of them, by a method of the clock."""
        peer = peer or self.peer
        with torch.set_grad_enabled(self.passes != "inference"):
            forward, O = clock(peer.infer if self.passes == "inference" else peer.forward)
        times = {"forward_ms": forward} if self.passes != "backward" else {}
        if self.passes in ("both", "backward"):
            times["backward_ms"], _ = clock(lambda: peer.backward(O))
        return times

    def round(self):
        if self.peer.X.is_cuda:
            self._run(self.clock.untimed)  # fills the allocator's cache again
        times = self._run(self.clock.timed)
        if self.host_peer is self.peer:
            host = self._run(self.clock.host)
            times |= {f"host_{key.replace('_ms', '_us')}": 1e3 * ms for key, ms in host.items()}
        self.clock.release()
        return times

    def finish(self, kernels=False):
        """Return the values, the samples by quantity, and [[pass, kernel, calls, us]]."""
        samples = {}
        if self.host_peer not in (None, self.peer):
            for _ in range(self.TINY_CALLS):
                for key, ms in self._run(self.clock.host, self.host_peer).items():
                    samples.setdefault(f"host_{key.replace('_ms', '_us')}", []).append(1e3 * ms)
        found = self._kernels() if kernels else []
        if reason := self.peer.wrong_kernels([name for _, name, *_ in found]):
            raise LeftOut(reason)
        return {"values": self.values, "samples": samples, "kernels": found}

    def _kernels(self):
        """Return torch's profile, the mean of some calls; launches of one kernel are added."""
        calls = [self._run(self._profiled) for _ in range(self.PROFILED_CALLS)]
        totals = {}
        for call in calls:
            for key, kernels in call.items():
                for name, us in kernels:
                    total = totals.setdefault((key.removesuffix("_ms"), name), [0, 0.0])
                    total[0] += 1 / len(calls)
                    total[1] += us / len(calls)
        return [[*key, round(count, 2), us] for key, (count, us) in totals.items()]

    def _profiled(self, work):
        """Return [(kernel, us)] of a call, like a method of the clock."""
        self.clock.flush.add_(1)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            result = work()
            torch.cuda.synchronize()
        return [(event.name, event.device_time_total) for event in profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA], result  # fmt: skip


class Graph(Measured):
    """Forwards without gradients, as decoding calls them, in one CUDA graph.

    The graph runs copies of the layer with cold weights: the copies that run between two runs of
    one copy read at least three times the size of the L2. Replays follow each other while the host
    is ahead.
    """

    MIN_FORWARDS, REPLAYS, MAX_COPIES, L2_BETWEEN = 48, 4, 64, 3

    def __init__(self, make_peer, case):
        self.host_peer, self.passes, self.clock = None, "inference", CudaClock()
        expert = 3 * case.n * case.d * DTYPES[case.dtype].itemsize
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        copies = (
            -(-self.L2_BETWEEN * l2_bytes // (expert * case.K)) + 1
        )  # a copy reads K experts or more
        if copies > self.MAX_COPIES:
            raise LeftOut(f"cold weights would require {copies} copies of such a small layer")
        peers = [make_peer(Problem(case, seed)) for seed in range(copies)]
        self.peer, repeats = peers[0], -(-self.MIN_FORWARDS // copies)
        self.forwards = repeats * copies
        experts = sum(peer.top_k()[1].unique().numel() for peer in peers) / copies
        self.values = {"copies": copies, "experts": experts, "weight_bytes": int(experts * expert)}
        with torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self.WARM_UP):
                    wanted = [peer.infer() for peer in peers]
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for _ in range(repeats):
                    got = [peer.infer() for peer in peers]
        for O in got:
            O.zero_()
        self.graph.replay()
        for index, (O, want) in enumerate(zip(got, wanted)):
            if not (O - want).float().norm() <= 1e-2 * want.float().norm():
                raise Wrong(f"O of copy {index} in the graph differs from the eager O")

    def round(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()  # then the weights of the first copies are also cold
        torch.cuda._sleep(int(30 * self.clock.CYCLES_PER_MS))
        begin.record()
        for _ in range(self.REPLAYS):
            self.graph.replay()
        end.record()
        end.synchronize()
        return {"forward_ms": begin.elapsed_time(end) / (self.REPLAYS * self.forwards)}

    def _kernels(self):
        found, _ = self._profiled(self.graph.replay)
        totals = {}
        for name, us in found:
            total = totals.setdefault(name, [0, 0.0])
            total[0] += 1 / self.forwards
            total[1] += us / self.forwards
        return [["forward", name, round(count, 2), us] for name, (count, us) in totals.items()]


def needed_bytes(peer, case):
    """Estimate a peer's memory in addition to the problem.

    The estimate includes gradients, a copy of W1, O and dX, and the working memory.
    """
    weights = 5 * case.E * case.d * case.n + 3 * case.T * case.d
    return weights * DTYPES[case.dtype].itemsize + peer.working_bytes(case)


def measured(peer, case, passes="both", host=False, graph=False):
    """Check a peer and warm it up; raise LeftOut if it cannot run here."""
    case = peer.case_of(case)
    if reason := peer.missing(case):
        raise LeftOut(reason)
    needed, free = needed_bytes(peer, case), machine.available_bytes(case.device)
    if needed > free:
        sizes = f"about {needed / 2**30:.1f} GiB required, {free / 2**30:.1f} GiB free"
        raise LeftOut(f"out of memory: {sizes}")
    try:
        if graph:
            found = Graph(peer, case)
        else:
            found = Measured(peer, Problem(case), make_clock(case.device), passes, host)
        if peer.is_layer:
            same = ("device", "dtype", "activation", "zipf", "biases", "frozen", "lora_rank")
            of_case = {key: getattr(case, key) for key in same}
            check(peer, passes, T=min(case.T, 256), **of_case)
        return found
    except Wrong as error:
        raise LeftOut(f"wrong results: {error}") from error


def reason_of(error):
    """Return the error as one sentence."""
    sentence = (str(error) or "without a message").splitlines()[0]
    kinds = (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, kinds) or "can't allocate memory" in sentence:
        return "out of memory"
    return f"{type(error).__name__}: {sentence}"


def answers(peer, case, settings, commands):
    """Yield an answer, a dictionary, to each of the commands "prepare", "round" and "finish".

    An error is the answer {"left_out": reason}. settings: passes, host, graph and kernels by name.
    """
    found = None
    for command in commands:
        try:
            if command == "prepare":
                of = {key: settings[key] for key in ("passes", "host", "graph")}
                found = measured(peer, case, **of)
                yield {}
            elif command == "round":
                yield found.round()
            elif command == "finish":
                of_machine = machine.describe(case.device, peer.packages)
                yield {**found.finish(settings["kernels"]), **of_machine}
        except LeftOut as error:
            yield {"left_out": str(error)}
        except Exception as error:  # foreign code may raise anything
            yield {"left_out": reason_of(error)}
