"""The defects of our own kernels (simulator/mutants): that they are what the sources have, and what
is said of each."""

import collections
import filecmp
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "simulator" / "mutants"
sys.path.insert(0, str(MUTANTS))
import builds  # noqa: E402
import defects  # noqa: E402
import gpu  # noqa: E402
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
        self.assertIn("(full(at), at.parity ^ 1)", (made / other[0]).read_text())
        self.assertIn("is not empty", run("apply", "1", made).stderr)
        self.assertIn("no defect is called", run("apply", "no/such", self.folder / "x").stderr)

    def test_lists_by_pattern(self):
        lines = run("list", "cluster/*").stdout.splitlines()
        self.assertEqual(len(lines), 5)
        self.assertIn("ptx::cluster_sync();", lines[0])
        number = lines[0].split()[0]
        self.assertEqual(defects.find(number).id, "cluster/not-waited-for")

    def test_names_and_hashes_stay_where_comments_change(self):
        self.source("// A call:\nvoid f() { sync();  sync(); }")
        names = [one.id for one in defects.dropped_calls(self.folder)]
        self.assertEqual(names, ["drop/sm90/one.h:sync", "drop/sm90/one.h:sync.2"])
        hashes = {builds.sources_hash("src", root=self.folder)}
        self.source("void f() {\n  sync();  // why\n  /* so */ sync();\n}")
        self.assertEqual([one.id for one in defects.dropped_calls(self.folder)], names)
        hashes.add(builds.sources_hash("src", root=self.folder))
        self.assertEqual(len(hashes), 1)
        self.source("void f() { sync(); ring.sync(); }")
        hashes.add(builds.sources_hash("src", root=self.folder))
        self.assertEqual(len(hashes), 2)


