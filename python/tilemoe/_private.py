"""List the private names of other packages that a feature requires.

These packages do not promise to keep the names. A feature checks its names once, when it is first
used or registered. If a name is missing, the feature raises an error that contains the name.
`import tilemoe` requires none of them.
"""

import importlib
from importlib import metadata
from typing import Any

_EP = "transformers.distributed.expert_parallel:"
_TOKENS = "torchtitan.models.common.token_dispatcher:"
_ROUTED = "torchtitan.models.common.moe:"

# Modules and their names, by feature.
FEATURES: dict[str, tuple[str, ...]] = {
    "expert parallelism with dispatch='pull' on GPUs": (
        "torch.distributed._symmetric_memory:empty",
        "torch.distributed._symmetric_memory:rendezvous",
        "torch._C._distributed_c10d:_SymmetricMemory.barrier",
        "torch._C._distributed_c10d:_SymmetricMemory.buffer_ptrs",
        "torch._C._distributed_c10d:_SymmetricMemory.get_buffer",
        "torch._C._distributed_c10d:_SymmetricMemory.rank",
    ),
    "recipe='fp8' with fully_shard": (
        "torch:Tensor._make_subclass",
        "torch:Tensor._make_wrapper_subclass",
        "torch._C:_DisableTorchDispatch",
        "torch._C:_disabled_torch_function_impl",
        "torch.autograd:_unsafe_preserve_version_counter",
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    ),
    "TileMoE's expert parallelism in transformers": (
        _EP + "EPImplementationInterface.register",
        _EP + "EPImplementation.__call__",
        _EP + "AllReduceEP.__call__",
    ),
    "quantised experts in transformers": (
        "transformers.core_model_loading:ConversionOps",
        "transformers.core_model_loading:MergeModulelist",
        "transformers.core_model_loading:WeightConverter",
        "transformers.integrations.finegrained_fp8:ALL_FP8_EXPERTS_FUNCTIONS.register",
        "transformers.quantizers.base:HfQuantizer",
        "transformers.quantizers.quantizer_finegrained_fp8:FineGrainedFP8HfQuantizer",
        "transformers.quantizers.quantizer_mxfp4:Mxfp4HfQuantizer",
        "transformers.quantizers.quantizers_utils:get_module_from_name",
        "transformers.quantizers.quantizers_utils:should_convert_module",
    ),
    "tilemoe.torchtitan": (
        "torchtitan.config:derive",
        "torchtitan.config:override",
        "torchtitan.distributed.spmd_types:maybe_set_sparse_mesh",
        _ROUTED + "GroupedExperts.Config",
        _ROUTED + "RoutedExperts.Config",
        _ROUTED + "RoutedExperts.parallelize",
        _TOKENS + "AllToAllTokenDispatcher.Config",
        _TOKENS + "DeepEPTokenDispatcher",
        _TOKENS + "HybridEPTokenDispatcher",
        _TOKENS + "LocalTokenDispatcher",
        _TOKENS + "MinimalAsyncEPTokenDispatcher",
    ),
    "TileMoE for torchtitan's gpt-oss": (
        "torchtitan.distributed.spmd_types:spmd_mesh_size",
        "torchtitan.models.gpt_oss.moe:GptOssGroupedExperts.Config",
        "torchtitan.models.gpt_oss.moe:ScaleBiasForward",
    ),
    "TileMoE with torchtitan's DeepEP dispatcher": (
        "torchtitan.distributed.deepep.deepep:_buffer",
        "torchtitan.distributed.deepep.deepep:sync_combine",
        "torch:ops.deepep.dispatch",
        "torch:ops.deepep.combine",
    ),
    "TileMoE with torchtitan's HybridEP dispatcher": (
        "torchtitan.distributed.deepep.hybridep:_buffer",
        "torch:ops.hybridep.dispatch",
        "torch:ops.hybridep.combine",
    ),
}
_FSDP = "FSDPParam."  # begins the name of the hook of a parameter that fully_shard shards
_found: set[str] = set()  # features with all names


def missing(feature: str) -> list[str]:
    """Return the names of the feature that the installed packages do not have."""
    if feature in _found:
        return []
    absent = [name.replace(":", ".") for name in FEATURES[feature] if not _has(name)]
    if not absent:
        _found.add(feature)
    return absent


def refusal(feature: str, absent: list[str]) -> str:
    """Return the error of a feature with missing names."""
    packages = sorted({name.partition(".")[0] for name in absent})
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    failed = {_import_error(name.partition(":")[0]) for name in FEATURES[feature]} - {""}
    return (
        f"{feature} requires {', '.join(absent)}, missing in {versions}, which this "
        "version of TileMoE does not support" + "".join(f"; {error}" for error in sorted(failed))
    )


def require(feature: str, kind: type[Exception] = NotImplementedError) -> None:
    """Raise an error if a name of the feature is missing.

    Args:
        feature: Name of the feature.
        kind: Type of the error.
    """
    absent = missing(feature)
    if absent:
        raise kind(refusal(feature, absent))


def _has(name: str) -> bool:
    module, _, attributes = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            owner = getattr(owner, attribute)
    except (ImportError, AttributeError):
        return False
    return True


def _import_error(module: str) -> str:
    """Return why the module cannot be imported, such as another package that is not installed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def fsdp_gathers(module: Any) -> bool:
    """Return whether fully_shard shards parameters of this module, by a hook that it registers."""
    hooks = module._load_state_dict_post_hooks
    return any(getattr(hook, "__qualname__", "").startswith(_FSDP) for hook in hooks.values())
