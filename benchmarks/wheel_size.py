#!/usr/bin/env python3
"""What a wheel of scripts/dist.sh weighs, and which GPUs its kernels are for.

  python3 benchmarks/wheel_size.py build/dist/tilemoe-*.whl --json benchmarks/results/wheel.json

Machine code alone is counted, not the PTX that the driver compiles for other GPUs."""

import argparse
import json
import pathlib
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
import machine_code  # noqa: E402

CUDA_LIBRARY = "tilemoe/lib/libtilemoe_torch_cuda.so"
COMMIT = "tilemoe/lib/commit.txt"


def figures(wheel):
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        files = {info.filename: info.compress_size for info in archive.infolist()}
        library = archive.extract(CUDA_LIBRARY, folder)
        kernels, nvcc = machine_code.kernels(library)
        commit = archive.read(COMMIT).decode().strip()
    largest = sorted(files, key=files.get, reverse=True)[:4]
    return {
        "wheel": wheel.name,
        "commit": commit,
        "nvcc": nvcc,
        "bytes": wheel.stat().st_size,
        "largest_bytes_inside": {name: files[name] for name in largest},
        "kernels": {str(arch): len(kernels[arch]) for arch in sorted(kernels)},
    }


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    try:
        found = figures(args.wheel)
    except (OSError, KeyError, zipfile.BadZipFile, machine_code.Unreadable) as error:
        sys.exit(f"wheel_size.py: error: {args.wheel}: {error}")
    print(f"{found['bytes'] / 2**20:.1f} MiB; kernels: {found['kernels']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
