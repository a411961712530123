"""Quantise weights of experts in the formats of their checkpoints.

`quantize_experts` returns a `QuantizedExperts`. The arithmetic of the formats is in _formats.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import _library, ops
from ._formats import (
    DEQUANTIZE,
    FORMATS,
    NF4_BLOCK,
    QUANTIZE,
    SCALES_BLOCK,
    Arrays,
    Format,
    empty,
    nf4_map,
    shapes_of,
    why_not,
)
from ._shapes import shape_text

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALONG_INPUTS = ("mxfp4", "nvfp4")  # blocks of a row of the weight
_FP8_ROWS = 128
_NF4_STATE = "quant_state.bitsandbytes__nf4"
_SUFFIXES = {  # suffixes of the names in a checkpoint, by array
    "fp8": {"codes": "", "scales": "_scale_inv"},
    "mxfp4": {"codes": "_blocks", "scales": "_scales"},
    "nf4": {"codes": "", "scales": ".absmax"},
    "nf4_double": {
        "codes": "", "scales": ".absmax", "scale_map": ".nested_quant_map",
        "scale_of_scales": ".nested_absmax",
    },
    "nvfp4": {"codes": "", "scales": "_scale", "scale_of_scales": "_scale_2"},
}  # fmt: skip


class QuantizedExperts(NamedTuple):
    """One weight of all experts in the format of a checkpoint, without gradient.

    `quantize_experts` and `from_state_dict` return it. `moe`, `moe_general` and `grouped_experts`
    accept it for W1, W1_up and W2. They compute with the values that `dequantize` returns in x's
    dtype, and have one weight in 16 bits at a time. Dequantisation multiplies and adds in float32.
    With recipe="fp8", forward computes with the codes.

    The stored shape (E, R, C) is (E, out, in), or (E, in, out) if `transposed`. The arrays by
    format:

    - fp8: codes (E, R, C) float8_e4m3fn; scales (E, R / 128, C / 128) float32, sizes rounded up.
    - mxfp4: codes (E, R, C / 32, 16), bytes of two e2m1 values, the low half first; scales (E, R,
      C / 32), e8m0 bytes.
    - nf4: codes (E R C / 2, 1), bytes, the high half first; scales (E R C / 64) float32.
    - nf4_double: codes as in nf4; scales (E R C / 64), bytes with the values scale_map[scale] *
      scale_of_scales + scale_offset, with one scale_of_scales per 256 scales.
    - nvfp4: codes (E, R, C / 2), bytes of two e2m1 values, the low half first; scales (E, R,
      C / 16) float8_e4m3fn with the values scale_of_scales * scale, with one scale_of_scales per
      expert.

    Attributes:
        format: "fp8", "mxfp4", "nf4", "nf4_double" or "nvfp4".
        shape: (E, out, in).
        transposed: The arrays are stored as (E, in, out).
        codes: Codes of the values.
        scales: Scales of the blocks.
        scale_map: nf4_double: float32, shape (256).
        scale_of_scales: nf4_double: float32, shape (blocks / 256); nvfp4: float32, shape (E).
        scale_offset: nf4_double: float32, shape (1).
        dtype: Default dtype of dequantize().
    """

    format: Format
    shape: tuple[int, int, int]
    transposed: bool
    codes: Tensor
    scales: Tensor
    scale_map: Tensor | None
    scale_of_scales: Tensor | None
    scale_offset: Tensor | None
    dtype: torch.dtype

    def __repr__(self) -> str:
        how = f"{self.format!r}, {self.shape}, transposed={self.transposed}, {self.dtype}"
        return f"QuantizedExperts({how}, {self.device}, {self.nbytes} bytes)"

    @property
    def arrays(self) -> Arrays:
        return Arrays(*self[3:8])

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """(E, R, C), in memory order."""
        E, out, width = self.shape
        return (E, width, out) if self.transposed else self.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)

    def to(self, device: torch.device | str | int) -> QuantizedExperts:
        """Return the weight on a device.

        Args:
            device: Device of the new arrays.
        """
        return self.map(lambda array: array.to(device))

    def map(self, function: Any) -> QuantizedExperts:
        """Return the weight with a function applied to each array.

        Args:
            function: Function from a tensor to a tensor.
        """
        arrays = self.arrays._asdict().items()
        return self._replace(
            **{field: None if array is None else function(array) for field, array in arrays}
        )  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, shape (E, out, in): each value in float32, rounded once to `dtype`.

        Args:
            dtype: float32, bfloat16 or float16. None: the field `dtype`.

        Raises:
            ValueError: An array or the dtype does not match the format.
        """
        self.check("the weight")
        dtype = _dtype_of(self.dtype if dtype is None else dtype)
        if (
            dtype == torch.float32 and self.codes.is_cuda
        ):  # the library supports float32 on the CPU only
            out = torch.empty(self.stored_shape, dtype=dtype, device=self.device)
            DEQUANTIZE[self.format](self.arrays, out)
        else:
            _library.require_device(self.codes, "the weight's codes")
            number = FORMATS.index(self.format) + 1
            args = list(self.arrays), number, list(self.stored_shape), dtype
            out = ops.call_undifferentiated(_library.operators.dequantize.default, *args)
        return out.mT if self.transposed else out

    def check(self, name: str) -> None:
        """Raise a ValueError that names the field that does not match the format.

        Args:
            name: Name of this weight in the message.
        """
        if self.format not in FORMATS:
            raise ValueError(
                f"{name}.format must be one of {', '.join(FORMATS)}, got {self.format!r}"
            )
        wrong = why_not(self.format, *self.stored_shape)
        if wrong is not None:
            raise ValueError(f"{name} cannot be {self.format}: {wrong}")
        expected = shapes_of(self.format, *self.stored_shape)
        for field, array in zip(Arrays._fields, self.arrays):
            if field not in expected:
                continue
            shape, dtype = expected[field]
            if array is None or array.shape != shape or array.dtype != dtype:
                found = "None" if array is None else f"{array.dtype} {shape_text(array.shape)}"
                raise ValueError(
                    f"{name}.{field} is {found}, expected {dtype} {shape_text(shape)} for "
                    f"{self.format} and the shape {shape_text(self.shape)}"
                )
            if not array.is_contiguous():
                raise ValueError(f"{name}.{field} is not contiguous, expected a contiguous tensor")
            if array.device != self.device:
                raise ValueError(
                    f"expected all tensors on one device: {name}.{field} is on "
                    f"{array.device}, {name}.codes is on {self.device}"
                )

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """Return {checkpoint name: tensor}.

        The names are those of the formats' checkpoints: `X` and `X_scale_inv` (fp8); `X_blocks` and
        `X_scales` (mxfp4); `X`, `X.absmax`, `X.quant_map` and `X.quant_state.bitsandbytes__nf4`
        (nf4), with `X.nested_absmax` and `X.nested_quant_map` (nf4_double); `X`, `X_scale` and
        `X_scale_2` (nvfp4).

        Args:
            name: Name of the parameter, which ends in ".weight", or of a fused tensor such as
                "gate_up_proj".
        """
        arrays = self.arrays._asdict()
        made = {name + end: arrays[field] for field, end in _SUFFIXES[self.format].items()}
        if self.format.startswith("nf4"):
            made[f"{name}.quant_map"] = nf4_map(self.device)
            made[f"{name}.{_NF4_STATE}"] = _packed_json(self._nf4_state())
        return made

    def names(self, name: str) -> list[str]:
        """Return the names in `state_dict`, without its tensors.

        Args:
            name: Name of the parameter.
        """
        made = [name + end for end in _SUFFIXES[self.format].values()]
        if self.format.startswith("nf4"):
            made += [f"{name}.quant_map", f"{name}.{_NF4_STATE}"]
        return made

    def _nf4_state(self) -> dict[str, Any]:
        """Return the fields that bitsandbytes stores in JSON, in its order."""
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": _name_of(self.dtype),
            "shape": self.stored_shape,
        }  # fmt: skip
        if self.scale_offset is not None:
            state["nested_blocksize"] = SCALES_BLOCK
            state["nested_dtype"] = _name_of(torch.float32)
            state["nested_offset"] = 0.0 if self.codes.is_meta else self.scale_offset.item()
        return state

    @staticmethod
    def from_state_dict(
        tensors: Mapping[str, Tensor],
        name: str,
        *,
        transposed: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedExperts:
        """Make the weight from a checkpoint's tensors; their names determine the format.

        Args:
            tensors: Tensors of a checkpoint. Their memory is used as it is; codes that are not
                aligned to 16 bytes, as in a memory-mapped file, are copied.
            name: Name of the parameter, as in `state_dict`.
            transposed: The tensors are those of (E, in, out), for example of an older gpt-oss
                module.
            dtype: Default dtype of dequantize(). Tensors of bitsandbytes contain it.

        Raises:
            KeyError: The dict does not have all tensors of a format.
            ValueError: A shape or a dtype does not match the format.
        """
        format = _format_of(tensors, name)
        arrays: dict[str, Any] = {
            field: _found(tensors, name + end) for field, end in _SUFFIXES[format].items()
        }
        if format.startswith("nf4"):
            state = _unpacked_json(_found(tensors, f"{name}.{_NF4_STATE}"))
            dtype = _check_nf4(name, state, _found(tensors, f"{name}.quant_map"))
            stored = tuple(state["shape"])
            if format == "nf4_double":
                arrays["scale_offset"] = torch.tensor(
                    [state["nested_offset"]], dtype=torch.float32, device=arrays["codes"].device
                )
        else:
            arrays, stored = _as_stored(format, arrays)
        if len(stored) != 3:
            raise ValueError(f"{name} has shape {shape_text(stored)}, expected three dimensions")
        E, rows, columns = stored
        shape = (E, columns, rows) if transposed else (E, rows, columns)
        if not arrays["codes"].is_meta and arrays["codes"].data_ptr() % 16:
            arrays["codes"] = arrays["codes"].clone()
        every: dict[str, Any] = {field: arrays.get(field) for field in Arrays._fields}
        made = QuantizedExperts(format, shape, transposed, **every, dtype=_dtype_of(dtype))
        made.check(name)
        return made


def quantize_experts(
    W: Tensor,
    format: Format,
    *,
    transposed: bool | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedExperts:
    """Quantise one weight of all experts, on its device.

    The codes and the scales are bitwise equal to those of the format's owner, on the CPU and on a
    GPU: transformers (fp8, mxfp4), bitsandbytes' CPU code (nf4, nf4_double), torchao (nvfp4, with
    one scale of scales per expert). mxfp4 rounds the weight to bfloat16 first, as its owner does.
    The offset of nf4_double is a mean on the CPU, whose last bit depends on torch's number of
    threads there, as in bitsandbytes.

    Args:
        W: Weight, shape (E, out, in), with any strides; float32, bfloat16 or float16. The inner
            stored size is a multiple of 8 (32 for mxfp4, 16 for nvfp4); for nf4 the number of
            elements is a multiple of 64.
        format: "fp8", "mxfp4", "nf4", "nf4_double" or "nvfp4".
        transposed: Store (E, in, out), with that inner dimension. None: the weight's memory order
            for fp8, nf4 and nf4_double; False for mxfp4 and nvfp4, whose blocks are blocks of
            inputs.
        dtype: Default dtype of dequantize(). None: W's dtype.

    Returns:
        The quantised weight.

    Raises:
        ValueError: The format, a size or a dtype is wrong.
        TypeError: W is not a tensor.

    Example:
        >>> W1 = torch.randn(4, 2 * 32, 64)
        >>> tilemoe.quantize_experts(W1, "nf4").dequantize().shape
        torch.Size([4, 64, 64])
    """
    _library.require_weight(W, "W")
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if W.dim() != 3:
        raise ValueError(f"W has shape {shape_text(W.shape)}, expected (E, out, in)")
    _dtype_of(W.dtype, "W")
    if transposed is None:
        in_order = not W.is_contiguous() and W.mT.is_contiguous()
        transposed = in_order and format not in _ALONG_INPUTS
    E, out, width = W.shape
    stored = W.detach().mT if transposed else W.detach()
    wrong = why_not(format, *stored.shape)
    if wrong is not None:
        raise ValueError(f"W cannot be {format}: {wrong}")
    arrays = empty(format, stored) if W.is_meta else QUANTIZE[format](stored)
    dtype = _dtype_of(W.dtype if dtype is None else dtype)
    return QuantizedExperts(format, (E, out, width), transposed, *arrays, dtype)


def quantize_fp8(
    x: Tensor, rows: Literal[1, 128] = 1, power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantise values to e4m3 with one scale per block of `rows` x 128 values.

    The scales are those of TransformerEngine's Float8BlockScaling: 448 / the largest magnitude of
    the block, rounded down to a power of two unless `power_of_two` is False, and inverted. A block
    of zeros has the scale 1. Blocks at the ends of rows and columns may be smaller. The result has
    no gradient.

    Args:
        x: Values, shape (..., R, C), C a multiple of 8; float32, bfloat16 or float16.
        rows: Rows of a block, 1 (as recipe="fp8" quantises x) or 128 (as DeepSeek's weights).
        power_of_two: Whether scales are powers of two.

    Returns:
        The codes, float8_e4m3fn of x's shape, and the scales, float32 of shape (..., R / rows,
        C / 128), sizes rounded up; a value is code * scale.

    Raises:
        ValueError: A shape, a dtype or `rows` is wrong.
        TypeError: x is not a tensor.

    Example:
        >>> codes, scales = tilemoe.quantize_fp8(torch.randn(4, 256))
        >>> codes.shape, scales.shape
        (torch.Size([4, 256]), torch.Size([4, 2]))
    """
    _library.require_device(x, "x")
    if rows not in (1, _FP8_ROWS):
        raise ValueError(f"rows must be 1 or {_FP8_ROWS}, got {rows!r}")
    if x.dim() < 2:
        raise ValueError(f"x has shape {shape_text(x.shape)}, expected (..., R, C)")
    values = x.detach().reshape(-1, *x.shape[-2:]).contiguous()
    if rows == 1 and values.shape[0] > 1:  # one matrix: blocks are within rows
        values = values.reshape(1, -1, x.shape[-1])
    codes, scales = ops.call_undifferentiated(
        _library.operators.quantize_fp8.default, values, rows, not power_of_two
    )
    blocks = (-(-x.shape[-2] // rows), -(-x.shape[-1] // 128))
    codes = codes.view(torch.float8_e4m3fn).reshape(x.shape)
    return codes, scales.reshape(*x.shape[:-2], *blocks)


# ---------------------------------------------------------------- names and JSON of checkpoints


def _format_of(tensors: Mapping[str, Tensor], name: str) -> Format:
    if f"{name}.{_NF4_STATE}" in tensors:
        return "nf4_double" if f"{name}.nested_absmax" in tensors else "nf4"
    if f"{name}_blocks" in tensors:
        return "mxfp4"
    if f"{name}_scale_inv" in tensors:
        return "fp8"
    if f"{name}_scale_2" in tensors:
        return "nvfp4"
    raise KeyError(
        f"the state dict has no tensors of {name} in one of the formats {', '.join(FORMATS)}"
    )


def _found(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise KeyError(f"{name} is missing in the state dict")
    return tensors[name].detach()


def _as_stored(format: str, arrays: dict[str, Tensor]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the arrays with their dtypes, and (E, R, C)."""
    codes, scales = arrays["codes"], arrays["scales"]
    E_R, size = tuple(codes.shape[:2]), codes.shape[-1]
    if format == "fp8":
        return {**arrays, "scales": scales.float()}, tuple(codes.shape)  # e8m0: exact
    if format == "mxfp4":
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        return {**arrays, "scales": scales}, (*E_R, codes.shape[2] * 2 * size)
    of_experts = arrays["scale_of_scales"].float().reshape(-1)
    return {**arrays, "scale_of_scales": of_experts}, (*E_R, 2 * size)


def _check_nf4(name: str, state: dict[str, Any], quant_map: Tensor) -> torch.dtype:
    """Return the dtype of a bitsandbytes state, which must have the blocks that kernels read."""
    expected = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "nested_blocksize": SCALES_BLOCK}
    for key, value in expected.items():
        if state.get(key, value) != value:
            raise ValueError(f"{name}: {key} must be {value!r}, got {state[key]!r}")
    if not torch.equal(quant_map.float().cpu(), nf4_map()):
        raise ValueError(f"{name}.quant_map differs from the map of NF4")
    return _dtype_of(getattr(torch, state["dtype"], None), f"{name}.{_NF4_STATE}")


def _packed_json(values: dict[str, Any]) -> Tensor:
    data = list(json.dumps(values).encode())
    return torch.tensor(data, dtype=torch.uint8, device="cpu")


def _unpacked_json(tensor: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(tensor.tolist()).decode())
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(dtype: Any, name: str = "dtype") -> torch.dtype:
    if dtype not in _DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
    found: torch.dtype = dtype
    return found
