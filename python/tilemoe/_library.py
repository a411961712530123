"""Finds and loads the operators' libraries: libtilemoe_torch (their names and the CPU kernels) and,
if torch has CUDA, libtilemoe_torch_cuda, which links libtilemoe_cuda with the CUDA kernels. A build
with TILEMOE_CPU=OFF has no CPU kernels: libtilemoe_torch then contains only the operators' names."""

import torch

from . import _renamed, _signatures
from ._folder import directory

MIN_TORCH = (2, 10)


def _namespace() -> str:
    """The operators' namespace, which their build (TILEMOE_TORCH_NAMESPACE) wrote to a file next to
    the libraries."""
    written = directory() / "namespace.txt"
    return written.read_text().strip() if written.exists() else "tilemoe"


def _check_torch():
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MIN_TORCH:
        required = ".".join(map(str, MIN_TORCH))
        raise ImportError(f"tilemoe needs torch {required} or newer, but torch is {torch.__version__}")
    _signatures.is_compiling = torch.compiler.is_compiling  # which imports no torch, for JAX


def _load():
    """Loads both libraries. Returns why CUDA is not supported, or None if it is."""
    _check_torch()
    folder = directory()
    cpu = folder / "libtilemoe_torch.so"
    if not cpu.exists():
        raise ImportError(
            f"tilemoe's operators are not at {cpu}: install the package (pip install .), or set "
            "TILEMOE_LIBRARY_DIR to bindings/torch of a build that was configured with "
            "TILEMOE_TORCH=ON"
        )
    try:
        torch.ops.load_library(cpu)
    except OSError as error:
        raise ImportError(
            f"tilemoe's operators at {cpu} cannot be loaded ({error.__cause__ or error})"
        ) from None
    cuda = folder / "libtilemoe_torch_cuda.so"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not cuda.exists():
        return "this tilemoe was built without its CUDA library"
    try:
        torch.ops.load_library(cuda)
    except OSError as error:
        return f"its CUDA library cannot be loaded ({error.__cause__ or error})"
    return None


_no_cuda = _load()
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Two copies of the package in a process have two namespaces: no operator is defined twice.
NAMESPACE = _namespace()
operators = getattr(torch.ops, NAMESPACE)
_no_cpu = None
if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::moe", "CPU"):
    _no_cpu = "this tilemoe was built without its CPU backend (TILEMOE_CPU=OFF)"
_version = operators.version()
# The version of the loaded library, whatever package it came with.
VERSION = f"{_version // 10000}.{_version // 100 % 100}.{_version % 100}"


def why_no_cuda() -> str | None:
    """Why the operators do not support CUDA; None if they do, with a GPU or without one."""
    return _no_cuda


def why_no_cpu() -> str | None:
    """Why the operators have no kernels for the CPU; None if they have them."""
    return _no_cpu


def set_ctas_per_sm(count: int) -> None:
    """Set the number of CTAs that a GEMM on a GPU launches per SM, one after another (in waves): 1
    (the default) to 16, for the whole process.

    With 1, a CTA runs for the whole GEMM and fills its pipeline once. If kernels of another stream
    occupy SMs, as NCCL's do in training on several GPUs, the CTAs for these SMs start only when
    other CTAs have ended. With 4, the free SMs take over their work. Results have the same bits.
    Without a GPU nothing changes.

    Raises:
        ValueError: `count` is no int from 1 to 16.
    """
    if not isinstance(count, int) or not 1 <= count <= 16:
        raise ValueError(f"tilemoe: CTAs per SM is {count!r}, expected an int, 1 to 16")
    if _no_cuda is None:
        operators.set_ctas_per_sm(count)


def set_block_turns(turns: int) -> None:
    """Call `set_ctas_per_sm(turns)`, whose older name this is. Deprecated."""
    _renamed.warn("set_block_turns", "set_ctas_per_sm", 2)
    set_ctas_per_sm(turns)


def class_of(value) -> str:
    """The class with its module, for error messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def require_tensor(value, name):
    """Rejects a value that is no tensor, and a tensor whose elements no kernel can read."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"tilemoe: {name} is a {class_of(value)}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = value.dtype if value.is_quantized else value.layout
        hint = "its dequantize()" if value.is_quantized else "its to_dense()"
        if value.is_nested:
            kind, hint = f"nested, {value.layout}", "its values(), which are rows of one tensor"
        raise NotImplementedError(
            f"tilemoe: {name} is a {class_of(value)} ({kind}), expected a dense tensor: "
            f"pass {hint}"
        )


def require_weight(value, name):
    """The same for a weight, which may be a subclass of torch.Tensor with packed elements."""
    require_tensor(value, name)
    if type(value) not in PLAIN and not value.is_floating_point():
        raise NotImplementedError(
            f"tilemoe: {name} is a {class_of(value)}, {value.dtype} {tuple(value.shape)}, "
            "expected a tensor of numbers in float32, bfloat16 or float16: dequantize it first"
        )


def require_device(tensor, name):
    """Rejects a value that is no tensor, and a tensor on a device without a library, with a message
    of one sentence; every function calls it first."""
    require_tensor(tensor, name)
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "tilemoe: torch.jit.trace, and torch.onnx.export(dynamo=False), which uses it, cannot "
            "record operators that take lists of tensors: use torch.export or torch.compile"
        )
    kind = tensor.device.type
    if kind == "cuda":
        if _no_cuda is not None:
            raise NotImplementedError(f"tilemoe cannot use {tensor.device}: {_no_cuda}")
    elif kind == "cpu":
        if _no_cpu is not None:
            raise NotImplementedError(f"tilemoe cannot use cpu: {_no_cpu}")
    elif kind != "meta":
        raise NotImplementedError(
            f"tilemoe runs on cpu and cuda, but the tensor is on {tensor.device}"
        )


def require_dtype(x):
    """Rejects a dtype that no kernel computes in, with a message of one sentence."""
    dtype, on_gpu = x.dtype, x.is_cuda
    if dtype is torch.bfloat16 or dtype is torch.float16 or dtype is torch.float32 and not on_gpu:
        return
    if on_gpu:
        raise NotImplementedError(
            f"tilemoe on a GPU takes bfloat16 and float16, but x is {x.dtype} {tuple(x.shape)}: "
            "cast x and the parameters to torch.bfloat16, or call the layer under torch.autocast"
        )
    raise ValueError(
        f"tilemoe: x is {dtype} {tuple(x.shape)}, expected float32, bfloat16 or float16"
    )


def require_together(x, x_name, **tensors):
    """Rejects tensors that are not on x's device, before an operator derives a tensor from them
    that a later operator rejects under a name that the caller never passed."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_tensor(tensor, name)
        if tensor.device != x.device:
            raise ValueError(
                f"tilemoe: {name} is on {tensor.device} and {x_name} on {x.device}"
            )
