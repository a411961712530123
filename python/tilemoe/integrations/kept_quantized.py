"""Keep experts of transformers checkpoints in MXFP4 and FP8 quantised.

`register()` adds the quantizer of quantized_loading.py, and replaces transformers' quantizers of
these checkpoints by subclasses, which change nothing unless the model's experts implementation is
TileMoE.
"""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils import logging

from .._formats import Format, shapes_of
from ..quantization import QuantizedExperts
from . import quantized_experts
from .quantized_experts import is_stored_transposed, weights_of
from .quantized_loading import (
    METHOD, QuantizedExpertsConfig, TileMoEQuantizer, dequantized, experts_of, is_selected,
    why_not_here,
)  # fmt: skip

logger = logging.get_logger(__name__)


class _Keeping(HfQuantizer):
    """Quantizer of transformers that leaves experts quantised if TileMoE computes them.

    The model decides, which exists only after transformers has made it on meta. transformers' own
    checks of the environment wait until then, because they may enable dequantisation.
    """

    quantization_config: Any
    keeps_experts = False
    _format: Format
    _dtype = torch.bfloat16  # dtype in which experts compute
    _environment: tuple[tuple, dict] = ((), {})

    def __deepcopy__(self, memo: dict) -> Any:
        return self  # transformers copies converters, which refer to their quantizer

    def validate_environment(self, *args: Any, **named: Any) -> None:
        self._environment = args, named

    def preprocess_model(self, model: Any, *args: Any, **named: Any) -> None:
        config = self.quantization_config
        if self.pre_quantized and is_selected(model.config) and not config.dequantize:
            experts = experts_of(model, config.modules_to_not_convert)
            why = why_not_here(model.config) or self._why_not(model, experts)
            self.keeps_experts = not why and bool(experts)
            if why:
                method = getattr(config.quant_method, "value", config.quant_method)
                logger.warning_once(f"experts are not kept in {method}: {why}")
        if not self.keeps_experts:
            environment, options = self._environment
            super().validate_environment(*environment, **options)
        super().preprocess_model(model, *args, **named)

    def _why_not(self, model: Any, experts: dict[str, nn.Module]) -> str:
        """Return why these experts cannot stay quantised; nothing if they can."""
        return ""

    def postprocess_model(self, model: Any, **named: Any) -> Any:
        if self.keeps_experts:
            self.quantization_config.dequantize = False
        return super().postprocess_model(model, **named)

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        if not self.keeps_experts:
            return super()._process_model_after_weight_loading(model, **named)
        skipped = self.quantization_config.modules_to_not_convert
        for module in experts_of(model, skipped).values():
            tensors = {**module._parameters, **module._buffers}
            for weight in weights_of(module):
                _put_loaded(module, weight, tensors, self._format, self._dtype)
        self._finish(model)
        return model

    def _finish(self, model: Any) -> None:
        """Complete the model after loading."""

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return dequantized(model, dtype)

    @property
    def is_trainable(self) -> bool:
        return self.keeps_experts or super().is_trainable


class Mxfp4Quantizer(_Keeping, Mxfp4HfQuantizer):
    """Quantizer of gpt-oss's checkpoints."""

    _format: Format = "mxfp4"

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        if not self.keeps_experts:
            super()._process_model_before_weight_loading(model, **named)
            return
        for module in experts_of(model, self.quantization_config.modules_to_not_convert).values():
            for weight in weights_of(module):
                W = module._parameters[weight]
                assert W is not None
                module._parameters[weight] = None  # keep its place
                self._dtype = W.dtype
                E, out, width = (W.mT if module.is_transposed else W).shape
                shapes = shapes_of("mxfp4", E, out, width)
                for name, field in (("blocks", "codes"), ("scales", "scales")):
                    shape, dtype = shapes[field]
                    array = torch.empty(shape, dtype=dtype, device="meta")
                    module.register_buffer(f"{weight}_{name}", array)
            module._is_hf_initialized = True  # type: ignore[assignment]

    def get_weight_conversions(self) -> list[WeightConverter]:
        return [] if self.keeps_experts else super().get_weight_conversions()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict]:
        return (None, {}) if self.keeps_experts else super().get_state_dict_and_metadata(model)


