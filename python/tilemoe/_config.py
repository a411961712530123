"""Selects the arch, and shows what this installation supports on this machine."""

import platform
from collections.abc import Iterator

import torch

from . import _library, _renamed, ops

ARCHS = ("auto", "sm80", "sm90", "sm100")  # the names that tilemoe_set_cuda_arch takes


def set_arch(arch: str | None) -> None:
    """Select the arch, the kernels of the experts' GEMMs on GPUs, for the whole process, also for
    `tilemoe.jax`.

    "sm80" (mma.sync; every GPU from compute capability 8.0 on), "sm90" (wgmma and TMA; 9.0),
    "sm100" (tcgen05; 10.x; experimental: never executed on a GPU), or None or "auto" for the newest
    that a GPU supports, without "sm100".

    Before the first call the environment variable TILEMOE_ARCH (older name: TILEMOE_KIT) selects
    it; the variable is read once and takes the same names. set_arch changes the calls that begin
    after it; a captured CUDA graph keeps the kernels that it was captured with.
    `tilemoe.show_config()` prints each GPU's arch. Without CUDA nothing changes.

    Raises:
        ValueError: `arch` is none of these.
        NotImplementedError: the library was built without this arch. If a GPU does not support
            the arch, the first call on that GPU raises the error.
    """
    arch = "auto" if arch is None else arch
    if not isinstance(arch, str) or arch not in ARCHS:
        raise ValueError(f"tilemoe: arch is {arch!r}, expected None, {', '.join(map(repr, ARCHS))}")
    if _library.why_no_cuda() is None:
        ops.call(_library.operators.set_arch, arch)


def set_kit(kit: str | None) -> None:
    """Call `set_arch`; `set_kit` is its older name. Deprecated."""
    _renamed.warn("set_kit", "set_arch", 2)
    set_arch(kit)


def arch_of(index: int) -> tuple[str | None, str | None]:
    """(a GPU's arch and the reason for it, None), or (None, why the library does not use it)."""
    try:
        return ops.call(_library.operators.arch_of, index), None
    except (NotImplementedError, RuntimeError) as error:
        return None, str(error).split(" [")[0]


def _gpus() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        arch, reason = arch_of(index)
        yield f"cuda:{index} {properties.name}, {size}: {arch or f'not used, {reason}'}"


def _cpu() -> str:
    if _library.why_no_cpu() is not None:
        return f"no: {_library.why_no_cpu()}"
    return f"yes, {torch.get_num_threads()} threads; float32, bfloat16 and float16"


def _cuda() -> Iterator[tuple[str, str]]:
    if _library.why_no_cuda() is not None:
        yield "CUDA", f"no: {_library.why_no_cuda()}"
        return
    yield "CUDA", f"yes, by torch's CUDA {torch.version.cuda}; bfloat16 and float16"
    if not torch.cuda.is_available():
        yield "GPUs", "torch cannot use any: see torch.cuda.is_available()"
    for gpu in _gpus():
        yield "GPU", gpu


def lines() -> list[tuple[str, str]]:
    """What show_config() prints: (name, text)."""
    return [
        ("tilemoe", _library.VERSION),
        ("libraries", str(_library.directory())),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("CPU", _cpu()),
        *_cuda(),
    ]


def show_config() -> None:
    """Print the versions, the loaded libraries, and each device with its arch or why it is unused.

    Paste the output into a bug report.

    Example:
        >>> import tilemoe
        >>> tilemoe.show_config()  # doctest: +SKIP
        tilemoe    0.2.0
        libraries  /usr/lib/python3/dist-packages/tilemoe/lib
        torch      2.11.0
        python     3.12.3, Linux x86_64
        CPU        yes, 16 threads; float32, bfloat16 and float16
        CUDA       no: torch 2.11.0 was built without CUDA
    """
    for name, text in lines():
        print(f"{name:10} {text}")
