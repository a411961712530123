"""Store quantised weights of transformers' experts modules.

A module has one `QuantizedExperts` for a quantised weight, as buffers of bytes, so that casts of
the module (`half()`, `to(dtype)`) do not change them. The weight's own name remains a parameter
with its shape, dtype and device, but without memory, for code that reads only these, such as
PEFT's. State dicts contain neither the buffers nor this parameter, but the names of the weight's
checkpoint format.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _library
from .._formats import Arrays, Format
from ..quantization import QuantizedExperts, quantize_experts

_ATTRIBUTE = "_tilemoe_quantized"  # {weight: (format, shape, transposed, dtype, arrays' dtypes)}
_FP8_SCALES = "_scale_inv"
_LOADED = "_blocks", "_scales", _FP8_SCALES  # attributes into which a checkpoint is loaded
_ALIGNMENT = 16  # alignment in bytes of arrays that kernels read
_aten = torch.ops.aten


class ShapeOnly(Tensor):
    """Shape, dtype and device of a weight.

    It can be copied, cast and moved; anything that reads its values raises NotImplementedError with
    the weight's name.
    """

    weight: str

    @staticmethod
    def __new__(
        cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device, weight: str
    ) -> "ShapeOnly":
        shape = tuple(shape)
        made = Tensor._make_wrapper_subclass(
            cls, shape, strides=(0,) * len(shape), dtype=dtype, device=device, storage_size=0
        )
        made.weight = weight
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, packet, first = kwargs or {}, function.overloadpacket, args[0]
        if packet in (_aten.detach, _aten.alias, _aten.clone):
            return cls(first.shape, first.dtype, first.device, first.weight)
        if packet is _aten._to_copy:
            dtype, device = named.get("dtype"), named.get("device")
            return cls(first.shape, dtype or first.dtype, device or first.device, first.weight)
        if packet is _aten.copy_ and all(isinstance(tensor, cls) for tensor in args[:2]):
            return first
        weight = next(t.weight for t in args if isinstance(t, cls))
        raise NotImplementedError(
            f"{weight} is quantised, so {packet} cannot read it; use "
            "experts_implementation='tilemoe' to compute with it, tilemoe.peft.register() "
            "for its adapters, or model.dequantize() for 16 bits"
        )

    def element_size(self) -> int:
        """Return 0: the parameter has no memory."""
        return 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """0: the parameter has no memory."""
        return 0


def weights_of(experts: nn.Module) -> list[str]:
    """Return the names of W1 and W2 of an experts module."""
    return ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]


def names(experts: nn.Module) -> list[str]:
    """Return the names of the module's quantised weights."""
    return list(getattr(experts, _ATTRIBUTE, ()))


def buffers(experts: nn.Module) -> set[str]:
    """Return the names of the buffers of the module's quantised weights."""
    return {_buffer(weight, field) for weight in names(experts) for field in Arrays._fields}


def put(experts: nn.Module, weight: str, quantized: QuantizedExperts) -> None:
    """Replace a parameter of the module by its quantised form.

    The order of the parameters does not change, because PEFT nests the wrappers of weights, and so
    names their adapters, in this order.
    """
    for ending in _LOADED:
        experts._parameters.pop(weight + ending, None)
        experts._buffers.pop(weight + ending, None)
    dtypes = []
    for field, array in zip(Arrays._fields, quantized.arrays, strict=True):
        experts._buffers.pop(_buffer(weight, field), None)
        dtypes.append(None if array is None else array.dtype)
        if array is not None:
            experts.register_buffer(_buffer(weight, field), _bytes(field, array))
    E, out, width = quantized.shape
    shape = (E, width, out) if experts.is_transposed else (E, out, width)
    name = f"{weight} of {_library.class_of(experts)}"
    placeholder = nn.Parameter(
        ShapeOnly(shape, quantized.dtype, quantized.device, name), requires_grad=False
    )
    placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
    experts.register_parameter(weight, placeholder)
    known = getattr(experts, _ATTRIBUTE, None)
    if known is None:
        known = {}
        setattr(experts, _ATTRIBUTE, known)
        experts.register_state_dict_post_hook(_save)
        experts.register_load_state_dict_pre_hook(_load)
    known[weight] = (*quantized[:3], quantized.dtype, tuple(dtypes))


