"""Define the options of the layer: name, default, meaning, check and place in operators' lists.

This module imports no torch. `Options` has each option once. A function accepts those of its
TypedDict below and makes one Options of them (_signatures.py); its signature and docstring show
their defaults and texts. `python -m tilemoe.options` prints the table of docs/pytorch.md.

An option that operators read has a place in RULE, NUMBERS or REALS, which are in the order of the
fields; bindings/torch/options.inc has the same order in C++.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypedDict, Union, get_args, get_type_hints

from . import _checks

Activation = Literal[  # in the order of tilemoe.h, like all literals that operators read
    "swiglu", "geglu", "geglu_tanh", "reglu",
    "silu", "gelu", "gelu_tanh", "relu", "relu_squared", "identity", "glu", "situ_glu",
]  # fmt: skip
GateLayout = Literal["concatenated", "interleaved", "split"]
Scoring = Literal[
    "softmax_over_chosen", "softmax_over_all", "softmax_renormalized",
    "sigmoid", "sigmoid_renormalized",
]  # fmt: skip
GroupScore = Literal["top2_sum", "max"]
Rounding = Literal["nearest", "up", "down", "stochastic", "balanced"]
OnOverflow = Literal["nan", "drop"]
Chunks = Union[int, Literal["auto"]]
Recipe = Literal["bf16", "fp8", "fp8_forward", "auto"]  # "auto" is resolved before operators
SaveH = Literal["fp8"]
Dispatch = Literal["all_gather", "pull", "auto"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
GATED = tuple(name for name in ACTIVATIONS if "glu" in name)  # gated linear units
SCORINGS: tuple[str, ...] = get_args(Scoring)
FP8_RECIPES = ("fp8", "fp8_forward")

TOP_K, GENERAL, ROUNDED, GROUPED = range(4)  # kinds of routing, the first number of a rule
SCORES_GIVEN = -1  # used instead of a scoring: backward returns the gradient of the scores


def _quoted(names: tuple[str, ...]) -> str:
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}"


def option(
    default: Any,
    doc: str,
    *,
    pack: str | None = None,
    check: Callable[[str, Any], None] | None = None,
    older: str | None = None,
) -> Any:
    """Declare a field of Options.

    Args:
        default: Default of the option.
        doc: Text for docstrings and for the table.
        pack: List in which operators read the option.
        check: Function that raises for a wrong value, in addition to the check of a Literal.
        older: Name of the option in the previous version.
    """
    how = dict(doc=" ".join(doc.split()), pack=pack, check=check, older=older)
    return dataclasses.field(default=default, metadata=how)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one call.

    Every option is also a keyword of the functions that support it and of `MoE`. `python -m
    tilemoe.options` prints a table of the options with their defaults and meanings.

    Raises:
        ValueError: An option has a wrong value, or two options cannot be combined.
        TypeError: An option has a value of a wrong type.
    """

    K: int | None = option(
        None, "Experts per token, chosen by the logits.", pack="rule",
        check=_checks.optional_integer,
    )  # fmt: skip
    scoring: Scoring = option(
        "softmax_over_chosen",
        """function from logits to scores: "softmax_over_chosen" (softmax of the K logits),
        "softmax_over_all" (softmax of all logits), "softmax_renormalized" (softmax of all logits,
        divided by its sum over the K experts), "sigmoid" or "sigmoid_renormalized".""",
        pack="rule",
    )
    n_group: int = option(
        1,
        """Number of groups of consecutive experts, in [1, 32]. A token chooses its K experts from
        its `topk_group` best groups. 1: no groups.""",
        pack="rule",
        check=_checks.integer,
    )
    topk_group: int = option(
        1, "Groups from which a token chooses; these groups must have at least K experts.", pack="rule",
        check=_checks.integer,
    )  # fmt: skip
    group_score: GroupScore | None = option(
        None,
        """Score of a group: "top2_sum" (DeepSeek-V3: sum of sigmoid + selection bias over its two
        best experts; requires a sigmoid scoring) or "max" (DeepSeek-V2: score of its best expert).
        None: "top2_sum" for sigmoid scorings, "max" for the others.""",
        pack="rule",
    )
    routed_scaling_factor: float = option(
        1.0, "Factor of every score, applied after any renormalisation.", pack="reals",
        check=_checks.factor,
    )  # fmt: skip
    rounding: Rounding | None = option(
        None,
        """Token rounding, for training: make the number of tokens of each expert a multiple of `m`
        with "nearest", "up", "down", "stochastic" or "balanced". Requires scoring
        "softmax_over_chosen" or "softmax_renormalized" without groups and without a factor. `MoE`
        rounds in training mode only.""",
    )
    m: int = option(
        128,
        "Multiple for token rounding; the tile of the GPU's GEMMs is 128.",
        check=_checks.integer,
    )
    rounding_tokens: int | None = option(
        None,
        """Number of tokens that are rounded together; T must be a multiple of it. Group i of G
        uses the offset `offset * G + i`. None: all tokens of a call are rounded together.""",
    )
    activation: Activation = option(
        "swiglu",
        f"""Activation of the experts, with a gate: {_quoted(GATED)}; without a gate:
        {_quoted(tuple(name for name in ACTIVATIONS if name not in GATED))}. The formulas are in
        include/tilemoe/activations.inc.""",
        pack="numbers",
    )
    gate_layout: GateLayout = option(
        "concatenated",
        """Layout of the gate and up rows of W1: "concatenated", "interleaved", or "split", with the
        up rows in W1_up.""",
        pack="numbers",
    )
    clamp: float = option(
        0.0,
        """For the swiglu of gpt-oss: upper bound of the gate and of the magnitude of the up value;
        0: no bound.""",
        pack="reals",
        check=_checks.clamp,
    )
    alpha: float = option(
        0.0, "For the swiglu of gpt-oss: factor of the gate in the sigmoid; 0: 1.", pack="reals",
        check=_checks.finite,
    )  # fmt: skip
    up_shift: float = option(
        0.0, "For the swiglu of gpt-oss: value added to the up value.", pack="reals",
        check=_checks.finite,
    )  # fmt: skip
    column_blocks: int = option(
        1,
        """Number of column blocks in which the experts' outputs and input gradients are computed,
        one after another, each a multiple of 64 columns: less memory, slightly slower.""",
        pack="numbers",
        check=_checks.blocks,
    )
    weight_blocks: int = option(
        1,
        """Number of blocks of experts in which quantised weights are dequantised, one after
        another: only one block has a 16-bit copy at a time, slightly slower, with the same
        bits.""",
        pack="numbers",
        check=_checks.blocks,
    )
    recipe: Recipe = option(
        "bf16",
        """How the experts' GEMMs compute. "fp8": forward and the gradients of the activations and
        of x multiply E4M3 codes; the weights' gradients remain in 16 bits. "fp8_forward": only
        forward multiplies codes, and backward dequantises the weights. The weights are `Fp8Weight` or
        `QuantizedExperts` of the format fp8; `MoE` makes the codes of its parameters. "auto": "fp8"
        or "bf16", by `choose_recipe`. Both FP8 recipes require an H100 or H200, or the CPU backend;
        a gate; d and n multiples of 16; gate_layout "split", or "concatenated" with n a multiple of
        128.""",
        pack="numbers",
    )
    save_h: SaveH | None = option(
        None,
        """Format of H, the largest tensor that is saved for backward. "fp8": E4M3 codes with a scale
        per 128 columns of a row, about half of the bytes; backward reads H with the error of E4M3.
        Requires recipe "fp8", or "auto", with which it applies to calls that choose "fp8". None: x's
        dtype.""",
        pack="numbers",
    )
    overwrite_H: bool | None = option(
        None,
        """Write dH, the largest intermediate of backward, over H, the largest tensor that is saved
        for backward. None: only if nothing reads H again, so not with `retain_graph`, not while
        torch.compile traces backward, and not in a CUDA graph that does not contain forward. True:
        always; a second backward then raises an error. False: never.""",
    )
    accumulate: bool = option(
        True, "Add the gradients to the memory of `weight_grad_out`. False: overwrite it."
    )
    capacity: int | None = option(
        None,
        """Maximum number of (token, expert) pairs, which sets the size of H and of the workspaces.
        Set it if many ids are outside [0, E), for example in one shard of a layer whose experts are
        on several GPUs. Pairs past the capacity, the last tokens of the highest experts, are
        counted and have no row. None: every pair has a row. Not supported with rounding.""",
        check=_checks.capacity,
    )
    on_overflow: OnOverflow = option(
        "nan",
        """Behaviour if pairs exceed `capacity`, or the memory of a rank with `capacity_factor`:
        "nan": the whole output is NaN, on all ranks. "drop": these pairs are skipped, as if their
        ids were outside [0, E).""",
    )
    capacity_factor: float | None = option(
        None,
        """Capacity of a rank, as a multiple of the mean number of pairs, which is T * K if every
        rank has T tokens; saves memory. None: a rank has memory for every pair that its experts can
        receive, so that no pair is lost. On one rank the capacity is T * K.""",
        check=_checks.capacity_factor,
    )
    keep_gathered: bool = option(
        False, "Save the rows of all ranks for backward, instead of gathering them again."
    )
    overlap: bool = option(
        True,
        """In backward, overlap the gather of X and the transfer of dX with GEMMs. False: run all
        steps one after another. The bits are the same.""",
        older="beside",
    )
    chunks: Chunks = option(
        1,
        """Number of collectives for X, each overlapped with the GEMMs of the previous chunk; the
        same for O, and in backward for dO (`overlap` applies to X and dX). The bits of O, dX and
        the gradients of logits and scores do not depend on it; the weights' gradients are sums in
        another order of the tokens, and so is the order in which `on_overflow="drop"` drops them.
        "auto": chosen by a cost model from the sizes. With rounding it is 1; dispatch "pull"
        requires 1 or "auto".""",
        check=_checks.chunks,
    )
    dispatch: Dispatch = option(
        "all_gather",
        """"all_gather": every rank receives the rows of all tokens. "pull": each rank reads only
        the rows that its experts compute, from the symmetric memory of the GPUs of one host (the
        CPU backend sends them). "auto": chosen by the cost model; "all_gather" if the processes are
        on several hosts. All outputs and gradients have the same bits. With rounding
        "all_gather" is used.""",
    )

    # The lists as operators read them; nothing writes to them. They are not fields: FSDP rebuilds a
    # dataclass among a module's arguments from its fields.
    rule: ClassVar[list[int]]
    numbers: ClassVar[list[int]]
    reals: ClassVar[list[float]]

    def __post_init__(self) -> None:
        for name, choices in LITERALS.items():
            value = getattr(self, name)
            if value is not None or DEFAULTS[name] is not None:
                _checks.number(name, choices, value)
        for name, check in _CHECKS:
            check(name, getattr(self, name))
        _checks.together(self)
        numbers = [TOP_K, *[self._code(name) for name in NUMBERS[1:]]]
        object.__setattr__(self, "rule", numbers[: len(RULE)])
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "reals", [getattr(self, name) for name in REALS])

    def _code(self, name: str) -> int:
        """Return the number of the option's value in operators' lists."""
        value = _checks.group_score(self) if name == "group_score" else getattr(self, name)
        if name == "recipe" and value == "auto":
            return 0  # that of weights without codes
        if name == "save_h":
            return int(value == "fp8")  # tilemoe_format
        if name in LITERALS:
            return LITERALS[name].index(value)
        return 0 if value is None else value


