"""Calls of the operators in `torch.ops.tilemoe`, whose names and arguments are in
bindings/torch/schema.cpp, and their gradients. Fake kernels are in _shapes.py."""

from typing import NamedTuple, Protocol

import torch
from torch.autograd import forward_ad

from ._engine import needed_now
from ._library import NAMESPACE, operators
from ._overwrite import capture_of, is_read_last, is_traced
from ._packing import GRADIENTS, RULE, WEIGHTS, At, pack_gradients
from ._rules import GROUPED, SCORES_GIVEN, TOP_K, h_width, offsets_of, reads_logits
from ._shapes import WANTED_B1, WANTED_B1_UP, WANTED_W1, WANTED_W1_UP, WANTED_X, empty_gradients

_ops = operators
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_EXCEPTIONS = {
    "invalid argument: ": ValueError,
    "unsupported: ": NotImplementedError,
    "out of memory: ": torch.OutOfMemoryError,
}

_NO_TANGENTS = (
    "tilemoe: forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) is not "
    "supported: use backward or torch.autograd.grad"
)
_NO_TRANSFORMS = (
    "tilemoe: torch.func's transforms (grad, vjp, jacrev, vmap, ...) are not supported: use "
    "backward or torch.autograd.grad"
)
_EVERYTHING = 255  # every bit of `wanted`


def _reraise(error):
    text = str(error)
    for status, kind in _EXCEPTIONS.items():
        if text.startswith(status):
            raise kind(text[len(status) :]) from None
    raise error


def refuse_tangents(args):
    """Rejects tensors with a tangent, also in lists, among any arguments: below autograd the
    tangent would be lost, and the derivative would be zero. Callers for which a call costs too much
    check `forward_ad._current_level` first."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    for tensor in args:
        if isinstance(tensor, list):
            refuse_tangents(tensor)
        elif isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(_NO_TANGENTS)


def refuse_transforms():
    """Rejects torch.func's transforms, which cannot use the caller's rule for gradients."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NO_TRANSFORMS)


def call(op, *args):
    """Calls an operator. Turns torch's RuntimeError into a ValueError for a wrong argument, and
    into a NotImplementedError for something that the library does not support."""
    if forward_ad._current_level >= 0:
        refuse_tangents(args)
    try:
        return op(*args)
    except RuntimeError as error:
        _reraise(error)


def call_undifferentiated(op, *args):
    """The same if no gradient can be required. It skips the autograd kernels, which are Python and
    take a third of the host's time."""
    if torch.compiler.is_compiling():  # it costs nothing there, and the guard cannot be traced
        return call(op, *args)
    if forward_ad._current_level >= 0:
        refuse_tangents(args)
    try:
        with _BelowAutograd():
            return op(*args)
    except RuntimeError as error:
        _reraise(error)


def call_in_backward(op, *args):
    """Calls an operator from a gradient's rule. The operator's autograd kernel rejects gradients of
    gradients; without create_graph none are required, and the kernel is skipped."""
    if torch.is_grad_enabled():
        return call(op, *args)
    return call_undifferentiated(op, *args)


# ---------------------------------------------------------------- gradients


def _top_k_context(ctx, inputs, output):
    logits, _, rule, routed_scaling_factor, _ = inputs
    scores, ids, expert_counts = output
    ctx.mark_non_differentiable(ids, expert_counts)
    _save_scores(ctx, logits, ids, scores, rule[At.SCORING], routed_scaling_factor)


def _scores_at_context(ctx, inputs, output):
    logits, ids, *how = inputs
    _save_scores(ctx, logits, ids, output, *how)


def _save_scores(ctx, logits, ids, scores, scoring, routed_scaling_factor):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(ids, scores, logits if reads_logits(scoring, TOP_K) else None)
    ctx.how = logits.shape[1], scoring, routed_scaling_factor, logits.dtype


