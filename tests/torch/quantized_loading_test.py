"""Checkpoints whose experts stay quantised, and 16-bit ones that are quantised while they are
loaded. The references are transformers' own dequantisers."""

import copy
import json
import weakref

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

import tilemoe.transformers
from checks import refused, same_bits
from quantized_checkpoints import (
    DEQUANTIZE, FP8, as_bytes, experts_of, load, logits, make, make_fp8, make_mxfp4,
)  # fmt: skip
from tilemoe.integrations import kept_quantized, quantized_experts
from tilemoe.transformers import QuantizedExpertsConfig

LIMITS = {"fp8": 0.51, "mxfp4": 0.27, "nf4": 0.29, "nf4_double": 0.27, "nvfp4": 0.29}


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """-> a function: the folder of a checkpoint, made once."""
    made = {}

    def of(name, method=None):
        if (name, method) not in made:
            folder = tmp_path_factory.mktemp(f"{name}_{method}")
            build = {None: make, "fp8": make_fp8, "mxfp4": lambda _, f: make_mxfp4(f)}[method]
            made[name, method] = build(name, folder)
        return made[name, method]

    return of


def assert_resident(model, format):
    """The bytes of the experts' weights, next to those in 16 bits; no weight has another copy."""
    for experts in experts_of(model):
        names = quantized_experts.buffers(experts)
        for weight in ("gate_up_proj", "down_proj"):
            assert quantized_experts.get(experts, weight).format == format
        present = dict(experts.named_parameters()) | dict(experts.named_buffers())
        stored = sum(present[name].nbytes for name in names if name in present)
        weights = [experts.gate_up_proj, experts.down_proj]
        assert stored / sum(2 * weight.numel() for weight in weights) <= LIMITS[format]
        assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
    assert model.get_memory_footprint() < 2 * model.num_parameters() * 0.8


def same_order(model, want):
    """PEFT names adapters by the order of a module's parameters."""
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in want.named_parameters()]


