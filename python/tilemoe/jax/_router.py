"""Define the router in JAX: the choice of experts, its scores, and the losses."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import _checks
from .._signatures import Reader
from ..options import LITERALS, SCORINGS, OfScores, OfTopK, Options
from . import _sharding
from ._shapes import INTS, call, plan, require_array, require_shape, rows_of, shape_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

_top_k, _top_k_scores = Reader("top_k", OfTopK, "K"), Reader("top_k_scores", OfScores)
_OF_CHOSEN = (
    "softmax_over_chosen",
    "softmax_renormalized",
)  # their gradient does not read the logits


class _Rule(NamedTuple):
    """Rule of choice and scores, in the numbers of tilemoe.h."""

    K: int
    scoring: int
    n_group: int
    topk_group: int
    group_score: int
    routed_scaling_factor: float

    def reads_logits(self) -> bool:
        return SCORINGS[self.scoring] not in _OF_CHOSEN


def _rule_of(options: Options, K: int) -> _Rule:
    return _Rule(
        K, SCORINGS.index(options.scoring), options.n_group, options.topk_group,
        LITERALS["group_score"].index(_checks.group_score(options)),
        float(options.routed_scaling_factor),
    )  # fmt: skip


# ---------------------------------------------------------------- the choice


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _choose(rule: _Rule, logits: Any, selection_bias: Any) -> Any:
    (T, E), K = logits.shape, rule.K
    made = call(
        "top_k",
        {"logits": logits, "selection_bias": selection_bias},
        {
            "scores": ((T, K), jnp.float32),
            "ids": ((T, K), jnp.int32),
            "counts": ((E,), jnp.int32),
        },
        rule._asdict(),
    )
    return made["scores"], made["ids"], made["counts"]


def _choose_forward(rule: _Rule, logits: Any, selection_bias: Any) -> Any:
    scores, ids, counts = _choose(rule, logits, selection_bias)
    scores = checkpoint_name(scores, "tilemoe_scores")
    ids = checkpoint_name(ids, "tilemoe_ids")
    return (scores, ids, counts), (scores, ids, _kept(rule, logits))


def _kept(rule: _Rule, logits: Any) -> Any:
    """Return the logits, or an array without rows if the gradient does not read them.

    The array without rows has the logits' dtype and E.
    """
    return logits if rule.reads_logits() else logits[:0]


def _choose_backward(rule: _Rule, saved: Any, cotangents: Any) -> Any:
    return _logits_gradient(rule, saved, cotangents[0]), None


def _logits_gradient(rule: _Rule, saved: Any, dscores: Any) -> Any:
    scores, ids, logits = saved
    T, E = ids.shape[0], logits.shape[1]
    operands = {"dscores": dscores, "ids": ids, "scores": scores}
    if rule.reads_logits():
        operands["logits"] = logits
    attributes = {
        "E": E, "scoring": rule.scoring, "routed_scaling_factor": rule.routed_scaling_factor
    }  # fmt: skip
    sizes = plan("top_k_backward", operands, attributes)
    results = {
        "dlogits": ((T, E), logits.dtype),
        "routing": ((sizes.routing,), jnp.uint8),
        "workspace": ((sizes.workspace,), jnp.uint8),
    }
    return call("top_k_backward", operands, results, attributes)["dlogits"]


_choose.defvjp(_choose_forward, _choose_backward)


def choose(logits: Any, K: int, options: Options, selection_bias: Any) -> Any:
    """Choose by the options: logits (T, E) -> scores (T, K), ids (T, K), counts (E)."""
    E = logits.shape[1]
    if isinstance(K, bool) or not isinstance(K, int) or not 1 <= K <= E:
        raise ValueError(f"K must be in [1, {E}] for E = {E}, got {K!r}")
    _checks.groups(options, E, K)
    if selection_bias is not None:
        selection_bias = require_array(selection_bias, "selection_bias", ("float32",))
        require_shape(selection_bias, "selection_bias", E)
        if options.scoring not in _checks.SIGMOIDS:
            raise ValueError(
                f"selection_bias requires a sigmoid scoring, got scoring={options.scoring!r}"
            )
    given = _sharding.together({"logits": logits, "selection_bias": selection_bias})
    return _choose(_rule_of(options, K), given["logits"], given["selection_bias"])


@_top_k.shows
def top_k(
    logits: Any, K: int, *, selection_bias: Any = None, **options: Unpack[OfTopK]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the K experts of each token and compute their scores, in descending order.

    Ties go to the lower id; NaN ranks last.

    Args:
        logits: Logits of the router, float32, bfloat16 or float16, shape (..., E).
        K: Experts per token.
        selection_bias: Added to the sigmoid scores to choose experts, but not to the scores;
            float32, shape (E). It has no gradient.
        **options: Options of the choice by name; see `tilemoe.options.Options`.

    Returns:
        Scores, float32, shape (..., K), differentiable in the logits; ids, int32, shape (..., K);
        and how often each expert was chosen, int32, shape (E).

    Raises:
        ValueError: K is outside [1, E], or another argument is wrong; the message names the
            argument.
        TypeError: An argument is not an array.

    Example:
        >>> scores, ids, counts = tilemoe.jax.top_k(jnp.array([[0.0, 2.0, 1.0]]), 2)
        >>> ids
        Array([[1, 2]], dtype=int32)
    """
    chosen = _top_k({"K": K, **options})
    logits = require_array(logits, "logits")
    rows = rows_of(logits, "logits", "(..., E)")
    scores, ids, counts = choose(rows, K, chosen, selection_bias)
    shape = (*logits.shape[:-1], K)
    return scores.reshape(shape), ids.reshape(shape), counts


