"""The routers of transformers compared with tilemoe.top_k, given the same float32 logits: the same
experts, scores and gradients to float32's rounding."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import reference
import tilemoe
from random_layers import normal
from target import DEVICE

T = 2048
NEAR = 2.0**-20  # of deciding values: below, a sigmoid's or a softmax's rounding may decide

# The sizes of the published models; what a name of tilemoe's is in a configuration.
PUBLISHED = {
    "DeepSeek-V3": (
        deepseek_v3.DeepseekV3TopkRouter, deepseek_v3.DeepseekV3Config, 256, 8,
        dict(n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5),
        dict(scoring="sigmoid_renormalized", n_group=8, topk_group=4, routed_scaling_factor=2.5),
    ),
    "DeepSeek-V3, not renormalised": (
        deepseek_v3.DeepseekV3TopkRouter, deepseek_v3.DeepseekV3Config, 64, 6,
        dict(n_group=4, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.5),
        dict(scoring="sigmoid", n_group=4, topk_group=1, routed_scaling_factor=1.5),
    ),
    "Kimi-K2, one group": (
        deepseek_v3.DeepseekV3TopkRouter, deepseek_v3.DeepseekV3Config, 384, 8,
        dict(n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827),
        dict(scoring="sigmoid_renormalized", routed_scaling_factor=2.827),
    ),
    "DeepSeek-V2": (
        deepseek_v2.DeepseekV2TopkRouter, deepseek_v2.DeepseekV2Config, 160, 6,
        dict(topk_method="group_limited_greedy", n_group=8, topk_group=3,
             routed_scaling_factor=16.0),
        dict(scoring="softmax_over_all", n_group=8, topk_group=3, group_score="max",
             routed_scaling_factor=16.0),
    ),
    "DeepSeek-V2-Lite": (
        deepseek_v2.DeepseekV2TopkRouter, deepseek_v2.DeepseekV2Config, 64, 6,
        dict(topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0),
        dict(scoring="softmax_over_all"),
    ),
    "GLM-4.5": (
        glm4_moe.Glm4MoeTopkRouter, glm4_moe.Glm4MoeConfig, 160, 8,
        dict(n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5),
        dict(scoring="sigmoid_renormalized", routed_scaling_factor=2.5),
    ),
    "GLM-4.5, in groups": (
        glm4_moe.Glm4MoeTopkRouter, glm4_moe.Glm4MoeConfig, 128, 8,
        dict(n_group=16, topk_group=3, norm_topk_prob=True, routed_scaling_factor=1.0),
        dict(scoring="sigmoid_renormalized", n_group=16, topk_group=3),
    ),
    "Qwen3": (
        qwen3_moe.Qwen3MoeTopKRouter, qwen3_moe.Qwen3MoeConfig, 128, 8,
        dict(norm_topk_prob=True), dict(scoring="softmax_renormalized"),
    ),
    "Qwen3-Next": (
        qwen3_next.Qwen3NextTopKRouter, qwen3_next.Qwen3NextConfig, 512, 10,
        dict(norm_topk_prob=True), dict(scoring="softmax_over_chosen"),
    ),
    "OLMoE": (
        olmoe.OlmoeTopKRouter, olmoe.OlmoeConfig, 64, 8,
        dict(norm_topk_prob=False), dict(scoring="softmax_over_all"),
    ),
    "Mixtral": (
        mixtral.MixtralTopKRouter, mixtral.MixtralConfig, 8, 2,
        {}, dict(scoring="softmax_renormalized"),
    ),
    "gpt-oss": (
        gpt_oss.GptOssTopKRouter, gpt_oss.GptOssConfig, 128, 4,
        {}, dict(scoring="softmax_over_chosen"),
    ),
}  # fmt: skip
of_each_model = pytest.mark.parametrize("model", PUBLISHED)


def routers(model):
    """-> (theirs, ours): functions of logits (T, E) to scores (T, K) and ids (T, K); E, K; what the
    choice adds to a sigmoid, or None; our options."""
    router_class, config_class, E, K, of_config, options = PUBLISHED[model]
    config = config_class()
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, name):
            setattr(config, name, E)
    for name, value in (of_config | dict(hidden_size=E, num_experts_per_tok=K)).items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    router = router_class(config).to(DEVICE, torch.float32)
    assert router.weight.shape == (E, E) and router.top_k == K
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))  # its logits are what it is given
        if hasattr(router, "bias"):
            router.bias.zero_()
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.copy_(normal(E, seed=1, dtype=torch.float32, scale=0.1))
        options = options | {"selection_bias": bias}

    def theirs(logits):
        seen, scores, ids = router(logits)
        assert torch.equal(seen, logits)
        return scores, ids

    def ours(logits):
        return tilemoe.top_k(logits, K, ids_dtype=torch.int64, **options)

    return theirs, ours, E, K, bias, options


def dense(scores, ids, E):
    """(T, K) of ids in any order as (T, E)."""
    return torch.zeros(len(ids), E, dtype=scores.dtype).scatter(1, ids, scores)


def same_choice(a, b):
    """(T) bool"""
    return (a.sort(dim=1).values == b.sort(dim=1).values).all(dim=1)


def is_near(logits, K, bias, options):
    """(T) bool: whether a token's choice hangs on values that lie within NEAR, by float64."""
    x = logits.detach().double()
    sigmoid = options["scoring"].startswith("sigmoid")
    values = x.sigmoid() + bias.double() if sigmoid else x.softmax(-1)
    n_group, topk_group = (options.get(name, 1) for name in ("n_group", "topk_group"))
    near = torch.zeros(len(x), dtype=torch.bool)
    if n_group > topk_group:
        groups = values.reshape(len(x), n_group, -1)
        best = 2 if sigmoid else 1
        worth = groups.topk(best, dim=-1).values.sum(-1).sort(descending=True).values
        near |= worth[:, topk_group - 1] - worth[:, topk_group] <= NEAR
        group_score = "top2_sum" if sigmoid else "max"
        inside = reference.in_best_groups(values, n_group, topk_group, group_score)
        values = torch.where(inside, values, -torch.inf)
    ordered = values.sort(descending=True).values
    return near | (ordered[:, K - 1] - ordered[:, K] <= NEAR)


