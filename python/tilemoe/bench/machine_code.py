"""A hash of the kernels that a program or library carries: of their instructions, and of nothing
that a path, a date or a symbol's name decides. It is that of Hopper's kernels, which every number
in benchmarks/results was measured with: a rowwise kernel is there once more for 8.0, under the
same name, and that one does not count. Nor do kernels outside of tilemoe::cuda, such as sum_rows'
in tilemoe::exchange, which was no part of what those numbers measured. The products of the sm80 kit
have a hash of their own, of what they are for 8.0: a build may have them for Hopper too or not.
Needs nothing but Python and, for kernels that nvcc compressed, libzstd, which dpkg and rpm need
too.

nvcc keeps a kernel in three layers: a fatbin in the file, in it an ELF image for each
architecture, in that a section .text.KERNEL. Of the three, fatbins alone have no library that
reads them: cuobjdump is not on machines that run wheels, and prints every byte as text."""

import ctypes
import hashlib
import mmap
import re
import struct

FATBIN = struct.pack("<I", 0xBA55ED50)
ELF_IMAGE = 2  # a fatbin entry's kind; PTX is 1
ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
TOOLS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
HOPPER = 90  # of 9.0a, as a fatbin's entry has it
AMPERE = 80
OURS = "7tilemoe4cuda"  # tilemoe::cuda, mangled: the library's kernels, whoever links them
OF_SM80 = re.compile(rf"_ZNK?{OURS}4sm80\d")  # a kernel in tilemoe::cuda::sm80: of that kit's products


class Unreadable(Exception):
    """The file has kernels in a form that is not understood here."""


def _zstd():
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError as error:
        raise Unreadable(f"kernels are compressed, and there is no libzstd: {error}") from None
    library.ZSTD_getFrameContentSize.restype = ctypes.c_ulonglong
    library.ZSTD_decompress.restype = ctypes.c_size_t
    return library


def _decompressed(data):
    library, given = _zstd(), ctypes.c_size_t(len(data))
    size = library.ZSTD_getFrameContentSize(data, given)
    if size > 1 << 31:  # two values near 2^64 mean an error
        raise Unreadable("a compressed kernel does not tell its size")
    image = ctypes.create_string_buffer(size)
    if library.ZSTD_decompress(image, ctypes.c_size_t(size), data, given) != size:
        raise Unreadable("a compressed kernel is damaged")
    return image.raw


def _images(file):
    """(architecture, such as 90, and the ELF image, bytes) of all kernels in `file`'s fatbins."""
    at = file.find(FATBIN)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", file, at)
        end = at + header + size
        if version != 1 or header != 16 or end > len(file):
            at = file.find(FATBIN, at + 4)  # the constant of a program that reads fatbins, as this
            continue
        entry = at + header
        while entry < end:
            kind, header, size, packed, architecture = struct.unpack_from("<H2xIQI8xI", file, entry)
            data = file[entry + header : entry + header + (packed or size)]
            if kind == ELF_IMAGE:
                if data[:4] == ZSTD_FRAME:
                    data = _decompressed(data)
                if data[:4] != b"\x7fELF":
                    raise Unreadable("kernels are compressed in a way that is not zstd's")
                yield architecture, data
            entry += header + size
        at = file.find(FATBIN, end)


def _sections(image):
    """(name, contents) of an ELF image's sections, those that take no room in it left out."""
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_size) for i in range(count)]
    for name, kind, _, _, offset, size in headers:
        start = headers[names][4] + name
        text = image[start : image.index(b"\0", start)].decode()
        if kind != 8:  # SHT_NOBITS
            yield text, image[offset : offset + size]


def kernels(path):
    """-> {architecture: {mangled name: sha256 of its instructions, hexadecimal}} of the library's
    kernels, and the version of the nvcc that made them; {} and None where the file has none."""
    found, version = {}, None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for architecture, image in _images(mapped):
            for name, contents in _sections(image):
                if name.startswith(".text.") and OURS in name:
                    kernel = name.removeprefix(".text.")
                    digest = hashlib.sha256(contents).hexdigest()
                    found.setdefault(architecture, {})[kernel] = digest
                elif name.startswith(".note.nv.tkinfo") and (tools := TOOLS.search(contents)):
                    version = tools.group(1).decode()
    return found, version


def _whole(hashes):
    """Names do not count: those of internal linkage have the source's path in them."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()[:16]


def stamp(path):
    """What a results file keeps of the kernels in `path`: {"hash", "kernels": how many} of Hopper's,
    "sm80", the hash of that kit's products, None where they were not built for 8.0, and "nvcc"; or
    None where there are none for Hopper."""
    every, version = kernels(path)
    found = [one for name, one in every.get(HOPPER, {}).items() if not OF_SM80.match(name)]
    of_sm80 = [one for name, one in every.get(AMPERE, {}).items() if OF_SM80.match(name)]
    if not found:
        return None
    return {"hash": _whole(found), "kernels": len(found),
            "sm80": _whole(of_sm80) if of_sm80 else None, "nvcc": version}
