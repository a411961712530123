"""What this installation can do on this machine, for reports of errors and for the impatient."""

import platform
from collections.abc import Iterator

import torch

from . import _library

_CAPABILITY = (9, 0)  # of the GPUs that the CUDA library has kernels for: Hopper


def _gpus() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        line = f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        if capability != _CAPABILITY:
            needed = ".".join(map(str, _CAPABILITY))
            found = ".".join(map(str, capability))
            line += f": not used, its compute capability is {found} and the kernels need {needed}"
        yield line


def _cuda() -> Iterator[tuple[str, str]]:
    if _library.why_no_cuda() is not None:
        yield "CUDA", f"no: {_library.why_no_cuda()}"
        return
    yield "CUDA", f"yes, by torch's CUDA {torch.version.cuda}; bfloat16 and float16"
    if not torch.cuda.is_available():
        yield "GPUs", "none that torch can use: see torch.cuda.is_available()"
    for gpu in _gpus():
        yield "GPU", gpu


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
    lines = [
        ("tilemoe", _library.VERSION),
        ("libraries", str(_library.directory())),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("CPU", f"yes, {torch.get_num_threads()} threads; float32, bfloat16 and float16"),
        *_cuda(),
    ]
    for name, text in lines:
        print(f"{name:10} {text}")
