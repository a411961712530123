"""Batch invariance of the experts: for given logits a token's bits, its row of O, dX and dlogits, do
not depend on the other tokens, how many there are, or where it stands among them."""

import pytest
import torch

import target
import tilemoe
from random_layers import normal
from target import DTYPES, DTYPE

E, K = 8, 2
# Widths off every tile, and on them; on a GPU as many tokens as bring every height of a tile.
SIZES = [(40, 24), (256, 128), (1000, 520)]
TOKENS = {"cpu": 300, "cuda": 6000}[target.DEVICE]
BATCHES = [1, 2, 3, 5, 6, 7, 16, 33, 64, 100, 128, 255]

KINDS = {
    "swiglu": {},
    "gelu": dict(activation="gelu"),
    "interleaved": dict(gate_layout="interleaved"),
    "transposed": dict(transposed=True),
    "biased": dict(bias=True),
    "blocks": dict(column_blocks=3),
}


class Layer:
    """Weights, and tokens with their logits and the gradients of their outputs."""

    def __init__(self, d, n, dtype, *, tokens=TOKENS, bias=False, transposed=False, **options):
        rows = n if options.get("activation") == "gelu" else 2 * n

        def weight(rows, columns, seed):
            made = normal(E, rows, columns, seed=seed, dtype=dtype, scale=columns**-0.5)
            return made.mT.contiguous().mT if transposed else made

        self.options = {"K": K, **options, "W1": weight(rows, d, 1), "W2": weight(d, n, 2)}
        if bias:
            self.options |= dict(
                b1=normal(E, rows, seed=3, dtype=dtype), b2=normal(E, d, seed=4, dtype=dtype)
            )
        self.x = normal(tokens, d, seed=5, dtype=dtype)
        # Some experts are chosen often, one hardly ever.
        skew = torch.linspace(2, -4, E, dtype=torch.float32, device=target.DEVICE)
        self.logits = normal(tokens, E, seed=6, dtype=torch.float32) + skew
        self.dO = normal(tokens, d, seed=7, dtype=dtype)

    def __call__(self, tokens):
        """Rows of O, dX and dlogits where these tokens are the batch, in this order."""
        x = self.x[tokens].requires_grad_()
        logits = self.logits[tokens].requires_grad_()
        O = tilemoe.moe(x, logits, **self.options)
        return O.detach(), *torch.autograd.grad(O, (x, logits), self.dO[tokens])


def differing(layer, whole, tokens):
    """Names of what has another bit in this batch than in that of all."""
    return [
        name
        for name, all_rows, rows in zip(("O", "dX", "dlogits"), whole, layer(tokens))
        if not torch.equal(all_rows[tokens], rows)
    ]


def batches(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    yield torch.randperm(tokens, generator=generator, device="cpu")
    yield torch.arange(tokens - 1, -1, -1, device="cpu")
    for size in (*BATCHES, tokens // 2, tokens - 1):
        yield torch.randperm(tokens, generator=generator, device="cpu")[:size]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_do_not_depend_on_its_batch(dtype, size, kind):
    if size != SIZES[0] and kind:
        kind = kind | dict(bias=True)
    layer = Layer(*size, dtype, **kind)
    whole = layer(torch.arange(TOKENS, device=target.DEVICE))
    for tokens in batches(8, TOKENS):
        tokens = tokens.to(target.DEVICE)
        assert not differing(layer, whole, tokens), f"a batch of {len(tokens)}"


def test_a_token_alone_has_the_same_bits_as_among_others():
    layer = Layer(256, 128, DTYPE)
    whole = layer(torch.arange(TOKENS, device=target.DEVICE))
    for t in range(0, TOKENS, TOKENS // 60):
        assert not differing(layer, whole, torch.tensor([t], device=target.DEVICE)), t


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_another_token_holds_changes_nothing(value):
    layer = Layer(256, 128, DTYPE)
    tokens = torch.arange(TOKENS, device=target.DEVICE)
    whole = layer(tokens)
    others = tokens % 7 == 3
    layer.x[others] = value
    layer.dO[others] = value
    for before, after in zip(whole, layer(tokens)):
        assert torch.equal(before[~others], after[~others])


def test_other_weights_have_other_bits():
    """The comparison can fail."""
    layer = Layer(256, 128, DTYPE)
    tokens = torch.arange(TOKENS, device=target.DEVICE)
    whole = layer(tokens)
    layer.options["W1"] = layer.options["W1"].flip(0)
    assert differing(layer, whole, tokens) == ["O", "dX", "dlogits"]
