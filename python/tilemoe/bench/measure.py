"""One peer's rounds: a forward and a backward with cold caches, on the CPU's clock or by CUDA's
events."""

import statistics
import time

import torch

from . import memory
from .cases import Case
from .problem import Problem

PASSES = ("both", "forward", "backward", "inference")


class CpuClock:
    FLUSH_BYTES = 64 << 20  # many times the L2 of a core
    REST_SECONDS = 0.03  # OpenMP's threads spin for about 5 ms after their last work

    def __init__(self):
        self.flush = torch.zeros(self.FLUSH_BYTES, dtype=torch.uint8)

    def timed(self, work):
        """Milliseconds of a call with cold caches, and what it returned."""
        self.flush.add_(1)
        time.sleep(self.REST_SECONDS)
        return self.host(work)

    @staticmethod
    def host(work):
        begin = time.perf_counter()
        result = work()
        return (time.perf_counter() - begin) * 1e3, result

    untimed = host


class CudaClock:
    FLUSH_BYTES = 256 << 20  # five times the L2
    CYCLES_PER_MS = 1_900_000  # of an H100's SM at its highest clock
    LEAST_AHEAD_MS, MOST_AHEAD_MS = 7, 100

    def __init__(self):
        self.flush = torch.zeros(self.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.ahead_ms = self.LEAST_AHEAD_MS

    @property
    def settings(self):
        return {"host ahead by, ms": round(self.ahead_ms, 1)}

    def timed(self, work):
        """Milliseconds on the device with cold caches, and what the call returned. The device
        sleeps while the host queues the work, so that launching from Python does not count."""
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
        """A call that may compile, and so says nothing of how far the host has to be ahead."""
        result = work()
        torch.cuda.synchronize()
        return None, result

    def host(self, work):
        """Milliseconds until a call returns, on an idle device."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = work()
        elapsed = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        self.ahead_ms = min(max(self.ahead_ms, 2 * elapsed), self.MOST_AHEAD_MS)
        return elapsed, result


def make_clock(device):
    return CudaClock() if device == "cuda" else CpuClock()


class Measured:
    """A peer on a case. Making it warms it up and measures its memory."""

    TINY_CALLS, PROFILED_CALLS = 50, 3

    def __init__(self, make_peer, problem, clock, passes="both", warm_up=3):
        self.peer, self.clock, self.passes = make_peer(problem), clock, passes
        self.name = self.peer.name
        for _ in range(warm_up):
            self._run(clock.untimed)
        self._run(clock.host)
        holds = self.peer.is_layer and passes in ("both", "backward")
        self.memory = memory.measure(self.peer) if holds else {}
        self.tiny = None
        if problem.case.device == "cpu":
            case = Case("tiny", 8, 8, 8, 4, 2, dtype=problem.case.dtype)
            self.tiny = make_peer(Problem(case))
        self.rounds, self.host_rounds = [], []

    def _run(self, clock, peer=None):
        """Times of the passes by one of the clock's ways."""
        peer = peer or self.peer
        with torch.set_grad_enabled(self.passes != "inference"):
            forward, O = clock(peer.forward)
        times = {"fwd_ms": forward} if self.passes != "backward" else {}
        if self.passes in ("both", "backward"):
            times["bwd_ms"], _ = clock(lambda: peer.backward(O))
        return times

    def round(self):
        self.rounds.append(self._run(self.clock.timed))
        if self.tiny is None:
            self.host_rounds.append(self._run(self.clock.host))
        return self.rounds[-1]

    def _host_ms(self):
        """Of a call's own cost: on a GPU until the call returns, on the CPU the time of a layer of
        eight tokens."""
        calls = self.host_rounds
        if self.tiny is not None:
            calls = [self._run(self.clock.host, self.tiny) for _ in range(self.TINY_CALLS)]
        names = {"fwd_ms": "forward", "bwd_ms": "backward"}
        return {names[key]: median for key, median in _medians(calls).items()}

    def kernels(self):
        """{pass: {kernel: ms}} by torch's profiler, medians over the calls, launches of one kernel
        added up; only a GPU has them."""
        if self.peer.X.device.type != "cuda":
            return {}
        calls = [self._run(self._profiled) for _ in range(self.PROFILED_CALLS)]
        names = {"fwd_ms": "forward", "bwd_ms": "backward"}
        return {names[key]: _medians([call[key] for call in calls]) for key in calls[0]}

    def _profiled(self, work):
        """{kernel: ms} of a call, as a clock's way."""
        self.clock.flush.add_(1)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            result = work()
            torch.cuda.synchronize()
        times = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name] = times.get(event.name, 0) + event.device_time_total * 1e-3
        return times, result

    def entry(self):
        case = self.peer.problem.case
        medians = _medians(self.rounds)
        return {
            "config": case.name,
            "backend": self.name,
            "dtype": case.dtype,
            "shape": case.shape,
            "rows": case.rows,
            **medians,
            "host_ms": self._host_ms(),
            "tflops": case.flop(self.passes) / sum(medians.values()) * 1e-9 if medians else None,
            **self.memory,
            "rounds": len(self.rounds),
            "host_round_times": self.host_rounds,
            "settings": {**self.peer.settings, **getattr(self.clock, "settings", {})},
        }


def _medians(rounds):
    """By key, over the rounds that have it."""
    keys = dict.fromkeys(key for one in rounds for key in one)
    return {key: statistics.median(one[key] for one in rounds if key in one) for key in keys}
