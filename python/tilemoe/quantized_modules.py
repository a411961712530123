"""Define `quantize_`, which quantises the experts' weights of a module in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _library
from ._formats import Format
from .fp8_weights import Fp8Weight, transposed_of
from .quantization import QuantizedExperts, quantize_experts

if TYPE_CHECKING:
    from .experts import Experts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _as_bytes(array: Tensor | None) -> Tensor | None:
    """Return an array of float8 as uint8: torch 2.11 cannot unpickle float8."""
    if array is None or array.dtype != torch.float8_e4m3fn:
        return array
    return array.view(torch.uint8)


class QuantizedWeight(nn.Module):
    """`QuantizedExperts` in the place of a parameter.

    Its arrays are buffers, so it moves, copies and pickles with its module. A dtype does not change
    it: `module.to(torch.bfloat16)` does not cast codes and scales. The parent module saves and
    loads it under the checkpoint's names if `attach` added it.
    """

    def __init__(self, weight: QuantizedExperts) -> None:
        super().__init__()
        self.format, self.shape, self.transposed = weight.format, weight.shape, weight.transposed
        self.dtype = weight.dtype
        # Of recipe="fp8": the same values transposed, made by transpose_().
        self.register_buffer("transposed_codes", None, persistent=False)
        self.register_buffer("transposed_scales", None, persistent=False)
        for field, array in weight.arrays._asdict().items():
            self.register_buffer(field, _as_bytes(array))

    def value(self) -> QuantizedExperts:
        codes, scales = self.codes, self.scales
        if self.format == "fp8":
            codes = codes.view(torch.float8_e4m3fn)
        elif self.format == "nvfp4":
            scales = scales.view(torch.float8_e4m3fn)
        arrays = codes, scales, self.scale_map, self.scale_of_scales, self.scale_offset
        return QuantizedExperts(
            self.format,
            self.shape,
            self.transposed,
            *arrays,
            self.dtype,  # type: ignore[arg-type]
        )

    def transpose_(self) -> None:
        """Make the transposed codes, unless they exist."""
        if self.transposed_codes is None:
            with torch.inference_mode(False):  # training reads them, too
                made = transposed_of(self.value())
            self.transposed_codes, self.transposed_scales = _as_bytes(made.codes), made.scales

    def of_fp8(self) -> Fp8Weight:
        """Return the weight for the FP8 recipes, frozen."""
        value = self.value()
        if self.transposed_codes is None:
            return Fp8Weight(value, None, None)
        codes = self.transposed_codes.view(torch.float8_e4m3fn)
        arrays = dict(codes=codes, scales=self.transposed_scales)
        return Fp8Weight(value, value._replace(transposed=True, **arrays), None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        # Presented as bytes, which fn moves but does not cast.
        for name, array in self._buffers.items():
            if array is not None:
                self._buffers[name] = fn(array.view(torch.uint8)).view(array.dtype)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update(self.value().state_dict(prefix.removesuffix(".")))

    def _load_from_state_dict(self, *args: Any) -> None:
        pass  # _load copies the tensors

    def take(self, weight: QuantizedExperts, assign: bool) -> None:
        """Copy the arrays of a weight of the same format and shape, or use them directly.

        Args:
            weight: Weight of the same format and shape.
            assign: Use the arrays of `weight` instead of copying them.
        """
        own = self.value()
        if (weight.format, weight.shape, weight.transposed) != own[:3]:
            raise ValueError(f"expected {own!r}, got {weight!r}")
        self.transposed_codes = self.transposed_scales = None
        for name, array in weight.arrays._asdict().items():
            array = _as_bytes(array)
            if array is not None and assign:
                self._buffers[name] = array
            elif array is not None:
                getattr(self, name).copy_(array)

    def extra_repr(self) -> str:
        return repr(self.value())


def attach(module: nn.Module, name: str, weight: QuantizedExperts) -> None:
    """Put a quantised weight in the place of a parameter.

    Args:
        module: Module of the parameter.
        name: Name of the parameter.
        weight: Weight that replaces it.
    """
    if not any(isinstance(child, QuantizedWeight) for child in module.children()):
        module.register_load_state_dict_pre_hook(_load)
    delattr(module, name)
    child = QuantizedWeight(weight)
    module.add_module(name, child)
    # torch.distributed.checkpoint follows the names of a state dict as attributes.
    for checkpoint_name in weight.names(name):
        first, *below = checkpoint_name.split(".")
        if first != name:
            object.__setattr__(module, first, child)
        for part in below:
            object.__setattr__(child, part, child)


def _load(
    module: nn.Module,
    state_dict: dict[str, Tensor],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Remove the tensors of the module's quantised weights from the state dict and load them."""
    for child_name, child in module.named_children():
        if not isinstance(child, QuantizedWeight):
            continue
        name = prefix + child_name
        names = child.value().names(name)
        found = {key: state_dict.pop(key) for key in {name, *names} & state_dict.keys()}
        try:
            if name in found and found[name].dtype in _DTYPES:  # 16-bit weights are quantised here
                given = found[name].to(child.codes.device)
                weight = quantize_experts(
                    given, child.format, transposed=child.transposed, dtype=child.dtype
                )
            elif missing := [key for key in names if key not in found]:
                missing_keys += missing
                continue
            else:
                how = dict(transposed=child.transposed, dtype=child.dtype)
                weight = QuantizedExperts.from_state_dict(found, name, **how)
            child.take(weight, metadata.get("assign_to_params_buffers", False))
        except ValueError as error:
            error_msgs.append(f"{name}: {error}")


