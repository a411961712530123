"""transformers' quantizers for experts that stay quantised; see transformers.py.

`register()` adds one quantizer, of `QuantizedExpertsConfig`, and replaces those of MXFP4 and FP8
checkpoints by subclasses, which change nothing unless the model's experts implementation is
TileMoE. The classes derive from transformers' and are made when it is imported."""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._formats import FORMATS, Format, shapes_of
from ..quantization import QuantizedExperts
from . import quantized_experts
from .quantized_experts import is_stored_transposed, weights_of
from .transformers import is_tilemoe
from .transformers_loop import dispatching_forward

METHOD = "tilemoe"
_BITS = {"fp8": 8.002, "mxfp4": 4.25, "nf4": 4.5, "nf4_double": 4.127, "nvfp4": 4.5}
_SUFFIXES = (  # of the names in checkpoints of all formats
    "_blocks", "_scales", "_scale_inv", "_scale_2", "_scale", r"\.nested_absmax",
    r"\.nested_quant_map", r"\.absmax", r"\.quant_map", r"\.quant_state\.bitsandbytes__nf4", "",
)  # fmt: skip
logger = logging.get_logger(__name__)


class QuantizedExpertsConfig(QuantizationConfigMixin):
    """Quantise the weights of experts while a model in 16 bits is loaded, one weight at a time.

    Every other weight stays in 16 bits. A model that is saved has the quantised weights, and is
    loaded with them.

    Args:
        format: "fp8", "mxfp4", "nf4", "nf4_double" or "nvfp4".
        modules_to_not_convert: names of experts modules, or ends or beginnings of them, whose
            weights stay in 16 bits.

    Raises:
        ValueError: another format.
    """

    def __init__(
        self,
        format: Format = "nf4",
        modules_to_not_convert: list[str] | None = None,
        **_: Any,  # quant_method, of a file
    ) -> None:
        if format not in FORMATS:
            raise ValueError(
                f"tilemoe: format is {format!r}, expected one of {', '.join(FORMATS)}"
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format = format
        self.modules_to_not_convert = modules_to_not_convert


# ---------------------------------------------------------------- a model in 16 bits, and its files


class TileMoEQuantizer(HfQuantizer):
    """The quantizer of QuantizedExpertsConfig."""

    quantization_config: QuantizedExpertsConfig

    def validate_environment(self, *args: Any, **named: Any) -> None:
        """Nothing is needed."""

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        config = self.quantization_config
        why = _why_not_here(model.config)
        experts = _experts(model, config.modules_to_not_convert)
        if why or not experts:
            why = why or "it has no experts with transformers' interface"
            raise NotImplementedError(
                f"tilemoe: the experts of this {type(model).__qualname__} cannot be quantised: {why}"
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
            return _BITS[self.quantization_config.format] / 8
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
            # Saved names are those of whole weights, also if a file in 16 bits had other ones.
            model._weight_conversions = [c for c in known if not _makes_experts(c)]
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return _dequantized(model, dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Quantises a weight that has been read, into the module."""

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
    """Puts the arrays of a quantised weight into the module."""

    def __init__(self, quantizer: TileMoEQuantizer, weight: str) -> None:
        self.hf_quantizer, self.weight = quantizer, weight  # 5.24 leaves dtypes to such operations

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
    """Quantise the weights of a model's experts in place, one after the other.

    Args:
        model: a model of transformers in 16 or 32 bits whose experts implementation is TileMoE. If
            it is on meta, only shapes are made.
        format: "fp8", "mxfp4", "nf4", "nf4_double" or "nvfp4".

    Raises:
        NotImplementedError: the model has no experts that TileMoE computes.
        ValueError: the format does not fit a weight.
    """
    quantizer = TileMoEQuantizer(QuantizedExpertsConfig(format), pre_quantized=False)
    quantizer.preprocess_model(model)
    for module in _experts(model, None).values():
        for weight in weights_of(module):
            W = module._parameters.pop(weight)
            assert W is not None
            quantized_experts.quantize(module, weight, W.detach(), format)
            del W
    model.hf_quantizer = quantizer  # type: ignore[assignment]
    quantizer.postprocess_model(model)


# ---------------------------------------------------------------- checkpoints in MXFP4 and FP8


class _Keeping:
    """A quantizer of transformers that leaves experts quantised, if TileMoE computes them.

    The model decides, which is known only when transformers has made it on meta. Until then
    transformers' own checks of the environment wait, since they may ask for dequantisation."""

    keeps_experts = False
    _format: Format
    _dtype = torch.bfloat16  # of the weights that experts compute with
    _environment: tuple[tuple, dict] = ((), {})

    def __deepcopy__(self, memo: dict) -> Any:
        return self  # transformers copies converters, which refer to their quantizer

    def validate_environment(self, *args: Any, **named: Any) -> None:
        self._environment = args, named

    def preprocess_model(self, model: Any, *args: Any, **named: Any) -> None:
        config = self.quantization_config  # type: ignore[attr-defined]
        asked = config.dequantize
        if not asked and self.pre_quantized and _is_selected(model.config):  # type: ignore[attr-defined]
            experts = _experts(model, config.modules_to_not_convert)
            why = _why_not_here(model.config) or self._why_not(model, experts)
            self.keeps_experts = not why and bool(experts)
            if why:
                logger.warning_once(f"tilemoe: experts are not kept in {config.quant_method}: {why}")
        if not self.keeps_experts:
            environment, options = self._environment
            super().validate_environment(*environment, **options)  # type: ignore[misc]
        super().preprocess_model(model, *args, **named)  # type: ignore[misc]

    def _why_not(self, model: Any, experts: dict[str, nn.Module]) -> str:
        return ""

    def postprocess_model(self, model: Any, **named: Any) -> Any:
        if self.keeps_experts:
            self.quantization_config.dequantize = False  # type: ignore[attr-defined]
        return super().postprocess_model(model, **named)  # type: ignore[misc]

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        if not self.keeps_experts:
            return super()._process_model_after_weight_loading(model, **named)  # type: ignore[misc]
        skipped = self.quantization_config.modules_to_not_convert  # type: ignore[attr-defined]
        for module in _experts(model, skipped).values():
            tensors = {**module._parameters, **module._buffers}
            for weight in weights_of(module):
                _put_loaded(module, weight, tensors, self._format, self._dtype)
        self._finish(model)
        return model

    def _finish(self, model: Any) -> None:
        """What else must be done after loading."""

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return _dequantized(model, dtype)

    @property
    def is_trainable(self) -> bool:
        return self.keeps_experts or super().is_trainable  # type: ignore[misc]


class Mxfp4Quantizer(_Keeping, Mxfp4HfQuantizer):
    """gpt-oss's checkpoints."""

    _format: Format = "mxfp4"

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        if not self.keeps_experts:
            super()._process_model_before_weight_loading(model, **named)
            return
        for module in _experts(model, self.quantization_config.modules_to_not_convert).values():
            for weight in weights_of(module):
                W = module._parameters.pop(weight)
                assert W is not None
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
    """Checkpoints of DeepSeek-V3, Qwen3-FP8 and others with scales of 128 x 128 blocks. Linear
    layers are dequantised while they are loaded, since transformers' cannot be trained."""

    _format: Format = "fp8"
    _given: list[tuple[list[str], Any]]  # the model's own converters, by their targets

    def _why_not(self, model: Any, experts: dict[str, nn.Module]) -> str:
        config = self.quantization_config
        if (method := str(getattr(config.quant_method, "value", config.quant_method))) != "fp8":
            return f"quant_method is {method}, expected fp8"
        if list(config.weight_block_size or ()) != [128, 128]:
            return f"weight_block_size is {config.weight_block_size}, expected 128 x 128"
        if config.activation_scheme != "dynamic":
            return f"activation_scheme is {config.activation_scheme}, expected dynamic"
        for of_experts in (config, model.config.get_text_config()):
            if getattr(of_experts, "expert_dtype", None) not in (None, "fp8"):
                return f"expert_dtype is {of_experts.expert_dtype}, expected fp8"
        for name, module in experts.items():
            width = module.down_proj.shape[1 if module.is_transposed else 2]
            if module.has_gate and width % 128:
                return f"{name} has {width} gate rows, expected a multiple of 128"
        return ""

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        if self.keeps_experts:
            self.quantization_config.dequantize = True  # linear layers
        super()._process_model_before_weight_loading(model, **named)
        if not self.keeps_experts:
            return
        for module in _experts(model, self.quantization_config.modules_to_not_convert).values():
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
        """Experts' converters make weights and scales; those of linear layers dequantise."""
        if not self.keeps_experts:
            return super().update_weight_conversions(weight_conversions, *model)
        self._given = [(c._original_target_patterns, c) for c in weight_conversions]
        if model:  # from 5.18 on the parameters decide: experts have those of scales
            return super().update_weight_conversions(weight_conversions, *model)
        merges = [c for c in weight_conversions if _merges(c)]
        others = [c for c in weight_conversions if not _merges(c)]
        return merges + super().update_weight_conversions(others)

    def _finish(self, model: Any) -> None:
        """A saved model has linear layers in 16 bits, and its configuration names them."""
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


# ---------------------------------------------------------------- a model's experts


def _is_experts(module: nn.Module) -> bool:
    """Whether the module has transformers' experts interface, with weights of its own."""
    return hasattr(module, "has_gate") and dispatching_forward(type(module)) is not None


def _experts(model: nn.Module, skipped: list[str] | None) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if _is_experts(module) and should_convert_module(name, skipped)
    }


def _is_selected(config: Any) -> bool:
    """Whether TileMoE is the model's experts implementation."""
    return is_tilemoe(config.get_text_config()._experts_implementation)


def _why_not_here(config: Any) -> str:
    """Why this model cannot have quantised experts; nothing if it can."""
    if not _is_selected(config):
        name = config.get_text_config()._experts_implementation
        return f"its experts_implementation is {name!r}, expected 'tilemoe'"
    if getattr(config, "distributed_config", None) is not None:
        return "its experts are spread over ranks"
    return ""


def _put_loaded(
    module: nn.Module, weight: str, tensors: dict, format: Format, dtype: torch.dtype
) -> None:
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(t.device.type == "meta" for name, t in present.items() if name.startswith(weight)):
        raise NotImplementedError(
            f"tilemoe: {weight} of {type(module).__qualname__} is quantised and cannot be offloaded "
            "to the CPU or a disk"
        )
    transposed = is_stored_transposed(module, format)
    made = QuantizedExperts.from_state_dict(present, weight, transposed=transposed, dtype=dtype)
    quantized_experts.put(module, weight, made)


def _merges(converter: Any) -> bool:
    return any(isinstance(op, MergeModulelist) for op in getattr(converter, "operations", []))


def _makes_experts(converter: Any) -> bool:
    """Whether the result of the conversion is a weight of experts."""
    ends = tuple(f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj"))
    targets = [target.rstrip("$") for target in converter._original_target_patterns]
    of_ours = any(isinstance(op, _Deserialize) for op in getattr(converter, "operations", []))
    return of_ours or any(target.endswith(ends) for target in targets)


def _dequantized(model: Any, dtype: torch.dtype | None) -> Any:
    for module in model.modules():
        quantized_experts.dequantize(module, dtype)
    return model
