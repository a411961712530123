"""Keep the FP8 codes of a module's parameters, and make them again when a parameter has changed."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ._private import fsdp_gathers
from .distributed.dtensor import is_dtensor
from .distributed.fp8_shards import Fp8Gathered, Fp8Shard
from .fp8_weights import Fp8Weight, fp8_weight, transposed_of

_CALL = "call quantize_weights() of the module after each optimizer step"
_TRACED = "recipe='fp8' under torch.compile reads codes that exist: " + _CALL
_CAPTURED = "recipe='fp8' in a CUDA graph reads codes that are up to date, but {name} has changed: "
_FSDP = (
    "recipe='fp8' with fully_shard requires tilemoe.gather_in_fp8_(model) before fully_shard, "
    "which gathers codes instead of 16-bit weights; {name} is gathered without it"
)

_GATHERED_AND_TRACED = "torch.compile does not support FP8 codes that fully_shard gathers"
_NO_VALUES = (
    "recipe='bf16' reads 16-bit weights, but {name} was gathered as FP8 codes; use an FP8 recipe, "
    "or remove tilemoe.gather_in_fp8_"
)


class _Kept(NamedTuple):
    weight: Fp8Weight  # without master
    of: weakref.ref[Tensor]  # the parameter
    version: tuple[Any, ...]


class KeptCodes:
    """Codes of parameters by name. A copy of the object, or a pickled one, is empty.

    A module with the attribute `fp8_codes` has experts that an FP8 recipe may compute.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.kept: dict[str, _Kept] = {}

    def __deepcopy__(self, memo: Any) -> KeptCodes:
        return KeptCodes(self.names)

    def __reduce__(self) -> Any:
        return KeptCodes, (self.names,)

    def of(self, module: nn.Module, name: str, transposed: bool) -> Fp8Weight:
        """Return the codes of a parameter, without master.

        Args:
            module: Module of the parameter.
            name: Name of the parameter in the module.
            transposed: Whether the transposed codes are needed.
        """
        parameter = getattr(module, name)
        local = local_of(parameter)
        if isinstance(local, Fp8Gathered):
            if torch.compiler.is_compiling():
                raise NotImplementedError(_GATHERED_AND_TRACED)
            return local.weight
        kept = self.kept.get(name)
        if torch.compiler.is_compiling():
            if kept is None or (transposed and kept.weight.transposed is None):
                raise RuntimeError(_TRACED)
            return kept.weight
        if fsdp_gathers(module):
            raise RuntimeError(_FSDP.format(name=name))
        if kept is None or kept.of() is not parameter or kept.version != version_of(parameter):
            if local.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(_CAPTURED.format(name=name) + _CALL)
            return self.make(module, name, transposed)
        if transposed and kept.weight.transposed is None:
            with torch.inference_mode(False):
                weight = kept.weight._replace(transposed=transposed_of(kept.weight.weight))
            self.kept[name] = kept._replace(weight=weight)
        return self.kept[name].weight

    def renew(self, module: nn.Module, name: str) -> None:
        """Make the codes of a parameter again, also if it is not known to have changed."""
        local = local_of(getattr(module, name))
        if isinstance(local, Fp8Shard) and fsdp_gathers(module):
            local.forget()
        elif not isinstance(local, Fp8Gathered):
            self.make(module, name, True)

    def make(self, module: nn.Module, name: str, transposed: bool) -> Fp8Weight:
        """Make the codes of a parameter, in the memory of its earlier codes if they fit."""
        parameter = getattr(module, name)
        _count_steps_of(parameter)
        local, kept = local_of(parameter).detach(), self.kept.get(name)
        if isinstance(local, Fp8Shard):
            local = local.values()
        with torch.inference_mode(False):  # training reads the same codes
            if kept is not None and _fits(kept.weight, local, transposed):
                weight = kept.weight._replace(master=local).update_()._replace(master=None)
            else:
                weight = fp8_weight(local, transposed=transposed)
        self.kept[name] = _Kept(weight, weakref.ref(parameter), version_of(parameter))
        return weight

    def clear(self) -> None:
        self.kept.clear()


def _fits(weight: Fp8Weight, local: Tensor, transposed: bool) -> bool:
    if weight.device != local.device or weight.shape != tuple(local.shape):
        return False
    return not transposed or weight.transposed is not None


def require_values(name: str, parameter: Any) -> None:
    """Raise an error for a parameter that has codes instead of values."""
    if type(parameter) is not nn.Parameter and isinstance(local_of(parameter), Fp8Gathered):
        raise RuntimeError(_NO_VALUES.format(name=name))


def gathers_codes(parameter: Any) -> bool:
    """Return whether fully_shard gathers the parameter as codes."""
    return isinstance(local_of(parameter), (Fp8Gathered, Fp8Shard))


def local_of(parameter: Any) -> Any:
    """Return the tensor whose values a rank quantises."""
    return parameter._local_tensor if is_dtensor(parameter) else parameter


def version_of(parameter: Any) -> tuple[Any, ...]:
    """Return what changes when the values of a parameter are written in place.

    A DTensor may be written as such or by its local tensor; each has a version counter. Fused
    optimizers, and foreach operations on DTensors, change neither, so steps of the parameter's
    optimizer count. A parameter that was made in inference mode has no counter: it always differs.
    """
    local = local_of(parameter)
    if local.is_inference():
        return (object(),)
    writes = local.writes[0] if isinstance(local, Fp8Shard) else _steps.get(parameter, 0)
    return parameter._version, local._version, local.data_ptr(), writes


_steps: Any = WeakTensorKeyDictionary()  # of parameters with codes, by the parameter
_hooks: list[Any] = []


def _count_steps_of(parameter: Tensor) -> None:
    _steps.setdefault(parameter, 0)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _steps:
                _steps[parameter] += 1
