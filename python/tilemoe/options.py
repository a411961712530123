"""The options of the layer: name, default, meaning, check, and place in what operators take. This
module imports no torch.

`Options` has each option once. A function takes those of its TypedDict below and makes one Options
of them (_signatures.py); its signature and docstring show their defaults and texts. `python -m
tilemoe.options` prints the table of docs/pytorch.md.

An option that operators read has a place in RULE, NUMBERS or REALS, which are in the order of the
fields; bindings/torch/options.inc is the same order in C++."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypedDict, Union, get_args, get_type_hints

from . import _checks

Activation = Literal[  # by their numbers in tilemoe.h, as all literals that operators read
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
Dispatch = Literal["all_gather", "pull", "auto"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
GATED = tuple(name for name in ACTIVATIONS if "glu" in name)  # gated linear units
SCORINGS: tuple[str, ...] = get_args(Scoring)

TOP_K, GENERAL, ROUNDED, GROUPED = range(4)  # kinds of routing, the first number of a rule
SCORES_GIVEN = -1  # in place of a scoring: backward returns the gradient of the scores themselves


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
    """A field of Options. pack: the list in which operators read it; check: raises for a wrong
    value, in addition to the check of a Literal; older: the name of the version before."""
    how = dict(doc=" ".join(doc.split()), pack=pack, check=check, older=older)
    return dataclasses.field(default=default, metadata=how)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one call. Raises a ValueError or a TypeError that names the option that has a
    wrong value, or that does not go with another."""

    K: int | None = option(None, "experts that each token chooses by its logits.", pack="rule")
    scoring: Scoring = option(
        "softmax_over_chosen",
        """scores from logits: "softmax_over_chosen", the softmax of the K logits;
        "softmax_over_all", of all logits; "softmax_renormalized", the same divided by its sum over
        the K experts; "sigmoid"; or "sigmoid_renormalized".""",
        pack="rule",
    )
    n_group: int = option(
        1,
        """the experts form this many groups of consecutive experts, at most 32, and a token
        chooses its K experts from its `topk_group` best groups. 1: no groups.""",
        pack="rule",
        check=_checks.integer,
    )
    topk_group: int = option(
        1, "see `n_group`; these groups must have at least K experts.", pack="rule",
        check=_checks.integer,
    )  # fmt: skip
    group_score: GroupScore | None = option(
        None,
        """score of a group: "top2_sum", the sum of its two best experts' sigmoid + selection bias
        (DeepSeek-V3), only for the sigmoid scorings; or "max", its best expert's score
        (DeepSeek-V2). None: "top2_sum" for the sigmoid scorings, "max" for the others.""",
        pack="rule",
    )
    routed_scaling_factor: float = option(
        1.0, "every score is multiplied by it, after any renormalisation.", pack="reals",
        check=_checks.factor,
    )  # fmt: skip
    rounding: Rounding | None = option(
        None,
        """makes each expert's count of tokens a multiple of `m`, for training: "nearest", "up",
        "down", "stochastic" or "balanced". It requires a softmax scoring over the chosen experts,
        without groups and without a factor. `MoE` rounds in training mode only.""",
    )
    m: int = option(128, "see `rounding`; the tile of the GPU's GEMMs is 128.")
    rounding_tokens: int | None = option(
        None,
        """round each group of this many tokens separately, as batches of that size; T must be a
        multiple of it. Group i of G draws from the offset `offset * G + i`. None: all tokens of a
        call together.""",
    )
    activation: Activation = option(
        "swiglu",
        f"""of the experts: gated, {_quoted(GATED)}; not gated,
        {_quoted(tuple(name for name in ACTIVATIONS if name not in GATED))}; formulas:
        include/tilemoe/activations.inc.""",
        pack="numbers",
    )
    gate_layout: GateLayout = option(
        "concatenated",
        """where W1's gate and up rows are: "concatenated", "interleaved" or "split", the up rows
        in W1_up.""",
        pack="numbers",
    )
    clamp: float = option(
        0.0,
        """gpt-oss's form of swiglu: upper bound of the gate and of the magnitude of the up value;
        0: none.""",
        pack="reals",
        check=_checks.clamp,
    )
    alpha: float = option(
        0.0, "gpt-oss's form of swiglu: factor of the gate in the sigmoid; 0: 1.", pack="reals",
        check=_checks.finite,
    )  # fmt: skip
    up_shift: float = option(
        0.0, "gpt-oss's form of swiglu: added to the up value.", pack="reals",
        check=_checks.finite,
    )  # fmt: skip
    column_blocks: int = option(
        1,
        """compute the experts' outputs, and their inputs' gradients, in this many blocks of
        columns, each a multiple of 64, one after another: less memory for a little more time.""",
        pack="numbers",
        check=_checks.blocks,
    )
    weight_blocks: int = option(
        1,
        """dequantise quantised weights in this many blocks of experts, each used before the next
        one: the 16-bit copy of one block exists at a time, for a little more time. The bits are the
        same.""",
        pack="numbers",
        check=_checks.blocks,
    )
    overwrite_H: bool | None = option(
        None,
        """whether backward writes dH, its largest intermediate, over H, the largest tensor that
        forward kept. None: if nothing reads H again, so not under `retain_graph`, nor while
        torch.compile traces it, nor in a CUDA graph that does not contain forward. True: always;
        a second backward is then an error. False: never.""",
    )
    accumulate: bool = option(
        True, "backward adds to the memory of `weight_grad_out`; False: it writes it."
    )
    capacity: int | None = option(
        None,
        """maximum number of (token, expert) pairs, which sets the size of H and of the workspaces,
        if many ids are known to be outside [0, E): for a part of a layer whose experts are spread
        over GPUs, for instance. Pairs past it, the last tokens of the highest experts, are counted
        and have no row. None: all pairs fit. Not with rounding.""",
        check=_checks.capacity,
    )
    on_overflow: OnOverflow = option(
        "nan",
        """the output if pairs did not fit into `capacity`, or into the memory of a rank, which
        only a `capacity_factor` allows: "nan", all of it is NaN, on all ranks; "drop", these pairs
        are left out, as if their ids were outside [0, E).""",
    )
    capacity_factor: float | None = option(
        None,
        """None: a rank has memory for every pair that its experts can receive, so no routing loses
        one. A number saves memory: the capacity is this factor times the mean, which is T * K
        pairs if every rank has T tokens. One rank has T * K.""",
        check=_checks.capacity_factor,
    )
    keep_gathered: bool = option(
        False, "keep all ranks' rows for backward, which otherwise gathers them again."
    )
    overlap: bool = option(
        True,
        """in backward, gather X while the GEMMs run, and send dX back while dW1's run. False: all
        steps run one after another. The bits are the same. Older name: `beside=`.""",
        older="beside",
    )
    chunks: Chunks = option(
        1,
        """number of collectives in which X travels, each overlapped with the GEMMs of the chunk
        before, and O likewise; in backward dO, while `overlap` applies to X and dX. 1: one
        collective for each. O, dX and the gradients of logits and scores have the same bits; the
        weights' gradients are sums in another order of the tokens, which is also that of
        `on_overflow`. "auto": chosen by a model of the time, from the sizes alone. With rounding
        and with "pull" it is 1.""",
        check=_checks.chunks,
    )
    dispatch: Dispatch = option(
        "all_gather",
        """"all_gather": every token's row goes to every rank; "pull": each rank reads the rows of
        the tokens with an expert there, from symmetric memory, which GPUs of one host have (on the
        CPU they are sent); "auto": chosen by the model, and all_gather if the processes are not
        all on one host. All outputs and gradients have the same bits. With rounding it is
        "all_gather".""",
    )

    # As operators take them. Nobody writes to these lists. They are no fields: FSDP makes a
    # dataclass among a module's arguments anew, of its fields.
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
        """The number by which operators know the option's value."""
        value = _checks.group_score(self) if name == "group_score" else getattr(self, name)
        if name in LITERALS:
            return LITERALS[name].index(value)
        return 0 if value is None else value


