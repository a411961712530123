#!/usr/bin/env python3
"""Write a wheel of the package (scripts/dist.sh) as a folder that Hugging Face's kernels loads.

  hub_folder.py WHEEL FOLDER    replaces FOLDER/build/VARIANT, and copies the files of scripts/hub

scripts/hub.sh runs this script, which requires patchelf. If a folder has several variants, kernels
selects one that the machine's torch can load.
"""

import argparse
import base64
import hashlib
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import kernel_hash  # noqa: E402

# A kernel may import only itself, torch and Python's standard library; these files need more.
LEFT_OUT = ("bench", "_command", "__main__.py", "transformers.py", "torchtitan.py",
            "torchtitan_gpt_oss.py", "torchtitan_dispatchers.py",
            "transformers_expert_parallel.py", "peft*.py", "expert_adapters.py",
            "sharded_adapters.py", "kept_quantized.py", "quantized_loading.py",
            "jax", "libtilemoe_jax*.so")
KERNELS = "libtilemoe_cuda-*.so"  # with the namespace of the build
# {architecture of TILEMOE_CUDA_ARCHS: its name in kernels}.
ARCHITECTURES = {80: "8.0", 90: "9.0a", 100: "10.0", 120: "12.0"}


def only(paths):
    (path,) = paths
    return path


def variant_of(unpacked, kernel):
    """Return the folder's name in the form of kernels: minimum torch, CUDA or cpu, machine."""
    stable_abi = kernel["torch"]["stable-abi"]
    backend, where = "cpu", "cpu"
    kernels = list((unpacked / "tilemoe" / "lib").glob(KERNELS))
    if kernels:
        # The CUDA runtime is included, and a runtime 13.x runs on every driver for CUDA 13.
        _, nvcc = kernel_hash.kernels(only(kernels))
        major = nvcc.split(".")[0]
        backend, where = "cuda", f"cu{major}0"
    min_torch = stable_abi[backend].replace(".", "")
    return backend, f"torch-stable-abi{min_torch}-{where}-{platform.machine()}-linux"


def copy_package(unpacked, folder):
    shutil.copytree(
        unpacked / "tilemoe", folder, ignore=shutil.ignore_patterns("__pycache__", *LEFT_OUT)
    )
    for library in unpacked.glob("tilemoe.libs/*"):
        shutil.copy2(library, folder / "lib")
    for library in (folder / "lib").glob("*.so*"):
        subprocess.run(["patchelf", "--set-rpath", "$ORIGIN", library], check=True)
    shutil.copytree(
        only(unpacked.glob("*.dist-info")) / "licenses", folder / "licenses",
        ignore=shutil.ignore_patterns("bindings"),  # sources of tilemoe.jax
    )  # fmt: skip


def digest(folder):
    """Return the hashes of all files, in the form that kernels compares."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "algorithm": "sha256",
        "files": {
            path.relative_to(folder).as_posix(): base64.b64encode(
                hashlib.sha256(path.read_bytes()).digest()
            ).decode()
            for path in files
        },
    }


def backend_of(backend, folder):
    """Return the backend's entry in the metadata, with the architectures of its machine code."""
    if backend != "cuda":
        return {"type": backend}
    found, _ = kernel_hash.kernels(only((folder / "lib").glob(KERNELS)))
    return {"type": backend, "archs": [ARCHITECTURES[one] for one in sorted(found)]}


def metadata(kernel, backend, folder):
    general = kernel["general"]
    return {
        "name": general["name"],
        "id": (folder / "lib" / "namespace.txt").read_text().strip(),
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": backend_of(backend, folder),
        "digest": digest(folder),
    }


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    kernel = tomllib.loads((ROOT / "scripts" / "hub" / "build.toml").read_text())
    with tempfile.TemporaryDirectory() as unpacked:
        unpacked = pathlib.Path(unpacked)
        zipfile.ZipFile(args.wheel).extractall(unpacked)
        backend, variant = variant_of(unpacked, kernel)
        folder = args.folder / "build" / variant
        shutil.rmtree(folder, ignore_errors=True)
        copy_package(unpacked, folder)
    (folder / "metadata.json").write_text(json.dumps(metadata(kernel, backend, folder), indent=2) + "\n")
    shutil.copytree(ROOT / "scripts" / "hub", args.folder, dirs_exist_ok=True)
    print(folder)


if __name__ == "__main__":
    main()
