"""Check and use the memory that a caller passes for weights' gradients (WeightGradients).

Backward writes it, so an unusable tensor raises an error when the layer is called, before anything
is computed.
"""

import torch

from . import _library, ops
from ._layout import GRADIENTS, WEIGHTS
from .options import SCORES_GIVEN, At
from ._shapes import WANTED_S, WANTED_W1, empty_gradients, shape_text

_ALIGNMENT = 16  # bytes


def bits_of(given):
    """Return the bits of the gradients that are given."""
    return sum(WANTED_W1 << i for i, out in enumerate(given) if out is not None)


def of(given, wanted):
    """Return the eight gradients, None for each that is new or not wanted."""
    weights = (out if wanted & WANTED_W1 << i else None for i, out in enumerate(given))
    return [None, None, *weights]


def backward(dO, saved, over_H, given, wanted, accumulate):
    """Compute the gradients in `given`, and return those of `wanted`.

    The call can be traced; dO is None if H contains dH.
    """
    given = given or [None] * len(GRADIENTS)
    accumulate = accumulate and any(out is not None for out in given)
    made = list(empty_gradients(saved.X, saved.H, saved.weights, saved.numbers, wanted))
    for gradient in made[2:]:
        if accumulate and gradient is not None:
            gradient.zero_()
    into = [new if out is None else out for new, out in zip(made, given)]
    ops.experts_backward_out(dO, saved, over_H, into, accumulate)
    if wanted & WANTED_S and saved.numbers[At.SCORING] != SCORES_GIVEN:
        made[1] = ops.router_backward(made[1], saved)
    return [gradient for gradient in made if gradient is not None]


def check(given, weights, dtype, others):
    """Check the memory for gradients.

    Args:
        given: Six tensors or None, in the order of `weights`.
        weights: Weights of the layer.
        dtype: Dtype of the layer's computation.
        others: Other inputs of the layer by name.

    Raises:
        ValueError: A tensor belongs to an absent weight, has another shape, dtype or device than
            the weight's gradient, requires a gradient, is not aligned to 16 bytes, or shares
            elements with an input of the layer or with the memory of another gradient.
    """
    given = [(f"weight_grad_out.{name}", out) for name, out in zip(WEIGHTS, given)]
    for (where, out), name, weight in zip(given, WEIGHTS, weights):
        if out is not None:
            _check_one(where, out, name, weight, dtype)
    if torch.compiler.is_compiling():
        return
    users = {}  # (name, tensor) by the address of a storage
    for name, tensor in (*zip(WEIGHTS, weights), *others.items()):
        if address := _address(tensor):
            users.setdefault(address, []).append((name, tensor))
    for where, out in given:
        if not (address := _address(out)):
            continue
        _check_alignment(where, out)
        sharing = users.setdefault(address, [])
        for name, other in sharing:
            if _Memory(out).meets(_Memory(other)):
                raise ValueError(f"{where} shares memory with {name}, expected separate memory")
        sharing.append((where, out))


def _check_one(where, out, name, weight, dtype):
    if weight is None:
        raise ValueError(f"{where} requires {name}, got None")
    _library.require_together(weight, name, **{where: out})
    if out.shape != weight.shape:
        seen, expected = shape_text(out.shape), shape_text(weight.shape)
        raise ValueError(f"{where} has shape {seen}, expected {expected}, the shape of {name}")
    if out.dtype not in (dtype, torch.float32):
        either = "float32" if dtype is torch.float32 else f"{dtype} or torch.float32"
        raise ValueError(f"{where} must be {either}, got {out.dtype}")
    if out.requires_grad:
        raise ValueError(
            f"{where} requires a gradient, but backward writes it; pass a tensor without "
            "requires_grad, such as .grad, or detach it"
        )


def _address(tensor):
    """Return the address of the storage; 0 for a traced tensor, a wrapper or no memory."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in _library.PLAIN else 0


def _check_alignment(where, out):
    if out.data_ptr() % _ALIGNMENT == 0 and out.is_contiguous():
        return
    dims = _Memory(out).dims
    if any(stride == 0 for stride, _ in dims):
        raise ValueError(f"{where} is expanded, expected separate memory for each element")
    strides = [stride * out.element_size() for stride, _ in dims if stride > 1]
    if out.data_ptr() % _ALIGNMENT or any(stride % _ALIGNMENT for stride in strides):
        raise ValueError(
            f"{where} or its rows are not aligned to {_ALIGNMENT} bytes; allocate it "
            "separately, or round up its place in a flat buffer"
        )


class _Memory:
    """Positions of a tensor's elements in memory."""

    def __init__(self, tensor):
        self.dtype, self.itemsize = tensor.dtype, tensor.element_size()
        self.dims = [(s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1]
        self.begin = tensor.data_ptr()
        self.end = self.begin + (1 + sum(s * (n - 1) for s, n in self.dims)) * self.itemsize

    def meets(self, other):
        """Return whether both share an element.

        The result is exact for the same dtype and strides, such as two halves of one tensor;
        otherwise it is whether their address ranges overlap.
        """
        if self.end <= other.begin or other.end <= self.begin:
            return False
        strides = [s for s, _ in self.dims]
        if self.dtype != other.dtype or strides != [s for s, _ in other.dims]:
            return True
        distance, rest = divmod(other.begin - self.begin, self.itemsize)
        steps = [(s, max(n, m) - 1) for (s, n), (_, m) in zip(self.dims, other.dims)]
        return rest != 0 or _reaches(sorted(steps, reverse=True), distance)


def _reaches(dims, distance):
    """Return whether `distance` is a sum of strides, each times at most its number of steps.

    Steps are in either direction. Strides descend; in a tensor that does not overlap itself, each
    stride is larger than the distance that the smaller ones cover.
    """
    if not dims:
        return distance == 0
    (stride, max_steps), *smaller = dims
    down = distance // max(stride, 1)
    return any(
        abs(steps) <= max_steps and _reaches(smaller, distance - steps * stride)
        for steps in (down, down + 1)
    )