# ---------------------------------------------------------------- scores of given ids


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(rule: _Rule, logits: Any, ids: Any) -> Any:
    attributes = {
        "scoring": rule.scoring, "routed_scaling_factor": rule.routed_scaling_factor
    }  # fmt: skip
    operands, results = {"logits": logits, "ids": ids}, {"scores": (ids.shape, jnp.float32)}
    return call("top_k_scores", operands, results, attributes)["scores"]


def _scores_forward(rule: _Rule, logits: Any, ids: Any) -> Any:
    scores = checkpoint_name(_scores(rule, logits, ids), "tilemoe_scores")
    return scores, (scores, ids, _kept(rule, logits))


def _scores_backward(rule: _Rule, saved: Any, dscores: Any) -> Any:
    return _logits_gradient(rule, saved, dscores), None


_scores.defvjp(_scores_forward, _scores_backward)


@_top_k_scores.shows
def top_k_scores(logits: Any, ids: Any, **options: Unpack[OfScores]) -> jax.Array:
    """Compute the scores of given experts, for example those of a rollout, by a rule of `top_k`.

    If the ids are those that `top_k` chooses, in its order, the scores have the same bits. Pass the
    scores to `moe(x, scores, ..., ids=ids)`.

    Args:
        logits: Logits of the router, float32, bfloat16 or float16, shape (..., E).
        ids: Experts, int32 or int64, shape (..., K), K at most E. An id outside [0, E) is absent:
            its score is 0, and it is not part of a sum. An id that occurs twice counts twice.
        **options: Options of the scores by name; see `tilemoe.options.Options`.

    Returns:
        Scores, float32, shape (..., K), differentiable in the logits.

    Raises:
        ValueError: A shape, a dtype or an option is wrong; the message names the argument.
        TypeError: An argument is not an array.

    Example:
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> tilemoe.jax.top_k_scores(logits, jnp.array([[2, 2, -1]]))
        Array([[0.5, 0.5, 0. ]], dtype=float32)
    """
    chosen = _top_k_scores(options)  # type: ignore[arg-type]
    logits, ids = require_array(logits, "logits"), require_array(ids, "ids", INTS)
    if ids.ndim == 0 or ids.shape[:-1] != logits.shape[:-1] or not 1 <= ids.shape[-1]:
        leading = "".join(f"{size}, " for size in logits.shape[:-1])
        raise ValueError(
            f"ids has shape {shape_text(ids.shape)}, expected ({leading}K) with K >= 1 for "
            "these logits"
        )
    rows, id_rows = rows_of(logits, "logits", "(..., E)"), rows_of(ids, "ids", "(..., K)")
    if id_rows.shape[1] > rows.shape[1]:
        raise ValueError(f"ids must have K <= E = {rows.shape[1]}, got K = {ids.shape[-1]}")
    given = _sharding.together({"logits": rows, "ids": id_rows})
    rule = _rule_of(chosen, id_rows.shape[1])
    return _scores(rule, given["logits"], given["ids"]).reshape(ids.shape)


