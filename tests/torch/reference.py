"""The layer in plain PyTorch: the functions of `tilemoe` by the same names and arguments, for any
floating type (float64 is the yardstick), differentiated by autograd.

It is written to be read, not to be fast: one loop over the experts, one over the rounded ones. The
symbols and the rules of choice are those of docs/mathematics.md:

    x (..., d) -> T tokens    W1 (E, 2n, d) or (E, n, d)    W2 (E, d, n)    logits, p (T, E)
    pairs: P (token, expert, score) triples; rounding and top-K alike become pairs

Scores take float32, or float64 where the logits do. `stored` names a 16-bit type: the layer then
rounds to it where the library stores (stored.py), and its error is the one to expect of the library.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Aux(NamedTuple):
    expert_counts: torch.Tensor  # (E) int32, the tokens' own choices, before rounding
    dropped: torch.Tensor  # () int32, chosen pairs that rounding leaves out
    added: torch.Tensor  # () int32, pairs that rounding adds
    skipped: torch.Tensor  # () int32, pairs with an id outside [0, E) or a bad token
    without: torch.Tensor  # () int32, tokens that no expert gets


LIST = Path(__file__).parents[2] / "include" / "tilemoe" / "activations.inc"
FUNCTIONS = {  # of the formulas in the list
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _activations():
    """{name: (gated, function of gate and up, or of h)}: the formulas of the library's list."""
    row = r'^TILEMOE_ACTIVATION\((\w+), .* (true|false), +"(.*)"\)$'
    found = {}
    for name, gated, formula in re.findall(row, LIST.read_text(), re.MULTILINE):
        arguments = "gate, up" if gated == "true" else "h"
        found[name] = gated == "true", eval(f"lambda {arguments}: {formula}", dict(FUNCTIONS))
    return found


ACTIVATIONS = _activations()
SCORINGS = (
    "softmax_over_chosen", "softmax_over_all", "softmax_renormalized", "sigmoid",
    "sigmoid_renormalized",
)  # fmt: skip
ROUNDINGS = ("nearest", "up", "down", "stochastic", "balanced")


# ---------------------------------------------------------------- routing


def _wide(logits):
    return logits if logits.dtype == torch.float64 else logits.float()


def _first_in_order(values, K):
    """ids (T, K) of the greatest values (T, E): ties to the lower id, NaN last."""
    ranked = torch.where(values.isnan(), -torch.inf, values)
    # -inf beats NaN: a second, stable key distinguishes them.
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    isnan = values.isnan().gather(-1, order).to(torch.uint8)
    order = order.gather(-1, isnan.argsort(dim=-1, stable=True))
    return order[..., :K]


