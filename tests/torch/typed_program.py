"""Every public name of the package, used as its annotations have it: a type checker reads this
program, and it runs."""

from typing import assert_type

import torch
from torch import Tensor

import tilemoe
import tilemoe.state_dict

T, d, n, E, K = 12, 32, 16, 4, 2
x, logits = torch.randn(T, d), torch.randn(T, E)
W1, W2 = torch.randn(E, 2 * n, d), torch.randn(E, d, n)

version: str = tilemoe.__version__
tilemoe.show_config()
tilemoe.set_ctas_per_sm(1)
tilemoe.set_arch("auto")

# From logits, from scores and ids, with what the routing did.
assert_type(tilemoe.moe(x, logits, W1, W2, K=K, activation="geglu"), Tensor)
out, aux = tilemoe.moe(x, logits, W1, W2, K=K, rounding="stochastic", m=4, seed=1, offset=2, return_aux=True)
assert_type(aux, tilemoe.Aux)
scores, ids = tilemoe.top_k(
    logits, K, scoring="sigmoid", selection_bias=torch.zeros(E), n_group=2, topk_group=1,
    group_score="top2_sum", routed_scaling_factor=2.5,
)  # fmt: skip
assert_type(tilemoe.scores_at(logits, ids, scoring="sigmoid", routed_scaling_factor=2.5), Tensor)
out = tilemoe.moe(x, logits, W1, W2, K=K, n_group=2, group_score="max", routed_scaling_factor=2.5)
assert_type(tilemoe.moe(x, scores, W1, W2, ids=ids, addend=x, column_blocks=2), Tensor)
balance, z = tilemoe.router_losses(logits, aux.expert_counts, torch.ones(T, dtype=torch.bool))
assert_type(balance, Tensor)

# Any pairs, and rows sorted by expert.
tokens, experts, pair_scores = tilemoe.rounded_router(logits, K, rounding="nearest", m=4)
assert_type(tilemoe.moe_general(x, tokens, experts, pair_scores, W1, W2), Tensor)
counts = torch.tensor([3, 0, 5, 4])
assert_type(tilemoe.grouped_experts(x, counts, W1, W2, row_scores=torch.ones(T)), Tensor)

# Gradients into memory of the caller's.
W1.requires_grad_()
given = tilemoe.WeightGradients(W1=torch.zeros(E, 2 * n, d))
tilemoe.moe(x, logits, W1, W2, K=K, weight_grad_out=given, overwrite_H=True).sum().backward()
assert given.W1 is not None and given.W1.abs().sum() > 0

narrow = tilemoe.quantize_experts(torch.randn(E, d, n), "nf4")
assert_type(narrow, tilemoe.QuantizedExperts)
assert_type(narrow.dequantize(torch.bfloat16), Tensor)
assert_type(narrow.state_dict("down_proj"), dict[str, Tensor])
assert_type(tilemoe.moe(x, logits, W1, narrow, K=K, weight_blocks=2), Tensor)

layer = tilemoe.MoE(hidden_size=d, intermediate_size=n, num_experts=E, top_k=K, return_aux=False)
model = torch.nn.Sequential(torch.nn.LayerNorm(d), layer)
assert model(x).shape == (T, d)
balanced = tilemoe.MoE(
    d, n, E, K, scoring="sigmoid", selection_bias=True, balance_coefficient=1e-2, return_aux=True
)
_, seen = balanced(x)
balanced.update_selection_bias(seen.expert_counts, rate=1e-3)
shared = tilemoe.MoE(
    d, n, E, K, shared_intermediate_size=2 * n, shared_expert_gate=True, router_bias=True,
    clamp=7.0, alpha=1.702, up_shift=1.0, return_aux=False,
)  # fmt: skip
assert shared.shared_experts is not None and shared(x).shape == (T, d)
grouped = tilemoe.MoE(
    d, n, E, K, scoring="sigmoid_renormalized", selection_bias=True, n_group=2, topk_group=1,
    group_score="top2_sum", routed_scaling_factor=2.5, router_dtype=torch.float32, return_aux=False,
)  # fmt: skip
assert grouped(x, ids=ids).shape == grouped(x).shape == (T, d)
state: dict[str, Tensor] = tilemoe.state_dict.to_torchtitan(balanced.state_dict())
balanced.load_state_dict(tilemoe.state_dict.from_torchtitan(state))


class Config:
    """A configuration of transformers."""

    model_type, hidden_act = "qwen3_moe", "silu"
    hidden_size, moe_intermediate_size = d, n
    num_experts, num_experts_per_tok, norm_topk_prob = E, K, True


same = tilemoe.MoE(**tilemoe.state_dict.options_of(Config()), return_aux=False)
hub = tilemoe.state_dict.to_huggingface(same.state_dict(), "qwen3_moe")
assert_type(tilemoe.state_dict.from_huggingface(hub), dict[str, Tensor])
same.load_state_dict(tilemoe.state_dict.from_huggingface(hub))