def _scores_backward(ctx, dscores, *_):
    """Backward of `top_k` and of `scores_at`: only the first argument has a gradient."""
    others = (None,) * (len(ctx.needs_input_grad) - 1)
    if dscores is None:
        return None, *others
    ids, scores, logits = ctx.saved_tensors
    args = (dscores, ids, scores, logits, *ctx.how)
    return call_in_backward(_ops.top_k_backward.default, *args), *others


def _router_losses_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _router_losses_backward(ctx, dlosses):
    logits, expert_counts = ctx.saved_tensors
    gradient = _ops.router_losses_backward.default
    # The losses' own gradients stay on the device and scale there: the host does not wait.
    of_balance = call_in_backward(gradient, logits, expert_counts, 1.0, 0.0)
    of_z = call_in_backward(gradient, logits, expert_counts, 0.0, 1.0)
    return (dlosses[0] * of_balance + dlosses[1] * of_z).to(logits.dtype), None


CONSUMED = (
    "tilemoe_backward: saved was consumed by an earlier backward that wrote dH over H; "
    "run forward again"
)
_NO_MEMORY = (
    "tilemoe_backward: no memory for the gradients of W1 and b1, and H already contains dH: free "
    "some and call backward again with the same gradient of the output, which continues from dH; "
    "in a graph of several layers, torch has freed the layers nearer the loss: run forward again"
)
_ANOTHER_GRADIENT = (
    "tilemoe_backward: an earlier backward ran out of memory after it had written dH over H, and "
    "only a backward with the same gradient of the output, for the same inputs, can continue from "
    "dH: run forward again"
)
_NO_SECOND_GRADIENT = (
    "tilemoe: gradients of gradients are not supported: run backward without create_graph"
)
_NOT_KEPT = (
    "tilemoe_backward: H was not kept: call the layer with gradients enabled, or the operator "
    "with keep_H"
)


class Travel(Protocol):
    """The communication of one call. Backward computes dW1 and db1 last, from dH and X alone, so X
    may arrive until then, and dX may leave while they are computed."""

    overlap: bool  # dW1 and db1 are a stage of their own; else no communication overlaps

    def begin(self, source: torch.Tensor) -> torch.Tensor:
        """Starts to gather X from what forward kept in its place -> X, which may be on its way."""

    def arrived(self) -> None:
        """Makes the current stream wait for X."""

    def made(self, dX: torch.Tensor) -> None:
        """Sends dX, which the current stream has computed."""

    def gradient_arrived(self, chunk: int | None = None) -> None:
        """Makes the current stream wait for dO, or for a chunk of it."""

    def chunk_arrived(self, chunk: int) -> None:
        """Makes the current stream wait for a chunk of X, in forward; the chunks come in order."""

    def chunk_made(self, O: torch.Tensor) -> None:
        """Sends the next chunk of O, which the current stream has computed."""


class Chunks(NamedTuple):
    """The chunks of a batch whose X, and dO, arrive one chunk at a time."""

    bounds: torch.Tensor  # (chunks + 1, E) int32: first row of each expert and chunk
    cuts: list[int]  # chunks + 1: first token of each chunk


class Comm(NamedTuple):
    """A call's communication, and the tensor that is kept in the place of X."""

    travel: Travel
    source: torch.Tensor
    chunks: Chunks | None = None


def _save_experts(ctx, X, router, weights, H, routing, numbers, reals, keep_H, overwrite_H,
                  comm=None):  # fmt: skip
    """Keeps what the backward of one call of `experts` or `moe` reads: X, H, the routing, the
    weights by reference, and logits only if the scoring's rule reads them."""
    scoring, kind = numbers[At.SCORING], numbers[At.KIND]
    reads = router is not None and scoring != SCORES_GIVEN and reads_logits(scoring, kind)
    ctx.travel, kept, ctx.chunks = (None, X, None) if comm is None else comm
    ctx.save_for_backward(kept, H, routing, *weights, router if reads else None)
    ctx.set_materialize_grads(False)  # none of H's, which is as large as H
    ctx.router_dtype = router.dtype if router is not None else torch.float32
    ctx.numbers, ctx.reals = numbers, reals
    ctx.keep_H, ctx.overwrite_H, ctx.consumed, ctx.begun = keep_H, overwrite_H, False, None
    ctx.capture = capture_of(H) if overwrite_H is None else None


