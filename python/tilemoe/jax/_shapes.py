"""Call the library's handlers, and check arrays while JAX traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _library, _sharding

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int32", "int64")

_NO_VMAP = (
    "vmap over {handler} is not supported; fold the batch dimension into the tokens (..., "
    "T, d), or call experts of several layers one by one"
)
_NO_VMAP_OF_WEIGHTS = "vmap over {handler} is not supported; pass all weights as (..., E, out, in)"
_NO_SECOND = "derivatives of the gradient ({handler}) are not supported"
_SYMBOLIC = (
    "{name} has the symbolic shape ({shape}), expected numbers: the library computes "
    "sizes from numbers"
)


# ---------------------------------------------------------------- checks


def shape_text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


def require_array(value: Any, name: str, dtypes: tuple[str, ...] = FLOATS) -> Any:
    """Return the value as an array of JAX with one of these dtypes and a shape of numbers."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name} is a {kind}, expected an array")
    if not all(isinstance(size, (int, np.integer)) for size in value.shape):
        shape = ", ".join(map(str, value.shape))
        raise NotImplementedError(_SYMBOLIC.format(name=name, shape=shape))
    array = jnp.asarray(value)
    if array.dtype.name not in dtypes:
        *first, last = dtypes
        expected = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(
            f"{name} must be {expected}, got {value.dtype} with shape {shape_text(array.shape)}"
        )
    return array


def rows_of(array: Any, name: str, expected: str) -> Any:
    """Return (..., width) as (rows, width)."""
    if array.ndim == 0:
        raise ValueError(f"{name} has shape (), expected {expected}")
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


def require_shape(array: Any, name: str, *shape: int) -> None:
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {shape_text(array.shape)}, expected {shape_text(shape)} for "
            "the other arguments"
        )


# ---------------------------------------------------------------- calls


def plan(handler: str, operands: dict[str, Any], attributes: dict[str, Any]) -> _library.Sizes:
    """Return the sizes of the results of a call with these operands, None for absent ones."""
    arrays = [
        " ".join((name, array.dtype.name, *map(str, array.shape)))
        for name, array in operands.items()
        if array is not None
    ]
    texts = [f"{name} {value!r}" for name, value in attributes.items()]
    return _library.plan(handler, "\n".join(arrays), "\n".join(texts))


def call(
    handler: str,
    operands: dict[str, Any],
    results: dict[str, tuple[tuple[int, ...], Any]],
    attributes: dict[str, int | float],
    aliases: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Call a handler.

    Args:
        handler: Name of the handler.
        operands: Arrays by name; None: absent.
        results: Shape and dtype of each result.
        attributes: Values by name; ints become int64 and floats float64, as the handlers read them.
        aliases: The operand whose memory a result uses: {result: operand}.

    Returns:
        The results by name.
    """
    ins = tuple(name for name in _library.OPERANDS[handler] if operands.get(name) is not None)
    outs = tuple(name for name in _library.RESULTS[handler] if name in results)
    assert len(outs) == len(results), set(results) - set(outs)
    arrays = [operands[name] for name in ins]
    axes = _sharding.varying_axes(*arrays)
    types = tuple(_sharding.result(*results[name], axes) for name in outs)
    over = tuple((ins.index(at), outs.index(of)) for of, at in (aliases or {}).items())
    values = {
        **attributes,
        "operands": _bits(_library.OPERANDS[handler], ins),
        "results": _bits(_library.RESULTS[handler], outs),
    }
    run = _runner(handler, types, over, tuple((name, of, type(of)) for name, of in values.items()))
    return dict(zip(outs, run(*arrays)))


def _bits(names: tuple[str, ...], present: tuple[str, ...]) -> int:
    return sum(1 << place for place, name in enumerate(names) if name in present)


@functools.lru_cache(1024)
def _runner(handler: str, types: tuple, over: tuple, attributes: tuple) -> Callable[..., Any]:
    """Return the call of a handler as a function of its operands, without vmap and derivatives."""
    values = {
        name: np.float64(value) if kind is float else np.int64(value)
        for name, value, kind in attributes
    }
    invoke = jax.ffi.ffi_call(_library.target_of(handler), types, input_output_aliases=dict(over))

    @jax.custom_batching.custom_vmap
    def unbatched(*operands):
        return tuple(invoke(*operands, **values))

    @unbatched.def_vmap
    def refuse_vmap(axis_size, in_batched, *operands):
        text = _NO_VMAP_OF_WEIGHTS if handler == "quantize_fp8" else _NO_VMAP
        raise NotImplementedError(text.format(handler=handler))

    run = jax.custom_jvp(unbatched)

    @run.defjvp
    def refuse_derivative(primals, tangents):
        raise NotImplementedError(_NO_SECOND.format(handler=handler))

    return run
