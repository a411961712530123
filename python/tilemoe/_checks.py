"""Checks of options: of one, by its name and value, and of several together. Each error names the
option that does not fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import Options

SIGMOIDS = ("sigmoid", "sigmoid_renormalized")
# Token rounding divides a chosen expert's probability by the sum over the token's chosen experts;
# so do these scorings.
_ROUNDED_SCORINGS = ("softmax_over_chosen", "softmax_renormalized")
_MAX_GROUPS = 32
_ANY = "; tilemoe.gathered_mm and tilemoe.combine_mm take any function between them"
_MIN_FACTOR = 2.0**-126  # float32's smallest normal number: the library reads 0 as 1


def number(name: str, names: tuple[str, ...], value: Any) -> int:
    """The number of the value in an enumeration."""
    if value not in names:
        expected = ", ".join(names)
        more = _ANY if name == "activation" else ""
        raise ValueError(f"tilemoe: {name} is {value!r}, expected one of {expected}{more}")
    return names.index(value)


def integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise TypeError(f"tilemoe: {name} is {value!r}, expected an int")


def factor(name: str, value: float) -> None:
    if not _MIN_FACTOR <= value < math.inf:
        raise ValueError(f"tilemoe: {name} is {value}, expected a finite number above 0")


# torch.compile traces comparisons of a number that it does not know, but not math.isfinite.
def finite(name: str, value: float) -> None:
    if not -math.inf < value < math.inf:
        raise ValueError(f"tilemoe: {name} is {value}, expected a finite number")


def clamp(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"tilemoe: {name} is {value}, expected a finite number of at least 0")


def blocks(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"tilemoe: {name} is {value}, expected at least 1")


def capacity(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"tilemoe: {name} is {value!r}, expected an int of at least 1")


def capacity_factor(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"tilemoe: {name} is {value}, expected None or a number above 0")


def chunks(name: str, value: Any) -> None:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"tilemoe: {name} is {value!r}, expected 'auto' or an int of at least 1")


# ---------------------------------------------------------------- of several options


def together(options: Options) -> None:
    """Checks the options that do not go with every value of another."""
    for name in ("clamp", "alpha", "up_shift"):
        value = getattr(options, name)
        if value and options.activation != "swiglu":
            raise ValueError(
                f"tilemoe: {name} is {value} and activation {options.activation!r}, but only "
                "swiglu supports it"
            )
    if options.rounding is not None:
        number("scoring under token rounding", _ROUNDED_SCORINGS, options.scoring)
        if options.m < 1:
            raise ValueError(f"tilemoe: m is {options.m}, expected at least 1")
        sentence = "rounding is {} and {{name}} {{value}}, which token rounding does not support"
        plain_choice(options, sentence.format(repr(options.rounding)))
        if options.capacity is not None:
            raise ValueError(
                f"tilemoe: capacity is {options.capacity} and rounding {options.rounding!r}, which "
                "sets its own"
            )
    if options.dispatch == "pull" and options.chunks not in (1, "auto"):
        raise ValueError(
            f"tilemoe: chunks is {options.chunks}, but dispatch is 'pull', which has one chunk"
        )


def plain_choice(options: Options, sentence: str) -> None:
    """Checks that the choice has no groups, and that no factor scales the scores. sentence: of the
    error, with places for the option's name and value."""
    plain = dict(n_group=1, topk_group=1, group_score=None, routed_scaling_factor=1.0)
    for name, default in plain.items():
        value = getattr(options, name)
        if value != default:
            raise ValueError("tilemoe: " + sentence.format(name=name, value=repr(value)))


def group_score(options: Options) -> str:
    """The score of a group, by default that of DeepSeek-V3 or V2; it is not read without groups."""
    if options.group_score is not None:
        return options.group_score
    without = options.n_group == 1 and options.topk_group == 1
    return "top2_sum" if without or options.scoring in SIGMOIDS else "max"


def groups(options: Options, E: int, K: int) -> None:
    """Checks the groups for a choice of K among E experts."""
    n_group, topk_group, score = options.n_group, options.topk_group, group_score(options)
    if n_group == 1 and topk_group == 1:
        return

    def refuse(sentence: str) -> None:
        raise ValueError(f"tilemoe: {sentence}")

    if not 1 <= n_group <= _MAX_GROUPS or E % n_group:
        refuse(
            f"n_group is {n_group}, expected 1 to {_MAX_GROUPS} groups that divide E = {E} experts"
        )
    width = E // n_group
    if not 1 <= topk_group <= n_group:
        refuse(f"topk_group is {topk_group}, expected 1 to n_group = {n_group}")
    if topk_group * width < K:
        refuse(
            f"topk_group is {topk_group}, but {topk_group} groups of {width} experts have fewer "
            f"than K = {K}"
        )
    if score == "top2_sum" and options.scoring not in SIGMOIDS:
        refuse(f"group_score is top2_sum, which requires a sigmoid scoring, not {options.scoring}")
    if score == "top2_sum" and width < 2:
        refuse(f"group_score is top2_sum, but n_group is {n_group}: groups of one expert")
