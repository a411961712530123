"""Check options: each alone, by name and value, and several together.

Each error names the option that is wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import Options

SIGMOIDS = ("sigmoid", "sigmoid_renormalized")
# Token rounding divides the probability of a chosen expert by the sum over the token's chosen
# experts, as these scorings do.
_ROUNDED_SCORINGS = ("softmax_over_chosen", "softmax_renormalized")
_MAX_GROUPS = 32
_ANY = "; tilemoe.gathered_mm and tilemoe.combine_mm support any function between them"
ADAPTERS_IN_FP8 = "recipe='fp8' does not support adapters; use recipe='fp8_forward' with them"
_MIN_FACTOR = 2.0**-126  # smallest normal number of float32: the library reads 0 as 1


def number(name: str, names: tuple[str, ...], value: Any) -> int:
    """Return the number of the value in an enumeration."""
    if value not in names:
        expected = ", ".join(names)
        more = _ANY if name == "activation" else ""
        raise ValueError(f"{name} must be one of {expected}, got {value!r}{more}")
    return names.index(value)


def integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise TypeError(f"{name} must be an int, got {value!r}")


def optional_integer(name: str, value: Any) -> None:
    if value is not None:
        integer(name, value)


def _real(name: str, value: Any) -> None:
    is_real = isinstance(value, (int, float)) or hasattr(value, "__float__")
    if isinstance(value, bool) or not is_real:
        raise TypeError(f"{name} must be a number, got {value!r}")


def factor(name: str, value: float) -> None:
    _real(name, value)
    if not _MIN_FACTOR <= value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value}")


# torch.compile can trace comparisons of a symbolic number, but not math.isfinite.
def finite(name: str, value: float) -> None:
    _real(name, value)
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be a finite number, got {value}")


def clamp(name: str, value: float) -> None:
    _real(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")


def blocks(name: str, value: int) -> None:
    integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def capacity(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")


def capacity_factor(name: str, value: float | None) -> None:
    if value is None:
        return
    _real(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be None or a finite number > 0, got {value}")


def chunks(name: str, value: Any) -> None:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be 'auto' or an int >= 1, got {value!r}")


# ---------------------------------------------------------------- of several options


def together(options: Options) -> None:
    """Check the options that cannot be combined with every value of another option."""
    for name in ("clamp", "alpha", "up_shift"):
        value = getattr(options, name)
        if value and options.activation != "swiglu":
            raise ValueError(
                f"{name} requires activation='swiglu', got {name}={value} and "
                f"activation={options.activation!r}"
            )
    if options.save_h is not None and options.recipe not in ("fp8", "auto"):
        raise ValueError(
            f"save_h={options.save_h!r} requires recipe='fp8' or 'auto', got {options.recipe!r}"
        )
    if options.rounding is not None:
        number("scoring with token rounding", _ROUNDED_SCORINGS, options.scoring)
        if options.m < 1:
            raise ValueError(f"m must be >= 1, got {options.m}")
        sentence = "{{name}} must have its default with rounding={}, got {{value}}"
        plain_choice(options, sentence.format(repr(options.rounding)))
        if options.capacity is not None:
            raise ValueError(
                f"capacity must be None with rounding={options.rounding!r}, got {options.capacity}"
            )
    if options.dispatch == "pull" and options.chunks not in (1, "auto"):
        raise ValueError(f"chunks must be 1 or 'auto' with dispatch='pull', got {options.chunks}")


def plain_choice(options: Options, sentence: str) -> None:
    """Check that the choice has no groups and no factor of the scores.

    Args:
        options: Options of the call.
        sentence: Message, with places for the name and the value of an option.
    """
    plain = dict(n_group=1, topk_group=1, group_score=None, routed_scaling_factor=1.0)
    for name, default in plain.items():
        value = getattr(options, name)
        if value != default:
            raise ValueError(sentence.format(name=name, value=repr(value)))


def group_score(options: Options) -> str:
    """Return the score of a group, by default that of DeepSeek-V3 or V2."""
    if options.group_score is not None:
        return options.group_score
    without = options.n_group == 1 and options.topk_group == 1
    return "top2_sum" if without or options.scoring in SIGMOIDS else "max"


def groups(options: Options, E: int, K: int) -> None:
    """Check the groups for a choice of K among E experts."""
    n_group, topk_group, score = options.n_group, options.topk_group, group_score(options)
    if n_group == 1 and topk_group == 1:
        return

    def refuse(sentence: str) -> None:
        raise ValueError(sentence)

    if not 1 <= n_group <= _MAX_GROUPS or E % n_group:
        refuse(f"n_group must be in [1, {_MAX_GROUPS}] and divide E = {E}, got {n_group}")
    width = E // n_group
    if not 1 <= topk_group <= n_group:
        refuse(f"topk_group must be in [1, {n_group}] for n_group = {n_group}, got {topk_group}")
    if topk_group * width < K:
        refuse(
            f"topk_group is {topk_group}, but {topk_group} groups of {width} experts have "
            f"fewer than K = {K} experts"
        )
    if score == "top2_sum" and options.scoring not in SIGMOIDS:
        refuse(
            f"group_score='top2_sum' requires a sigmoid scoring, got scoring={options.scoring!r}"
        )
    if score == "top2_sum" and width < 2:
        refuse(
            "group_score='top2_sum' requires groups of at least two experts, got n_group = "
            f"{n_group} for E = {E}"
        )
