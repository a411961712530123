"""Compute the formats of quantised weights with the same bits on the CPU and on a GPU.

The owner of each format, whose codes and scales are equal to these bit for bit:

- fp8: transformers' finegrained_fp8 (the format of DeepSeek-V3), blocks of 128 x 128. transformers
  does not quantise a weight with partial blocks; here zeros fill them.
- mxfp4: transformers' quantize_to_mxfp4, which is triton_kernels' downcast_to_mxfp_torch of the
  weight in bfloat16: the scale is rounded up, halves away from zero.
- nf4: bitsandbytes' CPU code, blocks of 64.
- nf4_double: nf4 with compress_statistics: the scales minus their mean are 8-bit codes.
- nvfp4: torchao's nvfp4_quantize with one scale of scales per expert.

A divisor is a tensor on the device, because torch replaces the division of a GPU tensor by a number
with a multiplication by the reciprocal. A weight is (E, R, C) in memory order; it is converted in
pieces, so that the float32 copies stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Format = Literal["fp8", "mxfp4", "nf4", "nf4_double", "nvfp4"]
FORMATS: tuple[str, ...] = get_args(Format)  # in the order of their numbers in tilemoe.h, from 1

FP8_BLOCK, MX_BLOCK, NF4_BLOCK, NV_BLOCK = 128, 32, 64, 16
SCALES_BLOCK = 256  # of nf4_double: scales per scale of scales
_FP8_MAX, _E2M1_MAX = 448.0, 6.0
_PIECE = 1 << 22  # elements

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the negative values
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class Arrays(NamedTuple):
    """Arrays of one quantised weight, in the order of tilemoe_quantized."""

    codes: Tensor
    scales: Tensor
    scale_map: Tensor | None = None
    scale_of_scales: Tensor | None = None
    scale_offset: Tensor | None = None


Shape = tuple[tuple[int, ...], torch.dtype]


def shapes_of(format: str, E: int, R: int, C: int) -> dict[str, Shape]:
    """Return {array: (shape, dtype)} of a format.

    Fields of Arrays that are not in the result are None.
    """
    byte, number, e4m3 = torch.uint8, torch.float32, torch.float8_e4m3fn
    blocks = E * R * C // NF4_BLOCK
    nf4 = ((E * R * C // 2, 1), byte)
    if format == "fp8":
        scales = (E, -(-R // FP8_BLOCK), -(-C // FP8_BLOCK))
        return {"codes": ((E, R, C), e4m3), "scales": (scales, number)}
    if format == "mxfp4":
        groups = (E, R, C // MX_BLOCK)
        return {"codes": ((*groups, MX_BLOCK // 2), byte), "scales": (groups, byte)}
    if format == "nf4":
        return {"codes": nf4, "scales": ((blocks,), number)}
    if format == "nf4_double":
        return {
            "codes": nf4, "scales": ((blocks,), byte), "scale_map": ((256,), number),
            "scale_of_scales": ((-(-blocks // SCALES_BLOCK),), number),
            "scale_offset": ((1,), number),
        }  # fmt: skip
    assert format == "nvfp4"
    return {
        "codes": ((E, R, C // 2), byte), "scales": ((E, R, C // NV_BLOCK), e4m3),
        "scale_of_scales": ((E,), number),
    }  # fmt: skip


def why_not(format: str, E: int, R: int, C: int) -> str | None:
    """Return what is wrong with the sizes of a weight for a format, or None."""
    multiple = {"mxfp4": MX_BLOCK, "nvfp4": NV_BLOCK}.get(format, 8)
    if C % multiple:
        return f"its inner size must be a multiple of {multiple}, got {C}"
    if format.startswith("nf4") and E * R * C % NF4_BLOCK:
        return f"its number of elements must be a multiple of {NF4_BLOCK}, got {E * R * C}"
    return None


def empty(format: str, M: Tensor) -> Arrays:
    """Return uninitialised arrays for a weight M (E, R, C)."""
    shapes = shapes_of(format, *M.shape)
    return Arrays(
        **{name: M.new_empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    )


def _pieces(E: int, R: int, C: int) -> Iterator[tuple[int, slice]]:
    """Yield (expert, rows) in whole blocks of rows."""
    step = max(_PIECE // C // FP8_BLOCK, 1) * FP8_BLOCK
    for expert in range(E):
        for begin in range(0, R, step):
            yield expert, slice(begin, min(begin + step, R))


# ---------------------------------------------------------------- FP8


def _fp8_blocks(rows: Tensor) -> Tensor:
    """Return rows (R, C) as (R / 128, 128, C / 128, 128), filled with zeros."""
    R, C = rows.shape
    filled = torch.nn.functional.pad(rows, (0, -C % FP8_BLOCK, 0, -R % FP8_BLOCK))
    return filled.view(-(-R // FP8_BLOCK), FP8_BLOCK, -(-C // FP8_BLOCK), FP8_BLOCK)


def _quantize_fp8(M: Tensor) -> Arrays:
    made = empty("fp8", M)
    for e, at in _pieces(*M.shape):
        rows = M[e, at].float()
        blocks = _fp8_blocks(rows)
        maxima = blocks.abs().amax((1, 3))
        some = maxima > 0
        factors = torch.where(some, maxima, 1.0).reciprocal() * _FP8_MAX
        factors = torch.where(some, factors, 1.0)
        codes = (blocks * factors[:, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX)
        codes = codes.reshape(blocks.shape[0] * FP8_BLOCK, -1)[: rows.shape[0], : rows.shape[1]]
        made.codes[e, at] = codes.to(torch.float8_e4m3fn)
        first = at.start // FP8_BLOCK
        made.scales[e, first : first + len(factors)] = factors.reciprocal()
    return made


def _dequantize_fp8(of: Arrays, out: Tensor) -> None:
    for e, at in _pieces(*out.shape):
        blocks = _fp8_blocks(of.codes[e, at].float())
        first = at.start // FP8_BLOCK
        blocks = blocks * of.scales[e, first : first + len(blocks), None, :, None]
        rows = blocks.view(len(blocks) * FP8_BLOCK, -1)
        out[e, at] = rows[: at.stop - at.start, : out.shape[2]].to(out.dtype)


# ---------------------------------------------------------------- e2m1


def _packed(codes: Tensor, high_first: bool = False) -> Tensor:
    """Pack uint8 codes of 4 bits, an even number in the last dimension, two per byte."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return first << 4 | second if high_first else first | second << 4


