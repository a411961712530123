"""Is a tensor near its float64 yardstick? By the whole (Frobenius norm) and by the worst row, so
that one lost row cannot hide among many. A check is `not (error <= limit)`: NaN fails."""

from typing import NamedTuple

import torch


class Limits(NamedTuple):
    whole: float  # norm(got - want) / norm(want)
    row: float  # the same of the worst row (last dimension)


# float32: those of the library's own tests. 16 bits: one rounding to nearest has a relative rms
# error of 2^-7.5 / sqrt(12) = 0.16 % in bfloat16 (an ulp is 2^-7 to 2^-8 of the value) and an eighth
# of that in float16. Between an input and a gradient up to five tensors are stored (H, A', dH, dX~,
# dX), each rounding independent, and act' amplifies H's: sqrt(5) * 0.16 % = 0.36 % and more. The
# limit is twice that; a row is short, so its own rms strays to twice the tensor's.
LIMITS = {
    torch.float64: Limits(1e-12, 1e-11),
    torch.float32: Limits(2e-6, 1e-5),
    torch.bfloat16: Limits(7e-3, 1.6e-2),
    torch.float16: Limits(7e-3 / 8, 1.6e-2 / 8),
}


def errors(got, want):
    """got, want (..., columns) -> Limits: the errors found.

    Rows smaller than a hundredth of the rms row are measured against that hundredth: nearly all of
    them cancelled.
    """
    if got.shape != want.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return Limits(0.0, 0.0)
    rows = (got - want).reshape(-1, want.shape[-1] if want.ndim else 1)
    norms = want.reshape(rows.shape).norm(dim=-1)
    smallest = norms.square().mean().sqrt() * 1e-2
    if not smallest > 0:  # the yardstick is zero, or NaN: nothing but equality will do
        equal = torch.equal(got, want)
        return Limits(0.0, 0.0) if equal else Limits(torch.inf, torch.inf)
    row = (rows.norm(dim=-1) / norms.clamp(min=smallest)).max()
    return Limits((rows.norm() / norms.norm()).item(), row.item())


def assert_close(got, want, what="tensor", limits=None):
    """Raises AssertionError, naming `what`, unless got is within the limits of its dtype."""
    if got is None:
        raise AssertionError(f"{what} is missing")
    limits = limits or LIMITS[got.dtype]
    found = errors(got, want)
    if not (found.whole <= limits.whole and found.row <= limits.row):
        raise AssertionError(
            f"{what} {tuple(got.shape)} {got.dtype}: error {found.whole:.3g} (limit "
            f"{limits.whole:.3g}), worst row {found.row:.3g} (limit {limits.row:.3g})"
        )


def doubled(tensors):
    """Float64 copies that require a gradient where the originals do; others as they are."""
    return {
        name: t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for name, t in tensors.items()
    }
