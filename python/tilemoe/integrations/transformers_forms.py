"""Find the form of transformers' experts modules by evaluating them.

See transformers.py.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import _library
from .._autocast import autocast_dtype
from .._layout import WIDTH_MULTIPLE, is_gated
from ..options import ACTIVATIONS
from . import quantized_experts, transformers_norm
from .transformers_loop import TOLERANCE, difference, dispatching_forward, unknown_attributes

CHILDREN = {"act_fn", "parametrizations"}  # PEFT and bitsandbytes add the latter
FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


ANY_ACTIVATION = "; tilemoe.gathered_mm and tilemoe.combine_mm support any activation between them"


class Form(NamedTuple):
    """Function of experts between their two GEMMs, as arguments of `tilemoe.moe`."""

    activation: str
    gate_layout: str = "concatenated"
    clamp: float = 0.0
    alpha: float = 0.0
    up_shift: float = 0.0


def form_of(module: torch.nn.Module) -> Form:
    """Return the module's form, evaluated again only after a change that affects it."""
    known = getattr(module, "_tilemoe_form", None)
    if torch.compiler.is_compiling():  # the result is a constant of the graph
        return known[1] if known else _find_form(module)
    if known is None or known[0] != _what_decides(module):
        return _find_form(module)
    return known[1]


def _what_decides(module: torch.nn.Module) -> tuple:
    """Return everything that determines the form.

    This is the code of the forward and the gate, every number, flag and name that they may read,
    and the names of the tensors and children.
    """
    plain = {
        name: value
        for name, value in vars(module).items()
        if type(value) in (bool, int, float, str)
        and name != "training"
        and not name.startswith("ds_")  # counters of DeepSpeed
    }
    gate = module._apply_gate
    return (
        dispatching_forward(type(module)),
        getattr(gate, "__func__", gate),
        getattr(module, "act_fn", None),
        plain,
        [*module._parameters],
        [*module._buffers],
        [*module._modules],
    )


@torch.compiler.disable(
    reason="call tilemoe.transformers.prepare(model), or the model once, before compiling"
)
def _find_form(module: torch.nn.Module) -> Form:
    _refuse_unknown(module)
    _refuse_widths(module)
    # In a separate thread, without the caller's modes: checkpointing's hooks, autocast, inference
    # mode, a default device.
    with ThreadPoolExecutor(1) as thread:
        form = thread.submit(_form_compared, module).result()
    module._tilemoe_form = (_what_decides(module), form)
    return form


def _form_compared(module: torch.nn.Module) -> Form:
    """Return the form of the gate, if the class's own forward computes nothing else."""
    form = _form_of_gate(module) if module.has_gate else _form_of_activation(module)
    error = difference(module, between(form), *_written_out(module))
    if error is not None and error > TOLERANCE:
        names = unknown_attributes(module)
        reads = f" Its forward may read its {', '.join(names)}." if names else ""
        raise _refusal(
            module,
            f"output or gradients of its own forward differ by {_percent(error)} from "
            f"those of {form.activation} experts.{reads}",
        )
    return form


def _written_out(module: torch.nn.Module) -> list[Callable]:
    """Return the default gate, in addition to a replaced _apply_gate.

    Most classes' forwards contain the default gate in place of a call of _apply_gate.
    """
    if not module.has_gate or not hasattr(module, "act_fn"):
        return []
    try:
        module.act_fn(torch.zeros(1, dtype=torch.float64))
    except TypeError:  # a function of gate and up, for which the class has its own gate
        return []
    return [_of_columns(lambda gate, up: module.act_fn(gate) * up, module.is_concatenated)]


def _weight_names(module: torch.nn.Module) -> list[str]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = [first, "down_proj"]
    return names + [name + "_bias" for name in names] if module.has_bias else names


