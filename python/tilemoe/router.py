"""Define `Router`, the linear layer of `MoE` that computes logits from tokens."""

from collections.abc import Callable
from typing import Literal, Optional, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from . import ops
from ._autocast import autocast_dtype
from ._calls import LinearRouter
from .distributed.dtensor import Spread, plain
from .functional import Gate
from .routing import router_logits

RouterKind = Literal["linear", "fixed"]


def is_observed(module: nn.Module) -> bool:
    """Return whether the module has hooks or a wrapped forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
        or "forward" in vars(module)
    )


class _WideLinear(torch.autograd.Function):
    """Compute logits (T, E) in `dtype` from x (T, d) and weight (E, d).

    Backward saves x in its own dtype; torch.nn.functional.linear would save a copy in the wider
    dtype.

    On a GPU the GEMM multiplies bfloat16 factors with float32 results: x is not converted, and TF32
    is not used. A float32 gradient is split into the sum of two bfloat16 factors, whose 16 bits are
    more than the gradients of x and weight keep.
    """

    @staticmethod
    def forward(ctx, x, weight, dtype):
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        narrow = x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32
        ctx.is_direct = x.is_cuda and narrow
        with torch.autocast(x.device.type, enabled=False):
            if ctx.is_direct:
                return torch.mm(x, weight.mT, out_dtype=dtype)
            return nn.functional.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx, dlogits):
        x, weight = ctx.saved_tensors
        dx = dweight = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.is_direct:
                high = dlogits.to(x.dtype)
                parts = torch.cat((high, (dlogits - high).to(x.dtype)), dim=1)  # (T, 2E)
                if ctx.needs_input_grad[0]:
                    dx = parts @ torch.cat((weight, weight))
                if ctx.needs_input_grad[1]:
                    of_parts = torch.mm(parts.mT, x, out_dtype=ctx.dtype)  # (2E, d)
                    dweight = of_parts.view(2, *weight.shape).sum(dim=0).to(weight.dtype)
                return dx, dweight, None
            if ctx.needs_input_grad[0]:
                dx = (dlogits @ weight.to(ctx.dtype)).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dweight = (dlogits.mT @ x.to(ctx.dtype)).to(weight.dtype)
        return dx, dweight, None


class Router(nn.Module):
    """Linear layer of the router: x (T, d) -> logits (T, E).

    Parameters have the names of Hugging Face's `gate`: `weight` (E, d) and optionally `bias` (E),
    which is added to the logits. For a selection bias the buffer `e_score_correction_bias` (E)
    stays float32 if the module is cast.
    """

    e_score_correction_bias: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        d: int,
        E: int,
        *,
        bias: bool = False,
        selection_bias: bool = False,
        kind: RouterKind = "linear",
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        module_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(RouterKind):
            raise ValueError(f"router must be 'linear' or 'fixed', got {kind!r}")
        self.kind, self.dtype = kind, dtype
        empty = lambda *shape: nn.Parameter(
            torch.empty(shape, device=device, dtype=dtype or module_dtype)
        )
        self.weight = empty(E, d)
        self.register_parameter("bias", empty(E) if bias else None)
        correction = torch.zeros(E, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("e_score_correction_bias", correction)

    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        for bias in (self.bias, self.e_score_correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def of_decode(self, x: Tensor, K: int) -> Optional[Gate]:
        """Return the Gate with which moe_tokens computes the logits of x (T, d), for small T.

        Return None if the result would differ from calling this module: a part of it was replaced
        or has hooks, the order of the sum is fixed, or a linear layer would compute in another
        dtype than the kernel.
        """
        if type(self) is not Router or self.kind == "fixed" or is_observed(self):
            return None
        weight, bias = self.weight, self.bias
        if any(t is not None and type(t) not in (Tensor, nn.Parameter) for t in (x, weight, bias)):
            return None  # DTensors and quantised weights have their own kernels
        dtype = self.dtype or x.dtype
        widens = dtype == torch.float32 and weight.dtype in (x.dtype, torch.float32)
        if not (widens if self.dtype else weight.dtype == x.dtype):
            return None
        if bias is not None and bias.dtype != weight.dtype:
            return None
        gate = Gate(weight, bias, dtype)
        if not gate.takes(x.shape[0], K):
            return None
        self._check_devices(x, weight, bias)
        return gate

    def as_linear(self, x: Tensor) -> Optional[tuple[LinearRouter, Tensor | None]]:
        """Return the weights and the selection bias if this module is one linear layer, else None.

        A fixed order of the sum and logits in another dtype have other kernels.
        """
        if type(self) is not Router or self.kind == "fixed" or self.dtype or is_observed(self):
            return None
        try:  # nn.Module's lookup begins with an exception
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            correction = buffers["e_score_correction_bias"]
        except KeyError:  # replaced by attributes
            weight, bias, correction = self.weight, self.bias, self.e_score_correction_bias
        device = x.device
        for tensor in (weight, bias, correction):
            if tensor is not None and tensor.device != device:
                self._check_devices(x, weight, bias)
        return LinearRouter(weight, bias), correction

    def forward(self, x: Tensor, spread: Optional[Spread] = None) -> Tensor:
        local = spread.parameter if spread else plain
        weight, bias = local("gate.weight", self.weight), local("gate.bias", self.bias)
        self._check_devices(x, weight, bias)
        is_cast = autocast_dtype(x.device) is not None
        if self.dtype is None and weight.dtype != x.dtype and not is_cast:
            raise ValueError(
                f"x is {x.dtype} and gate.weight is {weight.dtype}, expected the same "
                "dtype; cast one of them, or use torch.autocast"
            )
        if self.kind == "fixed":
            return router_logits(x, weight, bias, dtype=self.dtype)
        if self.dtype is None:
            return nn.functional.linear(x, weight, bias)
        ops.refuse_transforms()
        ops.refuse_tangents((x, weight))
        logits = _WideLinear.apply(x.reshape(-1, x.shape[-1]), weight, self.dtype)  # (T, E)
        if bias is not None:
            logits = logits + bias.to(self.dtype)
        return logits.reshape(*x.shape[:-1], weight.shape[0])

    def _check_devices(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        # With a tensor that stayed on meta the output would be undefined.
        correction = self.e_score_correction_bias
        names = ("weight", "bias", "e_score_correction_bias")
        for name, tensor in zip(names, (weight, bias, correction)):
            if tensor is not None and tensor.device != x.device:
                raise ValueError(
                    f"expected all tensors on one device: x is on {x.device}, gate.{name} is "
                    f"on {tensor.device}"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # 16 bits lose updates of 1e-3, so the bias follows the device of a cast, but not its dtype.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def extra_repr(self) -> str:
        E, d = self.weight.shape
        bias = ", bias=True" if self.bias is not None else ""
        if self.e_score_correction_bias is not None:
            bias += ", selection_bias=True"
        kind = ", kind='fixed'" if self.kind == "fixed" else ""
        return f"d={d}, E={E}, dtype={self.dtype or self.weight.dtype}{bias}{kind}"
