"""Call the operators in `torch.ops.tilemoe`, and register their autograd kernels.

Names and arguments of the operators are in bindings/torch/schema.cpp, fake kernels in _shapes.py.
Some autograd kernels are in other files: those of `experts` and `moe` in autograd.py, that of
`moe_with_router` in _router_autograd.py, that of `experts_lora` in _lora_autograd.py, and those of
the single GEMMs in _mm_autograd.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _shapes  # noqa: F401  registers the fake kernels
from ._library import NAMESPACE, operators
from ._layout import WEIGHTS, pack_gradients, reads_logits
from .options import RULE, TOP_K, At

_ops = operators
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_EXCEPTIONS = {
    "invalid argument: ": ValueError,
    "unsupported: ": NotImplementedError,
    "out of memory: ": torch.OutOfMemoryError,
}

_NO_TANGENTS = (
    "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) is not "
    "supported; use backward or torch.autograd.grad"
)
_NO_TRANSFORMS = (
    "transforms of torch.func (grad, vjp, jacrev, vmap, ...) are not supported; use "
    "backward or torch.autograd.grad"
)
NO_SECOND_GRADIENT = "double backward is not supported; run backward without create_graph"


def _reraise(error):
    text = str(error)
    for status, kind in _EXCEPTIONS.items():
        if text.startswith(status):
            raise kind(text[len(status) :]) from None
    raise error


def refuse_tangents(args):
    """Reject tensors with a tangent among any arguments, also in lists.

    Below autograd the tangent would be lost, and the derivative would be zero. Callers for which a
    call costs too much check `forward_ad._current_level` first.
    """
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    for tensor in args:
        if isinstance(tensor, list):
            refuse_tangents(tensor)
        elif isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(_NO_TANGENTS)


def refuse_transforms():
    """Reject torch.func's transforms, which cannot use the caller's rule for gradients."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NO_TRANSFORMS)


def call(op, *args):
    """Call an operator, and convert torch's RuntimeError.

    A wrong argument raises a ValueError, an unsupported one a NotImplementedError.
    """
    if forward_ad._current_level >= 0:
        refuse_tangents(args)
    try:
        return op(*args)
    except RuntimeError as error:
        _reraise(error)


def call_undifferentiated(op, *args):
    """Call an operator if no gradient can be required.

    The call skips the autograd kernels, which are Python code and account for a third of the host's
    time.
    """
    if torch.compiler.is_compiling():  # free while tracing, and the guard cannot be traced
        return call(op, *args)
    if forward_ad._current_level >= 0:
        refuse_tangents(args)
    try:
        with _BelowAutograd():
            return op(*args)
    except RuntimeError as error:
        _reraise(error)


def below_autograd(op, *args):
    """Call an operator from its autograd kernel, with torch's errors."""
    with _BelowAutograd():
        return op(*args)


def call_in_backward(op, *args):
    """Call an operator from a gradient's rule.

    The operator's autograd kernel rejects double backward; without create_graph no gradient is
    required, and the kernel is skipped.
    """
    if torch.is_grad_enabled():
        return call(op, *args)
    return call_undifferentiated(op, *args)


# ---------------------------------------------------------------- the layer


class Saved(NamedTuple):
    """Tensors and options of a call that backward reads, in the operators' order."""

    X: Tensor
    H: Tensor
    routing: Tensor
    weights: list[Tensor | None]  # _layout.WEIGHTS
    logits: Tensor | None  # only if the scoring's gradient reads them
    numbers: list[int]  # options.NUMBERS
    reals: list[float]  # options.REALS
    router_dtype: torch.dtype


def experts_part(X, routing, weights, chunks, chunk, capacity, numbers, reals, O, H):
    """Compute one chunk of tokens of `experts`, into O and, if it is saved, H."""
    call_undifferentiated(
        _ops.experts_part.default, X, routing, weights, *chunks, chunk, capacity, numbers, reals, O,
        H,
    )  # fmt: skip


def experts_backward(dO, saved, wanted):
    """Return the gradients of `wanted`."""
    return call_in_backward(_ops.experts_backward.default, dO, *saved, wanted)


def experts_backward_over_H(dO, saved, given, wanted, accumulate):
    """Return the gradients of `wanted`, and whether all of them could be allocated."""
    X, H, routing, weights, logits, numbers, reals, router_dtype = saved
    return call_undifferentiated(
        _ops.experts_backward_over_H.default, dO, X, H, routing, weights, logits,
        *pack_gradients(given), numbers, reals, router_dtype, wanted, accumulate,
    )  # fmt: skip


