"""Define the gradient of the layer with its router, one autograd function for `moe_with_router`.

Backward is one operator: it computes the gradient of the logits before dX, so that the kernel that
sums dX over the experts adds the router's part.
"""

import torch
from torch.autograd import forward_ad

from . import ops
from ._engine import needed_now
from ._layout import GRADIENTS, reads_logits
from ._library import operators
from ._overwrite import ANOTHER_GRADIENT, NO_MEMORY, Progress, capture_of
from ._shapes import OF_ROUTER_BIAS
from .autograd import BITS, OF_W1, WHOLE, Call, Stage, Walk
from .options import TOP_K, At

# Inputs: the call, the selection bias, X, the router's weight, six weights, the addend, the bias.
_FIRST, _ADDEND, _BIAS = 2, 2 + len(GRADIENTS), 3 + len(GRADIENTS)
_INPUTS = _BIAS + 1
_ALL = (1 << len(GRADIENTS)) - 1
_op = operators.moe_with_router.default


def _rows(tensor):
    """Return (..., d) as (T, d)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


class WithRouter(torch.autograd.Function):
    """Autograd function of `moe_with_router`.

    It returns O; with `more` also routing, expert_counts and logits. The gradient of the logits,
    for example that of the losses, is part of the same backward. X, and then O, has any number of
    leading dimensions: as a view outside of this node it would be two more nodes.
    """

    @staticmethod
    def forward(ctx, call, selection_bias, X, router_weight, *others):
        *weights, addend, router_bias = others
        of_operator, needs = call.keep_H is not None, ctx.needs_input_grad
        keep_H = call.keep_H if of_operator else True in needs[_FIRST:_ADDEND] or needs[_BIAS]
        invoke = ops.below_autograd if of_operator else ops.call_undifferentiated
        O, H, routing, expert_counts, logits = invoke(
            _op, _rows(X), router_weight, router_bias, selection_bias, weights, addend, *call.rest, keep_H,
            bool(call.overwrite_H),
        )  # fmt: skip
        if X.dim() != 2:  # without history, as a view that is an output must not change in place
            O = O.view_as(X).data
        kept = logits if reads_logits(call.rest[0][At.SCORING], TOP_K) else None
        ctx.save_for_backward(X, H, routing, router_weight, *weights, kept)
        ctx.set_materialize_grads(False)  # H would have a zero gradient as large as H
        ctx.call, ctx.keep_H, ctx.progress = call, keep_H, Progress()
        ctx.router_dtype = router_weight.dtype
        ctx.capture = capture_of(H) if call.overwrite_H is None else None
        if not of_operator and not call.more:
            return O
        fixed = (H, routing, expert_counts) if of_operator else (routing, expert_counts)
        if needs[_FIRST] or needs[_FIRST + 1] or needs[_BIAS]:
            ctx.mark_non_differentiable(*fixed)
        else:  # as the output of a linear layer whose inputs are all frozen
            ctx.mark_non_differentiable(*fixed, logits)
        return O, *fixed, logits

    @staticmethod
    def backward(ctx, dO, *others):
        dlogits, needs = others[-1] if others else None, needed_now(ctx) >> _FIRST
        wanted = needs & _ALL | (needs >> _BIAS - _FIRST & 1) * OF_ROUTER_BIAS
        if dO is None:
            return None, None, *_of_logits_alone(ctx, dlogits, wanted)
        walk = _Walk(ctx, dO, dlogits, wanted, bool(needs >> _ADDEND - _FIRST & 1))
        try:
            while walk.stages:
                walk.run(walk.stages[0])
            dX, *gradients, of_addend = walk.gradients()
            if dX is not None and dO.dim() != 2:
                dX = dX.view_as(dO)
            return None, None, dX, *gradients, of_addend, walk.made[-1]
        except Exception as error:
            walk.stop(error)
            raise


def _of_logits_alone(ctx, dlogits, wanted):
    """Return the gradients if only the logits have one, such as that of the losses."""
    gradients = [None] * (_INPUTS - _FIRST)
    if dlogits is not None:
        X, router_weight = (ctx.saved_tensors[i] for i in (0, 3))
        if wanted & 1:
            gradients[0] = (dlogits @ router_weight).view(X.shape)
        if wanted & 2:
            gradients[1] = dlogits.mT @ _rows(X)
        if wanted & OF_ROUTER_BIAS:
            gradients[-1] = dlogits.sum(0)
    return gradients


class _Walk(Walk):
    """One backward pass: a Walk whose second gradient is that of the router's weight.

    A ninth gradient is that of the router's bias.
    """

    def __init__(self, ctx, dO, dlogits, wanted, of_addend):
        self.dlogits = dlogits
        super().__init__(ctx, dO, wanted, of_addend)
        if len(self.made) == len(GRADIENTS):  # not the made of an earlier pass
            self.made.append(None)

    def _tensors(self, saved):
        X, H, routing, self.router_weight, *weights, logits = saved
        return _rows(X), H, routing, weights, logits

    def _all_stages(self):
        self.progress.dlogits = self.dlogits
        return [WHOLE[self.wanted]]

    def _continue(self):
        before, now = self.progress.dlogits, self.dlogits
        if before is not now and (before is None or now is None or not torch.equal(before, now)):
            raise RuntimeError(ANOTHER_GRADIENT)
        super()._continue()

    def run(self, stage):
        """Run a stage; after a lack of memory, the rest of a pass is that of a Walk."""
        if stage.from_dH:
            super().run(stage)
            return
        args = _rows(self.dO), self.dlogits, self.saved, self.router_weight, self.wanted
        complete, made = True, self.wanted
        # While backward is traced, H is only claimed: the trace may run more than once.
        if not self.over_H or self.traced:
            found = ops.moe_with_router_backward(*args)
        else:
            found, complete = ops.moe_with_router_backward_over_H(*args)
            self.has_dH = True
            if not complete:
                made &= ~OF_W1
        for bit, gradient in zip(BITS[made], found):
            self.made[bit] = gradient
        self.stages = [] if complete else [Stage(self.wanted & OF_W1, from_dH=True)]
        if not complete:
            raise torch.OutOfMemoryError(NO_MEMORY)


# ---------------------------------------------------------------- callers

# As in autograd.py.
_apply = super(torch.autograd.Function, WithRouter).apply


def differentiated(X, router, selection_bias, weights, addend, rest, overwrite_H, more):
    """Call `moe_with_router` if nothing is traced.

    Args:
        X: Tokens, shape (..., d), contiguous if they have more than two dimensions.
        router: The router's weight, and its bias or None.
        selection_bias: As in `moe`, like the arguments after it.
        weights: The six weights.
        addend: Shape (T, d).
        rest: numbers and reals.
        overwrite_H: As in `Options`.
        more: Return also routing, expert_counts and logits.
    """
    weight, bias = router
    if forward_ad._current_level >= 0:
        ops.refuse_tangents((X, weight, bias, selection_bias, *weights, addend))
    call = Call(_op, rest, overwrite_H, more)
    return _apply(call, selection_bias, X, weight, *weights, addend, bias)


def _kernel(X, router_weight, router_bias, selection_bias, weights, addend, *rest):
    tensors = X, router_weight, router_bias, *weights, addend
    if forward_ad._current_level >= 0:
        ops.refuse_tangents((*tensors, selection_bias))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors, selection_bias):
        ops.refuse_transforms()
        *rest, keep_H, overwrite_H = rest
        call = Call(_op, tuple(rest), overwrite_H, keep_H=keep_H)
        return _apply(call, selection_bias, X, router_weight, *weights, addend, router_bias)
    return ops.below_autograd(
        _op, X, router_weight, router_bias, selection_bias, weights, addend, *rest
    )


ops.register_autograd("moe_with_router", _kernel)
