"""Gather FP8 codes under FSDP-2: `gather_in_fp8_`.

A parameter becomes an `Fp8Shard`. fully_shard calls its two hooks: before an all-gather the shard
is quantised, once per change of the shard, and the all-gather transfers codes and scales, one byte
and a little more per value. After it, the module's parameter is an `Fp8Gathered`, which has codes
instead of values. A shard has whole experts, and therefore whole blocks of scales, so the codes are
those of the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .._formats import FP8_BLOCK
from ..fp8_weights import Fp8Weight, empty_like_master, quantize_into
from ..quantization import QuantizedExperts

_aten = torch.ops.aten
_MAKES_SHARD = {  # in new memory
    _aten.clone.default, _aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default,
    _aten._to_copy.default, _aten._pin_memory.default,
}  # fmt: skip
_VIEWS = {_aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.view.default}
_NEW = (_aten.new_empty.default, _aten.new_zeros.default)
_LIKE = (_aten.empty_like.default, _aten.zeros_like.default)


class Fp8Shard(torch.Tensor):
    """A parameter, or the shard of one, that fully_shard gathers as FP8 codes.

    It has the memory of the tensor that it was made of. Operations on it are those of that tensor.
    """

    writes: list[int]  # how often an operation wrote to this memory; views share the list

    @staticmethod
    def __new__(cls, values: Tensor) -> Fp8Shard:
        return cls._of(values.detach(), [0])

    def __init__(self, values: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            # Not the version counter: fused optimizers and foreach operations do not count there.
            for shard in _written(func, args, kwargs or {}):
                shard.writes[0] += 1
            return made
        if func in _MAKES_SHARD:
            return cls._of(made, [0])
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            writes = next((t.writes for t in args if isinstance(t, cls)), [0])
            return tree_map_only(Tensor, lambda t: cls._of(t, writes), made)
        return made

    @classmethod
    def _of(cls, values: Tensor, writes: list[int]) -> Fp8Shard:
        with torch._C._DisableTorchDispatch():
            made = torch.Tensor._make_subclass(cls, values, False)
        made.writes = writes
        return made

    def values(self) -> Tensor:
        """Return a plain tensor with this memory."""
        with torch._C._DisableTorchDispatch():
            return torch.Tensor._make_subclass(torch.Tensor, self, False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = self.values()  # a checkpoint has plain tensors, a pickled module plain parameters
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        """Return codes and scales of the shard, and what the other hook needs."""
        if outer_size[0] % mesh.size():
            raise NotImplementedError(
                "recipe='fp8' under fully_shard requires a number of experts that is a multiple of "
                f"the ranks, got {outer_size[0]} experts on {mesh.size()} ranks"
            )
        codes, scales, both = self._codes()
        # FSDP copies only one tensor if it does not gather.
        return (both,) if mesh.size() == 1 else (codes, scales), tuple(outer_size)

    def _codes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales and the bytes of both; made again if the shard has changed."""
        version = self.writes[0], self.data_ptr()
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] != version:
            values = self.values()
            weight = _without_arrays(tuple(values.shape), values.dtype)
            both = torch.empty(weight.nbytes, dtype=torch.uint8, device=values.device)
            codes, scales = _split(both, tuple(values.shape))
            arrays = dict(codes=codes.view(torch.float8_e4m3fn), scales=scales)
            quantize_into(values, weight._replace(**arrays), None)
            kept = version, (codes, scales, both)
            self.__dict__["_kept"] = kept
        return kept[1]

    def forget(self) -> None:
        """Quantise the values before the next all-gather, even without a known write."""
        self.__dict__.pop("_kept", None)

    def fsdp_post_all_gather(
        self, outputs: Any, size: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Make the unsharded parameter, or write the transposed codes of `out` again."""
        codes, scales = outputs if len(outputs) == 2 else _split(outputs[0], size)
        if out is not None:
            _transpose(codes, scales, _gathered(out).weight.transposed)
            return None
        like = torch.empty((), dtype=param_dtype, device=codes.device).expand(size)
        weight = _without_arrays(size, param_dtype)
        weight = weight._replace(codes=codes.view(torch.float8_e4m3fn), scales=scales)
        E, rows, columns = size
        transposed = weight._replace(
            transposed=True,
            codes=codes.new_empty(E, columns, rows).view(torch.float8_e4m3fn),
            scales=scales.new_empty(E, scales.shape[2], scales.shape[1]),
        )
        _transpose(codes, scales, transposed)
        inner = transposed.codes, transposed.scales
        return Fp8Gathered(Fp8Weight(weight, transposed, None), like), inner


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Fp8Shard]:
    """Return the shards among the arguments that an operation writes."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(named.get(argument.name)):
            if isinstance(value, Fp8Shard):
                yield value


def _without_arrays(size: tuple[int, ...], dtype: torch.dtype) -> QuantizedExperts:
    """Return a weight (E, out, in) whose arrays have shapes and no memory."""
    return empty_like_master(torch.empty(size, dtype=dtype, device="meta"), False).weight


def _split(both: Tensor, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a weight (E, out, in) in one array of bytes."""
    E, rows, columns = size
    codes, scales = both.view(-1).split([E * rows * columns, both.numel() - E * rows * columns])
    return codes.view(size), scales.view(torch.float32).view(E, -(-rows // FP8_BLOCK), -1)


def _transpose(codes: Tensor, scales: Tensor, transposed: Any) -> None:
    out = transposed.codes, transposed.scales
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out[0].view(torch.uint8).copy_(codes.view(torch.uint8).mT)
        out[1].copy_(scales.mT)


def _gathered(parameter: Any) -> Fp8Gathered:
    local = getattr(parameter, "_local_tensor", parameter)
    assert isinstance(local, Fp8Gathered)
    return local


class Fp8Gathered(torch.Tensor):
    """The whole parameter of an `Fp8Shard`: a shape, a dtype and codes, without values."""

    weight: Fp8Weight

    @staticmethod
    def __new__(cls, weight: Fp8Weight, like: Tensor) -> Fp8Gathered:
        size = torch.Size(weight.shape)
        strides = (size[1] * size[2], size[2], 1)
        made = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=like.dtype, device=like.device
        )
        made.weight = weight
        return made

    def __init__(self, weight: Fp8Weight, like: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS:
            of = args[0]
            return cls(of.weight, torch.empty((), dtype=of.dtype, device=of.device))
        if func in _NEW or func in _LIKE:
            size = args[1] if func in _NEW else args[0].shape
            how = dict(dtype=args[0].dtype, device=args[0].device)
            how.update({k: v for k, v in (kwargs or {}).items() if k in how and v is not None})
            zero = func in (_aten.new_zeros.default, _aten.zeros_like.default)
            return torch.zeros(size, **how) if zero else torch.empty(size, **how)
        raise NotImplementedError(
            f"{func} reads the values of a weight that fully_shard gathered as FP8 codes; only "
            "TileMoE's experts with an FP8 recipe read it"
        )

    def __repr__(self, **_: Any) -> str:
        return f"Fp8Gathered({self.weight!r})"


def gather_in_fp8_(module: nn.Module) -> nn.Module:
    """Make fully_shard gather the experts' weights as FP8 codes, before fully_shard is called.

    Each rank quantises its shard once per optimizer step, and gathers transfer one byte per value
    and its scales, half of a 16-bit weight; the transposed codes are made on each GPU. The weights
    of the experts become parameters of the class `Fp8Shard`; optimizers, state dicts and
    torch.distributed.checkpoint read and write their values as before. The number of experts must
    be a multiple of the ranks that shard them. The gradients are reduced in the parameters' dtype, or
    in the mixed precision policy's.

    Args:
        module: A `MoE`, or a module that contains one.

    Returns:
        The module.

    Raises:
        ValueError: The module has no experts of TileMoE, or fully_shard has already sharded them.
        NotImplementedError: The installed torch lacks a private name that this requires.

    Example:
        >>> layer = tilemoe.gather_in_fp8_(tilemoe.MoE(64, 128, 8, 2, recipe="fp8"))
        >>> type(layer.experts.down_proj).__name__
        'Fp8Shard'
    """
    from .._private import fsdp_gathers, require
    from ..quantized_modules import modules_with_codes

    require("recipe='fp8' with fully_shard")
    for part in modules_with_codes(module):
        for name in part.fp8_codes.names:
            parameter = getattr(part, name)
            if fsdp_gathers(part):
                raise ValueError(
                    f"gather_in_fp8_ must be called before fully_shard, which sharded {name}"
                )
            local = getattr(parameter, "_local_tensor", parameter)
            if not isinstance(parameter, nn.Parameter) or isinstance(local, Fp8Shard):
                continue
            if local is not parameter:  # of a rank of an expert mesh
                parameter._local_tensor = Fp8Shard(local)
                continue
            shard = nn.Parameter(Fp8Shard(parameter.detach()), parameter.requires_grad)
            setattr(part, name, shard)
    return module
