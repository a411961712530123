"""Define the gradients of `gathered_mm` and `combine_mm`.

For each, one call of an operator computes the gradients that are needed.
"""

from . import _library, ops
from ._engine import needed_now
from ._layout import offsets_of
from .options import GROUPED

_ops = _library.operators


def _wanted(needed, places):
    """Return the bits of the gradients at these places among the arguments, in their order."""
    return sum(1 << bit for bit, place in enumerate(places) if needed & 1 << place)


def _spread(made, wanted, places, arguments):
    """Return each computed gradient at its argument's place, None at the others."""
    gradients, made = [None] * arguments, iter(made)
    for bit, place in enumerate(places):
        if wanted & 1 << bit:
            gradients[place] = next(made)
    return gradients


_GATHERED = 0, 2, 3  # X, W and b among the arguments


def _save_gathered(ctx, args, H):
    X, routing, W, _, _, kind, K = args
    ctx.save_for_backward(X, routing, W)
    ctx.how = kind, K


def _gathered_backward(ctx, dH):
    X, routing, W = ctx.saved_tensors
    wanted = _wanted(needed_now(ctx), _GATHERED)
    args = (dH, X, routing, W, *ctx.how, wanted)
    made = ops.call_in_backward(_ops.gathered_mm_backward.default, *args)
    return tuple(_spread(made, wanted, _GATHERED, 7))


_COMBINED, _ADDEND = (0, 1, 3, 4), 5  # A, scores, W and b


def _save_combined(ctx, args, O):
    A, scores, routing, W, b, _, _, kind, K = args
    ctx.save_for_backward(A, routing, W, b)
    ctx.how, ctx.scores_dtype = (kind, K), None if scores is None else scores.dtype


def _combine_backward(ctx, dO):
    A, routing, W, b = ctx.saved_tensors
    needed = needed_now(ctx)
    wanted = _wanted(needed, _COMBINED)
    args = (dO, A, routing, W, b, *ctx.how, wanted)
    made = ops.call_in_backward(_ops.combine_mm_backward.default, *args) if wanted else []
    gradients = _spread(made, wanted, _COMBINED, 9)
    if gradients[1] is not None:
        gradients[1] = gradients[1].to(ctx.scores_dtype)
    if needed & 1 << _ADDEND:
        gradients[_ADDEND] = of_addend(dO, routing, W.shape[0], ctx.how[0])
    return tuple(gradients)


def of_addend(dO, routing, E, kind):
    """Return the gradient of an addend: O is zero in the rows past the last grouped row."""
    if kind != GROUPED:
        return dO
    row = dO.new_ones(dO.shape[0], dtype=routing.dtype).cumsum(0).unsqueeze(-1)
    return dO.masked_fill(row > offsets_of(routing, E)[E], 0)


ops.differentiate("gathered_mm", _save_gathered, _gathered_backward)
ops.differentiate("combine_mm", _save_combined, _combine_backward)
