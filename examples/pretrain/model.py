"""A decoder-only transformer with sparse feed-forward layers: plain PyTorch around tilemoe.MoE.

B sequences of S tokens, so T = B S; the other letters are those of docs/mathematics.md.
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
_UNREAD = ("ids", "scores")  # of an aux: not kept for a whole model
RECOMPUTE = {"none": 0, "half": 2, "blocks": 1}  # every how many blocks keeps its input alone


class Routed(NamedTuple):
    """Statistics of the layers' routing of one micro-batch."""

    expert_counts: torch.Tensor  # (layers, E) int32, before rounding and dropping
    # () float32, means over the layers:
    load: torch.Tensor  # tokens of the expert that has most of them, over the mean
    dropped: torch.Tensor  # chosen pairs that are left out, as a share of all chosen ones
    added: torch.Tensor  # pairs that are added, of the same
    without: torch.Tensor  # tokens that no expert gets, as a share of all
    no_place: torch.Tensor  # pairs that the processes of their experts had no memory for, of all


class Losses(NamedTuple):
    """The losses of one micro-batch, () float32 each; balance and z are means over the layers."""

    total: torch.Tensor  # what is differentiated
    next_token: torch.Tensor  # cross-entropy, nats a token
    balance: torch.Tensor
    z: torch.Tensor


def rotation(first, S, head, device):
    """Positions first to first + S -> cos, sin (S, head / 2) float32 of the rotary embedding
    (arXiv 2104.09864), base ROTARY_BASE."""
    even = torch.arange(0, head, 2, device=device, dtype=torch.float32)
    position = torch.arange(first, first + S, device=device, dtype=torch.float32)
    angle = position[:, None] * ROTARY_BASE ** (-even / head)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x (B, heads, S, head): each pair (i, i + head / 2) turned by its angle, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def own_part(whole, parameter):
    """The part of a tensor that this process has of a sharded parameter: first the experts'
    part, if processes share them, then FSDP's."""
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        parts, own = whole.chunk(mesh.size(axis)), mesh.get_local_rank(axis)
        whole = parts[own] if own < len(parts) else whole[:0]
    return whole


class Cache:
    """Keys and values of one layer, (B, kv_heads, tokens so far, head): what is kept between the
    tokens of a text that is being sampled."""

    def __init__(self):
        self.keys = self.values = None

    @property
    def length(self):
        return 0 if self.keys is None else self.keys.shape[2]

    def extended(self, keys, values):
        """Appends those of the tokens that follow -> keys and values of all."""
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
        is_whole = k.shape[2] == S  # otherwise it is one token, which sees all before it
        grouped = c.kv_heads != c.heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_whole, enable_gqa=grouped)
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
        """x (B, S, d), seed and offset (1) int64 or None -> (B, S, d), the layer's aux
        without ids and scores."""
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        h = self.moe_norm(x)
        out, aux = self.moe(h, seed=seed, offset=offset)
        if self.shared is not None:
            out = out + self.shared(h)
        return x + out, *aux[: -len(_UNREAD)]


class Transformer(nn.Module):
    """experts: of experts.IMPLEMENTATIONS, all with the same parameters and names; recompute: of
    RECOMPUTE, the blocks that keep their input and compute the rest again in backward; spread:
    arguments of tilemoe.MoE by which experts lie on several processes."""

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
        """Normal of 0.02; what is added to the residual stream less by sqrt(2 layers), as GPT-2.

        A parameter's values depend on its number and the seed alone, so any number of processes
        starts from the same model; none holds more than one whole parameter. `order` (E) renumbers
        the experts of every layer: the same function with its experts in another order."""
        for number, (name, parameter) in enumerate(self.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1)  # of a norm
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
        """Every block as one graph, which all of them share, and the loss of some rows."""
        whole = is_one_graph(self.experts)
        for block in self.blocks:
            # The function, not the module: FSDP's hooks stay outside of the graph.
            block.forward = torch.compile(block.forward, fullgraph=whole, backend=backend)
        self.rows_loss = torch.compile(cross_entropy, fullgraph=True, backend=backend)

    def states(self, inputs, offset=0, caches=None):
        """inputs (B, S) -> the residual stream after the blocks (B, S, d), the layers' MoEAux,
        stacked, with empty ids and scores."""
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
        """(vocabulary, d)"""
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def logits(self, tokens, caches=None, last=False):
        """tokens (B, S) -> logits (B, S, vocabulary) of the token after each, or (B, 1, vocabulary)
        of that after the `last`. caches: a Cache a layer, which has the tokens before these and
        takes these in; if it is not empty, S is 1."""
        x, _ = self.states(tokens, caches=caches)
        return F.linear(self.norm(x[:, -1:] if last else x), self.output_weight)

    def forward(self, tokens, offset=0):
        """tokens (B, S + 1) -> Losses of predicting tokens[:, 1:], Routed.

        offset: number of the micro-batch, for stochastic rounding; a layer's number is its seed.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x, aux = self.states(inputs, offset)
        with torch.profiler.record_function("head"):  # its gradients too: they come with the loss
            next_token = LinearCrossEntropy.apply(
                self.norm(x).flatten(0, 1), self.output_weight, targets.flatten(), self.rows_loss
            )
        loss = next_token + aux.loss.mean()
        return Losses(loss, next_token, aux.balance.mean(), aux.z.mean()), self.routed(aux, targets)

    def routed(self, aux, targets):
        """aux: of all layers; targets: of the micro-batch's tokens."""
        counts, T = aux.expert_counts, targets.numel()
        pairs = T * self.c.K
        load = counts.max(dim=1).values.float().mean() * (self.c.E / pairs)
        changed = aux.dropped.float().mean() / pairs, aux.added.float().mean() / pairs
        no_place = aux.overflow.float().mean() / (pairs * self.together)
        return Routed(counts, load, *changed, aux.without.float().mean() / T, no_place)
