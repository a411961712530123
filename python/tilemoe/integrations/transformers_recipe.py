"""Select the recipe of transformers' experts: `tilemoe.transformers.set_recipe`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .. import recipes
from .._kept_codes import KeptCodes
from .._quantized import Weight
from ..fp8_weights import Fp8Weight, fp8_weight
from ..options import FP8_RECIPES, Options, Recipe, SaveH
from . import quantized_experts

_RECIPE, _FROZEN = "_tilemoe_recipe", "_tilemoe_fp8_weights"
_SAVE_H = "_tilemoe_save_h"


def set_recipe(model: nn.Module, recipe: Recipe, *, save_h: SaveH | None = None) -> None:
    """Compute the experts of a model with an FP8 recipe, for `experts_implementation="tilemoe"`.

    The codes of parameters are made in the first call after a parameter has changed, as in
    `tilemoe.MoE`. Of experts that an FP8 checkpoint left quantised, the transposed codes, which
    training with "fp8" reads, are made now.

    Args:
        model: A model of transformers, or an experts module.
        recipe: "bf16", "fp8", "fp8_forward" or "auto", as in `tilemoe.moe`.
        save_h: Format of the saved H, None or "fp8", as in `tilemoe.moe`.

    Raises:
        ValueError: The recipe or save_h is unknown, the recipe does not support save_h, the model
            has no experts, or a quantised weight has another format than FP8.
        NotImplementedError: The experts' weights are stored transposed.
    """
    Options(recipe=recipe, save_h=save_h)  # raises the errors of `tilemoe.moe`
    found = [m for m in model.modules() if hasattr(m, "is_concatenated") and hasattr(m, "has_gate")]
    if not found:
        raise ValueError(f"{type(model).__qualname__} has no experts module")
    for experts in found:
        for name in (_RECIPE, _SAVE_H, _FROZEN, "fp8_codes"):
            experts.__dict__.pop(name, None)
        if recipe == "bf16":
            continue
        if experts.is_transposed:
            raise NotImplementedError(
                f"recipe={recipe!r} does not support {type(experts).__qualname__}, whose weights are "
                "stored transposed"
            )
        frozen = {}
        for name in quantized_experts.weights_of(experts):
            weight = quantized_experts.get(experts, name)
            if weight is not None:
                frozen[name] = fp8_weight(weight, transposed=recipe in ("fp8", "auto"))
        own = tuple(n for n in quantized_experts.weights_of(experts) if n not in frozen)
        setattr(experts, _RECIPE, recipe)
        setattr(experts, _SAVE_H, save_h)
        setattr(experts, _FROZEN, frozen)
        experts.fp8_codes = KeptCodes(own)


def of_call(experts: nn.Module, x: Tensor, ids: Tensor, form: Any) -> Recipe:
    """Return the recipe of a call with x (T, d) and ids (T, K)."""
    recipe: Recipe = experts.__dict__.get(_RECIPE, "bf16")
    if recipe != "auto":
        return recipe
    W2 = experts.down_proj
    layer = SimpleNamespace(activation=form.activation, gate_layout=form.gate_layout)
    T, pairs = x.shape[0], ids.numel()
    choice = recipes.choice_of(x, T, pairs, tuple(W2.shape), layer, W2.dtype)
    experts.recipe_choice = choice  # type: ignore[assignment]
    return choice.recipe


def options_of(experts: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Return the options of a call that computes with a recipe, and `save_h` only with "fp8"."""
    if recipe == "bf16":
        return {}
    save_h = experts.__dict__[_SAVE_H] if recipe == "fp8" else None
    return {"recipe": recipe, "save_h": save_h}


def weight_of(experts: nn.Module, name: str, recipe: Recipe) -> Weight:
    """Return the codes of a weight (E, out, in) for an FP8 recipe."""
    frozen: Fp8Weight | None = experts.__dict__[_FROZEN].get(name)
    if frozen is not None:
        return frozen
    assert recipe in FP8_RECIPES
    codes: KeptCodes = experts.fp8_codes  # type: ignore[assignment]
    transposed = recipe == "fp8" and torch.is_grad_enabled()
    return codes.of(experts, name, transposed)._replace(master=getattr(experts, name))
