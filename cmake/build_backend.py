"""Builds the Python package: scikit-build-core, with three things settled before it starts.

CUDA: its library is built if a compiler that cmake/Cuda.cmake takes is found and torch has CUDA to
link with. Elsewhere the version ends in +cpu, since that is the part of a build's output that pip
always shows. TILEMOE_CUDA=ON or OFF in the environment selects one of them. A source distribution
is for either, and what is built from it has its version: installers insist on that.

torch: the headers are those of the torch in the environment that the package is for. One is
fetched for the build only if that has none.

Addresses: the metadata has those of project_urls.txt.
"""

import os
import re
from pathlib import Path

from find_cuda import has_cuda
from find_torch import find_torch
from project_urls import project_urls
from scikit_build_core import build as backend
from scikit_build_core.build import (  # noqa: F401  hooks that stay as they are
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)

MIN_TORCH = "torch>=2.10"
_of_sdist = Path("PKG-INFO").exists()  # hooks run in the root of the tree that is built


def dynamic_metadata(settings, project):
    """The version, that of the C header and, of a build without CUDA, +cpu; and the addresses."""
    header = Path("include/tilemoe/tilemoe.h").read_text(encoding="utf-8")
    numbers = re.findall(r"define TILEMOE_VERSION_[A-Z]+ (\d+)", header)
    version = ".".join(numbers) + ("" if _of_sdist or has_cuda() else "+cpu")
    return {"version": version, "urls": project_urls()}


def build_sdist(sdist_directory, config_settings=None):
    global _of_sdist
    _of_sdist = True
    return backend.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    os.environ["TILEMOE_CUDA"] = "ON" if has_cuda() else "OFF"
    return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_wheel(config_settings=None):
    required = backend.get_requires_for_build_wheel(config_settings)
    return required if find_torch() else [*required, MIN_TORCH]
