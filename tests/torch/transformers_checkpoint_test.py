"""A checkpoint of transformers that is mapped into memory, where its tensors begin on 8 bytes."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, GptOssConfig

import tilemoe.transformers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=6,
        num_experts_per_tok=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tilemoe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="tilemoe", dtype=torch.float32
    )
    assert tilemoe.transformers.prepare(model)
    of_experts = [p.data_ptr() % 16 for name, p in model.named_parameters() if "experts" in name]
    assert any(of_experts), "no weight of the experts is off 16 bytes"
    return model.eval()


def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def test_compile_and_export(model):
    ids = torch.arange(24).view(2, 12) % 97
    want = logits_of(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(logits_of(compiled, ids), want)
    experts = model.model.layers[0].mlp.experts
    x, chosen, scores = torch.randn(12, 64), torch.arange(24).view(12, 2) % 6, torch.rand(12, 2)
    exported = torch.export.export(experts, (x, chosen, scores))
    assert torch.equal(exported.module()(x, chosen, scores), experts(x, chosen, scores))
