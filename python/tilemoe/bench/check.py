"""Check that a peer computes the layer.

A small problem, forward and backward, is compared with the formula in float64. A peer that fails is
not timed.
"""

import torch

from .problem import Case, Problem, glu

# Relative to a tensor's norm. 16 bits: a peer stores up to eight tensors between an input and a
# gradient, each rounded by 2^-9 of its value (bfloat16); measured 0.4 to 0.7 %. The error of a
# swapped gate or a lost expert is over 10 %.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SIZES = dict(d=256, n=128, E=8, K=2)


class Wrong(Exception):
    """The peer runs, but computes something else."""


def small_problem(**of_case):
    """Return a problem with unit-scale data and no token with equal K-th and next logits.

    Implementations differ in which of two equal experts they choose.
    """
    case = Case("check", **{"T": 256, **SIZES, **of_case})
    for seed in range(100):
        problem = Problem(case, seed, x_scale=1.0, w_scale=0.1)
        with torch.no_grad():
            logits = problem.logits().sort(dim=-1).values  # (T, E)
            if (logits[:, -case.K] > logits[:, -case.K - 1]).all():
                return problem
    raise AssertionError("expected distinct logits with one of 100 seeds, got none")


def expected(problem):
    """Return O and the gradients of the leaves in float64, expert by expert.

    The experts are those that the problem's own logits choose.
    """
    ids = problem.logits().detach().float().topk(problem.K).indices  # (T, K)
    doubles = {id(t): t.detach().double() for t in [problem.X, *problem.weights, *problem.adapters]}
    leaves = [doubles[id(leaf)].requires_grad_() for leaf in problem.leaves]
    X, (router, W1, W2, *biases) = doubles[id(problem.X)], (doubles[id(t)] for t in problem.weights)
    if problem.adapters:
        A1, B1, A2, B2 = (doubles[id(t)] for t in problem.adapters)
        W1 = W1 + problem.LORA_SCALE * (B1 @ A1)
        W2 = W2 + problem.LORA_SCALE * (B2 @ A2)
    logits = X @ router.t()
    if problem.prepared is not None:
        logits = logits + problem.prepared.double()
    s = torch.zeros_like(logits).scatter(1, ids, logits.gather(1, ids).softmax(-1))  # (T, E)
    O = torch.zeros_like(X)
    for e in range(problem.case.E):
        b1, b2 = (b[e] for b in biases) if biases else (0, 0)
        A = glu(X @ W1[e].t() + b1, problem.case.activation)
        O = O + s[:, e, None] * (A @ W2[e].t() + b2)
    return O, *torch.autograd.grad(O, leaves, problem.dO.double())


def check(make_peer, passes="both", **of_case):
    """Raise Wrong if the peer's output or a gradient differs from the layer's.

    Args:
        make_peer: Function from a problem to the peer.
        passes: Passes to check.
        **of_case: Device, dtype and other fields of the small case.
    """
    backward = passes in ("both", "backward")
    problem = small_problem(**of_case)
    peer = make_peer(problem)
    with torch.set_grad_enabled(backward):
        found = [peer.infer() if passes == "inference" else peer.forward()]
    if backward:
        gradients = dict(zip(problem.names[1:], peer.backward(found[0])))
        if "dW1" in gradients:
            gradients["dW1"] = peer.given_layout(gradients["dW1"])
        found += gradients.values()
    tolerance = max(TOLERANCE[problem.X.dtype], peer.tolerance)
    for name, got, want in zip(problem.names, found, expected(problem)):
        got = got.detach().double()
        if got.shape != want.shape:
            raise Wrong(f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        error = ((got - want).norm() / want.norm()).item()
        if not error <= tolerance:
            raise Wrong(f"the error of {name} is {error:.1e} of its norm")
