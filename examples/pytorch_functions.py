"""Train a small block on this repository's docs with the functions alone, on the CPU in seconds.

    python examples/pytorch_functions.py

The router, the parameters and the loop are the caller's: a bfloat16 model whose experts' gradients
are added to float32 buffers over micro-batches, with token rounding in training and plain top-K in
validation.
"""

import pathlib

import torch
import torch.nn.functional as F

import tilemoe

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
CONTEXT, WIDTH = 8, 8  # bytes that predict the next byte, and values per byte
d, n, E, K = CONTEXT * WIDTH, 64, 8, 2
STEPS, MICRO_BATCHES, T = 100, 2, 128


class Block(torch.nn.Module):
    """Predict logits (T, 256) of the next byte from ids (T, CONTEXT) of the last bytes."""

    def __init__(self):
        super().__init__()
        normal = lambda scale, *shape: torch.nn.Parameter(scale * torch.randn(*shape))
        self.embedding = normal(1.0, 256, WIDTH)
        self.router = normal(d**-0.5, E, d)
        self.W1 = normal(d**-0.5, E, 2 * n, d)
        self.W2 = normal(n**-0.5, E, d, n)
        self.head = normal(d**-0.5, 256, d)
        self.to(torch.bfloat16)
        # Backward adds the experts' gradients here: 16 bits would lose small ones.
        self.gradients = tilemoe.WeightGradients(
            W1=torch.zeros(E, 2 * n, d), W2=torch.zeros(E, d, n)
        )

    def forward(self, ids):
        x = self.embedding[ids].flatten(1)  # (T, d)
        logits = F.linear(x, self.router)  # (T, E)
        if self.training:
            x = tilemoe.moe(
                x, logits, self.W1, self.W2, K=K, rounding="nearest", m=16, addend=x,
                weight_grad_out=self.gradients,
            )  # fmt: skip
        else:
            scores, chosen = tilemoe.topk_router(logits, K)
            x = tilemoe.moe(x, scores, self.W1, self.W2, ids=chosen, addend=x)
        return F.linear(F.rms_norm(x, (d,)), self.head)


def batch(text, generator):
    """Return ids (T, CONTEXT) and next (T)."""
    starts = torch.randint(len(text) - CONTEXT, (T, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


@torch.no_grad()
def validation_loss(block, text):
    """Return the nats per byte, of every sixteenth byte."""
    block.eval()
    windows = text.unfold(0, CONTEXT + 1, 16)
    loss = F.cross_entropy(block(windows[:, :-1]).float(), windows[:, -1])
    block.train()
    return loss.item()


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    pages = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))
    text = torch.frombuffer(bytearray(pages), dtype=torch.uint8).long()
    cut = len(text) * 9 // 10
    train, validation = text[:cut], text[cut:]

    block = Block()
    model = list(block.parameters())  # bfloat16; the optimizer updates float32 copies
    master = [p.detach().float().requires_grad_() for p in model]
    optimizer = torch.optim.AdamW(master, lr=1e-2)
    added = {id(block.W1): block.gradients.W1, id(block.W2): block.gradients.W2}

    print(f"validation loss {validation_loss(block, validation):.3f} nats per byte", flush=True)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            ids, target = batch(train, generator)
            loss = F.cross_entropy(block(ids).float(), target) / MICRO_BATCHES
            loss.backward()
        for p, wide in zip(model, master):
            wide.grad = added[id(p)] if id(p) in added else p.grad.float()
        optimizer.step()
        for p, wide in zip(model, master):
            p.data.copy_(wide)
            p.grad = None
        for gradient in added.values():
            gradient.zero_()
    print(f"validation loss {validation_loss(block, validation):.3f} nats per byte")


if __name__ == "__main__":
    main()
