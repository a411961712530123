"""Compute the two GEMMs of the layer as functions, with any PyTorch code as the activation.

The activation is the code between `gathered_mm` and `combine_mm`. Symbols: T tokens of width d, E
experts, K experts per token, M rows, one per pair of a token and an expert, sorted by expert;
capacity: the number of rows in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _library, _mm_autograd, ops  # noqa: F401  registers the gradients
from ._layout import array_of, counters_of, offsets_of
from ._shapes import shape_text
from ._signatures import Reader
from .options import GENERAL, GROUPED, TOP_K, OfTopK
from .quantization import QuantizedExperts
from .routing import choose, rows_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ops = _library.operators
_route = Reader("route", OfTopK, "K")


class Routing(NamedTuple):
    """Rows of a batch with their tokens, experts and scores.

    `route`, `route_ids`, `route_pairs` and `route_rows` return a Routing; all calls of a layer
    share one object. The arrays are on the device, and the host does not wait for them.

    Attributes:
        memory: int32, in the library's layout.
        scores: Scores as given; autograd returns their gradient. None: every score is 1.
        kind: Number of the kind of routing.
        T: Number of tokens, or of rows for `route_rows`.
        E: Number of experts.
        K: Experts per token; 0 if their number varies.
        capacity: Number of rows in memory.
    """

    memory: Tensor
    scores: Tensor | None
    kind: int
    T: int
    E: int
    K: int
    capacity: int

    @property
    def offsets(self) -> Tensor:
        """int32 (E + 1): expert e has the rows [offsets[e], offsets[e + 1]); M is the last."""
        return offsets_of(self.memory, self.E)

    @property
    def row_experts(self) -> Tensor:
        """int64 (capacity): expert of each row, and E for the rows from M on."""
        row = torch.arange(self.capacity, device=self.memory.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets[1:].contiguous(), row, right=True)

    @property
    def skipped(self) -> Tensor:
        """int32 (): pairs without a row (id outside [0, E), or capacity exceeded)."""
        counters = counters_of(self.memory)
        return counters[0] + counters[1]

    def of_rows(self) -> Routing:
        """Return the routing of the rows themselves, without scores.

        With this routing `gathered_mm` reads rows (capacity, width) and returns rows.
        """
        counts = self.offsets.diff()
        memory = ops.call_undifferentiated(_ops.route_grouped.default, counts, None, self.capacity)
        return Routing(memory, None, GROUPED, self.capacity, self.E, 0, self.capacity)


@_route.shows
def route(
    logits: Tensor, K: int, *, selection_bias: Tensor | None = None, **options: Unpack[OfTopK]
) -> Routing:
    """Choose the K experts of each token by a rule of `top_k`, and sort the rows by expert.

    Args:
        logits: Logits of the router, float32, bfloat16 or float16, shape (..., E). Receives the
            gradient of the scores.
        K: Experts per token.
        selection_bias: Added to the sigmoid scores to choose experts, but not to the scores;
            float32, shape (E).
        **options: Options of the choice by name, as in `top_k`.

    Returns:
        A Routing with T * K rows.

    Raises:
        ValueError: An argument is wrong; the message names the argument.

    Example:
        >>> tilemoe.route(torch.randn(6, 4), K=2).capacity
        12
    """
    _library.require_device(logits, "logits")
    rows = rows_of(logits, "logits", "(..., E)")
    chosen = _route({"K": K, **options})
    scores, ids, _ = choose(rows, chosen, selection_bias)
    return route_ids(ids, scores, rows.shape[1])


def route_ids(ids: Tensor, scores: Tensor, E: int, *, capacity: int | None = None) -> Routing:
    """Sort the rows of given experts.

    Args:
        ids: Experts of each token, int32 or int64, shape (..., K); an id outside [0, E) is skipped.
        scores: Scores of the experts, float32, bfloat16 or float16, shape (..., K). Receives a
            gradient.
        E: Number of experts.
        capacity: Number of rows in memory. Pairs past the capacity, the last tokens of the highest
            experts, are skipped. None: one row per pair.

    Returns:
        A Routing with `capacity` rows, or T * K.

    Raises:
        ValueError: An argument is wrong; the message names the argument.
    """
    _library.require_device(ids, "ids")
    _library.require_together(ids, "ids", scores=scores)
    ids, scores = rows_of(ids, "ids", "(..., K)"), rows_of(scores, "scores", "(..., K)")
    (T, K), pairs = ids.shape, ids.numel()
    rows = pairs if capacity is None else min(capacity, pairs)
    args = (ids, scores.detach(), E, rows)
    memory = ops.call_undifferentiated(_ops.route_top_k.default, *args)
    return Routing(memory, scores, TOP_K, T, E, K, rows)


def route_pairs(tokens: Tensor, experts: Tensor, scores: Tensor, T: int, E: int) -> Routing:
    """Sort the rows of (token, expert, score), with any number of experts per token.

    The pairs are those of `moe_general`.

    Args:
        tokens: Token of each pair, int32 or int64, shape (pairs), sorted.
        experts: Expert of each pair, int32 or int64, shape (pairs). A pair outside [0, T) or [0, E)
            is skipped; `rounded_router` returns such pairs.
        scores: Score of each pair, shape (pairs). Receives a gradient.
        T: Number of tokens.
        E: Number of experts.

    Returns:
        A Routing with one row per pair.

    Raises:
        ValueError: An argument is wrong; the message names the argument.
    """
    _library.require_device(tokens, "tokens")
    _library.require_together(tokens, "tokens", experts=experts, scores=scores)
    args = (tokens, experts, scores.detach(), T, E)
    memory = ops.call_undifferentiated(_ops.route_general.default, *args)
    return Routing(memory, scores, GENERAL, T, E, 0, tokens.shape[0])


def route_rows(counts: Tensor, rows: int, row_scores: Tensor | None = None) -> Routing:
    """Describe rows that are already sorted by expert, as in `grouped_experts`.

    `gathered_mm` then gathers nothing, and `combine_mm` scales rows without adding them.

    Args:
        counts: Number of rows of each expert, int32 or int64, shape (E), at least 0, with a sum of
            at most `rows`. From offsets: `offsets.diff()`.
        rows: Number of rows, used or not.
        row_scores: Factor of the result of each row, shape (rows). Receives a gradient. None: 1.

    Returns:
        A Routing with `rows` rows.

    Raises:
        ValueError: An argument is wrong; on the CPU also if a count is wrong.
    """
    _library.require_device(counts, "counts")
    _library.require_together(counts, "counts", row_scores=row_scores)
    if row_scores is not None:
        row_scores = row_scores.float()
    detached = None if row_scores is None else row_scores.detach()
    memory = ops.call_undifferentiated(_ops.route_grouped.default, counts, detached, rows)
    return Routing(memory, row_scores, GROUPED, rows, counts.shape[0], 0, rows)


def gathered_mm(x: Tensor, W: Tensor, routing: Routing, *, bias: Tensor | None = None) -> Tensor:
    """Compute h_r = W_e x_t + bias_e for each row r of a token t and an expert e.

    The GEMM gathers the rows of x while it loads them; no gathered copy is written.

    Args:
        x: Tokens, shape (..., d), or rows (rows, d) for `route_rows`; float32, bfloat16 or float16
            on the CPU, bfloat16 or float16 on a GPU. d is a multiple of 8.
        W: Weights of the experts in x's dtype, shape (E, n, d), n a multiple of 8; either of the
            last two dimensions is contiguous.
        routing: Routing from `route`, `route_ids`, `route_pairs` or `route_rows`.
        bias: Added in float32 before the result is rounded, shape (E, n).

    Returns:
        h, shape (capacity, n), dtype of x, sorted by expert. The rows from M on are zero.

    Raises:
        ValueError: A shape, a dtype, a device or the routing is wrong; the message names the
            argument.
        TypeError: An argument is not a tensor.
        NotImplementedError: No kernel supports the dtype or the layout, or W is quantised.

    Example:
        >>> routing = tilemoe.route(torch.randn(6, 4), K=2)
        >>> h = tilemoe.gathered_mm(torch.randn(6, 16), torch.randn(4, 8, 16), routing)
        >>> a = torch.nn.functional.mish(h)
        >>> tilemoe.combine_mm(a, torch.randn(4, 16, 8), routing).shape
        torch.Size([6, 16])
    """
    x, W, bias, _ = _checked("gathered_mm", "x", x, W, routing, bias)
    rows = rows_of(x, "x", "(..., d)")
    if rows.shape[0] != routing.T:
        raise ValueError(
            f"x has shape {shape_text(x.shape)}, expected {routing.T} rows for this routing"
        )
    args = (rows, routing.memory, W, bias, routing.capacity, routing.kind, routing.K)
    return _call(_ops.gathered_mm.default, *args)


def combine_mm(
    a: Tensor,
    W: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """Compute out_t = addend_t + sum over the rows r of token t of s_r (W_e a_r + bias_e).

    Args:
        a: One row per row of the routing, for example h of `gathered_mm` after an activation; shape
            (capacity, n), n a multiple of 8. The rows from M on are not read, and their gradient is
            zero.
        W: Weights of the experts in a's dtype, shape (E, d, n), d a multiple of 8; either of the
            last two dimensions is contiguous.
        routing: Routing of the call of `gathered_mm`.
        bias: Biases of the second GEMM, shape (E, d).
        addend: Added to the output in float32 before the output is rounded, for example a residual;
            shape (..., d) with T tokens, or (rows, d) for `route_rows`.

    Returns:
        out, shape (T, d), or the shape of addend if it is given, in a's dtype. For `route_rows` the
        shape is (rows, d): each row times its score, and zero from M on.

    Raises:
        ValueError: An argument is wrong; other errors as in `gathered_mm`.
    """
    a, W, bias, addend = _checked("combine_mm", "a", a, W, routing, bias, addend)
    if a.dim() != 2 or a.shape[0] != routing.capacity:
        raise ValueError(
            f"a has shape {shape_text(a.shape)}, expected ({routing.capacity}, n) for this routing"
        )
    shape = None if addend is None else addend.shape
    if addend is not None:
        addend = rows_of(addend, "addend", "(..., d)")
    args = (a, routing.scores, routing.memory, W, bias, addend, routing.T, routing.kind, routing.K)
    out = _call(_ops.combine_mm.default, *args)
    return out if shape is None or len(shape) == 2 else out.reshape(shape)


# ---------------------------------------------------------------- calls


def _call(op, *args):
    if torch.is_grad_enabled():
        return ops.call(op, *args)
    return ops.call_undifferentiated(op, *args)


def _checked(function, name, rows, W, routing, bias, addend=None):
    """Return the checked tensors, cast under autocast."""
    if isinstance(W, QuantizedExperts):
        raise NotImplementedError(
            f"{function} requires dense weights, got W as a QuantizedExperts; pass W.dequantize()"
        )
    if not isinstance(routing, Routing):
        kind = _library.class_of(routing)
        raise TypeError(f"routing must be a tilemoe.Routing, got a {kind}")
    _library.require_device(rows, name)
    _library.require_weight(W, "W")
    _library.require_together(rows, name, W=W, bias=bias, addend=addend, routing=routing.memory)
    if rows.device.type != "meta" and torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, W, bias, addend = (_cast(tensor, dtype) for tensor in (rows, W, bias, addend))
    _library.require_dtype(rows)
    if W.dim() != 3 or W.shape[0] != routing.E:
        raise ValueError(
            f"W has shape {shape_text(W.shape)}, expected three dimensions, the first "
            f"{routing.E}, for this routing"
        )
    return rows, W, bias, addend


def _cast(tensor, dtype):
    if tensor is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


# ---------------------------------------------------------------- rows


def weighted_sum(rows: Tensor, routing: Routing) -> Tensor:
    """Sum the rows (capacity, d) of each token times their scores -> (T, d), for a top-K routing.

    The sum is in float32, in the order of the token's K, and is rounded once.
    """
    T, K, capacity, scores = routing.T, routing.K, routing.capacity, routing.scores
    assert scores is not None
    sizes = (TOP_K, T, routing.E, capacity, T * K)
    row = array_of("pair_row", routing.memory, *sizes).long().view(T, K)
    out = rows.new_zeros((T, rows.shape[1]), dtype=torch.float32)
    if capacity == 0:
        return out.to(rows.dtype)
    for k in range(K):
        term = rows[row[:, k].clamp(min=0)].float() * scores[:, k : k + 1].float()
        out = out + torch.where(row[:, k : k + 1] >= 0, term, 0.0)
    return out.to(rows.dtype)
