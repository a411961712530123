"""Define the gradient of the layer, one autograd function for `experts` and `moe`.

The package's functions call it, and it is the autograd kernel of both operators. forward calls the
operator, or experts_part for one chunk of tokens after another. backward lists the stages of the
gradients that are needed, and runs one after another.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _given_memory, ops
from ._engine import needed_now
from ._library import operators
from ._overwrite import (
    CONSUMED, NO_MEMORY, NOT_KEPT, Left, Progress, capture_of, is_read_last, is_traced,
)  # fmt: skip
from ._layout import GRADIENTS, WEIGHTS, h_width, offsets_of, reads_logits
from ._shapes import (
    WANTED_B1, WANTED_B1_UP, WANTED_S, WANTED_W1, WANTED_W1_UP, WANTED_X, empty_gradients,
)  # fmt: skip
from ._travel import Comm
from .options import GROUPED, SCORES_GIVEN, At

_INPUTS, _FIRST = 11, 2  # inputs of Experts, and the first one with a gradient
_ALL = (1 << len(GRADIENTS)) - 1
_SETS = range(1 << (len(GRADIENTS) + 1))  # of gradients, with that of the router's bias
# Positions of the bits of each set.
BITS = [[bit for bit in range(len(GRADIENTS) + 1) if bits & 1 << bit] for bits in _SETS]
OF_W1 = WANTED_W1 | WANTED_W1_UP | WANTED_B1 | WANTED_B1_UP  # computed from dH and X alone
_REFUSALS = (
    ValueError,
    NotImplementedError,
    torch.OutOfMemoryError,
)  # errors before anything is written


class Call(NamedTuple):
    """Arguments and options of `experts` or `moe` except the third argument and nine tensors."""

    op: Any
    rest: tuple  # the arguments after the addend: capacity, if it has one, numbers and reals
    overwrite_H: bool | None
    more: bool = False  # return all outputs but H, instead of O
    given: tuple[Tensor | None, ...] | None = None  # WeightGradients: memory of the caller
    accumulate: bool = False
    comm: Comm | None = None
    keep_H: bool | None = None  # set if the operator itself was called, which also returns H


class Stage(NamedTuple):
    """Call of an operator in backward."""

    gradients: int  # bits of the gradients that exist after it
    from_dH: bool = False  # reads dH, which H contains, instead of dO
    chunk: int | None = None  # chunk of the tokens; None: all


WHOLE = [Stage(bits) for bits in _SETS]  # a pass in one stage
_ROUTER = Stage(WANTED_S, from_dH=True)  # gradient of the logits from that of the scores


# ---------------------------------------------------------------- forward and backward


class Experts(torch.autograd.Function):
    """Autograd function of a Call, its third argument, X, the router, six weights, the addend."""

    @staticmethod
    def forward(ctx, call, third, X, router, *others):
        *weights, addend = others
        op, rest, overwrite_H, more, _, _, comm, keep_H = call
        of_operator, numbers = keep_H is not None, rest[-2]
        if not of_operator:
            keep_H = True in ctx.needs_input_grad[_FIRST : _FIRST + len(GRADIENTS)]
        if comm is not None and comm.chunks is not None:
            O, H, *routed = forward_in_chunks(X, third, weights, *rest, keep_H, comm)
        else:
            invoke = ops.below_autograd if of_operator else ops.call_undifferentiated
            args = X, router, third, weights, addend, *rest, keep_H, bool(overwrite_H)
            O, H, *routed = invoke(op, *args)
        source = X if comm is None else comm.source
        routing = routed[0] if routed else third
        scoring, kind = numbers[At.SCORING], numbers[At.KIND]
        logits = router if scoring != SCORES_GIVEN and reads_logits(scoring, kind) else None
        ctx.save_for_backward(source, H, routing, *weights, logits)
        ctx.set_materialize_grads(False)  # H would have a zero gradient as large as H
        ctx.call, ctx.keep_H, ctx.progress = call, keep_H, Progress()
        ctx.router_dtype = torch.float32 if router is None else router.dtype
        ctx.capture = capture_of(H) if overwrite_H is None else None
        returned = [H, *routed] if of_operator else routed if more else []
        if not returned:
            return O
        ctx.mark_non_differentiable(*returned)
        return O, *returned

    @staticmethod
    def backward(ctx, dO, *_):
        if dO is None:
            return (None,) * _INPUTS
        needs = needed_now(ctx) >> _FIRST  # the addend's bit is the last
        walk = Walk(ctx, dO, needs & _ALL, needs > _ALL)
        try:
            while walk.stages:
                walk.run(walk.stages[0])
            return None, None, *walk.gradients()
        except Exception as error:
            walk.stop(error)
            raise


def forward_in_chunks(X, routing, weights, capacity, numbers, reals, keep_H, comm):
    """Compute `experts` without addend while X arrives and O leaves, chunk by chunk."""
    O = torch.empty_like(X)
    shape = (capacity, h_width(numbers[At.ACTIVATION], weights[WEIGHTS.index("W2")].shape[2]))
    H = X.new_empty(shape) if keep_H else None
    for chunk in range(len(comm.chunks.cuts) - 1):
        comm.travel.chunk_arrived(chunk)
        ops.experts_part(X, routing, weights, comm.chunks, chunk, capacity, numbers, reals, O, H)
        comm.travel.chunk_made(O)
    return O, X.new_empty(0) if H is None else H


# ---------------------------------------------------------------- the stages of backward


class Walk:
    """One backward pass through one call: the stages to run and the eight gradients made so far.

    A gradient is None if it is given, not wanted or not yet made.
    """

    def __init__(self, ctx, dO, wanted, of_addend):
        """Start with the bits of the gradients to compute, and whether the addend's is needed."""
        self.call, self.progress, self.dO = ctx.call, ctx.progress, dO
        self.wanted, self.of_addend = wanted, of_addend
        self.over_H = self.has_dH = False  # dH will be written over H; H contains dH
        self.made: list[Tensor | None] = [None] * len(GRADIENTS)
        self.stages: list[Stage] = []
        self.parts: Any = None  # output of the stages of all chunks
        if self.progress.consumed and self.progress.left is None:
            if self.call.overwrite_H is None:
                ctx.saved_tensors  # if torch has freed them, its error explains retain_graph
            raise RuntimeError(CONSUMED)
        numbers, reals = self.call.rest[-2:]
        self.scores_given = numbers[At.SCORING] == SCORES_GIVEN
        X, H, routing, weights, logits = self._tensors(ctx.saved_tensors)
        self.saved = ops.Saved(
            X, H, routing, weights, logits, numbers, reals, ctx.router_dtype
        )
        if wanted:
            self._begin(ctx)

    def _tensors(self, saved):
        X, H, routing, *weights, logits = saved
        return X, H, routing, weights, logits

    def _begin(self, ctx):
        """Decide whether dH is written over H, and list the stages."""
        if not ctx.keep_H:
            raise RuntimeError(NOT_KEPT)
        call, progress, H = self.call, self.progress, self.saved.H
        given = call.given
        self.of_given = 0 if given is None else _given_memory.bits_of(given)
        self.traced, self.over_H = is_traced(H), call.overwrite_H
        if self.over_H is None:
            self.over_H = progress.consumed or (not self.traced and is_read_last(ctx, H))
        compiling = self.traced and torch.compiler.is_compiling()
        if (self.over_H or given is not None) and torch.is_grad_enabled() and not compiling:
            raise NotImplementedError(
                ops.NO_SECOND_GRADIENT
            )  # memory that was written has no history
        if call.comm is not None:
            self.saved = self.saved._replace(X=call.comm.travel.begin(self.saved.X))
        if progress.left is not None:
            self._continue()
            return
        self.stages = self._all_stages()
        if self.over_H and not compiling:
            progress.claim()

    def _all_stages(self):
        """Return all stages.

        The gradients of W1 and b1 are a separate last stage while X may arrive, and in a trace:
        their memory is allocated when dX's workspace is free. Otherwise the operator does this.
        """
        call, first, last = self.call, self.wanted & ~OF_W1, self.wanted & OF_W1
        apart = self.traced or (call.comm is not None and call.comm.travel.overlap)
        if not (self.over_H and apart and first and last & ~self.of_given):
            return [WHOLE[self.wanted]]
        from_dH = Stage(last, from_dH=True)
        if self.traced or call.comm.chunks is None or call.given is not None:
            return [Stage(first), from_dH]
        *chunks, last_chunk = range(len(call.comm.chunks.cuts) - 1)
        return [*(Stage(0, chunk=c) for c in chunks), Stage(first, chunk=last_chunk), from_dH]

    def _continue(self):
        """Continue an earlier pass, which wrote dH over H."""
        if self.call.comm is not None:
            self.call.comm.travel.gradient_arrived()
            self.call.comm.travel.arrived()
        left = self.progress.take(self.dO, self.wanted)
        self.has_dH, self.made, self.stages = True, list(left.made), left.stages
        self.saved = self.saved._replace(H=left.dH)

    def run(self, stage):
        """Run the first of the stages."""
        call, comm, complete = self.call, self.call.comm, True
        new = stage.gradients & ~self.of_given
        given = None if call.given is None else _given_memory.of(call.given, stage.gradients)
        if comm is not None:
            if not stage.from_dH:
                comm.travel.gradient_arrived(stage.chunk)
            if len(self.stages) == 1:
                comm.travel.arrived()
        dO, over_H, accumulate = None if stage.from_dH else self.dO, self.over_H, call.accumulate
        if stage == _ROUTER:
            found = [ops.router_backward(self.made[1], self.saved)]
        elif not over_H and call.given is None:
            found = ops.experts_backward(dO, self.saved, new)
        elif not over_H or self.traced:
            found = _given_memory.backward(dO, self.saved, over_H, given, new, accumulate)
        elif stage.chunk is not None:
            found = self._part(stage)
        else:
            found, complete = ops.experts_backward_over_H(dO, self.saved, given, new, accumulate)
        for bit, gradient in zip(BITS[new if complete else new & ~OF_W1], found):
            self.made[bit] = gradient
        self.has_dH = self.over_H and (stage.chunk is None or stage.gradients != 0)
        if complete:
            self.stages = self.stages[1:]
        elif not stage.from_dH:
            self.stages = [*self._left_of(stage, new), *self.stages[1:]]
        if comm is not None and new & WANTED_X:
            comm.travel.made(self.made[0])
        if not complete:
            raise torch.OutOfMemoryError(NO_MEMORY)

    def _left_of(self, stage, new):
        """Return the stages that experts_backward_over_H had no memory for after writing dH."""
        if new & WANTED_S and not self.scores_given:
            yield _ROUTER
        if new & OF_W1:
            yield Stage(stage.gradients & OF_W1, from_dH=True)

    def _part(self, stage):
        """Return the gradients of all chunks after the last chunk, else none."""
        if self.parts is None:
            X, H, _, weights, _, numbers, *_ = self.saved
            made = empty_gradients(X, H, weights, numbers, self.wanted & ~OF_W1)
            self.parts = made, ops.empty_workspace(self.saved)
        made, workspace = self.parts
        chunks = self.call.comm.chunks
        ops.experts_backward_part(self.dO, self.saved, made, chunks, stage.chunk, workspace)
        if not stage.gradients:
            return []
        self.parts = None
        return [made[bit] for bit in BITS[stage.gradients]]

    def gradients(self):
        """Return all nine gradients, in the types of their tensors."""
        of_X, of_router, *of_weights = self.made[: len(GRADIENTS)]
        if of_router is not None and self.scores_given:
            of_router = of_router.to(self.saved.router_dtype)
        of_addend = _addend_gradient(self.dO, self.saved) if self.of_addend else None
        return of_X, of_router, *of_weights, of_addend

    def stop(self, error):
        """Decide, after an error, what another pass may do."""
        if not self.over_H:
            return
        if self.has_dH:
            dO, H, made, stages = self.dO, self.saved.H, self.made, self.stages
            self.progress.left = Left(dO, dO._version, self.wanted, H, made, stages)
        elif chunk := self.stages[0].chunk:
            chunks = len(self.call.comm.chunks.cuts) - 1
            raise RuntimeError(
                f"H was overwritten with dH for {chunk} of {chunks} chunks of tokens, then: {error}"
            ) from error
        elif isinstance(error, _REFUSALS):
            self.progress.consumed = False


