"""Is a tensor near its float64 yardstick? By the whole (Frobenius norm) and by the worst row, so
that one lost row cannot hide among many. A check is `not (error <= limit)`: NaN fails."""

from typing import NamedTuple

import torch


class Limits(NamedTuple):
    whole: float  # norm(got - want) / norm(want)
    row: float  # the same of the worst row (last dimension)
    smallest: float  # rows below this part of the rms row norm are measured against it


# float32: those of the library's own tests. 16 bits: one rounding to nearest has a relative rms
# error of 2^-7.5 / sqrt(12) = 0.16 % in bfloat16 (an ulp is 2^-7 to 2^-8 of the value), an eighth
# of it in float16. Between an input and a gradient up to five tensors are stored (H, A', dH, dX~,
# dX), each rounding independent, and act' amplifies H's: sqrt(5) * 0.16 % = 0.36 % and more. The
# limit is twice that. A row that nearly cancelled keeps the errors of its terms: one of a tenth of
# the rms norm has ten times the tensor's error.
LIMITS = {
    torch.float64: Limits(1e-12, 1e-11, 1e-2),
    torch.float32: Limits(2e-6, 1e-5, 1e-2),
    torch.bfloat16: Limits(7e-3, 4e-2, 0.1),
    torch.float16: Limits(7e-3 / 8, 4e-2 / 8, 0.1),
}


def errors(got, want, smallest):
    """got, want (..., columns) -> the error of the whole, of the worst row."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0, 0.0
    rows = (got - want).reshape(-1, want.shape[-1] if want.ndim else 1)
    norms = want.reshape(rows.shape).norm(dim=-1)
    rms = norms.square().mean().sqrt()
    if not rms > 0:  # the yardstick is zero, or NaN: nothing but equality will do
        return (0.0, 0.0) if torch.equal(got, want) else (torch.inf, torch.inf)
    row = (rows.norm(dim=-1) / norms.clamp(min=rms * smallest)).max()
    return (rows.norm() / norms.norm()).item(), row.item()


def limits_of_expected(got, want, rounding):
    """The limits for a 16-bit layer's tensor, from its float64 values without rounding (want) and
    with rounding where the library stores (rounding, by stored.py): 1.25 times the error of the
    latter, rows 2 times its worst row's."""
    float32 = LIMITS[torch.float32]
    whole, row = errors(rounding.to(got.dtype), want, 1e-2)
    return Limits(max(1.25 * whole, float32.whole), max(2 * row, float32.row), 1e-2)


def assert_close(got, want, what="tensor", limits=None):
    """Raises AssertionError, naming `what`, unless got is within the limits of its dtype."""
    if got is None:
        raise AssertionError(f"{what} is missing")
    limits = limits or LIMITS[got.dtype]
    whole, row = errors(got, want, limits.smallest)
    if not (whole <= limits.whole and row <= limits.row):
        raise AssertionError(
            f"{what} {tuple(got.shape)} {got.dtype}: error {whole:.3g} (limit "
            f"{limits.whole:.3g}), worst row {row:.3g} (limit {limits.row:.3g})"
        )


def doubled(tensors):
    """Float64 copies that require a gradient where the originals do; others as they are."""
    return {
        name: t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for name, t in tensors.items()
    }