class _Begun(NamedTuple):
    """The state that a backward leaves on its ctx if it runs out of memory when H contains dH."""

    dO: torch.Tensor
    version: int  # dO's
    requested: int  # bits of the gradients to compute, given ones included
    dH: torch.Tensor  # (capacity, 2n or n): what saved-tensor hooks bring back may be H anew
    made: list  # the eight gradients, None for each that is given, not wanted, or left
    left: int  # bits of those that are to be computed from dH
    complete: bool  # else ds is in the place of the router's gradient, which is computed from it

    def check(self, dO, requested):
        same = dO is self.dO or torch.equal(dO, self.dO)
        if requested != self.requested or not same or self.dO._version != self.version:
            raise RuntimeError(_ANOTHER_GRADIENT)


def _experts_gradients(ctx, dO, needs, given=None, accumulate=False):
    """Gradients of X, the router, the six weights and the addend; None for each that `needs`, a
    bool for each, does not require. `given`: six weights' gradients to write, or to add to, which
    are not returned."""
    if ctx.consumed and ctx.begun is None:
        if ctx.overwrite_H is None:
            ctx.saved_tensors  # if torch has freed them, its error explains retain_graph
        raise RuntimeError(CONSUMED)
    X, H, routing, *weights, logits = ctx.saved_tensors
    wanted = 0
    for bit in range(len(GRADIENTS)):
        if needs[bit]:
            wanted |= 1 << bit
    made = [None] * len(GRADIENTS)
    if wanted:
        if not ctx.keep_H:
            raise RuntimeError(_NOT_KEPT)
        traced, overwrite = is_traced(H), ctx.overwrite_H
        if overwrite is None:
            overwrite = ctx.consumed or (not traced and is_read_last(ctx, H))
        if ctx.travel is not None:
            X = ctx.travel.begin(X)
        saved = X, H, routing, weights, logits
        if overwrite and not traced:
            return _gradients_over_H(ctx, dO, saved, needs, wanted, given, accumulate)
        if ctx.travel is not None:
            ctx.travel.gradient_arrived()
            ctx.travel.arrived()
        if given is None and not overwrite:
            dense = call_in_backward(
                _ops.experts_backward.default, dO, X, H, routing, weights, logits, ctx.numbers,
                ctx.reals, ctx.router_dtype, wanted,
            )  # fmt: skip
            _place(dense, wanted, made)
        else:
            made = _gradients_into(ctx, dO, saved, overwrite, wanted, given, accumulate)
            if needs[1] and ctx.numbers[At.SCORING] != SCORES_GIVEN:
                made[1] = _router_gradient(ctx, call_in_backward, made[1], routing, logits, weights)
        if ctx.travel is not None and made[0] is not None:
            ctx.travel.made(made[0])
    return _finished(ctx, made, dO, routing, needs, weights[0].shape[0])


def _router_gradient(ctx, call, ds, routing, logits, weights):
    E, rule = weights[0].shape[0], ctx.numbers[: len(RULE)]
    factor = ctx.reals[At.ROUTED_SCALING_FACTOR]
    args = (ds, routing, logits, E, rule, factor, ctx.router_dtype)
    return call(_ops.router_backward.default, *args)


def _finished(ctx, made, dO, routing, needs, E):
    """The eight gradients in the types of their tensors, and the addend's gradient."""
    if needs[1] and ctx.numbers[At.SCORING] == SCORES_GIVEN:
        made[1] = made[1].to(ctx.router_dtype)
    return [*made, _addend_gradient(ctx, dO, routing, E) if needs[8] else None]


