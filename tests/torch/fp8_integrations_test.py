"""The FP8 recipes in experts of transformers and torchtitan."""

import pytest
import torch

import tilemoe
from checks import Calls
from random_layers import normal
from tilemoe import recipes

D, N, E, K, T = 64, 128, 4, 2, 24
OF_CODES = 2 * N + 8  # bytes of a row of H in FP8: codes, and a scale of gate and of up


def saved_H(run, rows):
    """Run, and return the bytes of the saved H: "fp8", "bf16", or both."""
    sizes, made = {rows * OF_CODES: "fp8", rows * 4 * N: "bf16"}, set()

    def pack(tensor):
        made.add(sizes.get(tensor.numel() * tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return made - {None}


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


# ---------------------------------------------------------------- transformers


@pytest.fixture
def mixtral():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tilemoe.transformers

    tilemoe.transformers.register()
    config = transformers.MixtralConfig(
        hidden_size=D, intermediate_size=N, num_local_experts=E, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=64, num_experts_per_tok=K,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="tilemoe", dtype=torch.bfloat16
    )


def experts_of(model):
    return next(m for m in model.modules() if hasattr(m, "is_concatenated"))


def loss_of(model):
    ids = torch.arange(T)[None] % 64
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), experts_of(model).down_proj.grad.clone()


@pytest.mark.parametrize("recipe", ["fp8", "fp8_forward"])
def test_transformers(mixtral, recipe):
    plain, gradient = loss_of(mixtral)
    tilemoe.transformers.set_recipe(mixtral, recipe)
    with Calls() as calls:
        loss, narrow = loss_of(mixtral)
        loss_of(mixtral)
    assert len(calls.of("quantize_fp8_into")) == 2
    assert error(loss, plain) < 0.01 and 0.005 < error(narrow, gradient) < 0.2
    with torch.no_grad():
        experts_of(mixtral).down_proj.mul_(4)
    assert error(loss_of(mixtral)[0], loss) > 1e-4
    tilemoe.quantize_weights(mixtral)
    tilemoe.transformers.set_recipe(mixtral, "bf16")
    with Calls() as calls:
        loss_of(mixtral)
    assert not calls.of("experts_lora")


def test_transformers_save_h(mixtral):
    set_recipe, run = tilemoe.transformers.set_recipe, lambda: loss_of(mixtral)
    set_recipe(mixtral, "fp8")
    assert saved_H(run, T * K) == {"bf16"}
    loss, gradient = run()
    set_recipe(mixtral, "fp8", save_h="fp8")
    assert saved_H(run, T * K) == {"fp8"}
    other, of_codes = run()
    assert torch.equal(loss, other) and 0.001 < error(of_codes, gradient) < 0.1
    for recipe, kept in (("auto", "bf16"), ("fp8", "bf16"), ("bf16", "bf16")):  # of the call before
        set_recipe(mixtral, recipe)
        assert saved_H(run, T * K) == {kept}


def test_transformers_save_h_auto(mixtral, monkeypatch):
    tilemoe.transformers.set_recipe(mixtral, "auto", save_h="fp8")
    assert saved_H(lambda: loss_of(mixtral), T * K) == {"bf16"}
    monkeypatch.setattr(recipes, "_cached", lambda *_: recipes.RecipeChoice("fp8", "faster"))
    assert saved_H(lambda: loss_of(mixtral), T * K) == {"fp8"}


def test_transformers_auto(mixtral, monkeypatch):
    plain, _ = loss_of(mixtral)
    tilemoe.transformers.set_recipe(mixtral, "auto")
    assert torch.equal(loss_of(mixtral)[0], plain)
    assert experts_of(mixtral).recipe_choice.recipe == "bf16"
    monkeypatch.setattr(recipes, "_cached", lambda *_: recipes.RecipeChoice("fp8", "faster"))
    assert not torch.equal(loss_of(mixtral)[0], plain)


def test_transformers_with_codes_of_a_checkpoint(mixtral):
    from tilemoe.integrations import quantized_experts

    experts = experts_of(mixtral)
    for name in quantized_experts.weights_of(experts):
        weight = tilemoe.quantize_experts(getattr(experts, name), "fp8")
        quantized_experts.put(experts, name, weight)
    ids = torch.arange(T)[None] % 64
    embedded = mixtral.get_input_embeddings()(ids).detach()
    made = {}
    for recipe in ("bf16", "fp8", "fp8_forward"):
        tilemoe.transformers.set_recipe(mixtral, recipe)
        x = embedded.clone().requires_grad_()
        mixtral(inputs_embeds=x, labels=ids).loss.backward()
        made[recipe] = x.grad
    assert 1e-4 < error(made["fp8"], made["bf16"]) < 0.1
    assert not torch.equal(made["fp8"], made["fp8_forward"])


def test_transformers_refusals(mixtral):
    set_recipe = tilemoe.transformers.set_recipe
    with pytest.raises(ValueError, match="recipe must be one of bf16, fp8"):
        set_recipe(mixtral, "e4m3")
    for recipe in ("bf16", "fp8_forward"):
        with pytest.raises(ValueError, match=f"requires recipe='fp8' or 'auto', got '{recipe}'"):
            set_recipe(mixtral, recipe, save_h="fp8")
    with pytest.raises(ValueError, match="save_h must be one of fp8, got 'e4m3'"):
        set_recipe(mixtral, "fp8", save_h="e4m3")
    with pytest.raises(ValueError, match="has no experts module"):
        set_recipe(torch.nn.Linear(2, 2), "fp8")
    experts_of(mixtral).is_transposed = True
    with pytest.raises(NotImplementedError, match="whose weights are stored transposed"):
        set_recipe(mixtral, "fp8")


# ---------------------------------------------------------------- torchtitan


@pytest.fixture
def titan():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    import tilemoe.torchtitan
    from torchtitan.models.common.moe import GroupedExperts

    def build(recipe, **how):
        cfg = GroupedExperts.Config(dim=D, hidden_dim=N, num_experts=E)
        made = tilemoe.torchtitan.experts(cfg, recipe=recipe, **how).build()
        for seed, p in enumerate(made.parameters()):
            p.data = normal(*p.shape, seed=seed, dtype=torch.float32, scale=p.shape[-1] ** -0.5).cpu()
        return made

    return build


@pytest.mark.cpu
def test_torchtitan(titan):
    x = normal(T, D, seed=9, dtype=torch.bfloat16)
    counts = torch.tensor([7, 0, 13, 4])
    made = {}
    for recipe in ("bf16", "fp8", "fp8_forward"):
        module, rows = titan(recipe), x.detach().requires_grad_()
        with Calls() as calls:
            for _ in range(2):
                module.zero_grad()
                out = module(rows, counts)
                out.float().square().sum().backward()
        assert len(calls.of("quantize_fp8_into")) == (0 if recipe == "bf16" else 3)
        assert all(p.grad.dtype == torch.float32 for p in module.parameters())
        made[recipe] = [out, rows.grad, *(p.grad for p in module.parameters())]
    for recipe in ("fp8", "fp8_forward"):
        for got, want in zip(made[recipe], made["bf16"]):
            assert 0.005 < error(got, want) < 0.1
    assert error(made["fp8"][1], made["fp8_forward"][1]) > 0.005


@pytest.mark.cpu
def test_torchtitan_save_h(titan):
    x = normal(T, D, seed=9, dtype=torch.bfloat16)
    counts = torch.tensor([7, 0, 13, 4])
    made = {}
    for save_h in (None, "fp8"):
        module, rows = titan("fp8", save_h=save_h), x.detach().requires_grad_()
        assert saved_H(lambda: module(rows, counts), T) == {save_h or "bf16"}
        out = module(rows, counts)
        out.float().square().sum().backward()
        made[save_h] = [out, rows.grad, *(p.grad for p in module.parameters())]
    assert torch.equal(made[None][0], made["fp8"][0])
    for got, want in zip(made["fp8"][1:], made[None][1:]):
        assert 0.001 < error(got, want) < 0.1


@pytest.mark.cpu
@pytest.mark.parametrize(
    "how, text",
    [
        (dict(recipe="e4m3"), "recipe must be one of bf16, fp8"),
        (dict(recipe="fp8", save_h="e4m3"), "save_h must be one of fp8, got 'e4m3'"),
        (dict(save_h="fp8"), "save_h='fp8' requires recipe='fp8' or 'auto', got 'bf16'"),
        (dict(recipe="auto"), "'auto' does not support torchtitan, where FSDP-2 gathers one format"),
    ],
)
def test_torchtitan_refusals(titan, how, text):
    from torchtitan.models.common.moe import GroupedExperts

    cfg = GroupedExperts.Config(dim=D, hidden_dim=N, num_experts=E)
    with pytest.raises((ValueError, NotImplementedError), match=text):
        tilemoe.torchtitan.experts(cfg, **how)


class OfGptOss:
    """A configuration with the names of torchtitan's, whose package requires a newer torch."""


@pytest.mark.cpu
def test_torchtitan_gpt_oss(titan):
    OfGptOss.__module__ = "torchtitan.models.gpt_oss.moe"
    OfGptOss.__qualname__ = "GptOssGroupedExperts.Config"
    with pytest.raises(NotImplementedError, match="whose gate and up rows are interleaved"):
        tilemoe.torchtitan.experts(OfGptOss(), recipe="fp8")


@pytest.mark.cpu
def test_torchtitan_routed_experts(titan):
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    cfg = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=N, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    )
    made = tilemoe.torchtitan.routed_experts(cfg, recipe="fp8", save_h="fp8")
    assert made.inner_experts.recipe == "fp8" and made.inner_experts.save_h == "fp8"
