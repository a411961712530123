"""What remains PEFT's around experts that TileMoE computes: scales, selecting, merging, saving."""

import copy
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from peft import PeftModel, get_peft_model, inject_adapter_in_model
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import tilemoe.peft
import tilemoe.transformers
from checks import same_bits
from peft_support import (
    BOTH, E, RANK, W1, W2, adapted, assert_same, build, config_of, eager, fill,
    nothing_materialised, run, tokens,
)  # fmt: skip
from transformers_support import relative_error


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()
    tilemoe.peft.register()


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """TileMoE computes every adapter of experts: PEFT reports none."""
    monkeypatch.setattr(tilemoe.integrations.peft, "_report", _refuse_unless_eager)


def _refuse_unless_eager(weight, reason):
    assert "'eager'" in reason, f"{weight}: {reason}"


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def same_logits(model, limit=1e-5):
    error = relative_error(logits(model), logits(eager(model)))
    assert error <= limit, f"error {error:.3g}"


@pytest.mark.parametrize(
    "options",
    [
        dict(use_rslora=True),
        dict(rank_pattern={W1: 3, W2: 12}),
        dict(alpha_pattern={W1: 2, W2: 20}),
        dict(rank_pattern={W2: 1}, alpha_pattern={W1: 5}, use_rslora=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_ranks_and_scales(name, options, monkeypatch):
    model = adapted(name, **options)
    want = run(eager(model))
    with nothing_materialised(monkeypatch):
        assert_same(run(model), want)


def test_a_fresh_adapter_changes_no_bit():
    base = logits(build())
    assert torch.equal(logits(get_peft_model(build(), config_of())), base)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_disabled_merged_and_unmerged(name):
    base, model = logits(build(name)), adapted(name)
    active = logits(model)
    assert relative_error(active, base) > 1e-2
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), active)
    model.merge_adapter()
    assert relative_error(logits(model), active) <= 1e-5
    model.unmerge_adapter()
    assert relative_error(logits(model), active) <= 1e-5
    merged = model.merge_and_unload()
    assert not any("lora_" in key for key, _ in merged.named_parameters())
    assert relative_error(logits(merged), active) <= 1e-5


def test_unload_gives_the_model_back():
    assert torch.equal(logits(adapted().unload()), logits(build()))


def test_one_of_two_adapters_is_active(monkeypatch):
    model = get_peft_model(build(), config_of())
    model.add_adapter("other", config_of(r=6, lora_alpha=3))
    fill(model)
    found = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        want = run(eager(model))
        with nothing_materialised(monkeypatch):
            found[name] = run(model)
        assert all(name in key for key in found[name] if key != "loss") and len(want) > 4
        assert_same(found[name], want)
    assert relative_error(found["other"]["loss"], found["default"]["loss"]) > 1e-3
    model.delete_adapter("default")
    assert_same(run(model), found["other"], limit=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_saved_and_loaded(name, tmp_path):
    model = adapted(name)
    want = logits(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(name), tmp_path, is_trainable=True)
    assert torch.equal(logits(loaded), want)
    same_bits(run(loaded), run(model))


def test_modules_to_save():
    model = adapted(modules_to_save=["lm_head"])
    got, want = run(model), run(eager(model))
    assert any("modules_to_save" in key for key in got)
    assert_same(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = adapted()
    want = run(model)
    model.enable_input_require_grads()
    options = dict(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.gradient_checkpointing_enable(**options)
    model.train()
    assert_same(run(model), want, limit=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_a_routers_adapter(name):
    model = adapted(name, [*BOTH, "mlp.gate.weight"])
    got = run(model)
    routers = [key for key in got if ".gate.lora_" in key]
    assert len(routers) == 4 and all(got[key].norm() > 0 for key in routers)
    assert_same(got, run(eager(model)))


def test_attentions_adapters():
    model = adapted(target_modules=["q_proj", "v_proj"])
    got = run(model)
    assert sum("q_proj" in key for key in got) == 4
    assert_same(got, run(eager(model)))


def test_frozen_adapters_pass_gradients_on(monkeypatch):
    """Experts' adapters in inference below attention's, which are trained."""
    model = adapted(target_modules=["q_proj", "v_proj"])
    for key, parameter in model.named_parameters():
        if "experts" in key:
            parameter.requires_grad_(False)
    want = run(eager(model))
    assert len(want) == 9 and not any("experts" in key for key in want)
    with nothing_materialised(monkeypatch):
        assert_same(run(model), want)


def test_experts_without_a_gate(monkeypatch):
    """Those of Nemotron-H, which have up_proj."""
    config = NemotronHConfig(hidden_size=24, moe_intermediate_size=16, n_routed_experts=E)
    config._experts_implementation = "tilemoe"
    model = torch.nn.Sequential(NemotronHExperts(config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    fill(inject_adapter_in_model(config_of(["0.up_proj", "0.down_proj"]), model))
    x, ids, weights = torch.randn(7, 24), torch.randint(E, (7, 2)), torch.rand(7, 2)

    def gradients(model):
        (experts,) = model
        dtype = next(model.parameters()).dtype
        out = experts(x.to(dtype), ids, weights.to(dtype))
        factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(out.square().sum(), factors.values())
        return {"out": out.detach()} | dict(zip(factors, found, strict=True))

    reference = copy.deepcopy(model).double()
    reference[0].get_base_layer().config._experts_implementation = "eager"
    want = gradients(reference)
    assert len(want) == 5
    with nothing_materialised(monkeypatch):
        assert_same(gradients(model), want)


class _Half(torch.nn.Module):
    def forward(self, W):
        return W / 2


def test_a_parametrized_weight():
    """As bitsandbytes has them."""
    model = adapted()
    before = run(model)["loss"]
    for layer in model.base_model.model.model.layers:
        experts = layer.mlp.experts.get_base_layer()
        torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", _Half())
        experts.parametrizations.down_proj.original.requires_grad_(False)
    want = run(eager(model))
    assert relative_error(want["loss"], before.double()) > 1e-3
    assert_same(run(model), want)


def test_generate(monkeypatch):
    model = adapted().eval()
    ids, options = tokens()[:, :3], dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    want = eager(model).generate(ids, **options)
    with nothing_materialised(monkeypatch), model.disable_adapter():
        assert not torch.equal(model.generate(ids, **options), want)
    with nothing_materialised(monkeypatch):
        assert torch.equal(model.generate(ids, **options), want)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, **options), want)
    run(model)  # training after inference


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_autocast(name):
    """Every token goes to every expert, so that no router's rounding selects another one."""
    model = adapted(name, config_options=dict(num_experts_per_tok=E))
    want = run(eager(model))
    with torch.autocast("cpu", torch.bfloat16):
        got = run(model)
    assert all(t.dtype == torch.float32 for t in got.values())
    assert_same(got, want, limit=5e-2)


def test_experts_in_16_bits_with_factors_in_32():
    """PEFT keeps factors in float32 next to weights in 16 bits."""
    model = build(config_options=dict(num_experts_per_tok=E)).bfloat16()
    model = fill(get_peft_model(model, config_of()))
    got = run(model)
    assert all(t.dtype == torch.float32 for key, t in got.items() if "lora_" in key)
    assert_same(got, run(eager(model)), limit=5e-2)


def test_no_warning_while_it_is_fused():
    model = adapted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model)


def test_ranks_of_the_pattern_are_used():
    """So that the test of patterns compares what it names."""
    ranks = {
        parameter.shape[0] // E
        for key, parameter in adapted(rank_pattern={W1: 3, W2: 12}).named_parameters()
        if "lora_A" in key
    }
    assert ranks == {3, 12} and RANK not in ranks


def trained(model, folder, resume=None):
    """-> the losses of six steps of Trainer, with a checkpoint after the third."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in tokens()]
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=3, learning_rate=3e-2, logging_steps=1,
        save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    reference = adapted()
    reference.set_experts_implementation("eager")
    want = trained(reference, tmp_path / "eager")
    with nothing_materialised(monkeypatch):
        got = trained(adapted(), tmp_path / "tilemoe")
        checkpoint = tmp_path / "tilemoe" / "checkpoint-3"
        resumed = trained(adapted(), tmp_path / "resumed", str(checkpoint))
    assert len(got) == 6 and got == pytest.approx(want, rel=1e-4) and got[5] < got[0] - 0.05
    assert resumed == pytest.approx(got, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compile_into_one_graph(name):
    model = adapted(name)
    want = run(model)  # finds the experts' form
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(input_ids=tokens(), labels=tokens()).loss.backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(got, {name: tensor for name, tensor in want.items() if name != "loss"})