def _place(dense, bits, made):
    """`made`, with the gradients of `bits` in their places."""
    for bit in reversed(range(len(GRADIENTS))):
        if bits & 1 << bit:
            made[bit] = dense.pop()
    return made


_OF_W1 = WANTED_W1 | WANTED_W1_UP | WANTED_B1 | WANTED_B1_UP


def _without_given(wanted, given):
    """The eight gradients, None unless given and required, and the bits of those to make. None in
    place of the eight if none is given."""
    if given is None:
        return None, wanted
    places = [None] * len(GRADIENTS)
    for bit, out in enumerate(given, len(GRADIENTS) - len(WEIGHTS)):
        if out is not None and wanted & 1 << bit:
            places[bit] = out
            wanted &= ~(1 << bit)
    return places, wanted


def _gradients_over_H(ctx, dO, saved, needs, wanted, given, accumulate):
    """_experts_gradients with dH written over H. If it runs out of memory after that, the gradients
    made so far stay on the ctx, and a call with the same dO continues from them."""
    if torch.is_grad_enabled():
        raise NotImplementedError(_NO_SECOND_GRADIENT)  # memory that is written has no history
    _, H, routing, weights, _ = saved
    requested = wanted
    given, wanted = _without_given(wanted, given)
    # Compiled autograd puts another object in the ctx's place for one call.
    state = getattr(ctx, "real", ctx)
    compute = _begin if state.begun is None else _continue
    made = compute(ctx, state, dO, saved, given, wanted, requested, accumulate)
    try:
        finished = _finished(ctx, made, dO, routing, needs, weights[0].shape[0])
    except Exception:
        state.begun = _Begun(dO, dO._version, requested, H, made, 0, True)
        raise
    state.begun = None
    return finished


def _begin(ctx, state, dO, saved, given, wanted, requested, accumulate):
    """The eight gradients, None for those that are given."""
    X, H, routing, weights, logits = saved
    if state.consumed:  # by another thread, meanwhile
        raise RuntimeError(CONSUMED)
    state.consumed = True
    now = wanted
    if ctx.travel is not None:
        now = (wanted & ~_OF_W1 if ctx.travel.overlap else 0) or wanted
        if now == wanted:
            ctx.travel.arrived()
        if now == wanted or given is not None:
            ctx.travel.gradient_arrived()
    try:
        if ctx.chunks is not None and now != wanted and given is None:
            dense, complete = _backward_in_chunks(ctx, dO, saved, now), True
        else:
            dense, complete = call_undifferentiated(
                _ops.experts_backward_over_H.default, dO, X, H, routing, weights, logits,
                *pack_gradients(given), ctx.numbers, ctx.reals, ctx.router_dtype, now, accumulate,
            )  # fmt: skip
    except (ValueError, NotImplementedError, torch.OutOfMemoryError):
        state.consumed = False  # refused before anything was written
        raise
    left = 0 if complete else now & _OF_W1
    made = _place(dense, now & ~left, [None] * len(GRADIENTS))
    if ctx.travel is not None and made[0] is not None:
        ctx.travel.made(made[0])
    if now != wanted or not complete:
        state.begun = _Begun(dO, dO._version, requested, H, made, left | wanted & ~now, False)
    if not complete:
        raise torch.OutOfMemoryError(_NO_MEMORY)
    if now == wanted:
        return made
    return _continue(ctx, state, dO, saved, given, wanted, requested, accumulate)


