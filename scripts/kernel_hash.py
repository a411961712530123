#!/usr/bin/env python3
"""Hash the kernels of a program, library or object file, or compare the kernels of two builds.

  scripts/kernel_hash.py build/release/src/libtilemoe.so    # per architecture: hash, kernels
  scripts/kernel_hash.py --units BUILD_A BUILD_B            # by object; status 1 if any differs

A kernel is hashed by its instructions (SASS) alone: names, paths and dates do not count, and the
kernels of a unit are compared as a multiset. A change that only restructures the sources leaves
every unit equal. BUILD_A and BUILD_B are two build folders by the same nvcc, or two files. The
script needs only Python and, for compressed kernels, libzstd.

nvcc nests a kernel in three layers: a fatbin in the file, an ELF image per architecture in the
fatbin, a section .text.KERNEL in the image. No library reads fatbins, and cuobjdump prints text.
"""

import argparse
import collections
import ctypes
import hashlib
import mmap
import pathlib
import re
import struct
import sys

FATBIN = struct.pack("<I", 0xBA55ED50)
ELF_IMAGE = 2  # a fatbin entry's kind; PTX is 1
ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
TOOLS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
NO_BITS = 8  # SHT_NOBITS


class Unreadable(Exception):
    """The kernels of a file cannot be read."""


def zstd():
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError as error:
        raise Unreadable(f"reading compressed kernels requires libzstd: {error}") from None
    library.ZSTD_getFrameContentSize.restype = ctypes.c_ulonglong
    library.ZSTD_decompress.restype = ctypes.c_size_t
    return library


def _decompressed(data):
    library, given = zstd(), ctypes.c_size_t(len(data))
    size = library.ZSTD_getFrameContentSize(data, given)
    if size > 1 << 31:  # two values near 2^64 mean an error
        raise Unreadable("the size of a compressed kernel is unknown")
    image = ctypes.create_string_buffer(size)
    if library.ZSTD_decompress(image, ctypes.c_size_t(size), data, given) != size:
        raise Unreadable("a compressed kernel is damaged")
    return image.raw


def _images(file):
    """Yield (architecture, such as 90, and ELF image, bytes) of all fatbins in `file`."""
    at = file.find(FATBIN)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", file, at)
        end = at + header + size
        if version != 1 or header != 16 or end > len(file):
            at = file.find(FATBIN, at + 4)  # only the constant, in a program that reads fatbins
            continue
        entry = at + header
        while entry < end:
            kind, header, size, packed, architecture = struct.unpack_from("<H2xIQI8xI", file, entry)
            data = file[entry + header : entry + header + (packed or size)]
            if kind == ELF_IMAGE:
                if data[:4] == ZSTD_FRAME:
                    data = _decompressed(data)
                if data[:4] != b"\x7fELF":
                    raise Unreadable("kernels are not compressed with zstd: not supported")
                yield architecture, data
            entry += header + size
        at = file.find(FATBIN, end)


def _sections(image):
    """Yield (name, contents) of an ELF image's sections that have contents."""
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_size) for i in range(count)]
    for name, kind, _, _, offset, size in headers:
        start = headers[names][4] + name
        text = image[start : image.index(b"\0", start)].decode()
        if kind != NO_BITS:
            yield text, image[offset : offset + size]


def kernels(path):
    """Return {architecture: Counter of the kernels' hashes}, and the version of nvcc.

    Return {} and None for a file without kernels.
    """
    found, version = {}, None
    with open(path, "rb") as file:
        if not file.seek(0, 2):
            return found, version
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for architecture, image in _images(mapped):
                for name, contents in _sections(image):
                    if name.startswith(".text."):
                        digest = hashlib.sha256(contents).hexdigest()
                        found.setdefault(architecture, collections.Counter())[digest] += 1
                    elif name.startswith(".note.nv.tkinfo") and (tools := TOOLS.search(contents)):
                        version = tools.group(1).decode()
    return found, version


def whole(hashes):
    """Return one hash of a multiset of kernels."""
    return hashlib.sha256("\n".join(sorted(hashes.elements())).encode()).hexdigest()[:16]


def units(build):
    """Return {path in the build folder: {architecture: Counter}} of the objects with kernels."""
    build = pathlib.Path(build)
    if build.is_file():
        return {"": kernels(build)[0]}
    found = {str(path.relative_to(build)): kernels(path)[0] for path in sorted(build.rglob("*.o"))}
    return {name: of for name, of in found.items() if of}


def differences(first, second):
    """Return a line for each unit whose kernels differ."""
    lines = []
    for name in sorted({*first, *second}):
        if name not in first or name not in second:
            lines.append(f"{name}: only in the {'first' if name in first else 'second'} build")
            continue
        for architecture in sorted({*first[name], *second[name]}):
            one, other = (
                of[name].get(architecture, collections.Counter()) for of in (first, second)
            )
            if one != other:
                lines.append(
                    f"{name}: {(one - other).total()} of {one.total()} kernels for "
                    f"{architecture} differ from {(other - one).total()} of {other.total()}"
                )
    return lines


def compare(first, second):
    """Print the differences and return the exit status."""
    found = units(first), units(second)
    for build, of in zip((first, second), found):
        if not any(of.values()):
            raise Unreadable(f"{build} contains no kernels")
    lines = differences(*found)
    count = sum(hashes.total() for of in found[1].values() for hashes in of.values())
    print(
        "\n".join([*lines, f"{len(lines)} differences in {len(found[1])} units, {count} kernels"])
    )
    return int(bool(lines))


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=pathlib.Path, nargs="?")
    parser.add_argument("--units", type=pathlib.Path, nargs=2, metavar=("BUILD_A", "BUILD_B"))
    args = parser.parse_args(argv)
    if (args.file is None) == (args.units is None):
        parser.error("expected a file, or --units with two builds")
    try:
        if args.units:
            return compare(*args.units)
        found, version = kernels(args.file)
        if not found:
            raise Unreadable(f"{args.file} contains no kernels")
    except (OSError, Unreadable) as error:
        sys.exit(f"kernel_hash.py: error: {error}")
    for architecture, hashes in sorted(found.items()):
        print(f"{architecture}: {whole(hashes)}, {hashes.total()} kernels, nvcc {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
