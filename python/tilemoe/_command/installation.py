"""Finds what is installed on this machine and what a GPU lacks, also without torch or the operators
if they cannot be loaded."""

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import re
from pathlib import Path

from .. import _folder

CPU_LIBRARY, CUDA_LIBRARY = "libtilemoe_torch.so", "libtilemoe_torch_cuda.so"
MIN_CAPABILITY = (8, 0)
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI's class of GPUs
_SUCCESS = 0  # of CUDA's driver


@dataclasses.dataclass
class Gpu:
    index: int
    name: str
    memory_bytes: int
    capability: tuple
    arch: str | None  # its arch, and the reason
    reason: str | None = None  # why the library does not use it


@dataclasses.dataclass
class Installation:
    version: str
    commit: str
    libraries: str
    has_cpu_library: bool
    has_cuda_library: bool
    python: str
    torch: str | None  # its version
    torch_cuda: str | None  # the CUDA that torch was built with
    operators_error: str | None  # why they cannot be loaded
    cuda_error: str | None  # why the operators do not support CUDA
    threads: int | None
    gpus_in_machine: int  # that PCI lists
    driver: str | None  # its release
    driver_cuda: str | None  # the newest CUDA that it supports; None without a driver
    visible: str | None  # CUDA_VISIBLE_DEVICES
    gpus: list


def issues():
    """The address of the project's issues from the package's metadata; None if it has none."""
    try:
        urls = importlib.metadata.metadata("tilemoe").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Issues", named.get("Repository"))


def version():
    """The version in the package's metadata, else that of the library."""
    try:
        return importlib.metadata.version("tilemoe")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        from .._library import VERSION
    except (ImportError, OSError):
        return "unknown"
    return VERSION


def commit():
    written = _folder.directory() / "commit.txt"
    return written.read_text().strip() if written.exists() else "unknown"


def _gpus_in_machine(devices=Path("/sys/bus/pci/devices")):
    """How many NVIDIA GPUs the system lists, with a driver or without."""
    found = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found


def _driver():
    """The driver's release, and the newest CUDA that it supports; None for an unknown value."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    release = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    number = ctypes.c_int()
    try:
        known = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == _SUCCESS
    except OSError:
        known = False
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}" if known else None
    return release and release.group(), cuda


def _torch():
    """torch's version and the CUDA that it was built with; or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        try:
            installed = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return None, None, "torch is not installed"
        return installed, None, f"torch {installed} cannot be imported ({error})"
    return torch.__version__, torch.version.cuda, None


def _operators_error():
    try:
        from .. import _library, ops  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return None


def _gpus():
    import torch

    from .. import _config, _library

    if _library.why_no_cuda() is not None or not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch, reason = _config.arch_of(index)
        found.append(
            Gpu(index, properties.name, properties.total_memory,
                (properties.major, properties.minor), arch, reason)
        )  # fmt: skip
    return found


def find():
    """-> Installation, of this machine and this Python."""
    torch_version, torch_cuda, torch_error = _torch()
    operators_error = torch_error or _operators_error()
    driver, driver_cuda = _driver()
    loaded = operators_error is None
    if loaded:
        import torch

        from .. import _library
    return Installation(
        version=version(),
        commit=commit(),
        libraries=str(_folder.directory()),
        has_cpu_library=(_folder.directory() / CPU_LIBRARY).exists(),
        has_cuda_library=(_folder.directory() / CUDA_LIBRARY).exists(),
        python=f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        torch=torch_version,
        torch_cuda=torch_cuda,
        operators_error=operators_error,
        cuda_error=_library.why_no_cuda() if loaded else None,
        threads=torch.get_num_threads() if loaded else None,
        gpus_in_machine=_gpus_in_machine(),
        driver=driver,
        driver_cuda=driver_cuda,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=_gpus() if loaded else [],
    )


@dataclasses.dataclass(frozen=True)
class Missing:
    what: str
    how: str  # to get it


def _numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text or "")[:2])


def missing(found):
    """[Missing]: what the library needs to use a GPU, in the order in which to get it; empty if it
    can use a GPU."""
    lacks = []

    def add(what, how):
        lacks.append(Missing(what, how))

    if found.torch is None:
        add(found.operators_error, "pip install 'torch>=2.10'")
    elif found.operators_error is not None:
        too_old = _numbers(found.torch) < (2, 10)
        add(found.operators_error,
            "pip install --upgrade 'torch>=2.10'" if too_old else
            "install the package again (pip install --force-reinstall --no-deps tilemoe), or set "
            "TILEMOE_LIBRARY_DIR to bindings/torch of a build")  # fmt: skip
    if found.torch is not None and found.torch_cuda is None:
        add(f"torch {found.torch} was built without CUDA",
            "install a torch with CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
    if found.has_cpu_library and not found.has_cuda_library:
        add(f"this tilemoe has no CUDA library ({found.libraries}/{CUDA_LIBRARY})",
            "install a wheel whose version does not end in +cpu, or build one on a machine with nvcc "
            "and a torch with CUDA: TILEMOE_CUDA=ON pip install .")  # fmt: skip
    elif found.cuda_error is not None and found.torch_cuda is not None:
        add(found.cuda_error, "install the package and a torch with CUDA again, of one CUDA version")
    if found.driver_cuda is None:
        if found.gpus_in_machine:
            add("an NVIDIA GPU without its driver: libcuda.so.1 cannot be loaded",
                "install NVIDIA's driver, 580 or newer (525 or newer for a build by CUDA 12); "
                "start a container with its GPUs: docker run --gpus all")  # fmt: skip
        else:
            add("no NVIDIA GPU and no driver: PCI lists no GPU, and libcuda.so.1 cannot be loaded",
                "use a machine with an NVIDIA GPU of compute capability 8.0 or newer and NVIDIA's "
                "driver, 580 or newer (525 or newer for a build by CUDA 12)")  # fmt: skip
    elif not any(gpu.reason is None for gpu in found.gpus):
        _add_unusable(found, add)
    return lacks


def _add_unusable(found, add):
    """Adds what is missing for a GPU if the machine has a driver."""
    for gpu in found.gpus:
        capability = "{}.{}".format(*gpu.capability)
        add(f"cuda:{gpu.index} {gpu.name}, compute capability {capability}: {gpu.reason}",
            "use a GPU of compute capability 8.0 or newer (A100, RTX 30, H100 and newer)"
            if gpu.capability < MIN_CAPABILITY else
            "update NVIDIA's driver, and unset TILEMOE_ARCH if it is set")  # fmt: skip
    if found.gpus:
        return
    if found.visible is not None:
        add(f"CUDA_VISIBLE_DEVICES is {found.visible!r}, which leaves no GPU",
            "unset it, or set it to a GPU's number")  # fmt: skip
    elif found.torch_cuda and _numbers(found.driver_cuda) < _numbers(found.torch_cuda)[:1]:
        add(f"the driver supports CUDA {found.driver_cuda}, "
            f"torch is built with CUDA {found.torch_cuda}",
            "update NVIDIA's driver (580 or newer for CUDA 13), or install a torch of the driver's "
            "CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
    elif found.torch_cuda and found.cuda_error is None and found.operators_error is None:
        add("torch finds no GPU (torch.cuda.is_available() is False)",
            "start a container with its GPUs (docker run --gpus all); `nvidia-smi` lists the GPUs "
            "that the driver sees")  # fmt: skip
