"""Define the gradient of the layer with low-rank adapters, quantised weights, or both.

One autograd function, which `moe`, `moe_general` and `grouped_experts` call, is also the autograd
kernel of experts_lora. Backward with adapters is one call of an operator, whose largest outputs are
those of the factors, unless weights require gradients as well. Without adapters, if dH is written
over H, the gradients of W1 and b1 are a second call, when the memory of the first is free.
"""

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from . import ops
from ._engine import needed_now
from ._layout import FACTORS, GRADIENTS, QUANTIZABLE, WEIGHTS, h_width, reads_logits
from ._library import operators
from ._overwrite import CONSUMED, NOT_KEPT, Progress, capture_of, is_read_last, is_traced
from ._quantized import without_master
from ._shapes import WANTED_S, WANTED_W1, WANTED_W1_UP, WANTED_X
from ._travel import Comm
from .autograd import _REFUSALS, OF_W1, _addend_gradient
from .options import RULE, SCORES_GIVEN, At

_ops = operators
_FIRST = 3  # first input of Experts with a gradient
_INPUTS = _FIRST + len(GRADIENTS) + 1 + len(FACTORS)  # without the arrays of quantised weights
_ALL = (1 << len(GRADIENTS)) - 1
_QUANTIZABLE = [WEIGHTS.index(name) for name in QUANTIZABLE]
_NO_GRADIENT = "an array of a quantised weight requires a gradient, expected requires_grad=False"


class Call(NamedTuple):
    """Options of a call."""

    capacity: int
    ranks: list[int]
    scales: list[float]
    formats: list[int]
    numbers: list[int]
    reals: list[float]
    overwrite_H: bool | None = None
    keep_H: bool | None = None  # set if the operator itself was called, which also returns H
    comm: Comm | None = None


class LoraExperts(torch.autograd.Function):
    """Autograd function of a Call, the routing and the packed factors.

    Further inputs are X, the router's tensor, six weights, the addend, six factors, and the arrays
    of quantised weights, if any.
    """

    @staticmethod
    def forward(ctx, call, routing, packed, X, router, *others):
        weights, addend = list(others[: len(WEIGHTS)]), others[len(WEIGHTS)]
        lora = list(others[len(WEIGHTS) + 1 : _INPUTS - _FIRST - 2])
        quantized = list(others[_INPUTS - _FIRST - 2 :])
        if True in ctx.needs_input_grad[_INPUTS:]:
            raise NotImplementedError(_NO_GRADIENT)
        of_operator, needs = call.keep_H is not None, ctx.needs_input_grad[_FIRST:_INPUTS]
        of_addend = len(GRADIENTS)
        weights = _of_operator(weights, needs[2:], call.formats, X)
        needs = (*needs[:of_addend], *needs[of_addend + 1 :])
        keep_H = call.keep_H if of_operator else True in needs
        invoke = ops.below_autograd if of_operator else ops.call_undifferentiated
        O, H, P1, P2 = invoke(
            _ops.experts_lora.default, X, router, routing, weights, addend, lora, packed, quantized,
            *call[:6], keep_H,
        )  # fmt: skip
        scoring, kind = call.numbers[At.SCORING], call.numbers[At.KIND]
        logits = router if scoring != SCORES_GIVEN and reads_logits(scoring, kind) else None
        source = X if call.comm is None else call.comm.source
        ctx.save_for_backward(source, H, P1, P2, routing, packed, *weights, logits, *quantized)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.keep_H, ctx.progress = call, keep_H, Progress()
        ctx.router_dtype = torch.float32 if router is None else router.dtype
        ctx.factor_dtypes = [None if factor is None else factor.dtype for factor in lora]
        ctx.capture = capture_of(H) if call.overwrite_H is None else None
        if not of_operator:
            return O
        ctx.mark_non_differentiable(H, P1, P2)
        return O, H, P1, P2

    @staticmethod
    def backward(ctx, dO, *_):
        if dO is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = needed_now(ctx) >> _FIRST & (1 << _INPUTS - _FIRST) - 1
        of_addend = needs & (_ALL + 1)
        wanted = needs & _ALL | needs >> 1 & ~_ALL  # without the addend's bit
        if ctx.progress.consumed:
            raise RuntimeError(CONSUMED)
        X, H, P1, P2, routing, packed, *weights = ctx.saved_tensors
        weights, quantized = weights[: len(WEIGHTS) + 1], weights[len(WEIGHTS) + 1 :]
        logits, call = weights.pop(), ctx.call
        saved = ops.Saved(
            X, H, routing, weights, logits, call.numbers, call.reals, ctx.router_dtype
        )
        made = [None] * (len(GRADIENTS) + len(FACTORS))
        if wanted:
            if not ctx.keep_H:
                raise RuntimeError(NOT_KEPT)
            if call.comm is not None:
                saved = saved._replace(X=_arrived(call.comm.travel, X))
            of_backward = [saved]
            del H, saved  # _backward frees codes of H
            found, saved = _backward(ctx, dO, of_backward, P1, P2, packed, quantized, wanted)
            for bit in range(len(made)):
                if wanted & 1 << bit:
                    made[bit] = found.pop(0)
            if call.comm is not None and wanted & WANTED_X:
                call.comm.travel.made(made[0])
        if wanted & WANTED_S:
            if call.numbers[At.SCORING] != SCORES_GIVEN:
                made[1] = ops.router_backward(made[1], saved)
            else:
                made[1] = made[1].to(ctx.router_dtype)
        of_layer, factors = made[: len(GRADIENTS)], made[len(GRADIENTS) :]
        typed = zip(factors, ctx.factor_dtypes)
        factors = [None if g is None else g.to(dtype) for g, dtype in typed]
        dO = _addend_gradient(dO, saved) if of_addend else None
        return None, None, None, *of_layer, dO, *factors, *(None,) * len(quantized)


