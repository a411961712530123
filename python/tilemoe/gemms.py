"""The two GEMMs of the layer as functions, for activations of the caller: any PyTorch code between
`gathered_mm` and `combine_mm`. Letters: T tokens of width d, E experts, K experts per token, M rows,
one for each pair of a token and an expert, sorted by expert; capacity: the rows that memory has."""

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
    """The rows of a batch: which token and which expert each of them has, and its score.

    Made by `route`, `route_ids`, `route_pairs` and `route_rows`; one object serves all calls of a
    layer. Its arrays are on the device, and nothing waits for the host."""

    memory: Tensor  # int32, laid out by the library
    scores: Tensor | None  # as given: autograd passes their gradient back; None: every score is 1
    kind: int
    T: int  # tokens; of route_rows, the rows
    E: int
    K: int
    capacity: int

    @property
    def offsets(self) -> Tensor:
        """(E + 1) int32: expert e has the rows [offsets[e], offsets[e + 1]); the last one is M."""
        return offsets_of(self.memory, self.E)

    @property
    def row_experts(self) -> Tensor:
        """(capacity) int64: the expert of each row, and E for the rows from M on."""
        row = torch.arange(self.capacity, device=self.memory.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets[1:].contiguous(), row, right=True)

    @property
    def skipped(self) -> Tensor:
        """() int32: pairs without a row: an id outside [0, E), or no place in the capacity."""
        counters = counters_of(self.memory)
        return counters[0] + counters[1]

    def of_rows(self) -> Routing:
        """The routing of the rows themselves, without scores: `gathered_mm` with it takes rows
        (capacity, width), and returns rows."""
        counts = self.offsets.diff()
        memory = ops.call_undifferentiated(_ops.route_grouped.default, counts, None, self.capacity)
        return Routing(memory, None, GROUPED, self.capacity, self.E, 0, self.capacity)