def _unpacked(packed: Tensor, high_first: bool = False) -> Tensor:
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if high_first else (low, high), -1).flatten(-2).int()


def _above(values: Tensor, bounds: list[float]) -> Tensor:
    """Return, as uint8, how many of the bounds are below each value.

    The result is that of torch.bucketize, also for NaN. On the CPU, which vectorises comparisons,
    it is several times faster.
    """
    count = torch.full(values.shape, len(bounds), dtype=torch.uint8, device=values.device)
    for bound in bounds:
        count -= (values <= bound).view(torch.uint8)
    return count


def _e2m1_of(values: Tensor, bounds: list[float]) -> Tensor:
    """Return the codes of values; bounds: the largest magnitude of each code but the last."""
    return _above(values.abs(), bounds) | values.signbit().view(torch.uint8) << 3


def _before(value: float) -> float:
    """Return the float32 before a positive value."""
    single = lambda number: torch.tensor(number, device="cpu")
    return torch.nextafter(single(value), single(0.0)).item()


_HALVES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
_AWAY = [_before(half) for half in _HALVES]  # halves are rounded away from zero
_TO_EVEN = [_before(half) if i % 2 else half for i, half in enumerate(_HALVES)]


def _e2m1_values(codes: Tensor) -> Tensor:
    table = torch.tensor(E2M1, device=codes.device)
    return torch.cat([table, -table])[codes]


