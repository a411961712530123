"""Read and set mesh axes of arrays.

Only this file uses JAX's names for them. Inside `jax.shard_map` the results of a call vary along
the axes along which its operands vary.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, ManualAxisType, NamedSharding, PartitionSpec

_EXPLICIT = (
    "{name} is sharded as {spec} along explicit axes of a mesh; call the layer inside "
    "jax.shard_map, which gives each device its part"
)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Return the manual axes along which an array varies; empty outside shard_map."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        axes |= frozenset(jax.typeof(array).manual_axis_type.varying)
    return axes


def together(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays, made to vary along the axes of all of them.

    The gradient of an array that did not vary is summed over these axes. None stays None.

    Raises:
        ValueError: An array is sharded along explicit axes.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        _refuse_explicit(name, jax.typeof(array).sharding)
    axes = varying_axes(*given.values())
    made = dict(arrays)
    for name, array in given.items():
        if missing := axes - varying_axes(array):
            made[name] = jax.lax.pcast(array, tuple(sorted(missing)), to="varying")
    return made


def _refuse_explicit(name: str, sharding: Any) -> None:
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    for of_dimension in sharding.spec:
        axes = of_dimension if isinstance(of_dimension, tuple) else (of_dimension,)
        if any(types.get(axis) == AxisType.Explicit for axis in axes):
            raise ValueError(_EXPLICIT.format(name=name, spec=sharding.spec))


def result(shape: tuple[int, ...], dtype: Any, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """Return the type of a result that varies along these axes."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(
        shape, dtype, manual_axis_type=ManualAxisType(varying=axes),
        sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()),
    )  # fmt: skip
