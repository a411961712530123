"""Compute the layer in JAX with the symbols and options of `tilemoe.functional`, through XLA's FFI.

Importing the package does not import torch. The functions work under jit, grad, shard_map,
checkpoint, scan and export, on the CPU and on NVIDIA GPUs. Not supported, with an error that names
it: vmap, forward mode, second derivatives, symbolic shapes, float64, float32 on a GPU, token
rounding.
"""

from . import _library as _library  # first: it reports what is missing
from ._experts import RESIDUALS, Aux, grouped_experts, moe
from ._fp8 import Fp8Weight, fp8_weight
from ._library import (
    VERSION as __version__,
)
from ._library import (
    export_checks,
    set_arch,
    set_ctas_per_sm,
    set_cuda_sms,
    set_num_threads,
    show_config,
)
from ._lora import LoRA
from ._router import router_losses, top_k, top_k_scores

__all__ = [
    "RESIDUALS",
    "Aux",
    "Fp8Weight",
    "LoRA",
    "__version__",
    "export_checks",
    "fp8_weight",
    "grouped_experts",
    "moe",
    "router_losses",
    "set_arch",
    "set_ctas_per_sm",
    "set_cuda_sms",
    "set_num_threads",
    "show_config",
    "top_k",
    "top_k_scores",
]
