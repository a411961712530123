"""Define a decoder-only transformer with sparse feed-forward layers around tilemoe.MoE.

B sequences of S tokens, so T = B S; the other symbols are those of docs/mathematics.md.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tilemoe
from capacity import Bounded
from configs import Config
from experts import PEERS, is_one_graph
from head import LinearCrossEntropy, cross_entropy
from renormalized import Renormalized

ROTARY_BASE = 10000.0
_UNREAD = ("ids", "scores")  # fields of an aux that are dropped for a whole model
RECOMPUTE = {"none": 0, "half": 2, "blocks": 1}  # interval of blocks that save only their input


class Routed(NamedTuple):
    """Statistics of the layers' routing of one micro-batch; floats are means over the layers.

    Attributes:
        expert_counts: int32, shape (layers, E): counts before rounding and dropping.
        load: float32, shape (): maximum tokens of an expert, divided by the mean.
        dropped: float32, shape (): dropped pairs, as a fraction of all chosen pairs.
        added: float32, shape (): added pairs, as a fraction of all chosen pairs.
        without: float32, shape (): tokens without an expert, as a fraction of all tokens.
        no_place: float32, shape (): pairs over the capacity of their experts' processes, as a
            fraction of all pairs.
    """

    expert_counts: torch.Tensor
    load: torch.Tensor
    dropped: torch.Tensor
    added: torch.Tensor
    without: torch.Tensor
    no_place: torch.Tensor


class Losses(NamedTuple):
    """Losses of one micro-batch, () float32 each; balance and z are means over the layers.

    Attributes:
        total: The differentiated loss.
        next_token: Cross-entropy, nats per token.
        balance: Load balance loss.
        z: Router z loss.
    """

    total: torch.Tensor
    next_token: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor


def rotation(first, S, head, device):
    """Return cos and sin (S, head / 2) float32 of rotary embeddings from `first` on.

    The embedding is that of arXiv 2104.09864 with base ROTARY_BASE.
    """
    even = torch.arange(0, head, 2, device=device, dtype=torch.float32)
    position = torch.arange(first, first + S, device=device, dtype=torch.float32)
    angle = position[:, None] * ROTARY_BASE ** (-even / head)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate each pair (i, i + head / 2) of x (B, heads, S, head) by its angle, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def own_part(whole, parameter):
    """Return this process' part of a tensor of a sharded parameter.

    The experts' part is taken first, if processes share them, then FSDP's.
    """
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        parts, own = whole.chunk(mesh.size(axis)), mesh.get_local_rank(axis)
        whole = parts[own] if own < len(parts) else whole[:0]
    return whole


class Cache:
    """Keys and values of one layer, (B, kv_heads, tokens so far, head), during sampling."""

    def __init__(self):
        self.keys = self.values = None

    @property
    def length(self):
        return 0 if self.keys is None else self.keys.shape[2]

    def extended(self, keys, values):
        """Append keys and values of the following tokens, and return all."""
        if self.keys is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.d, c.heads * c.head, bias=False)
        self.kv = nn.Linear(c.d, 2 * c.kv_heads * c.head, bias=False)
        self.out = nn.Linear(c.heads * c.head, c.d, bias=False)

    def forward(self, x, cos, sin, cache=None):
        c, (B, S, _) = self.c, x.shape
        q = self.q(x).view(B, S, c.heads, c.head).transpose(1, 2)  # (B, heads, S, head)
        k, v = self.kv(x).view(B, S, 2 * c.kv_heads, c.head).transpose(1, 2).chunk(2, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extended(k, v)
        is_whole = k.shape[2] == S  # otherwise one token, which attends to all previous tokens
        grouped = c.kv_heads != c.heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_whole, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).reshape(B, S, -1))


class SharedExpert(nn.Module):
    """SwiGLU of every token."""

    def __init__(self, d, width):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: Config, experts, spread):
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
            rounding_tokens=c.routing_tokens,
            balance_coefficient=c.balance_coefficient,
            z_coefficient=c.z_coefficient,
            recipe=c.recipe,
            save_h=c.save_h,
            router_dtype=torch.float32,
            return_aux=True,
            **spread,
        )
        if experts != "tilemoe":
            self.moe.experts = PEERS[experts](c.d, c.n, c.E)
        elif c.capacity is not None:
            self.moe.experts = Bounded(c)
        elif c.renormalize:
            self.moe.experts = Renormalized(c)
        self.shared = SharedExpert(c.d, c.shared) if c.shared else None

    def forward(self, x, cos, sin, seed, offset, cache=None):
        """Compute x (B, S, d) -> (B, S, d), and the layer's aux without ids and scores.

        seed and offset are (1) int64 or None.
        """
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        h = self.moe_norm(x)
        out, aux = self.moe(h, seed=seed, offset=offset)
        if self.shared is not None:
            out = out + self.shared(h)
        return x + out, *aux[: -len(_UNREAD)]


class Transformer(nn.Module):
    """The whole model.

    Args:
        experts: Name in experts.IMPLEMENTATIONS, all with the same parameters and names.
        recompute: Key of RECOMPUTE: blocks that save only their input and recompute the rest in
            backward.
        spread: Arguments of tilemoe.MoE that shard experts over several processes.
    """

    def __init__(self, c: Config, experts="tilemoe", recompute="none", spread=None):
        super().__init__()
        self.c, self.experts, self.every = c, experts, RECOMPUTE[recompute]
        mesh = (spread or {}).get("expert_mesh")
        self.together = 1 if mesh is None else mesh.size()  # processes that share the experts
        self.embedding = nn.Embedding(c.vocabulary, c.d)
        self.blocks = nn.ModuleList(Block(c, experts, spread or {}) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.d)
        self.head = None if c.tied else nn.Linear(c.d, c.vocabulary, bias=False)
        self.rows_loss = cross_entropy

    @torch.no_grad()
    def initialise(self, seed, order=None):
        """Set normal values of 0.02, smaller by sqrt(2 layers) in residual outputs, as in GPT-2.

        A parameter's values depend on its number and the seed alone, so any number of processes
        starts with the same model; none stores more than one whole parameter. `order` (E) renumbers
        the experts of every layer: the same function with its experts in another order.
        """
        for number, (name, parameter) in enumerate(self.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1)  # a norm
                continue
            generator = torch.Generator(parameter.device).manual_seed((seed << 16) + number)
            added = name.endswith(("attention.out.weight", "down_proj", "down.weight"))
            std = 0.02 / (2 * self.c.layers) ** (0.5 * added)
            whole = torch.empty(parameter.shape, device=parameter.device)
            whole.normal_(std=std, generator=generator)
            if order is not None and ".moe." in name:
                whole = whole[order]
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(own_part(whole, parameter))
            else:
                parameter.copy_(whole)
        for buffer in self.buffers():
            buffer.zero_()  # selection biases

    def compile_blocks(self, backend="inductor"):
        """Compile every block as one graph, which all of them share, and the loss of some rows."""
        whole = is_one_graph(self.experts)
        for block in self.blocks:
            # The function, not the module: FSDP's hooks stay outside the graph.
            block.forward = torch.compile(block.forward, fullgraph=whole, backend=backend)
        self.rows_loss = torch.compile(cross_entropy, fullgraph=True, backend=backend)

    def states(self, inputs, offset=0, caches=None):
        """Compute the residual stream after the blocks (B, S, d) from inputs (B, S).

        Also return the layers' MoEAux, stacked, with empty ids and scores.
        """
        x = self.embedding(inputs)  # (B, S, d)
        caches = caches or [None] * self.c.layers
        first = 0 if caches[0] is None else caches[0].length
        cos, sin = rotation(first, inputs.shape[1], self.c.head, x.device)
        seeds = drawn = None
        if self.c.rounding == "stochastic" and self.training:  # tensors: one graph for all layers
            seeds = torch.arange(self.c.layers, device=x.device)
            drawn = torch.full((1,), offset, device=x.device)
        layers = []
        for i, block in enumerate(self.blocks):
            args = (x, cos, sin, None if seeds is None else seeds[i : i + 1], drawn)
            if self.every and i % self.every == 0 and self.training:
                x, *rest = checkpoint(block, *args, use_reentrant=False)
            else:
                x, *rest = block(*args, caches[i])
            layers.append(rest)
        unread = dict.fromkeys(_UNREAD, x.new_empty(0))
        return x, tilemoe.MoEAux(*(torch.stack(kind) for kind in zip(*layers)), **unread)

    @property
    def output_weight(self):
        """Return the weight (vocabulary, d) of the output layer."""
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def logits(self, tokens, caches=None, last=False):
        """Compute logits (B, S, vocabulary) of the next token from tokens (B, S).

        With `last` only those after the last token, (B, 1, vocabulary). caches has one Cache per
        layer with the previous tokens, to which these are added; if it is not empty, S is 1.
        """
        x, _ = self.states(tokens, caches=caches)
        return F.linear(self.norm(x[:, -1:] if last else x), self.output_weight)

    def forward(self, tokens, offset=0):
        """Predict tokens[:, 1:] from tokens (B, S + 1), and return Losses and Routed.

        offset: number of the micro-batch, for stochastic rounding; a layer's number is its seed.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x, aux = self.states(inputs, offset)
        with torch.profiler.record_function(
            "head"
        ):  # with its gradients, which are computed with the loss
            next_token = LinearCrossEntropy.apply(
                self.norm(x).flatten(0, 1), self.output_weight, targets.flatten(), self.rows_loss
            )
        loss = next_token + aux.loss.mean()
        return Losses(loss, next_token, aux.balance.mean(), aux.z.mean()), self.routed(aux, targets)

    def routed(self, aux, targets):
        """Return Routed; aux: of all layers; targets: of the micro-batch's tokens."""
        counts, T = aux.expert_counts, targets.numel()
        pairs = T * self.c.K
        load = counts.max(dim=1).values.float().mean() * (self.c.E / pairs)
        changed = aux.dropped.float().mean() / pairs, aux.added.float().mean() / pairs
        no_place = aux.overflow.float().mean() / (pairs * self.together)
        return Routed(counts, load, *changed, aux.without.float().mean() / T, no_place)