def _refuse_unknown(module: torch.nn.Module) -> None:
    """Reject parameters, buffers, children and flags outside the experts interface."""
    quantized = quantized_experts.buffers(module)
    norm = transformers_norm.norm_of(module)
    children = CHILDREN if norm is None else {*CHILDREN, transformers_norm.NORM}
    flags = FLAGS if norm is None else {*FLAGS, "has_post_expert_norm"}
    known = {*_weight_names(module), *quantized_experts.fp8_of_transformers(module)}
    unknown = {
        "parameter": [n for n, p in module._parameters.items() if p is not None and n not in known],
        "buffer": [n for n, b in module._buffers.items() if b is not None and n not in quantized],
        "submodule": [n for n, m in module._modules.items() if m is not None and n not in children],
        "flag": [
            name
            for name, value in vars(module).items()
            if value is True and name.startswith(("has_", "is_")) and name not in flags
        ],
    }
    found = [f"{kind} {name}" for kind, names in unknown.items() for name in sorted(names)]
    if found:
        raise _refusal(module, f"TileMoE does not support its {', '.join(found)}")


def _refuse_widths(module: torch.nn.Module) -> None:
    """Check the widths of down_proj, (E, d, n) or (E, n, d)."""
    widths = module.down_proj.shape[-2:]
    if any(width % WIDTH_MULTIPLE for width in widths):
        raise _refusal(
            module,
            f"its widths must be multiples of {WIDTH_MULTIPLE}, got {widths[0]} and {widths[1]}",
        )


def refuse_quantized(module: torch.nn.Module) -> None:
    """Reject weights that another tool has replaced by integers, in another shape."""
    known = quantized_experts.names(module)
    for name, weight in module._parameters.items():
        if weight is not None and name not in known and not weight.is_floating_point():
            kind = type(weight).__name__
            raise _refusal(
                module,
                f"its {name} is a {kind} of {weight.dtype}, expected a floating-point weight; "
                "dequantize it first",
            )


def refuse_weights(module: torch.nn.Module) -> None:
    """Reject weights for which forward would fail or return undefined values."""
    present = {name: p for name, p in module._parameters.items() if p is not None}
    for name in [*present]:
        if (quantized := quantized_experts.get(module, name)) is not None:
            present.pop(name + "_scale_inv", None)
            # The dtype and device of the computation with the values.
            present[name] = quantized.scales.new_empty(0, dtype=quantized.dtype)
    for name, weight in present.items():
        _refuse_weight(module, name, weight)
    for name, p in present.items():
        for other, weight in present.items():
            if p.device != weight.device:
                raise _refusal(
                    module,
                    f"expected all weights on one device: its {name} is on {p.device}, its "
                    f"{other} is on {weight.device}",
                )
            either_is_cast = name.endswith("_bias") or other.endswith("_bias")
            if _dtype(p) != _dtype(weight) and not either_is_cast:
                raise _refusal(
                    module,
                    f"expected one dtype: its {name} is {p.dtype}, its {other} is "
                    f"{weight.dtype}; cast one of them",
                )


def _dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the computation; autocast does not change float64."""
    known = weight.dtype in FLOAT_TYPES
    return (known and autocast_dtype(weight.device)) or weight.dtype


def _refuse_weight(module: torch.nn.Module, name: str, weight: torch.Tensor) -> None:
    kind, dtype = weight.device.type, _dtype(weight)
    if kind == "meta":
        raise _refusal(
            module, f"its {name} is on meta, expected loaded weights; load the weights first"
        )
    if kind not in ("cpu", "cuda"):
        raise _refusal(module, f"its {name} must be on cpu or cuda, got {weight.device}")
    why_no_cuda = _library.why_no_cuda()
    if kind == "cuda" and why_no_cuda is not None:
        raise _refusal(module, f"its {name} is on {weight.device}, but {why_no_cuda}")
    if kind == "cuda" and dtype == torch.float32 and not name.endswith("_bias"):
        raise _refusal(
            module,
            f"its {name} must be bfloat16 or float16 on CUDA, got float32 on "
            f"{weight.device}; cast the model, or call prepare() under the torch.autocast "
            "of its later calls",
        )
    if dtype not in FLOAT_TYPES:
        raise _refusal(module, f"its {name} must be float32, bfloat16 or float16, got {dtype}")


def _values() -> torch.Tensor:
    """Return values of both signs and zero.

    They are small enough to show a slope and large enough to reach any clamp.
    """
    positive = 2.0 ** torch.arange(-12, 20, 0.5, dtype=torch.float64)
    return torch.cat([-positive, torch.zeros(1, dtype=torch.float64), positive])


FUNCTIONS = {  # of the formulas in the library's list
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _activations(gated: bool) -> dict[str, Callable]:
    """Return the activations of the library's list by name, of gate and up, or of h."""
    formulas = enumerate(_library.operators.activation_formulas())
    arguments = "gate, up" if gated else "h"
    return {
        ACTIVATIONS[number]: eval(f"lambda {arguments}: {formula}", dict(FUNCTIONS))
        for number, formula in formulas
        if is_gated(number) == gated
    }


