"""The defects of our own kernels (simulator/mutants): that they are what the sources have, and what
is said of each."""

import argparse
import collections
import filecmp
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "simulator" / "mutants"
sys.path.insert(0, str(MUTANTS))
import mutants  # noqa: E402


def run(*arguments):
    return subprocess.run([sys.executable, MUTANTS / "mutants.py", *arguments], text=True,
                          capture_output=True)


class Defects(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = pathlib.Path(self.temporary.name)

    def source(self, text):
        """A tree with one file, in which calls are looked for."""
        for name in mutants.FOLDERS:
            (self.folder / mutants.CUDA / name).mkdir(parents=True, exist_ok=True)
        (self.folder / mutants.CUDA / "sm90" / "one.h").write_text(text)
        return [text[:d.begin] + "|" + text[d.begin:d.end] + "|" + text[d.end:]
                for d in mutants.dropped_calls(self.folder)]

    def test_finds_calls_that_are_statements(self):
        for text in ("void f() { |ptx::wgmma_fence()|; }", "if (a(b)) |__syncwarp()|;",
                     "x = 1;\n  |ring.wait_full(at)|;", "else |ptx::tma_store_wait_read<kSlots - 1>()|;",
                     "{ |Products::template wait<1>()|; }", "[&] { |ptx::barrier_arrive(g(x, 1), 2)|; }"):
            with self.subTest(text):
                self.assertEqual(self.source(text.replace("|", "")), [text])
        two = self.source("{ sync(); sync(); }")
        self.assertEqual(two, ["{ |sync()|; sync(); }", "{ sync(); |sync()|; }"])

    def test_finds_nothing_else(self):
        for text in ("void wait() {", "void sync();", "// a call: sync();", "x = slices.wait() + 1;",
                     "concept C = A<T> && requires(T t, int (*w)[2]) {\n  { T::k } -> int;\n  t.finish();\n};",
                     "#define S ; sync();", "nan = __syncthreads_or(nan);", "finish(f, D, tile);"):
            with self.subTest(text):
                self.assertEqual(self.source(text), [])
        self.assertEqual(len(self.source("void store() requires(kFloat) { sync(); }")), 1)

    def test_every_defect_is_of_the_sources(self):
        defects = mutants.all_defects()
        self.assertEqual(len({d.id for d in defects}), len(defects))
        kinds = collections.Counter(d.id.split("/")[0] for d in defects)
        self.assertGreaterEqual(kinds.pop("drop"), 90)
        self.assertGreaterEqual(len(kinds), 10)
        for kind, count in kinds.items():
            self.assertGreaterEqual(count, 3, kind)
        for defect in defects:
            text = (ROOT / defect.file).read_text()
            self.assertNotEqual(defect.applied_to(text), text, defect.id)

    def test_the_ordering_calls_of_the_kits_are_there(self):
        dropped = collections.Counter(
            mutants.line_of(d).split("(")[0].split("<")[0].split("::")[-1]
            for d in mutants.dropped_calls(ROOT) if "/sm90/" in str(d.file))
        text = "".join(path.read_text() for path in (ROOT / mutants.CUDA / "sm90").glob("*.h"))
        for name in ("fence_proxy_async", "wgmma_fence", "wgmma_commit", "tma_store_commit",
                     "mbarrier_arrive_expect_bytes", "barrier_sync", "__syncwarp"):
            self.assertEqual(dropped[name], mutants.statements_of(text).count(f"{name}("), name)

    def test_applies_to_a_copy(self):
        made = self.folder / "made"
        self.assertEqual(run("apply", "parity/full-sm80", made).returncode, 0)
        copied = [path for path in (made / "src").rglob("*") if path.is_file()]
        other = [path.relative_to(made).as_posix() for path in copied
                 if not filecmp.cmp(path, ROOT / path.relative_to(made), shallow=False)]
        self.assertEqual(other, ["src/cuda/sm80/ring.h"])
        self.assertIn("(at.barrier, at.parity ^ 1)", (made / other[0]).read_text())
        self.assertIn("is not empty", run("apply", "1", made).stderr)
        self.assertIn("no defect is called", run("apply", "no/such", self.folder / "x").stderr)

    def test_lists_by_pattern(self):
        lines = run("list", "cluster/*").stdout.splitlines()
        self.assertEqual(len(lines), 5)
        self.assertIn("ptx::cluster_sync();", lines[0])
        number = lines[0].split()[0]
        self.assertEqual(mutants.find(number).id, "cluster/not-waited-for")

    def verdict(self, script, cases=("a", "b"), seeds=3):
        program = self.folder / "simulate"
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        defect = mutants.find("cluster/not-told")
        return mutants.verdict(defect, program, argparse.Namespace(
            cases=list(cases), seeds=seeds, limit=1, device="sm90"))

    def test_a_finding_ends_the_search(self):
        said = self.verdict("""
            if [ "$1 $3 $5" = "b sm90 2" ]; then
              echo "$1, seed $5: WRONG, 3 findings, trace 1f, 0.1 s"
              echo "  H: too far"
              echo "read before it landed"
              echo "    at ring.h:64"
              exit 1
            fi
            echo "$1, seed $5: right, 0 findings, trace 1f, 0.1 s" """)
        self.assertEqual(said, {"defect": "cluster/not-told", "found": True, "wrong": False,
                                "case": "b", "seed": 2, "right": False,
                                "finding": "read before it landed at ring.h:64"})

    def test_wrong_output_is_no_finding(self):
        said = self.verdict('echo "$1, seed $5: WRONG, 0 findings, trace 1f, 0.1 s"; exit 1')
        self.assertEqual((said["found"], said["wrong"], said["case"], said["seed"]),
                         (False, True, "a", 1))

    def test_a_crash_or_a_hang_is_no_finding(self):
        for script, ended in (("kill -SEGV $$", "exit status -11"),
                              ("exec sleep 60", "not done in 1 s")):
            said = self.verdict(script, cases=["a"], seeds=1)
            self.assertFalse(said["found"])
            self.assertTrue(said["wrong"])
            self.assertIn(ended, said["ended"])

    def test_nothing_is_found_where_nothing_is(self):
        said = self.verdict('echo "$1, seed $5: right, 0 findings, trace 1f, 0.1 s"')
        self.assertEqual(said, {"defect": "cluster/not-told", "found": False, "wrong": False})


if __name__ == "__main__":
    unittest.main()
