"""Adapters of experts that TileMoE does not compute: reported, or refused, by name."""

import re
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from peft import LoraConfig, get_peft_model

import tilemoe.peft
import tilemoe.transformers
from checks import refused
from peft_support import (
    BOTH, W1, W2, adapted, assert_same, build, config_of, eager, fill, nothing_materialised, run,
)  # fmt: skip
from tilemoe.integrations import peft_targets

THEIRS = tilemoe.integrations.peft


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()
    tilemoe.peft.register()


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(THEIRS, "_reported", set())
    monkeypatch.setattr(peft_targets, "_reported", set())


def reports(call, *args):
    """-> what it returns, and tilemoe.peft's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call(*args)
    texts = [str(warning.message) for warning in caught]
    return found, [text for text in texts if re.match("PEFT computes|.* stays frozen", text)]


def left_to_peft(model, reason, weights=2):
    """PEFT computes the adapters, right; this is reported once per weight, with the reason."""
    want = run(eager(model))
    THEIRS._reported.clear()
    got, texts = reports(run, model)
    assert_same(got, want)
    assert len(texts) == weights and all(reason in text for text in texts), texts
    assert reports(run, model)[1] == []


def wrappers(model):
    return [m for m in model.modules() if hasattr(m, "get_delta_factors")]


def test_two_active_adapters():
    model = get_peft_model(build(), config_of())
    model.add_adapter("other", config_of(r=6))
    fill(model)
    model.base_model.set_adapter(["default", "other"])
    left_to_peft(model, "2 adapters are active: default, other")


@pytest.mark.parametrize("weight", [W1, W2])
def test_a_rank_over_the_limit(weight):
    """Of one wrapper: the other one's adapter remains in the GEMMs."""
    model = adapted(rank_pattern={weight: 257})
    left_to_peft(model, "the rank of adapter default must be at most 256, got 257", weights=1)


def test_another_implementation():
    model = adapted()
    model.set_experts_implementation("batched_mm")
    left_to_peft(model, "its experts_implementation is 'batched_mm'")


def test_a_biass_adapter():
    model = adapted("gpt_oss", [*BOTH, W1 + "_bias"])
    left_to_peft(model, "it is not a weight of the experts' GEMMs", weights=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.lora_dropout.update({"default": torch.nn.Dropout(0.5)}), "has dropout"),
        (lambda w: w.use_dora.update(default=True), "DoRA"),
        (lambda w: w.lora_bias.update(default=True), "has a bias"),
    ],
)
def test_a_feature_that_another_peft_may_have(change, reason):
    """PEFT 0.21 refuses each when the adapter is made."""
    model = adapted()
    for wrapper in wrappers(model):
        change(wrapper)
    _, texts = reports(run, model)
    assert len(texts) == 2 and all(reason in text for text in texts)


@pytest.mark.parametrize(
    "options", [dict(lora_dropout=0.1), dict(use_dora=True), dict(lora_bias=True)], ids=str
)
def test_what_peft_itself_refuses(options):
    (name,) = options
    refused(ValueError, name, get_peft_model, build(), config_of(**options))


def test_adapters_that_a_forward_would_not_use(monkeypatch):
    model = adapted()
    experts = wrappers(model)[0].get_base_layer()
    monkeypatch.setattr(type(experts), "forward", lambda self, x, ids, weights: x)
    monkeypatch.setattr(THEIRS, "_is_fused", lambda *args: True)
    refused(RuntimeError, "Qwen3MoeExperts did not call TileMoE", run, model)
    assert not hasattr(experts, "_tilemoe_adapters")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gpt_oss", "down_proj"),
        ("gpt_oss", "gate_up_proj"),
        ("gpt_oss", "gate_proj"),
        ("gpt_oss", r".*\.(q_proj|experts\..*up_proj)"),
        ("olmoe", "gate_up_proj"),
        ("deepseek_v3", "gate_up_proj"),
    ],
)
def test_target_modules_that_name_experts(name, target):
    """A match elsewhere is enough for PEFT, which would leave the experts frozen."""
    modules = target if "*" in target else ["q_proj", "q_b_proj", target]
    config = LoraConfig(target_modules=modules)
    message = r"layers\.[01]\.mlp\.experts\..* is a parameter, not a module; pass target_parameters"
    refused(ValueError, message, get_peft_model, build(name), config)


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral"])
def test_target_modules_that_peft_converts(name, monkeypatch):
    """PEFT makes parameters of the names that experts have in these models' checkpoints."""
    names = ["w1", "w2", "w3"] if name == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(target_modules=["q_proj", *names], r=4)
    made, texts = reports(get_peft_model, build(name), config)
    assert texts == [] and len(wrappers(made)) == 4
    want = run(eager(fill(made)))
    with nothing_materialised(monkeypatch):
        assert_same(run(made), want)


def test_target_modules_elsewhere_are_allowed():
    made, texts = reports(get_peft_model, build("gpt_oss"), LoraConfig(target_modules=["q_proj"]))
    assert texts == [] and run(made)
    config = LoraConfig(target_modules=["down_proj", "q_proj"], target_parameters=BOTH)
    assert reports(get_peft_model, build("gpt_oss"), config)[1] == []


def test_all_linear_reports_frozen_experts():
    config = LoraConfig(target_modules="all-linear")
    _, texts = reports(get_peft_model, build("gpt_oss"), config)
    assert len(texts) == 4 and "layers.0.mlp.experts.gate_up_proj stays frozen" in texts[0]


def test_a_misspelt_parameter():
    config = config_of([W1, W2 + "s"])
    refused(ValueError, f"names {W2}s, but Qwen3MoeForCausalLM", get_peft_model, build(), config)


def test_a_second_adapter_is_checked_too():
    model = adapted()
    config = LoraConfig(target_modules=["q_proj"], target_parameters=BOTH)
    assert reports(model.add_adapter, "other", config)[1] == []


def test_registered_twice_is_registered_once():
    from peft.tuners.lora.layer import ParamWrapper

    before = ParamWrapper._activate_lora
    tilemoe.peft.register()
    assert ParamWrapper._activate_lora is before
