"""Define `from_modules`, which makes an MoE from a gate and a list of expert modules."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _library, _parameters
from ..module import MoE
from ..options import Activation, Scoring
from ..router import is_observed

if TYPE_CHECKING:
    from .transformers_forms import Form


class _Names(NamedTuple):
    """Names of an expert's linear layers."""

    up: tuple[str, ...]  # gate and up; or one layer, of both or for an activation without a gate
    down: str
    gated: bool


_FORMS = (
    _Names(("gate_proj", "up_proj"), "down_proj", True),
    _Names(("w1", "w3"), "w2", True),
    _Names(("gate_up_proj",), "down_proj", True),
    _Names(("up_proj",), "down_proj", False),
)
# Options that follow from the modules.
_DERIVED = (
    "d", "n", "E", "K", "hidden_size", "intermediate_size", "num_experts", "clamp", "alpha",
    "up_shift", "bias", "router_bias", "selection_bias", "device", "dtype",
)  # fmt: skip
_UNSUPPORTED = ("shared_intermediate_size", "shared_expert_gate", "expert_mesh")


def from_modules(
    gate: nn.Module,
    experts: Iterable[nn.Module],
    *,
    top_k: int,
    scoring: Scoring = "softmax_over_chosen",
    activation: Activation | None = None,
    **options: Any,
) -> MoE:
    """Make an MoE from a router and a list of expert modules, with copies of their weights.

    An expert has the children `gate_proj`, `up_proj` and `down_proj`; `w1`, `w3` and `w2`;
    `gate_up_proj`, whose first n rows are the gate, and `down_proj`; or `up_proj` and `down_proj`
    for an activation without a gate. They are torch.nn.Linear, all with a bias or none. Each expert
    is called with known values to find its activation; an expert that computes anything else raises
    an error.

    Args:
        gate: torch.nn.Linear, or a module with a `weight` (E, d). Its `bias` (E) and its buffer
            `e_score_correction_bias` (E) are copied if they exist.
        experts: E modules that map tokens (..., d) to (..., d).
        top_k: Experts per token.
        scoring: Function from the gate's logits to scores, as in `MoE`.
        activation: Activation of the experts, if it is to be checked. None: the activation is
            found.
        **options: Other arguments of `MoE` that do not follow from the modules, such as n_group,
            topk_group, routed_scaling_factor, router_dtype, balance_coefficient and return_aux.

    Returns:
        An MoE on the experts' device and in their dtype, in the gate's mode (train or eval). Its
        parameters require gradients if the modules' parameters do.

    Raises:
        ValueError: A module or an attribute is not supported, or the modules differ; the message
            names it.
        NotImplementedError: The experts compute something that TileMoE does not support.
        TypeError: gate or an expert is not a torch.nn.Module, or an option follows from the
            modules.

    Example:
        >>> class Expert(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w1 = torch.nn.Linear(16, 32, bias=False)
        ...         self.w2 = torch.nn.Linear(32, 16, bias=False)
        ...         self.w3 = torch.nn.Linear(16, 32, bias=False)
        ...
        ...     def forward(self, x):
        ...         return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
        >>> gate = torch.nn.Linear(16, 4, bias=False)
        >>> layer = tilemoe.from_modules(gate, [Expert() for _ in range(4)], top_k=2)
        >>> layer.experts
        Experts(d=16, n=32, E=4, activation='swiglu')
    """
    for name in options:
        if name in _DERIVED:
            raise TypeError(
                f"from_modules got an unexpected keyword argument {name!r}: its value follows "
                "from the modules"
            )
        if name in _UNSUPPORTED:
            raise TypeError(
                f"from_modules got an unexpected keyword argument {name!r}; add the shared "
                "experts' output to the layer's output, or make an MoE and load its state "
                "dict"
            )
    modules = list(experts)
    if not modules:
        raise ValueError("experts must have at least one torch.nn.Module, got none")
    for name, module in [("gate", gate), *((f"experts.{e}", m) for e, m in enumerate(modules))]:
        _check_module(name, module)
    names = _check_experts(modules)
    form = _form_of(modules[0], names)
    if activation is not None and activation != form.activation:
        raise ValueError(
            f"activation is {activation!r}, but the experts compute {form.activation!r}"
        )
    for e, module in enumerate(modules):
        _check_alike(f"experts.{e}", module, modules[0], names)
        _check_composition(f"experts.{e}", module, names)

    first = getattr(modules[0], names.up[0])
    d, dtype = first.in_features, first.weight.dtype
    n = getattr(modules[0], names.down).in_features
    _parameters.check_dtypes(**{"experts.0.weight": dtype})
    state = _gate_state(gate, len(modules), d, first.weight.device)
    options.setdefault("router_dtype", None if gate.weight.dtype == dtype else gate.weight.dtype)
    layer = MoE(
        d, n, len(modules), top_k, activation=form.activation, clamp=form.clamp, alpha=form.alpha,
        up_shift=form.up_shift, bias=first.bias is not None, scoring=scoring,
        router_bias="gate.bias" in state, selection_bias="gate.e_score_correction_bias" in state,
        device="meta", dtype=dtype, **options,
    )  # fmt: skip
    router_dtype = options["router_dtype"] or dtype
    for name in ("gate.weight", "gate.bias"):
        if name in state:
            state[name] = state[name].to(router_dtype)
    state |= _stacked(modules, names)
    layer.load_state_dict(state, assign=True)
    _copy_requires_grad(layer, gate, modules, names)
    return layer.train(gate.training)


