"""An independent evaluation of recipe="fp8" in float64, which rounds where the recipe rounds, or nowhere.

It reads the tensors of a call with weights as values. Every rounding is one function, so that a test
can switch it off.
"""

import functools

import torch
from torch.nn import functional as F

ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
    "glu": torch.sigmoid,
}


def amax_of_blocks(values, rows=1):
    """The largest magnitude in the block of each value."""
    amax = torch.zeros_like(values)
    for r in range(0, values.shape[-2], rows):
        for c in range(0, values.shape[-1], 128):
            block = values[..., r : r + rows, c : c + 128]
            amax[..., r : r + rows, c : c + 128] = block.abs().amax((-2, -1), keepdim=True)
    return amax


def codes(values, rows=1):
    """Float64 values as E4M3 codes with a power of two per block represent them."""
    amax = amax_of_blocks(values, rows) if values.numel() else values
    exponent = torch.floor(torch.log2(448 / torch.where(amax > 0, amax, 1.0)))
    factor = torch.where(amax > 0, torch.exp2(exponent), 1.0)
    return (values * factor).to(torch.float8_e4m3fn).double() / factor


def evaluate(
    x, chosen, weights, dO, activation, dtype, rounds, row_rounds=True, save_h=None
):
    """-> {O, dX, ds, dW1, dW2, db1, db2} in float64.

    Args:
        x: (T, d) float64.
        chosen: (token, expert, score) of each pair, score float64.
        weights: W1 (E, 2n, d), b1 or None, W2 (E, d, n), b2 or None, float64.
        dO: (T, d) float64.
        activation: name, or a function of H (rows, 2n).
        rounds: round where the recipe does.
        row_rounds: with `rounds`, also to codes; else only to dtype, as in bf16.
        save_h: "fp8": backward reads codes of gate and of up.
    """
    W1, b1, W2, b2 = weights
    stored = (lambda t: t.to(dtype).double()) if rounds else (lambda t: t)
    rows8 = codes if rounds and row_rounds else (lambda t: t)
    gate = activation
    if isinstance(activation, str):
        gate = lambda H: ACTIVATIONS[activation](H.chunk(2, -1)[0]) * H.chunk(2, -1)[1]  # noqa: E731
    of_token, of_expert, score = chosen
    O, dX = torch.zeros_like(x), torch.zeros_like(x)
    ds = torch.zeros_like(score)
    grads = [torch.zeros_like(W) if W is not None else None for W in weights]
    dW1, db1, dW2, db2 = grads
    x8, dO8, x = rows8(x), rows8(dO), stored(x)
    for e in range(len(W1)):
        pairs = (of_expert == e).nonzero()[:, 0]
        token, s = of_token[pairs], score[pairs, None]
        H = x8[token] @ W1[e].T + (b1[e] if b1 is not None else 0)
        Y = stored(rows8(gate(H)) @ W2[e].T + (b2[e] if b2 is not None else 0))
        O.index_add_(0, token, s * Y)
        if save_h == "fp8" and rounds:
            H = torch.cat([codes(half) for half in H.chunk(2, -1)], -1)
        H = stored(H).requires_grad_()
        A = gate(H)
        dA = dO8[token] @ W2[e]  # without the score
        ds[pairs] = (dA * A.detach()).sum(-1)
        (dH,) = torch.autograd.grad(A, H, s * dA) if len(pairs) else (torch.zeros_like(H),)
        dH, A = stored(dH), stored(s * A.detach())
        dW2[e] = dO[token].T @ A
        dW1[e] = dH.T @ x[token]
        if b1 is not None:
            db1[e] = dH.sum(0)
        if b2 is not None:
            db2[e] = (s * dO[token]).sum(0)
            ds[pairs] += (dO[token] * b2[e]).sum(-1)
        dH8 = torch.cat([rows8(half) for half in dH.chunk(2, -1)], -1)
        dX.index_add_(0, token, stored(dH8 @ W1[e]))
    made = dict(O=stored(O), dX=stored(dX), ds=ds, dW1=dW1, dW2=dW2)
    return made | {name: g for name, g in (("db1", db1), ("db2", db2)) if g is not None}
