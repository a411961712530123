"""Token rounding whose scores add up to one: what it drops of a token, the token's others get."""

import torch

import tilemoe
from configs import Config
from tilemoe.module import Experts


def renormalized_pairs(logits, K, **rounding):
    """logits (T, E), arguments of tilemoe.rounded_router -> its tokens, experts and, by softmax
    over the experts that a token got, scores (pairs); which a token chose and which it got (T, E)
    bool."""
    T, E = logits.shape
    tokens, experts, _ = tilemoe.rounded_router(logits, K, **rounding)
    _, ids = tilemoe.topk_router(logits.detach(), K, ids_dtype=torch.int64)
    none = torch.zeros(T + 1, E + 1, dtype=torch.bool, device=logits.device)
    chose = none[:T, :E].scatter(1, ids, True)
    at = tokens.long() * (E + 1) + experts  # the last one: of what is no pair
    got = none.flatten().scatter(0, at, True).view(T + 1, E + 1)[:T, :E]
    p = torch.where(got, logits.float().softmax(-1), 0.0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
    # Rows of no pair: any place, but each its own, since gradients are added there.
    place = torch.arange(len(tokens), device=logits.device)
    place = torch.where(tokens < T, tokens.long() * E + experts, place)
    return tokens, experts, p.flatten().gather(0, place), chose, got


class Renormalized(Experts):
    """tilemoe.MoE's experts under token rounding. The library divides a chosen pair's score by the
    sum over the token's K, whether they stay or not, and leaves an added pair's as it is; here all
    are divided by the sum over the experts that the token gets."""

    def __init__(self, c: Config):
        super().__init__(c.d, c.n, c.E)

    def forward(self, x, logits, spread, *, options, seed, offset, **rest):
        """x (T, d), logits (T, E) -> O (T, d), its aux; the counts are those before rounding."""
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
