"""scripts/kernel_hash.py on files that are put together here: what counts, two builds compared."""

import contextlib
import ctypes
import io
import pathlib
import struct
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import kernel_hash  # noqa: E402

TOOLS = b"Cuda compilation tools, release 13.0, V13.0.88\0"
GOOD = {".text._Z1a": b"first instructions", ".text._Z1b": b"second"}


def image(sections):
    """An ELF image: a header, the sections' contents, their names, the table of sections."""
    contents, names, table = b"", b"\0.shstrtab\0", [struct.pack("<IIQQQQ16x8x", *[0] * 6)]
    for name, data in sections.items():
        table.append(
            struct.pack("<IIQQQQ16x8x", len(names), 1, 0, 0, 64 + len(contents), len(data))
        )
        names += name.encode() + b"\0"
        contents += data
    table.append(struct.pack("<IIQQQQ16x8x", 1, 3, 0, 0, 64 + len(contents), len(names)))
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\2\1\1",
        2,
        190,
        1,
        0,
        0,
        64 + len(contents) + len(names),
        0,
        64,
        56,
        0,
        64,
        len(table),
        len(table) - 1,
    )
    return header + contents + names + b"".join(table)


def compressed(data):
    zstd = kernel_hash.zstd()
    zstd.ZSTD_compressBound.restype = zstd.ZSTD_compress.restype = ctypes.c_size_t
    room = zstd.ZSTD_compressBound(ctypes.c_size_t(len(data)))
    packed = ctypes.create_string_buffer(room)
    size = zstd.ZSTD_compress(packed, ctypes.c_size_t(room), data, ctypes.c_size_t(len(data)), 3)
    return packed.raw[:size]


def fatbin(*entries, architecture=90):
    """A binary of (kind, payload, compressed)."""
    body = b""
    for kind, data, packed in entries:
        padding = b"\0" * (-len(data) % 8)
        body += (
            struct.pack(
                "<HHIQI8xI32x",
                kind,
                0x101,
                64,
                len(data + padding),
                len(data) if packed else 0,
                architecture,
            )
            + data
            + padding
        )
    return kernel_hash.FATBIN + struct.pack("<HHQ", 1, 16, len(body)) + body


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def write(self, name, *parts):
        """A file of the host with fatbins in it."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x7fELF of the host".ljust(512) + b"".join(parts) + b"more")
        return file

    def run_it(self, *words):
        """(exit status, what it printed)"""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = kernel_hash.main([str(word) for word in words])
        return status, printed.getvalue()


def built(sections, **more):
    return fatbin((2, image({**sections, ".note.nv.tkinfo": TOOLS, **more}), False))


class Hash(Folder):
    def of(self, *parts):
        found, _ = kernel_hash.kernels(self.write("program", *parts))
        return {architecture: kernel_hash.whole(hashes) for architecture, hashes in found.items()}

    def test_instructions_alone_count(self):
        good = self.of(built(GOOD))
        renamed = {".text._Z_0123abcd_1a": GOOD[".text._Z1a"], ".text._Z1b": b"second"}
        self.assertEqual(self.of(built(renamed)), good)
        self.assertEqual(self.of(built(dict(reversed(GOOD.items())))), good, "their order")
        self.assertEqual(self.of(built(GOOD, **{".nv.info": b"/some/path"})), good)
        for name in GOOD:
            self.assertNotEqual(self.of(built({**GOOD, name: GOOD[name][:-1] + b"!"})), good)
        self.assertNotEqual(self.of(built({**GOOD, ".text._Z1c": b"second"})), good, "once more")

    def test_compression_and_place_do_not_count(self):
        whole = image({**GOOD, ".note.nv.tkinfo": TOOLS})
        halves = [image({name: data}) for name, data in GOOD.items()]
        good = self.of(fatbin((2, whole, False)))
        self.assertEqual(self.of(fatbin((2, compressed(whole), True))), good)
        self.assertEqual(self.of(*(fatbin((2, half, False)) for half in halves)), good)
        self.assertEqual(self.of(fatbin((1, b"some PTX", False), (2, whole, False))), good)
        self.assertEqual(self.of(kernel_hash.FATBIN + b"a constant", built(GOOD)), good)

    def test_each_architecture_has_its_own(self):
        good = self.of(built(GOOD))
        older = fatbin((2, image({".text._Z1a": b"of 8.0"}), False), architecture=80)
        both = self.of(older, built(GOOD))
        self.assertEqual((sorted(both), both[90]), ([80, 90], good[90]))

    def test_is_printed(self):
        status, said = self.run_it(self.write("program", built(GOOD)))
        self.assertEqual(status, 0)
        self.assertRegex(said, r"\A90: [0-9a-f]{16}, 2 kernels, nvcc 13\.0\.88\n\Z")

    def test_files_without_kernels_and_unreadable_ones_are_errors(self):
        for parts, why in (
            ((), "contains no kernels"),
            ([fatbin((2, b"LZ4 of some kind", True))], "not compressed with zstd"),
        ):
            with self.assertRaisesRegex(SystemExit, why):
                self.run_it(self.write("program", *parts))
        with self.assertRaisesRegex(SystemExit, "No such file"):
            self.run_it(self.folder / "none")


class Units(Folder):
    def test_builds_are_compared_by_object(self):
        for build in "ab":
            self.write(f"{build}/src/up.cu.o", built(GOOD))
            self.write(f"{build}/src/down.cu.o", built({".text._Z1d": b"third"}))
            self.write(f"{build}/src/host.cpp.o")
            self.write(f"{build}/all.so", built(GOOD))
        builds = "--units", self.folder / "a", self.folder / "b"
        self.assertEqual(self.run_it(*builds), (0, "0 differences in 2 units, 3 kernels\n"))

        self.write(
            "b/src/up.cu.o", built({"_": b"", ".text._Zq": b"second", ".text._Zr": b"other"})
        )
        status, said = self.run_it(*builds)
        self.assertEqual(status, 1)
        self.assertIn("src/up.cu.o: 1 of 2 kernels for 90 differ from 1 of 2\n", said)
        self.assertNotIn("down", said)

        self.write("b/src/up.cu.o", built({**GOOD, ".text._Z1c": b"second"}))
        self.assertIn(
            "src/up.cu.o: 0 of 2 kernels for 90 differ from 1 of 3\n", self.run_it(*builds)[1]
        )
        self.write("b/src/up.cu.o", built(GOOD))
        self.write("b/src/new.cu.o", built(GOOD))
        self.assertIn("src/new.cu.o: only in the second build\n", self.run_it(*builds)[1])

    def test_two_files(self):
        one, other = self.write("a.so", built(GOOD)), self.write("b.so", built(GOOD))
        self.assertEqual(self.run_it("--units", one, other)[0], 0)
        self.write("b.so", built({".text._Z1a": b"first instructions"}))
        self.assertEqual(self.run_it("--units", one, other)[0], 1)

    def test_a_folder_without_kernels_is_an_error(self):
        self.write("a/up.cu.o", built(GOOD))
        self.write("b/host.o")
        with self.assertRaisesRegex(SystemExit, "b contains no kernels"):
            self.run_it("--units", self.folder / "a", self.folder / "b")


if __name__ == "__main__":
    unittest.main()
