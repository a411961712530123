"""Builds the Python package: scikit-build-core, with two things settled before it starts.

CUDA: its library is built where there is a compiler that cmake/Cuda.cmake takes and torch has CUDA to
link with. Elsewhere the version ends in +cpu, since that is the part of a build's output that pip
always shows. TILEMOE_CUDA=ON or OFF in the environment asks for one of them.

torch: the headers are those of the torch in the environment that the package is for. Only where that
has none is one fetched for the build.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from find_torch import find_torch
from scikit_build_core import build as backend
from scikit_build_core.build import (  # noqa: F401  hooks that stay as they are
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)

LEAST_TORCH = "torch>=2.10"
LEAST_NVCC = (12, 5)


def has_cuda():
    """What TILEMOE_CUDA says or, where it says nothing, whether both halves are there."""
    wanted = os.environ.get("TILEMOE_CUDA", "AUTO")
    if wanted != "AUTO":
        return wanted == "ON"
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc", path=search)
    torch = find_torch()
    if not nvcc or not torch or not Path(torch[1], "lib", "libtorch_cuda.so").exists():
        return False
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", told)
    return release is not None and tuple(map(int, release.groups())) >= LEAST_NVCC


def dynamic_metadata(settings, project):
    """The version: that of the C header and, of a build without CUDA, +cpu."""
    header = Path("include/tilemoe/tilemoe.h").read_text(encoding="utf-8")
    numbers = re.findall(r"define TILEMOE_VERSION_[A-Z]+ (\d+)", header)
    return {"version": ".".join(numbers) + ("" if has_cuda() else "+cpu")}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    os.environ["TILEMOE_CUDA"] = "ON" if has_cuda() else "OFF"
    return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_wheel(config_settings=None):
    required = backend.get_requires_for_build_wheel(config_settings)
    return required if find_torch() else [*required, LEAST_TORCH]
