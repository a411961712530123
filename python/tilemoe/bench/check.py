"""Is a peer the layer at all? A small problem, forward and backward, against the formula in
float64. A time of something else is worth nothing, so what fails here is not timed."""

import torch
import torch.nn.functional as F

from .cases import Case
from .problem import Problem

# Of a tensor's norm. 16 bits: a peer stores up to eight tensors between an input and a gradient,
# each rounded by 2^-9 of its value (bfloat16); measured 0.4 to 0.7 %. A swapped gate or a lost
# expert is over 10 %.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
NAMES = ("O", "dX", "drouter", "dW1", "dW2")


class Wrong(Exception):
    """The peer runs, and computes something else."""


def small_problem(device, dtype, zipf):
    """With unit-scale data, and with no token whose K-th and next logits are equal: which of two
    equal experts is taken is every implementation's own choice."""
    case = Case("check", T=256, d=256, n=128, E=8, K=2, device=device, dtype=dtype, zipf=zipf)
    for seed in range(100):
        problem = Problem(case, seed, x_scale=1.0, w_scale=0.1)
        with torch.no_grad():
            logits = problem.logits().sort(dim=-1).values  # (T, E)
            if (logits[:, -case.K] > logits[:, -case.K - 1]).all():
                return problem
    raise AssertionError("no seed of 100 gives distinct logits")


def expected(problem):
    """O, dX, drouter, dW1, dW2 in float64, expert by expert, for the experts that the problem's own
    logits choose."""
    ids = problem.logits().detach().float().topk(problem.K).indices  # (T, K)
    X, router, W1, W2 = (leaf.detach().double().requires_grad_() for leaf in problem.leaves)
    logits = X @ router.t()
    if problem.prepared is not None:
        logits = logits + problem.prepared.double()
    s = torch.zeros_like(logits).scatter(1, ids, logits.gather(1, ids).softmax(-1))  # (T, E)
    O = torch.zeros_like(X)
    for e in range(problem.case.E):
        gate, up = (X @ W1[e].t()).chunk(2, dim=-1)
        O = O + s[:, e, None] * ((F.silu(gate) * up) @ W2[e].t())
    return O, *torch.autograd.grad(O, [X, router, W1, W2], problem.dO.double())


def check(make_peer, device, dtype, zipf=False, backward=True):
    """Raises Wrong where the peer's output or a gradient is not the layer's."""
    problem = small_problem(device, dtype, zipf)
    peer = make_peer(problem)
    with torch.set_grad_enabled(backward):
        found = [peer.forward()]
    if backward:
        dX, drouter, dW1, dW2 = peer.backward(found[0])
        found += [dX, drouter, peer.given_layout(dW1), dW2]
    tolerance = TOLERANCE[problem.X.dtype]
    for name, got, want in zip(NAMES, found, expected(problem)):
        got = got.detach().double()
        if got.shape != want.shape:
            raise Wrong(f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        error = ((got - want).norm() / want.norm()).item()
        if not error <= tolerance:
            raise Wrong(f"{name} is off by {error:.1e} of its norm")