def quantize_(module: nn.Module, format: Format) -> nn.Module:
    """Quantise the weights of the experts in a module, in place, one after another.

    Buffers replace the parameters `gate_up_proj` or `up_proj`, and `down_proj`, of each `Experts`.
    Biases, adapters and all other modules do not change. State dicts have the checkpoint's names of
    the format (`QuantizedExperts.state_dict`); load_state_dict also accepts 16-bit weights and
    quantises them. On the device "meta" nothing is computed: load a checkpoint with assign=True.

    Args:
        module: A `MoE`, or a module that contains one.
        format: As in `quantize_experts`.

    Returns:
        The module.

    Raises:
        ValueError: The module has no experts of TileMoE, its experts are already quantised, or a
            size is wrong.
        NotImplementedError: The experts are sharded over ranks by expert_mesh.

    Example:
        >>> layer = tilemoe.quantize_(tilemoe.MoE(64, 32, 8, 2, lora_rank=8), "nf4")
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    for part in experts_of(module):
        part.quantize_(format)
    return module


def quantize_weights(module: nn.Module) -> nn.Module:
    """Make the FP8 codes of the experts in a module, for `recipe="fp8"` and "fp8_forward".

    For parameters: quantise their present values, into the memory of the earlier codes. The
    first call of a module after a change does so automatically, except under torch.compile and in a
    CUDA graph: there call this function after each optimizer step, for example by
    `optimizer.register_step_post_hook`. For weights that `quantize_` or a checkpoint quantised:
    make the transposed codes once, which training with recipe="fp8" reads.

    Args:
        module: A `MoE`, or a module that contains one.

    Returns:
        The module.

    Raises:
        ValueError: The module has no experts of TileMoE, or a weight has another format than "fp8".

    Example:
        >>> layer = tilemoe.MoE(64, 128, 8, 2, recipe="fp8")
        >>> tilemoe.quantize_weights(layer)(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    for part in modules_with_codes(module):
        if hasattr(part, "quantize_weights"):
            part.quantize_weights()
            continue
        for name in part.fp8_codes.names:
            part.fp8_codes.renew(part, name)
    return module


def modules_with_codes(module: nn.Module) -> list[Any]:
    """Return the modules whose experts an FP8 recipe may compute, at least one."""
    return [m for m in module.modules() if hasattr(m, "fp8_codes")] or list(experts_of(module))


def experts_of(module: nn.Module) -> list[Experts]:
    """Return the experts modules in a module, at least one."""
    from .experts import Experts

    parts = [part for part in module.modules() if isinstance(part, Experts)]
    if not parts:
        kind = _library.class_of(module)
        raise ValueError(
            f"expected a module with experts of TileMoE, such as a tilemoe.MoE, got a {kind}"
        )
    return parts