@pytest.mark.parametrize(
    "name, method", [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8")]
)
def test_a_quantised_checkpoint(name, method, checkpoint, tmp_path):
    """It computes what transformers' dequantiser makes of it, and is saved as it was."""
    folder = checkpoint(name, method)
    model = load(folder)
    assert_resident(model, method)
    forms = tilemoe.transformers.prepare(model)
    assert len(forms) == len(experts_of(model))
    want = load(folder, quantization_config=copy.deepcopy(DEQUANTIZE[method]))
    assert not any(map(quantized_experts.names, experts_of(want)))
    same_order(model, want)
    assert torch.equal(logits(model), logits(want))

    model.save_pretrained(tmp_path)
    of_experts = lambda path: {
        key: tensor
        for key, tensor in load_file(path / "model.safetensors").items()
        if ".experts." in key
    }
    before, after = of_experts(folder), of_experts(tmp_path)
    assert before and {k: (t.dtype, t.shape) for k, t in before.items()} == {
        k: (t.dtype, t.shape) for k, t in after.items()
    }
    same_bits(as_bytes(after), as_bytes(before))
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == method
    assert torch.equal(logits(load(tmp_path)), logits(want))


@pytest.mark.parametrize("format", LIMITS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_16_bit_checkpoint(name, format, checkpoint, tmp_path, monkeypatch):
    """It is quantised one weight after the other, as quantize_experts does it."""
    put, read = quantized_experts.quantize, []

    def quantize(experts, weight, W, format):
        assert not [old for old in read if old() is not None], "a second weight in 16 bits"
        read.append(weakref.ref(W))
        put(experts, weight, W, format)

    with monkeypatch.context() as patch:
        patch.setattr(quantized_experts, "quantize", quantize)
        model = load(checkpoint(name), quantization_config=QuantizedExpertsConfig(format))
    assert len(read) == 4
    assert_resident(model, format)
    want = load(checkpoint(name))
    same_order(model, want)
    for experts, original in zip(experts_of(model), experts_of(want), strict=True):
        for weight in ("gate_up_proj", "down_proj"):
            W = getattr(original, weight).detach()
            W = W.mT if original.is_transposed else W
            expected = tilemoe.quantize_experts(W, format)
            got = quantized_experts.get(experts, weight)
            same_bits(as_bytes(got.state_dict("W")), as_bytes(expected.state_dict("W")))
    out = logits(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_resident(again, format)
    same_bits(as_bytes(again.state_dict()), as_bytes(model.state_dict()))
    assert torch.equal(logits(again), out)
    dequantized = again.dequantize()
    assert not any(map(quantized_experts.names, experts_of(dequantized)))
    assert torch.equal(logits(dequantized), out)


def test_state_dicts(checkpoint):
    model = load(checkpoint("gpt_oss", "mxfp4"))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert {key for key in state if key.startswith(name)} == {
        name + end for end in ("_blocks", "_scales", "_bias")
    }
    out = logits(model)
    other = copy.deepcopy(model)
    for experts in experts_of(other):
        quantized_experts.get(experts, "gate_up_proj").codes.zero_()
    assert not torch.equal(logits(other), out)
    other.load_state_dict(state)
    assert torch.equal(logits(other), out)
    del state[name + "_scales"]
    refused(RuntimeError, f'Missing key.*"{name}_scales"', other.load_state_dict, state)
    state[name + "_scales"] = torch.zeros(1, 2, 3, dtype=torch.uint8)
    refused(RuntimeError, "gate_up_proj.scales is .*expected", other.load_state_dict, state)


def test_casts_leave_codes_and_scales_alone(checkpoint):
    model = load(checkpoint("qwen3_moe", "fp8"))
    (experts, *_), out = experts_of(model), logits(model)
    before = as_bytes(experts.state_dict())
    experts.to(torch.float16)
    same_bits(as_bytes(experts.state_dict()), before)
    assert torch.equal(logits(model), out)


def test_a_model_is_quantised_in_place(checkpoint):
    model = load(checkpoint("qwen3_moe"))
    tilemoe.transformers.quantize(model, "nf4")
    config = QuantizedExpertsConfig("nf4")
    loaded = load(checkpoint("qwen3_moe"), quantization_config=config)
    same_bits(as_bytes(model.state_dict()), as_bytes(loaded.state_dict()))
    with torch.device("meta"):
        shapes = type(model)._from_config(model.config, experts_implementation="tilemoe")
    tilemoe.transformers.quantize(shapes, "nf4")
    sizes = lambda m: {name: (b.shape, b.dtype) for name, b in m.named_buffers()}
    assert sizes(shapes) == sizes(model)


def test_fp8_experts_of_transformers(checkpoint):
    """Those of a model that transformers loads in FP8, which it does on a GPU only."""
    model = load(checkpoint("qwen3_moe", "fp8"))
    (experts, *_), config = experts_of(model), model.config
    make = use_experts_implementation(experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    theirs = make(FP8Experts)(config, block_size=(128, 128))
    theirs.load_state_dict(experts.state_dict())
    assert tilemoe.transformers.prepare(theirs)[""] == tilemoe.transformers.prepare(experts)[""]
    x = torch.randn(5, config.hidden_size, dtype=torch.bfloat16)
    ids, scores = torch.randint(config.num_experts, (5, 2)), torch.rand(5, 2)
    assert torch.equal(theirs(x, ids, scores), experts(x, ids, scores))


def test_other_layers_of_a_model(checkpoint):
    """Experts that the configuration excludes stay in 16 bits."""
    config = QuantizedExpertsConfig("nf4", modules_to_not_convert=["layers.0.mlp.experts"])
    model = load(checkpoint("qwen3_moe"), quantization_config=config)
    first, second = map(quantized_experts.names, experts_of(model))
    assert not first and len(second) == 2


@pytest.mark.parametrize(
    "changed, why",
    [
        (dict(weight_block_size=[64, 64]), "weight_block_size must be 128 x 128, got [64, 64]"),
        (dict(activation_scheme="static"), "activation_scheme must be dynamic, got static"),
    ],
    ids=["blocks", "activations"],
)
def test_what_cannot_be_kept_is_left_to_transformers(changed, why, tmp_path, monkeypatch):
    said = []
    logger = kept_quantized.logger
    monkeypatch.setattr(logger, "warning_once", said.append)
    folder = make_fp8("qwen3_moe", tmp_path, FP8 | changed)
    model = load(folder)  # transformers dequantises on a CPU
    assert not any(map(quantized_experts.names, experts_of(model)))
    assert len(said) == 1 and said[0] == f"experts are not kept in fp8: {why}"


def test_refusals(checkpoint):
    config = QuantizedExpertsConfig("nf4")
    refused(
        NotImplementedError,
        "Qwen3MoeForCausalLM cannot be quantised: its experts_implementation must be 'tilemoe', got 'eager'",
        load, checkpoint("qwen3_moe"), quantization_config=config, experts_implementation="eager",
    )  # fmt: skip
    refused(ValueError, "format must be one of fp8.*, got 'int4'", QuantizedExpertsConfig, "int4")
    model = load(checkpoint("gpt_oss", "mxfp4"))
    model.set_experts_implementation("eager")
    sentence = "gate_up_proj of .*GptOssExperts is quantised, so .* cannot read it"
    refused(NotImplementedError, sentence, logits, model)
    model.set_experts_implementation("tilemoe")
    experts_of(model)[1].down_proj.requires_grad_(True)
    refused(ValueError, "down_proj of .* requires a gradient, but it is quantised", logits, model)
