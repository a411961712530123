"""Find and load the libraries of the operators.

libtilemoe_torch has the operators' names and the CPU kernels. libtilemoe_torch_cuda is loaded if
torch has CUDA, and links libtilemoe_cuda, which has the CUDA kernels. A build with TILEMOE_CPU=OFF
has no CPU kernels: libtilemoe_torch then contains only the operators' names.
"""

import torch

from . import _renamed, _signatures
from ._folder import directory

MIN_TORCH = (2, 10)


def _namespace() -> str:
    """Return the operators' namespace.

    The build (TILEMOE_TORCH_NAMESPACE) writes it to a file next to the libraries.
    """
    written = directory() / "namespace.txt"
    return written.read_text().strip() if written.exists() else "tilemoe"


def _check_torch():
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MIN_TORCH:
        required = ".".join(map(str, MIN_TORCH))
        raise ImportError(
            f"TileMoE requires torch >= {required}, got {torch.__version__}; run pip install "
            "-U torch"
        )
    _signatures.is_compiling = torch.compiler.is_compiling  # this does not import torch, for JAX


def _load():
    """Load both libraries, and return why CUDA is not supported, or None if it is."""
    _check_torch()
    folder = directory()
    cpu = folder / "libtilemoe_torch.so"
    if not cpu.exists():
        raise ImportError(
            f"no TileMoE operators at {cpu}; install the package (pip install .), or set "
            "TILEMOE_LIBRARY_DIR to bindings/torch of a build with TILEMOE_TORCH=ON"
        )
    try:
        torch.ops.load_library(cpu)
    except OSError as error:
        raise ImportError(
            f"cannot load the TileMoE operators at {cpu} ({error.__cause__ or error})"
        ) from None
    cuda = folder / "libtilemoe_torch_cuda.so"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a torch with CUDA"
    if not cuda.exists():
        return (
            "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON"
        )
    try:
        torch.ops.load_library(cuda)
    except OSError as error:
        return f"the CUDA library of TileMoE cannot be loaded ({error.__cause__ or error})"
    return None


_no_cuda = _load()
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Two copies of the package in a process have two namespaces, so no operator is defined twice.
NAMESPACE = _namespace()
operators = getattr(torch.ops, NAMESPACE)
_no_cpu = None
if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::moe", "CPU"):
    _no_cpu = "TileMoE was built without its CPU backend; rebuild with TILEMOE_CPU=ON"
_version = operators.version()
# Version of the loaded library, from any package.
VERSION = f"{_version // 10000}.{_version // 100 % 100}.{_version % 100}"


def why_no_cuda() -> str | None:
    """Return why the operators do not support CUDA; None if they do, with or without a GPU."""
    return _no_cuda


def why_no_cpu() -> str | None:
    """Return why the operators have no kernels for the CPU; None if they have."""
    return _no_cpu


def set_ctas_per_sm(count: int) -> None:
    """Set the number of CTAs per SM for grouped GEMMs (1 to 16, default 1).

    The setting applies to the whole process. With 1, a CTA runs for the whole GEMM and fills its
    pipeline once. If kernels of another stream occupy SMs, as NCCL's do in training on several
    GPUs, the CTAs for these SMs start only after other CTAs have ended. With 4, the CTAs run in
    waves, and the free SMs take over their work. Results have the same bits. Without a GPU the call
    has no effect.

    Args:
        count: CTAs per SM.

    Raises:
        ValueError: `count` is not an int in [1, 16].
    """
    if not isinstance(count, int) or not 1 <= count <= 16:
        raise ValueError(f"ctas_per_sm must be an int in [1, 16], got {count!r}")
    if _no_cuda is None:
        operators.set_ctas_per_sm(count)


def set_block_turns(turns: int) -> None:
    """Call `set_ctas_per_sm(turns)`, the newer name of this function. Deprecated.

    Args:
        turns: CTAs per SM.
    """
    _renamed.warn("set_block_turns", "set_ctas_per_sm", 2)
    set_ctas_per_sm(turns)


def class_of(value) -> str:
    """Return the class with its module, for error messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(dtype):
    return str(dtype).removeprefix("torch.")


def require_tensor(value, name):
    """Reject a value that is not a tensor, and a tensor with elements that no kernel can read."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {class_of(value)}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = value.dtype if value.is_quantized else value.layout
        hint = "its dequantize()" if value.is_quantized else "its to_dense()"
        if value.is_nested:
            kind, hint = f"nested, {value.layout}", "its values(), which are rows of one tensor"
        raise NotImplementedError(
            f"{name} is a {class_of(value)} ({kind}), expected a dense tensor; pass {hint}"
        )


def require_weight(value, name):
    """Check a weight, which may be a subclass of torch.Tensor with packed elements."""
    require_tensor(value, name)
    if type(value) not in PLAIN and not value.is_floating_point():
        raise NotImplementedError(
            f"{name} is a {class_of(value)}, {value.dtype} {tuple(value.shape)}, expected "
            "numbers in float32, bfloat16 or float16; dequantize it first"
        )


def require_device(tensor, name):
    """Reject a value that is not a tensor, and a tensor on a device without a library.

    Every function calls this first.
    """
    require_tensor(tensor, name)
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace and torch.onnx.export(dynamo=False) are not supported, "
            "because they cannot record operators with lists of tensors; use torch.export "
            "or torch.compile"
        )
    if tensor.is_cuda:
        if _no_cuda is not None:
            raise NotImplementedError(f"{_no_cuda} (got a tensor on {tensor.device})")
    elif tensor.is_cpu:
        if _no_cpu is not None:
            raise NotImplementedError(f"{_no_cpu} (got a tensor on cpu)")
    elif not tensor.is_meta:
        raise NotImplementedError(f"{name} must be on cpu or cuda, got {tensor.device}")


def require_dtype(x):
    """Reject a dtype that no kernel computes in."""
    dtype, on_gpu = x.dtype, x.is_cuda
    if dtype is torch.bfloat16 or dtype is torch.float16 or dtype is torch.float32 and not on_gpu:
        return
    if on_gpu:
        raise NotImplementedError(
            f"x must be bfloat16 or float16 on CUDA, got {_plain(dtype)} with shape "
            f"{tuple(x.shape)}; pass dtype=torch.bfloat16 or use torch.autocast"
        )
    raise ValueError(
        f"x must be float32, bfloat16 or float16, got {_plain(dtype)} with shape {tuple(x.shape)}"
    )


def require_together(x, x_name, **tensors):
    """Reject tensors that are not on x's device.

    Without this check an operator would derive a tensor that a later operator rejects under a name
    that the caller never passed.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_tensor(tensor, name)
        if tensor.device != x.device:
            raise ValueError(
                f"expected all tensors on one device: {name} is on {tensor.device}, "
                f"{x_name} is on {x.device}"
            )