def _backward_in_chunks(ctx, dO, saved, wanted):
    """The gradients of `wanted`, without W1 and b1: the GEMMs with dO run one chunk at a time."""
    X, H, routing, weights, _ = saved
    made = empty_gradients(X, H, weights, ctx.numbers, wanted)
    E, d, n = weights[WEIGHTS.index("W2")].shape
    sizes = [X.shape[0], E, d, n, H.shape[0]]
    *_, workspace_bytes, _ = _ops.layer_bytes(X, sizes, ctx.numbers)
    workspace = X.new_empty(workspace_bytes, dtype=torch.uint8)
    chunks = len(ctx.chunks.cuts) - 1
    for chunk in range(chunks):
        try:
            ctx.travel.gradient_arrived(chunk)
            call_undifferentiated(
                _ops.experts_backward_part.default, dO, X, H, routing, weights,
                *pack_gradients(made), *ctx.chunks, chunk, ctx.numbers, ctx.reals, workspace,
            )  # fmt: skip
        except Exception as error:
            if chunk == 0:
                raise
            # Not an error class that means that nothing was written.
            raise RuntimeError(
                f"tilemoe: H was overwritten with dH for {chunk} of {chunks} chunks of tokens, "
                f"then: {error}"
            ) from error
    return [gradient for gradient in made if gradient is not None]


def forward_in_chunks(X, routing, weights, capacity, numbers, reals, keep_H, comm):
    """`experts` without addend, of an X that arrives, and an O that leaves, one chunk at a time."""
    O = torch.empty_like(X)
    shape = (capacity, h_width(numbers[At.ACTIVATION], weights[WEIGHTS.index("W2")].shape[2]))
    H = X.new_empty(shape) if keep_H else None
    for chunk in range(len(comm.chunks.cuts) - 1):
        comm.travel.chunk_arrived(chunk)
        call_undifferentiated(
            _ops.experts_part.default, X, routing, weights, *comm.chunks, chunk, capacity,
            numbers, reals, O, H,
        )  # fmt: skip
        comm.travel.chunk_made(O)
    return O, X.new_empty(0) if H is None else H


def _continue(ctx, state, dO, saved, given, _, requested, accumulate):
    """The same, from the state that an earlier backward or `_begin` left."""
    begun = state.begun
    if ctx.travel is not None:
        ctx.travel.gradient_arrived()
        ctx.travel.arrived()
    begun.check(dO, requested)
    X, _, routing, weights, logits = saved
    made = list(begun.made)
    if begun.complete:
        return made
    if made[1] is not None and ctx.numbers[At.SCORING] != SCORES_GIVEN:
        made[1] = _router_gradient(ctx, call_undifferentiated, made[1], routing, logits, weights)
    if begun.left:
        dense, complete = call_undifferentiated(
            _ops.experts_backward_over_H.default, None, X, begun.dH, routing, weights, logits,
            *pack_gradients(given), ctx.numbers, ctx.reals, ctx.router_dtype, begun.left,
            accumulate,
        )  # fmt: skip
        if not complete:
            raise torch.OutOfMemoryError(_NO_MEMORY)
        _place(dense, begun.left, made)
    return made