GATED, PLAIN = _activations(gated=True), _activations(gated=False)


def _function(form: Form) -> Callable:
    """Return the form's function of gate and up, or of h."""
    if form.activation == "swiglu":
        return lambda gate, up: _swiglu(gate, up, form.clamp, form.alpha, form.up_shift)
    return (GATED | PLAIN)[form.activation]


def between(form: Form) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the form's function from H (..., 2n) to A (..., n).

    H is (..., n) if the form has no gate.
    """
    function = _function(form)
    if form.activation in PLAIN:
        return function
    return _of_columns(function, form.gate_layout == "concatenated")


def _of_columns(function: Callable, is_concatenated: bool) -> Callable:
    """Return function(gate, up) as a function of H."""
    if is_concatenated:
        return lambda H: function(*H.chunk(2, dim=-1))
    return lambda H: function(H[..., ::2], H[..., 1::2])


def _form_of_activation(module: torch.nn.Module) -> Form:
    x = _values().reshape(3, -1)  # a matrix, as in forward
    theirs = _evaluated(module, module.act_fn, x)
    forms = [Form(name) for name in PLAIN]
    ours = {form: _value_and_slopes(_function(form), x) for form in forms}
    for form in forms:
        if _agree(theirs, ours[form], scale=1 + x.abs()):
            return form
    raise _refusal(
        module,
        f"its activation {_name(module.act_fn)} must be one of {', '.join(PLAIN)}"
        + _nearest(theirs, ours, x.abs() <= 8)
        + ANY_ACTIVATION,
    )


def _form_of_gate(module: torch.nn.Module) -> Form:
    layout = "concatenated" if module.is_concatenated else "interleaved"

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if layout == "concatenated":
            H = torch.cat([gate, up], dim=-1)
        else:
            H = torch.stack([gate, up], dim=-1).flatten(-2)
        return module._apply_gate(H)

    # Every pair of values, shuffled, to detect a gate that mixes columns or rows.
    values = _values()
    pairs = torch.cartesian_prod(values, values)
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    gate, up = pairs.T.reshape(2, len(values), len(values))
    theirs = _evaluated(module, gated, gate, up)

    forms = [Form("swiglu", layout, *_swiglu_numbers(gated))]
    forms += [Form(name, layout) for name in GATED]
    ours = {}
    scale = (1 + gate.abs()) * (1 + up.abs())
    for form in forms:
        ours[form] = _value_and_slopes(_function(form), gate, up)
        if _agree(theirs, ours[form], scale):
            return form
    act = f" with act_fn {_name(module.act_fn)}" if hasattr(module, "act_fn") else ""
    *others, last = (name for name in GATED if name != "swiglu")
    raise _refusal(
        module,
        f"its {_name(module._apply_gate)}{act} must be a swiglu (with clamp, alpha and "
        f"up_shift), {', '.join(others)} or {last} of {layout} columns"
        + _nearest(theirs, ours, (gate.abs() <= 8) & (up.abs() <= 8))
        + ANY_ACTIVATION,
    )


def _swiglu(gate, up, clamp, alpha, up_shift):
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid((alpha or 1.0) * gate) * (up + up_shift)


def _swiglu_numbers(gated: Callable) -> tuple[float, float, float]:
    """Return the clamp, alpha and up_shift with which `gated` is a swiglu, if it is one.

    They are solved from three values at a small gate t, for which gated(t, u) = t sigmoid(alpha t)
    (u + up_shift) and a huge u is cut to the clamp. Their names differ between classes, their
    effect does not.
    """
    t, huge = 2.0**-6, 2.0**30
    up = torch.tensor([[0.0, t, huge]], dtype=torch.float64)
    at = gated(torch.full_like(up, t), up)[0].detach()
    at_zero, at_t, at_huge = at
    slope = (at_t - at_zero) / t  # t sigmoid(alpha t)
    solved = ((at_huge - at_zero) / slope, torch.logit(slope / t) / t, at_zero / slope)
    # Nine decimals: more than float32 has, fewer than the rounding of the divisions affects. For
    # float32 values rounding leaves only four digits.
    rounded = (lambda v: float(f"{v:.4g}")) if _is_float32(at) else (lambda v: round(v, 9))
    clamp, alpha, up_shift = (rounded(v.item()) if v.isfinite() else 0.0 for v in solved)
    if not 0 <= clamp < huge / 2:
        clamp = 0.0  # none
    if (clamp, alpha, up_shift) == (0.0, 1.0, 0.0):
        alpha = 0.0  # the plain form
    return clamp, alpha, up_shift


def _value_and_slopes(function: Callable, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return `function(*inputs)` and its gradient to each input: a gate may change one."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]


def _evaluated(
    module: torch.nn.Module, function: Callable, *inputs: torch.Tensor
) -> list[torch.Tensor]:
    try:
        return _value_and_slopes(function, *inputs)
    except Exception as error:
        raise _refusal(module, f"its function could not be evaluated: {error}") from error


def _agree(theirs: list[torch.Tensor], ours: list[torch.Tensor], scale: torch.Tensor) -> bool:
    """Return whether both are equal up to rounding and constants with nine digits.

    The comparison is in float64, or in float32 if the module computes in float32.
    """
    for a, b in zip(theirs, ours, strict=True):
        relative, absolute = (2e-6, 1e-6) if _is_float32(a) else (1e-8, 1e-12)
        if a.shape != b.shape:
            return False
        if not ((a - b).abs() <= relative * b.abs() + absolute * scale).all():
            return False
    return True


def _is_float32(tensor: torch.Tensor) -> bool:
    """Return whether float32 has each float64 value: it never has 1/sqrt(2) and the like."""
    return torch.equal(tensor, tensor.float().double())


def _nearest(theirs: list[torch.Tensor], ours: dict, moderate: torch.Tensor) -> str:
    """Return the form that differs least, and by how much, over the moderate inputs."""

    def differs(tensors: list[torch.Tensor]) -> float:
        if any(a.shape != b.shape for a, b in zip(theirs, tensors, strict=True)):
            return float("inf")
        pairs = [(a[moderate], b[moderate]) for a, b in zip(theirs, tensors, strict=True)]
        return max(((a - b).norm() / b.norm()).nan_to_num(torch.inf).item() for a, b in pairs)

    form, error = min(((f, differs(tensors)) for f, tensors in ours.items()), key=lambda x: x[1])
    if error == float("inf"):
        return ""
    return f"; values or gradients of the nearest, {form.activation}, differ by {_percent(error)}"


def _percent(error: float) -> str:
    return f"{100 * error:.0f} %" if error > 0.1 else f"{100 * error:.2g} %"


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _refusal(module: torch.nn.Module, reason: str) -> NotImplementedError:
    return NotImplementedError(f"TileMoE cannot compute {_library.class_of(module)}: {reason}")
