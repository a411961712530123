"""A process whose first call of the package lies inside the capture of a CUDA graph: forward and
backward, replayed with new data. Its status is 1 where a replay has other bits than the same call
outside, or that call is not near float64's layer. Run by cuda_first_use_test.py."""

import sys

import torch

import target

target.run_on_cuda()

import reference  # noqa: E402
import tilemoe  # noqa: E402
from comparison import doubled  # noqa: E402
from random_layers import E, K, T, compare, d, expected_errors, logits_layer, normal  # noqa: E402

KINDS = {
    "top-k": {},
    "rounded": dict(rounding="nearest", m=8),
    "dH over H": dict(overwrite_H=True),
}


def main(kind, dtype):
    options = dict(K=K, **KINDS[kind])
    tensors = logits_layer(dtype, bias=True)
    names = list(tensors)
    dO = normal(T, d, seed=30, dtype=dtype)

    def both():
        O = tilemoe.moe(**tensors, **options)
        gradients = torch.autograd.grad(O, list(tensors.values()), dO)
        return {"O": O.detach()} | {f"d{name}": g for name, g in zip(names, gradients)}

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both()
    for seed in range(3):
        with torch.no_grad():
            tensors["x"].copy_(normal(T, d, seed=70 + seed, dtype=dtype))
            tensors["logits_or_scores"].copy_(normal(T, E, seed=60 + seed, dtype=torch.float32))
        graph.replay()
        replayed = {name: t.clone() for name, t in out.items()}
        outside = both()
        for name, tensor in outside.items():
            assert torch.equal(replayed[name], tensor), name

        def of_float64(stored=None):
            wide = doubled(tensors)
            O = reference.moe(**wide, **options, stored=stored)
            gradients = torch.autograd.grad(O, [wide[name] for name in names], dO.double())
            return {"O": O.detach()} | {f"d{name}": g for name, g in zip(names, gradients)}

        want = of_float64()
        compare(replayed, want, tensors, expected_errors(replayed, want, of_float64(dtype)))
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]))
