"""Tiny models with PEFT's adapters, and what their tests compare."""

import copy
from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers import (
    AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig,
    Qwen3MoeConfig,
)  # fmt: skip

from transformers_support import relative_error

E, K, n, RANK = 6, 3, 16, 4
COMMON = dict(
    vocab_size=98, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts_per_tok=K, intermediate_size=n,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_experts=E, moe_intermediate_size=n),
    "gpt_oss": GptOssConfig(**COMMON, num_local_experts=E),
    "olmoe": OlmoeConfig(**(COMMON | dict(hidden_size=32)), num_experts=E),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=E),
    "deepseek_v3": DeepseekV3Config(
        **(COMMON | dict(num_key_value_heads=4, intermediate_size=40)), n_routed_experts=E,
        moe_intermediate_size=n, n_shared_experts=1, first_k_dense_replace=1, n_group=2,
        topk_group=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8,
    ),
}  # fmt: skip
W1, W2 = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH = [W1, W2]


def build(name="qwen3_moe", implementation="tilemoe", config_options=None):
    """A model whose experts matter: weights of unit scale, and larger ones in the experts."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    for option, value in (config_options or {}).items():
        setattr(config, option, value)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    model = model.float()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        if "experts." in key and parameter.ndim == 3:
            parameter.data *= 2
    return model


def config_of(targets=BOTH, **options):
    options = dict(r=RANK, lora_alpha=6, target_modules=[]) | options
    return LoraConfig(target_parameters=list(targets), **options)


def fill(model):
    """Random values for every factor, so that each matters."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = (0.2 * values).to(parameter.dtype)
    return model


def adapted(name="qwen3_moe", targets=BOTH, config_options=None, **options):
    model = build(name, config_options=config_options)
    return fill(get_peft_model(model, config_of(targets, **options)))


def eager(model):
    """The same model in float64, its experts' own loop around PEFT's own adapters."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


def tokens(seed=1):
    return torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(seed))


def run(model, seed=1, **options):
    """-> the loss, and the gradient of every parameter that has one, by name."""
    model.zero_grad()
    out = model(input_ids=tokens(seed), labels=tokens(seed), **options)
    out.loss.backward()
    return {"loss": out.loss} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def train(model, steps=5, **options):
    """-> the loss and gradients of each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        found.append(run(model, seed=step, **options))
        optimizer.step()
    return found


def assert_same(got, want, limit=1e-5):
    """Float32's error grows through the layers and the steps."""
    assert got.keys() == want.keys()
    for name in want:
        error = relative_error(got[name], want[name])
        assert error <= limit, f"{name}: error {error:.3g}"


@contextmanager
def nothing_materialised(monkeypatch):
    """Within it, PEFT must not make the sum of a weight and an adapter."""

    def refuse(*args, **named):
        raise AssertionError("PEFT makes a weight's sum with its adapter")

    with monkeypatch.context() as patch:
        patch.setattr(ParamWrapper, "get_delta_weight", refuse)
        patch.setattr(ParamWrapper, "get_delta_factors", refuse)
        patch.setattr(torch.nn.utils.parametrize, "register_parametrization", refuse)
        yield
