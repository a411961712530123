#!/usr/bin/env python3
"""Report the size of a wheel that scripts/dist.sh built, and the architectures of its kernels.

  python3 benchmarks/wheel_size.py build/dist/tilemoe-*.whl --json benchmarks/results/wheel.jsonl

Only machine code is counted, not the PTX that the driver compiles for other GPUs.
"""

import argparse
import pathlib
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "python" / "tilemoe" / "bench"), str(ROOT / "scripts")]
import kernel_hash  # noqa: E402
import records  # noqa: E402  a file of the package that needs no package

CUDA_LIBRARY = "tilemoe/lib/libtilemoe_cuda.so"
COMMIT = "tilemoe/lib/commit.txt"


def measurement(wheel):
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        files = {info.filename: info.compress_size for info in archive.infolist()}
        kernels, nvcc = kernel_hash.kernels(archive.extract(CUDA_LIBRARY, folder))
        commit = archive.read(COMMIT).decode().strip()
    name = lambda file: pathlib.Path(file).name.partition(".")[0].partition("-")[0]
    largest = sorted(files, key=files.get, reverse=True)[:5]
    return records.Measurement(
        "wheel", "x86-64", {"tilemoe": wheel.name.split("-")[1], "nvcc": nvcc}, commit,
        {"wheel": wheel.name, "bytes": wheel.stat().st_size,
         **{f"{name(file)}_bytes": files[file] for file in largest},
         **{f"kernels_{arch}": kernels[arch].total() for arch in sorted(kernels)}})  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="write the measurement to this file")
    args = parser.parse_args()
    try:
        found = measurement(args.wheel)
    except (OSError, KeyError, zipfile.BadZipFile, kernel_hash.Unreadable) as error:
        sys.exit(f"wheel_size.py: error: {args.wheel}: {error}")
    for quantity, value in found.values.items():
        print(f"{quantity}: {value}")
    if args.json:
        records.write(args.json, [found])


if __name__ == "__main__":
    main()
