"""The defects of our own kernels (simulator/mutants): that they are what the sources have, and what
is said of each."""

import collections
import filecmp
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "simulator" / "mutants"
sys.path.insert(0, str(MUTANTS))
import defects  # noqa: E402
import page  # noqa: E402
import search  # noqa: E402
import switches  # noqa: E402


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
        for name in defects.FOLDERS:
            (self.folder / defects.CUDA / name).mkdir(parents=True, exist_ok=True)
        (self.folder / defects.CUDA / "sm90" / "one.h").write_text(text)
        return [text[:d.begin] + "|" + text[d.begin:d.end] + "|" + text[d.end:]
                for d in defects.dropped_calls(self.folder)]

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
        known = defects.all_defects()
        self.assertEqual(len({d.id for d in known}), len(known))
        kinds = collections.Counter(d.id.split("/")[0] for d in known)
        self.assertGreaterEqual(kinds.pop("drop"), 90)
        self.assertGreaterEqual(len(kinds), 10)
        for kind, count in kinds.items():
            self.assertGreaterEqual(count, 3, kind)
        for defect in known:
            text = (ROOT / defect.file).read_text()
            self.assertNotEqual(defect.applied_to(text), text, defect.id)

    def test_the_ordering_calls_of_the_kits_are_there(self):
        dropped = collections.Counter(
            defects.line_of(d).split("(")[0].split("<")[0].split("::")[-1]
            for d in defects.dropped_calls(ROOT) if "/sm90/" in str(d.file))
        text = "".join(path.read_text() for path in (ROOT / defects.CUDA / "sm90").glob("*.h"))
        for name in ("fence_proxy_async", "wgmma_fence", "wgmma_commit", "tma_store_commit",
                     "mbarrier_arrive_expect_bytes", "barrier_sync", "__syncwarp"):
            self.assertEqual(dropped[name], defects.statements_of(text).count(f"{name}("), name)

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
        self.assertEqual(defects.find(number).id, "cluster/not-waited-for")

    def search(self, script, cases=("a", "b"), seeds=3):
        program = self.folder / "tilemoe_simulate"
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        places = [{"case": case, "device": "sm90"} for case in cases]
        return search.search(lambda place, seed: search.simulate(self.folder, place, seed, 7, 1),
                             places, seeds, 2)

    def test_a_finding_beside_a_right_output_ends_the_search(self):
        said = self.search("""
            if [ "$1 $3 $5 $TILEMOE_DEFECT" = "b sm90 2 7" ]; then
              echo "$1, seed $5: right, 3 findings, trace 1f, 0.1 s"
              echo "read before it landed"
              echo "    at ring.h:64"
              exit 1
            fi
            echo "$1, seed $5: right, 0 findings, trace 1f, 0.1 s" """)
        place = {"case": "b", "device": "sm90", "seed": 2}
        self.assertEqual(said["found"], {**place, "right": True,
                                         "finding": "read before it landed at ring.h:64"})
        self.assertEqual(said["found_while_right"], place)
        self.assertIsNone(said["wrong"])

    def test_a_finding_beside_a_wrong_output_is_looked_for_further(self):
        said = self.search("""
            [ "$5" = 1 ] && right=WRONG || right=right
            echo "$1, seed $5: $right, 3 findings, trace 1f, 0.1 s"
            [ "$5" = 1 ] && echo "  H: too far"
            echo "never written" """)
        self.assertEqual(said["found"]["finding"], "never written")
        self.assertEqual((said["found"]["seed"], said["found"]["right"]), (1, False))
        self.assertEqual(said["found_while_right"], {"case": "a", "device": "sm90", "seed": 2})
        said = self.search('echo "$1, seed $5: WRONG, 1 findings, x"; echo "never written"')
        self.assertIsNone(said["found_while_right"])

    def test_wrong_output_is_no_finding(self):
        said = self.search('echo "$1, seed $5: WRONG, 0 findings, trace 1f, 0.1 s"; exit 1')
        self.assertIsNone(said["found"])
        self.assertEqual(said["wrong"], {"case": "a", "device": "sm90", "seed": 1,
                                         "ended": "exit status 1"})

    def test_a_crash_or_a_hang_is_no_finding(self):
        for script, ended in (("kill -SEGV $$", "exit status -11"),
                              ("exec sleep 60", "not done in 1 s")):
            said = self.search(script, cases=["a"], seeds=1)
            self.assertIsNone(said["found"])
            self.assertIn(ended, said["wrong"]["ended"])

    def test_takes_the_quickest_cases_and_the_longest_that_come_by(self):
        def case(name, device, seconds, reached=(7,), right=True):
            return {"case": name, "device": device, "seconds": seconds, "right": right,
                    "findings": 0, "reached": list(reached)}

        surveyed = [case("d", "sm80", 4), case("c", "sm80", 3), case("b", "sm80", 2),
                    case("a", "sm80", 1), case("wrong", "sm80", 0.1, right=False),
                    case("elsewhere", "sm80", 9, reached=(8,)), case("a", "sm90", 1.5)]
        taken = [(place["case"], place["device"]) for place in search.places_of(7, surveyed, 2)]
        self.assertEqual(taken, [("a", "sm80"), ("a", "sm90"), ("b", "sm80"), ("d", "sm80")])
        few = search.places_of(7, surveyed[2:4], 2)
        self.assertEqual([place["case"] for place in few], ["a", "b"])

    def test_nothing_is_found_where_nothing_is(self):
        said = self.search('echo "$1, seed $5: right, 0 findings, trace 1f, 0.1 s"')
        self.assertEqual(said, {"found": None, "found_while_right": None, "wrong": None})


