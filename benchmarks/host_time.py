#!/usr/bin/env python3
"""What a call of `tilemoe.moe` from logits takes of the host's time, and what of it is not C++'s.

  whole        tilemoe.moe on a layer of few tokens; on a GPU until the call returns
  over no-op   the same Python over operators of the same signatures that do nothing: what a call
               takes beyond the C++ layer
  no-op        one such operator as the package registers it, differentiated by a rule that keeps
               and returns tensors and does nothing else
  no-op twice  the same, but as the package's rule does it calls an operator that does nothing

The bars: over no-op at most 25 us without gradient; with gradient, forward and backward, at most
1.3 times a no-op and 10 us, told beside both. Needs tilemoe, and libtilemoe_torch_noop.so of a
build tree with tests:

  TILEMOE_LIBRARY_DIR=build/release/bindings/torch python3 benchmarks/host_time.py
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import torch

import tilemoe
from tilemoe import functional, ops
from tilemoe.bench import machine

T, d, n, E, K = 8, 64, 32, 8, 2
BARS = {"without gradient": 25.0, "factor": 1.3, "more": 10.0}
# Top-K, softmax over the chosen, one group; swiglu, concatenated.
NUMBERS = [0, K, 0, 1, 1, 0, 0, 0, 1], [1.0, 0.0, 0.0, 0.0]
REGISTERED = ("moe", "experts_backward_over_H")


def load_noop():
    """Defines torch.ops.tilemoe_noop by the package's own schemas. What is returned keeps it."""
    folder = pathlib.Path(os.environ.get("TILEMOE_LIBRARY_DIR", "."))
    file = folder / "libtilemoe_torch_noop.so"
    if not file.exists():
        sys.exit(f"host_time.py: error: {file} is not there: build with TILEMOE_BUILD_TESTS=ON, "
                 "and set TILEMOE_LIBRARY_DIR to bindings/torch of that build")
    library = torch.library.Library("tilemoe_noop", "DEF")
    for name in REGISTERED:
        schema = getattr(torch.ops.tilemoe, name).default._schema
        library.define(str(schema).removeprefix("tilemoe::"))
    torch.ops.load_library(file)
    return library


class Noop:
    """Puts the operators that do nothing in the place of the package's, while it lasts."""

    def __init__(self):
        self.definitions = load_noop()
        self.package, self.ops = torch.ops.tilemoe, torch.ops.tilemoe_noop
        self.registered = None

    def __enter__(self):
        ops._ops = functional._ops = self.ops

    def __exit__(self, *_):
        ops._ops = functional._ops = self.package

    def differentiate(self, save, backward):
        """Gives `moe` a gradient, in the package's way, in the place of the one before."""
        if self.registered is not None:
            self.registered._destroy()
        self.registered = torch.library.Library("tilemoe_noop", "IMPL")
        of_package = ops._library_of_gradients
        ops._library_of_gradients = self.registered
        try:
            with self:
                ops._differentiate("moe", save, backward)
        finally:
            ops._library_of_gradients = of_package


def save_nothing_else(ctx, inputs, output):
    X, router, _, (W1, _, W2, *_), *_ = inputs
    _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(X, router, W1, W2)


def return_what_was_kept(ctx, dO, *_):
    X, router, W1, W2 = ctx.saved_tensors
    return X, router, None, W1, None, W2, *(None,) * (len(ctx.needs_input_grad) - 6)


def call_another(ops):
    """A rule that calls the backward operator with what was kept."""

    def backward(ctx, dO, *_):
        X, _, W1, W2 = ctx.saved_tensors
        with torch._C._AutoDispatchBelowAutograd():
            (dX, dlogits, dW1, dW2), _ = ops.experts_backward_over_H.default(
                dO, X, X, X, [W1, None, W2, None, None, None], None, [], 0, *NUMBERS,
                torch.float32, 1 | 2 | 4 | 16, False,
            )  # fmt: skip
        others = (None,) * (len(ctx.needs_input_grad) - 6)
        return dX, dlogits.to(X.dtype), None, dW1, None, dW2, *others

    return backward


def median_us(call, rounds):
    """Of single calls, on an idle device."""
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def tensors(device, dtype):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype).requires_grad_()
    return make(T, d), make(T, E), make(E, 2 * n, d), make(E, d, n)


def measure(rounds, device, dtype, whole_alone):
    """{what: {pass: microseconds}}"""
    x, logits, W1, W2 = leaves = tensors(device, dtype)
    dO = torch.ones_like(x)
    noop = None if whole_alone else Noop()
    weights = [W1, None, W2, None, None, None]
    arguments = (x, logits, None, weights, None, *NUMBERS, True, False)

    def layer():
        return tilemoe.moe(x, logits, W1, W2, K=K)

    def operator():
        return noop.ops.moe.default(*arguments)[0]

    def with_gradient(forward):
        return lambda: torch.autograd.grad(forward(), leaves, dO)

    found = {}

    def take(name, forward):
        calls = {"forward, no gradient": torch.no_grad()(forward), "forward": forward,
                 "forward and backward": with_gradient(forward)}  # fmt: skip
        for call in calls.values():
            median_us(call, 50)
        found[name] = {kind: median_us(call, rounds) for kind, call in calls.items()}

    take("whole", layer)
    if whole_alone:
        return found
    noop.differentiate(save_nothing_else, return_what_was_kept)
    take("no-op", operator)
    noop.differentiate(save_nothing_else, call_another(noop.ops))
    take("no-op twice", operator)
    noop.differentiate(ops._moe_context, ops._layer_backward)
    with noop:
        take("over no-op", layer)
    return found


def check_bars(found):
    """Prints the bars beside what was found, and returns them."""
    without = found["over no-op"]["forward, no gradient"]
    both = found["over no-op"]["forward and backward"]
    bars = {name: BARS["factor"] * found[name]["forward and backward"] + BARS["more"]
            for name in ("no-op", "no-op twice")}  # fmt: skip
    print(f"without gradient {without:.1f}, bar {BARS['without gradient']:.1f}; "
          f"with gradient {both:.1f}, bar {bars['no-op']:.1f} by no-op, "
          f"{bars['no-op twice']:.1f} by no-op twice")
    return {"without gradient": BARS["without gradient"], **bars}


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--whole-alone", action="store_true",
                        help="what needs no operators that do nothing: any installed tilemoe")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", default=machine.commit(), help="else that of this source tree")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    found = measure(args.rounds, "cuda" if cuda else "cpu",
                    torch.bfloat16 if cuda else torch.float32, args.whole_alone)  # fmt: skip
    kinds = list(found["whole"])
    print(f"{'us':12}" + "".join(f"{kind:>24}" for kind in kinds))
    for name, times in found.items():
        print(f"{name:12}" + "".join(f"{times[kind]:24.1f}" for kind in kinds))
    bars = {} if args.whole_alone else check_bars(found)
    if args.json:
        entry = {
            **machine.describe("cuda" if cuda else "cpu", ("torch", "tilemoe")),
            "commit": args.commit,
            "rounds": args.rounds,
            "us": found,
            "bars_us": bars,
        }
        args.json.write_text(json.dumps(entry, indent=1) + "\n")


if __name__ == "__main__":
    main()
