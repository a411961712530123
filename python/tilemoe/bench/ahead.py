"""Has peers that compile at run time do so before anything is timed, for several cases at once.

Compilers work on one core or a few; a GPU's machine has many. sonic-moe's products do not depend
on a layer's sizes, so its first case compiles all of them, with as many processes as quack starts
(QUACK_COMPILE_WORKERS), and the other cases what is left, its router's and Triton's kernels."""

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor

from .session import LeftOut, Remote

AT_ONCE = 4  # each holds a layer's weights and gradients
TOKENS = 1024  # tiles are chosen by time, for each T: not here, where others disturb it


def compile_for(cases, peers, places, say):
    """Runs each peer that has a place of its own once on a shorter form of each case."""

    def one(name, case):
        begin = time.monotonic()
        short = dataclasses.replace(case, T=min(case.T, TOKENS))
        try:
            peer = Remote(places[name], name, short, "both", 0)
        except LeftOut as reason:
            say(f"{case.name}: {name} is left out: {reason}")
            return
        peer.entry()
        say(f"{case.name}: {name} compiled, {time.monotonic() - begin:.0f} s")

    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(os.cpu_count()))
    cases = sorted(cases, key=lambda case: case.E * case.d * case.n)  # the smallest is the first
    for name in (peer.name for peer in peers if peer.name in places):
        one(name, cases[0])
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda case: one(name, case), cases[1:]))
