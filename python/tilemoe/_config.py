"""What this installation can do on this machine, for reports of errors and for the impatient."""

import platform
from collections.abc import Iterator

import torch

from . import _library, ops

KITS = ("auto", "sm80", "sm90", "sm100")  # as src/cuda/arch.cpp knows them


def set_kit(kit: str | None) -> None:
    """Selects the arch, the kernels of the experts' GEMMs on GPUs, for the whole process.

    "sm80" (mma.sync; every GPU from compute capability 8.0 on), "sm90" (wgmma and TMA; 9.0), "sm100"
    (tcgen05; 10.x; experimental: never executed on a GPU), or None or "auto" for the newest that a
    GPU runs, without "sm100".

    Before the first call the environment variable TILEMOE_ARCH (older name: TILEMOE_KIT) selects it;
    the variable is read once and takes the same names. A call of set_kit changes the calls that begin
    afterwards; a captured CUDA graph keeps the kernels that it was captured with.
    `tilemoe.show_config()` prints each GPU's arch. Without CUDA nothing changes.

    Raises:
        ValueError: `kit` is none of these.
        NotImplementedError: the library was built without this arch. That a GPU does not run it
            is an error of the first call there.
    """
    kit = "auto" if kit is None else kit
    if not isinstance(kit, str) or kit not in KITS:
        raise ValueError(f"tilemoe: kit is {kit!r}, expected None, {', '.join(map(repr, KITS))}")
    if _library.why_no_cuda() is None:
        ops.call(_library.operators.set_kit, kit)


def kit_of(index: int) -> tuple[str | None, str | None]:
    """A GPU's kit, and why it is that; or None, and why the library does not use the GPU."""
    try:
        return ops.call(_library.operators.kit_of, index), None
    except (NotImplementedError, RuntimeError) as error:
        return None, str(error).split(" [")[0]


def _gpus() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        kit, reason = kit_of(index)
        yield f"cuda:{index} {properties.name}, {size}: {kit or f'not used, {reason}'}"


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
        yield "GPUs", "none that torch can use: see torch.cuda.is_available()"
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
    """Prints the versions, the libraries that were loaded, and which devices can be used, or why not.

    Paste it into a report of an error.

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