def _check_module(name: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        kind = _library.class_of(module)
        raise TypeError(f"{name} must be a torch.nn.Module, got a {kind}")
    for child, part in module.named_modules():
        if is_observed(part):
            where = ".".join(filter(None, (name, child)))
            raise ValueError(
                f"{where} has hooks or its own forward, which the layer would not call; "
                "remove them first"
            )


def _check_plain(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = type(tensor).__qualname__
        raise ValueError(f"{name} must be a plain tensor, got a {kind}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name} is on {tensor.device}, expected loaded weights; load the weights first"
        )


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _check_experts(modules: list[nn.Module]) -> _Names:
    """Return the names of the linear layers, which are the same for all experts."""
    children = dict(modules[0].named_children())
    names = next((f for f in _FORMS if {*f.up, f.down} <= children.keys()), None)
    if names is None:
        kinds = ", ".join("/".join((*f.up, f.down)) for f in _FORMS)
        raise ValueError(
            f"experts.0 is a {type(modules[0]).__qualname__} with the children "
            f"{', '.join(children) or 'none'}, expected {kinds}"
        )
    linears = (*names.up, names.down)
    known = {f"{linear}.{of}" for linear in linears for of in ("weight", "bias")}
    of_first = _tensors(modules[0])
    for e, module in enumerate(modules):
        name = f"experts.{e}"
        if type(module) is not type(modules[0]):
            raise ValueError(
                f"{name} is a {type(module).__qualname__}, expected the class of "
                f"experts.0, {type(modules[0]).__qualname__}"
            )
        for child, part in module.named_children():
            if child in linears and not _is_linear(part):
                raise ValueError(
                    f"{name}.{child} must be a torch.nn.Linear, got a {type(part).__qualname__}"
                )
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                raise ValueError(f"{name}.{child} is a {part!r}, which MoE does not support")
        tensors = _tensors(module)
        for child in sorted(tensors.keys() ^ of_first.keys()):
            raise ValueError(
                f"{child} exists in only one of {name} and experts.0, expected the same "
                "parameters in all experts"
            )
        for child, tensor in tensors.items():
            if child not in known:
                raise ValueError(
                    f"{name}.{child} has shape {tuple(tensor.shape)}, but from_modules "
                    f"supports only weights and biases of {', '.join(linears)}"
                )
            _check_plain(f"{name}.{child}", tensor)
            like = of_first[child]
            seen, expected = ((t.dtype, tuple(t.shape), t.device) for t in (tensor, like))
            if seen != expected:
                raise ValueError(
                    f"{name}.{child} is {seen[0]} {seen[1]} on {seen[2]}, expected "
                    f"{expected[0]} {expected[1]} on {expected[2]}, as in experts.0"
                )
        _check_linears(name, module, names)
    return names


def _check_linears(name: str, module: nn.Module, names: _Names) -> None:
    first = getattr(module, names.up[0])
    rows = first.out_features // 2 if len(names.up) == 1 and names.gated else first.out_features
    shapes = {up: first.weight.shape for up in names.up} | {names.down: (first.in_features, rows)}
    for child, shape in shapes.items():
        linear = getattr(module, child)
        if tuple(linear.weight.shape) != tuple(shape):
            raise ValueError(
                f"{name}.{child}.weight has shape {tuple(linear.weight.shape)}, expected "
                f"{tuple(shape)}, because {names.up[0]} has {tuple(first.weight.shape)}"
            )
        if linear.weight.dtype != first.weight.dtype or linear.weight.device != first.weight.device:
            raise ValueError(
                f"{name}.{child}.weight is {linear.weight.dtype} on "
                f"{linear.weight.device}, expected {first.weight.dtype} on "
                f"{first.weight.device}, as in {names.up[0]}.weight"
            )
        if (linear.bias is None) != (first.bias is None):
            has = ("has none", "has one")
            raise ValueError(
                f"{name}.{child} {has[linear.bias is not None]}, {names.up[0]} "
                f"{has[first.bias is not None]}, expected all with a bias or none"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


# ---------------------------------------------------------------- what an expert computes


class _Given(nn.Module):
    """Replacement of a linear layer that returns a given value for any input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value, self.weight = value, value.detach()

    def forward(self, _: Tensor) -> Tensor:
        return self.value


def _between(module: nn.Module, names: _Names, x: Tensor, *given: Tensor) -> Tensor:
    """Return the result of the expert if its linear layers return given values.

    The values are outputs for x (rows, d): `given`, each (rows, n), or one (rows, 2n).
    """
    expert = _trained(module)
    down = nn.Identity()
    down.weight = given[0].detach()
    stand_ins = {name: _Given(value) for name, value in zip(names.up, given)}
    expert._modules = module._modules | stand_ins | {names.down: down}
    return expert(x)


def _trained(module: nn.Module) -> nn.Module:
    """Return a copy of the module in training mode, so that dropout acts."""
    copied = copy.copy(module)
    copied.training = True
    return copied


def _form_of(module: nn.Module, names: _Names) -> Form:
    """Return the activation and its numbers, found as for transformers' experts."""
    first = getattr(module, names.up[0])
    n, d = getattr(module, names.down).in_features, first.in_features

    def evaluated(*values: Tensor) -> Tensor:
        """Return the expert's values for any number of gates and ups, in rows of n."""
        count, shape = values[0].numel(), values[0].shape
        rows = -(-count // n)
        pad = (0, rows * n - count)
        padded = [nn.functional.pad(v.flatten(), pad).view(rows, n) for v in values]
        if len(names.up) < len(values):
            padded = [torch.cat(padded, dim=-1)]
        x = torch.zeros(rows, d, dtype=torch.float64)
        return _between(module, names, x, *padded).flatten()[:count].view(shape)

    def forward(*values: Tensor) -> Tensor:
        return evaluated(*(values[0].chunk(2, dim=-1) if names.gated else values))

    forward.__qualname__ = "forward"  # name in messages
    # Attributes of a transformers module that the evaluation reads.
    like = dict(__module__=type(module).__module__, is_concatenated=True)
    like["_apply_gate" if names.gated else "act_fn"] = staticmethod(forward)
    stand_in = type(type(module).__qualname__, (), like)()
    from . import transformers_forms as forms  # imports torch._dynamo, a second of import time

    evaluate = forms._form_of_gate if names.gated else forms._form_of_activation
    with ThreadPoolExecutor(1) as thread:  # without the caller's modes
        return thread.submit(evaluate, stand_in).result()


@torch.no_grad()
def _check_alike(name: str, module: nn.Module, first: nn.Module, names: _Names) -> None:
    """Check that two experts compute the same between their linear layers."""
    generator = torch.Generator().manual_seed(1)
    like = dict(dtype=torch.float64, device="cpu")
    linears = [getattr(first, up) for up in names.up]
    x = torch.zeros(64, linears[0].in_features, **like)
    given = [8 * torch.randn(64, li.out_features, generator=generator, **like) for li in linears]
    values = [_between(expert, names, x, *given) for expert in (module, first)]
    if not torch.equal(*values):
        raise ValueError(f"{name} and experts.0 have different activations, expected the same")


@torch.no_grad()
def _check_composition(name: str, module: nn.Module, names: _Names) -> None:
    """Check with random rows that the expert is its linear layers and the function between."""
    first = getattr(module, names.up[0])
    x = torch.randn(4, first.in_features, generator=torch.Generator().manual_seed(0), device="cpu")
    x = x.to(first.weight)
    with torch.autocast(x.device.type, enabled=False):
        given = [getattr(module, up)(x) for up in names.up]
        want = getattr(module, names.down)(_between(module, names, x, *given))
        got = _trained(module)(x)
    is_same = isinstance(got, Tensor) and got.shape == want.shape
    limit = 4 * torch.finfo(want.dtype).eps * want.double().norm()
    if not is_same or not (got.double() - want.double()).norm() <= limit:
        raise ValueError(
            f"{name}, a {type(module).__qualname__}, computes something before "
            f"{' and '.join(names.up)} or after {names.down}, or does not return a tensor "
            "like its input"
        )


# ---------------------------------------------------------------- weights


def _gate_state(gate: nn.Module, E: int, d: int, device: torch.device) -> dict[str, Tensor]:
    shapes = {"weight": (E, d), "bias": (E,), "e_score_correction_bias": (E,)}
    tensors = _tensors(gate)
    if "weight" not in tensors:
        raise ValueError(
            f"gate must have a parameter `weight` {(E, d)}, got a {type(gate).__qualname__}"
        )
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(
                f"gate.{name} has shape {tuple(tensor.shape)}, but from_modules supports "
                f"only {', '.join(shapes)} of a gate"
            )
        _check_plain(f"gate.{name}", tensor)
        if tuple(tensor.shape) != shapes[name] or tensor.device != device:
            raise ValueError(
                f"gate.{name} has shape {tuple(tensor.shape)} on {tensor.device}, expected "
                f"{shapes[name]} on {device} for {E} experts of width {d}"
            )
    state = {f"gate.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
    correction = state.get("gate.e_score_correction_bias")
    if correction is not None:
        state["gate.e_score_correction_bias"] = correction.float()
    return state


def _stacked(modules: list[nn.Module], names: _Names) -> dict[str, Tensor]:
    state = {}
    up = "experts.gate_up_proj" if names.gated else "experts.up_proj"
    for ours, linears in ((up, names.up), ("experts.down_proj", (names.down,))):
        for of, suffix in (("weight", ""), ("bias", "_bias")):
            parts = [[getattr(getattr(m, name), of) for name in linears] for m in modules]
            if parts[0][0] is None:
                continue
            rows = sum(part.shape[0] for part in parts[0])
            stacked = parts[0][0].new_empty(len(modules), rows, *parts[0][0].shape[1:])
            for place, tensors in zip(stacked, parts):
                torch.cat([t.detach() for t in tensors], out=place)
            state[ours + suffix] = stacked
    return state


def _copy_requires_grad(
    layer: MoE, gate: nn.Module, modules: list[nn.Module], names: _Names
) -> None:
    up = "experts.gate_up_proj" if names.gated else "experts.up_proj"
    for name, parameter in layer.named_parameters():
        if name.startswith("gate."):
            parameter.requires_grad_(gate.get_parameter(name.removeprefix("gate.")).requires_grad)
            continue
        linears = names.up if name.startswith(up) else (names.down,)
        of = "bias" if name.endswith("_bias") else "weight"
        wanted = {getattr(getattr(m, li), of).requires_grad for m in modules for li in linears}
        if len(wanted) > 1:
            raise ValueError(
                f"{of} of {' and '.join(linears)} requires a gradient in some experts but "
                "not in others, expected the same in all, because one tensor contains all "
                "of them"
            )
        parameter.requires_grad_(wanted.pop())
