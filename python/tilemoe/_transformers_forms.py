"""What transformers' experts modules compute, found out by asking them (see transformers.py)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import _library, _rules
from ._autocast import autocast_dtype


class Form(NamedTuple):
    """What experts compute between their two products, as arguments of `tilemoe.moe`."""

    activation: str
    gate_layout: str = "concatenated"
    clamp: float = 0.0
    alpha: float = 0.0
    up_shift: float = 0.0


def form_of(module: torch.nn.Module) -> Form:
    """The module's form, asked for again only where what it depends on has changed."""
    known = getattr(module, "_tilemoe_form", None)
    if torch.compiler.is_compiling():  # the answer is a constant of the graph
        return known[1] if known else _ask(module)
    if known is None or known[0] != _what_decides(module):
        return _ask(module)
    return known[1]


def _what_decides(module: torch.nn.Module) -> tuple:
    """The code of the gate and every number that it may read (limits, alphas)."""
    numbers = [v for v in vars(module).values() if type(v) in (int, float)]
    return type(module)._apply_gate, getattr(module, "act_fn", None), numbers


@torch.compiler.disable(reason="call tilemoe.transformers.prepare(model) before compiling")
def _ask(module: torch.nn.Module) -> Form:
    _refuse_unknown_parameters(module)
    _refuse_widths(module)
    ask = _ask_gate if module.has_gate else _ask_activation
    # In a thread of its own, which none of the caller's modes reach: checkpointing's hooks, autocast,
    # inference mode, a default device.
    with ThreadPoolExecutor(1) as thread:
        form = thread.submit(ask, module).result()
    module._tilemoe_form = (_what_decides(module), form)
    return form


def _refuse_unknown_parameters(module: torch.nn.Module) -> None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    known = {first, "down_proj"}
    if module.has_bias:
        known |= {first + "_bias", "down_proj_bias"}
    unknown = {name for name, p in module._parameters.items() if p is not None} - known
    if unknown:
        names = ", ".join(sorted(unknown))
        raise _refusal(module, f"the experts interface does not know its {names}")


def _refuse_widths(module: torch.nn.Module) -> None:
    """Of down_proj (E, d, n) or (E, n, d): either is judged alike."""
    widths = module.down_proj.shape[-2:]
    if any(width % _rules.WIDTH_MULTIPLE for width in widths):
        raise _refusal(
            module,
            f"its widths are {widths[0]} and {widths[1]}, expected multiples of "
            f"{_rules.WIDTH_MULTIPLE}",
        )


def refuse_weights(module: torch.nn.Module) -> None:
    """Those that forward would fail with, or would give noise for."""
    for name, weight in module._parameters.items():
        if weight is None:
            continue
        kind, dtype = weight.device.type, weight.dtype
        if kind == "meta":
            raise _refusal(module, f"its {name} is on meta: load the weights first")
        if kind not in ("cpu", "cuda"):
            raise _refusal(module, f"its {name} is on {weight.device}, expected cpu or cuda")
        why_no_cuda = _library.why_no_cuda()
        if kind == "cuda" and why_no_cuda is not None:
            raise _refusal(module, f"its {name} is on {weight.device}, and {why_no_cuda}")
        known = torch.float32, torch.bfloat16, torch.float16
        if dtype in known:  # autocast leaves float64 as it is
            dtype = autocast_dtype(weight.device) or dtype
        if kind == "cuda" and dtype == torch.float32:
            raise _refusal(
                module,
                f"its {name} is float32 on {weight.device}, expected bfloat16 or float16 on a GPU: "
                "cast the model, or ask under the torch.autocast that it will run under",
            )
        if dtype not in known:
            raise _refusal(
                module, f"its {name} is {dtype}, expected float32, bfloat16 or float16"
            )


def _values() -> torch.Tensor:
    """Both signs and zero: small enough to show a slope, large enough to meet any clamp."""
    positive = 2.0 ** torch.arange(-12, 20, 0.5, dtype=torch.float64)
    return torch.cat([-positive, torch.zeros(1, dtype=torch.float64), positive])


