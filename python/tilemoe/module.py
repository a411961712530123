"""`MoE`: router, routing and experts as one torch.nn.Module, with Hugging Face's names and shapes.

The letters are those of docs/mathematics.md: T tokens of width d, E experts of width n, K of them
for each token.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from . import _library, _rules, functional, ops
from ._distributed import Spread, is_dtensor, plain
from .functional import Activation
from .routing import Counter, Rounding, Scoring, router_losses, shaped_like

_SIGMOIDS = ("sigmoid", "sigmoid_renormalized")
# Token rounding divides a chosen expert's probability by the token's chosen sum: these do the same.
_ROUNDED_SCORINGS = ("softmax_over_chosen", "softmax_renormalized")


class MoEAux(NamedTuple):
    """What MoE.forward returns beside its output: tensors on the module's device, read without the
    host being kept waiting. A pytree, as every NamedTuple is."""

    loss: Tensor  # () float32: balance_coefficient * balance + z_coefficient * z; add it
    balance: Tensor  # () float32, 1 when balanced; 0 where both coefficients are 0
    z: Tensor  # () float32; 0 where both coefficients are 0
    expert_counts: Tensor  # (E) int32: tokens that chose an expert, before rounding
    dropped: Tensor  # () int32: chosen pairs that rounding leaves out
    added: Tensor  # () int32: pairs that rounding adds
    without: Tensor  # () int32: tokens that rounding leaves without an expert


class _WideLinear(torch.autograd.Function):
    """x (T, d), weight (E, d) -> logits (T, E), computed in `dtype`. Backward keeps x as it is
    given, where torch.nn.functional.linear would keep a copy of it in the wider dtype.

    On a GPU bfloat16 factors make float32 products as they are: no copy of x is widened, nor does
    TF32 have a say. A gradient of float32 is a factor as the sum of two in bfloat16, whose 16 bits
    are more than x's and weight's own gradients keep."""

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
    """x (T, d) -> logits (T, E). Hugging Face's `gate`: `weight` (E, d), and, for a selection bias,
    the buffer `e_score_correction_bias` (E), float32 whatever the module is cast to."""

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        d: int,
        E: int,
        *,
        selection_bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        module_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        weight = torch.empty(E, d, device=device, dtype=dtype or module_dtype)
        self.weight = nn.Parameter(weight)
        bias = torch.zeros(E, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x: Tensor, spread: Optional[Spread] = None) -> Tensor:
        local = spread.parameter if spread else plain
        weight = local("gate.weight", self.weight)
        # What stayed on meta would make an output of noise.
        bias = self.e_score_correction_bias
        for name, tensor in (("weight", weight), ("e_score_correction_bias", bias)):
            if tensor is not None and tensor.device != x.device:
                raise ValueError(f"tilemoe: x is on {x.device} and gate.{name} on {tensor.device}")
        if self.dtype is None:
            return nn.functional.linear(x, weight)
        ops.refuse_transforms()
        ops.refuse_tangents((x, weight))
        logits = _WideLinear.apply(x.reshape(-1, x.shape[-1]), weight, self.dtype)  # (T, E)
        return logits.reshape(*x.shape[:-1], weight.shape[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # Updates of 1e-3 are lost in 16 bits, so the bias follows a cast's device, not its dtype.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def extra_repr(self) -> str:
        E, d = self.weight.shape
        bias = ", selection_bias=True" if self.e_score_correction_bias is not None else ""
        return f"d={d}, E={E}, dtype={self.dtype or self.weight.dtype}{bias}"


class Experts(nn.Module):
    """Hugging Face's `experts`: `gate_up_proj` (E, 2n, d), n gate rows then n up rows, or `up_proj`
    (E, n, d) where the activation is not gated; `down_proj` (E, d, n); with biases
    `gate_up_proj_bias` (E, 2n) or `up_proj_bias` (E, n), and `down_proj_bias` (E, d)."""

    def __init__(
        self,
        d: int,
        n: int,
        E: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        number = _rules.number("activation", _rules.ACTIVATIONS, activation)
        self._up = "gate_up_proj" if _rules.is_gated(number) else "up_proj"
        width = _rules.h_width(number, n)
        empty = lambda *shape: nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(self._up, empty(E, width, d))
        self.register_parameter(self._up + "_bias", empty(E, width) if bias else None)
        self.down_proj = empty(E, d, n)
        self.register_parameter("down_proj_bias", empty(E, d) if bias else None)

    def reset_parameters(self) -> None:
        for name in (self._up, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, name + "_bias")
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        spread: Optional[Spread] = None,
        *,
        return_aux: bool = True,
        **routing: Any,
    ) -> Any:
        """x (T, d), logits (T, E), routing: arguments of functional.moe -> what that returns."""
        local = spread.parameter if spread else plain
        names = (self._up, "down_proj", self._up + "_bias", "down_proj_bias")
        W1, W2, b1, b2 = (local("experts." + name, getattr(self, name)) for name in names)
        return functional.moe(
            x, logits, W1, W2, b1=b1, b2=b2, activation=self.activation, return_aux=return_aux,
            **routing,
        )  # fmt: skip

    def extra_repr(self) -> str:
        E, d, n = self.down_proj.shape
        bias = ", bias=True" if self.down_proj_bias is not None else ""
        return f"d={d}, n={n}, E={E}, activation={self.activation!r}{bias}"


def _of_either(letter: str, by_letter: int | None, name: str, by_name: int | None) -> int:
    """The size that was given by its letter or by its name."""
    if (by_letter is None) == (by_name is None):
        seen = "neither is" if by_name is None else "both are"
        raise TypeError(f"tilemoe: MoE takes {letter} or {name}, and {seen} given")
    size = by_letter if by_letter is not None else by_name
    if not isinstance(size, int) or isinstance(size, bool):
        given = letter if by_letter is not None else name
        raise TypeError(f"tilemoe: {given} is {size!r}, expected an int")
    return size


class MoE(nn.Module):
    """The Mixture-of-Experts layer: out_t = sum over the token's K experts of s * expert(x_t).

    Sizes are given by their letters or by their names, in any mixture.

    Args:
        d, hidden_size: width of a token, a multiple of 8.
        n, intermediate_size: width inside one expert, a multiple of 8.
        E, num_experts: experts.
        K, top_k: experts per token.
        activation: "swiglu", "geglu", "geglu_tanh", "reglu"; not gated: "silu", "gelu",
            "gelu_tanh", "relu", "relu_squared", "identity".
        bias: the experts have biases.
        scoring: scores from logits: "softmax_over_chosen", "softmax_over_all",
            "softmax_renormalized", "sigmoid", "sigmoid_renormalized".
        selection_bias: experts are chosen by sigmoid + bias, the bias not in the score
            (DeepSeek-V3); sigmoid scorings only. See `update_selection_bias`.
        rounding: in training, round each expert's tokens to a multiple of `m`: "nearest", "up",
            "down", "stochastic", "balanced"; None and evaluation: plain top-K. It needs a softmax
            scoring over the chosen.
        m: see `rounding`.
        rounding_tokens: round every so many tokens, of which there is then a multiple, by
            themselves; None: all of a call.
        balance_coefficient, z_coefficient: of the Switch Transformer's load balance loss and
            ST-MoE's z loss in `aux.loss`. The losses are computed where one of them is not 0.
        column_blocks: the experts' outputs, and their inputs' gradients, exist in so many blocks of
            columns one after the other: less memory for a little time.
        overwrite_H: whether backward writes dH over H, the largest tensor that forward kept. None:
            where nothing reads H again; True: always; False: never. See `tilemoe.moe`.
        router_dtype: of the router's weight and logits, float32 for instance; None: the module's
            dtype.
        return_aux: True: forward returns out and a `MoEAux`; False: out alone, as torch.nn's layers
            and torch.nn.Sequential have it. Not given it is True, with a DeprecationWarning: False
            is the default from 0.3 on.
        device, dtype: of the parameters, as in torch.nn.

    Shape:
        x (..., d) -> out (..., d).

    Raises:
        ValueError: a size or an option that does not fit, at construction already.
        TypeError: a size is missing, given twice, or no int.

    Example:
        >>> layer = tilemoe.MoE(
        ...     hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, return_aux=False
        ... )
        >>> layer(torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """

    def __init__(
        self,
        d: int | None = None,
        n: int | None = None,
        E: int | None = None,
        K: int | None = None,
        *,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        activation: Activation = "swiglu",
        bias: bool = False,
        scoring: Scoring = "softmax_over_chosen",
        selection_bias: bool = False,
        rounding: Rounding | None = None,
        m: int = 128,
        rounding_tokens: int | None = None,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        column_blocks: int = 1,
        overwrite_H: bool | None = None,
        router_dtype: torch.dtype | None = None,
        return_aux: bool | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d = _of_either("d", d, "hidden_size", hidden_size)
        n = _of_either("n", n, "intermediate_size", intermediate_size)
        E = _of_either("E", E, "num_experts", num_experts)
        K = _of_either("K", K, "top_k", top_k)
        if return_aux is None:
            warnings.warn(
                "tilemoe: MoE returns out and aux, and from 0.3 on out alone: say return_aux=True "
                "or return_aux=False",
                DeprecationWarning,
                stacklevel=2,
            )
            return_aux = True
        if not 1 <= K <= E:
            raise ValueError(f"tilemoe: K is {K}, expected 1 to E = {E}")
        for name, width in (("d", d), ("n", n)):
            if width < 1 or width % _rules.WIDTH_MULTIPLE:
                raise ValueError(
                    f"tilemoe: {name} is {width}, expected a positive multiple of "
                    f"{_rules.WIDTH_MULTIPLE}"
                )
        _rules.number("scoring", _rules.SCORINGS, scoring)
        if selection_bias and scoring not in _SIGMOIDS:
            raise ValueError(
                f"tilemoe: scoring is {scoring!r}, but only the sigmoid scorings have a selection "
                "bias"
            )
        if rounding is not None:
            _rules.number("rounding", _rules.ROUNDINGS, rounding)
            _rules.number("scoring under token rounding", _ROUNDED_SCORINGS, scoring)
            if m < 1:
                raise ValueError(f"tilemoe: m is {m}, expected at least 1")
        if column_blocks < 1:
            raise ValueError(f"tilemoe: column_blocks is {column_blocks}, expected at least 1")
        if not return_aux and (balance_coefficient or z_coefficient):
            raise ValueError(
                "tilemoe: balance_coefficient and z_coefficient make aux.loss, which "
                "return_aux=False leaves out"
            )
        self.d, self.n, self.E, self.K = d, n, E, K
        self.scoring, self.rounding, self.m = scoring, rounding, m
        self.rounding_tokens = rounding_tokens
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        self.column_blocks, self.overwrite_H = column_blocks, overwrite_H
        self.return_aux = return_aux
        self.gate = Router(
            d,
            E,
            selection_bias=selection_bias,
            dtype=router_dtype,
            module_dtype=dtype,
            device=device,
        )
        self.experts = Experts(
            d, n, E, activation=activation, bias=bias, device=device, dtype=dtype
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform in +-1/sqrt(fan-in), as in torch.nn.Linear; biases zero."""
        self.gate.reset_parameters()
        self.experts.reset_parameters()

    def forward(
        self, x: Tensor, seed: Counter | None = None, offset: Counter | None = None
    ) -> Tensor | tuple[Tensor, MoEAux]:
        """Routes the tokens of x and computes their experts.

        Args:
            x: the tokens, of the parameters' dtype or of autocast's.
            seed, offset: of stochastic rounding, int or int64 tensor of one element; in training it
                needs both. The same two give the same rounding: count `offset` up once a step.

        Shape:
            x (..., d) -> out (..., d).

        Returns:
            out, and with the constructor's `return_aux` a `MoEAux` beside it.

        Raises:
            ValueError: x does not fit, or stochastic rounding lacks seed or offset.
        """
        _library.require_tensor(x, "x")
        if x.dim() == 0 or x.shape[-1] != self.d:
            raise ValueError(f"tilemoe: x has shape {tuple(x.shape)}, expected (..., {self.d})")
        rounding = self.rounding if self.training else None
        stochastic = rounding == "stochastic"
        if stochastic and (seed is None or offset is None):
            raise ValueError("tilemoe: stochastic rounding needs seed and offset in training")

        spread: Spread | None = None
        local = x
        if is_dtensor(x):
            spread, local = Spread(x), x.to_local()
        tokens = local.reshape(-1, self.d)  # (T, d)
        logits = self.gate(tokens, spread)  # (T, E)
        bias = self.gate.e_score_correction_bias
        found = self.experts(
            tokens,
            logits,
            spread,
            K=self.K,
            scoring=self.scoring,
            selection_bias=bias,
            rounding=rounding,
            m=self.m,
            rounding_tokens=self.rounding_tokens,
            seed=seed if stochastic else None,
            offset=offset if stochastic else None,
            column_blocks=self.column_blocks,
            overwrite_H=self.overwrite_H,
            return_aux=self.return_aux,
        )
        out, aux = found if self.return_aux else (found, None)
        out = shaped_like(out, local)
        if spread is not None:
            out = spread.output(out)
        if aux is None:
            return out
        losses = self._losses(logits, aux.expert_counts)
        counts = aux.expert_counts, aux.dropped, aux.added, aux.without
        if spread is None:
            return out, MoEAux(*losses, *counts)
        return out, MoEAux(*map(spread.mean, losses), *map(spread.total, counts))

    def _losses(self, logits: Tensor, expert_counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits (T, E), expert_counts (E) -> loss, balance, z."""
        if self.balance_coefficient == 0 and self.z_coefficient == 0:
            loss, balance, z = torch.zeros(3, device=logits.device).unbind()
            return loss, balance, z
        balance, z = router_losses(logits, expert_counts)
        return self.balance_coefficient * balance + self.z_coefficient * z, balance, z

    @torch.no_grad()
    def update_selection_bias(self, expert_counts: Tensor, rate: float = 1e-3) -> None:
        """DeepSeek-V3's load balance without a loss: bias += rate * sign(mean(c) - c), so that an
        expert with too few tokens is chosen more often (arXiv 2408.15664, algorithm 1; arXiv
        2412.19437, section 2.1.2, whose rate is 1e-3).

        expert_counts (E): `aux.expert_counts` of one step, summed over its micro-batches and, in
        data parallel training, over the ranks (all_reduce), so that all ranks keep one bias. Call
        it once after each optimizer step.
        """
        bias = self.gate.e_score_correction_bias
        if bias is None:
            raise ValueError("tilemoe: the module was made without selection_bias")
        if expert_counts.shape != bias.shape:
            raise ValueError(
                f"tilemoe: expert_counts has shape {tuple(expert_counts.shape)}, expected "
                f"({self.E},)"
            )
        counts = expert_counts.to(bias)
        bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def extra_repr(self) -> str:
        parts = [f"K={self.K}, scoring={self.scoring!r}"]
        if self.rounding is not None:
            parts.append(f"rounding={self.rounding!r}, m={self.m}")
            if self.rounding_tokens is not None:
                parts.append(f"rounding_tokens={self.rounding_tokens}")
        if self.balance_coefficient:
            parts.append(f"balance_coefficient={self.balance_coefficient}")
        if self.z_coefficient:
            parts.append(f"z_coefficient={self.z_coefficient}")
        return ", ".join(parts)
