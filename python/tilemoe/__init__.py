"""TileMoE: the Mixture-of-Experts layer of a transformer, forward and backward, for PyTorch."""

from ._invocation import is_command as _is_command

try:
    import torch as _torch  # noqa: F401  first: every module below imports it

    from . import _flops as _flops  # registers them
    from ._config import set_arch, set_kit, show_config
    from .integrations.from_modules import from_modules
    from ._library import VERSION as __version__
    from ._library import set_block_turns, set_ctas_per_sm
    from .functional import WeightGradients, grouped_experts, moe, moe_general
    from .module import MoE, MoEAux
    from .routing import Aux, rounded_router, router_losses, scores_at, top_k, topk_router
except (ImportError, OSError) as error:
    if not _is_command():  # the command reports what is missing
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise ImportError(
                "tilemoe needs torch 2.10 or newer, which is not installed: "
                "pip install 'tilemoe[torch]'"
            ) from None
        raise

__all__ = [
    "Aux",
    "MoE",
    "MoEAux",
    "WeightGradients",
    "__version__",
    "from_modules",
    "grouped_experts",
    "moe",
    "moe_general",
    "rounded_router",
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