def _of_operator(weights, need_gradient, formats, X):
    """Return the weights as operators read them: masters of FP8 weights only for their shapes."""
    for place in _QUANTIZABLE if formats else ():
        if formats[QUANTIZABLE.index(WEIGHTS[place])] and need_gradient[place]:
            weights[place] = without_master(weights[place], X)
    return weights


def _arrived(travel, source):
    """Return X of all ranks.

    Nothing is computed while X or dO is in transfer: the gradients of the factors read both.
    """
    X = travel.begin(source)
    travel.gradient_arrived()
    travel.arrived()
    return X


def _backward(ctx, dO, saved, P1, P2, packed, quantized, wanted):
    """Return the gradients of `wanted`, and `saved`, a list of one, as it is afterwards.

    dH is written over H if nothing reads H afterwards. Codes of H are then overwritten, and freed.
    """
    saved = saved.pop()
    call, X, H, traced = ctx.call, saved.X, saved.H, is_traced(saved.H)
    over_H = bool(call.overwrite_H) if call.overwrite_H is not None else is_read_last(ctx, H)
    over_H = over_H and not traced  # a trace saves H
    given = {dtype for dtype in ctx.factor_dtypes if dtype is not None}
    factor_dtype = X.dtype if given == {X.dtype} else torch.float32
    rest = (
        P1, P2, saved.routing, saved.weights, packed, quantized, call.ranks, call.scales,
        call.formats, call.numbers, call.reals, factor_dtype,
    )  # fmt: skip
    if not over_H:
        op = _ops.experts_lora_backward.default
        return list(ops.call_in_backward(op, dO, X, H, *rest, wanted)), saved
    if torch.is_grad_enabled():
        raise NotImplementedError(ops.NO_SECOND_GRADIENT)
    codes = None
    if call.numbers[At.SAVE_H]:
        n = saved.weights[WEIGHTS.index("W2")].shape[2]
        codes, H = H, X.new_empty((H.shape[0], h_width(call.numbers[At.ACTIVATION], n)))
        saved = saved._replace(H=H)
    op = _ops.experts_lora_backward_over_H.default
    apart = wanted & (WANTED_W1 | WANTED_W1_UP) and wanted & ~OF_W1 and not any(call.ranks)
    last = wanted & OF_W1 if apart else 0
    ctx.progress.claim()
    try:
        made = iter(ops.call_undifferentiated(op, dO, X, H, *rest, wanted & ~last, codes))
    except _REFUSALS:  # errors before anything is written
        ctx.progress.consumed = False
        raise
    codes = None
    if not last:
        return list(made), saved
    _free_saved_tensors(ctx)
    of_W1 = iter(ops.call_undifferentiated(op, None, X, H, *rest, last))
    bits = (1 << bit for bit in range(wanted.bit_length()) if wanted & 1 << bit)
    return [next(of_W1 if bit & last else made) for bit in bits], saved


