"""Compute experts of transformers with TileMoE.

`tilemoe.transformers` is the public module.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import _private, functional
from .._quantized import KINDS, Weight
from ..options import Recipe
from ..routing import narrowed_to_experts
from . import quantized_experts, transformers_norm, transformers_recipe
from .expert_adapters import lora_of
from .transformers_forms import Form, form_of, refuse_quantized, refuse_weights

QUANTIZED = "quantised experts in transformers"
EXPERT_PARALLEL = "TileMoE's expert parallelism in transformers"


def register(name: str = "tilemoe") -> None:
    """Add TileMoE to transformers' experts implementations.

    From transformers 5.23 on it is also added to the implementations of expert parallelism.
    Afterwards `experts_implementation=name` in `from_pretrained` or `from_config`, or
    `model.set_experts_implementation(name)`, selects it, and `ep_implementation=name` in a
    `DistributedConfig` selects its expert parallelism.

    With `experts_implementation=name`, `from_pretrained` leaves the experts of a checkpoint in
    MXFP4 or FP8 quantised, unless its quantization_config has dequantize=True. It also accepts a
    `QuantizedExpertsConfig` for a checkpoint in 16 bits. Nothing else is changed.

    If the installed transformers lacks a name that quantised experts require, a warning contains
    it; a name that expert parallelism requires is in the error of `ep_implementation=name`.

    Args:
        name: Name of the implementation.

    Raises:
        ImportError: transformers is not installed, or older than 5.17.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
    except ImportError as error:
        raise ImportError(
            "tilemoe.transformers requires transformers >= 5.17, which is not installed; run "
            "pip install 'transformers>=5.17'"
        ) from error
    if "is_concatenated" not in inspect.signature(use_experts_implementation).parameters:
        import transformers

        raise ImportError(
            "tilemoe.transformers requires transformers >= 5.17, got transformers "
            + transformers.__version__
        )
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    _register_quantized(name)
    _register_expert_parallel(name)


def _register_quantized(name: str) -> None:
    absent = _private.missing(QUANTIZED)
    if absent:
        warnings.warn(_private.refusal(QUANTIZED, absent), stacklevel=3)
        return
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    from . import kept_quantized

    ALL_FP8_EXPERTS_FUNCTIONS.register(name, experts_forward)  # FP8Experts
    kept_quantized.register()


def _register_expert_parallel(name: str) -> None:
    try:
        from transformers.distributed import expert_parallel
    except ImportError:  # before transformers 5.23
        return
    absent, implementation = _private.missing(EXPERT_PARALLEL), _refused_expert_parallel
    interface = getattr(expert_parallel, "EPImplementationInterface", None)
    if interface is None:
        warnings.warn(_private.refusal(EXPERT_PARALLEL, absent), stacklevel=3)
        return
    if not absent:
        from .transformers_expert_parallel import TileMoEEP

        implementation = TileMoEEP
    interface.register(name, implementation)


def _refused_expert_parallel(*_: Any) -> None:
    """Raise the error of TileMoEEP if transformers does not have what TileMoEEP requires."""
    _private.require(EXPERT_PARALLEL)


