#!/usr/bin/env python3
"""The layer as PyTorch users write it: the peer that `tilemoe bench` is compared with.

Router product, top-K with a softmax over the chosen, sort by expert, gather, grouped_mm, SwiGLU,
grouped_mm, weighted index_add; the backward is autograd's. Prints one entry in the form of
`tilemoe bench --json`. With --rounds-from-stdin it runs one round for every line it reads and
answers with the round's times, so that a caller can let it take turns with others.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

from rounds import claim_stdout, serve

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, about GPUs that are not there
try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit(
        "torch_grouped_mm.py: error: this Python has no torch; "
        f"{sys.executable} -m pip install -r benchmarks/requirements.txt"
    )

BACKEND = "torch-grouped_mm"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLUSH_BYTES = 64 << 20  # many times the L2 of a core


class Layer:
    """One layer's weights and one batch, with the bench's distributions."""

    def __init__(self, T, d, n, E, K, dtype):
        torch.manual_seed(0)

        def normal(scale, *shape):
            return (torch.randn(*shape) * scale).to(dtype)

        self.K = K
        self.X = normal(0.2, T, d).requires_grad_()  # (T, d)
        self.router = normal(d**-0.5, E, d).requires_grad_()  # (E, d)
        self.W1 = normal(0.02, E, 2 * n, d).requires_grad_()  # (E, 2n, d), gate rows first
        self.W2 = normal(0.02, E, d, n).requires_grad_()  # (E, d, n)
        self.dO = normal(0.2, T, d)  # (T, d)
        self.leaves = [self.X, self.router, self.W1, self.W2]

    def forward(self):
        T, E, K = self.X.shape[0], self.router.shape[0], self.K
        logits = self.X @ self.router.t()  # (T, E)
        top, ids = logits.float().topk(K, dim=-1)  # (T, K)
        s = top.softmax(dim=-1).to(self.X.dtype)  # (T, K)
        order = ids.flatten().argsort(stable=True)  # (M) pair of a row
        token = order // K  # (M)
        counts = torch.bincount(ids.flatten(), minlength=E)
        offsets = counts.cumsum(0).to(torch.int32)  # (E) ends
        rows = self.X[token]  # (M, d)
        H = F.grouped_mm(rows, self.W1.transpose(1, 2), offs=offsets)  # (M, 2n)
        gate, up = H.chunk(2, dim=-1)
        Y = F.grouped_mm(F.silu(gate) * up, self.W2.transpose(1, 2), offs=offsets)  # (M, d)
        weighted = Y * s.flatten()[order, None]
        return torch.zeros_like(self.X).index_add_(0, token, weighted)  # (T, d)

    def backward(self, O):
        return torch.autograd.grad(O, self.leaves, self.dO)


def one_round(layer, flush):
    """Milliseconds of one forward and one backward, caches cold before each."""
    flush.add_(1)
    start = time.perf_counter()
    O = layer.forward()
    forward = time.perf_counter() - start
    flush.add_(1)
    start = time.perf_counter()
    layer.backward(O)
    backward = time.perf_counter() - start
    return {"fwd_ms": forward * 1e3, "bwd_ms": backward * 1e3}


def check(layer):
    """The pipeline's first tokens against the formula, token by token, in float64."""
    with torch.no_grad():
        O = layer.forward().double()
        X, W1, W2 = layer.X.double(), layer.W1.double(), layer.W2.double()
        logits = layer.X @ layer.router.t()
        tokens = min(16, X.shape[0])
        expected = torch.zeros(tokens, X.shape[1], dtype=torch.float64)
        for t in range(tokens):
            top, ids = logits[t].float().topk(layer.K)
            for s, e in zip(top.double().softmax(-1), ids.tolist()):
                gate, up = (W1[e] @ X[t]).chunk(2)
                expected[t] += s * (W2[e] @ (F.silu(gate) * up))
        error = ((O[:tokens] - expected).norm() / expected.norm()).item()
    tolerance = 1e-5 if layer.X.dtype == torch.float32 else 2e-2
    if not error <= tolerance:
        sys.exit(f"torch_grouped_mm.py: error: the pipeline is off by {error:.1e} in O")


def saved_bytes(layer):
    """Bytes that autograd keeps for the backward beside the weights."""
    weights = {w.untyped_storage().data_ptr() for w in (layer.router, layer.W1, layer.W2)}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        O = layer.forward()
    layer.backward(O)
    return sum(storages.values())


def peak_bytes(layer):
    """Highest sum of all live tensors in a forward and backward: weights, gradients and X too."""
    resident = sum(tensor.untyped_storage().nbytes() for tensor in [*layer.leaves, layer.dO])
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        gradients = layer.backward(layer.forward())
    del gradients
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return resident + highest


def cpu_model():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(l.split(": ")[1].strip() for l in lines if l.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="custom", help="name to print with the numbers")
    for name in "TdnEK":
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=0, help="0 for one a core")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rounds-from-stdin", action="store_true", help="one round a line read")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    layer = Layer(args.T, args.d, args.n, args.E, args.K, DTYPES[args.dtype])
    flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8)
    check(layer)
    entry = {
        "config": args.config,
        "device": cpu_model(),
        "backend": BACKEND,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "shape": {name: getattr(args, name) for name in "TdnEK"},
        "saved_bytes": saved_bytes(layer),
        "peak_bytes": peak_bytes(layer),
        "steps": {},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    one_round(layer, flush)
    rounds = []

    def another():
        rounds.append(one_round(layer, flush))
        return rounds[-1]

    def result():
        medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} if rounds else {}
        return {**entry, **medians, "rounds": len(rounds)}

    if args.rounds_from_stdin:
        serve(claim_stdout(), BACKEND, another, result)
    else:
        for _ in range(args.rounds):
            another()
        print(json.dumps(result()), flush=True)


if __name__ == "__main__":
    main()
