"""Find what is installed on this machine and what is missing for a GPU.

The functions also work without torch, or if the operators cannot be loaded.
"""

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
_DISPLAY = "0x03"  # PCI class of GPUs
_SUCCESS = 0  # success of CUDA's driver


@dataclasses.dataclass
class Gpu:
    index: int
    name: str
    memory_bytes: int
    capability: tuple
    arch: str | None  # arch and the reason for it
    reason: str | None = None  # why the library does not use it


@dataclasses.dataclass
class Installation:
    version: str
    commit: str
    libraries: str
    has_cpu_library: bool
    has_cuda_library: bool
    python: str
    torch: str | None  # version
    torch_cuda: str | None  # CUDA version of torch
    operators_error: str | None  # why they cannot be loaded
    cuda_error: str | None  # why the operators do not support CUDA
    threads: int | None
    gpus_in_machine: int  # in the list of PCI devices
    driver: str | None  # release
    driver_cuda: str | None  # newest CUDA that it supports; None without a driver
    visible: str | None  # CUDA_VISIBLE_DEVICES
    gpus: list


def issues():
    """Return the address of the project's issues from the package's metadata, or None."""
    try:
        urls = importlib.metadata.metadata("tilemoe").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Issues", named.get("Repository"))


def version():
    """Return the version in the package's metadata, else that of the library."""
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
    """Return how many NVIDIA GPUs the system lists, with or without a driver."""
    found = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found


def _driver():
    """Return the driver's release, and the newest CUDA that it supports; None if unknown."""
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
    """Return torch's version and its CUDA version, or why it cannot be imported."""
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
    """Return the Installation of this machine and this Python."""
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
    how: str  # fix


def _numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text or "")[:2])


def missing(found):
    """Return what the library requires to use a GPU, in the order of installation.

    The list of Missing is empty if it can use a GPU.
    """
    lacks = []

    def add(what, how):
        lacks.append(Missing(what, how))

    if found.torch is None:
        add(found.operators_error, "pip install 'torch>=2.10'")
    elif found.operators_error is not None:
        too_old = _numbers(found.torch) < (2, 10)
        add(found.operators_error,
            "pip install --upgrade 'torch>=2.10'" if too_old else
            "install the package again (pip install --force-reinstall --no-deps tilemoe), "
            "or set TILEMOE_LIBRARY_DIR to bindings/torch of a build")  # fmt: skip
    if found.torch is not None and found.torch_cuda is None:
        add(f"torch {found.torch} was built without CUDA",
            "install a torch with CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
    if found.has_cpu_library and not found.has_cuda_library:
        add(f"TileMoE was built without CUDA ({found.libraries}/{CUDA_LIBRARY} is missing)",
            "install a wheel whose version does not end in +cpu, or rebuild on a machine "
            "with nvcc and a torch with CUDA: TILEMOE_CUDA=ON pip install .")  # fmt: skip
    elif found.cuda_error is not None and found.torch_cuda is not None:
        add(
            found.cuda_error,
            "reinstall the package and a torch with CUDA, both with one CUDA version",
        )
    if found.driver_cuda is None:
        if found.gpus_in_machine:
            add("the machine has an NVIDIA GPU without a driver: libcuda.so.1 cannot be loaded",
                "install NVIDIA's driver, 580 or newer (525 or newer for a build by CUDA 12); "
                "start a container with its GPUs: docker run --gpus all")  # fmt: skip
        else:
            add("the machine has no NVIDIA GPU and no driver: PCI lists no GPU, and "
                "libcuda.so.1 cannot be loaded",
                "use a machine with an NVIDIA GPU of compute capability 8.0 or newer and NVIDIA's "
                "driver, 580 or newer (525 or newer for a build by CUDA 12)")  # fmt: skip
    elif not any(gpu.reason is None for gpu in found.gpus):
        _add_unusable(found, add)
    return lacks


def _add_unusable(found, add):
    """Add what is missing for a GPU if the machine has a driver."""
    for gpu in found.gpus:
        capability = "{}.{}".format(*gpu.capability)
        add(f"cuda:{gpu.index} {gpu.name}, compute capability {capability}: {gpu.reason}",
            "use a GPU of compute capability 8.0 or newer (A100, RTX 30, H100 and newer)"
            if gpu.capability < MIN_CAPABILITY else
            "update NVIDIA's driver, and unset TILEMOE_ARCH if it is set")  # fmt: skip
    if found.gpus:
        return
    if found.visible is not None:
        add(f"CUDA_VISIBLE_DEVICES={found.visible!r} leaves no GPU",
            "unset it, or set it to the number of a GPU")  # fmt: skip
    elif found.torch_cuda and _numbers(found.driver_cuda) < _numbers(found.torch_cuda)[:1]:
        add(f"the driver supports CUDA {found.driver_cuda}, but torch was built with CUDA "
            f"{found.torch_cuda}",
            "update NVIDIA's driver (580 or newer for CUDA 13), or install a torch with "
            "the driver's CUDA version: https://pytorch.org/get-started/locally")  # fmt: skip
    elif found.torch_cuda and found.cuda_error is None and found.operators_error is None:
        add("torch finds no GPU (torch.cuda.is_available() is False)",
            "start a container with its GPUs (docker run --gpus all); `nvidia-smi` lists "
            "the GPUs of the driver")  # fmt: skip
