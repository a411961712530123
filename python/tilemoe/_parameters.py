"""Check the sizes and dtypes of a module's parameters, and its losses.

Each error names the argument that is wrong.
"""

from typing import Any

import torch

from . import _checks
from ._layout import WIDTH_MULTIPLE
from .lora import MAX_RANK


def size_of(letter: str, by_letter: int | None, name: str, by_name: int | None) -> int:
    """Return the size, given by its symbol or by its name."""
    if (by_letter is None) == (by_name is None):
        seen = "neither is" if by_name is None else "both are"
        raise TypeError(f"MoE requires {letter} or {name}, but {seen} given")
    size = by_letter if by_letter is not None else by_name
    _checks.integer(letter if by_letter is not None else name, size)
    assert size is not None
    return size


def check_sizes(d: int, n: int, E: int, K: int, shared: int | None) -> None:
    if not 1 <= K <= E:
        raise ValueError(f"K must be in [1, {E}] for E = {E}, got {K}")
    widths = {"d": d, "n": n}
    if shared:
        _checks.integer("shared_intermediate_size", shared)
        widths["shared_intermediate_size"] = shared
    for name, width in widths.items():
        if width < 1 or width % WIDTH_MULTIPLE:
            raise ValueError(f"{name} must be a positive multiple of {WIDTH_MULTIPLE}, got {width}")


def check_dtypes(**dtypes: torch.dtype | None) -> None:
    for name, dtype in dtypes.items():
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} must be float32, bfloat16 or float16, got {dtype}")


def check_default_dtype(device: torch.device | str | int | None, dtype: torch.dtype | None) -> None:
    """Reject float32 parameters on a GPU unless the caller chose float32.

    On a GPU forward supports float32 parameters only if FSDP or autocast casts them first.
    """
    if dtype is not None or torch.get_default_dtype() != torch.float32:
        return
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type == "cuda":
        raise ValueError(
            f"dtype is required on {where}, which computes in bfloat16 and float16, and "
            "the default dtype is float32; pass dtype=torch.bfloat16, or "
            "dtype=torch.float32 for parameters that FSDP's MixedPrecisionPolicy or "
            "torch.autocast casts"
        )


def check_losses(return_aux: bool, balance_coefficient: float, z_coefficient: float) -> None:
    if not return_aux and (balance_coefficient or z_coefficient):
        raise ValueError(
            f"balance_coefficient={balance_coefficient} and z_coefficient={z_coefficient} "
            "require return_aux=True, which returns aux.loss; pass return_aux=True and "
            "add aux.loss to the loss of the task"
        )


def check_selection_bias(scoring: str) -> None:
    if scoring not in _checks.SIGMOIDS:
        raise ValueError(f"selection_bias requires a sigmoid scoring, got scoring={scoring!r}")


def check_lora(rank: Any, alpha: float | None) -> tuple[tuple[int, int], tuple[float, float]]:
    """Return the ranks of the adapters of W1 and of W2, and their scales."""
    ranks = rank if isinstance(rank, tuple) else (rank, rank)
    if len(ranks) != 2 or not all(type(r) is int and 0 <= r <= MAX_RANK for r in ranks):
        raise ValueError(
            f"lora_rank must be an int in [1, {MAX_RANK}] or a pair of ranks, got {rank!r}"
        )
    if not any(ranks):
        raise ValueError(f"lora_rank must have a rank above 0, got {rank!r}")
    of_W1, of_W2 = (1.0 if alpha is None or r == 0 else alpha / r for r in ranks)
    return ranks, (of_W1, of_W2)
