#!/usr/bin/env python3
"""Writes words.inc: the descriptors of MMAs as CUTLASS itself makes them, with which
tests/descriptors_test.cpp compares the library's own.

  tests/cutlass_words/write.py            # after a change of words.cpp, or with a newer CUTLASS
  tests/cutlass_words/write.py --check    # whether the file is what CUTLASS makes

Downloads CUTLASS's headers, the wheel nvidia-cutlass of the version below, into a temporary folder;
--cutlass names an existing folder of headers. Needs g++ and CUDA's headers, no GPU.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "words.inc"
WHEEL = "nvidia-cutlass==4.2.0.0"
IN_WHEEL = "cutlass_library/source/include/"

HEADER = """\
// Written by write.py with CUTLASS's own constructors; do not edit.
//   INSTRUCTION(dtype, rows of D, columns of D, major of A, major of B, word)
//   OPERAND(arch, operand, major, its rows in a stage, fragment, where the operand begins,
//           words of 16 steps of the sum each); TwoCtaA, TwoCtaB: a CTA's operands of a 2-CTA MMA
"""


def download(folder):
    """The folder of CUTLASS's headers, taken out of its wheel."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL], check=True
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith(IN_WHEEL)])
    return folder / IN_WHEEL


def rows(cutlass, cuda, folder):
    """The rows that words.cpp writes, compiled with these headers."""
    program, table = folder / "words", folder / "rows"
    includes = [f"-I{path}" for path in (cutlass, cuda, cuda / "cccl")]
    subprocess.run(
        ["g++", "-std=c++17", "-w", *includes, HERE / "words.cpp", "-o", program], check=True
    )
    subprocess.run([program, table], check=True, stdout=subprocess.DEVNULL)
    return table.read_text()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cutlass", type=pathlib.Path, help="folder of CUTLASS's headers")
    parser.add_argument(
        "--cuda",
        type=pathlib.Path,
        default=pathlib.Path("/usr/local/cuda/include"),
        help="folder of CUDA's headers",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = HEADER + rows(options.cutlass or download(folder), options.cuda, folder)
    if not options.check:
        TABLE.write_text(text)
    elif TABLE.read_text() != text:
        sys.exit(f"{TABLE} is not what CUTLASS makes")


if __name__ == "__main__":
    main()