def _quantize_mxfp4(M: Tensor) -> Arrays:
    made = empty("mxfp4", M)
    largest = torch.tensor(_E2M1_MAX, device=M.device)
    for e, at in _pieces(*M.shape):
        groups = M[e, at].to(torch.bfloat16).float().unflatten(-1, (-1, MX_BLOCK))
        scales = groups.abs().amax(-1) / largest
        bits = scales.view(torch.int32) + 0x007FFFFF & 0x7F800000  # the next power of two
        scales = bits.view(torch.float32)
        factors = torch.where(scales == 0, 0.0, scales.reciprocal())
        made.codes[e, at] = _packed(_e2m1_of(groups * factors.unsqueeze(-1), _AWAY))
        made.scales[e, at] = (bits >> 23).to(torch.uint8)
    return made


def _dequantize_mxfp4(of: Arrays, out: Tensor) -> None:
    for e, at in _pieces(*out.shape):
        values = _e2m1_values(_unpacked(of.codes[e, at]))
        scales = of.scales[e, at].view(torch.float8_e8m0fnu).float()
        out[e, at] = (values * scales.unsqueeze(-1)).flatten(-2).to(out.dtype)


def _quantize_nvfp4(M: Tensor) -> Arrays:
    made = empty("nvfp4", M)
    assert made.scale_of_scales is not None
    largest = torch.tensor(_E2M1_MAX, device=M.device)
    both = torch.tensor(_FP8_MAX * _E2M1_MAX, device=M.device)
    min_scale = torch.finfo(torch.float8_e4m3fn).tiny
    for e in range(M.shape[0]):
        maximum = torch.maximum(M[e].amax(), -M[e].amin()).float()
        made.scale_of_scales[e] = torch.where(maximum > 0, maximum / both, 1.0)  # no 0 / 0
    for e, at in _pieces(*M.shape):
        groups = M[e, at].float().unflatten(-1, (-1, NV_BLOCK))
        scale = made.scale_of_scales[e]
        scales = groups.abs().amax(-1) / largest / scale
        scales = scales.clamp_(min_scale, _FP8_MAX).to(torch.float8_e4m3fn)
        values = groups * (scale.reciprocal() / scales.float()).unsqueeze(-1)
        codes = _e2m1_of(values.clamp_(-_E2M1_MAX, _E2M1_MAX), _TO_EVEN)
        made.codes[e, at] = _packed(codes.flatten(-2))
        made.scales[e, at] = scales
    return made


def _dequantize_nvfp4(of: Arrays, out: Tensor) -> None:
    assert of.scale_of_scales is not None
    for e, at in _pieces(*out.shape):
        values = _e2m1_values(_unpacked(of.codes[e, at])).unflatten(-1, (-1, NV_BLOCK))
        scales = of.scale_of_scales[e] * of.scales[e, at].float()
        out[e, at] = (values * scales.unsqueeze(-1)).flatten(-2).to(out.dtype)


# ---------------------------------------------------------------- NF4


