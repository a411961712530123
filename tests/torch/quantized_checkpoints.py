"""Tiny checkpoints in quantised formats, made by the formats' own code, and what is read of them."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, DeepseekV3Config, FineGrainedFP8Config, GptOssConfig, Mxfp4Config,
    Qwen3MoeConfig,
)  # fmt: skip
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tilemoe.transformers import QuantizedExpertsConfig

E, d = 4, 256  # two blocks of FP8 in each direction
_COMMON = dict(
    vocab_size=98, hidden_size=d, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, num_experts_per_tok=2, intermediate_size=d,
    max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.08,
)  # fmt: skip
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, num_experts=E, moe_intermediate_size=d),
    "gpt_oss": GptOssConfig(**_COMMON, num_local_experts=E),
    "deepseek_v3": DeepseekV3Config(
        **(_COMMON | dict(head_dim=32)), n_routed_experts=E, moe_intermediate_size=d,
        n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=2, q_lora_rank=128,
        kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    ),
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    "fmt": "e4m3", "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
DEQUANTIZE = {  # transformers' own
    "fp8": FineGrainedFP8Config(dequantize=True),
    "mxfp4": Mxfp4Config(dequantize=True),
}


def make(name: str, folder: Path, **changed) -> Path:
    """A checkpoint in bfloat16, with the hub's names."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    for option, value in changed.items():
        setattr(config, option, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_fp8(name: str, folder: Path, quantization=FP8) -> Path:
    """All linear layers and experts in FP8, by transformers' quantizer."""

    class OfQuantizer:
        quantization_config = FineGrainedFP8Config()

    operation, tensors = Fp8Quantize(OfQuantizer()), {}
    for key, tensor in load_file(make(name, folder) / "model.safetensors").items():
        is_linear = "_proj" in key and key.endswith(".weight")
        tensors |= operation.convert({key: tensor}) if is_linear else {key: tensor}
    return _replace(folder, tensors, quantization)


def make_mxfp4(folder: Path, **changed) -> Path:
    """gpt-oss: every byte is a block's code, so that random ones cover the format."""
    generator, tensors = torch.Generator("cpu").manual_seed(3), {}
    for key, tensor in load_file(make("gpt_oss", folder, **changed) / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = tensor
            continue
        experts, width, out = tensor.shape
        groups = (experts, out, width // 32)
        options = dict(dtype=torch.uint8, generator=generator, device="cpu")
        tensors[key + "_blocks"] = torch.randint(256, (*groups, 16), **options)
        tensors[key + "_scales"] = torch.randint(118, 124, groups, **options)
    return _replace(folder, tensors, MXFP4)


def make_in(format: str, folder: Path) -> dict:
    """A checkpoint whose experts are loaded in this format, with the options that this takes."""
    if format == "mxfp4":
        make_mxfp4(folder)
        return {}
    if format == "fp8":
        make_fp8("qwen3_moe", folder)
        return {}
    make("qwen3_moe", folder)
    return dict(quantization_config=QuantizedExpertsConfig(format))


def _replace(folder: Path, tensors: dict, quantization: dict) -> Path:
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def load(folder: Path, **options):
    options = dict(dtype=torch.bfloat16, experts_implementation="tilemoe") | options
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "is_concatenated")]


def tokens(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (2, 9), generator=generator, device="cpu")


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens().to(model.device)).logits


def as_bytes(tensors: dict) -> dict:
    return {key: t.reshape(-1).contiguous().view(torch.uint8) for key, t in tensors.items()}
