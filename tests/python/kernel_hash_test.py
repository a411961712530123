"""The hash of kernels (benchmarks/kernel_hash.py), on files that are put together here."""

import ctypes
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))
import machine_code  # noqa: E402

OURS = ".text._ZN7tilemoe4cuda"
TOOLS = b"Cuda compilation tools, release 13.0, V13.0.88\0"
GOOD = {OURS + "1aE": b"first instructions", OURS + "1bE": b"second"}


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
    zstd = machine_code._zstd()
    zstd.ZSTD_compressBound.restype = zstd.ZSTD_compress.restype = ctypes.c_size_t
    room = zstd.ZSTD_compressBound(ctypes.c_size_t(len(data)))
    packed = ctypes.create_string_buffer(room)
    size = zstd.ZSTD_compress(packed, ctypes.c_size_t(room), data, ctypes.c_size_t(len(data)), 3)
    return packed.raw[:size]


def fatbin(*entries, architecture=machine_code.HOPPER):
    """Of (kind, payload, compressed)."""
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
    return machine_code.FATBIN + struct.pack("<HHQ", 1, 16, len(body)) + body


class MachineCode(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def stamp(self, *parts):
        file = self.folder / "program"
        file.write_bytes(b"\x7fELF of the host".ljust(512) + b"".join(parts) + b"more")
        return machine_code.stamp(file)

    def of(self, sections, **more):
        tools = {".note.nv.tkinfo": TOOLS}
        return self.stamp(fatbin((2, image({**sections, **tools, **more}), False)))

    def test_instructions_alone_count(self):
        good = self.of(GOOD)
        self.assertEqual((good["kernels"], good["nvcc"]), (2, "13.0.88"))
        renamed = {OURS + "GLOBAL__N__0123abcd_1aE": GOOD[OURS + "1aE"], OURS + "1bE": b"second"}
        self.assertEqual(self.of(renamed), good)
        self.assertEqual(self.of(dict(reversed(GOOD.items()))), good, "their order")
        self.assertEqual(self.of(GOOD, **{".nv.info": b"/some/path", ".text._Z5other": b"x"}), good)
        for name in GOOD:
            changed = dict(GOOD)
            changed[name] = changed[name][:-1] + b"!"
            self.assertNotEqual(self.of(changed)["hash"], good["hash"])
        self.assertNotEqual(self.of({**GOOD, OURS + "1cE": b"second"})["hash"], good["hash"])

    def test_compression_and_place_do_not_count(self):
        whole = image({**GOOD, ".note.nv.tkinfo": TOOLS})
        halves = [image({name: data, ".note.nv.tkinfo": TOOLS}) for name, data in GOOD.items()]
        good = self.stamp(fatbin((2, whole, False)))
        self.assertEqual(self.stamp(fatbin((2, compressed(whole), True))), good)
        self.assertEqual(self.stamp(*(fatbin((2, half, False)) for half in halves)), good)
        self.assertEqual(self.stamp(fatbin((1, b"some PTX", False), (2, whole, False))), good)
        self.assertEqual(
            self.stamp(machine_code.FATBIN + b"a constant", fatbin((2, whole, False))), good
        )

    def test_kernels_of_another_architecture_do_not_count(self):
        tools = {".note.nv.tkinfo": TOOLS}
        hopper = fatbin((2, image({**GOOD, **tools}), False))
        good = self.stamp(hopper)
        ampere = {name: data + b" of 8.0" for name, data in GOOD.items()}
        older = fatbin((2, image({**ampere, **tools}), False), architecture=80)
        for order in ((older, hopper), (hopper, older)):
            self.assertEqual(self.stamp(*order), good, "the same names, other instructions")
        found, _ = machine_code.kernels(self.folder / "program")
        self.assertEqual({a: len(names) for a, names in found.items()}, {80: 2, 90: 2})
        self.assertIsNone(self.stamp(older))

    def test_products_of_the_sm80_kit_do_not_count(self):
        tools = {".note.nv.tkinfo": TOOLS}
        good = self.of(GOOD)
        hopper = fatbin((2, image({**GOOD, **tools}), False))
        of_sm80 = image({OURS + "4sm8012grouped_gemmE": b"for 9.0", **tools})
        self.assertEqual(self.stamp(hopper, fatbin((2, of_sm80, False))), good)
        self.assertNotEqual(
            self.of({**GOOD, OURS + "4sm9012grouped_gemmE": b"for 9.0"})["hash"], good["hash"]
        )

    def test_products_of_the_sm80_kit_have_their_hash_for_8_0(self):
        tools = {".note.nv.tkinfo": TOOLS}
        hopper = fatbin((2, image({**GOOD, **tools}), False))
        product = OURS + "4sm8012grouped_gemmE"

        def of_8_0(*parts):
            return fatbin((2, image(dict([*parts, *tools.items()])), False), architecture=80)

        self.assertIsNone(self.stamp(hopper)["sm80"])
        good = self.stamp(hopper, of_8_0((product, b"for 8.0")))
        self.assertRegex(good["sm80"], "^[0-9a-f]{16}$")
        self.assertEqual(self.stamp(hopper), {**good, "sm80": None})
        rowwise = (OURS + "12combine_rowsE", b"for 8.0")
        self.assertEqual(self.stamp(hopper, of_8_0((product, b"for 8.0"), rowwise)), good)
        for_hopper = fatbin((2, image({product: b"for 9.0", **tools}), False))
        self.assertEqual(self.stamp(hopper, for_hopper, of_8_0((product, b"for 8.0"))), good)
        self.assertNotEqual(self.stamp(hopper, of_8_0((product, b"changed")))["sm80"], good["sm80"])

    def test_without_kernels_and_unreadable(self):
        self.assertIsNone(self.stamp(b""))
        self.assertIsNone(self.of({".text._Z5other": b"x"}))
        with self.assertRaises(machine_code.Unreadable):
            self.stamp(fatbin((2, b"LZ4 of some kind", True)))

    def check(self, *options):
        return subprocess.run(
            [
                sys.executable,
                ROOT / "benchmarks" / "kernel_hash.py",
                self.folder / "program",
                "--current",
                self.folder / "current.json",
                *options,
            ],
            text=True,
            capture_output=True,
        )

    def test_check_tells_a_change_from_another_compiler(self):
        tools = {".note.nv.tkinfo": TOOLS}
        good = fatbin((2, image({**GOOD, **tools}), False))
        changed = fatbin((2, image({**GOOD, OURS + "1aE": b"changed", **tools}), False))
        product = OURS + "4sm8012grouped_gemmE"
        kit, changed_kit = (fatbin((2, image({product: code, **tools}), False), architecture=80)
                            for code in (b"for 8.0", b"changed"))
        self.stamp(good)
        said = self.check("--write")
        self.assertEqual(said.returncode, 1)
        self.assertIn("has no kernels for 8.0", said.stderr)
        self.stamp(good, kit)
        self.assertEqual(self.check("--write").returncode, 0)
        self.assertEqual(self.check("--check").returncode, 0)
        self.stamp(good)
        self.assertEqual(self.check("--check").returncode, 0, "a build without it")
        for parts in ((changed, kit), (good, changed_kit), (changed,)):
            self.stamp(*parts)
            said = self.check("--check")
            self.assertEqual(said.returncode, 1)
            self.assertIn("kernel_hash.py --write", said.stderr)
        current = json.loads((self.folder / "current.json").read_text())
        (self.folder / "current.json").write_text(json.dumps({**current, "nvcc": "12.9.1"}))
        said = self.check("--check")
        self.assertEqual(said.returncode, 77)
        self.assertIn("not checked: nvcc 13.0.88", said.stdout)


if __name__ == "__main__":
    unittest.main()
