"""Adapters of experts saved by older PEFTs and by unsloth, in their own layouts, loaded."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from peft import PeftModel
from safetensors.torch import load_file, save_file

import tilemoe.peft
import tilemoe.transformers
from checks import refused
from peft_support import E, W1, W2, adapted, build, tokens

# down_proj's in = out
SQUARE = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=32)
GROUPED = "grouped_by_expert"


@pytest.fixture(autouse=True)
def registered():
    tilemoe.transformers.register()
    tilemoe.peft.register()
    yield
    tilemoe.peft.register()


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def reversed_roles(A, B):
    """What PEFT before 0.19.1 would have saved: lora_A of the outputs, lora_B of the inputs."""
    A, B = A.reshape(E, -1, A.shape[1]), B.reshape(B.shape[0], -1, E)
    return B.permute(2, 1, 0).reshape(-1, B.shape[0]), A.permute(2, 1, 0).reshape(A.shape[2], -1)


def expert_major(A, B):
    return A, B.reshape(B.shape[0], -1, E).transpose(1, 2).reshape(B.shape)


def resave(folder, change, targets=("base_layer.", ""), **entries):
    """Change the factors of gate_up_proj (the inner wrapper) and down_proj, and the config."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if "experts" in key and "lora_A" in key]:
        if ("base_layer." if "base_layer." in key else "") in targets:
            key_B = key.replace("lora_A", "lora_B")
            A, B = change(tensors[key], tensors[key_B])
            tensors[key], tensors[key_B] = A.contiguous(), B.contiguous()
    save_file(tensors, file)
    config = json.loads((folder / "adapter_config.json").read_text()) | entries
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def saved(folder, name="qwen3_moe", config_options=None):
    model = adapted(name, config_options=config_options, rank_pattern={W1: 3})
    model.save_pretrained(folder)
    return logits(model)


def load(folder, name="qwen3_moe", config_options=None):
    return PeftModel.from_pretrained(build(name, config_options=config_options), folder)


@pytest.mark.parametrize("version", ["0.18.1", "absent", "0.21.2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_reversed_roles_are_recognised_by_their_shapes(name, version, tmp_path):
    want = saved(tmp_path, name)
    resave(tmp_path, reversed_roles, peft_version=version)
    model = load(tmp_path, name)
    assert torch.equal(logits(model), want)
    model.save_pretrained(tmp_path / "again")  # in today's layout
    assert torch.equal(logits(load(tmp_path / "again", name)), want)


def test_one_weights_shapes_decide_for_both(tmp_path):
    """gpt-oss's down_proj has in = out."""
    want = saved(tmp_path, "gpt_oss", SQUARE)
    resave(tmp_path, reversed_roles, peft_version="0.19.0")
    assert torch.equal(logits(load(tmp_path, "gpt_oss", SQUARE)), want)


def test_mixed_roles_are_refused(tmp_path):
    saved(tmp_path)
    resave(tmp_path, reversed_roles, targets=[""])
    refused(ValueError, "for some experts' weights, but not for others", load, tmp_path)


def square(folder, **entries):
    """Of down_proj alone, with in = out."""
    model = adapted(targets=[W2], config_options=SQUARE)
    model.save_pretrained(folder)
    change = reversed_roles if entries.pop("is_reversed", False) else lambda A, B: (A, B)
    resave(folder, change, **entries)
    return logits(model)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "absent"])
def test_ambiguous_roles_are_refused_unless_given(version, tmp_path):
    want = square(tmp_path, peft_version=version, is_reversed=True)
    refused(ValueError, "ambiguous_roles='reversed'", load, tmp_path, config_options=SQUARE)
    tilemoe.peft.register(ambiguous_roles="reversed")
    assert torch.equal(logits(load(tmp_path, config_options=SQUARE)), want)
    tilemoe.peft.register(ambiguous_roles="current")
    assert not torch.equal(logits(load(tmp_path, config_options=SQUARE)), want)


@pytest.mark.parametrize("version", ["0.19.1", "0.21.2", "0.22.0.dev0@abc"])
def test_newer_versions_are_not_ambiguous(version, tmp_path):
    want = square(tmp_path, peft_version=version)
    assert torch.equal(logits(load(tmp_path, config_options=SQUARE)), want)


def test_ambiguous_roles_are_checked():
    refused(ValueError, "ambiguous_roles must be None, 'current' or 'reversed', got 'old'", tilemoe.peft.register, ambiguous_roles="old")


@pytest.mark.parametrize(
    "entries",
    [
        dict(lora_B_layout=GROUPED),
        dict(unsloth_fused_expert_lora=dict(lora_B_layout=GROUPED)),
        dict(
            lora_B_layout="mixed",
            unsloth_fused_expert_lora=dict(
                parameters={
                    name: dict(lora_B_layout=GROUPED) for name in ("gate_up_proj", "down_proj")
                }
            ),
        ),
    ],
    ids=["whole", "detail", "by parameter"],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_unsloths_layout(name, entries, tmp_path):
    want = saved(tmp_path, name)
    resave(tmp_path, expert_major, **entries)
    model = load(tmp_path, name)
    assert torch.equal(logits(model), want)
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert "lora_B_layout" not in config
    assert torch.equal(logits(load(tmp_path / "again", name)), want)


def test_unsloths_layout_of_one_weight(tmp_path):
    want = saved(tmp_path)
    of_down = dict(parameters=dict(down_proj=dict(lora_B_layout=GROUPED)))
    entries = dict(lora_B_layout="rank_major", unsloth_fused_expert_lora=of_down)
    resave(tmp_path, expert_major, targets=[""], **entries)
    assert torch.equal(logits(load(tmp_path)), want)


def test_both_older_layouts_at_once(tmp_path):
    want = saved(tmp_path)
    resave(tmp_path, lambda A, B: expert_major(*reversed_roles(A, B)), lora_B_layout=GROUPED)
    assert torch.equal(logits(load(tmp_path)), want)


def test_the_layouts_differ(tmp_path):
    """Read as PEFT's own, unsloth's gives other logits."""
    want = saved(tmp_path)
    resave(tmp_path, expert_major, lora_B_layout="rank_major")
    assert not torch.allclose(logits(load(tmp_path)), want, rtol=1e-2)


def test_an_unknown_layout_is_refused(tmp_path):
    saved(tmp_path)
    resave(tmp_path, expert_major, lora_B_layout="mixed")
    refused(ValueError, "lora_B of (gate_up|down)_proj in adapter_config.json must be .*, got 'mixed'", load, tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_transformers_own_loader(name, tmp_path):
    want = saved(tmp_path, name)
    model = build(name)
    model.load_adapter(str(tmp_path))
    assert torch.equal(logits(model), want)
    resave(tmp_path, expert_major, lora_B_layout=GROUPED)
    model = build(name)
    model.load_adapter(str(tmp_path), "unsloths")
    assert torch.equal(logits(model), want)
    resave(tmp_path, reversed_roles)
    refused(RuntimeError, "mismatch", build(name).load_adapter, str(tmp_path))


def test_transformers_own_loader_of_ambiguous_roles(tmp_path):
    want = square(tmp_path, peft_version="0.18.1", is_reversed=True)
    model = build(config_options=SQUARE)
    refused(ValueError, "ambiguous_roles='reversed'", model.load_adapter, str(tmp_path))
    tilemoe.peft.register(ambiguous_roles="reversed")
    model = build(config_options=SQUARE)
    model.load_adapter(str(tmp_path))
    assert torch.equal(logits(model), want)
