"""Quantise experts while a model of transformers in 16 bits is loaded, and load its saved files.

The classes derive from transformers' and include the quantizer of `QuantizedExpertsConfig`.
kept_quantized.py has the classes for checkpoints in MXFP4 and FP8.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._formats import FORMATS, Format, shapes_of
from ..quantization import QuantizedExperts
from . import quantized_experts
from .quantized_experts import is_stored_transposed, weights_of
from .transformers import is_tilemoe
from .transformers_loop import dispatching_forward

METHOD = "tilemoe"
_SUFFIXES = (  # suffixes of names in checkpoints of all formats
    "_blocks", "_scales", "_scale_inv", "_scale_2", "_scale", r"\.nested_absmax",
    r"\.nested_quant_map", r"\.absmax", r"\.quant_map", r"\.quant_state\.bitsandbytes__nf4", "",
)  # fmt: skip


class QuantizedExpertsConfig(QuantizationConfigMixin):
    """Quantise the weights of experts while a model in 16 bits is loaded, one weight at a time.

    All other weights stay in 16 bits. A saved model has the quantised weights, and is loaded with
    them.

    Args:
        format: "fp8", "mxfp4", "nf4", "nf4_double" or "nvfp4".
        modules_to_not_convert: Names of experts modules, or ends or beginnings of names, whose
            weights stay in 16 bits.
        quant_method: Name of this method in a configuration file.

    Raises:
        ValueError: The format has another value.
    """

    def __init__(
        self,
        format: Format = "nf4",
        modules_to_not_convert: list[str] | None = None,
        *,
        quant_method: str = METHOD,  # as in a configuration file
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        self.quant_method = quant_method  # type: ignore[assignment]
        self.format = format
        self.modules_to_not_convert = modules_to_not_convert


# ---------------------------------------------------------------- a model in 16 bits, and its files


class TileMoEQuantizer(HfQuantizer):
    """Quantizer of QuantizedExpertsConfig."""

    quantization_config: QuantizedExpertsConfig

    def validate_environment(self, *args: Any, **named: Any) -> None:
        """Do nothing: the quantizer has no requirements."""

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        config = self.quantization_config
        why = why_not_here(model.config)
        experts = experts_of(model, config.modules_to_not_convert)
        if why or not experts:
            why = why or "it has no experts with transformers' interface"
            raise NotImplementedError(
                f"the experts of this {type(model).__qualname__} cannot be quantised: {why}"
            )
        if self.pre_quantized:
            for module in experts.values():
                _declare_codes(module, config.format)

    def param_needs_quantization(self, model: Any, param_name: str, **named: Any) -> bool:
        module, weight = get_module_from_name(model, param_name)
        name = param_name.rpartition(".")[0]
        return (
            _is_experts(module)
            and weight in weights_of(module)
            and should_convert_module(name, self.quantization_config.modules_to_not_convert)
        )

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        if not self.pre_quantized and self.param_needs_quantization(model, param_name):
            return _bytes_of_a_value(self.quantization_config.format)
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.format)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        return [
            WeightConverter(
                source_patterns=[_pattern(weight, suffix) for suffix in _SUFFIXES],
                target_patterns=weight,
                operations=[_Deserialize(self, weight)],
            )
            for weight in ("gate_up_proj", "up_proj", "down_proj")
        ]

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        if known := getattr(model, "_weight_conversions", None):
            # Saved names are those of whole weights, even if a 16-bit file had other names.
            model._weight_conversions = [c for c in known if not _makes_experts(c)]
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return dequantized(model, dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Operation that quantises a weight after it was read, into the module."""

    def __init__(self, format: Format) -> None:
        self.format = format

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, missing_keys: Any = None, **_: Any
    ) -> dict[str, Any]:
        for name in list(input_dict):
            W = input_dict.pop(name)
            experts, weight = get_module_from_name(model, name)
            W = W[0] if isinstance(W, list) else W
            quantized_experts.quantize(experts, weight, W, self.format)
            missing_keys.discard(name)
        return {}


