"""PEFT's adapters of quantised experts: their training equals that of the dequantised model."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training

import tilemoe.peft
import tilemoe.transformers
from checks import refused, same_bits
from peft_support import config_of, fill, nothing_materialised
from quantized_checkpoints import experts_of, load, logits, make_in, tokens
from tilemoe.integrations import quantized_experts

KINDS = ["mxfp4", "fp8", "nf4"]


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()
    tilemoe.peft.register()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """-> a function: a model of a kind, loaded once and copied."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = load(folders[kind], **make_in(kind, folders[kind]))
        return copy.deepcopy(made[kind])

    return of


def adapted(model, **options):
    return fill(get_peft_model(model, config_of(**options)))


def trained(model, steps=3):
    """-> the losses and the last gradients; every adapter of experts gets one."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum(".experts." in name for name in parameters) == 8
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
    found = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    return found | {name: p.grad for name, p in parameters.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_that_of_the_dequantised_model(kind, base, monkeypatch):
    """Bit by bit: the values are the same, and the frozen weights are only read."""
    model = base(kind)
    codes = {name: b.clone() for name, b in model.named_buffers()}
    want = trained(adapted(base(kind).dequantize(), target_modules=["q_proj", "v_proj"]))
    model = adapted(model, target_modules=["q_proj", "v_proj"])
    with nothing_materialised(monkeypatch):
        got = trained(model)
    same_bits(got, want)
    losses = [got[f"loss {step}"] for step in range(3)]
    assert len(set(losses)) == 3 and all(loss.isfinite() for loss in losses)
    assert all(got[name].norm() > 0 for name in got)
    same_bits({n.removeprefix("base_model.model."): b for n, b in _buffers(model).items()}, codes)


def _buffers(model):
    return {name.replace(".base_layer", ""): b for name, b in model.named_buffers()}


def test_prepare_model_for_kbit_training(base):
    """It casts parameters to float32, which leaves the experts' own dtype."""
    model = prepare_model_for_kbit_training(base("nf4"), use_gradient_checkpointing=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {quantized_experts.get(m, "down_proj").dtype for m in experts_of(model)} == {
        torch.bfloat16
    }
    assert all(p.untyped_storage().nbytes() == 0 for m in experts_of(model) for p in m.parameters())
    tilemoe.transformers.prepare(model)
    model = adapted(model)
    got = trained(model)
    assert all(got[name].norm() > 0 for name in got)


def test_gradient_checkpointing(base):
    model = adapted(base("fp8"))
    want = trained(copy.deepcopy(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    same_bits(trained(model), want)


def test_saved_loaded_disabled_and_selected(base, tmp_path):
    plain = logits(base("mxfp4"))
    model = adapted(base("mxfp4"))
    active = logits(model)
    assert not torch.equal(active, plain)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base("mxfp4"), tmp_path)
    assert torch.equal(logits(loaded), active)
    loaded.add_adapter("other", config_of(r=6))
    loaded.set_adapter("other")
    assert torch.equal(logits(loaded), plain)  # its B is 0
    loaded.set_adapter("default")
    assert torch.equal(logits(loaded), active)
    assert torch.equal(logits(loaded.unload()), plain)


def test_merging(base):
    """Into the dequantised weights, as PEFT merges into 16 bits; never into codes."""
    model = adapted(base("mxfp4"), target_modules=["q_proj"])
    before = copy.deepcopy(model.state_dict())
    sentence = r"mlp.experts.(gate_up|down)_proj cannot be merged into a quantised weight; call"
    for merge in (model.merge_and_unload, model.merge_adapter):
        refused(ValueError, sentence, merge)
    same_bits(model.state_dict(), before)
    active = logits(model)
    model.get_base_model().dequantize()
    assert torch.equal(logits(model), active)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    merged = logits(model.merge_and_unload())
    assert (merged - active).norm() / active.norm() < 0.05


def test_what_is_refused(base):
    model = adapted(base("nf4"))
    model.add_adapter("other", config_of())
    model.base_model.set_adapter(["default", "other"])
    sentence = "down_proj, which is quantised, cannot be computed: 2 adapters are active"
    refused(NotImplementedError, sentence, logits, model)
    model.set_adapter("default")
    model.base_model.model.set_experts_implementation("grouped_mm")
    sentence = "is quantised, cannot be computed: its experts_implementation is 'grouped_mm'"
    refused(NotImplementedError, sentence, logits, model)


def test_compile_into_one_graph(base):
    model = adapted(base("mxfp4"))

    def run(called):
        model.zero_grad()
        called(input_ids=tokens(), labels=tokens()).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = run(model)  # finds the experts' form
    torch._dynamo.reset()
    got = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert len(want) == 8
    same_bits(got, want)
