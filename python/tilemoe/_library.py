"""Finds and loads the operators' libraries: libtilemoe_torch (their names and the CPU) and, where
torch itself has CUDA, libtilemoe_torch_cuda. A build with TILEMOE_CPU=OFF has no kernels for the CPU:
libtilemoe_torch then has the operators' names alone."""

import torch

from ._folder import directory

LEAST_TORCH = (2, 10)


def _namespace() -> str:
    """Of the operators: what their build, TILEMOE_TORCH_NAMESPACE, wrote beside the libraries."""
    written = directory() / "namespace.txt"
    return written.read_text().strip() if written.exists() else "tilemoe"


def _check_torch():
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(f"tilemoe needs torch {least} or newer, but torch is {torch.__version__}")


def _load():
    """Loads both libraries. Returns why there is no CUDA, or None where there is."""
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
# Of the library that is loaded, whatever package it came with.
VERSION = f"{_version // 10000}.{_version // 100 % 100}.{_version % 100}"


def why_no_cuda() -> str | None:
    """Why the operators have no CUDA; None where they have it, though there may be no GPU."""
    return _no_cuda


def why_no_cpu() -> str | None:
    """Why the operators have no kernels for the CPU; None if they have them."""
    return _no_cpu


def set_block_turns(turns: int) -> None:
    """How many blocks of threads, one after the other, a product on a GPU has for each
    multiprocessor: 1 (the default) to 16, for the whole process.

    One block stays for the whole product, and fills its pipeline once. Where kernels of another
    stream hold multiprocessors, as NCCL's do in training on several GPUs, the blocks meant for
    these begin when others have ended; with 4 others take over. Results have the same bits.
    Without a GPU nothing changes.

    Raises:
        ValueError: `turns` is no int from 1 to 16.
    """
    if not isinstance(turns, int) or not 1 <= turns <= 16:
        raise ValueError(f"tilemoe: turns is {turns!r}, expected an int, 1 to 16")
    if _no_cuda is None:
        operators.set_block_turns(turns)


def class_of(value) -> str:
    """The class with its module, as messages name what they were given."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def require_tensor(value, name):
    """Refuses what is no tensor, and tensors whose elements no kernel can read."""
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
    """The same for a weight, which a subclass of torch.Tensor may hold packed."""
    require_tensor(value, name)
    if type(value) not in PLAIN and not value.is_floating_point():
        raise NotImplementedError(
            f"tilemoe: {name} is a {class_of(value)}, {value.dtype} {tuple(value.shape)}, "
            "expected a tensor of numbers in float32, bfloat16 or float16: dequantize it first"
        )


def require_device(tensor, name):
    """Refuses what is no tensor, or one on a device that no library is for, in one sentence; every
    function calls it first."""
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
    """Refuses what no kernel computes in, in one sentence."""
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
    """Refuses tensors that are not on x's device, before an operator makes of them what a later one
    refuses under a name that the caller never gave."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_tensor(tensor, name)
        if tensor.device != x.device:
            raise ValueError(
                f"tilemoe: {name} is on {tensor.device} and {x_name} on {x.device}"
            )
