"""Define `Fp8Weight`, a weight of the FP8 recipes in JAX, quantise weights, and check both."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks
from ..options import LITERALS
from . import _sharding
from ._shapes import call, require_array, shape_text

QUANTIZABLE = ("W1", "W1_up", "W2")
BF16, FP8, FP8_FORWARD = range(3)  # tilemoe_recipe, in the order of options.Recipe
_BLOCK = 128  # rows and columns of values with one scale
_MULTIPLE = 16  # of the sizes that the recipes support
_ARRAYS = ("codes", "scales", "transposed_codes", "transposed_scales")
CODES = tuple(f"{name}_{array}" for name in QUANTIZABLE for array in _ARRAYS)
_AUTO = (
    "recipe='auto' is not supported in JAX, which traces a program before its device is known; "
    "pass 'fp8' or 'bf16', for example as tilemoe.choose_recipe returns it"
)
_NO_TRANSPOSED = (
    "{name} has no transposed codes, which backward of recipe='fp8' reads; call its "
    "with_transposed(), or use recipe='fp8_forward'"
)
_FROZEN = (
    "{name} is an Fp8Weight without a master, and its codes have no gradient; differentiate with "
    "respect to a master (with_master), or not with respect to {name}"
)


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """One weight of all experts for `recipe="fp8"`: E4M3 codes in the layouts of both passes.

    `fp8_weight` returns it; `moe` and `grouped_experts` accept it for W1, W1_up and W2. An
    Fp8Weight is a pytree of its arrays. The gradient of the values that the codes represent is the
    gradient of `master`, in its dtype; that of the codes and scales is zero. With recipe="bf16",
    `master` is the weight, or the dequantised codes without `master`.

    Attributes:
        codes: float8_e4m3fn, shape (..., E, out, in), which forward reads.
        scales: float32, shape (..., E, out / 128, in / 128), sizes rounded up; a value is code *
            scale.
        transposed_codes: The same codes, shape (..., E, in, out), which backward of recipe="fp8"
            reads; None: only for inference and for recipe="fp8_forward".
        transposed_scales: Scales of `transposed_codes`, shape (..., E, in / 128, out / 128).
        master: The array that receives the gradient, shape (..., E, out, in), or with `transposed`
            of the call (..., E, in, out). None: a frozen weight.
    """

    codes: Any
    scales: Any
    transposed_codes: Any = None
    transposed_scales: Any = None
    master: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def with_master(self, master: Any) -> Fp8Weight:
        """Return these codes with another master, for example the argument of a loss.

        None: frozen codes, for a train state that has the master elsewhere.
        """
        return dataclasses.replace(self, master=master)

    def with_transposed(self) -> Fp8Weight:
        """Return these codes in both layouts, for example of a checkpoint."""
        if self.transposed_codes is not None:
            return self
        swapped = [jnp.swapaxes(array, -1, -2) for array in (self.codes, self.scales)]
        return dataclasses.replace(self, transposed_codes=swapped[0], transposed_scales=swapped[1])


jax.tree_util.register_dataclass(Fp8Weight, data_fields=[*_ARRAYS, "master"], meta_fields=[])


def fp8_weight(
    W: Any, *, transposed: bool = False, backward: bool = True, float_scales: bool = False
) -> Fp8Weight:
    """Quantise a weight for the FP8 recipes.

    Quantise once per optimizer step: outside the function that is differentiated, with the master
    passed to it by `with_master`, or inside it. Blocks have 128 x 128 values, with the scales of
    `tilemoe.quantize_fp8`. With two separate arrays for gate and up, each has its own blocks. No
    16-bit copy of the weight is made.

    Args:
        W: Master weight, shape (..., E, out, in), out and in multiples of 16; float32, bfloat16 or
            float16. Leading dimensions are those of stacked layers.
        transposed: W has the shape (..., E, in, out), for calls with `transposed=True`. The codes
            have the same layouts.
        backward: Also make the transposed codes, which backward of recipe="fp8" reads; they take as
            much memory as the codes.
        float_scales: Scales are any float32. False: powers of two.

    Returns:
        The codes, with W as their master.

    Raises:
        ValueError: A shape or a dtype is wrong, or W is sharded along explicit axes of a mesh
            outside `jax.shard_map`.
        TypeError: W is not an array, or another argument is not a bool.
        NotImplementedError: vmap is used; pass leading dimensions.

    Example:
        >>> W1 = jnp.ones((4, 2 * 128, 64))
        >>> tilemoe.jax.fp8_weight(W1).transposed_codes.shape
        (4, 64, 256)
    """
    for name, value in (
        ("transposed", transposed), ("backward", backward), ("float_scales", float_scales)
    ):  # fmt: skip
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    W = require_array(W, "W")
    arrays = quantized(W, "W", transposed, backward, float_scales)
    return Fp8Weight(**arrays, master=W)


def quantized(
    W: Any, name: str, transposed: bool, backward: bool, float_scales: bool = False
) -> dict[str, Any]:
    """Return the arrays of W's codes by the names of Fp8Weight's fields, without gradient."""
    if W.ndim < 3:
        expected = "(..., E, in, out)" if transposed else "(..., E, out, in)"
        raise ValueError(f"{name} has shape {shape_text(W.shape)}, expected {expected}")
    *leading, R, C = W.shape
    if R % _MULTIPLE or C % _MULTIPLE:
        raise ValueError(
            f"{name} has shape {shape_text(W.shape)}, expected its last two sizes to be multiples "
            f"of {_MULTIPLE} in FP8"
        )
    W = _sharding.together({name: jax.lax.stop_gradient(W)})[name]
    values = W.reshape(-1, R, C)
    E, tiles = values.shape[0], [-(-size // _BLOCK) for size in (R, C)]
    results = {
        "codes": ((E, R, C), jnp.float8_e4m3fn),
        "scales": ((E, *tiles), jnp.float32),
        "transposed_codes": ((E, C, R), jnp.float8_e4m3fn),
        "transposed_scales": ((E, *tiles[::-1]), jnp.float32),
    }
    if not transposed and not backward:
        results = {array: results[array] for array in _ARRAYS[:2]}
    made = call("quantize_fp8", {"values": values}, results, {"float_scales": int(float_scales)})
    made = {array: of.reshape(*leading, *of.shape[1:]) for array, of in made.items()}
    if transposed:  # the codes in W's order are those of backward
        pairs = zip(_ARRAYS, (*_ARRAYS[2:], *_ARRAYS[:2]))
        made = {array: made[other] for array, other in pairs}
    return made if backward else {array: made[array] for array in _ARRAYS[:2]}


# ---------------------------------------------------------------- weights of a call


def recipe_of(recipe: str, adapters: bool) -> int:
    """Return the number of a recipe, a valid value of the option.

    Raises:
        NotImplementedError: JAX does not support the recipe, or not with adapters.
    """
    if recipe == "auto":
        raise NotImplementedError(_AUTO)
    if recipe == "fp8" and adapters:
        raise NotImplementedError(_checks.ADAPTERS_IN_FP8)
    return LITERALS["recipe"].index(recipe)


def operands_of(weight: Fp8Weight, name: str, recipe: int, transposed: bool) -> dict[str, Any]:
    """Return a weight's operands by name: its master, and the codes that the recipe reads.

    Raises:
        ValueError: A field is wrong; the message names it.
        TypeError: A field is not an array.
    """
    master = weight.master
    if master is not None:
        master = require_array(master, f"{name}.master")
        if recipe == BF16:
            return {name: master}
    arrays = {array: getattr(weight, array) for array in _ARRAYS}
    if (arrays["transposed_codes"] is None) != (arrays["transposed_scales"] is None):
        raise ValueError(f"{name} has transposed_codes or transposed_scales, expected both or none")
    codes = require_array(arrays["codes"], f"{name}.codes", ("float8_e4m3fn",))
    if codes.ndim != 3:
        raise ValueError(f"{name}.codes has shape {shape_text(codes.shape)}, expected (E, out, in)")
    E, out, width = codes.shape
    tiles = -(-out // _BLOCK), -(-width // _BLOCK)
    shapes = {
        "codes": codes.shape, "scales": (E, *tiles),
        "transposed_codes": (E, width, out), "transposed_scales": (E, *tiles[::-1]),
    }  # fmt: skip
    if master is not None:
        shape = (E, width, out) if transposed else codes.shape
        _require(master, f"{name}.master", shape, f"{name}.codes")
    found: dict[str, Any] = {name: master}
    for array, shape in shapes.items():
        if arrays[array] is None or (recipe != FP8 and array.startswith("transposed")):
            continue
        dtype = "float32" if array.endswith("scales") else "float8_e4m3fn"
        value = require_array(arrays[array], f"{name}.{array}", (dtype,))
        _require(value, f"{name}.{array}", shape, f"{name}.codes")
        found[f"{name}_{array}"] = value
    return found


def _require(array: Any, name: str, shape: tuple[int, ...], of: str) -> None:
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {shape_text(array.shape)}, expected {shape_text(shape)} for {of}"
        )


def refuse_frozen(arrays: dict[str, Any], perturbed: list[str]) -> None:
    """Raise a ValueError for codes without a master that are differentiated."""
    for name in QUANTIZABLE:
        if arrays[name] is None and {f"{name}_{array}" for array in _ARRAYS} & {*perturbed}:
            raise ValueError(_FROZEN.format(name=name))


def require_transposed(arrays: dict[str, Any], recipe: int) -> None:
    """Raise a ValueError for codes that backward of the recipe cannot read."""
    for name in QUANTIZABLE:
        given = arrays[f"{name}_codes"] is not None
        if recipe == FP8 and given and arrays[f"{name}_transposed_codes"] is None:
            raise ValueError(_NO_TRANSPOSED.format(name=name))


def as_read(
    arrays: dict[str, Any], recipe: int, transposed: bool, backward: bool
) -> dict[str, Any]:
    """Return the operands as a handler reads them: with an FP8 recipe codes instead of weights.

    A weight without codes is quantised here.
    """
    if recipe == BF16:
        return arrays
    made = dict(arrays)
    for name in QUANTIZABLE:
        W = made.pop(name, None)
        if W is not None and made.get(f"{name}_codes") is None:
            codes = quantized(W, name, transposed, backward and recipe == FP8)
            made.update({f"{name}_{array}": of for array, of in codes.items()})
        if not backward:
            for array in _ARRAYS[2:]:
                made.pop(f"{name}_{array}", None)
    return made
