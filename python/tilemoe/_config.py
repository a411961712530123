"""Select the arch, and show what this installation supports on this machine."""

import platform
from collections.abc import Iterator

import torch

from . import _library, _renamed, ops

ARCHS = ("auto", "sm80", "sm90", "sm100")  # names that tilemoe_set_cuda_arch accepts


def set_arch(arch: str | None) -> None:
    """Select the arch, the kernels of the experts' GEMMs on GPUs, for the whole process, also for
    `tilemoe.jax`.

    "sm80" (mma.sync) runs on every GPU from compute capability 8.0 on, "sm90" (wgmma and TMA) on
    9.0, "sm100" (tcgen05) on 10.x; "sm100" is experimental and was never executed on a GPU. None or
    "auto" selects the newest arch that a GPU supports, except "sm100".

    Before the first call the environment variable TILEMOE_ARCH (older name: TILEMOE_KIT) selects
    the arch; the variable is read once and has the same values. set_arch applies to calls that
    begin after it; a captured CUDA graph keeps the kernels of its capture. `tilemoe.show_config()`
    prints the arch of each GPU. Without CUDA the call has no effect.

    Args:
        arch: "sm80", "sm90", "sm100", "auto" or None.

    Raises:
        ValueError: `arch` has another value.
        NotImplementedError: The library was built without this arch. If a GPU does not support the
            arch, the first call on that GPU raises the error.
    """
    arch = "auto" if arch is None else arch
    if not isinstance(arch, str) or arch not in ARCHS:
        *first, last = map(repr, ARCHS)
        raise ValueError(f"arch must be {', '.join(first)} or {last}, got {arch!r}")
    if _library.why_no_cuda() is None:
        ops.call(_library.operators.set_arch, arch)


def set_kit(kit: str | None) -> None:
    """Call `set_arch`; `set_kit` is its older name. Deprecated."""
    _renamed.warn("set_kit", "set_arch", 2)
    set_arch(kit)


def arch_of(index: int) -> tuple[str | None, str | None]:
    """Return the arch of a GPU and the reason for the choice.

    The result is (text, None), or (None, reason) if the library does not use the GPU.
    """
    try:
        return ops.call(_library.operators.arch_of, index), None
    except (NotImplementedError, RuntimeError) as error:
        return None, str(error).rsplit(" [", 1)[0]


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
        yield "GPUs", "torch cannot use a GPU: see torch.cuda.is_available()"
    for gpu in _gpus():
        yield "GPU", gpu


def lines() -> list[tuple[str, str]]:
    """Return the lines that show_config() prints: (name, text)."""
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
        CUDA       no: torch 2.11.0 was built without CUDA; install a torch with CUDA
    """
    for name, text in lines():
        print(f"{name:10} {text}")
