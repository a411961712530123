"""A case: which peers run it, their rounds in turn, and what is told of them."""

import dataclasses
import os
import pathlib
import random
import statistics
import sys
import time

from . import machine, memory
from .cases import DTYPES
from .check import Wrong, check
from .measure import Measured, make_clock
from .peers import TileMoE
from .problem import Problem
from .rounds import peer_worker


class LeftOut(Exception):
    """Why a peer is not timed."""


def _needed_bytes(peer, case):
    """About what a peer takes beside the problem: gradients, a copy of W1, O and dX, its own."""
    weights = 5 * case.E * case.d * case.n + 3 * case.T * case.d
    return weights * DTYPES[case.dtype].itemsize + peer.working_bytes(case)


def measured_in_process(peer, problem, clock, passes):
    """Checks a peer, then warms it up. LeftOut where it cannot run here."""
    case = problem.case
    if reason := peer.missing(case):
        raise LeftOut(reason)
    needed, there = _needed_bytes(peer, case), machine.available_bytes(case.device)
    if needed > there:
        raise LeftOut(f"it needs some {needed / 2**30:.1f} GiB, {there / 2**30:.1f} can be had")
    try:
        if peer.is_layer:
            check(peer, case.device, case.dtype, case.zipf, passes in ("both", "backward"))
        return Measured(peer, problem, clock, passes)
    except Wrong as error:
        raise LeftOut(f"wrong results: {error}") from error
    except Exception as error:  # of foreign code: whatever it raises
        sentence = (str(error) or "no more was said").splitlines()[0]
        raise LeftOut(f"{type(error).__name__}: {sentence}") from error


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a peer's process finds what it needs: a Python, a folder of packages before its own
    (`pip install --target`), which hides a TileMoE of this process, and variables of the
    environment."""

    python: str = sys.executable
    packages: pathlib.Path | None = None
    variables: dict = dataclasses.field(default_factory=dict)

    def environment(self):
        return {**self._with_packages(), **self.variables}

    def _with_packages(self):
        if self.packages is None:
            return dict(os.environ)
        # CuTe's DSL has its modules a level deeper, which pip tells Python by a .pth file.
        deeper = self.packages / "nvidia_cutlass_dsl" / "python_packages"
        path = [str(folder.resolve()) for folder in (self.packages, deeper) if folder.is_dir()]
        others = {k: v for k, v in os.environ.items() if k != "TILEMOE_LIBRARY_DIR"}
        return {**others, "PYTHONPATH": os.pathsep.join(path)}


class Remote:
    """A peer in a process of its own."""

    def __init__(self, place, name, case, passes, threads, kernels=False):
        self.name = name
        try:
            self.worker = peer_worker(place.python, name, dataclasses.asdict(case), passes, threads,
                                      place.environment(), kernels)  # fmt: skip
        except SystemExit as error:
            raise LeftOut(str(error)) from None
        if reason := self.worker.ready.get("left_out"):
            raise LeftOut(reason)

    def round(self):
        return self.worker.round()[self.name]

    def entry(self):
        return self.worker.finish()[0]


def _time_of_peers(entries):
    """Our time over each peer's, medians of the rounds' ratios: fwd_ms and bwd_ms, and of what a
    GPU's host takes, host_fwd_ms and host_bwd_ms."""
    ours, found = entries[0], {}
    for entry in entries[1:]:
        ratios = {}
        for prefix, rounds in (("", "round_times"), ("host_", "host_round_times")):
            both = list(zip(ours[rounds], entry[rounds]))
            for key in both[0][0] if both else ():
                ratios[prefix + key] = statistics.median(a[key] / b[key] for a, b in both)
        found[entry["backend"]] = ratios
    return found


def run(case, peers, *, passes="both", rounds=15, threads=0, places=None, kernels=False,
        granularity=False, say=lambda line: None):  # fmt: skip
    """The case's entries, TileMoE's first. peers: classes of peers.py; places: for a peer's name
    the Place of its process, where that is not this one; kernels: after the rounds also each
    kernel's time; granularity: also the memory at other n, of this process's peers."""
    problem, clock = Problem(case), make_clock(case.device)
    runners, left_out = [], {}
    for peer in peers:
        say(f"{case.name}: preparing {peer.name}")
        try:
            if place := (places or {}).get(peer.name):
                runners.append(Remote(place, peer.name, case, passes, threads, kernels))
            else:
                runners.append(measured_in_process(peer, problem, clock, passes))
        except LeftOut as error:
            if peer is TileMoE:
                raise LeftOut(f"{peer.name}: {error}") from error
            left_out[peer.name] = str(error)

    times, began = [], time.monotonic()
    for index in range(rounds):
        # Each is first as often; the others in no circle, since what a GPU at its power limit takes
        # depends on whose turn was before.
        first = runners[index % len(runners)]
        others = [runner for runner in runners if runner is not first]
        turns = [first, *random.Random(index).sample(others, len(others))]
        times.append({runner.name: runner.round() for runner in turns})
        line = ", ".join(f"{r.name} {sum(times[-1][r.name].values()):.3f}" for r in runners)
        say(f"{case.name}: round {index + 1} of {rounds}, ms: {line}")
        if index == 0 and rounds > 1:
            left = (time.monotonic() - began) * (rounds - 1)
            say(f"{case.name}: about {duration(left)} for the other {rounds - 1} rounds")

    entries = []
    packages = {peer.name: peer.packages for peer in peers}
    for runner in runners:
        entry = runner.entry()
        if isinstance(runner, Measured):
            entry |= machine.describe(case.device, packages[runner.name])
        entry["pass"] = passes
        entry["load_average"] = os.getloadavg()[0]
        entry["round_times"] = [r[runner.name] for r in times]
        entry["fwd_plus_bwd_ms"] = statistics.median(sum(r[runner.name].values()) for r in times)
        if kernels and isinstance(runner, Measured):
            entry["kernels"] = runner.kernels()
        if granularity and isinstance(runner, Measured):
            if passes == "both" and runner.peer.is_layer:
                entry["granularity"] = _granularity(type(runner.peer), case, say)
        entries.append(entry)
    ours = entries[0]
    ours["left_out"] = left_out
    ours["speed_against"] = {
        entry["backend"]: statistics.median(
            sum(r[entry["backend"]].values()) / sum(r[ours["backend"]].values()) for r in times
        )
        for entry in entries[1:]
    }
    ours["time_of_peers"] = _time_of_peers(entries)
    return entries


def duration(seconds):
    """ "40 s", "3 min" """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _granularity(peer, case, say):
    """Memory at other n with equal n * K and n * E."""
    found = []
    for finer in case.granularities():
        say(f"{case.name}: memory of {peer.name} at n={finer.n} E={finer.E} K={finer.K}")
        if _needed_bytes(peer, finer) > machine.available_bytes(case.device):
            continue
        made = peer(Problem(finer))
        made.backward(made.forward())  # a first call may keep what later ones find
        found.append({**finer.shape, **memory.measure(made)})
    return found
