"""`Experts`, `SharedExperts` and `SharedExpertGate`, the parts of `MoE`: parameters with Hugging
Face's names, computed by functional.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Optional

import torch
from torch import Tensor, nn

from . import _library, _options, _rules, functional
from .distributed.dtensor import OnMesh, Spread, plain
from .functional import Activation
from .routing import Aux

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .distributed.cost import Places
    from .distributed.layer import OfTeam
    from .distributed.team import Arrival, Team

ExpertGradients = Literal["mean", "sum"]


class Experts(nn.Module):
    """Hugging Face's `experts`: `gate_up_proj` (E, 2n, d), n gate rows then n up rows, or `up_proj`
    (E, n, d) if the activation is not gated; `down_proj` (E, d, n); with biases `gate_up_proj_bias`
    (E, 2n) or `up_proj_bias` (E, n), and `down_proj_bias` (E, d).

    With `expert_mesh` they are DTensors of these shapes, sharded over E."""

    def __init__(
        self,
        d: int,
        n: int,
        E: int,
        *,
        activation: Activation = "swiglu",
        clamp: float = 0.0,
        alpha: float = 0.0,
        up_shift: float = 0.0,
        bias: bool = False,
        expert_mesh: DeviceMesh | None = None,
        expert_gradients: ExpertGradients = "mean",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _options.check_default_dtype(device, dtype)
        self.activation = activation
        self.clamp, self.alpha, self.up_shift = clamp, alpha, up_shift
        self._mesh = None if expert_mesh is None else OnMesh(expert_mesh, E, expert_gradients)
        number = _rules.number("activation", _rules.ACTIVATIONS, activation)
        self._up = "gate_up_proj" if _rules.is_gated(number) else "up_proj"
        width = _rules.h_width(number, n)
        empty = lambda *shape: nn.Parameter(self._empty(*shape, device=device, dtype=dtype))
        self.register_parameter(self._up, empty(E, width, d))
        self.register_parameter(self._up + "_bias", empty(E, width) if bias else None)
        self.down_proj = empty(E, d, n)
        self.register_parameter("down_proj_bias", empty(E, d) if bias else None)

    def _empty(self, *shape: int, **how: Any) -> Tensor:
        return torch.empty(shape, **how) if self._mesh is None else self._mesh.empty(*shape, **how)

    def reset_parameters(self) -> None:
        for name in (self._up, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, name + "_bias")
            bound = weight.shape[-1] ** -0.5
            uniform = nn.init.uniform_ if self._mesh is None else self._mesh.uniform_
            uniform(weight, -bound, bound)
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        spread: Optional[Spread] = None,
        *,
        team: Team | None = None,
        return_aux: bool = True,
        **routing: Any,
    ) -> Any:
        """x (T, d), logits (T, E), or with ids among `routing` scores (T, K), and other arguments
        of functional.moe -> its result; with a team that of `_on_team`."""
        if team is not None:
            return self._on_team(x, logits, team, **routing)
        W1, W2, b1, b2 = self._weights(spread.parameter if spread else self._own)
        return functional.moe(
            x, logits, W1, W2, b1=b1, b2=b2, activation=self.activation, clamp=self.clamp,
            alpha=self.alpha, up_shift=self.up_shift, return_aux=return_aux, **routing,
        )  # fmt: skip

    def of_decode(self, x: Tensor, gate: functional.Gate, **options: Any) -> Any:
        """x (T, d), a gate, and other arguments of functional.moe_tokens -> its result."""
        W1, W2, b1, b2 = self._weights(self._own)
        return functional.moe_tokens(
            x, gate, W1, W2, b1=b1, b2=b2, activation=self.activation, clamp=self.clamp,
            alpha=self.alpha, up_shift=self.up_shift, **options,
        )  # fmt: skip

    def _on_team(
        self,
        x: Tensor,
        router: Tensor,
        team: Team,
        *,
        places: Places,
        arrival: Arrival | None,
        addend: Tensor | None,
        overwrite_H: bool | None,
        column_blocks: int,
        ids: Tensor | None = None,
        rounding: tuple[Any, ...] | None = None,
        K: int = 0,
        **choice: Any,
    ) -> tuple[Tensor, Aux, OfTeam]:
        """x (t, d), logits (t, E), or with ids scores (t, K), of this rank's tokens; its rows on
        their way -> O (t, d), its Aux, and the choice of all ranks."""
        from .distributed import layer as spread

        W1, W2, b1, b2 = self._weights(self._own)
        layer = functional._layer(
            W1, None, W2, b1, None, b2, self.activation, "concatenated", self.clamp, self.alpha,
            self.up_shift, column_blocks, overwrite_H, None, False,
        )  # fmt: skip
        with_experts = (W2.shape[0], layer, addend, team, places)
        if rounding is not None:
            functional._check_rounded(rounding[0], **choice)
            return spread.rounded(x, router, *with_experts, K, rounding)
        if ids is not None:
            chosen = spread.given(router, ids, W2.shape[0] * team.size)
        else:
            chosen = spread.choose(router, K, **choice)
        return spread.routed(x, chosen, *with_experts, arrival)

    def _own(self, name: str, weight: Tensor | None) -> Tensor | None:
        return plain(name, weight) if self._mesh is None else self._mesh.own(name, weight)

    def _weights(self, local: Callable[[str, Any], Any]) -> Iterator[Any]:
        names = (self._up, "down_proj", self._up + "_bias", "down_proj_bias")
        return (local("experts." + name, getattr(self, name)) for name in names)

    def extra_repr(self) -> str:
        E, d, n = self.down_proj.shape
        numbers = {name: getattr(self, name) for name in ("clamp", "alpha", "up_shift")}
        form = "".join(f", {name}={value}" for name, value in numbers.items() if value)
        bias = ", bias=True" if self.down_proj_bias is not None else ""
        here = f" on {self._mesh.size} ranks" if self._mesh is not None else ""
        return f"d={d}, n={n}, E={E}{here}, activation={self.activation!r}{form}{bias}"


class Projection(nn.Module):
    """A module with a `weight` (rows, columns). Calling it returns the weight, which the caller
    uses, so a wrapper that replaces the weight during the call (PEFT's `target_parameters`)
    applies. It is not a torch.nn.Linear, because wrappers of that expect its output."""

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _options.check_default_dtype(device, dtype)
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """x (not read, but wrappers require an input) -> weight (rows, columns)."""
        return self.weight

    def extra_repr(self) -> str:
        return f"rows={self.weight.shape[0]}, columns={self.weight.shape[1]}"


class SharedExperts(nn.Module):
    """DeepSeek's `shared_experts`: one MLP for every token, with `gate_proj.weight` and
    `up_proj.weight` (n, d), only the latter if the activation is not gated, and `down_proj.weight`
    (d, n). It is computed as one expert with all tokens, so backward keeps only H of it, in
    addition to x, which the layer keeps anyway."""

    def __init__(
        self,
        d: int,
        n: int,
        *,
        activation: Activation = "swiglu",
        clamp: float = 0.0,
        alpha: float = 0.0,
        up_shift: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.clamp, self.alpha, self.up_shift = clamp, alpha, up_shift
        number = _rules.number("activation", _rules.ACTIVATIONS, activation)
        make = lambda *shape: Projection(*shape, device=device, dtype=dtype)
        self.gate_proj = make(n, d) if _rules.is_gated(number) else None
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
        """x (T, d), row_scores (T), factors of the rows -> (T, d)."""
        local = spread.parameter if spread else plain

        def weight(name):  # (1, rows, columns): of one expert
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
            activation=self.activation,
            clamp=self.clamp,
            alpha=self.alpha,
            up_shift=self.up_shift,
            column_blocks=column_blocks,
            overwrite_H=overwrite_H,
        )

    def extra_repr(self) -> str:
        d, n = self.down_proj.weight.shape
        return f"d={d}, n={n}, activation={self.activation!r}"


class SharedExpertGate(Projection):
    """Qwen's `shared_expert_gate`: `weight` (1, d). The sigmoid of its linear output scales the
    shared experts' result. The linear output has x's dtype, or autocast's, as in transformers; the
    sigmoid is float32, whereas transformers rounds it to that dtype."""

    def forward(self, x: Tensor, spread: Optional[Spread] = None) -> Tensor:
        """x (T, d) -> scores (T) float32."""
        local = spread.parameter if spread else plain
        weight = local("shared_expert_gate.weight", self.weight)
        _library.require_together(x, "x", **{"shared_expert_gate.weight": weight})
        return nn.functional.linear(x, weight).squeeze(-1).float().sigmoid()
