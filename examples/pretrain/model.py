"""A decoder-only transformer with sparse feed-forward layers: plain PyTorch around tilemoe.MoE.

B sequences of S tokens, so T = B S; the other letters are those of docs/mathematics.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilemoe
from grouped_mm import GroupedMMExperts


@dataclass(frozen=True)
class Config:
    d: int  # width of a token
    layers: int
    heads: int
    kv_heads: int  # each shared by heads / kv_heads queries
    context: int  # tokens of a sequence
    vocabulary: int
    E: int
    K: int
    n: int
    shared: int = 0  # width of the expert that every token has; 0: none
    tied: bool = True  # the output layer is the embedding
    scoring: str = "softmax_over_chosen"
    selection_bias: bool = False
    balance_coefficient: float = 0.01
    z_coefficient: float = 0.001
    rounding: str | None = None
    m: int = 128

    @property
    def head(self):
        return self.d // self.heads


CONFIGS = {
    # For tests: it learns bytes on a CPU in seconds.
    "tiny": Config(32, 2, 4, 2, 32, 257, E=8, K=2, n=16, shared=16),
    # The same with DeepSeek-V3's balance: no loss, but a bias on the choice.
    "tiny-bias": Config(
        32, 2, 4, 2, 32, 257, E=8, K=2, n=16, scoring="sigmoid_renormalized",
        selection_bias=True, balance_coefficient=0.0, z_coefficient=0.0,
    ),
    "S1": Config(512, 8, 8, 8, 1024, 16384, E=128, K=8, n=128),
    "S2": Config(512, 8, 8, 8, 1024, 16384, E=256, K=4, n=256),
    # The layers of lm-engine's public 7B configuration.
    "7B": Config(1536, 40, 24, 24, 4096, 100352, E=128, K=8, n=256, shared=1024),
}  # fmt: skip


class Losses(NamedTuple):
    """Of one micro-batch, () float32 each; balance and z are means over the layers."""

    total: torch.Tensor  # what is differentiated
    next_token: torch.Tensor  # cross-entropy, nats a token
    balance: torch.Tensor
    z: torch.Tensor


def rotation(S, head, device):
    """-> cos, sin (S, head / 2) float32 of the rotary embedding (arXiv 2104.09864), base 10,000."""
    frequency = 10000.0 ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head)
    angle = torch.arange(S, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x (B, heads, S, head): each pair (i, i + head / 2) turned by its angle, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.d, c.heads * c.head, bias=False)
        self.kv = nn.Linear(c.d, 2 * c.kv_heads * c.head, bias=False)
        self.out = nn.Linear(c.heads * c.head, c.d, bias=False)

    def forward(self, x, cos, sin):
        c, (B, S, _) = self.c, x.shape
        q = self.q(x).view(B, S, c.heads, c.head).transpose(1, 2)  # (B, heads, S, head)
        k, v = self.kv(x).view(B, S, 2 * c.kv_heads, c.head).transpose(1, 2).chunk(2, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = c.kv_heads != c.heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).reshape(B, S, -1))


class SharedExpert(nn.Module):
    """The SwiGLU that every token passes through."""

    def __init__(self, d, width):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: Config, experts):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.d)
        self.attention = Attention(c)
        self.moe_norm = nn.RMSNorm(c.d)
        self.moe = tilemoe.MoE(
            c.d,
            c.n,
            c.E,
            c.K,
            scoring=c.scoring,
            selection_bias=c.selection_bias,
            rounding=c.rounding,
            m=c.m,
            balance_coefficient=c.balance_coefficient,
            z_coefficient=c.z_coefficient,
            router_dtype=torch.float32,
        )
        if experts == "grouped_mm":
            self.moe.experts = GroupedMMExperts(c.d, c.n, c.E)
        self.shared = SharedExpert(c.d, c.shared) if c.shared else None

    def forward(self, x, cos, sin, seed, offset):
        """x (B, S, d) -> (B, S, d), of the layer: loss, balance, z () and expert_counts (E)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.moe_norm(x)
        out, aux = self.moe(h, seed=seed, offset=offset)
        if self.shared is not None:
            out = out + self.shared(h)
        return x + out, aux.loss, aux.balance, aux.z, aux.expert_counts


class Transformer(nn.Module):
    """experts: "tilemoe" or "grouped_mm", with the same parameters and names; recompute: keep the
    input of every block and compute the rest again in backward."""

    def __init__(self, c: Config, experts="tilemoe", recompute=False):
        super().__init__()
        self.c, self.recompute = c, recompute
        self.embedding = nn.Embedding(c.vocabulary, c.d)
        self.blocks = nn.ModuleList(Block(c, experts) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.d)
        self.head = None if c.tied else nn.Linear(c.d, c.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Normal of 0.02; what is added to the residual stream less by sqrt(2 layers), as GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)  # of a norm
            else:
                added = name.endswith(("attention.out.weight", "down_proj", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.c.layers) ** (0.5 * added))

    def forward(self, tokens, offset=0):
        """tokens (B, S + 1) -> Losses of predicting tokens[:, 1:], expert_counts (layers, E).

        offset: number of the micro-batch, for stochastic rounding; a layer's number is its seed.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)  # (B, S, d)
        cos, sin = rotation(inputs.shape[1], self.c.head, x.device)
        layers = []
        for seed, block in enumerate(self.blocks):
            if self.recompute and self.training:
                x, *rest = checkpoint(block, x, cos, sin, seed, offset, use_reentrant=False)
            else:
                x, *rest = block(x, cos, sin, seed, offset)
            layers.append(rest)
        loss, balance, z, counts = (torch.stack(kind) for kind in zip(*layers))
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)  # (B, S, vocabulary)
        next_token = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return Losses(next_token + loss.mean(), next_token, balance.mean(), z.mean()), counts
