"""Drop pairs past a capacity, the usual limit for experts with too many tokens."""

import math

import torch

import tilemoe
from configs import Config
from tilemoe.module import Experts


def kept_pairs(scores, ids, E, max_pairs, tokens):
    """Return which pairs stay, bool (T, K), and the counts of the chosen experts, int32 (E).

    An expert keeps the `max_pairs` pairs with the highest scores of every `tokens` tokens; equal
    scores are ordered by token. scores and ids are (T, K).
    """
    T, K = ids.shape
    groups = T // tokens
    group = torch.arange(T, device=ids.device) // tokens
    segment = (group[:, None] * E + ids).flatten()  # (T K): expert of a group
    # The bits of a score have its order, because it is never negative. NaN is last.
    bits = scores.detach().nan_to_num(nan=0.0).flatten().view(torch.int32)
    key, order = ((segment << 32) - bits).sort(stable=True)
    segment = segment[order]
    first = torch.searchsorted(segment, segment)
    rank = torch.arange(T * K, device=ids.device) - first
    stays = torch.empty_like(rank, dtype=torch.bool).scatter(0, order, rank < max_pairs)
    ends = torch.searchsorted(
        segment, torch.arange(groups * E, device=ids.device), right=True
    )  # (groups E)
    counts = ends.diff(prepend=ends.new_zeros(1)).view(groups, E).sum(0)
    return stays.view(T, K), counts.to(torch.int32)


class Bounded(Experts):
    """Experts of tilemoe.MoE with a capacity in training.

    Each expert keeps at most ceil(capacity T K / E) pairs of T tokens: those with the highest
    scores. Dropped pairs have no gradient; their scores remain part of the sum that divides the
    token's others.
    """

    def __init__(self, c: Config):
        super().__init__(c.d, c.n, c.E)
        self.capacity, self.tokens = c.capacity, c.routing_tokens

    def forward(self, x, logits, spread, *, options, selection_bias, **rest):
        """Compute O (T, d) and its aux from x (T, d), logits (T, E); counts are before dropping."""
        if not self.training:
            how = {"options": options, "selection_bias": selection_bias}
            return super().forward(x, logits, spread, **how, **rest)
        (T, E), K = logits.shape, options.K
        tokens = self.tokens or T
        if T % tokens:
            raise ValueError(f"routing_tokens must divide T = {T}, got {tokens}")
        scores, ids = tilemoe.topk_router(
            logits, K, scoring=options.scoring, selection_bias=selection_bias
        )
        max_pairs = math.ceil(self.capacity * tokens * K / E)
        stays, counts = kept_pairs(scores, ids, E, max_pairs, tokens)
        out, aux = tilemoe.moe(
            x, scores, self.gate_up_proj, self.down_proj, ids=torch.where(stays, ids, -1),
            activation=self.activation, column_blocks=options.column_blocks, return_aux=True,
        )  # fmt: skip
        none = torch.zeros_like(aux.skipped)
        return out, aux._replace(expert_counts=counts, dropped=aux.skipped, skipped=none)