FIELDS = {f.name: f for f in dataclasses.fields(Options)}
DEFAULTS = {n: f.default for n, f in FIELDS.items()}
TYPES = {n: kind for n, kind in get_type_hints(Options).items() if n in FIELDS}
OLDER = {f.metadata["older"]: n for n, f in FIELDS.items() if f.metadata["older"]}
_CHECKS = [(n, f.metadata["check"]) for n, f in FIELDS.items() if f.metadata["check"]]


def _literals(kind: Any) -> tuple[str, ...]:  # of a Literal, or of a Literal or None
    return tuple(v for arg in get_args(kind) for v in (get_args(arg) or (arg,)) if type(v) is str)


# The values of options that have no others but None.
LITERALS = {n: _literals(kind) for n, kind in TYPES.items() if _literals(kind) and n != "chunks"}


def _packed(pack: str) -> tuple[str, ...]:
    return tuple(n for n, f in FIELDS.items() if f.metadata["pack"] == pack)


# The lists `rule`, `numbers`, which begins with it, and `reals` of operators.
RULE = ("kind", *_packed("rule"))
NUMBERS = (*RULE, *_packed("numbers"))
REALS = _packed("reals")
# Positions in them, At.SCORING for instance.
At: Any = type("At", (), {n.upper(): at for of in (NUMBERS, REALS) for at, n in enumerate(of)})


# ---------------------------------------------------------------- the options of each function


class OfExperts(TypedDict, total=False):
    """The modules Experts and SharedExperts: the function of an expert."""

    activation: Activation
    clamp: float
    alpha: float
    up_shift: float


class OfScores(TypedDict, total=False):
    """scores_at"""

    scoring: Scoring
    routed_scaling_factor: float


class _Choice(OfScores, total=False):
    n_group: int
    topk_group: int
    group_score: GroupScore | None


class OfTopK(_Choice, total=False):
    """top_k"""


class _Blocks(TypedDict, total=False):
    column_blocks: int
    weight_blocks: int
    overwrite_H: bool | None


class OfRounding(TypedDict, total=False):
    """rounded_router"""

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


class OfRows(_Rows, total=False):
    """moe_general and grouped_experts"""

    accumulate: bool


class OfMoe(OfRows, _Choice, _Rounded, total=False):
    """moe"""

    K: int | None
    capacity: int | None
    on_overflow: OnOverflow


class OfRanks(_Rows, _Choice, _Rounded, _Sizes, total=False):
    """expert_parallel.moe"""

    K: int | None
    on_overflow: OnOverflow


class OfModule(OfExperts, _Choice, _Rounded, _Blocks, _Sizes, total=False):
    """MoE"""

    on_overflow: OnOverflow


class OfPlan(_Sizes, total=False):
    """expert_parallel.plan"""

    activation: Activation
    column_blocks: int


if __name__ == "__main__":
    from ._options_table import main

    main()