class FP8Quantizer(_Keeping, FineGrainedFP8HfQuantizer):
    """Quantizer of FP8 checkpoints with scales of 128 x 128 blocks.

    Such checkpoints are those of DeepSeek-V3 and Qwen3-FP8.

    Linear layers are dequantised while they are loaded, because transformers' FP8 layers cannot be
    trained.
    """

    _format: Format = "fp8"
    _given: list[tuple[list[str], Any]]  # the model's own converters, by their targets

    def _why_not(self, model: Any, experts: dict[str, nn.Module]) -> str:
        config = self.quantization_config
        if (method := str(getattr(config.quant_method, "value", config.quant_method))) != "fp8":
            return f"quant_method must be fp8, got {method}"
        if list(config.weight_block_size or ()) != [128, 128]:
            return f"weight_block_size must be 128 x 128, got {config.weight_block_size}"
        if config.activation_scheme != "dynamic":
            return f"activation_scheme must be dynamic, got {config.activation_scheme}"
        for of_experts in (config, model.config.get_text_config()):
            if getattr(of_experts, "expert_dtype", None) not in (None, "fp8"):
                return f"expert_dtype must be fp8, got {of_experts.expert_dtype}"
        for name, module in experts.items():
            width = module.down_proj.shape[1 if module.is_transposed else 2]
            if module.has_gate and width % 128:
                return f"the number of gate rows of {name} must be a multiple of 128, got {width}"
        return ""

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        if self.keeps_experts:
            self.quantization_config.dequantize = True  # of linear layers
        super()._process_model_before_weight_loading(model, **named)
        if not self.keeps_experts:
            return
        for module in experts_of(model, self.quantization_config.modules_to_not_convert).values():
            for weight in weights_of(module):
                W = module._parameters[weight]
                assert W is not None
                self._dtype = W.dtype
                shapes = shapes_of("fp8", *W.shape)
                for ending, field in (("", "codes"), ("_scale_inv", "scales")):
                    shape, dtype = shapes[field]
                    array = torch.empty(shape, dtype=dtype, device="meta")
                    parameter = nn.Parameter(array, requires_grad=False)
                    module.register_parameter(weight + ending, parameter)

    def update_weight_conversions(self, weight_conversions: list, *model: Any) -> list:
        """Make weights and scales of experts; the converters of linear layers dequantise."""
        if not self.keeps_experts:
            return super().update_weight_conversions(weight_conversions, *model)
        self._given = [(c._original_target_patterns, c) for c in weight_conversions]
        if model:  # after 5.17 the parameters decide, and experts have those of scales
            return super().update_weight_conversions(weight_conversions, *model)
        merges = [c for c in weight_conversions if _merges(c)]
        others = [c for c in weight_conversions if not _merges(c)]
        return merges + super().update_weight_conversions(others)

    def _finish(self, model: Any) -> None:
        """Put linear layers of a saved model in 16 bits into its configuration."""
        kept = []
        for converter in getattr(model, "_weight_conversions", None) or []:
            operations = getattr(converter, "operations", [])
            if not any(type(op).__name__ == "Fp8Dequantize" for op in operations):
                kept.append(converter)
            elif len(operations) > 1:
                targets = converter._original_target_patterns
                kept += [given for known, given in self._given if known == targets]
        model._weight_conversions = kept
        linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        skipped = self.quantization_config.modules_to_not_convert or []
        self.quantization_config.modules_to_not_convert = [*dict.fromkeys([*skipped, *linear])]


def _put_loaded(
    module: nn.Module, weight: str, tensors: dict, format: Format, dtype: torch.dtype
) -> None:
    """Make the module's quantised weight from the attributes that the loader has filled."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(t.device.type == "meta" for name, t in present.items() if name.startswith(weight)):
        raise NotImplementedError(
            f"{weight} of {type(module).__qualname__} is quantised and cannot be offloaded "
            "to the CPU or a disk"
        )
    transposed = is_stored_transposed(module, format)
    made = QuantizedExperts.from_state_dict(present, weight, transposed=transposed, dtype=dtype)
    quantized_experts.put(module, weight, made)


def _merges(converter: Any) -> bool:
    """Return whether the converter makes one tensor from those of all experts."""
    return any(isinstance(op, MergeModulelist) for op in getattr(converter, "operations", []))


def register() -> None:
    """Make from_pretrained use the quantizers."""
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantization_config(METHOD)(QuantizedExpertsConfig)
    auto.register_quantizer(METHOD)(TileMoEQuantizer)
    for method, theirs, ours in (
        ("mxfp4", Mxfp4HfQuantizer, Mxfp4Quantizer),
        ("fp8", FineGrainedFP8HfQuantizer, FP8Quantizer),
    ):
        if auto.AUTO_QUANTIZER_MAPPING.get(method) is theirs:
            auto.AUTO_QUANTIZER_MAPPING[method] = ours