def in_best_groups(values, n_group, topk_group, group_score):
    """(T, E) bool: whether an expert is in one of the token's topk_group best groups of E / n_group
    neighbours each; values (T, E) rank the experts."""
    T, E = values.shape
    groups = torch.where(values.isnan(), -torch.inf, values).reshape(T, n_group, E // n_group)
    best = {"max": 1, "top2_sum": 2}[group_score]
    worth = groups.sort(dim=-1, descending=True).values[..., :best].sum(-1)
    chosen = worth.argsort(dim=-1, descending=True, stable=True)[:, :topk_group]
    mask = torch.zeros(T, n_group, dtype=torch.bool, device=values.device).scatter(-1, chosen, True)
    return mask.repeat_interleave(E // n_group, dim=-1)


def scores_at(logits, ids, *, scoring="softmax_over_chosen", routed_scaling_factor=1.0):
    """logits (T, E), ids (T, K) -> scores (T, K); an id outside [0, E) has 0 and is in no sum."""
    x = _wide(logits)
    there = (ids >= 0) & (ids < x.shape[-1])
    at = torch.where(there, ids, 0).long()
    if scoring in ("softmax_over_chosen", "softmax_renormalized"):  # one function
        # Finite, so that a token without any id has gradient 0 and not NaN.
        lowest = torch.finfo(x.dtype).min
        p = torch.where(there, x.gather(-1, at), lowest).softmax(-1)
    elif scoring == "softmax_over_all":
        p = x.softmax(-1).gather(-1, at)
    elif scoring in ("sigmoid", "sigmoid_renormalized"):
        p = torch.where(there, x.sigmoid().gather(-1, at), 0.0)
    else:
        raise ValueError(f"scoring is {scoring!r}, expected one of {SCORINGS}")
    if scoring == "sigmoid_renormalized":
        p = p / torch.where(there.any(-1, keepdim=True), p.sum(-1, keepdim=True), 1.0)
    nan = x.isnan().any(-1, keepdim=True)
    p = torch.where(nan, torch.nan, routed_scaling_factor * p)
    return torch.where(there, p, 0.0)


def top_k(
    logits, K, *, scoring="softmax_over_chosen", selection_bias=None, n_group=1, topk_group=1,
    group_score=None, routed_scaling_factor=1.0, ids_dtype=torch.int32,
):  # fmt: skip
    """logits (T, E) -> scores (T, K), ids (T, K)."""
    x = _wide(logits)
    sigmoid = scoring.startswith("sigmoid")
    if selection_bias is not None and not sigmoid:
        raise ValueError("selection_bias: only the sigmoid scorings have it")
    with torch.no_grad():
        order = x.sigmoid() if sigmoid else x
        if selection_bias is not None:
            order = order + selection_bias
        ids = _first_in_order(order, x.shape[-1])
        if n_group > 1:
            group_score = group_score or ("top2_sum" if sigmoid else "max")
            outside = ~in_best_groups(order, n_group, topk_group, group_score)
            # False before True; the order stays among those inside.
            outside = outside.gather(-1, ids).to(torch.uint8)
            ids = ids.gather(-1, outside.argsort(dim=-1, stable=True))
        ids = ids[..., :K]
    scores = scores_at(x, ids, scoring=scoring, routed_scaling_factor=routed_scaling_factor)
    return scores, ids.to(ids_dtype)


topk_router = top_k


def router_losses(logits, expert_counts):
    """logits (T, E), expert_counts (E) -> balance, z: scalars.

    balance = E * sum_e (c_e / sum(c)) * mean_t p(t, e)   (arXiv 2101.03961, equation 4)
    z       = mean_t logsumexp(logits_t)^2                (arXiv 2202.08906, equation 5)
    """
    x = _wide(logits)
    x = x[~x.isnan().any(-1)]
    if x.shape[0] == 0:
        return x.sum(), x.sum()
    counts = expert_counts.to(x.dtype)
    share = counts / counts.sum().clamp(min=1)
    balance = logits.shape[-1] * (share * x.softmax(-1).mean(0)).sum()
    return balance, (x.logsumexp(-1) ** 2).mean()


def philox_bits(seed, step, e):
    """First word of Philox 4x32-10: key = seed, counter = (step, e), low words first."""
    low, high = (lambda v: v & 0xFFFFFFFF), (lambda v: v >> 32 & 0xFFFFFFFF)
    c0, c1, c2, c3 = low(step), high(step), low(e), high(e)
    k0, k1 = low(seed), high(seed)
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high(b) ^ c1 ^ k0, low(b), high(a) ^ c3 ^ k1, low(a)
        k0, k1 = low(k0 + 0x9E3779B9), low(k1 + 0xBB67AE85)
    return c0


def rounded_counts(f, T, m, rounding, seed=0, step=0):
    """f' (list of E) from f (list of E): multiples of m next to f, at most floor(T/m)*m."""
    if T < m:
        return list(f)
    E, remainders = len(f), [count % m for count in f]
    if rounding == "nearest":
        up = [r > 0 and 2 * r >= m for r in remainders]
    elif rounding == "up":
        up = [r > 0 for r in remainders]
    elif rounding == "down":
        up = [False] * E
    elif rounding == "stochastic":
        up = [philox_bits(seed, step, e) * m < remainders[e] << 32 for e in range(E)]
    elif rounding == "balanced":
        ups = (2 * sum(remainders) + m) // (2 * m)
        largest = sorted(range(E), key=lambda e: (-remainders[e], e))[:ups]
        up = [e in largest for e in range(E)]
    else:
        raise ValueError(f"rounding is {rounding!r}, expected one of {ROUNDINGS}")
    return [min(count // m * m + m * u, T // m * m) for count, u in zip(f, up)]


def rounded_pairs(logits, K, rounding, m=128, seed=0, step=0):
    """logits (T, E) -> tokens (P), experts (P), scores (P), Aux.

    An expert takes its first f'_e tokens: those that chose it first; then by greater score, NaN
    last; then by lower token. A chosen pair scores p / (sum of p over its token's K), an added
    one p.
    """
    x = _wide(logits)
    T, E = x.shape
    p = x.softmax(-1)
    chosen_scores, ids = top_k(x, K, scoring="softmax_renormalized", ids_dtype=torch.int64)
    chosen = torch.zeros(T, E, dtype=torch.bool, device=x.device).scatter(-1, ids, True)
    weight = p.scatter(-1, ids, chosen_scores)  # (T, E): the score of each pair that could be
    f = chosen.sum(0)
    targets = rounded_counts(f.tolist(), T, m, rounding, seed, step)
    kept = torch.zeros_like(chosen)
    for e, target in enumerate(targets):
        with torch.no_grad():
            s = torch.where(weight[:, e].isnan(), -1.0, weight[:, e])
            by_score = s.argsort(descending=True, stable=True)
            order = by_score[(~chosen[by_score, e]).to(torch.uint8).argsort(stable=True)]
        kept[order[:target], e] = True
    tokens, experts = kept.nonzero(as_tuple=True)
    zero = torch.zeros((), dtype=torch.int32, device=x.device)
    aux = Aux(
        f.to(torch.int32),
        (chosen & ~kept).sum().to(torch.int32),
        (kept & ~chosen).sum().to(torch.int32),
        zero,
        (~kept.any(dim=1)).sum().to(torch.int32),
    )
    return tokens, experts, weight[tokens, experts], aux


def pairs_of_groups(logits, K, rounding, m, size, seed, step):
    """The same if each `size` tokens are rounded separately, `stochastic` with one step each."""
    parts = logits.split(size)
    made = [
        rounded_pairs(part, K, rounding, m, seed, step * len(parts) + i)
        for i, part in enumerate(parts)
    ]
    tokens, experts, scores, aux = zip(*made)
    tokens = [size * i + of_group for i, of_group in enumerate(tokens)]
    aux = Aux(*(torch.stack(kind).sum(0, dtype=torch.int32) for kind in zip(*aux)))
    return *map(torch.cat, (tokens, experts, scores)), aux


def _tokens_without(tokens, T):
    seen = torch.zeros(T, dtype=torch.bool, device=tokens.device)
    seen[tokens] = True
    return (~seen).sum().to(torch.int32)


# ---------------------------------------------------------------- experts


def activate(H, activation, gate_layout="concatenated", clamp=0.0, alpha=0.0, up_shift=0.0):
    """H (rows, 2n), or (rows, n) without a gate -> A (rows, n)."""
    gated, function = ACTIVATIONS[activation]
    if not gated:
        return function(H)
    if gate_layout == "interleaved":
        gate, up = H[..., 0::2], H[..., 1::2]
    else:
        gate, up = H.chunk(2, dim=-1)
    if clamp == 0 and alpha == 0 and up_shift == 0:
        return function(gate, up)
    if activation != "swiglu":
        raise ValueError("clamp, alpha and up_shift: only swiglu has them")
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid((alpha or 1.0) * gate) * (up + up_shift)


def adapter(lora, name, e):
    """scale, A (r, columns), B (rows, r) of an expert, or None; name: "1", "1_up" or "2"."""
    A, B = (None, None) if lora is None else (getattr(lora, f"{of}{name}") for of in "AB")
    if A is None:
        return None
    both = lora.scale if isinstance(lora.scale, tuple) else (lora.scale, lora.scale)
    return both[name == "2"], A[e], B[e]


def _adapted(W, lora, name, e):
    """Expert e's weight with its low-rank adapter."""
    found = adapter(lora, name, e)
    if found is None:
        return W[e]
    scale, A, B = found
    return W[e] + scale * B @ A


def _expert(x, e, W1, W2, W1_up, b1, b1_up, b2, act, lora):
    """x (rows, d) -> (rows, d): what expert e makes of them, unweighted."""
    H = x @ _adapted(W1, lora, "1", e).T
    if b1 is not None:
        H = H + b1[e]
    if W1_up is not None:
        up = x @ _adapted(W1_up, lora, "1_up", e).T
        H = torch.cat([H, up if b1_up is None else up + b1_up[e]], dim=-1)
    Y = activate(H, **act) @ _adapted(W2, lora, "2", e).T
    return Y if b2 is None else Y + b2[e]


def _stored_expert(x, s, e, W1, W2, W1_up, b1, b1_up, b2, act, lora, dtype):
    """x (rows, d), s (rows) -> s Y (rows, d), rounding to `dtype` where the library stores."""
    from stored import weighted_expert  # which has its activations from here

    of_expert = lambda *both: torch.cat([t[e] for t in both if t is not None])
    b1 = None if b1 is None else of_expert(b1, b1_up)
    b2 = None if b2 is None else b2[e]
    weights = of_expert(W1, W1_up), W2[e], b1, b2
    if lora is None:
        return weighted_expert(x, s, *weights, act, dtype)
    from stored_lora import weighted_expert as weighted_with_adapters

    parts = [W.shape[1] for W in (W1, W1_up) if W is not None]
    adapters = [adapter(lora, name, e) for name in ("1", "1_up", "2")]
    return weighted_with_adapters(x, s, *weights, act, dtype, adapters, parts)


def _sum_of_pairs(x, tokens, experts, scores, weights, act, addend, stored=None):
    """x (T, d); tokens, experts, scores (P) -> O (T, d); experts outside [0, E) do nothing."""
    wide = torch.promote_types(x.dtype, scores.dtype)
    O = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(weights["W2"].shape[0]):
        mine = (experts == e).nonzero().squeeze(-1)
        rows, s = x[tokens[mine]], scores[mine].to(wide)
        if stored is None:
            weighted = s.unsqueeze(-1) * _expert(rows, e, **weights, act=act).to(wide)
        else:
            weighted = _stored_expert(rows, s, e, **weights, act=act, dtype=stored)
        O = O.index_add(0, tokens[mine], weighted)
    if addend is not None:
        O = O + addend.reshape(O.shape)
    return O.to(x.dtype)


def moe(
    x, logits_or_scores, W1, W2, *, K=None, ids=None, W1_up=None, b1=None, b1_up=None, b2=None,
    activation="swiglu", gate_layout="concatenated", clamp=0.0, alpha=0.0, up_shift=0.0,
    scoring="softmax_over_chosen", selection_bias=None, n_group=1, topk_group=1, group_score=None,
    routed_scaling_factor=1.0, rounding=None, m=128, rounding_tokens=None, seed=None, offset=None,
    addend=None, overwrite_H=False, return_aux=False, stored=None, lora=None,
):  # fmt: skip
    """x (..., d); logits (..., E), or scores and ids (..., K) -> O (..., d) [, Aux]."""
    shape, E = x.shape, W2.shape[0]
    x = x.reshape(-1, shape[-1])
    T = x.shape[0]
    second = logits_or_scores.reshape(T, logits_or_scores.shape[-1])
    zero = torch.zeros((), dtype=torch.int32, device=x.device)
    if ids is None and rounding is not None:
        if scoring not in ("softmax_over_chosen", "softmax_renormalized"):
            raise ValueError(f"scoring is {scoring!r}: rounding renormalises a softmax")
        if rounding == "stochastic" and (seed is None or offset is None):
            raise ValueError("stochastic rounding: seed and offset are missing")
        key = (int(seed), int(offset)) if rounding == "stochastic" else (0, 0)
        size = rounding_tokens or max(T, 1)
        tokens, experts, scores, aux = pairs_of_groups(second, K, rounding, m, size, *key)
    else:
        if ids is None:
            second, ids = top_k(
                second, K, scoring=scoring, selection_bias=selection_bias, n_group=n_group,
                topk_group=topk_group, group_score=group_score,
                routed_scaling_factor=routed_scaling_factor,
            )  # fmt: skip
        experts = ids.reshape(-1).long()
        tokens = torch.arange(T, device=x.device).repeat_interleave(ids.shape[-1])
        scores = second.reshape(-1)
        valid = (experts >= 0) & (experts < E)
        counts = torch.bincount(experts[valid], minlength=E).to(torch.int32)
        without = _tokens_without(tokens[valid], T)
        aux = Aux(counts, zero, zero, (~valid).sum().to(torch.int32), without)
    weights = dict(W1=W1, W2=W2, W1_up=W1_up, b1=b1, b1_up=b1_up, b2=b2, lora=lora)
    act = dict(
        activation=activation, gate_layout=gate_layout, clamp=clamp, alpha=alpha, up_shift=up_shift,
    )  # fmt: skip
    O = _sum_of_pairs(x, tokens, experts, scores, weights, act, addend, stored).reshape(shape)
    return (O, aux) if return_aux else O


def moe_general(
    x, tokens, experts, scores, W1, W2, *, W1_up=None, b1=None, b1_up=None, b2=None,
    activation="swiglu", gate_layout="concatenated", clamp=0.0, alpha=0.0, up_shift=0.0,
    addend=None, overwrite_H=False, return_aux=False, stored=None, lora=None,
):  # fmt: skip
    """x (T, d); tokens, experts, scores (P), sorted by token -> O (T, d) [, Aux].

    A triple is skipped whose expert or token is out of range, or whose token is smaller than one in
    range before it.
    """
    T, E = x.shape[0], W2.shape[0]
    tokens, experts = tokens.long(), experts.long()
    in_range = (tokens >= 0) & (tokens < T)
    latest = torch.where(in_range, tokens, -1)
    if tokens.numel():
        latest = latest.cummax(0).values
    valid = in_range & (tokens >= latest) & (experts >= 0) & (experts < E)
    weights = dict(W1=W1, W2=W2, W1_up=W1_up, b1=b1, b1_up=b1_up, b2=b2, lora=lora)
    act = dict(
        activation=activation, gate_layout=gate_layout, clamp=clamp, alpha=alpha, up_shift=up_shift,
    )  # fmt: skip
    experts = torch.where(valid, experts, -1)
    O = _sum_of_pairs(x, tokens, experts, scores, weights, act, addend, stored)
    zero = torch.zeros((), dtype=torch.int32, device=x.device)
    counts = torch.bincount(experts[valid], minlength=E).to(torch.int32)
    skipped = (~valid).sum().to(torch.int32)
    aux = Aux(counts, zero, zero, skipped, _tokens_without(tokens[valid], T))
    return (O, aux) if return_aux else O


def grouped_experts(
    rows, counts, W1, W2, *, row_scores=None, W1_up=None, b1=None, b1_up=None, b2=None,
    activation="swiglu", gate_layout="concatenated", clamp=0.0, alpha=0.0, up_shift=0.0,
    addend=None, overwrite_H=False, stored=None, lora=None,
):  # fmt: skip
    """rows (R, d) sorted by expert, counts (E), row_scores (R) -> (R, d), zero past sum(counts)."""
    R, E = rows.shape[0], W2.shape[0]
    experts = torch.repeat_interleave(torch.arange(E, device=rows.device), counts.clamp(min=0))
    experts = F.pad(experts, (0, max(0, R - experts.shape[0])), value=-1)[:R]
    ones = torch.ones(R, dtype=rows.dtype, device=rows.device)
    scores = ones if row_scores is None else row_scores
    weights = dict(W1=W1, W2=W2, W1_up=W1_up, b1=b1, b1_up=b1_up, b2=b2, lora=lora)
    act = dict(
        activation=activation, gate_layout=gate_layout, clamp=clamp, alpha=alpha, up_shift=up_shift,
    )  # fmt: skip
    tokens = torch.arange(R, device=rows.device)
    O = _sum_of_pairs(rows, tokens, experts, scores, weights, act, None, stored)
    if addend is None:
        return O
    # The addend, too, stops at the last row.
    return O + torch.where((experts >= 0).unsqueeze(-1), addend, torch.zeros_like(addend))
