"""Define `Experts`, `SharedExperts` and `SharedExpertGate`, the parts of `MoE`.

Their parameters have Hugging Face's names; functional.py computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import torch
from torch import Tensor, nn

from . import _calls, _library, _parameters, functional
from ._formats import Format
from ._kept_codes import KeptCodes, require_values
from ._signatures import Reader
from .distributed.dtensor import OnMesh, Spread, plain
from .lora import LoRA
from .options import FP8_RECIPES, GATED, OfExperts, Options, Recipe
from .quantization import quantize_experts
from .quantized_modules import QuantizedWeight, attach
from .routing import Counter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from .distributed.team import Arrival, Team

LoraRank = Union[int, tuple[int, int], None]
_LORA_NAMES = ("lora_A1", "lora_B1", "lora_A2", "lora_B2")
ExpertGradients = Literal["mean", "sum"]
of_experts = Reader("Experts", OfExperts)
_of_shared = Reader("SharedExperts", OfExperts)


@of_experts.attributes
class Experts(nn.Module):
    """Routed experts, with the parameters of Hugging Face's `experts`.

    The weights are `gate_up_proj` (E, 2n, d), n gate rows then n up rows, or `up_proj` (E, n, d) if
    the activation has no gate, and `down_proj` (E, d, n). The biases are `gate_up_proj_bias` (E,
    2n) or `up_proj_bias` (E, n), and `down_proj_bias` (E, d).

    With `lora_rank` the module also has the factors of adapters in float32: `lora_A1` (E, r, d),
    `lora_B1` (E, 2n, r) or (E, n, r), `lora_A2` (E, r, n) and `lora_B2` (E, d, r).

    With `expert_mesh` all of them are DTensors of these shapes, sharded over E. `tilemoe.quantize_`
    replaces each weight by a `QuantizedWeight`.
    """

    def __init__(
        self,
        d: int,
        n: int,
        E: int,
        *,
        bias: bool = False,
        lora_rank: LoraRank = None,
        lora_alpha: float | None = None,
        expert_mesh: DeviceMesh | None = None,
        expert_gradients: ExpertGradients = "mean",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OfExperts],
    ) -> None:
        super().__init__()
        _parameters.check_default_dtype(device, dtype)
        self.options = of_experts(options)  # type: ignore[arg-type]
        self._mesh = None if expert_mesh is None else OnMesh(expert_mesh, E, expert_gradients)
        is_gated = self.options.activation in GATED
        self._up = "gate_up_proj" if is_gated else "up_proj"
        width = 2 * n if is_gated else n
        empty = lambda *shape: nn.Parameter(self._empty(*shape, device=device, dtype=dtype))
        self.register_parameter(self._up, empty(E, width, d))
        self.register_parameter(self._up + "_bias", empty(E, width) if bias else None)
        self.down_proj = empty(E, d, n)
        self.register_parameter("down_proj_bias", empty(E, d) if bias else None)
        self.fp8_codes = KeptCodes((self._up, "down_proj"))
        self.lora_scale: tuple[float, float] | None = None
        if lora_rank is None:
            return
        ranks, self.lora_scale = _parameters.check_lora(lora_rank, lora_alpha)
        for name, rank, rows, columns in zip("12", ranks, (width, d), (d, n)):
            factor = lambda *shape: self._empty(*shape, device=device, dtype=torch.float32)
            for which, shape in (("A", (E, rank, columns)), ("B", (E, rows, rank))):
                made = nn.Parameter(factor(*shape)) if rank else None
                self.register_parameter(f"lora_{which}{name}", made)

    def _empty(self, *shape: int, **how: Any) -> Tensor:
        return torch.empty(shape, **how) if self._mesh is None else self._mesh.empty(*shape, **how)

    def reset_parameters(self) -> None:
        uniform = nn.init.uniform_ if self._mesh is None else self._mesh.uniform_
        for name in (self._up, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, name + "_bias")
            if isinstance(weight, QuantizedWeight):
                raise ValueError(
                    f"reset_parameters does not support quantised weights, got a quantised {name}"
                )
            bound = weight.shape[-1] ** -0.5
            uniform(weight, -bound, bound)
            if bias is not None:
                nn.init.zeros_(bias)
        if self.lora_scale is None:
            return
        for name in "12":  # the bound of kaiming_uniform_(a=sqrt(5)), as in PEFT
            A, B = getattr(self, f"lora_A{name}"), getattr(self, f"lora_B{name}")
            if A is not None:
                uniform(A, -(A.shape[-1] ** -0.5), A.shape[-1] ** -0.5)
                nn.init.zeros_(B)

    def forward(
        self,
        x: Tensor,
        router: Tensor,
        spread: Optional[Spread] = None,
        *,
        options: Options | None = None,
        ids: Tensor | None = None,
        selection_bias: Tensor | None = None,
        seed: Counter | None = None,
        offset: Counter | None = None,
        rounds: bool = False,
        addend: Tensor | None = None,
        return_aux: bool = True,
        team: Team | None = None,
        arrival: Arrival | None = None,
    ) -> Any:
        """Compute O (T, d) from x (T, d) and logits (T, E), or scores (T, K) with ids.

        With return_aux the Aux is also returned. `options` are those of the layer, including this
        module's; `rounds` is False to ignore their token rounding. With a team, the tokens are this
        rank's, whose rows may still be in transfer, and the result is O (t, d), its Aux and the
        choice of all ranks.
        """
        options = options or self.options
        if team is not None:
            from .distributed.layer import computed

            layer = self._layer(self._own, options)
            return computed(
                x, router, layer, addend, team, arrival, ids=ids, selection_bias=selection_bias,
                counter=(seed, offset), rounds=rounds,
            )  # fmt: skip
        layer = self._layer(spread.parameter if spread else self._own, options)
        return _calls.routed(
            x, router, layer, ids=ids, selection_bias=selection_bias, seed=seed, offset=offset,
            rounds=rounds, addend=addend, return_aux=return_aux,
        )  # fmt: skip

    def of_decode(self, x: Tensor, gate: functional.Gate, options: Options, **how: Any) -> Any:
        """Call functional.moe_tokens with x (T, d), a gate and its other arguments."""
        weights = self._layer(self._own, options).weights
        return functional.moe_tokens(x, gate, weights, options, **how)

    def plain_layer(self, options: Options) -> _calls.Layer | None:
        """Return the weights if they are plain tensors without adapters, in 16 bits, else None."""
        if options.recipe in FP8_RECIPES:
            return None
        if self.lora_scale is not None:
            return None
        up, parameters = self._up, self._parameters
        try:  # nn.Module's lookup begins with an exception
            W1, W2 = parameters[up], parameters["down_proj"]
            b1, b2 = parameters[up + "_bias"], parameters["down_proj_bias"]
        except KeyError:  # quantised, or replaced by attributes
            W1, W2 = getattr(self, up), self.down_proj
            b1, b2 = getattr(self, up + "_bias"), self.down_proj_bias
        for weight in (W1, W2, b1, b2):
            if weight is not None and type(weight) not in _library.PLAIN:
                return None  # quantised, or a DTensor
        return _calls.Layer([W1, None, W2, b1, None, b2], options)

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.down_proj, QuantizedWeight)

    def quantize_(self, format: Format) -> None:
        """Quantise the weights in place; see `tilemoe.quantize_`.

        Args:
            format: Format of the quantised weights.

        Raises:
            NotImplementedError: The experts are on an expert_mesh.
            ValueError: The experts are already quantised.
        """
        if self._mesh is not None:
            raise NotImplementedError(
                "quantize_ does not support experts with an expert_mesh; pass "
                "QuantizedExperts to tilemoe.expert_parallel.moe"
            )
        if self.is_quantized:
            raise ValueError("expected experts that are not quantised, got quantised weights")
        for name in self.fp8_codes.names:
            weight = quantize_experts(plain("experts." + name, getattr(self, name)), format)
            attach(self, name, weight)

    def quantize_weights(self) -> None:
        """Make the FP8 codes of the weights; see `tilemoe.quantize_weights`."""
        for name in self.fp8_codes.names:
            weight = getattr(self, name)
            if isinstance(weight, QuantizedWeight):
                weight.transpose_()
            else:
                self.fp8_codes.renew(self, name)

    def _layer(self, local: Callable[[str, Any], Any], options: Options) -> _calls.Layer:
        W1, W2, b1, b2 = self._weights(local, options.recipe)
        layer = _calls.Layer([W1, None, W2, b1, None, b2], options)
        return layer if self.lora_scale is None else layer._replace(lora=self._lora(local))

    def _lora(self, local: Callable[[str, Any], Any]) -> LoRA:
        factors = (local("experts." + name, getattr(self, name)) for name in _LORA_NAMES)
        assert self.lora_scale is not None
        return LoRA(*factors, scale=self.lora_scale)

    def _own(self, name: str, weight: Tensor | None) -> Tensor | None:
        return plain(name, weight) if self._mesh is None else self._mesh.own(name, weight)

    def _weights(
        self, local: Callable[[str, Any], Any], recipe: Recipe = "bf16"
    ) -> Iterator[Any]:
        for name in (*self.fp8_codes.names, self._up + "_bias", "down_proj_bias"):
            weight = getattr(self, name)
            if isinstance(weight, QuantizedWeight):
                yield weight.of_fp8() if recipe == "fp8" else weight.value()
            elif recipe in FP8_RECIPES and name in self.fp8_codes.names:
                transposed = recipe == "fp8" and torch.is_grad_enabled()
                codes = self.fp8_codes.of(self, name, transposed)
                yield codes._replace(master=local("experts." + name, weight))
            else:
                require_values(name, weight)
                yield local("experts." + name, weight)

    def extra_repr(self) -> str:
        E, d, n = self.down_proj.shape
        of, numbers = self.options, ("clamp", "alpha", "up_shift")
        form = "".join(f", {name}={getattr(of, name)}" for name in numbers if getattr(of, name))
        bias = ", bias=True" if self.down_proj_bias is not None else ""
        here = f" on {self._mesh.size} ranks" if self._mesh is not None else ""
        lora = "" if self.lora_scale is None else f", lora_scale={self.lora_scale}"
        return f"d={d}, n={n}, E={E}{here}, activation={of.activation!r}{form}{bias}{lora}"


class Projection(nn.Module):
    """Weight of shape (rows, columns) whose call returns the weight.

    A wrapper that replaces the weight during the call (PEFT's `target_parameters`) therefore
    applies. The class is not a torch.nn.Linear, because wrappers of Linear expect its output.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _parameters.check_default_dtype(device, dtype)
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight, shape (rows, columns).

        Args:
            x: Not read, but wrappers require an input.
        """
        return self.weight

    def extra_repr(self) -> str:
        return f"rows={self.weight.shape[0]}, columns={self.weight.shape[1]}"


@_of_shared.attributes
class SharedExperts(nn.Module):
    """Shared experts, computed as one MLP for every token, with DeepSeek's parameter names.

    The weights are `gate_proj.weight` and `up_proj.weight` (n, d), without the first if the
    activation has no gate, and `down_proj.weight` (d, n). The MLP is computed as one expert with
    all tokens, so backward saves only its H, in addition to x, which the layer saves anyway.
    """

    def __init__(
        self,
        d: int,
        n: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OfExperts],
    ) -> None:
        super().__init__()
        self.options = _of_shared(options)  # type: ignore[arg-type]
        make = lambda *shape: Projection(*shape, device=device, dtype=dtype)
        self.gate_proj = make(n, d) if self.options.activation in GATED else None
        self.up_proj = make(n, d)
        self.down_proj = make(d, n)

    def reset_parameters(self) -> None:
        for projection in self.children():
            assert isinstance(projection, Projection)
            projection.reset_parameters()

    def forward(
        self,
        x: Tensor,
        row_scores: Tensor | None = None,
        spread: Optional[Spread] = None,
        *,
        column_blocks: int = 1,
        overwrite_H: bool | None = None,
    ) -> Tensor:
        """Compute (T, d) from x (T, d) and row_scores (T), factors of the rows."""
        local = spread.parameter if spread else plain

        def weight(name):  # (1, rows, columns), as one expert
            return local(f"shared_experts.{name}.weight", getattr(self, name)(x)).unsqueeze(0)

        is_gated = self.gate_proj is not None
        counts = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        return functional.grouped_experts(
            x,
            counts,
            weight("gate_proj" if is_gated else "up_proj"),
            weight("down_proj"),
            W1_up=weight("up_proj") if is_gated else None,
            gate_layout="split" if is_gated else "concatenated",
            row_scores=row_scores,
            column_blocks=column_blocks,
            overwrite_H=overwrite_H,
            **_of_shared.part_of(self.options),
        )

    def extra_repr(self) -> str:
        d, n = self.down_proj.weight.shape
        return f"d={d}, n={n}, activation={self.options.activation!r}"


class SharedExpertGate(Projection):
    """Gate of the shared experts, Qwen's `shared_expert_gate`, with `weight` (1, d).

    The sigmoid of the linear output scales the shared experts' result. The linear output has the
    dtype of x, or of autocast, as in transformers; the sigmoid is float32, and transformers rounds
    it to that dtype.
    """

    def forward(self, x: Tensor, spread: Optional[Spread] = None) -> Tensor:
        """Compute scores (T) in float32 from x (T, d)."""
        local = spread.parameter if spread else plain
        weight = local("shared_expert_gate.weight", self.weight)
        _library.require_together(x, "x", **{"shared_expert_gate.weight": weight})
        return nn.functional.linear(x, weight).squeeze(-1).float().sigmoid()