def _gradients_into(ctx, dO, saved, overwrite, wanted, given, accumulate):
    """The eight gradients, if a traced backward overwrites H or memory is given for some gradients;
    None for those."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(_NO_SECOND_GRADIENT)  # memory that is written has no history
    X, H, routing, weights, _ = saved
    given, wanted = _without_given(wanted, given)
    given = given or [None] * len(GRADIENTS)
    kept, consumed = (None, H) if overwrite else (H, None)
    ctx.consumed = overwrite

    def compute(dO, bits):
        """The gradients of `bits`, in new memory unless it is given."""
        made = empty_gradients(X, H, weights, ctx.numbers, wanted & bits)
        into = [new if out is None else out for new, out in zip(made, given)]
        into = [out if bits & 1 << bit else None for bit, out in enumerate(into)]
        if accumulate and any(out is not None for out in given):
            for gradient in made[2:]:
                if gradient is not None:
                    gradient.zero_()
        call_in_backward(
            _ops.experts_backward_out.default, dO, X, kept, consumed, routing, weights,
            *pack_gradients(into), ctx.numbers, ctx.reals, accumulate,
        )  # fmt: skip
        return made

    of_W1 = WANTED_W1 | WANTED_W1_UP
    if not (overwrite and wanted & WANTED_X and wanted & of_W1):
        return list(compute(dO, _EVERYTHING))
    # dX's workspace is freed before dW1 is allocated: both at once would be the peak.
    first, second = compute(dO, _EVERYTHING & ~of_W1), compute(None, of_W1)
    return [a if a is not None else b for a, b in zip(first, second)]


def _addend_gradient(ctx, dO, routing, E):
    if ctx.numbers[At.KIND] != GROUPED:
        return dO
    row = torch.arange(dO.shape[0], device=dO.device).unsqueeze(-1)
    return dO.masked_fill(row >= offsets_of(routing, E)[E], 0)  # as O has it


def _experts_context(ctx, inputs, output):
    X, router, routing, weights, _addend, _capacity, *rest = inputs
    _, H = output
    ctx.mark_non_differentiable(H)
    _save_experts(ctx, X, router, weights, H, routing, *rest)


def _moe_context(ctx, inputs, output):
    X, logits, _selection_bias, weights, _addend, *rest = inputs
    _, H, routing, counts = output
    ctx.mark_non_differentiable(H, routing, counts)
    _save_experts(ctx, X, logits, weights, H, routing, *rest)


def _layer_backward(ctx, dO, *_):
    """Backward of `experts` and `moe`: the third argument and the numbers have no gradient."""
    arguments = len(ctx.needs_input_grad)
    if dO is None:
        return (None,) * arguments
    needs = list(needed_now(ctx, ctx.needs_input_grad)[:10])
    del needs[2]
    of_X, of_router, *others = _experts_gradients(ctx, dO, needs)
    return of_X, of_router, None, *others, *(None,) * (arguments - 10)


def differentiated(
    op, tensors, third, rest, overwrite_H, more, given=None, accumulate=False, comm=None
):
    """`experts` or `moe` as the functions call it if nothing is traced. It computes the same as the
    operator's own autograd kernel in half of the host's time: it passes the dispatcher once, not
    twice with all arguments as Python objects.

    tensors: X, the router's, the six weights, the addend; third, rest: the operator's other
    arguments, numbers and reals the last, keep_H not among them. `given` is memory for weights'
    gradients, kept as it is and not as saved tensors: other layers and micro-batches add to it
    meanwhile. `comm`: a Comm, whose source is kept in the place of X.
    -> O or, of `moe` with `more`, O, routing, expert_counts."""
    if forward_ad._current_level >= 0:
        refuse_tangents((*tensors, third))
    # Torch checks every argument and every result several times: absent tensors are not passed.
    absent = [i for i, tensor in enumerate(tensors) if tensor is None]
    there = [tensor for tensor in tensors if tensor is not None]
    call = (op, rest, overwrite_H, more, given, accumulate, absent, comm)
    apply = _Differentiated.apply if torch.compiler.is_compiling() else _apply
    return apply(call, third, *there)


def _with_absent(ctx, needs):
    """The needs of the nine tensors, from those of _Differentiated's arguments."""
    needs = list(needs[2:])
    for i in ctx.absent:
        needs.insert(i, False)
    return needs


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, third, *there):
        op, rest, overwrite_H, more, ctx.given, ctx.accumulate, ctx.absent, comm = call
        tensors, needs = list(there), _with_absent(ctx, ctx.needs_input_grad)
        for i in ctx.absent:
            tensors.insert(i, None)
        keep_H = True in needs[: len(GRADIENTS)]
        X, router, *weights, addend = tensors
        if comm is not None and comm.chunks is not None:
            O, H, *routed = forward_in_chunks(X, third, weights, *rest, keep_H, comm)
        else:
            O, H, *routed = call_undifferentiated(
                op, X, router, third, weights, addend, *rest, keep_H, bool(overwrite_H)
            )
        routing = routed[0] if routed else third
        _save_experts(ctx, X, router, weights, H, routing, *rest[-2:], keep_H, overwrite_H, comm)
        if not more:
            return O
        ctx.mark_non_differentiable(*routed)
        return O, *routed

    @staticmethod
    def backward(ctx, dO, *_):
        if dO is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = _with_absent(ctx, needed_now(ctx, ctx.needs_input_grad))
        gradients = _experts_gradients(ctx, dO, needs, ctx.given, ctx.accumulate)
        for i in reversed(ctx.absent):
            del gradients[i]
        return None, None, *gradients


