"""TileMoE: the Mixture-of-Experts layer of a transformer, forward and backward, for PyTorch.

Without torch, `import tilemoe` works for what does not need it: `tilemoe.options`, and the layers
and records of `tilemoe.bench`. A name of the list below is then an ImportError."""

import importlib.util as _importlib_util
import sys as _sys
from typing import Any as _Any

from ._invocation import is_command as _is_command
from ._invocation import is_module as _is_module

_NO_TORCH = (
    "tilemoe needs torch 2.10 or newer, which is not installed: pip install 'tilemoe[torch]'"
)
if "torch" in _sys.modules:
    _has_torch = _sys.modules["torch"] is not None
else:
    _has_torch = _importlib_util.find_spec("torch") is not None

if _has_torch and not _is_module("tilemoe.options"):  # which the package itself imports
    try:
        import torch as _torch  # noqa: F401  first: every module below imports it

        from . import _flops as _flops  # registers them
        from ._config import set_arch, set_kit, show_config
        from ._library import VERSION as __version__
        from ._library import set_block_turns, set_ctas_per_sm
        from .functional import WeightGradients, grouped_experts, moe, moe_general
        from .gemms import (
            Routing,
            combine_mm,
            gathered_mm,
            route,
            route_ids,
            route_pairs,
            route_rows,
        )
        from .integrations.from_modules import from_modules
        from .lora import LoRA
        from .module import MoE, MoEAux
        from .quantization import QuantizedExperts, quantize_experts
        from .quantized_modules import quantize_
        from .routing import (
            Aux,
            rounded_router,
            router_logits,
            router_losses,
            scores_at,
            top_k,
            topk_router,
        )
    except (ImportError, OSError):
        if not _is_command():  # the command reports what is missing
            raise

__all__ = [
    "Aux",
    "LoRA",
    "MoE",
    "MoEAux",
    "QuantizedExperts",
    "Routing",
    "WeightGradients",
    "__version__",
    "combine_mm",
    "from_modules",
    "gathered_mm",
    "grouped_experts",
    "moe",
    "moe_general",
    "quantize_",
    "quantize_experts",
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


if not _has_torch:

    def __getattr__(name: str) -> _Any:
        if name in __all__:
            raise ImportError(_NO_TORCH)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
