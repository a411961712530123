"""Whether the Python package is built with its CUDA library. Run: prints ON or OFF."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from find_torch import find_torch

MIN_NVCC = (12, 5)


def has_cuda():
    """The value of TILEMOE_CUDA or, if it has none, whether both halves are installed: a compiler
    that cmake/Cuda.cmake takes, and a torch to link with that has CUDA. Without the CPU backend
    (TILEMOE_CPU=OFF) CUDA is required, and CMake reports what is missing."""
    wanted = os.environ.get("TILEMOE_CUDA", "AUTO")
    if wanted != "AUTO":
        return wanted == "ON"
    if os.environ.get("TILEMOE_CPU") == "OFF":
        return True
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc", path=search)
    torch = find_torch()
    if not nvcc or not torch or not Path(torch[1], "lib", "libtorch_cuda.so").exists():
        return False
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    return release is not None and tuple(map(int, release.groups())) >= MIN_NVCC


if __name__ == "__main__":
    print("ON" if has_cuda() else "OFF")
