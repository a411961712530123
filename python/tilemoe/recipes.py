"""Choose between the recipes "bf16" and "fp8" by an estimate of both times: `choose_recipe`.

The rates are fitted to eight layers on one H100 (benchmarks/results/fitted.jsonl). They are public,
so that a measurement of another host can replace them.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from . import _config
from ._formats import FP8_BLOCK
from .fp8_weights import MULTIPLE
from .options import GATED, Activation, GateLayout, Options, Recipe

_HOPPER = (9, 0)


class RecipeRates(NamedTuple):
    """Rates of one GPU that `choose_recipe` computes with.

    `bf16_tflop_per_s` and `fp8_tflop_per_s` are those of the GEMMs, `memory_gb_per_s` that of all else
    and of the weights. With them bfloat16's time divided by that of FP8 is within 0.06 of the measured
    ratio on each of eight layers of one H100, with weights quantised before and in each pass, and
    within 0.11 on an H200.
    `margin` is the gain below which "bf16" is chosen.
    """

    bf16_tflop_per_s: float = 710.0
    fp8_tflop_per_s: float = 1080.0
    memory_gb_per_s: float = 2800.0
    margin: float = 0.03


class RecipeChoice(NamedTuple):
    """A recipe and the reason for it.

    Attributes:
        recipe: "bf16" or "fp8".
        reason: One sentence: the two estimates, or what FP8 does not support.
        bf16_ms: Estimated milliseconds of forward and backward; None if FP8 is not supported.
        fp8_ms: The same with recipe="fp8", with quantisation.
    """

    recipe: Literal["bf16", "fp8"]
    reason: str
    bf16_ms: float | None = None
    fp8_ms: float | None = None


def choose_recipe(
    T: int,
    d: int,
    n: int,
    E: int,
    K: int,
    *,
    activation: Activation = "swiglu",
    gate_layout: GateLayout = "concatenated",
    dtype: torch.dtype = torch.bfloat16,
    master_dtype: torch.dtype | None = None,
    calls_per_step: int = 1,
    device: torch.device | str = "cuda",
    capability: tuple[int, int] | None = None,
    rates: RecipeRates = RecipeRates(),
) -> RecipeChoice:
    """Choose the recipe of a layer as `recipe="auto"` does, and return the reason.

    The time of a recipe is that of the GEMMs, each limited by arithmetic or by reading the weights,
    of 12 bytes for each value of (T K, d), and of quantisation: of X and dO (T, d) and dH (T K, 2n)
    in each call, and of the weights once in `calls_per_step` calls.

    Args:
        T: Tokens of a call.
        d: Width of a token.
        n: Width inside one expert.
        E: Number of experts of this device.
        K: Experts per token.
        activation: Activation of the experts.
        gate_layout: Layout of the gate and up rows of W1.
        dtype: Dtype of the tokens.
        master_dtype: Dtype of the parameters. None: `dtype`.
        calls_per_step: Calls of the layer in one optimizer step, for example micro-batches.
        device: Device of the tokens.
        capability: Compute capability of the GPU. None: that of `device`.
        rates: Rates of the GPU.

    Returns:
        The recipe, the reason and both estimates.

    Example:
        >>> sizes = dict(T=16384, d=4096, n=1536, E=128, K=8)
        >>> choose_recipe(**sizes, capability=(9, 0)).recipe
        'fp8'
        >>> choose_recipe(**sizes, activation="relu", capability=(9, 0)).reason
        'FP8 requires an activation with a gate, got relu'
    """
    why_not = _why_not(d, n, activation, gate_layout, dtype) or _why_not_on(device, capability)
    if why_not is not None:
        return RecipeChoice("bf16", why_not)
    return _chosen(T * K, T, d, n, E, (master_dtype or dtype).itemsize, calls_per_step, rates)


def _why_not(d: int, n: int, activation: str, gate_layout: str, dtype: torch.dtype) -> str | None:
    """Return what the recipe does not support in these sizes."""
    if activation not in GATED:
        return f"FP8 requires an activation with a gate, got {activation}"
    if gate_layout == "interleaved":
        return "FP8 does not support the gate_layout interleaved"
    for name, width in (("d", d), ("n", n)):
        if width % MULTIPLE:
            return f"FP8 requires {name} to be a multiple of {MULTIPLE}, got {width}"
    if gate_layout == "concatenated" and n % FP8_BLOCK:
        expected = f"a multiple of {FP8_BLOCK} with the gate_layout concatenated"
        return f"FP8 requires n to be {expected}, got {n}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FP8 requires bfloat16 or float16 tokens on a GPU, got {dtype}"
    return None


def _why_not_on(device: torch.device | str, capability: tuple[int, int] | None) -> str | None:
    """Return why FP8 does not pay off on a device, or is not supported there."""
    device = torch.device(device)
    if capability is None:
        if device.type != "cuda":
            return f"the {device.type} has no FP8 arithmetic; its backend emulates the recipe"
        if not torch.cuda.is_available():
            return "torch cannot use a GPU"
        capability = torch.cuda.get_device_capability(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        arch, reason = _config.arch_of(index)
        if arch is None or not arch.startswith("sm90"):
            return f"FP8 requires the arch sm90, got {arch or reason}"
    if capability != _HOPPER:
        return f"FP8 requires a GPU of compute capability 9.0, got {capability[0]}.{capability[1]}"
    return None


def _chosen(
    pairs: int, T: int, d: int, n: int, E: int, itemsize: int, calls: int, rates: RecipeRates
) -> RecipeChoice:
    bf16, fp8 = estimates(pairs, T, d, n, E, itemsize, calls, rates)
    numbers = f"estimated {fp8:.3g} ms in FP8 with quantisation, {bf16:.3g} ms in 16 bits"
    recipe: Literal["bf16", "fp8"] = "fp8" if fp8 <= (1 - rates.margin) * bf16 else "bf16"
    return RecipeChoice(recipe, numbers, bf16, fp8)


def estimates(
    pairs: int, T: int, d: int, n: int, E: int, itemsize: int, calls: int, rates: RecipeRates
) -> tuple[float, float]:
    """Return the milliseconds of forward and backward in 16 bits and in FP8."""
    third = 6 * pairs * d * n * 1e-9  # GFLOP of forward, of dA' and dX~, and of the two dW
    values = 3 * E * d * n * 1e-6  # millions of values of the weights
    per_mb = 1 / rates.memory_gb_per_s
    in_16_bits = max(third / rates.bf16_tflop_per_s, 2 * values * per_mb)
    in_fp8 = max(third / rates.fp8_tflop_per_s, values * per_mb)
    in_both = 12 * pairs * d * 1e-6 * per_mb  # Y and dX~ are stored, and combined
    # A value is read in 16 bits and written as one byte; a master is read and written twice.
    of_rows = 3 * (2 * T * d + 2 * pairs * n) * 1e-6 * per_mb
    of_weights = (itemsize + 2) * values * per_mb / calls
    return in_both + 3 * in_16_bits, in_both + 2 * in_fp8 + in_16_bits + of_rows + of_weights


@lru_cache(maxsize=1024)
def _cached(device: str, *how: Any) -> RecipeChoice:
    T, pairs, d, n, E, activation, gate_layout, dtype, itemsize, calls, _ = how
    why_not = _why_not_on(device, None) or _why_not(d, n, activation, gate_layout, dtype)
    if why_not is not None:
        return RecipeChoice("bf16", why_not)
    return _chosen(pairs, T, d, n, E, itemsize, calls, RecipeRates())


@lru_cache(maxsize=64)
def with_recipe(options: Options, recipe: Recipe) -> Options:
    """Return the options with another recipe, and `save_h` only with "fp8"."""
    save_h = options.save_h if recipe == "fp8" else None
    return dataclasses.replace(options, recipe=recipe, save_h=save_h)


def choice_of(
    x: torch.Tensor, T: int, pairs: int, sizes: tuple[int, int, int], options: Any,
    master: torch.dtype, calls: int = 1,
) -> RecipeChoice:  # fmt: skip
    """Return the choice of a call on x's device and in its dtype, with sizes (E, d, n)."""
    E, d, n = sizes
    arch = None
    if x.is_cuda:  # set_arch may change it between calls
        arch, _ = _config.arch_of(x.device.index)
    how = (T, pairs, d, n, E, options.activation, options.gate_layout, x.dtype)
    made: RecipeChoice = _cached(str(x.device), *how, master.itemsize, calls, arch)
    return made


__all__ = ["RecipeChoice", "RecipeRates", "choose_recipe"]
