"""Compare token rounding with top-K routing: time of the layer and its kernels, and pairs.

The rules run once in each round, one after another, with cold caches; numbers are quartiles over
the rounds. The program prints one JSON line per layer and rule and writes the lines to --json in
the format of records.py: forward_ms and backward_ms of the layer with its router, on a GPU also the
sums of its kernels' times, kernels_forward_ms and kernels_backward_ms; rows, the pairs that are
computed; and dropped and added, the pairs that the rounding removed and added.
"""

import dataclasses
import itertools
import sys

import torch

from . import machine, program, records
from .measure import Measured, make_clock
from .peers import TileMoE
from .problem import CASES, Problem

DEFAULT = ("7b-n256", "30b-n256", "qwen3-next")
RULES = ("top-k", "nearest", "balanced", "down", "up", "stochastic")


def pairs(problem):
    """Return the numbers of pairs that are computed, dropped and added."""
    import tilemoe

    with torch.no_grad():
        _, aux = tilemoe.moe(
            problem.X, problem.logits(), problem.W1, problem.W2, K=problem.K,
            rounding=problem.rounding, return_aux=True,
        )  # fmt: skip
    dropped, added = aux.dropped.item(), aux.added.item()
    return {"rows": problem.case.rows - dropped + added, "dropped": dropped, "added": added}


def measure(name, rules, tokens, device, rounds):
    """Yield a Measurement for each rule of a layer."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    case = dataclasses.replace(CASES[name], device=device, dtype=dtype)
    case = dataclasses.replace(case, T=tokens or case.T)
    clock, found = make_clock(device), {}
    for rule in rules:
        rounding = None if rule == "top-k" else rule
        problem = Problem(dataclasses.replace(case, rounding=rounding))
        found[rule] = problem, Measured(TileMoE, problem, clock)
    times = {rule: [] for rule in rules}
    for index in range(rounds):
        for rule in rules if index % 2 == 0 else reversed(rules):
            times[rule].append(found[rule][1].round())
    of_machine = machine.describe(device, ["tilemoe", "torch"])
    for rule, (problem, measured) in found.items():
        values = {**case.shape, "m": 128, "dtype": dtype, "rule": rule, "rounds": rounds}
        for key in ("forward_ms", "backward_ms"):
            values[key] = records.quartiles(of[key] for of in times[rule])
        for which, _, _, us in measured.finish(kernels=device == "cuda")["kernels"]:
            key = f"kernels_{which}_ms"
            values[key] = values.get(key, 0.0) + 1e-3 * us
        values |= pairs(problem)
        yield records.Measurement(name=f"rounding-layer/{name}/{rule}", values=values,
                                  **of_machine)  # fmt: skip


def main(argv=None):
    """Run the command line.

    Args:
        argv: Arguments of the command.
    """
    parser = program.parser_of("rounding", __doc__, 15, list(CASES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["top-k", "nearest"])
    parser.add_argument("--tokens", type=int, metavar="T", help="default: the layer's")
    args = program.arguments_of(parser, argv, list(CASES))
    of_layers = (
        measure(name, args.rules, args.tokens, args.device, args.rounds)
        for name in args.layers or DEFAULT
    )
    program.report(itertools.chain.from_iterable(of_layers), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
