#!/usr/bin/env python3
"""The hash of the kernels' machine code, which results files keep and benchmarks/kernel_hash.json
has for the sources as they are: numbers of other kernels are marked in the pages.

  python3 benchmarks/kernel_hash.py build/ci/apps/tilemoe/tilemoe           # says it
  python3 benchmarks/kernel_hash.py --write build/ci/apps/tilemoe/tilemoe   # after a change
  python3 benchmarks/kernel_hash.py --check build/ci/apps/tilemoe/tilemoe

The file may be any program or library with the CUDA backend inside. --check ends with 1 where a
hash is another than the committed one, and with 77, not checked, where another nvcc than the one
of the committed hash made the kernels. The hash of the kit sm80 is that of its code for 8.0: a build
without it is not checked for it, and --write refuses it.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
import machine_code  # noqa: E402

CURRENT = ROOT / "benchmarks" / "kernel_hash.json"
NOT_CHECKED = 77


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--current", type=pathlib.Path, default=CURRENT, help="the committed file")
    args = parser.parse_args()
    try:
        found = machine_code.stamp(args.file)
    except (OSError, machine_code.Unreadable) as error:
        sys.exit(f"kernel_hash.py: error: {args.file}: {error}")
    if found is None:
        sys.exit(f"kernel_hash.py: error: {args.file} has no kernels of the library")
    print(json.dumps(found))
    if args.write:
        if found["sm80"] is None:
            sys.exit(f"kernel_hash.py: error: {args.file} has no kernels for 8.0; build them too")
        args.current.write_text(json.dumps(found, indent=1) + "\n")
    if args.check:
        committed = json.loads(args.current.read_text())
        if found["nvcc"] != committed["nvcc"]:
            print(
                f"kernel_hash.py: not checked: nvcc {found['nvcc']} made these kernels, "
                f"{committed['nvcc']} the committed ones"
            )
            sys.exit(NOT_CHECKED)
        if found["sm80"] is None:
            committed["sm80"] = None
        if found != committed:
            sys.exit(
                f"kernel_hash.py: {args.current.name} has {json.dumps(committed)}. "
                "Where a kernel was changed on purpose:\n"
                f"  python3 benchmarks/kernel_hash.py --write {args.file}\n"
                "  python3 benchmarks/gpu_tables.py"
            )


if __name__ == "__main__":
    main()
