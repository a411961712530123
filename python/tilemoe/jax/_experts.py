"""Define the layer in JAX: forward and backward of the experts as one custom_vjp."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import _checks
from .._signatures import Reader
from ..options import (
    ACTIVATIONS, GATED, GROUPED, LITERALS, TOP_K, Activation, At, GateLayout, GroupScore,
    OnOverflow, Options, Recipe, SaveH, Scoring,
)  # fmt: skip
from . import _fp8, _sharding
from ._fp8 import BF16, CODES, QUANTIZABLE, Fp8Weight
from ._lora import FACTORS, LoRA, Factors, factors_of
from ._router import choose
from ._shapes import (
    FLOATS, INTS, call, plan, require_array, require_shape, rows_of, shape_text,
)  # fmt: skip

if TYPE_CHECKING:
    from typing_extensions import Unpack

WEIGHTS = ("W1", "W1_up", "W2", "b1", "b1_up", "b2")
# Bits of gradients in the library, and the operands of these gradients.
_BITS = {
    "X": 1, "scores": 2, "W1": 4, "W1_up": 8, "W2": 16, "b1": 32, "b1_up": 64, "b2": 128,
    "A1": 256, "B1": 256, "A1_up": 256, "B1_up": 256, "A2": 512, "B2": 512,
}  # fmt: skip
_FROM_DH = 1 | 4 | 8 | 32 | 64 | 256  # gradients that follow from dH
_OF_W1 = ("W1", "W1_up", "b1", "b1_up")
_RESULTS = {"X": "dX", "scores": "ds", **{name: f"d{name}" for name in (*WEIGHTS, *FACTORS)}}
_WHOLE, _OVER_H, _REST = 0, 1, 3  # tilemoe_backward_mode
_OF_H = "H_codes", "H_scales"  # of H in FP8
# Arrays that forward saves for backward, by the names of jax.ad_checkpoint.
RESIDUALS = (
    "tilemoe_H", "tilemoe_routing", "tilemoe_ids", "tilemoe_scores", "tilemoe_P1", "tilemoe_P2",
    "tilemoe_packed",
)  # fmt: skip


class _Static(NamedTuple):
    """Function of the experts, in the form of the handlers' attributes."""

    kind: int
    K: int
    capacity: int
    activation: int
    gate_layout: int
    transposed: int
    clamp: float
    alpha: float
    up_shift: float
    column_blocks: int
    rank_gate: int
    rank_up: int
    rank_down: int
    scale_1: float
    scale_2: float
    recipe: int
    save_h: int  # tilemoe_format

    def saved_H(self, arrays: dict[str, Any], capacity: int, dtype: Any) -> dict[str, Any]:
        """Return shape and dtype of each array of H: in x's dtype, or bytes of codes and scales."""
        n = _sizes_of(arrays, bool(self.transposed))[2]
        if self.save_h:
            scales = ((capacity, -(-n // 128), 2), jnp.float32)
            return {"H_codes": ((capacity, 2 * n), jnp.uint8), "H_scales": scales}
        return {"H": ((capacity, 2 * n if ACTIVATIONS[self.activation] in GATED else n), dtype)}


def _sizes_of(arrays: dict[str, Any], transposed: bool) -> tuple[int, int, int]:
    """Return E, d and n of W2, or of its codes, which are (E, d, n) in any case."""
    codes = arrays.get("W2_codes")
    E, d, n = (arrays["W2"] if codes is None else codes).shape
    return (E, n, d) if codes is None and transposed else (E, d, n)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Operands whose gradients are wanted, and their dtypes."""

    dtypes: tuple[tuple[str, str], ...]


# ---------------------------------------------------------------- forward and backward


def _forward(static: _Static, operands: dict[str, Any], saves: bool) -> dict[str, Any]:
    """Return all results of the handler that a caller reads."""
    X = operands["X"]
    dtype = X.dtype
    operands = _fp8.as_read(operands, static.recipe, bool(static.transposed), backward=False)
    operands = {
        name: array.astype(dtype) if name in (*WEIGHTS, "addend") and array is not None else array
        for name, array in operands.items()
    }
    attributes = {**static._asdict(), "saves": int(saves)}
    sizes = plan("forward", operands, attributes)
    results: dict[str, Any] = {
        "O": (X.shape, dtype),
        "routing": ((sizes.routing,), jnp.uint8),
        "workspace": ((sizes.workspace,), jnp.uint8),
    }
    if sizes.packed:
        results["packed"] = ((sizes.packed,), jnp.uint8)
    if saves:
        results |= static.saved_H(operands, sizes.capacity, dtype)
        if rank := static.rank_gate + static.rank_up:
            results["P1"] = ((sizes.capacity, rank), dtype)
        if static.rank_down:
            results["P2"] = ((sizes.capacity, static.rank_down), dtype)
    made = call("forward", operands, results, attributes)
    return {**made, **{name: operands.get(name) for name in WEIGHTS}}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(static: _Static, overwrite_H: bool, operands: dict[str, Any]) -> Any:
    """Return O and the routing's bytes."""
    made = _forward(static, operands, False)
    return made["O"], made["routing"]


def _experts_forward(static: _Static, overwrite_H: bool, operands: Any) -> Any:
    values: dict[str, Any] = {
        name: None if array is None else array.value for name, array in operands.items()
    }
    perturbed = [
        name for name, array in operands.items()
        if array is not None and array.perturbed and name != "ids"
    ]  # fmt: skip
    _fp8.refuse_frozen(values, perturbed)
    perturbed = [name for name in perturbed if name not in CODES]
    wanted = _Wanted(tuple((name, values[name].dtype.name) for name in perturbed))
    if set(perturbed) <= {"addend"}:
        return _experts(static, overwrite_H, values), ({}, wanted)
    _fp8.require_transposed(values, static.recipe)
    made = _forward(static, values, True)
    kept = {name: made.get(name) for name in ("H", *_OF_H, "routing", "P1", "P2", "packed")}
    kept = {
        name: checkpoint_name(array, "tilemoe_H" if name in _OF_H else f"tilemoe_{name}")
        for name, array in kept.items() if array is not None
    }  # fmt: skip
    weights = {name: made[name] for name in WEIGHTS if made[name] is not None}
    scores = values["scores"]
    given = {name: array for name, array in values.items() if array is not None}
    codes = {name: array for name, array in given.items() if name in CODES}
    of_shape = list(FACTORS)
    if static.recipe != BF16:  # backward quantises a weight again, and reads codes, not a master
        of_shape += [name for name in QUANTIZABLE if f"{name}_codes" in codes]
        weights |= {name: given[name] for name in QUANTIZABLE if name in given}
        weights = {name: array for name, array in weights.items() if name not in of_shape}
    shapes = {name: given[name][:0] for name in of_shape if name in given}
    saved = {
        "X": values["X"], **kept, **weights, **codes,
        **{f"{name}_like": of for name, of in shapes.items()},
    }  # fmt: skip
    if scores is not None:
        saved["scores_like"] = scores[:0]
    return (made["O"], kept["routing"]), (saved, wanted)


def _experts_backward(static: _Static, overwrite_H: bool, residuals: Any, cotangents: Any) -> Any:
    saved, wanted = residuals
    dO, dtypes = cotangents[0], dict(wanted.dtypes)
    names = (*_RESULTS, "ids", "addend", *CODES)
    gradients: dict[str, Any] = dict.fromkeys(names)
    if isinstance(dO, jax.custom_derivatives.SymbolicZero):
        return (gradients,)
    if "addend" in dtypes:
        gradients["addend"] = dO.astype(dtypes.pop("addend"))
    if not dtypes:
        return (gradients,)
    arrays = {"dO": dO, **{name: array for name, array in saved.items() if "_like" not in name}}
    arrays = _fp8.as_read(arrays, static.recipe, bool(static.transposed), backward=True)
    made: dict[str, Any] = {}
    for mode, operands in _stages(static, overwrite_H, dtypes):
        if mode == _REST:
            arrays = {**arrays, "dO": None, **dict.fromkeys(_OF_H), "H": made["dH"]}
        types = _gradient_types(static, saved, {name: dtypes[name] for name in operands})
        made |= _backward(static, mode, arrays, types)
    for name, dtype in dtypes.items():
        gradients[name] = made[_RESULTS[name]].astype(dtype)
    return (gradients,)


def _stages(
    static: _Static, overwrite_H: bool, wanted: Iterable[str]
) -> list[tuple[int, tuple[str, ...]]]:
    """Return the calls of the handler: the mode, and the operands whose gradients it computes.

    The gradients of W1 have a call of their own: XLA then places the workspace of the first call
    in the memory of dW1.
    """
    operands = tuple(wanted)
    if not overwrite_H or not any(_BITS[name] & _FROM_DH for name in operands):
        return [(_WHOLE, operands)]
    last = tuple(name for name in operands if name in _OF_W1)
    first = tuple(name for name in operands if name not in _OF_W1)
    if not first or not last or static.rank_gate + static.rank_up + static.rank_down:
        return [(_OVER_H, operands)]
    return [(_OVER_H, first), (_REST, last)]


def _gradient_types(static: _Static, saved: Any, dtypes: dict[str, str]) -> dict[str, Any]:
    """Return the shape and the dtype in which the library writes each operand's gradient."""
    X, E = saved["X"], _sizes_of(saved, False)[0]
    types: dict[str, Any] = {}
    for name, dtype in dtypes.items():
        if name == "X":
            types[name] = (X.shape, X.dtype)
        elif name == "scores":
            rows = (X.shape[0], static.K) if static.kind == TOP_K else (X.shape[0],)
            types[name] = (rows, jnp.float32)
        else:
            # The library writes a gradient in X's dtype or in float32.
            like = saved[name] if name in saved else saved[f"{name}_like"]
            types[name] = ((E, *like.shape[1:]), X.dtype if dtype == X.dtype.name else jnp.float32)
    return types


def _backward(
    static: _Static, mode: int, operands: dict[str, Any], types: dict[str, Any]
) -> dict[str, Any]:
    """Return the gradients of the operands in `types`, and dH if it is over H.

    Codes of H are overwritten, next to dH.
    """
    bits = functools.reduce(operator.or_, (_BITS[name] for name in types))
    attributes = {**static._asdict(), "mode": mode, "gradients": bits}
    results = {_RESULTS[name]: of for name, of in types.items()}
    results["workspace"] = ((plan("backward", operands, attributes).workspace,), jnp.uint8)
    aliases: dict[str, str] = {}
    if mode == _OVER_H:
        consumed = _OF_H if static.save_h else ("H",)
        aliases = {f"d{name}": name for name in consumed}
        results |= {f"d{name}": (operands[name].shape, operands[name].dtype) for name in consumed}
        if static.save_h:
            results["dH"] = (operands["H_codes"].shape, operands["X"].dtype)
    return call("backward", operands, results, attributes, aliases)


_experts.defvjp(_experts_forward, _experts_backward, symbolic_zeros=True)


# ---------------------------------------------------------------- shared by both functions


class _OfExperts(TypedDict, total=False):
    activation: Activation
    gate_layout: GateLayout
    clamp: float
    alpha: float
    up_shift: float
    column_blocks: int


class _OfMoe(_OfExperts, total=False):
    K: int | None
    scoring: Scoring
    n_group: int
    topk_group: int
    group_score: GroupScore | None
    routed_scaling_factor: float
    capacity: int | None
    on_overflow: OnOverflow


_moe = Reader("moe", _OfMoe, "recipe", "save_h")
_grouped = Reader("grouped_experts", _OfExperts, "recipe", "save_h")


class _Layer(NamedTuple):
    """Weights of a call, with the checks that this module needs."""

    weights: dict[str, Any]  # WEIGHTS and CODES
    E: int
    d: int
    n: int
    options: Options
    recipe: int
    transposed: bool
    overwrite_H: bool
    lora: LoRA | None


def _layer(weights: list[Any], options: Options, transposed: bool, overwrite_H: bool,
           lora: LoRA | None) -> _Layer:  # fmt: skip
    for name, value in (("transposed", transposed), ("overwrite_H", overwrite_H)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    recipe = _fp8.recipe_of(options.recipe, lora is not None)
    arrays: dict[str, Any] = dict.fromkeys((*WEIGHTS, *CODES))
    for name, value in zip(WEIGHTS, weights):
        if isinstance(value, Fp8Weight) and name in QUANTIZABLE:
            arrays |= _fp8.operands_of(value, name, recipe, transposed)
        elif value is not None:
            arrays[name] = require_array(value, name)
    W2 = arrays["W2"]
    if arrays["W2_codes"] is None and (W2 is None or W2.ndim != 3):
        shape = "None" if W2 is None else f"of shape {shape_text(W2.shape)}"
        raise ValueError(f"W2 is {shape}, expected three dimensions (E, d, n)")
    sizes = _sizes_of(arrays, transposed)
    return _Layer(arrays, *sizes, options, recipe, transposed, overwrite_H, lora)


def _run(layer: _Layer, kind: int, K: int, capacity: int, X: Any, ids: Any, scores: Any,
         addend: Any) -> Any:  # fmt: skip
    """Return O and the routing's bytes."""
    options = layer.options
    factors = Factors({}, (0, 0, 0), (1.0, 1.0))
    if layer.lora is not None:
        factors = factors_of(layer.lora, layer.E, layer.d, layer.n, options)
    static = _Static(
        kind, K, capacity, ACTIVATIONS.index(options.activation),
        LITERALS["gate_layout"].index(options.gate_layout), int(layer.transposed),
        float(options.clamp), float(options.alpha), float(options.up_shift),
        options.column_blocks, *factors.ranks, *factors.scales, layer.recipe,
        options.numbers[At.SAVE_H],
    )  # fmt: skip
    if addend is not None:
        addend = require_array(addend, "addend")
        if addend.size != X.size:
            raise ValueError(
                f"addend has shape {shape_text(addend.shape)}, expected the shape of x, as "
                f"rows {shape_text(X.shape)}"
            )
        addend = addend.reshape(X.shape)
    if scores is not None:
        scores = scores.astype(jnp.float32)
    operands = {"X": X, "ids": ids, "scores": scores, **layer.weights, "addend": addend}
    operands.update({name: factors.arrays.get(name) for name in FACTORS})
    return _experts(static, layer.overwrite_H, _sharding.together(operands))


# ---------------------------------------------------------------- the routed layer


class Aux(NamedTuple):
    """Counts of a routing.

    Attributes:
        expert_counts: int32, shape (E): how often each expert was chosen.
        skipped: int32, shape (): pairs with an id outside [0, E), or over the capacity.
        without: int32, shape (): tokens without an expert.
        overflow: int32, shape (): pairs that exceeded the capacity; they are also counted in
            skipped.
    """

    expert_counts: jax.Array
    skipped: jax.Array
    without: jax.Array
    overflow: jax.Array


@_moe.shows
def moe(
    x: Any,
    logits_or_scores: Any,
    W1: Any,
    W2: Any,
    *,
    ids: Any = None,
    W1_up: Any = None,
    b1: Any = None,
    b1_up: Any = None,
    b2: Any = None,
    selection_bias: Any = None,
    addend: Any = None,
    lora: LoRA | None = None,
    recipe: Recipe = "bf16",
    save_h: SaveH | None = None,
    transposed: bool = False,
    overwrite_H: bool = True,
    return_aux: bool = False,
    **options: Unpack[_OfMoe],
) -> Any:
    """Compute the routed layer.

    The output is O_t = addend_t + sum over the K experts of token t of s * expert(x_t). With `K`,
    the experts of each token are chosen from the router's logits. With `ids`, the experts are
    given, and the second argument is their scores. x, the weights and the biases may have different
    dtypes: the layer computes in x's dtype, and each gradient has the dtype of its array; that of a
    float32 weight is written in float32.

    Args:
        x: Tokens, shape (..., d), d a multiple of 8; float32 (CPU only), bfloat16 or float16.
        logits_or_scores: With `K` the router's logits, shape (..., E); with `ids` the scores of the
            chosen experts, shape (..., K). float32, bfloat16 or float16. Receives a gradient.
        W1: First weights of the experts, gate and up rows (see `gate_layout`), shape (E, 2n, d), or
            (E, n, d) if it is split or the activation has no gate; n a multiple of 8. W1, W1_up and
            W2 may be an `Fp8Weight`.
        W2: Second weights of the experts, shape (E, d, n).
        ids: Experts of each token, int32 or int64, shape (..., K); an id outside [0, E) is skipped.
        W1_up: Up rows, shape (E, n, d), with gate_layout="split".
        b1: Biases of the first GEMM, one per row of W1, shape (E, 2n) or (E, n).
        b1_up: Biases of the up rows, shape (E, n), with gate_layout="split".
        b2: Biases of the second GEMM, shape (E, d).
        selection_bias: Added to the sigmoid scores to choose experts, but not to the scores;
            float32, shape (E).
        addend: Added to the output in float32 before the output is rounded, for example a residual;
            shape of x.
        lora: Low-rank adapters of the weights. The gradient of a weight that is not differentiated
            is not computed.
        recipe: How the experts' GEMMs compute. "fp8": forward and the gradients of the activations
            and of x multiply E4M3 codes; the weights' gradients remain in 16 bits. "fp8_forward":
            only forward multiplies codes, and backward dequantises the weights; required with
            `lora`. W1, W1_up and W2 are `Fp8Weight`, or arrays, which the call then quantises, in
            forward and again in backward. Both FP8 recipes require an H100 or H200, or the CPU
            backend; an activation with a gate; d and n multiples of 16; gate_layout "split", or
            "concatenated" with n a multiple of 128. "auto" is not supported.
        save_h: Format of the saved H. "fp8", with recipe="fp8": E4M3 codes with a scale per 128
            columns of a row, about half of the bytes. None: x's dtype.
        transposed: The last two dimensions of W1, W1_up and W2 are swapped: (E, d, 2n) and (E, n,
            d), as `jax.lax.ragged_dot` expects them. A transpose before the call would copy all
            weights in every step.
        overwrite_H: In backward, write dH, the largest intermediate, over H, the largest array that
            is saved for backward; over codes of H, other intermediates. If H is read again, XLA
            copies it first.
        return_aux: Also return the counts of the routing.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        O, shape and dtype of x; with `return_aux` O and an `Aux`.

    Raises:
        ValueError: A shape, a dtype or an option is wrong, or an array is sharded along explicit
            axes of a mesh outside `jax.shard_map`; the message names the argument.
        TypeError: An argument is not an array.
        NotImplementedError: vmap, derivatives of the gradient, symbolic shapes or token rounding is
            used, or the recipe does not support the layer.

    Example:
        >>> x, logits = jnp.ones((6, 16)), jnp.arange(24.0).reshape(6, 4)
        >>> W1, W2 = jnp.ones((4, 2 * 8, 16)), jnp.ones((4, 16, 8))
        >>> tilemoe.jax.moe(x, logits, W1, W2, K=2).shape
        (6, 16)
    """
    if options.get("rounding") is not None:
        raise NotImplementedError(
            f"rounding is not supported in JAX, got rounding={options['rounding']!r}"
        )
    chosen = _moe({**options, "recipe": recipe, "save_h": save_h})
    layer = _layer([W1, W1_up, W2, b1, b1_up, b2], chosen, transposed, overwrite_H, lora)
    x = require_array(x, "x")
    X, E = rows_of(x, "x", "(..., d)"), layer.E
    T = X.shape[0]
    name, expected = ("logits", "(..., E)") if ids is None else ("scores", "(..., K)")
    router = rows_of(require_array(logits_or_scores, name), name, expected)
    if ids is None:
        require_shape(router, "logits", T, E)
        if chosen.K is None:
            raise ValueError("K is required unless ids is given")
        scores, id_rows, _ = choose(router, chosen.K, chosen, selection_bias)
    else:
        scores, id_rows = router, _given_ids(ids, chosen, selection_bias, T)
        require_shape(scores, "scores", *id_rows.shape)
        id_rows, scores = _narrowed(id_rows, scores, E)
    K = id_rows.shape[1]
    pairs = T * K
    rows = pairs if chosen.capacity is None else min(chosen.capacity, pairs)
    out, routing = _run(layer, TOP_K, K, rows, X, id_rows, scores, addend)
    counters = _ints(routing)[-4:]
    if rows != pairs and chosen.on_overflow == "nan":
        out = jnp.where(counters[0] > 0, jnp.nan, out).astype(out.dtype)
    out = out.reshape(x.shape)
    return (out, _aux(routing, id_rows, E, T, rows)) if return_aux else out


def _given_ids(ids: Any, options: Options, selection_bias: Any, T: int) -> Any:
    if selection_bias is not None:
        raise ValueError(
            "selection_bias requires logits without ids, got ids; remove it, or pass logits and K"
        )
    _checks.plain_choice(
        options, "{name} must have its default if ids and their scores are given, got {value}"
    )
    rows = rows_of(require_array(ids, "ids", INTS), "ids", "(..., K)")
    require_shape(rows, "ids", T, rows.shape[1])
    return rows


def _narrowed(ids: Any, scores: Any, E: int) -> tuple[Any, Any]:
    """Return ids and scores (T, K), or (T, E) with a place per expert if K is larger than E.

    The ids are those of a rank's part of the experts. An expert that a token has twice gets the sum
    of both scores.
    """
    if ids.shape[1] <= E:
        return ids, scores
    experts = jnp.arange(E, dtype=ids.dtype)
    same = ids[:, None, :] == experts[:, None]  # (T, E, K)
    narrow = jnp.where(same, scores[:, None, :], 0).sum(-1)
    return jnp.where(same.any(-1), experts, -1), narrow


def _ints(routing: Any) -> Any:
    """Return a routing's bytes as int32."""
    return jax.lax.bitcast_convert_type(routing.reshape(-1, 4), jnp.int32)


def _aux(routing: Any, ids: Any, E: int, T: int, capacity: int) -> Aux:
    # Arrays of a routing, each aligned to 16 bytes: offsets (E + 1), scores and tokens of the rows.
    numbers, padded = _ints(routing), lambda elements: (elements + 3) // 4 * 4
    offsets, counters = numbers[: E + 1], numbers[-4:]
    begin = padded(E + 1) + padded(capacity)
    tokens = jnp.where(jnp.arange(capacity) < offsets[E], numbers[begin : begin + capacity], T)
    seen = jnp.zeros(T + 1, bool).at[tokens].set(True)[:T]
    counts = jnp.zeros(E + 1, jnp.int32).at[jnp.where((ids >= 0) & (ids < E), ids, E)].add(1)[:E]
    without = T - seen.sum(dtype=jnp.int32)
    return Aux(counts, counters[0] + counters[1], without, counters[0])


# ---------------------------------------------------------------- the experts alone


@_grouped.shows
def grouped_experts(
    rows: Any,
    counts: Any,
    W1: Any,
    W2: Any,
    *,
    row_scores: Any = None,
    W1_up: Any = None,
    b1: Any = None,
    b1_up: Any = None,
    b2: Any = None,
    addend: Any = None,
    lora: LoRA | None = None,
    recipe: Recipe = "bf16",
    save_h: SaveH | None = None,
    transposed: bool = False,
    overwrite_H: bool = True,
    **options: Unpack[_OfExperts],
) -> jax.Array:
    """Compute the experts alone, on rows that are already sorted by expert.

    Args:
        rows: Rows, shape (R, d): expert 0 computes the first counts[0] rows, expert 1 the next
            counts[1] rows, and so on. Rows past the sum of the counts are not read; they are zero
            in the output and in the gradient. A buffer for the worst case costs memory but not
            time.
        counts: Number of rows of each expert, int32 or int64, shape (E), read on the device. A
            negative count is read as 0, and experts have no rows past R.
        W1: As in `moe`.
        W2: As in `moe`.
        row_scores: Factor of the result of each row, shape (R). Receives a gradient. None: 1.
        W1_up: As in `moe`.
        b1: As in `moe`.
        b1_up: As in `moe`.
        b2: As in `moe`.
        addend: As in `moe`, shape (R, d).
        lora: As in `moe`.
        recipe: As in `moe`.
        save_h: As in `moe`.
        transposed: As in `moe`.
        overwrite_H: As in `moe`.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Returns:
        Rows, shape (R, d), dtype of the given rows.

    Raises:
        ValueError: A shape, a dtype or an option is wrong; other errors as in `moe`.

    Example:
        >>> rows, counts = jnp.ones((5, 16)), jnp.array([2, 0, 3, 0])
        >>> W1, W2 = jnp.ones((4, 2 * 8, 16)), jnp.ones((4, 16, 8))
        >>> tilemoe.jax.grouped_experts(rows, counts, W1, W2).shape
        (5, 16)
    """
    chosen = _grouped({**options, "recipe": recipe, "save_h": save_h})
    layer = _layer([W1, W1_up, W2, b1, b1_up, b2], chosen, transposed, overwrite_H, lora)
    X, counts = require_array(rows, "rows"), require_array(counts, "counts", INTS)
    if X.ndim != 2:
        raise ValueError(f"rows has shape {shape_text(X.shape)}, expected (R, d)")
    require_shape(counts, "counts", layer.E)
    R = X.shape[0]
    if row_scores is not None:
        row_scores = require_array(row_scores, "row_scores", FLOATS)
        require_shape(row_scores, "row_scores", R)
    out, _ = _run(layer, GROUPED, 0, R, X, counts, row_scores, addend)
    return out
