#!/usr/bin/env python3
"""sonic-moe's layer, router included, as a peer that takes turns with `tilemoe bench` (rounds.py).

SwiGLU, bfloat16, top-K by softmax over the chosen, W1 with gate and up rows interleaved, which is
the layout it takes. Its tile search is kept to five shapes, as a full one takes minutes for every
new shape; QUACK_CACHE_DIR keeps what it compiled. With --inference nothing is kept for backward.
"""

import argparse
import importlib.metadata
import statistics
import sys

from rounds import claim_stdout, serve

ANSWERS = claim_stdout()
try:
    import torch
    from quack import gemm_config
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer
except ImportError as error:
    sys.exit(f"sonic_moe.py: error: {error}; this Python needs torch, sonic-moe and quack-kernels")

BACKEND = "sonic-moe"
# (tile M, tile N, ping-pong)
TILES = {(128, 128, True), (128, 192, True), (128, 256, False), (256, 128, False), (256, 192, False)}
FLUSH_BYTES = 256 << 20  # five times the L2
AHEAD_CYCLES = 12_000_000  # some 7 ms: its launches from Python take 2


def keep_tiles():
    every = gemm_config.get_all_configs

    def kept(*args, **kwargs):
        return [c for c in every(*args, **kwargs) if c.device_capacity == 9 and not c.swap_ab
                and (c.tile_m, c.tile_n, c.pingpong) in TILES]

    gemm_config.get_all_configs = kept


class Layer:
    """One layer's weights and one batch, with the bench's distributions."""

    def __init__(self, T, d, n, E, K):
        torch.manual_seed(0)

        def normal(scale, *shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale

        self.K = K
        self.X = normal(0.2, T, d).requires_grad_()  # (T, d)
        self.router = normal(d**-0.5, E, d).requires_grad_()  # (E, d)
        self.W1 = normal(0.02, E, 2 * n, d).requires_grad_()  # (E, 2n, d)
        self.W2 = normal(0.02, E, d, n).requires_grad_()  # (E, d, n)
        self.dO = normal(0.2, T, d)  # (T, d)
        self.leaves = [self.X, self.router, self.W1, self.W2]
        self.flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def forward(self):
        return moe_TC_softmax_topk_layer(
            self.X, self.router, self.W1.permute(1, 2, 0), None, self.W2.permute(1, 2, 0), None,
            self.K, torch.cuda.current_stream().cuda_stream, ActivationType.SWIGLU,
            not torch.is_grad_enabled())[0]

    def backward(self, O):
        return torch.autograd.grad(O, self.leaves, self.dO)


def timed(layer, work):
    """Milliseconds on the device, caches cold, without the gaps of a host that lags behind."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    layer.flush.add_(1)
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    result = work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result


def one_round(layer, backward):
    fwd_ms, O = timed(layer, layer.forward)
    times = {"fwd_ms": fwd_ms}
    if backward:
        times["bwd_ms"], _ = timed(layer, lambda: layer.backward(O))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", required=True, help="name to print with the numbers")
    for name in "TdnEK":
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--pass", dest="passes", choices=["forward", "both"], default="both")
    args = parser.parse_args()
    keep_tiles()
    layer = Layer(args.T, args.d, args.n, args.E, args.K)
    backward = args.passes == "both"
    for _ in range(3):  # compiles and tunes
        one_round(layer, backward)
    rounds = []

    def another():
        rounds.append(one_round(layer, backward))
        return rounds[-1]

    def entry():
        packages = ["sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "torch"]
        medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        return {"config": args.config, "backend": BACKEND, "dtype": "bfloat16",
                "device": torch.cuda.get_device_name(), "rounds": len(rounds), **medians,
                "shape": {name: getattr(args, name) for name in "TdnEK"},
                "versions": {name: importlib.metadata.version(name) for name in packages}}

    serve(ANSWERS, BACKEND, another, entry)


if __name__ == "__main__":
    main()
