"""Use token rounding with scores that sum to one: dropped shares go to the token's others."""

import torch

import tilemoe
from configs import Config
from tilemoe.module import Experts


def renormalized_pairs(logits, K, **rounding):
    """Return renormalized pairs of logits (T, E) and arguments of tilemoe.rounded_router.

    These are tokens, experts and, by softmax over the experts of a token, scores (pairs); and which
    experts a token chose and which it received, (T, E) bool.
    """
    T, E = logits.shape
    tokens, experts, _ = tilemoe.rounded_router(logits, K, **rounding)
    _, ids = tilemoe.topk_router(logits.detach(), K, ids_dtype=torch.int64)
    none = torch.zeros(T + 1, E + 1, dtype=torch.bool, device=logits.device)
    chose = none[:T, :E].scatter(1, ids, True)
    at = tokens.long() * (E + 1) + experts  # the last place is that of unused pairs
    got = none.flatten().scatter(0, at, True).view(T + 1, E + 1)[:T, :E]
    p = torch.where(got, logits.float().softmax(-1), 0.0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
    # Unused rows may have any place, each a different one, because gradients are added there.
    place = torch.arange(len(tokens), device=logits.device)
    place = torch.where(tokens < T, tokens.long() * E + experts, place)
    return tokens, experts, p.flatten().gather(0, place), chose, got


class Renormalized(Experts):
    """Experts of tilemoe.MoE with token rounding and renormalized scores.

    The library divides the score of a chosen pair by the sum over the token's K experts, whether
    they stay or not, and does not change the score of an added pair; here all are divided by the
    sum over the experts that the token receives.
    """

    def __init__(self, c: Config):
        super().__init__(c.d, c.n, c.E)

    def forward(self, x, logits, spread, *, options, seed, offset, **rest):
        """Compute O (T, d) and its aux from x (T, d), logits (T, E); counts are before rounding."""
        if not self.training:
            how = {"options": options, "seed": seed, "offset": offset}
            return super().forward(x, logits, spread, **how, **rest)
        how = {key: getattr(options, key) for key in ("rounding", "m", "rounding_tokens")}
        how |= {"seed": seed, "offset": offset}
        *pairs, chose, got = renormalized_pairs(logits, options.K, **how)
        out, aux = tilemoe.moe_general(
            x, *pairs, self.gate_up_proj, self.down_proj,
            activation=self.activation, column_blocks=options.column_blocks, return_aux=True,
        )  # fmt: skip
        count = lambda pairs: pairs.sum(dtype=torch.int32)
        counts = chose.sum(0, dtype=torch.int32), count(chose & ~got), count(got & ~chose)
        none = torch.zeros_like(aux.skipped)
        scores, ids = tilemoe.top_k(logits.detach(), options.K)
        return out, tilemoe.Aux(
            *counts, skipped=none, without=aux.without, overflow=none, ids=ids, scores=scores
        )