class _Deserialize(ConversionOps):
    """Operation that puts the arrays of a quantised weight into the module."""

    def __init__(self, quantizer: TileMoEQuantizer, weight: str) -> None:
        self.hf_quantizer, self.weight = quantizer, weight  # 5.24 leaves dtypes to these operations

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        missing_keys: Any = None,
        full_layer_name: str = "",
        **_: Any,
    ) -> dict[str, Any]:
        names = {_pattern(self.weight, s): self.weight + s.replace("\\", "") for s in _SUFFIXES}
        tensors = {
            names[pattern]: found[0] if isinstance(found, list) else found
            for pattern, found in input_dict.items()
        }
        if tensors.keys() == {self.weight}:  # in 16 bits
            return {full_layer_name: tensors[self.weight].to(model.dtype)}
        experts, _ = get_module_from_name(model, full_layer_name)
        transposed = is_stored_transposed(experts, self.hf_quantizer.quantization_config.format)
        made = QuantizedExperts.from_state_dict(tensors, self.weight, transposed=transposed)
        quantized_experts.put(experts, self.weight, made._replace(dtype=model.dtype))
        missing_keys.discard(full_layer_name)
        return {}


def _bytes_of_a_value(format: Format) -> float:
    """Return the bytes per value, including its share of the scales."""
    R = C = 4096
    arrays = shapes_of(format, 1, R, C).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays) / (R * C)


def _pattern(weight: str, suffix: str) -> str:
    return rf"(?<=\.){weight}{suffix}$"


def _declare_codes(experts: nn.Module, format: Format) -> None:
    """Give the parameters the dtype of codes, which the loader must not cast."""
    dtype = shapes_of(format, 1, 1, 1)["codes"][1]
    for weight in weights_of(experts):
        W = experts._parameters[weight]
        assert W is not None
        codes = torch.empty(W.shape, dtype=dtype, device=W.device)
        experts._parameters[weight] = nn.Parameter(codes, requires_grad=False)


def quantize(model: nn.Module, format: Format = "nf4") -> None:
    """Quantise the weights of a model's experts in place, one after another.

    Args:
        model: Model of transformers in 16 or 32 bits whose experts implementation is TileMoE. If it
            is on meta, only shapes are made.
        format: "fp8", "mxfp4", "nf4", "nf4_double" or "nvfp4".

    Raises:
        NotImplementedError: The model has no experts that TileMoE computes.
        ValueError: The format does not support the sizes of a weight.
    """
    quantizer = TileMoEQuantizer(QuantizedExpertsConfig(format), pre_quantized=False)
    quantizer.preprocess_model(model)
    for module in experts_of(model, None).values():
        for weight in weights_of(module):
            W = module._parameters[weight]
            assert W is not None
            quantized_experts.quantize(module, weight, W.detach(), format)
            del W  # before the next weight
    model.hf_quantizer = quantizer  # type: ignore[assignment]
    quantizer.postprocess_model(model)


# ---------------------------------------------------------------- a model's experts


def _is_experts(module: nn.Module) -> bool:
    """Return whether the module has transformers' experts interface and its own weights."""
    return hasattr(module, "has_gate") and dispatching_forward(type(module)) is not None


def experts_of(model: nn.Module, skipped: list[str] | None) -> dict[str, nn.Module]:
    """Return the experts modules by name, without those whose names `skipped` excludes."""
    return {
        name: module
        for name, module in model.named_modules()
        if _is_experts(module) and should_convert_module(name, skipped)
    }


def is_selected(config: Any) -> bool:
    """Return whether TileMoE is the model's experts implementation."""
    return is_tilemoe(config.get_text_config()._experts_implementation)


def why_not_here(config: Any) -> str:
    """Return why this model cannot have quantised experts; nothing if it can."""
    if not is_selected(config):
        name = config.get_text_config()._experts_implementation
        return f"its experts_implementation must be 'tilemoe', got {name!r}"
    if getattr(config, "distributed_config", None) is not None:
        return "its experts are sharded over ranks"
    return ""


def _makes_experts(converter: Any) -> bool:
    """Return whether the result of the conversion is a weight of experts."""
    ends = tuple(f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj"))
    targets = [target.rstrip("$") for target in converter._original_target_patterns]
    of_ours = any(isinstance(op, _Deserialize) for op in getattr(converter, "operations", []))
    return of_ours or any(target.endswith(ends) for target in targets)


def dequantized(model: Any, dtype: torch.dtype | None) -> Any:
    """Return the model with parameters for all weights of experts."""
    for module in model.modules():
        quantized_experts.dequantize(module, dtype)
    return model