def _free_saved_tensors(ctx):
    """Free the saved tensors that backward does not hold itself, if the graph is not kept."""
    free = getattr(ctx, "maybe_clear_saved_tensors", None)
    if free is not None:
        free()


# ---------------------------------------------------------------- callers

_apply = super(torch.autograd.Function, LoraExperts).apply  # as in autograd.py


def run(
    X, router, routing, weights, addend, factors, quantized, capacity, numbers, reals, overwrite_H,
    comm,
):  # fmt: skip
    """Compute O (T, d) with a given routing.

    The factors are packed once, for forward and backward. quantized: Operands of the weights;
    comm: through which backward gets X, or None.
    """
    if any(factors.ranks):
        packed = ops.call_undifferentiated(
            _ops.pack_lora.default, [None if t is None else t.detach() for t in factors.tensors],
            [None if t is None else t.detach() for t in weights], factors.ranks, factors.scales,
            quantized.formats, numbers, X.dtype,
        )  # fmt: skip
    else:
        packed = X.new_empty(0, dtype=torch.uint8)
    rest = capacity, factors.ranks, factors.scales, quantized.formats, numbers, reals
    arrays = quantized.arrays
    args = X, router, routing, weights, addend, factors.tensors, packed, arrays, *rest
    op = _ops.experts_lora.default
    if not torch.is_grad_enabled():
        return ops.call_undifferentiated(op, *args, False)[0]
    tensors = X, router, *weights, addend, *factors.tensors
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        keep_H = any(t is not None and t.requires_grad for t in tensors if t is not addend)
        return ops.call(op, *args, keep_H)[0]
    if forward_ad._current_level >= 0:
        ops.refuse_tangents((*tensors, routing, *arrays))
    return _apply(Call(*rest, overwrite_H, comm=comm), routing, packed, *tensors, *arrays)


def routed(logits, selection_bias, numbers, reals):
    """Return a top-K routing of logits, and expert_counts."""
    detached = logits.detach()
    rule, factor = numbers[: len(RULE)], reals[At.ROUTED_SCALING_FACTOR]
    op = _ops.route_logits.default
    return ops.call_undifferentiated(op, detached, selection_bias, rule, factor)


def _kernel(X, router, routing, weights, addend, lora, packed, quantized, *rest):
    tensors = X, router, *weights, addend, *lora
    if forward_ad._current_level >= 0:
        ops.refuse_tangents((*tensors, routing, packed, *quantized))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors, routing, packed):
        ops.refuse_transforms()
        *rest, keep_H = rest
        call = Call(*rest, overwrite_H=False, keep_H=keep_H)
        return _apply(call, routing, packed, *tensors, *quantized)
    op = _ops.experts_lora.default
    args = X, router, routing, weights, addend, lora, packed, quantized, *rest
    return ops.below_autograd(op, *args)


ops.register_autograd("experts_lora", _kernel)
