"""Checks of the arguments of MoE's constructor; each error names the argument that does not fit."""

import math

import torch

from . import _rules

# Token rounding divides a chosen expert's probability by the sum over the token's chosen experts;
# so do these scorings.
_ROUNDED_SCORINGS = ("softmax_over_chosen", "softmax_renormalized")


def size_of(letter: str, by_letter: int | None, name: str, by_name: int | None) -> int:
    """The size, given by its letter or by its name."""
    if (by_letter is None) == (by_name is None):
        seen = "neither is" if by_name is None else "both are"
        raise TypeError(f"tilemoe: MoE requires {letter} or {name}, but {seen} given")
    size = by_letter if by_letter is not None else by_name
    _check_int(letter if by_letter is not None else name, size)
    assert size is not None
    return size


def _check_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"tilemoe: {name} is {value!r}, expected an int")


def check_sizes(d: int, n: int, E: int, K: int, shared: int | None) -> None:
    if not 1 <= K <= E:
        raise ValueError(f"tilemoe: K is {K}, expected 1 to E = {E}")
    widths = {"d": d, "n": n}
    if shared:
        _check_int("shared_intermediate_size", shared)
        widths["shared_intermediate_size"] = shared
    for name, width in widths.items():
        if width < 1 or width % _rules.WIDTH_MULTIPLE:
            raise ValueError(
                f"tilemoe: {name} is {width}, expected a positive multiple of "
                f"{_rules.WIDTH_MULTIPLE}"
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


def check_activation(activation: str, clamp: float, alpha: float, up_shift: float) -> None:
    _rules.number("activation", _rules.ACTIVATIONS, activation)
    for name, value in (("clamp", clamp), ("alpha", alpha), ("up_shift", up_shift)):
        if value and activation != "swiglu":
            raise ValueError(
                f"tilemoe: {name} is {value} and activation {activation!r}, but only swiglu "
                "supports it"
            )
        if not math.isfinite(value) or name == "clamp" and value < 0:
            bound = " of at least 0" if name == "clamp" else ""
            raise ValueError(f"tilemoe: {name} is {value}, expected a finite number{bound}")


def check_scoring(scoring: str, selection_bias: bool, rounding: str | None, m: int) -> None:
    _rules.number("scoring", _rules.SCORINGS, scoring)
    if selection_bias and scoring not in _rules.SIGMOIDS:
        raise ValueError(
            f"tilemoe: scoring is {scoring!r}, but only sigmoid scorings support a selection bias"
        )
    if rounding is None:
        return
    _rules.number("rounding", _rules.ROUNDINGS, rounding)
    _rules.number("scoring under token rounding", _ROUNDED_SCORINGS, scoring)
    if m < 1:
        raise ValueError(f"tilemoe: m is {m}, expected at least 1")


def check_groups(
    E: int,
    K: int,
    scoring: str,
    rounding: str | None,
    n_group: int,
    topk_group: int,
    group_score: str | None,
    routed_scaling_factor: float,
) -> None:
    """Checks the options of the group-limited choice, and the factor on the scores."""
    _check_int("n_group", n_group)
    _check_int("topk_group", topk_group)
    _rules.rule(E, K, scoring, n_group, topk_group, group_score)
    _rules.check_factor(routed_scaling_factor)
    for name, value in (("n_group", n_group), ("routed_scaling_factor", routed_scaling_factor)):
        if rounding is not None and value != 1:
            raise ValueError(
                f"tilemoe: rounding is {rounding!r} and {name} {value}, which token rounding does "
                "not support"
            )