class Switches(unittest.TestCase):
    """Defects in one another's places, in a program that prints what it does."""
    SOURCE = """// A comment.
#include <cstdio>
static void sync(int n) { std::printf("%d ", n); }
static int twice(int n) { return n * 2; }
int main() {
  if (twice(1) == 2)
    sync(1);
  else
    sync(2);
  for (int i = 0; i < 2; ++i) {
    if (i == 1) continue;
    sync(3);
    sync(twice(2));
  }
  return 0;
}
"""

    def defect(self, name, old, new):
        begin = self.SOURCE.index(old)
        return defects.Defect(name, pathlib.Path("main.cpp"), begin, begin + len(old), new)

    def test_each_number_is_its_defect(self):
        given = [self.defect("drop/1", "sync(1)", "(void)0"),
                 self.defect("guard/no", "if (i == 1) continue;", ""),
                 self.defect("order/two", "sync(3);\n    sync(twice(2));",
                             "sync(twice(2));\n    sync(3);"),
                 self.defect("drop/3", "sync(3)", "(void)0"),
                 self.defect("value/a", "twice(2)", "twice(3)"),
                 self.defect("value/b", "twice(2)", "twice(4)"),
                 self.defect("value/c", "twice(1)", "1")]
        text = switches.with_switches(
            self.SOURCE, [(one, number) for number, one in enumerate(given, start=1)])
        self.assertEqual(text.count("\n"), self.SOURCE.count("\n"))
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "main.cpp"), pathlib.Path(folder, "main")
            source.write_text(text + switches.DEFINITION)
            subprocess.run([shutil.which("c++"), "-std=c++17", "-o", program,
                            source], check=True)
            expected = ["1 3 4 ", "3 4 ", "1 3 4 3 4 ", "1 4 3 ", "1 4 ", "1 3 6 ", "1 3 8 ",
                        "2 3 4 "]
            for number, words in enumerate(expected):
                said = subprocess.run(
                    [program], capture_output=True, text=True, check=True,
                    env={"TILEMOE_DEFECT": str(number), "TILEMOE_DEFECTS_REACHED": folder + "/r"})
                self.assertEqual(said.stdout, words, number)
                reached = pathlib.Path(folder, "r").read_text().split()
                self.assertIn(str(number or 1), reached)
            self.assertNotIn("9", reached)


class Page(unittest.TestCase):
    RESULTS = {
        "commit": "abc", "compiler": "c++ 12", "seeds": 20,
        "cases": [{"case": "a", "device": "sm80", "right": True, "findings": 0}],
        "defects": {
            "drop/sm80/x.h:7": {
                "file": "src/cuda/sm80/x.h", "line": 7, "text": "wait()", "reached": True,
                "found": {"case": "a", "device": "sm80", "seed": 2, "right": False,
                          "finding": "deadlock: nobody can go on kernel k, at    y.h:9 < z.h:1"},
                "found_while_right": None, "wrong": None},
            "parity/a": {
                "file": "src/cuda/sm80/x.h", "line": 5, "text": "p ^ 1", "reached": True,
                "found": None, "found_while_right": None,
                "wrong": {"case": "a", "device": "sm80", "seed": 1, "ended": "exit status 1"}},
            "parity/b": {
                "file": "src/cuda/sm80/y.h", "line": 5, "text": "p | 1", "reached": True,
                "found": None, "found_while_right": None, "wrong": None}}}

    def test_tells_what_was_found_and_what_not(self):
        text = page.text_of(self.RESULTS)
        for row in ("| a call dropped | 1 | 1 | 0 | 0 | 0 |",
                    "| a parity flipped | 2 | 0 | 0 | 0 | 1 |",
                    "| all | 3 | 1 | 0 | 0 | 1 |",
                    "| sm80/x.h:7 | `wait()` | deadlock | y.h:9 | a, sm80, 2 | wrong |",
                    "| sm80/x.h:5, parity/a | `p ^ 1` | wrong output alone |  |  | wrong |",
                    "| sm80/y.h:5, parity/b | `p \\| 1` | **nothing** |  |  | right |"):
            self.assertIn(row, text)
        self.assertIn("no finding, outputs right", text)

    def test_stands_between_its_lines(self):
        made = page.page_with("new\n", f"before\n{page.BEGIN}old\n{page.END}after\n")
        self.assertEqual(made, f"before\n{page.BEGIN}new\n{page.END}after\n")


if __name__ == "__main__":
    unittest.main()
