"""Define `Fp8Weight`, a weight of the FP8 recipes: codes, transposed codes and the parameter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _library, ops
from ._formats import FP8_BLOCK
from .quantization import QuantizedExperts

_FORMAT = "fp8"
MULTIPLE = 16  # of the sizes that the recipes support


class Fp8Weight(NamedTuple):
    """One weight of all experts for `recipe="fp8"`: E4M3 codes in the layouts of both passes.

    `fp8_weight` returns it. `moe`, `moe_general`, `grouped_experts` and `expert_parallel.moe`
    accept it for W1, W1_up and W2. With the FP8 recipes the gradient of the values that the codes
    represent is the gradient of `master`, in its dtype. With recipe="bf16", `master` is the weight,
    or the dequantised codes without `master`.

    Attributes:
        weight: Codes and scales, shape (E, out, in), which forward reads.
        transposed: The same values stored as (E, in, out), which backward of recipe="fp8" reads;
            None: only for inference and for recipe="fp8_forward".
        master: The parameter that receives the gradient, shape (E, out, in). None: a frozen weight.
    """

    weight: QuantizedExperts
    transposed: QuantizedExperts | None
    master: Tensor | None

    def __repr__(self) -> str:
        layouts = "one layout" if self.transposed is None else "both layouts"
        of = "frozen" if self.master is None else f"of a {self.master.dtype} parameter"
        return f"Fp8Weight({self.shape}, {layouts}, {of}, {self.device}, {self.nbytes} bytes)"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype if self.master is None else self.master.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales, without `master`."""
        return self.weight.nbytes + (0 if self.transposed is None else self.transposed.nbytes)

    def update_(self) -> Fp8Weight:
        """Quantise `master` again, into the same memory, for example after an optimizer step.

        Raises:
            ValueError: The weight has no master.
        """
        if self.master is None:
            raise ValueError("update_ requires a weight with a master, got a frozen weight")
        quantize_into(self.master.detach(), self.weight, self.transposed)
        return self


def fp8_weight(W: Tensor | QuantizedExperts, *, transposed: bool = True) -> Fp8Weight:
    """Quantise a weight for the FP8 recipes, or transpose the codes of a checkpoint.

    Blocks have 128 x 128 values, with the scales of `quantize_fp8`. With two separate tensors for
    gate and up, each has its own blocks. No 16-bit copy of the weight is made.

    Args:
        W: Master weight, shape (E, out, in), contiguous, float32, bfloat16 or float16; it receives
            the gradient if it requires one. Or a `QuantizedExperts` of the format "fp8", which
            remains frozen and whose arrays are used as they are.
        transposed: Also make the transposed codes, which training with recipe="fp8" reads; they
            take as much memory as the codes.

    Returns:
        The codes. `update_` makes them again from a master that has changed.

    Raises:
        ValueError: A shape, a dtype or a format is wrong.
        TypeError: W is neither a tensor nor a `QuantizedExperts`.

    Example:
        >>> W1 = torch.nn.Parameter(torch.randn(4, 2 * 128, 64))
        >>> tilemoe.fp8_weight(W1).transposed.stored_shape
        (4, 64, 256)
    """
    if isinstance(W, QuantizedExperts):
        return Fp8Weight(W, transposed_of(W) if transposed else None, None)
    _library.require_weight(W, "W")
    if W.dim() != 3:
        raise ValueError(f"W has shape {tuple(W.shape)}, expected (E, out, in)")
    if W.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"W must be float32, bfloat16 or float16, got {W.dtype}")
    made = empty_like_master(W, transposed)
    quantize_into(W.detach(), made.weight, made.transposed)
    return made


def empty_like_master(W: Tensor, transposed: bool) -> Fp8Weight:
    """Return the codes of W with uninitialised memory.

    Raises:
        ValueError: W is not contiguous, or a width is not a multiple of 16.
    """
    if not W.is_contiguous():
        raise ValueError(f"W must be contiguous, got strides {tuple(W.stride())}")
    E, out, width = W.shape
    for name, size in (("out", out), ("in", width)):
        if size % MULTIPLE:
            raise ValueError(f"{name} must be a multiple of {MULTIPLE} in FP8, got {size}")
    return Fp8Weight(
        _empty(W, False), _empty(W, True) if transposed else None, W if W.requires_grad else None
    )


def _empty(W: Tensor, transposed: bool) -> QuantizedExperts:
    E, out, width = W.shape
    R, C = (width, out) if transposed else (out, width)
    new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=W.device)
    codes = new(E, R, C, dtype=torch.float8_e4m3fn)
    scales = new(E, -(-R // FP8_BLOCK), -(-C // FP8_BLOCK), dtype=torch.float32)
    shape = (E, out, width)
    return QuantizedExperts(_FORMAT, shape, transposed, codes, scales, None, None, None, W.dtype)


def quantize_into(
    values: Tensor, weight: QuantizedExperts, transposed: QuantizedExperts | None
) -> None:
    """Write the codes of values (E, out, in) to the arrays of both layouts."""
    if values.is_meta or values.numel() == 0:
        return
    arrays = [weight.codes.view(torch.uint8), weight.scales, None, None]
    if transposed is not None:
        arrays[2:] = transposed.codes.view(torch.uint8), transposed.scales
    ops.call_undifferentiated(
        _library.operators.quantize_fp8_into.default, values, False, *arrays
    )
    for one in (weight, transposed):
        if one is not None:
            torch.autograd.graph.increment_version([one.codes, one.scales])


def transposed_of(weight: QuantizedExperts) -> QuantizedExperts:
    """Return the same values stored as (E, in, out).

    Raises:
        ValueError: The format is not "fp8", or the weight is stored transposed.
    """
    require_fp8(weight)
    # Also of one column, whose transpose is contiguous, a copy: both may be written again.
    codes, scales = (
        array.mT.clone(memory_format=torch.contiguous_format)
        for array in (weight.codes.view(torch.uint8), weight.scales)
    )
    return weight._replace(
        transposed=True, codes=codes.view(torch.float8_e4m3fn), scales=scales
    )


def require_fp8(weight: QuantizedExperts) -> None:
    if weight.format != _FORMAT or weight.transposed:
        raise ValueError(f"expected a weight of the format 'fp8', not transposed, got {weight!r}")
