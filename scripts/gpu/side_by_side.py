"""Measure parts of one GPU at the same time, each on a GPU of its own."""

import math
import pathlib
import queue
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import groups

MEASURE = pathlib.Path(__file__).with_name("measure.py")
GRACE_S = 30  # after the end, until the last item is ended and written


def has_time(expected, left):
    """Return whether a part is started: half of its items are worth it."""
    return left >= expected / 2


def command_of(name, gpu, args):
    """Return the command that measures a part into OUT/name, with its programs' files of that GPU."""
    chosen = [word for word in args.parts if word.partition("/")[0] == name] or [name]
    words = [sys.executable, MEASURE, *chosen, "--out", args.out / name, "--cache", args.cache,
             "--work", args.work / f"gpu-{gpu}", "--results", args.results]  # fmt: skip
    for option in ("programs", "wheel", "packages", "peers"):
        if value := getattr(args, option):
            words += [f"--{option}", value]
    return words + ["--again"] * args.again


def measure(expected, gpus, args, environment, end, say):
    """Measure the parts; return the sentences of what failed.

    Args:
        expected: {part: seconds}, the most useful first.
        gpus: The GPUs, as CUDA_VISIBLE_DEVICES names them.
        args: Options of measure.py, which each part's process gets.
        environment: Variables of the processes.
        end: Time of the monotonic clock at which items are ended; see has_time().
        say: Function that prints progress.
    """
    free = queue.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def one(name):
        gpu = free.get()
        try:
            left = end - time.monotonic()
            if not has_time(expected[name], left):
                say(f"{name}: not started: {expected[name]:.0f} s expected, {max(left, 0):.0f} s left")
                return []
            say(f"{name}: {expected[name]:.0f} s expected, on GPU {gpu}")
            began = time.monotonic()
            status, said = groups.run(
                [*command_of(name, gpu, args), "--seconds", f"{left:.0f}"],
                left + GRACE_S if math.isfinite(left) else None,
                environment | {"CUDA_VISIBLE_DEVICES": gpu}, ended_by=signal.SIGTERM,
            )  # fmt: skip
            say(f"{name}: exit status {status}, {time.monotonic() - began:.0f} s")
            for line in re.findall(r"^.*: not started: .*", said, re.M):  # its start took the time
                say(line)
            failed = re.findall(rf"^{re.escape(name)}, .*", said, re.M)
            return failed or ([] if status == 0 else [f"{name}: {said.strip()[-500:]}"])
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        begun = [pool.submit(one, name) for name in expected]
        return [line for future in groups.in_order(begun) for line in future.result()]