def moe_with_router_backward(dO, dlogits, saved, router_weight, wanted):
    """Return the gradients of `wanted`, whose bit 1 is router_weight's and bit 8 router_bias's."""
    X, H, routing, weights, logits, numbers, reals, _ = saved
    return call_in_backward(
        _ops.moe_with_router_backward.default, dO, dlogits, X, H, routing, router_weight, weights,
        logits, numbers, reals, wanted,
    )  # fmt: skip


def moe_with_router_backward_over_H(dO, dlogits, saved, router_weight, wanted):
    """Return the same gradients, and whether all of them could be allocated."""
    X, H, routing, weights, logits, numbers, reals, _ = saved
    return call_undifferentiated(
        _ops.moe_with_router_backward_over_H.default, dO, dlogits, X, H, routing, router_weight,
        weights, logits, numbers, reals, wanted,
    )  # fmt: skip


def experts_backward_out(dO, saved, over_H, gradients, accumulate):
    """Write, or add to, the gradients that are not None."""
    X, H, routing, weights, _, numbers, reals, _ = saved
    kept, consumed = (None, H) if over_H else (H, None)
    call_in_backward(
        _ops.experts_backward_out.default, dO, X, kept, consumed, routing, weights,
        *pack_gradients(gradients), numbers, reals, accumulate,
    )  # fmt: skip


def experts_backward_part(dO, saved, gradients, chunks, chunk, workspace):
    """Compute one chunk of a backward over H; the last chunk writes the gradients."""
    X, H, routing, weights, _, numbers, reals, _ = saved
    call_undifferentiated(
        _ops.experts_backward_part.default, dO, X, H, routing, weights, *pack_gradients(gradients),
        *chunks, chunk, numbers, reals, workspace,
    )  # fmt: skip


def empty_workspace(saved):
    """Return memory that is sufficient for each of these chunks."""
    X, H, weights, numbers = saved.X, saved.H, saved.weights, saved.numbers
    E, d, n = weights[WEIGHTS.index("W2")].shape
    *_, of_backward, _ = _ops.layer_bytes(X, [X.shape[0], E, d, n, H.shape[0]], numbers, [])
    return X.new_empty(of_backward, dtype=torch.uint8)


def router_backward(ds, saved):
    """Return the gradient of the logits from that of the scores."""
    rule, factor = saved.numbers[: len(RULE)], saved.reals[At.ROUTED_SCALING_FACTOR]
    return call_in_backward(
        _ops.router_backward.default, ds, saved.routing, saved.logits, saved.weights[0].shape[0],
        rule, factor, saved.router_dtype,
    )  # fmt: skip


# ---------------------------------------------------------------- gradients of the router


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