FIELDS = {f.name: f for f in dataclasses.fields(Options)}
DEFAULTS = {n: f.default for n, f in FIELDS.items()}
TYPES = {n: kind for n, kind in get_type_hints(Options).items() if n in FIELDS}
OLDER = {f.metadata["older"]: n for n, f in FIELDS.items() if f.metadata["older"]}
_CHECKS = [(n, f.metadata["check"]) for n, f in FIELDS.items() if f.metadata["check"]]


def _literals(kind: Any) -> tuple[str, ...]:  # values of a Literal, or of a Literal or None
    return tuple(v for arg in get_args(kind) for v in (get_args(arg) or (arg,)) if type(v) is str)


# Options whose only values are these and None.
LITERALS = {n: _literals(kind) for n, kind in TYPES.items() if _literals(kind) and n != "chunks"}


def _packed(pack: str) -> tuple[str, ...]:
    return tuple(n for n, f in FIELDS.items() if f.metadata["pack"] == pack)


# Lists of operators; `numbers` begins with `rule`.
RULE = ("kind", *_packed("rule"))
NUMBERS = (*RULE, *_packed("numbers"))
REALS = _packed("reals")
# Positions in these lists, for example At.SCORING.
At: Any = type("At", (), {n.upper(): at for of in (NUMBERS, REALS) for at, n in enumerate(of)})