def logits_of(model, E, seed):
    return normal(T, E, seed=seed, dtype=torch.float32, scale=1.5).requires_grad_()


@of_each_model
def test_the_same_experts(model):
    theirs, ours, E, K, bias, options = routers(model)
    with torch.no_grad():
        logits = logits_of(model, E, seed=2)
        same = same_choice(theirs(logits)[1], ours(logits)[1])
        excused = ~same & is_near(logits, K, bias, options)
    assert same.sum() >= 0.99 * T  # a near tie is rare, and each way of it equally likely
    wrong = ~same & ~excused
    assert not wrong.any(), (wrong.nonzero().squeeze(1), logits[wrong])


@of_each_model
def test_the_same_scores_and_gradients(model):
    """Each against float64, ours by at most twice their own error, or 8 roundings of float32. The
    terms of a token's gradient cancel: what counts is their size."""
    theirs, ours, E, K, bias, options = routers(model)
    logits = logits_of(model, E, seed=3)
    ds = normal(T, E, seed=4, dtype=torch.float32)
    kept = same_choice(theirs(logits)[1], ours(logits)[1])
    ids = theirs(logits)[1][kept]

    def found(function, logits, dtype=torch.float32):
        scores = dense(*function(logits), E)
        (dlogits,) = torch.autograd.grad(scores, logits, ds.to(dtype))
        return scores[kept].detach().double(), dlogits[kept].double()

    wide = logits.detach().double().requires_grad_()
    rule = dict(scoring=options["scoring"])
    factor = options.get("routed_scaling_factor", 1.0)
    their_ids = theirs(logits)[1]
    exact = lambda x: (
        reference.scores_at(x, their_ids, **rule, routed_scaling_factor=factor), their_ids
    )  # fmt: skip
    want, dwant = found(exact, wide, torch.float64)
    chosen = torch.zeros(len(ids), E, dtype=torch.bool).scatter(1, ids, True)
    errors = {}
    for name, function in (("theirs", theirs), ("ours", ours)):
        scores, dlogits = found(function, logits)
        assert not scores[~chosen].any()
        of_scores = ((scores - want).abs() / want.abs())[chosen].max().item()
        terms = (want * ds[kept].abs()).sum(dim=1)
        of_gradient = ((dlogits - dwant).norm(dim=1) / terms).max().item()
        errors[name] = of_scores, of_gradient
    # The yardstick is no lax one: a float32 score has some 24 roundings of 2^-24, 2^-19 and a half.
    assert errors["theirs"][0] <= 2.0**-19, errors
    for of_theirs, of_ours in zip(*errors.values()):
        assert not of_ours > max(2 * of_theirs, 2.0**-21), errors