# ---------------------------------------------------------------- the losses


def _call_losses(logits: Any, counts: Any, balance: float, z: float) -> Any:
    """Return the losses (2), or with coefficients their gradient (T, E), float32."""
    operands, attributes = {"logits": logits, "counts": counts}, {
        "balance_coefficient": balance, "z_coefficient": z
    }  # fmt: skip
    workspace = plan("router_losses", operands, attributes).workspace
    results: dict[str, Any] = {"workspace": ((workspace,), jnp.uint8)}
    if not balance and not z:
        results["losses"] = ((2,), jnp.float32)
        return call("router_losses", operands, results, attributes)["losses"]
    zeros = jnp.zeros(logits.shape, jnp.float32)
    operands["zeros"] = _sharding.together({"zeros": zeros, "logits": logits})["zeros"]
    results["dlogits"] = (logits.shape, jnp.float32)
    made = call("router_losses", operands, results, attributes, {"dlogits": "zeros"})
    return made["dlogits"]


@jax.custom_vjp
def _losses(logits: Any, counts: Any) -> Any:
    return _call_losses(logits, counts, 0.0, 0.0)


def _losses_forward(logits: Any, counts: Any) -> Any:
    return _losses(logits, counts), (logits, counts)


def _losses_backward(saved: Any, dlosses: Any) -> Any:
    logits, counts = saved
    of_balance = _call_losses(logits, counts, 1.0, 0.0)
    of_z = _call_losses(logits, counts, 0.0, 1.0)
    return (dlosses[0] * of_balance + dlosses[1] * of_z).astype(logits.dtype), None


_losses.defvjp(_losses_forward, _losses_backward)


def router_losses(
    logits: Any, expert_counts: Any, token_mask: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Compute the router's losses: the load balance loss and the z loss.

    The balance loss is E * sum_e (c_e / sum(c)) * mean_t p(t, e), which is 1 if balanced (Switch
    Transformer, arXiv 2101.03961, equation 4), with c the expert_counts. The z loss is
    mean_t logsumexp(logits_t)^2 (ST-MoE, arXiv 2202.08906, equation 5).

    Args:
        logits: Logits of the router, shape (..., E).
        expert_counts: Tokens per expert, int32, shape (E), as `top_k` returns them.
        token_mask: bool, shape (...); a token with False, for example padding, is in neither mean
            and has no gradient, and expert_counts must not count it. None: every token counts.

    Returns:
        balance and z, float32 scalars, differentiable in the logits.

    Raises:
        ValueError: A shape or a dtype is wrong.
        TypeError: An argument is not an array.
    """
    logits = require_array(logits, "logits")
    counts = require_array(expert_counts, "expert_counts", ("int32",))
    rows = rows_of(logits, "logits", "(..., E)")
    require_shape(counts, "expert_counts", rows.shape[1])
    if token_mask is not None:
        mask = require_array(token_mask, "token_mask", ("bool",))
        require_shape(mask, "token_mask", *logits.shape[:-1])
        # The library leaves a token with a NaN logit out of its means; it has no gradient.
        rows = jnp.where(mask.reshape(-1, 1), rows, jnp.nan)
    given = _sharding.together({"logits": rows, "expert_counts": counts})
    losses = _losses(given["logits"], given["expert_counts"])
    return losses[0], losses[1]
