"""Checks of the sizes and dtypes of a module's parameters, and of its losses; each error names the
argument that does not fit."""

from typing import Any

import torch

from . import _checks
from ._layout import WIDTH_MULTIPLE
from .lora import MAX_RANK


def size_of(letter: str, by_letter: int | None, name: str, by_name: int | None) -> int:
    """The size, given by its letter or by its name."""
    if (by_letter is None) == (by_name is None):
        seen = "neither is" if by_name is None else "both are"
        raise TypeError(f"tilemoe: MoE requires {letter} or {name}, but {seen} given")
    size = by_letter if by_letter is not None else by_name
    _checks.integer(letter if by_letter is not None else name, size)
    assert size is not None
    return size


def check_sizes(d: int, n: int, E: int, K: int, shared: int | None) -> None:
    if not 1 <= K <= E:
        raise ValueError(f"tilemoe: K is {K}, expected 1 to E = {E}")
    widths = {"d": d, "n": n}
    if shared:
        _checks.integer("shared_intermediate_size", shared)
        widths["shared_intermediate_size"] = shared
    for name, width in widths.items():
        if width < 1 or width % WIDTH_MULTIPLE:
            raise ValueError(
                f"tilemoe: {name} is {width}, expected a positive multiple of "
                f"{WIDTH_MULTIPLE}"
            )


def check_dtypes(**dtypes: torch.dtype | None) -> None:
    for name, dtype in dtypes.items():
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"tilemoe: {name} is {dtype}, expected float32, bfloat16 or float16")


def check_default_dtype(device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Rejects float32 parameters on a GPU unless the caller chose float32: there forward supports
    them only if something casts them first."""
    if dtype is not None or torch.get_default_dtype() != torch.float32:
        return
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type == "cuda":
        raise ValueError(
            f"tilemoe: dtype is None, so the parameters on {where} would be float32, but tilemoe "
            "on a GPU computes in bfloat16 and float16: pass dtype=torch.bfloat16, or "
            "dtype=torch.float32 for parameters that FSDP's MixedPrecisionPolicy or torch.autocast "
            "casts"
        )


def check_losses(return_aux: bool, balance_coefficient: float, z_coefficient: float) -> None:
    if not return_aux and (balance_coefficient or z_coefficient):
        raise ValueError(
            f"tilemoe: balance_coefficient is {balance_coefficient} and z_coefficient "
            f"{z_coefficient}, but return_aux=False returns no aux.loss: pass return_aux=True and "
            "add aux.loss to the loss of the task"
        )


def check_selection_bias(scoring: str) -> None:
    if scoring not in _checks.SIGMOIDS:
        raise ValueError(
            f"tilemoe: scoring is {scoring!r}, but only sigmoid scorings support a selection bias"
        )


def check_lora(rank: Any, alpha: float | None) -> tuple[tuple[int, int], tuple[float, float]]:
    """The ranks of the adapters of W1 and of W2, and their scales."""
    ranks = rank if isinstance(rank, tuple) else (rank, rank)
    if len(ranks) != 2 or not all(type(r) is int and 0 <= r <= MAX_RANK for r in ranks):
        raise ValueError(f"tilemoe: lora_rank is {rank!r}, expected 1 to {MAX_RANK}, or two ranks")
    if not any(ranks):
        raise ValueError(f"tilemoe: lora_rank is {rank!r}: the layer has no adapter")
    of_W1, of_W2 = (1.0 if alpha is None or r == 0 else alpha / r for r in ranks)
    return ranks, (of_W1, of_W2)