def _router_logits_context(ctx, inputs, output):
    X, weight, bias, _ = inputs
    ctx.save_for_backward(X, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _router_logits_backward(ctx, dlogits):
    """Return the gradients of X, weight and bias.

    dX has one order of the sum for every T, as the logits have. dweight and dbias are sums over all
    tokens by torch, with the same bits in each run with the same T.
    """
    X, weight = ctx.saved_tensors
    of_X, of_weight, of_bias, _ = ctx.needs_input_grad
    dX = _input_gradient(dlogits, weight, X.dtype) if of_X else None
    dweight = _weight_gradient(dlogits, X).to(weight.dtype) if of_weight else None
    dbias = dlogits.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if of_bias else None
    return dX, dweight, dbias, None


def _terms(tensor):
    """Return bfloat16 tensors whose sum is the tensor: to 16 bits for float32, else exactly."""
    high = tensor.to(torch.bfloat16)
    if tensor.dtype == torch.bfloat16:
        return [high]
    return [high, (tensor.float() - high.float()).to(torch.bfloat16)]


def _input_gradient(dlogits, weight, dtype):
    """Compute dX (T, d) of `dtype` from dlogits (T, E) and weight (E, d).

    This is the GEMM of the logits with the transposed weight. On a GPU every pair of terms is a
    part of the sum over E.
    """
    transposed = weight.mT
    if not dlogits.is_cuda:
        dlogits, transposed = dlogits.float(), transposed.float()
    elif dlogits.dtype == torch.float32 or dlogits.dtype != weight.dtype:
        of_dlogits, of_weight = _terms(dlogits), _terms(transposed)
        dlogits = torch.cat([one for one in of_dlogits for _ in of_weight], dim=1)
        transposed = torch.cat(of_weight * len(of_dlogits), dim=1)
    padding = -dlogits.shape[1] % 8
    if padding:
        pad = torch.nn.functional.pad
        dlogits, transposed = pad(dlogits, (0, padding)), pad(transposed, (0, padding))
    return call_in_backward(_ops.router_logits.default, dlogits, transposed, None, dtype)


def _weight_gradient(dlogits, X):
    """Compute the weight's gradient (E, d), a sum in float32, from dlogits (T, E) and X (T, d)."""
    if X.is_cuda and dlogits.dtype == X.dtype:
        return torch.mm(dlogits.mT, X, out_dtype=torch.float32)
    if X.is_cuda and X.dtype == torch.bfloat16:
        of_dlogits = _terms(dlogits)
        parts = torch.mm(torch.cat(of_dlogits, dim=1).mT, X, out_dtype=torch.float32)
        return parts.view(len(of_dlogits), dlogits.shape[1], X.shape[1]).sum(dim=0)
    return dlogits.float().mT @ X.float()


def _router_losses_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _router_losses_backward(ctx, dlosses):
    logits, expert_counts = ctx.saved_tensors
    gradient = _ops.router_losses_backward.default
    # The losses' own gradients stay on the device and scale there, so that the host does not wait.
    of_balance = call_in_backward(gradient, logits, expert_counts, 1.0, 0.0)
    of_z = call_in_backward(gradient, logits, expert_counts, 0.0, 1.0)
    return (dlosses[0] * of_balance + dlosses[1] * of_z).to(logits.dtype), None


# ---------------------------------------------------------------- registration

_autograd_kernels = torch.library.Library(NAMESPACE, "IMPL")


def register_autograd(name, kernel):
    """Register the operator's autograd kernel."""
    _autograd_kernels.impl(name, kernel, "Autograd")


def _differentiate(name, save, backward):
    """Register gradients like torch.library.register_autograd, without default arguments.

    No operator here has defaults, and torch looks each default up in the schema in time quadratic
    in their number.
    """
    op = getattr(_ops, name).default
    has_list = isinstance(op._schema.returns[0].type, torch.ListType)
    names = [argument.name for argument in op._schema.arguments]
    at = names.index("weights") if "weights" in names else None

    # Autograd reads the tensors that are arguments, not those in lists.
    def spread(args):
        return args if at is None else (*args[:at], *args[at], *args[at + 1 :])

    def gather(flat):
        if at is None:
            return flat
        after = at + len(WEIGHTS)
        return (*flat[:at], list(flat[at:after]), *flat[after:])

    def forward(ctx, *flat):
        args = gather(flat)
        output = below_autograd(op, *args)
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
        return below_autograd(op, *args)

    register_autograd(name, kernel)


_differentiate("top_k", _top_k_context, _scores_backward)
_differentiate("scores_at", _scores_at_context, _scores_backward)
_differentiate("router_logits", _router_logits_context, _router_logits_backward)
_differentiate("router_losses", _router_losses_context, _router_losses_backward)


differentiate = _differentiate  # for _mm_autograd.py


def _refuse_double_backward(ctx, *_):
    raise NotImplementedError(NO_SECOND_GRADIENT)


def _refuse_backward(ctx, *_):
    raise NotImplementedError("moe_tokens has no gradient; call moe")


def _refuse_vmap(info, in_dims, *args):
    raise NotImplementedError("torch.vmap is not supported; fold the batch dimension into x")


def _refuse_tangents_alone(name):
    """Register an autograd kernel that only rejects tangents, for an operator without gradient."""
    op = getattr(_ops, name).default

    def kernel(*args):
        if forward_ad._current_level >= 0:
            refuse_tangents(args)
        return below_autograd(op, *args)

    register_autograd(name, kernel)


_differentiate("moe_tokens", lambda *_: None, _refuse_backward)
_ROUTES = ("route_logits", "route_top_k", "route_general", "route_rounded", "route_grouped")
_PARTS = ("experts_part", "experts_backward_part")
_BACKWARDS = ("top_k_backward", "experts_backward", "moe_with_router_backward",
              "experts_lora_backward", "router_backward",
              "router_losses_backward", "gathered_mm_backward", "combine_mm_backward")  # fmt: skip
for _name in _BACKWARDS:
    _differentiate(_name, lambda *_: None, _refuse_double_backward)
_OF_LORA = ("pack_lora", "experts_lora_backward_over_H", "dequantize", "quantize_fp8",
            "quantize_fp8_into")  # fmt: skip
_INTO_MEMORY = ("experts_backward_out", "experts_backward_over_H",
                "moe_with_router_backward_over_H", *_PARTS, "sum_rows")  # fmt: skip
for _name in (*_ROUTES, *_OF_LORA, *_INTO_MEMORY):
    _refuse_tangents_alone(_name)
for _name in ("top_k", "scores_at", *_ROUTES, "experts", "experts_lora", "moe", "moe_with_router",
              "moe_tokens",
              "router_logits", "router_losses", "gathered_mm", "combine_mm"):  # fmt: skip
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap)