def _addend_gradient(dO, saved):
    if saved.numbers[At.KIND] != GROUPED:
        return dO
    E = saved.weights[0].shape[0]
    row = torch.arange(dO.shape[0], device=dO.device).unsqueeze(-1)
    return dO.masked_fill(row >= offsets_of(saved.routing, E)[E], 0)  # as in O


# ---------------------------------------------------------------- callers

# Skip the Python of Function.apply, which only functorch needs; with functorch this is not called.
_apply = super(torch.autograd.Function, Experts).apply


def differentiated(
    op, tensors, third, rest, overwrite_H, more, given=None, accumulate=False, comm=None
):
    """Call `experts` or `moe` as the functions do if nothing is traced.

    The result is that of the operator's own autograd kernel in half of the host's time: the call
    passes the dispatcher once, not twice with all arguments as Python objects.

    Args:
        op: The operator.
        tensors: X, the router's tensor, the six weights, the addend.
        third: Third argument of the operator.
        rest: Other arguments of the operator without keep_H; numbers and reals are the last.
        overwrite_H: As in `Options`.
        more: Return all outputs but H.
        given: Memory for weights' gradients, stored as it is and not as saved tensors, because
            other layers and micro-batches add to it meanwhile.
        accumulate: As in `Options`.
        comm: A Comm, whose source is saved in the place of X.

    Returns:
        O; for `moe` with `more` O, routing, expert_counts.
    """
    if forward_ad._current_level >= 0:
        ops.refuse_tangents((*tensors, third))
    call = Call(op, rest, overwrite_H, more, given, accumulate, comm)
    apply = Experts.apply if torch.compiler.is_compiling() else _apply
    return apply(call, third, *tensors)


def _register(name):
    """Make Experts the operator's autograd kernel."""
    op = getattr(operators, name).default

    def kernel(X, router, third, weights, addend, *rest):
        tensors = X, router, *weights, addend
        if forward_ad._current_level >= 0:
            ops.refuse_tangents((*tensors, third))
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors, third):
            ops.refuse_transforms()
            *rest, keep_H, overwrite_H = rest
            return _apply(Call(op, rest, overwrite_H, keep_H=keep_H), third, *tensors)
        return ops.below_autograd(op, X, router, third, weights, addend, *rest)

    ops.register_autograd(name, kernel)


_register("experts")
_register("moe")
