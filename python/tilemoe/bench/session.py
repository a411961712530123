"""Run a case: each peer in a separate process, interleaved rounds, and the results."""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from .kernels import step
from .measure import LeftOut
from .peers import TileMoE
from .records import Measurement, quartiles

ROOT = pathlib.Path(__file__).resolve().parents[2]  # the package's folder, for its workers
# Each process has a layer's weights and gradients, 10 GB at most.
COMPILE_AT_ONCE = max(2, min(10, (os.cpu_count() or 1) // 3))
COMPILE_TOKENS = 1024  # tiles are chosen by time, for each T: not while others compile


@dataclasses.dataclass(frozen=True)
class Settings:
    """How peers are measured.

    Attributes:
        places: {peer: Place} of peers in another Python or another folder of packages.
        options: Options of tilemoe.moe, for the peer tilemoe.
        cache: Folder of compiled kernels.
        timeout: Seconds for one answer.
        variables: Environment variables of the peer tilemoe.
    """

    passes: str = "both"
    rounds: int = 15
    timeout: float = 900.0
    threads: int = 0
    host: bool = False
    kernels: bool = False
    graph: bool = False
    options: dict = dataclasses.field(default_factory=dict)
    variables: dict = dataclasses.field(default_factory=dict)
    places: dict = dataclasses.field(default_factory=dict)
    cache: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Python of a peer's process, and a folder of packages before its own.

    The folder (`pip install --target`) hides this process's TileMoE.
    """

    python: str = sys.executable
    packages: pathlib.Path | None = None

    def environment(self):
        if self.packages is None:
            return dict(os.environ)
        # The modules of CuTe's DSL are in a subfolder, which pip lists in a .pth file.
        deeper = [self.packages / "nvidia_cutlass_dsl" / name
                  for name in ("python_packages", "dsl_packages")]  # the second since 4.7
        path = [str(folder.resolve()) for folder in (self.packages, *deeper) if folder.is_dir()]
        others = {k: v for k, v in os.environ.items() if k != "TILEMOE_LIBRARY_DIR"}
        return {**others, "PYTHONPATH": os.pathsep.join(path)}


def cache_variables(folder):
    """Return the cache folders of quack's kernels and tiles, Triton and torch.compile."""
    if folder is None:
        return {}
    names = {"QUACK_CACHE_DIR": "quack", "CUTE_DSL_CACHE_DIR": "cute", "TRITON_CACHE_DIR": "triton",
             "TORCHINDUCTOR_CACHE_DIR": "inductor"}  # fmt: skip
    return {**{name: str(folder.resolve() / of) for name, of in names.items()},
            "QUACK_CACHE_AUTOTUNING": "1", "TRITON_CACHE_AUTOTUNING": "1"}  # fmt: skip


class Worker:
    """Process of a peer. It starts immediately and answers one command at a time."""

    def __init__(self, peer, case, settings):
        self.peer, self.timeout, self.rounds = peer, settings.timeout, []
        place = settings.places.get(peer.name, Place())
        own, environment = peer is TileMoE, place.environment() | cache_variables(settings.cache)
        environment |= peer.variables(environment) | (settings.variables if own else {})
        job = {
            "peer": peer.name, "case": dataclasses.asdict(case), "passes": settings.passes,
            "threads": settings.threads, "host": settings.host, "kernels": settings.kernels,
            "graph": settings.graph, "options": settings.options if own else {},
            "root": str(ROOT) if place == Place() else None,
        }  # fmt: skip
        script = pathlib.Path(__file__).with_name("worker.py")
        self.process = subprocess.Popen(
            [place.python, str(script), json.dumps(job)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def request(self, command):
        """Return the answer to a command; after the timeout end the process and raise LeftOut."""
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=self.timeout)
        except queue.Empty:
            self.close()
            raise LeftOut(
                f"no answer to {command!r} within {self.timeout:.0f} s (--timeout)"
            ) from None
        except OSError:
            answer = None
        if answer is None:
            status = self.process.wait()
            by = f"status {status}" if status >= 0 else signal.Signals(-status).name
            likely = " (out of memory?)" if status == -signal.SIGKILL else ""
            raise LeftOut(f"its process ended with {by}{likely}")
        if reason := answer.get("left_out"):
            self.close()
            raise LeftOut(reason)
        return answer

    def close(self):
        """End the process and the processes that it started, for example compilers."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):  # a command that it did not read
            self.process.stdin.close()


@dataclasses.dataclass
class Result:
    """Results of a case.

    Attributes:
        measurements: TileMoE's first.
        kernels: {peer: [[pass, kernel, calls, us]]}.
        left_out: {peer: reason}.
    """

    case: object
    measurements: list
    kernels: dict
    left_out: dict


def run(case, peers, settings, say=lambda line: None, start=Worker):
    """Measure a case.

    Args:
        case: The case.
        peers: Classes, TileMoE first.
        settings: How peers are measured.
        say: Function that prints progress.
        start: Function that starts a worker.

    Raises:
        LeftOut: TileMoE cannot run.
    """
    workers, left_out = [start(peer, case, settings) for peer in peers], {}
    living = list(workers)

    def request(worker, command):
        """Return the answer; or None, and the worker is skipped."""
        try:
            return worker.request(command)
        except LeftOut as reason:
            if worker.peer is TileMoE:
                raise LeftOut(f"{worker.peer.name}: {reason}") from reason
            say(f"{case.name}: skip {worker.peer.name}: {reason}")
            left_out[worker.peer.name] = str(reason)
            living.remove(worker)

    try:
        for worker in workers:
            say(f"{case.name}: prepare {worker.peer.name}")
            request(worker, "prepare")
        began = time.monotonic()
        for index in range(settings.rounds):
            # Each peer is first equally often; the others run in random order, because the clock
            # of a GPU at its power limit depends on the previous work.
            first = living[index % len(living)]
            others = [worker for worker in living if worker is not first]
            for worker in [first, *random.Random(index).sample(others, len(others))]:
                if (times := request(worker, "round")) is not None:
                    worker.rounds.append(times)
            line = ", ".join(f"{w.peer.name} {total_ms(w.rounds[-1]):.3f}" for w in living)
            say(f"{case.name}: round {index + 1} of {settings.rounds}, ms: {line}")
            if index == 0 and settings.rounds > 1:
                left = (time.monotonic() - began) * (settings.rounds - 1)
                rest = settings.rounds - 1
                say(f"{case.name}: about {duration(left)} for the remaining {rest} rounds")
        answers = {w.peer.name: answer for w in list(living) if (answer := request(w, "finish"))}
    finally:
        for worker in workers:
            worker.close()
    commit = answers[TileMoE.name]["commit"] or "unknown"  # the commit of the bench, too
    for answer in answers.values():
        answer["commit"] = answer["commit"] or commit
    ours = living[0].rounds
    measurements = [_measurement(case, settings, w, answers[w.peer.name], ours) for w in living]
    if left_out:
        reasons = "; ".join(f"{peer}: {reason}" for peer, reason in left_out.items())
        measurements[0].values["left_out"] = reasons
    kernels = {peer: answer["kernels"] for peer, answer in answers.items()}
    return Result(case, measurements, kernels, left_out)


def total_ms(times):
    """Return the time of all passes of a round."""
    return sum(ms for key, ms in times.items() if key in ("forward_ms", "backward_ms"))


def _measurement(case, settings, worker, answer, ours):
    samples = {key: [r[key] for r in worker.rounds] for key in worker.rounds[0]} | answer["samples"]
    totals = [total_ms(times) for times in worker.rounds]
    values = {
        **case.shape, **({"frozen": True, "lora_rank": case.lora_rank} if case.frozen else {}),
        "dtype": case.dtype, "pass": settings.passes, "rounds": settings.rounds,
        **{key: quartiles(numbers) for key, numbers in samples.items()},
        "total_ms": quartiles(totals),
        "tflop_per_s": quartiles(case.flop(settings.passes) / ms * 1e-9 for ms in totals),
        **answer["values"],
    }  # fmt: skip
    if worker.peer is not TileMoE:  # round by round
        ratios = (theirs / total_ms(mine) for theirs, mine in zip(totals, ours))
        values["time_over_tilemoe"] = quartiles(ratios)
    if answer["kernels"]:
        values["launches"] = sum(calls for _, _, calls, _ in answer["kernels"])
    for which, name, _, us in answer["kernels"]:
        key = f"{which}.{re.sub('[ -]', '_', step(name))}_ms"
        values[key] = values.get(key, 0.0) + 1e-3 * us
    return Measurement(f"bench/{case.name}/{worker.peer.name}", answer["device"],
                       answer["versions"], answer["commit"], values)  # fmt: skip


def duration(seconds):
    """Return a duration such as "40 s" or "3 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def compile_ahead(cases, peers, settings, say):
    """Compile each peer's kernels for the cases into the cache, several cases at once; no times.

    sonic-moe's GEMMs do not depend on a layer's sizes: its first case compiles all of them, with
    the processes that quack starts, and the other cases compile their router's and Triton's
    kernels.

    Args:
        cases: The cases.
        peers: Classes of peers.
        settings: How peers are measured.
        say: Function that prints progress.
    """

    def one(peer, case):
        began = time.monotonic()
        worker = Worker(peer, dataclasses.replace(case, T=min(case.T, COMPILE_TOKENS)), settings)
        try:
            worker.request("prepare")
            say(f"{case.name}: {peer.name} compiled, {time.monotonic() - began:.0f} s")
        except LeftOut as reason:
            say(f"{case.name}: skip {peer.name}: {reason}")
        finally:
            worker.close()

    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(os.cpu_count()))
    cases = sorted(cases, key=lambda case: case.E * case.d * case.n)  # smallest first
    for peer in peers:
        one(peer, cases[0])
        with ThreadPoolExecutor(COMPILE_AT_ONCE) as pool:
            list(pool.map(lambda case: one(peer, case), cases[1:]))
