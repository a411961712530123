"""Whole tiny models: logits and gradients with TileMoE's experts against `eager` ones.

Weights are scaled so that in every layer the experts' output has at least 30 % of the residual's
norm: with a fresh model's small weights the logits would hardly change if the experts gave zeros.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (
    AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig,
    Qwen3MoeConfig,
)  # fmt: skip

import tilemoe
import tilemoe.transformers
from transformers_support import relative_error, slips

E, K, n = 6, 3, 16  # n as in transformers_support, whose slips roll W1 by it
COMMON = dict(
    vocab_size=98, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts_per_tok=K, intermediate_size=n,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**COMMON, num_local_experts=E),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, num_experts=E, moe_intermediate_size=n, norm_topk_prob=True
    ),
    "gpt_oss": GptOssConfig(**COMMON, num_local_experts=E),
    "deepseek_v3": DeepseekV3Config(
        **(COMMON | dict(num_key_value_heads=4, intermediate_size=40)),
        n_routed_experts=E,
        moe_intermediate_size=n,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "olmoe": OlmoeConfig(**COMMON, num_experts=E),
}
each_model = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "is_concatenated")]


def build(name):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for module in experts_of(model):
        module.gate_up_proj.data *= 2
        module.down_proj.data *= 3
    return model


def tokens():
    return torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(1))


def run(model):
    """-> {name: tensor}: the logits and every parameter's gradient of the loss."""
    model.zero_grad()
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits} | gradients


def assert_same(got, want):
    """Within 1e-5: float32, whose errors grow through the layers that follow."""
    assert got.keys() == want.keys()
    for name in want:
        error = relative_error(got[name], want[name])
        assert error <= 1e-5, f"{name}: error {error:.3g}"


@each_model
def test_the_experts_matter(name):
    model = build(name)
    fractions = []
    for layer in model.model.layers:
        for module in experts_of(layer):
            module.register_forward_hook(
                lambda module, args, out, layer=layer: setattr(layer, "experts_norm", out.norm())
            )
            layer.register_forward_hook(
                lambda layer, args, out: fractions.append((layer.experts_norm / out.norm()).item())
            )
    run(model)
    print(name, fractions)
    assert len(fractions) >= 1 and all(fraction >= 0.3 for fraction in fractions)


@each_model
def test_logits_and_gradients_are_those_of_eager(name, monkeypatch):
    model = build(name)
    want = run(copy.deepcopy(model).double())
    model.set_experts_implementation("tilemoe")
    assert tilemoe.transformers.prepare(model)
    assert_same(run(model), want)

    for slip, function in slips(tilemoe.moe, experts_of(model)[0]).items():
        with monkeypatch.context() as patch:
            patch.setattr(tilemoe.functional, "moe", function)
            got = run(model)
        with pytest.raises(AssertionError):
            assert_same(got, want)
            print(f"{name}: nobody noticed that {slip}")


@each_model
def test_generates_the_same_text(name):
    model = build(name).eval()
    prompt = dict(inputs=tokens()[:1], max_new_tokens=8, do_sample=False)
    want = model.generate(**prompt)
    model.set_experts_implementation("tilemoe")
    assert torch.equal(model.generate(**prompt), want)


def checkpointed(model):
    model.train().gradient_checkpointing_enable()
    return run(model)


def under_inference_mode(model):
    with torch.inference_mode():
        return {"logits": model(input_ids=tokens()).logits.clone()}


def copied(model):
    run(model)
    return run(copy.deepcopy(model))


def compiled(model):
    tilemoe.transformers.prepare(model)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    return {"logits": whole(input_ids=tokens(), use_cache=False).logits}


@pytest.mark.parametrize("mode", [checkpointed, under_inference_mode, copied, compiled])
def test_modes_of_the_caller(mode):
    """The first forward of a model, in which its experts are evaluated."""
    model = build("gpt_oss")
    want = run(copy.deepcopy(model).double())
    model.set_experts_implementation("tilemoe")
    got = mode(model)
    assert_same(got, {name: want[name] for name in got})


def test_a_mapped_checkpoint_compiles_and_is_exported(tmp_path):
    """In a mapped file tensors begin on 8 bytes."""
    build("gpt_oss").save_pretrained(tmp_path)
    options = dict(experts_implementation="tilemoe", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    assert tilemoe.transformers.prepare(model)
    experts = model.model.layers[0].mlp.experts
    assert any(p.data_ptr() % 16 for p in experts.parameters()), "no weight is off 16 bytes"
    ids = torch.arange(24).view(2, 12)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager")
    got, want = (of(input_ids=ids, use_cache=False).logits for of in (whole, model))
    assert torch.equal(got, want)
    data = torch.randn(12, 32), torch.arange(24).view(12, 2) % E, torch.rand(12, 2)
    exported = torch.export.export(experts, data)
    assert torch.equal(exported.module()(*data), experts(*data))