def is_tilemoe(implementation: str | None) -> bool:
    """Return whether TileMoE is registered under this name of an experts implementation.

    Args:
        implementation: Name of an implementation, or None.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS.get(implementation, None) is experts_forward


def prepare(model: torch.nn.Module) -> dict[str, Form]:
    """Find the form of every experts module of `model`, before the first forward.

    Forward does the same at its first call. Call prepare() to get an error early, or to compile the
    model with `fullgraph=True` before it has run: a form is found outside a graph and is a constant
    in the graph. Call it under the torch.autocast of the model's later calls, which determines the
    dtype.

    Args:
        model: A model of transformers, or an experts module.

    Returns:
        The form of each experts module, by the module's name. If it is empty, a warning explains
        why TileMoE computes nothing in the model.

    Raises:
        NotImplementedError: An experts module computes something that TileMoE does not support, or
            a weight has a dtype, width or device that no kernel supports. The message names the
            class and the cause.
    """
    forms = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "has_gate"):
            refuse_quantized(module)
            forms[name] = form_of(module)
            refuse_weights(module)
    if not forms:
        warnings.warn(_why_none(model), stacklevel=2)
    return forms


def _why_none(model: torch.nn.Module) -> str:
    why = f"TileMoE computes nothing in this {type(model).__qualname__}: "
    for name, module in model.named_modules():
        cls, last = type(module).__qualname__, name.rpartition(".")[2]
        if "Experts" not in cls and last != "experts":
            continue
        return (
            f"{why}{name or 'it'} is a {cls}, which is not decorated with "
            "transformers.integrations.use_experts_implementation"
        )
    return why + "it has no experts module"


# ---------------------------------------------------------------- forward


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    same_batch: Any = None,
) -> torch.Tensor:
    """Compute hidden_states (T, d), top_k_index (T, K), top_k_weights (T, K) -> (T, d).

    An id outside [0, E), which expert parallelism passes for experts of other ranks, adds nothing
    to the output and has no gradient.

    Args:
        self: Experts module.
        hidden_states: Tokens, shape (T, d).
        top_k_index: Experts of each token, shape (T, K).
        top_k_weights: Scores, shape (T, K).
        same_batch: Group of the ranks that have these tokens, if known.
    """
    here = narrowed_to_experts(top_k_index, top_k_weights, self.down_proj.shape[0])
    return computed(functional.moe, self, hidden_states, *here, same_batch)


def computed(
    moe: Callable,
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    same_batch: Any = None,
    **options,
) -> torch.Tensor:
    """Call `moe` with the tokens, the module's weights and the options.

    Args:
        moe: tilemoe.moe or tilemoe.expert_parallel.moe.
        experts: Experts module.
        hidden_states: Tokens, shape (T, d).
        top_k_index: Experts of each token, shape (T, K).
        top_k_weights: Scores, shape (T, K).
        same_batch: Group of the ranks that have these tokens, if known.
        **options: Options of `moe`.
    """
    refuse_quantized(experts)
    form = form_of(experts)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    recipe = transformers_recipe.of_call(experts, hidden_states, top_k_index, form)
    W1, W2 = (_weight(experts, name, recipe) for name in (first, "down_proj"))
    options |= transformers_recipe.options_of(experts, recipe)
    b1, b2 = None, None
    if experts.has_bias:
        b1, b2 = getattr(experts, first + "_bias"), experts.down_proj_bias
    if b1 is not None:  # float32 next to 16-bit weights, as PEFT prepares a quantised model
        b1, b2 = b1.to(W1.dtype), b2.to(W1.dtype)
    lora = lora_of(experts, first, W1, W2, same_batch)
    if lora is not None:
        options["lora"] = lora
    if transformers_norm.norm_of(experts) is not None:
        _refuse_with_norm(experts, moe, lora, W1, W2)
        x, scores = hidden_states.to(W1.dtype), top_k_weights.float()
        out = transformers_norm.computed(experts, x, top_k_index, scores, [W1, W2, b1, b2])
        return out.to(hidden_states.dtype)
    # A norm in float32 may precede experts in 16 bits; the computation has the weights' dtype, and
    # the result has the caller's.
    out = moe(
        hidden_states.to(W1.dtype),
        top_k_weights.float(),
        W1,
        W2,
        ids=top_k_index,
        b1=b1,
        b2=b2,
        **form._asdict(),
        **options,
    )
    return out.to(hidden_states.dtype)


def _refuse_with_norm(experts: torch.nn.Module, moe: Callable, lora: Any, *weights: Weight) -> None:
    """Reject arguments that are not supported together with a norm of each expert's output."""
    found = {
        "expert parallelism": moe is not functional.moe,
        "adapters": lora is not None,
        "quantised weights": any(type(W) in KINDS for W in weights),
    }
    for what, there in found.items():
        if there:
            raise NotImplementedError(
                f"TileMoE does not support {what} for {type(experts).__qualname__}: its "
                f"{transformers_norm.NORM} needs the rows of the second GEMM, and only "
                "tilemoe.gathered_mm computes them"
            )


def _weight(experts: torch.nn.Module, name: str, recipe: Recipe) -> Weight:
    """Return a weight as (E, out, in)."""
    if recipe != "bf16":
        return transformers_recipe.weight_of(experts, name, recipe)
    quantized = quantized_experts.get(experts, name)
    if quantized is not None:
        return quantized
    W = getattr(experts, name)
    return W.mT if experts.is_transposed else W  # a view (E, out, in)