def get(experts: nn.Module, weight: str) -> QuantizedExperts | None:
    """Return the module's quantised weight, or that of FP8Experts; None if it is in 16 bits.

    Raises:
        ValueError: The weight requires a gradient.
    """
    known = getattr(experts, _ATTRIBUTE, None)
    if known is None or weight not in known:
        return _of_transformers(experts, weight)
    format, shape, transposed, dtype, dtypes = known[weight]
    own = None if torch.compiler.is_compiling() else experts._parameters.get(weight)
    if own is not None and own.requires_grad:
        raise ValueError(
            f"{weight} of {_library.class_of(experts)} requires a gradient, but it is "
            "quantised; train adapters of it, or call model.dequantize()"
        )
    arrays = [
        None if of is None else experts._buffers[_buffer(weight, field)].view(of)
        for field, of in zip(Arrays._fields, dtypes, strict=True)
    ]
    return QuantizedExperts(format, shape, transposed, *arrays, dtype)  # type: ignore[arg-type]


def fp8_of_transformers(experts: nn.Module) -> set[str]:
    """Return the names of the parameters of transformers' FP8Experts; none of another module."""
    scaled = [name for name in weights_of(experts) if name + _FP8_SCALES in experts._parameters]
    return {name + ending for name in scaled for ending in ("", _FP8_SCALES)}


def _of_transformers(experts: nn.Module, weight: str) -> QuantizedExperts | None:
    """Return a weight of FP8Experts, whose parameters are the codes and the scales."""
    codes, scales = (experts._parameters.get(weight + ending) for ending in ("", _FP8_SCALES))
    if codes is None or scales is None:
        return None
    tensors = {weight: codes, weight + _FP8_SCALES: scales}
    return QuantizedExperts.from_state_dict(tensors, weight)


def quantize(experts: nn.Module, weight: str, W: Tensor, format: Format) -> None:
    """Put the quantised form of W, which has the module's layout, into the module."""
    in_order = W.mT if experts.is_transposed else W  # (E, out, in)
    transposed = is_stored_transposed(experts, format)
    put(experts, weight, quantize_experts(in_order, format, transposed=transposed))


def is_stored_transposed(experts: nn.Module, format: Format) -> bool:
    """Return whether the quantised weights of the module are (E, in, out), as its own are."""
    return experts.is_transposed and format not in ("mxfp4", "nvfp4")


def dequantize(experts: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make parameters from the module's quantised weights.

    The parameters stay frozen: adapters of them may be trained.
    """
    for weight in names(experts):
        quantized = get(experts, weight)
        assert quantized is not None
        W = quantized.dequantize(dtype)
        for field in Arrays._fields:
            experts._buffers.pop(_buffer(weight, field), None)
        stored = (W.mT if experts.is_transposed else W).contiguous()
        experts.register_parameter(weight, nn.Parameter(stored, requires_grad=False))
        del getattr(experts, _ATTRIBUTE)[weight]


def _buffer(weight: str, field: str) -> str:
    return f"{weight}_quantized_{field}"


def _bytes(field: str, array: Tensor) -> Tensor:
    """Return the array's bytes, copied for a shared map: a file has each tensor once."""
    array = array.detach().contiguous()
    if field == "scale_map" or array.data_ptr() % _ALIGNMENT:
        array = array.clone()
    return array.view(torch.uint8)


def _save(experts: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
    """Replace the entries after state_dict()."""
    for weight in names(experts):
        for name in (weight, *(_buffer(weight, field) for field in Arrays._fields)):
            state_dict.pop(prefix + name, None)
        quantized = get(experts, weight)
        assert quantized is not None
        state_dict.update(quantized.state_dict(prefix + weight))


def _load(
    experts: nn.Module, state_dict: dict, prefix: str, metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Load the tensors of a checkpoint as the module's buffers, before load_state_dict()."""
    for weight in names(experts):
        own, name = get(experts, weight), prefix + weight
        assert own is not None
        expected, new = own.names(name), own
        found = {key: state_dict.pop(key) for key in expected if key in state_dict}
        state_dict[name] = experts._parameters[weight]
        missing += [key for key in expected if key not in found]
        if len(found) == len(expected):
            try:
                new = QuantizedExperts.from_state_dict(found, name, transposed=own.transposed)
            except ValueError as error:
                errors.append(str(error))
        for field, array in zip(Arrays._fields, new.arrays, strict=True):
            if array is not None:
                state_dict[prefix + _buffer(weight, field)] = array.contiguous().view(torch.uint8)