def nf4_map(device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(NF4, device=device)


def dynamic_map() -> Tensor:
    """Return float32 (256) on the CPU: the values of bitsandbytes' 8-bit codes, sorted.

    Each of seven decades i has 2^i values of each sign, the middles of equal parts of 10^(i - 7) to
    10^(i - 6).
    """
    values = [torch.tensor([0.0, 1.0], device="cpu")]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1, device="cpu")
        middles = 10 ** (i - 6) * ((ends[:-1] + ends[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort()[0]


_BINS = 65536  # of a scale's range, each with one code


def _codes_of_bins(scale_map: Tensor) -> Tensor:
    """Return uint8 (65536): the code of each of bitsandbytes' bins of [-1, 1]."""
    device = scale_map.device
    bins = torch.arange(_BINS, dtype=torch.float32, device=device)
    values = 2 * bins / torch.tensor(float(_BINS - 1), device=device) - 1
    return torch.bucketize(values, (scale_map[:-1] + scale_map[1:]) * 0.5).to(torch.uint8)


def _scale_codes(scales: Tensor, scale_map: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8-bit codes (n) of scales (n), and the scales of these (n / 256)."""
    blocks = torch.nn.functional.pad(scales, (0, -len(scales) % SCALES_BLOCK))
    blocks = blocks.view(-1, SCALES_BLOCK)
    maxima = blocks.abs().amax(-1)
    values = (blocks * maxima.reciprocal().unsqueeze(-1)).clamp_(-1, 1)
    # bitsandbytes computes the bin with a fused multiply-add, which equals float64 followed by one
    # rounding: the exact result of the multiplication has at most 41 bits.
    halves = ((values + 1) * 0.5).double()
    bins = (halves * (_BINS - 1) + 0.5).float()
    bins = torch.where((maxima == 0).unsqueeze(-1), 0.0, bins)
    codes = _codes_of_bins(scale_map)[bins.int()]
    codes = torch.where((maxima == 0).unsqueeze(-1), 0, codes)
    return codes.flatten()[: len(scales)], maxima


def _quantize_nf4(M: Tensor) -> Arrays:
    made = empty("nf4", M)
    flat, table = M.reshape(-1), nf4_map()
    bounds = ((table[:-1] + table[1:]) / 2).tolist()
    for begin in range(0, len(flat), _PIECE):
        blocks = flat[begin : begin + _PIECE].float().view(-1, NF4_BLOCK)
        maxima = blocks.abs().amax(-1)
        values = blocks * maxima.clamp(min=1e-38).reciprocal().unsqueeze(-1)
        packed = _packed(_above(values.clamp_(-1, 1), bounds).flatten(), high_first=True)
        made.codes[begin // 2 : begin // 2 + len(packed), 0] = packed
        made.scales[begin // NF4_BLOCK : begin // NF4_BLOCK + len(maxima)] = maxima
    return made


def _quantize_nf4_double(M: Tensor) -> Arrays:
    codes, scales, *_ = _quantize_nf4(M)
    # The order of this sum is that of torch on the CPU, on every device.
    offset = scales.cpu().mean().to(M.device)
    scale_map = dynamic_map().to(M.device)
    scale_codes, scale_of_scales = _scale_codes(scales - offset, scale_map)
    return Arrays(codes, scale_codes, scale_map, scale_of_scales, offset.reshape(1))


def _nf4_scales(of: Arrays, begin: int, end: int) -> Tensor:
    """Return the float32 scales of the blocks [begin, end)."""
    scales = of.scales[begin:end]
    if of.scale_map is None:
        return scales
    assert of.scale_of_scales is not None and of.scale_offset is not None
    of_block = torch.arange(begin, end, device=scales.device) // SCALES_BLOCK
    return of.scale_map[scales.int()] * of.scale_of_scales[of_block] + of.scale_offset


def _dequantize_nf4(of: Arrays, out: Tensor) -> None:
    flat, table = out.view(-1), nf4_map(out.device)
    for begin in range(0, len(flat), _PIECE):
        end = min(begin + _PIECE, len(flat))
        values = table[_unpacked(of.codes[begin // 2 : end // 2, 0], high_first=True)]
        scales = _nf4_scales(of, begin // NF4_BLOCK, end // NF4_BLOCK)
        blocks = values.view(-1, NF4_BLOCK) * scales.unsqueeze(-1)
        flat[begin:end] = blocks.view(-1).to(out.dtype)


QUANTIZE: dict[str, Callable[[Tensor], Arrays]] = {
    "fp8": _quantize_fp8, "mxfp4": _quantize_mxfp4, "nf4": _quantize_nf4,
    "nf4_double": _quantize_nf4_double, "nvfp4": _quantize_nvfp4,
}  # fmt: skip
DEQUANTIZE: dict[str, Callable[[Arrays, Tensor], None]] = {
    "fp8": _dequantize_fp8, "mxfp4": _dequantize_mxfp4, "nf4": _dequantize_nf4,
    "nf4_double": _dequantize_nf4, "nvfp4": _dequantize_nvfp4,
}  # fmt: skip