# ---------------------------------------------------------------- the options of each function


class OfExperts(TypedDict, total=False):
    """Options of the modules Experts and SharedExperts: the function of an expert."""

    activation: Activation
    clamp: float
    alpha: float
    up_shift: float


class OfScores(TypedDict, total=False):
    """Options of scores_at."""

    scoring: Scoring
    routed_scaling_factor: float


class _Choice(OfScores, total=False):
    n_group: int
    topk_group: int
    group_score: GroupScore | None


class OfTopK(_Choice, total=False):
    """Options of top_k."""


class _Blocks(TypedDict, total=False):
    column_blocks: int
    weight_blocks: int
    overwrite_H: bool | None


class _Recipe(TypedDict, total=False):
    recipe: Recipe
    save_h: SaveH | None


class OfRounding(TypedDict, total=False):
    """Options of rounded_router."""

    m: int
    rounding_tokens: int | None


class _Rounded(OfRounding, total=False):
    rounding: Rounding | None


class _Sizes(TypedDict, total=False):
    capacity_factor: float | None
    keep_gathered: bool
    overlap: bool
    chunks: Chunks
    dispatch: Dispatch


class _Rows(OfExperts, _Blocks, total=False):
    gate_layout: GateLayout


class OfRows(_Rows, _Recipe, total=False):
    """Options of moe_general and grouped_experts."""

    accumulate: bool


class OfMoe(OfRows, _Choice, _Rounded, total=False):
    """Options of moe."""

    K: int | None
    capacity: int | None
    on_overflow: OnOverflow


class OfRanks(_Rows, _Recipe, _Choice, _Rounded, _Sizes, total=False):
    """Options of expert_parallel.moe."""

    K: int | None
    on_overflow: OnOverflow


class OfModule(OfExperts, _Choice, _Rounded, _Blocks, _Recipe, _Sizes, total=False):
    """Options of MoE."""

    on_overflow: OnOverflow


class OfPlan(_Recipe, _Sizes, total=False):
    """Options of expert_parallel.plan."""

    activation: Activation
    column_blocks: int


if __name__ == "__main__":
    from ._options_table import main

    main()