def _ask_activation(module: torch.nn.Module) -> Form:
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
        "identity": lambda x: x,
    }
    x = _values().reshape(3, -1)  # a matrix, as the activation is used to
    asked = _asked(module, module.act_fn, x)
    for name, function in functions.items():
        if _agree(asked, _value_and_slopes(function, x), scale=1 + x.abs()):
            return Form(name)
    known = ", ".join(functions)
    raise _refusal(module, f"its activation {_name(module.act_fn)} is none of {known}")


def _ask_gate(module: torch.nn.Module) -> Form:
    layout = "concatenated" if module.is_concatenated else "interleaved"

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if layout == "concatenated":
            H = torch.cat([gate, up], dim=-1)
        else:
            H = torch.stack([gate, up], dim=-1).flatten(-2)
        return module._apply_gate(H)

    # Every pair of values, shuffled: a gate that mixes columns or rows cannot hide.
    values = _values()
    pairs = torch.cartesian_prod(values, values)
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    gate, up = pairs.T.reshape(2, len(values), len(values))
    asked = _asked(module, gated, gate, up)

    numbers = _swiglu_numbers(gated)
    forms = {
        Form("swiglu", layout, *numbers): lambda gate, up: _swiglu(gate, up, *numbers),
        Form("geglu", layout): lambda gate, up: F.gelu(gate) * up,
        Form("geglu_tanh", layout): lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        Form("reglu", layout): lambda gate, up: F.relu(gate) * up,
        Form("glu", layout): lambda gate, up: torch.sigmoid(gate) * up,
    }
    scale = (1 + gate.abs()) * (1 + up.abs())
    for form, function in forms.items():
        if _agree(asked, _value_and_slopes(function, gate, up), scale):
            return form
    act = f" with act_fn {_name(module.act_fn)}" if hasattr(module, "act_fn") else ""
    raise _refusal(
        module,
        f"its {_name(module._apply_gate)}{act} is no swiglu (with clamp, alpha and up_shift), "
        f"geglu, geglu_tanh, reglu or glu of {layout} columns",
    )


def _swiglu(gate, up, clamp, alpha, up_shift):
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid((alpha or 1.0) * gate) * (up + up_shift)


def _swiglu_numbers(gated: Callable) -> tuple[float, float, float]:
    """The clamp, alpha and up_shift with which `gated` is a swiglu, if it is one.

    Solved from three values at a small gate t, where gated(t, u) = t sigmoid(alpha t) (u +
    up_shift) and a huge u is cut to the clamp. Their names differ from class to class; their effect
    does not.
    """
    t, huge = 2.0**-6, 2.0**30
    up = torch.tensor([[0.0, t, huge]], dtype=torch.float64)
    at_zero, at_t, at_huge = gated(torch.full_like(up, t), up)[0].detach()
    slope = (at_t - at_zero) / t  # t sigmoid(alpha t)
    solved = ((at_huge - at_zero) / slope, torch.logit(slope / t) / t, at_zero / slope)
    # Nine decimals: more than a float32 holds, fewer than the divisions blur.
    clamp, alpha, up_shift = (round(v.item(), 9) if v.isfinite() else 0.0 for v in solved)
    if not 0 <= clamp < huge / 2:
        clamp = 0.0  # none
    if (clamp, alpha, up_shift) == (0.0, 1.0, 0.0):
        alpha = 0.0  # the plain form
    return clamp, alpha, up_shift


def _value_and_slopes(function: Callable, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """function(*inputs) and its gradient to each input: a gate may stop or bend one."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]


def _asked(
    module: torch.nn.Module, function: Callable, *inputs: torch.Tensor
) -> list[torch.Tensor]:
    try:
        return _value_and_slopes(function, *inputs)
    except Exception as error:
        raise _refusal(module, f"what it computes could not be asked: {error}") from error


def _agree(asked: list[torch.Tensor], ours: list[torch.Tensor], scale: torch.Tensor) -> bool:
    """Equal but for rounding in float64 and for constants written with nine digits."""
    return all(
        a.shape == b.shape and bool(((a - b).abs() <= 1e-8 * b.abs() + 1e-12 * scale).all())
        for a, b in zip(asked, ours, strict=True)
    )


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _refusal(module: torch.nn.Module, reason: str) -> NotImplementedError:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return NotImplementedError(f"tilemoe cannot compute {name}: {reason}")
