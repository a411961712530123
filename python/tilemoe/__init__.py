"""Compute the Mixture-of-Experts layer of a transformer, forward and backward, in PyTorch and JAX.

`tilemoe.jax` is the package for JAX. The names in the list below require torch. They are loaded
when one of them is first used, or immediately if the program has already imported torch, so that
`import tilemoe.jax` does not import torch. Without torch, `tilemoe.jax`, `tilemoe.options`, and the
layers and records of `tilemoe.bench` work, and a name in the list raises an ImportError.
"""

import importlib.util as _importlib_util
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._invocation import is_command as _is_command

if _TYPE_CHECKING:
    from ._config import set_arch, set_kit, show_config
    from ._library import VERSION as __version__
    from ._library import set_block_turns, set_ctas_per_sm
    from .distributed.fp8_shards import gather_in_fp8_
    from .fp8_weights import Fp8Weight, fp8_weight
    from .functional import (
        WeightGradients,
        grouped_experts,
        moe,
        moe_general,
        moe_with_router,
    )
    from .gemms import Routing, combine_mm, gathered_mm, route, route_ids, route_pairs, route_rows
    from .integrations.from_modules import from_modules
    from .lora import LoRA
    from .module import MoE, MoEAux
    from .quantization import QuantizedExperts, quantize_experts, quantize_fp8
    from .quantized_modules import quantize_, quantize_weights
    from .recipes import RecipeChoice, RecipeRates, choose_recipe
    from .routing import (
        Aux,
        rounded_router,
        router_logits,
        router_losses,
        scores_at,
        top_k,
        topk_router,
    )

_NO_TORCH = (
    "TileMoE requires torch >= 2.10, which is not installed; run pip install "
    "'tilemoe[torch]', or import tilemoe.jax, which requires only jax"
)
_NEED_NO_TORCH = ("bench", "jax", "options")  # submodules

__all__ = [
    "Aux",
    "Fp8Weight",
    "LoRA",
    "MoE",
    "MoEAux",
    "QuantizedExperts",
    "RecipeChoice",
    "RecipeRates",
    "Routing",
    "WeightGradients",
    "__version__",
    "choose_recipe",
    "combine_mm",
    "fp8_weight",
    "from_modules",
    "gather_in_fp8_",
    "gathered_mm",
    "grouped_experts",
    "moe",
    "moe_general",
    "moe_with_router",
    "quantize_",
    "quantize_experts",
    "quantize_fp8",
    "quantize_weights",
    "rounded_router",
    "route",
    "route_ids",
    "route_pairs",
    "route_rows",
    "router_logits",
    "router_losses",
    "scores_at",
    "set_arch",
    "set_block_turns",
    "set_ctas_per_sm",
    "set_kit",
    "show_config",
    "top_k",
    "topk_router",
]
_MODULES = {  # modules of the names, in the order of loading
    "_config": ("set_arch", "set_kit", "show_config"),
    "_library": ("set_block_turns", "set_ctas_per_sm"),
    "fp8_weights": ("Fp8Weight", "fp8_weight"),
    "functional": (
        "WeightGradients", "grouped_experts", "moe", "moe_general", "moe_with_router",
    ),
    "gemms": (
        "Routing", "combine_mm", "gathered_mm", "route", "route_ids", "route_pairs", "route_rows",
    ),
    "integrations.from_modules": ("from_modules",),
    "lora": ("LoRA",),
    "module": ("MoE", "MoEAux"),
    "quantization": ("QuantizedExperts", "quantize_experts", "quantize_fp8"),
    "distributed.fp8_shards": ("gather_in_fp8_",),
    "quantized_modules": ("quantize_", "quantize_weights"),
    "recipes": ("RecipeChoice", "RecipeRates", "choose_recipe"),
    "routing": (
        "Aux", "rounded_router", "router_logits", "router_losses", "scores_at", "top_k",
        "topk_router",
    ),
}  # fmt: skip
_is_loaded = False


def _has_torch() -> bool:
    if "torch" in _sys.modules:
        return _sys.modules["torch"] is not None
    return _importlib_util.find_spec("torch") is not None


def _load() -> None:
    """Load the package for PyTorch, and register the operators in `torch.ops.tilemoe`."""
    global _is_loaded
    if _is_loaded:
        return
    _is_loaded = True  # modules that are loaded here may read names of this module
    try:
        import torch as _torch  # noqa: F401  first: every module below imports it

        _import_module("._flops", __name__)  # registers the counts of floating-point operations
        for place, names in _MODULES.items():
            module = _import_module(f".{place}", __name__)
            globals().update({name: getattr(module, name) for name in names})
        globals()["__version__"] = globals()["_library"].VERSION
    except BaseException:
        _is_loaded = False
        raise


def __getattr__(name: str) -> _Any:
    missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _is_loaded or name in _NEED_NO_TORCH:
        raise missing
    if name.startswith("_") and name != "__version__":  # a module of the package, or nothing
        if name.startswith("__") or _importlib_util.find_spec(f"{__name__}.{name}") is None:
            raise missing
        return _import_module(f".{name}", __name__)
    if not _has_torch():
        raise ImportError(_NO_TORCH) if name in __all__ else missing
    _load()
    if name in globals():
        return globals()[name]
    raise missing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _sys.modules.get("torch") is not None:
    try:
        _load()
    except (ImportError, OSError):
        if not _is_command():  # the command reports missing parts
            raise