# Skips the Python of Function.apply, which only functorch needs: with functorch this is not called.
_apply = super(torch.autograd.Function, _Differentiated).apply

_library_of_gradients = torch.library.Library(NAMESPACE, "IMPL")


def _differentiate(name, save, backward):
    """Registers the same as torch.library.register_autograd, without defaults of arguments, which
    no operator here has. torch looks each default up in the schema in time quadratic in their
    number, which takes longer than everything else that the host does for `experts`."""
    op = getattr(_ops, name).default
    has_list = isinstance(op._schema.returns[0].type, torch.ListType)
    names = [argument.name for argument in op._schema.arguments]
    at = names.index("weights") if "weights" in names else None

    # Autograd sees the tensors that are arguments, not those in lists.
    def spread(args):
        return args if at is None else (*args[:at], *args[at], *args[at + 1 :])

    def gather(flat):
        if at is None:
            return flat
        after = at + len(WEIGHTS)
        return (*flat[:at], list(flat[at:after]), *flat[after:])

    def forward(ctx, *flat):
        args = gather(flat)
        with torch._C._AutoDispatchBelowAutograd():
            output = op(*args)
        save(ctx, args, output)
        return tuple(output) if isinstance(output, list) else output

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    differentiable = type(f"tilemoe_{name}", (torch.autograd.Function,), functions)

    def kernel(*args):
        if forward_ad._current_level >= 0:
            refuse_tangents(args)
        flat = spread(args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*flat):
            refuse_transforms()
            output = differentiable.apply(*flat)
            return list(output) if has_list else output
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _library_of_gradients.impl(name, kernel, "Autograd")


_differentiate("top_k", _top_k_context, _scores_backward)
_differentiate("scores_at", _scores_at_context, _scores_backward)
_differentiate("router_losses", _router_losses_context, _router_losses_backward)
_differentiate("experts", _experts_context, _layer_backward)
_differentiate("moe", _moe_context, _layer_backward)


def _refuse_double_backward(ctx, *_):
    raise NotImplementedError(_NO_SECOND_GRADIENT)


def _refuse_backward(ctx, *_):
    raise NotImplementedError("tilemoe: moe_tokens is for inference and has no gradient: call moe")


def _refuse_vmap(info, in_dims, *args):
    raise NotImplementedError(
        "tilemoe: vmap over its operators is not supported: put the batch into the tokens"
    )


def _refuse_tangents_alone(name):
    """Registers an autograd kernel that only rejects tangents, for an operator without gradient."""
    op = getattr(_ops, name).default

    def kernel(*args):
        if forward_ad._current_level >= 0:
            refuse_tangents(args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _library_of_gradients.impl(name, kernel, "Autograd")


_differentiate("moe_tokens", lambda *_: None, _refuse_backward)
_ROUTES = ("route_logits", "route_top_k", "route_general", "route_rounded", "route_grouped")
_PARTS = ("experts_part", "experts_backward_part")
for _name in ("top_k_backward", "experts_backward", "router_backward", "router_losses_backward"):
    _differentiate(_name, lambda *_: None, _refuse_double_backward)
for _name in (*_ROUTES, "experts_backward_out", "experts_backward_over_H", *_PARTS, "sum_rows"):
    _refuse_tangents_alone(_name)
for _name in ("top_k", "scores_at", *_ROUTES, "experts", "moe", "moe_tokens", "router_losses"):
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap)