@_route.shows
def route(
    logits: Tensor, K: int, *, selection_bias: Tensor | None = None, **options: Unpack[OfTopK]
) -> Routing:
    """Choose each token's K experts by a rule of `top_k`, and sort the rows by expert.

    Args:
        logits: the router's, float32, bfloat16 or float16; the scores' gradient goes to them.
        K: experts per token.
        selection_bias: for the sigmoid scorings: added to choose experts, not to the scores.

    Shape:
        logits (..., E); selection_bias (E) float32.

    Returns:
        A Routing with T * K rows.

    Raises:
        ValueError: an argument does not fit; it names the argument.

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
        ids: the experts of each token, int32 or int64; one outside [0, E) is skipped.
        scores: their scores; the gradient goes to them. float32, bfloat16 or float16.
        E: experts.
        capacity: rows to have memory for. Pairs past it are skipped: the highest experts' last
            tokens. None: a row for every pair.

    Shape:
        ids and scores (..., K).

    Returns:
        A Routing with `capacity` rows, or T * K.

    Raises:
        ValueError: an argument does not fit.
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
    """Sort the rows of (token, expert, score), any number for each token, as `moe_general` does.

    Args:
        tokens, experts: the token and the expert of each pair, int32 or int64, sorted by token. A
            pair outside [0, T) or [0, E) is skipped. `rounded_router` returns such pairs.
        scores: their scores; the gradient goes to them.
        T, E: tokens and experts.

    Shape:
        tokens, experts and scores (pairs).

    Returns:
        A Routing with as many rows as pairs.

    Raises:
        ValueError: an argument does not fit.
    """
    _library.require_device(tokens, "tokens")
    _library.require_together(tokens, "tokens", experts=experts, scores=scores)
    args = (tokens, experts, scores.detach(), T, E)
    memory = ops.call_undifferentiated(_ops.route_general.default, *args)
    return Routing(memory, scores, GENERAL, T, E, 0, tokens.shape[0])


def route_rows(counts: Tensor, rows: int, row_scores: Tensor | None = None) -> Routing:
    """Describe rows that are sorted by expert already, as `grouped_experts` takes them: then
    `gathered_mm` gathers nothing, and `combine_mm` scales rows and adds none.

    Args:
        counts: rows of each expert, int32 or int64, at least 0, with a sum of at most `rows`. From
            offsets: `offsets.diff()`.
        rows: the number of rows, used or not.
        row_scores: the factor of each row's result; the gradient goes to them. None: 1.

    Shape:
        counts (E), row_scores (rows).

    Returns:
        A Routing with `rows` rows.

    Raises:
        ValueError: an argument does not fit; on the CPU, also if the counts do not.
    """
    _library.require_device(counts, "counts")
    _library.require_together(counts, "counts", row_scores=row_scores)
    if row_scores is not None:
        row_scores = row_scores.float()
    detached = None if row_scores is None else row_scores.detach()
    memory = ops.call_undifferentiated(_ops.route_grouped.default, counts, detached, rows)
    return Routing(memory, row_scores, GROUPED, rows, counts.shape[0], 0, rows)


def gathered_mm(x: Tensor, W: Tensor, routing: Routing, *, bias: Tensor | None = None) -> Tensor:
    """Compute h_r = W_e x_t + bias_e for each row r, of a token t and an expert e.

    The rows of x are gathered while the GEMM loads them, and nothing else is made of them.

    Args:
        x: the tokens; float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on a GPU.
        W: the experts' weights, in x's dtype.
        routing: from `route`, `route_ids`, `route_pairs` or `route_rows`.
        bias: added in float32, before rounding.

    Shape:
        x (..., d), with T tokens, or of `route_rows` (rows, d); W (E, n, d), either of the last two
        dimensions contiguous; bias (E, n). d and n are multiples of 8.

    Returns:
        h (capacity, n), of x's dtype, sorted by expert. The rows from M on are zero.

    Raises:
        ValueError: a shape, a dtype, a device or the routing does not fit; it names the argument.
        TypeError: an argument is no tensor.
        NotImplementedError: no kernel supports the dtype or the layout; W is quantised.

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
            f"tilemoe: x has shape {shape_text(x.shape)}, expected {routing.T} rows for this routing"
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
    """Compute out_t = addend_t + sum over the token's rows r of s_r (W_e a_r + bias_e).

    Args:
        a: a row for each row of the routing: h of `gathered_mm` after an activation. The rows from
            M on are not read, and their gradient is zero.
        W: the experts' weights, in a's dtype.
        routing: that of `gathered_mm`.
        bias: of the second GEMM.
        addend: added to the output in float32 before rounding, a residual for instance.

    Shape:
        a (capacity, n); W (E, d, n), either of the last two dimensions contiguous; bias (E, d);
        addend (..., d) with T tokens, or (rows, d) of `route_rows`. d and n are multiples of 8.

    Returns:
        out (T, d), or of addend's shape if it is given, in a's dtype. Of `route_rows` (rows, d):
        each row times its score, and zero from M on.

    Raises:
        As `gathered_mm`.
    """
    a, W, bias, addend = _checked("combine_mm", "a", a, W, routing, bias, addend)
    if a.dim() != 2 or a.shape[0] != routing.capacity:
        raise ValueError(
            f"tilemoe: a has shape {shape_text(a.shape)}, expected ({routing.capacity}, n) for this "
            "routing"
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
    """The tensors, cast if under autocast."""
    if isinstance(W, QuantizedExperts):
        raise NotImplementedError(
            f"tilemoe: W is a QuantizedExperts, and {function} takes no quantised weights: expected "
            "a torch.Tensor, W.dequantize() for instance"
        )
    if not isinstance(routing, Routing):
        kind = _library.class_of(routing)
        raise TypeError(f"tilemoe: routing is a {kind}, expected a tilemoe.Routing")
    _library.require_device(rows, name)
    _library.require_weight(W, "W")
    _library.require_together(rows, name, W=W, bias=bias, addend=addend, routing=routing.memory)
    if rows.device.type != "meta" and torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, W, bias, addend = (_cast(tensor, dtype) for tensor in (rows, W, bias, addend))
    _library.require_dtype(rows)
    if W.dim() != 3 or W.shape[0] != routing.E:
        raise ValueError(
            f"tilemoe: W has shape {shape_text(W.shape)}, expected three dimensions, the first "
            f"{routing.E}, for this routing"
        )
    return rows, W, bias, addend


def _cast(tensor, dtype):
    if tensor is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


# ---------------------------------------------------------------- rows


def weighted_sum(rows: Tensor, routing: Routing) -> Tensor:
    """rows (capacity, d), one of each pair -> (T, d): the sum of each token's rows times their
    scores, in float32, in the order of the token's K, rounded once. Of a top-K routing."""
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
