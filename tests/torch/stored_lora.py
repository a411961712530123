"""stored.py's expert with low-rank adapters, in float64: it also rounds to 16 bits the factors and
the narrow products where tilemoe_lora in tilemoe.h says that the library does.

    P1 = x A1^T       H = x W1^T + P1 (scale B1)^T        Q2 = dO (scale B2)
    P2 = A A2^T       Y = A W2^T + P2 (scale B2)^T        Q1 = dH (scale B1)
"""

import torch

from reference import activate
from stored import rounded


def weighted_expert(x, s, W1, W2, b1, b2, act, dtype, adapters, parts):
    """x (rows, d), s (rows) -> s Y (rows, d), for autograd.

    adapters: (scale, A, B) or None of W1, of W1_up and of W2. parts: W1's rows, and those of W1_up,
    which follow them here, if the gate is split."""
    factors = [t for adapter in adapters for t in (adapter[1:] if adapter else (None, None))]
    scales = [adapter[0] if adapter else 1.0 for adapter in adapters]
    return _WeightedExpert.apply(act, dtype, scales, parts, x, s, W1, W2, b1, b2, *factors)


class _Adapter:
    """The factors as they are packed, for the columns [begin, end) of the output."""

    def __init__(self, scale, A, B, begin, end, dtype):
        self.scale, self.dtype, self.columns = scale, dtype, slice(begin, end)
        self.A, self.B = rounded(A, dtype), rounded(scale * B, dtype)

    def forward(self, rows):
        """rows (M, in) -> P (M, r), and what it adds (M, end - begin)."""
        P = rounded(rows @ self.A.T, self.dtype)
        return P, P @ self.B.T

    def backward(self, gradient):
        """gradient (M, out) -> Q (M, r), and what it adds to the gradient of `rows`."""
        Q = rounded(gradient[:, self.columns] @ self.B, self.dtype)
        return Q, Q @ self.A

    def of_B(self, gradient, weighted_P):
        return gradient[:, self.columns].T @ rounded(self.scale * weighted_P, self.dtype)


def _adapters(scales, parts, d, factors, dtype):
    """-> those of W1 and W1_up, that of W2; None for an absent one."""
    ends = [parts[0], sum(parts), d]
    begins = [0, parts[0], 0]
    made = [
        None if A is None else _Adapter(scale, A, B, begin, end, dtype)
        for scale, A, B, begin, end in zip(scales, factors[::2], factors[1::2], begins, ends)
    ]
    return made[:2], made[2]


class _WeightedExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, act, dtype, scales, parts, x, s, W1, W2, b1, b2, *factors):
        of_W1, of_W2 = _adapters(scales, parts, W2.shape[0], factors, dtype)
        H = x @ W1.T
        if b1 is not None:
            H = H + b1
        P1 = []
        for adapter in of_W1:
            P, added = adapter.forward(x) if adapter else (None, 0)
            P1.append(P)
            if adapter:
                H[:, adapter.columns] += added
        A = rounded(activate(H, **act), dtype)
        Y = A @ W2.T
        P2 = None
        if of_W2:
            P2, added = of_W2.forward(A)
            Y = Y + added
        if b2 is not None:
            Y = Y + b2
        ctx.save_for_backward(x, s, rounded(H, dtype), W1, W2, b1, b2, *P1, P2, *factors)
        ctx.how = act, dtype, scales, parts
        return s.unsqueeze(-1) * rounded(Y, dtype)

    @staticmethod
    def backward(ctx, dO):
        act, dtype, scales, parts = ctx.how
        x, s, H, W1, W2, b1, b2, P_gate, P_up, P2, *factors = ctx.saved_tensors
        of_W1, of_W2 = _adapters(scales, parts, W2.shape[0], factors, dtype)
        s = s.unsqueeze(-1)
        dA = dO @ W2
        if of_W2:
            Q2, added = of_W2.backward(dO)
            dA = dA + added
        with torch.enable_grad():
            H = H.detach().requires_grad_()
            A = activate(H, **act)
            (dH,) = torch.autograd.grad(A, H, s * dA)
        A, dH = A.detach(), rounded(dH, dtype)
        ds = (dA * A).sum(-1)
        if b2 is not None:
            ds = ds + dO @ b2
        weighted = rounded(s * A, dtype)
        dx, of_factors = dH @ W1, []
        for adapter, P in zip(of_W1, (P_gate, P_up)):
            if adapter is None:
                of_factors += [None, None]
                continue
            Q, added = adapter.backward(dH)
            dx = dx + added
            of_factors += [Q.T @ x, adapter.of_B(dH, P)]
        of_factors += [Q2.T @ weighted, of_W2.of_B(dO, s * P2)] if of_W2 else [None, None]
        of_weights = (
            dH.T @ x, dO.T @ weighted, None if b1 is None else dH.sum(0),
            None if b2 is None else (s * dO).sum(0),
        )  # fmt: skip
        return None, None, None, None, rounded(dx, dtype), ds, *of_weights, *of_factors