class WithPrograms(unittest.TestCase):
    """Stand-ins for packed programs."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.programs = self.folder / "programs"
        for name in ("bin", "lib"):
            (self.programs / name).mkdir(parents=True)

    def program(self, name, script, end=b""):
        file = self.programs / "bin" / name
        file.write_bytes(b"#!/bin/sh\n" + script.encode() + b"\n" + end)
        file.chmod(0o755)

    def built(self, *names, **other):
        (self.programs / "built.json").write_text(json.dumps({
            "commit": "abc", "compiler": "c++ 12, release 1, V1", "sources": "1", "products": "", **other,
            "defects": [{"id": name, "file": "src/cuda/x.h", "line": 1, "text": "sync()",
                         "hash": "h" + name} for name in names]}))

    def json(self):
        return json.loads((self.folder / "results.json").read_text())


class Search(WithPrograms):
    def search(self, script, cases=("a", "b"), seeds=3):
        self.program("tilemoe_simulate", script)
        places = [{"case": case, "device": "sm90"} for case in cases]
        result = search.NOTHING
        while counted := search.next_of(result, seeds, 2, 3):
            result = search.search_seed(
                lambda place, seed: search.simulate(self.programs, place, seed, 7, 1), places, result,
                counted)
        return result

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
        self.assertEqual(said["seeds"], 2)

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
        self.assertEqual((said["seeds"], said["ordered_seeds"]), (2, 3))

    def test_ordered_schedules_are_tried_where_others_gave_wrong_outputs(self):
        said = self.search("""
            [ "$5 $6 $7" = "2 --schedule in-step" ] && right=right || right=WRONG
            echo "$1, seed $5: $right, 3 findings, trace 1f, 0.1 s"
            echo "never written" """)
        self.assertEqual(said["found"]["right"], False)
        self.assertEqual(said["found_while_right"], {
            "case": "a", "device": "sm90", "schedule": "in-step", "seed": 2})
        self.assertEqual((said["seeds"], said["ordered_seeds"]), (2, 2))
        said = self.search('echo "$1, seed $5: WRONG, 1 findings, x"; echo "deadlock: x"')
        self.assertEqual(said["seeds"], 2)
        self.assertNotIn("ordered_seeds", said)

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
        def case(name, device, seconds, reached=("d",), right=True):
            return {"case": name, "device": device, "seconds": seconds, "right": right,
                    "findings": 0, "reached": list(reached)}

        surveyed = [case("d", "sm80", 4), case("c", "sm80", 3), case("b", "sm80", 2),
                    case("a", "sm80", 1), case("wrong", "sm80", 0.1, right=False),
                    case("elsewhere", "sm80", 9, reached=("e",)), case("a", "sm90", 1.5)]
        taken = [(place["case"], place["device"])
                 for place in search.places_of("d", surveyed, 2, 1)]
        self.assertEqual(taken, [("a", "sm80"), ("a", "sm90"), ("b", "sm80"), ("d", "sm80")])
        few = search.places_of("d", surveyed[2:4], 2, 1)
        self.assertEqual([place["case"] for place in few], ["a", "b"])
        quick = search.places_of("d", surveyed, 2, 1, "ordered_seeds")
        self.assertEqual([place["case"] for place in quick], ["a", "a", "b"])

    def test_takes_others_with_other_seeds(self):
        surveyed = [{"case": name, "device": "sm80", "seconds": seconds, "right": True,
                     "findings": 0, "reached": ["d"]} for seconds, name in enumerate("abcdefg")]
        taken = ["".join(place["case"] for place in search.places_of("d", surveyed, 2, seed))
                 for seed in (1, 2, 3, 4, 20)]
        self.assertEqual(taken, ["abg", "cdf", "ef", "adg", "bde"])

    def test_nothing_is_found_where_nothing_is(self):
        said = self.search('echo "$1, seed $5: right, 0 findings, trace 1f, 0.1 s"')
        self.assertEqual(said, {**search.NOTHING, "seeds": 3})

    # A simulator that comes by the places of defects 1 to 4, finds the first with the third seed, the
    # second beside a wrong output, and never ends with the fourth.
    SIMULATOR = """
        case "$*" in *--list*) echo "$1"; exit ;; esac
        [ -n "$TILEMOE_DEFECTS_REACHED" ] && printf '1\n2\n3\n4\n' >"$TILEMOE_DEFECTS_REACHED"
        echo "$TILEMOE_DEFECT $5" >>"$0.ran"
        [ "$TILEMOE_DEFECT" = 4 ] && exec sleep 60
        case "$TILEMOE_DEFECT $5" in
          "1 3") echo "$1, seed $5: right, 1 findings"; echo "never written at x.h:3" ;;
          2*) echo "$1, seed $5: WRONG, 1 findings"; echo "deadlock at x.h:4" ;;
          *) echo "$1, seed $5: right, 0 findings" ;;
        esac"""

    def run_search(self, *arguments):
        return run("run", "--programs", self.programs, "--json", self.folder / "results.json",
                   "--case", "a", "--device", "sm90", "--seeds", "4", "--jobs", "3", *arguments)

    def test_a_run_goes_on_where_another_ended(self):
        self.program("tilemoe_simulate", self.SIMULATOR)
        self.program("tilemoe_simulate_router", "exit 0")
        self.built("drop/1", "drop/2", "drop/3", "drop/4", "drop/elsewhere")
        said = self.run_search("--most-seconds", "3")
        self.assertEqual(said.returncode, 1, said.stderr)
        self.assertIn("4 defects, 2 found, 1 of them while the output was right; 1 left", said.stdout)
        found = self.json()["defects"]
        self.assertEqual(found["drop/1"]["found"]["seed"], 3)
        self.assertEqual(found["drop/2"]["seeds"], 3)
        self.assertEqual((found["drop/3"]["found"], found["drop/3"]["seeds"]), (None, 4))
        self.assertNotIn("drop/4", found)
        self.assertEqual((found["drop/elsewhere"]["reached"], found["drop/elsewhere"]["seeds"]),
                         (False, 0))
        ran = self.programs / "bin" / "tilemoe_simulate.ran"
        self.assertEqual(ran.read_text().count("0 1\n"), 1)  # the survey
        ran.unlink()
        said = self.run_search("--limit", "1")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual(sorted(set(ran.read_text().split("\n")) - {""}),
                         ["4 1", "4 2", "4 3", "4 4"])
        self.assertIn("not done in 1 s", self.json()["defects"]["drop/4"]["wrong"]["ended"])

    def test_what_was_found_stays_where_other_sources_change(self):
        self.program("tilemoe_simulate", self.SIMULATOR)
        self.program("tilemoe_simulate_router", "exit 0")
        self.built("drop/1", "drop/2", "drop/3", "drop/4")
        self.assertEqual(self.run_search("drop/[123]").returncode, 0)
        self.built("drop/1", "drop/2", "drop/3", "drop/4", sources="2")
        ran = self.programs / "bin" / "tilemoe_simulate.ran"
        ran.unlink()
        self.assertEqual(self.run_search("drop/[123]").returncode, 0)
        self.assertEqual({line.split()[0] for line in ran.read_text().splitlines()}, {"0", "3"})


class OnGpu(WithPrograms):
    SANITIZER = """
        tool=$2; shift 4
        "$@" >/dev/null
        number=$(tail -c 8 "$1" | od -An -tu4 -N4 | tr -d " ")
        case "$tool $number" in
          "racecheck 1"|"memcheck 4")
            echo "========= COMPUTE-SANITIZER"
            echo "========= Error: Race reported between Write access"
            echo "========= $2 SUMMARY: 1" ;;
        esac
        case "$tool $number" in
          "racecheck 1") echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)" ;;
          "memcheck 4") echo "========= ERROR SUMMARY: 2 errors" ;;
          racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)" ;;
          *) echo "========= ERROR SUMMARY: 0 errors" ;;
        esac"""
    # Right with 0 and 1, wrong with 2, hangs with 3, breaks with 4; 5 by the kit sm80 alone.
    CASES = """
        number=$(tail -c 8 "$0" | od -An -tu4 -N4 | tr -d " ")
        case "$number $TILEMOE_KIT" in
          2*|"5 sm80"|6*) echo "$2: WRONG"; echo "  dX: too far"; exit 1 ;;
          3*) exec sleep 60 ;;
          4*) echo "$2: an illegal access" >&2; exit 2 ;;
        esac
        echo "$2: right"; exit 0"""

    def setUp(self):
        super().setUp()
        self.tools = self.folder / "tools"
        self.tools.mkdir()
        for name, script in (("nvidia-smi", "echo 'Stand-in, 1.0'"),
                             ("compute-sanitizer", self.SANITIZER)):
            (self.tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.tools / name).chmod(0o755)
        words = switches.struct.pack("<4I", *switches.FOUND_BY[:2], 0, switches.FOUND_BY[2])
        self.program("tilemoe_cuda_cases", self.CASES, words)
        self.names = ["drop/right", "parity/wrong", "drop/hangs", "guard/breaks", "drop/sm80",
                      "drop/router", "drop/elsewhere", "drop/sm100"]
        self.built(*self.names)
        # The cases: a is quick, e takes longest; which defects' places each comes by, with which kit.
        reached = {"a sm90": "1 2 3", "a sm80": "1 5", "b sm90": "1 2 4", "c sm90": "2",
                   "c sm80": "5", "router-x sm90": "6"}
        self.program("tilemoe_cuda_places", """
            [ $# = 0 ] && { echo "a b c router-x"; exit; }
            [ $TILEMOE_KIT = auto ] && TILEMOE_KIT=sm90
            case "$2 $TILEMOE_KIT" in
              %s
            esac
            [ $2 = a ] || sleep 0.2
            [ $2 = c ] && sleep 0.3
            exit 0""" % "\n".join(f"'{place}') echo {numbers} >$TILEMOE_DEFECTS_REACHED ;;"
                                   for place, numbers in reached.items()))

    def run_gpu(self, *arguments):
        return subprocess.run(
            [sys.executable, MUTANTS / "mutants.py", "gpu", "--programs", self.programs,
             "--json", self.folder / "results.json", "--jobs", "4",
             "--limit", "2", "--tool-limit", "2", *arguments], text=True, capture_output=True,
            env={**os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}"})

    def outcomes(self):
        return {name: {what: one[what]["outcome"] for what in ("plain", *gpu.TOOLS) if what in one}
                for name, one in self.json()["defects"].items()}

    def test_tells_who_finds_what(self):
        said = self.run_gpu()
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        nothing = {tool: "nothing" for tool in gpu.TOOLS}
        self.assertEqual(self.outcomes(), {
            "drop/right": {"plain": "right", "racecheck": "found"},
            "parity/wrong": {"plain": "wrong", **nothing},
            "drop/hangs": {"plain": "hangs", "racecheck": "hangs"},
            "guard/breaks": {"plain": "error", **nothing, "memcheck": "found"},
            "drop/sm80": {"plain": "wrong", "racecheck": "nothing"},
            "drop/router": {"plain": "wrong", "racecheck": "nothing"},
            "drop/elsewhere": {}, "drop/sm100": {}})
        results = self.json()
        self.assertEqual((results["name"], results["driver_version"]), ("Stand-in", "1.0"))
        self.assertEqual(results["options"]["repeats"], 20)
        self.assertEqual(results["defects"]["drop/sm80"]["places"],
                         [{"case": "a", "kit": "sm80"}, {"case": "c", "kit": "sm80"}])
        self.assertEqual([place["case"] for place in results["defects"]["parity/wrong"]["places"]],
                         ["a", "c"])
        self.assertEqual(results["defects"]["drop/elsewhere"],
                         {"hash": "hdrop/elsewhere", "places": []})
        self.assertEqual(results["defects"]["parity/wrong"]["plain"]["text"], "dX: too far")
        self.assertEqual(results["defects"]["guard/breaks"]["memcheck"]["text"],
                         "Error: Race reported between Write access")

    def test_goes_on_where_it_was_cut_off(self):
        said = self.run_gpu("--most-seconds", "0.5")
        self.assertEqual(said.returncode, 1)
        self.assertIn("time is over", said.stdout)
        said = self.run_gpu()
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual(sum("racecheck" in one for one in self.outcomes().values()), 6)
        said = self.run_gpu()
        self.assertEqual((said.returncode, said.stderr), (0, ""))

    def test_what_is_asked_first(self):
        dropped, others = ["drop/a", "drop/b"], ["parity/a", "guard/b"]
        self.assertEqual(gpu.passes_of([*dropped, *others]),
                         [("plain", [*dropped, *others]), *((tool, others) for tool in gpu.TOOLS),
                          ("racecheck", dropped)])

    def test_does_not_use_what_is_wrong_without_a_defect(self):
        self.program("tilemoe_cuda_cases",
                     'case $2 in router*) exit 0;; *) echo "$2: WRONG"; exit 1;; esac',
                     (self.programs / "bin" / "tilemoe_cuda_cases").read_bytes()[-16:])
        said = self.run_gpu("drop/*")
        self.assertEqual(said.returncode, 1)
        self.assertIn("without a defect, a with sm90, plain: wrong", said.stderr)
        self.assertEqual([one for one, outcomes in self.outcomes().items()
                          if "plain" in outcomes],
                         ["drop/router"])


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


    def test_what_a_gpu_build_changes_is_in_the_sources(self):
        for file, edits in switches.BUILT_FOR_A_GPU.items():
            for old, _ in edits:
                self.assertIn(old, (ROOT / file).read_text(), file)

    def test_a_number_is_chosen_in_a_program(self):
        words = switches.struct.pack("<4I", *switches.FOUND_BY[:2], 0, switches.FOUND_BY[2])
        made = switches.program_with(258, b"ELF" + words + b"-" + words)
        self.assertEqual(made.count(b"\2\1\0\0" + words[12:]), 2)
        self.assertEqual(len(made), 36)
        with self.assertRaises(ValueError):
            switches.program_with(1, made)


class Page(unittest.TestCase):
    MADE = {"commit": "abc", "compiler": "c++ 12"}
    RESULTS = {
        "cases": [{"case": "a", "device": "sm80", "right": True, "findings": 0}],
        "defects": {
            "drop/sm80/x.h:wait": {
                **MADE, "seeds": 3, "file": "src/cuda/sm80/x.h", "line": 7, "text": "wait()", "reached": True,
                "found": {"case": "a", "device": "sm80", "seed": 2, "right": False,
                          "finding": "deadlock: nobody can go on kernel k, at    y.h:9 < z.h:1"},
                "found_while_right": None, "wrong": None},
            "parity/a": {
                **MADE, "seeds": 20, "file": "src/cuda/sm80/x.h", "line": 5, "text": "p ^ 1", "reached": True,
                "found": None, "found_while_right": None,
                "wrong": {"case": "a", "device": "sm80", "seed": 1, "ended": "exit status 1"}},
            "parity/b": {
                **MADE, "seeds": 20, "file": "src/cuda/sm80/y.h", "line": 5, "text": "p | 1", "reached": True,
                "found": None, "found_while_right": None, "wrong": None},
            "parity/c": {
                **MADE, "seeds": 3, "file": "src/cuda/sm80/z.h", "line": 5, "text": "q", "reached": True,
                "found": {"case": "a", "device": "sm80", "seed": 1, "right": False,
                          "finding": "never written: x at    y.h:2"},
                "found_while_right": {"case": "a", "device": "sm80", "seed": 2, "schedule": "in-step"},
                "wrong": None, "ordered_seeds": 2}}}

    def test_tells_what_was_found_and_what_not(self):
        text = page.text_of(self.RESULTS)
        for row in ("| a call dropped | 1 | 1 | 0 | 0 | 0 |",
                    "| a parity flipped | 3 | 1 | 1 | 1 | 1 |",
                    "| all | 4 | 2 | 1 | 1 | 1 |",
                    "| sm80/x.h:7 | `wait()` | deadlock | y.h:9 | a, sm80, 2 | wrong |",
                    "| sm80/x.h:5, parity/a | `p ^ 1` | wrong output alone |  |  | wrong |",
                    "| sm80/y.h:5, parity/b | `p \\| 1` | **nothing** |  |  | right |",
                    "| sm80/z.h:5, parity/c | `q` | never written | y.h:2 | a, sm80, 1 | right, in-step |"):
            self.assertIn(row, text)
        for words in ("no finding, outputs right", "Commit `abc`, c++ 12;", "up to 20 seeds",
                      "seeds; 1 are found"):
            self.assertIn(words, text)
        self.assertNotIn("On a GPU", text)

    def test_tells_why_nothing_is_found(self):
        lines = ["int a;  // other", "// (Neither of the two", "// is needed.)", "sync();", "f();",
                 "sync();  // read (shuffles", "         // would do)", "g();"]
        self.assertEqual(page.comment_at(lines, 3), "(Neither of the two is needed.)")
        self.assertEqual(page.comment_at(lines, 4), "(Neither of the two is needed.)")
        self.assertEqual(page.comment_at(lines, 5), "read (shuffles would do)")
        self.assertEqual(page.comment_at(["f();", "sync();"], 1), "")

    def test_tells_what_a_gpu_adds(self):
        def found(outcome):
            return {"outcome": outcome}

        of_gpu = {
            "commit": "def", "cuda": "Cuda compilation tools, release 13.0, V13.0.88",
            "name": "H100", "driver_version": "580", "without_a_defect": [found("right")],
            "defects": {
                "drop/sm80/x.h:wait": {"plain": found("right"), "racecheck": found("nothing")},
                "parity/a": {"plain": found("hangs"), "memcheck": found("found"),
                             "racecheck": found("hangs"), "initcheck": found("nothing"),
                             "synccheck": found("found")}}}
        text = page.text_of(self.RESULTS, of_gpu)
        for row in ("H100, driver 580, release 13.0 of nvcc, commit `def`;",
                    "| a call dropped | 1 | 1 | 0 |  | 0 of 1 |  |  | 1 |",
                    "| a parity flipped | 1 | 0 | 1 | 1 of 1 | 0 of 1 | 0 of 1 | 1 of 1 | 0 |",
                    "| a, sm80, 2 | wrong | right | nothing |",
                    "| wrong output alone |  |  | wrong | hangs | memcheck, synccheck |",
                    "| **nothing** |  |  | right |  |  |"):
            self.assertIn(row, text)

    def test_stands_between_its_lines(self):
        made = page.page_with("new\n", f"before\n{page.BEGIN}old\n{page.END}after\n")
        self.assertEqual(made, f"before\n{page.BEGIN}new\n{page.END}after\n")


if __name__ == "__main__":
    unittest.main()
