"""scripts/gpu/measure.py on stand-ins for the GPU and the programs: what it measures, skips, resumes
and merges. Without torch."""

import contextlib
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
import zipfile

from gpu_machine import StandIns
from processes import text_of, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEASURE = ROOT / "scripts" / "gpu" / "measure.py"
sys.path += [str(MEASURE.parent), str(ROOT / "python" / "tilemoe" / "bench")]
import measure
import parts
import records
import rehash
import stages

# Installs wheels; the tests of run.py use pip itself, which takes three seconds.
PIP = """import sys, zipfile
at = sys.argv.index("--target")
for wheel in sys.argv[at + 2:]:
    zipfile.ZipFile(wheel).extractall(sys.argv[at + 1])
"""

# tilemoe_kernels: one line in the file of its last argument, named after the layer.
WRITES = """for file; do :; done
[ -e "$0.fails-$3" ] && exit 3
[ -e "$0.waits-$3" ] && sleep 50
echo '{"name": "kernels/'$3'/forward", "device": "Stand-in", "versions": {}, "commit": "0123abcd", "values": {"ms": 1}}' >"$file"
echo chose a tile for $3"""


class Measure(StandIns):
    def setUp(self):
        super().setUp()
        self.program("tilemoe_kernels", WRITES)
        self.made = self.wheel("tilemoe")
        self.results = self.folder / "results"
        self.results.mkdir()

    def command(self, *arguments):
        return [sys.executable, MEASURE, "--programs", self.folder / "programs", "--wheel",
                self.made, "--work", self.folder / "work", "--out", self.folder / "out",
                "--results", self.results, *arguments]

    def environment(self):
        (self.folder / "here").mkdir(exist_ok=True)
        (self.folder / "here" / "torch.py").touch()  # only to be found
        (self.folder / "here" / "pip.py").write_text(PIP)
        return {**os.environ, "PATH": f"{self.folder / 'tools'}:/usr/bin:/bin",
                "PYTHONPATH": str(self.folder / "here")}

    def run_parts(self, *arguments, out=True):
        if out:
            shutil.rmtree(self.folder / "out", ignore_errors=True)  # as a new machine
        return subprocess.run(self.command(*arguments), text=True, capture_output=True, timeout=90,
                              env=self.environment())

    def lines(self, file="out/measured.jsonl"):
        return records.read(self.folder / file)

    def merge(self):
        said = self.run_parts("--merge", self.folder / "out" / "measured.jsonl", out=False)
        self.assertEqual(said.returncode, 0, said.stderr)
        return said.stdout

    def marker(self, kind, layer):
        return self.folder / "programs" / f"tilemoe_kernels.{kind}-{layer}"

    def test_measures_merges_and_is_current(self):
        said = self.run_parts("kernels")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        names = [one.name for one in self.lines()]
        self.assertEqual(len(names), 16)
        self.assertIn("kernels/7b-n256-zipf/forward", names)
        for one in self.lines():
            self.assertEqual(one.values["item"], f"kernels/{one.name.split('/')[1]}")
            self.assertRegex(one.values["sources"], r"\A[0-9a-f]{10}\Z")
        self.assertIn("== kernels/olmoe: passed\nchose a tile for olmoe",
                      (self.folder / "out" / "log.txt").read_text())
        self.assertIn("kernels: current", self.merge())
        self.assertEqual(self.lines("results/kernels.jsonl"), self.lines())
        ran = self.runs_of("tilemoe_kernels")
        said = self.run_parts("kernels")
        self.assertIn("kernels: current", said.stderr)
        self.assertEqual(self.runs_of("tilemoe_kernels"), ran)
        self.assertRegex(self.run_parts("--list", "kernels").stdout, r"kernels\s.* current\n")
        changed = [records.Measurement(one.name, one.device, one.versions, one.commit,
                                       one.values | {"sources": "0123456789"})
                   for one in self.lines("results/kernels.jsonl")]
        records.write(self.results / "kernels.jsonl", changed)
        self.assertIn("0 of 16 items are current; lines of 0123abc",
                      self.run_parts("--list", "kernels").stdout)
        self.run_parts("--again", "kernels")
        self.assertEqual(self.runs_of("tilemoe_kernels"), 2 * ran)

    def test_repeats_only_what_failed(self):
        self.marker("fails", "olmoe").touch()
        said = self.run_parts("kernels")
        self.assertEqual(said.returncode, 1)
        self.assertIn("kernels, olmoe: exit status 3", said.stdout)
        self.assertIn("kernels: 15 of 16 items are current", self.merge())
        self.marker("fails", "olmoe").unlink()
        ran = self.runs_of("tilemoe_kernels")
        self.assertEqual(self.run_parts("kernels").returncode, 0)
        self.assertEqual(self.runs_of("tilemoe_kernels"), ran + 1)
        self.assertIn("kernels: current", self.merge())
        names = [one.name.split("/")[1] for one in self.lines("results/kernels.jsonl")]
        self.assertEqual(names.index("olmoe"), 4, "the part's order, not that of the runs")

    def test_an_interruption_keeps_what_was_measured(self):
        self.marker("waits", "olmoe").touch()
        with subprocess.Popen(self.command("kernels"), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=self.environment()) as command:
            until(lambda: text_of(self.folder / "out" / "log.txt").count("passed") == 4)
            command.terminate()
            self.assertEqual(command.wait(timeout=20), 128 + signal.SIGTERM)
        self.assertEqual(len(self.lines()), 4)
        self.assertIn("kernels: 4 of 16 items are current", self.merge())
        self.marker("waits", "olmoe").unlink()
        self.run_parts("kernels")
        self.assertEqual(len(self.lines()), 12)
        self.assertIn("kernels: current", self.merge())

    def test_older_lines_go_when_the_part_is_complete(self):
        older = [records.Measurement(f"kernels/{layer}/forward", "a GPU", {}, "0abcdef", {"ms": 2})
                 for layer in ("olmoe", "of-no-item")]
        other = records.Measurement("gemm/olmoe", "a GPU", {}, "0abcdef", {"ms": 2})
        records.write(self.results / "kernels.jsonl", [*older, other])
        self.assertIn("lines of 0abcdef", self.run_parts("--list", "kernels").stdout)
        self.marker("fails", "wide").touch()
        self.run_parts("kernels")
        self.merge()
        found = {one.name: one for one in self.lines("results/kernels.jsonl")}
        self.assertEqual(found["kernels/olmoe/forward"].values["ms"], 1)
        self.assertIn("kernels/of-no-item/forward", found)
        self.marker("fails", "wide").unlink()
        self.run_parts("kernels")
        self.assertIn("1 older lines were removed", self.merge())
        found = {one.name for one in self.lines("results/kernels.jsonl")}
        self.assertEqual(len(found), 17)
        self.assertIn("gemm/olmoe", found, "it is not the part's")

    def test_a_part_without_time_is_not_started(self):
        said = self.run_parts("--seconds", "30", "kernels", "routing")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("kernels: not started: 160 s expected", said.stderr)
        self.assertIn("  routing: ", said.stderr)
        self.assertEqual({one.values["item"] for one in self.lines()}, {"routing/routing"})

    def test_a_part_with_half_of_its_time_is_started(self):
        said = self.run_parts("--seconds", "100", "kernels")
        self.assertIn("kernels: 160 s expected", said.stderr)
        self.assertEqual(len(self.lines()), 16)

    def test_says_what_is_missing(self):
        said = self.run_parts("peers")
        self.assertEqual(said.returncode, 1)
        self.assertIn("peers, olmoe: skipped: --peers has no folder sonic-moe", said.stdout)
        said = self.run_parts("ranks")
        self.assertIn("ranks, pull: skipped: this", said.stdout)
        self.assertIn("part must be one of", self.run_parts("nothing").stderr)
        with zipfile.ZipFile(self.made, "a") as archive:
            archive.writestr("tilemoe/commit.txt", "7654321\n")
        said = self.run_parts("kernels")
        self.assertIn("the wheel is of commit 7654321, the programs are of 0123abcd", said.stderr)

    def test_measures_chosen_items(self):
        said = self.run_parts("kernels/olmoe", "kernels/wide", "routing")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        self.assertIn("kernels: 20 s expected", said.stderr)
        self.assertEqual({one.values["item"] for one in self.lines()},
                         {"kernels/olmoe", "kernels/wide", "routing/routing"})
        self.assertIn("kernels: 2 of 16 items are current", self.merge())
        self.assertIn("kernels: current", self.run_parts("kernels/olmoe").stderr)
        self.assertIn("item of kernels must be one of 7b-n256, ", self.run_parts("kernels/x").stderr)
        self.program("cuda_pdl_test", "exit 1")  # the items depend on the programs
        said = self.run_parts("test/cuda_pdl_test")
        self.assertIn("test, cuda_pdl_test: exit status 1", said.stdout)
        self.gpus(2)
        said = self.run_parts("fsdp/7b-8-gpus-shared-experts")  # of a machine with eight GPUs
        self.assertIn("on this machine, item of fsdp must be one of 7b-2-gpus, ", said.stderr)
        said = self.run_parts("fsdp/7b-2-gpus-shared-experts")
        self.assertIn("fsdp: 60 s expected", said.stderr)
        self.run_parts("--side-by-side", "kernels/gpt-oss-20b")
        self.assertEqual({one.values["item"] for one in self.lines("out/kernels/measured.jsonl")},
                         {"kernels/gpt-oss-20b"})

    def test_peers_are_in_site_packages(self):
        said = self.run_parts("--peers", self.folder, "kernels")
        self.assertEqual(said.returncode, 2)
        self.assertIn("--peers must be in a folder named site-packages", said.stderr)

    def test_side_by_side(self):
        self.gpus(2)
        said = self.run_parts("--side-by-side", "kernels", "routing", "ranks")
        self.assertEqual(said.returncode, 1, said.stderr)
        self.assertIn("ranks, fp8-shards: exit status 1", said.stdout)  # after the parts of one GPU
        self.assertNotIn("kernels", said.stdout)
        for part, gpu, items in (("kernels", 0, 16), ("routing", 1, 1)):
            self.assertIn(f"{part}: {parts.PARTS[part].seconds} s expected, on GPU {gpu}", said.stderr)
            self.assertEqual(len(self.lines(f"out/{part}/measured.jsonl")), items)
            self.assertTrue((self.folder / "work" / f"gpu-{gpu}" / part).is_dir())
        files = sorted((self.folder / "out").glob("*/measured.jsonl"))
        self.assertIn("kernels: current", self.run_parts("--merge", *files, out=False).stdout)
        self.assertIn("kernels: current", self.run_parts("--side-by-side", "kernels").stderr)

    def test_side_by_side_says_what_failed(self):
        self.gpus(2)
        self.marker("fails", "olmoe").touch()
        said = self.run_parts("--side-by-side", "--seconds", "70", "kernels", "routing")
        self.assertIn("kernels: not started: 160 s expected", said.stderr)
        self.assertEqual(said.returncode, 0, said.stdout)
        said = self.run_parts("--side-by-side", "kernels")
        self.assertEqual((said.returncode, said.stdout), (1, "kernels, olmoe: exit status 3\n"))

    def test_side_by_side_ends_with_its_programs(self):
        self.gpus(2)
        self.marker("waits", "olmoe").touch()
        with subprocess.Popen(self.command("--side-by-side", "kernels"), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=self.environment()) as command:
            log = self.folder / "out" / "kernels" / "log.txt"
            until(lambda: text_of(log).count("passed") == 4)
            command.terminate()
            command.wait(timeout=20)
        until(lambda: not subprocess.run(["pgrep", "-f", self.folder / "programs"]).returncode == 0)

    def test_prepares_next_to_a_command_that_measures(self):
        self.run_parts("routing")
        self.assertEqual(self.run_parts("--prepare", "kernels", out=False).returncode, 0)
        self.assertEqual({one.values["item"] for one in self.lines()}, {"routing/routing"})
        self.assertTrue((self.folder / "out" / "prepare" / "log.txt").exists())

    def test_the_time_of_what_is_left(self):
        self.marker("fails", "olmoe").touch()
        self.run_parts("kernels")
        self.merge()
        self.assertIn("kernels: 10 s expected", self.run_parts("kernels").stderr)
        self.assertIn("kernels: 160 s expected", self.run_parts("--again", "kernels").stderr)

    def test_the_last_of_two_measurements_is_merged(self):
        self.run_parts("routing")
        first, (one,) = self.folder / "out" / "measured.jsonl", self.lines()
        later = self.folder / "later.jsonl"
        records.write(later, [records.Measurement(one.name, one.device, one.versions, one.commit,
                                                  one.values | {"ms": 2})])
        self.run_parts("--merge", first, later, out=False)
        self.assertEqual([found.values["ms"] for found in self.lines("results/routing.jsonl")], [2])

    def test_steps_need_no_wheel(self):
        command = self.command("routing")
        at = command.index("--wheel")
        said = subprocess.run(command[:at] + command[at + 2 :], text=True, capture_output=True,
                              timeout=60, env=self.environment())
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual({one.values["item"] for one in self.lines()}, {"routing/routing"})

    def test_several_gpus_have_their_own_parts(self):
        for gpus, word, other in ((1, "kernels: ", "ranks: "), (2, "ranks: ", "kernels: ")):
            self.gpus(gpus)
            said = self.run_parts("--seconds", "0").stderr
            self.assertIn(f"\n{word}not started", said)
            self.assertNotIn(f"\n{other}", said)


def temporary(test):
    """A folder that is removed after the test."""
    folder = tempfile.TemporaryDirectory()
    test.addCleanup(folder.cleanup)
    return pathlib.Path(folder.name)


def with_imports(programs):
    """Return the programs, and the files of their folder that they import."""
    found, left = set(), set(programs)
    while left:
        file = left.pop()
        found.add(file)
        names = parts.re.findall(r"^(?:from|import) (\w+)", file.read_text(), parts.re.M)
        imported = {file.with_name(f"{name}.py") for name in names}
        left |= {one for one in imported if one.exists()} - found
    return found


class Sources(unittest.TestCase):
    def test_comments_do_not_count(self):
        code = lambda name, text: parts.without_comments(name, text)
        self.assertEqual(code("a.py", '"""Doc."""\nx = 1  # why\n\n# more\ndef f():\n    "s"\n    return "#"\n'),
                         'x = 1\ndef f():\nreturn "#"')
        self.assertEqual(code("a.h", "// why\nint x = 1;  // more\n\n#include <a>\n"),
                         "int x = 1;\n#include <a>")
        self.assertEqual(code("b.py", 'def f():\n    """One\n    two."""\n    g(\n        "kept",\n    )\n'),
                         'def f():\ng(\n"kept",\n)')

    def test_a_digest_is_of_code_that_runs_on_gpus(self):
        folder = temporary(self)
        for name in ("src/cuda/a.cu", "src/cpu/b.cpp"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text("int x;\n")
        patterns = ("src/**/*.cu", "src/**/*.cpp")
        first = parts.digest(patterns, folder)
        (folder / "src/cpu/b.cpp").write_text("int y;\n")
        (folder / "src/cuda/a.cu").write_text("int x;  // why\n")
        self.assertEqual(parts.digest(patterns, folder), first)
        (folder / "src/cuda/a.cu").write_text("int y;\n")
        self.assertNotEqual(parts.digest(patterns, folder), first)

    def test_an_exclamation_mark_leaves_files_out(self):
        folder = temporary(self)
        for name in ("a.py", "a_test.py", "b_test.py"):
            (folder / name).touch()
        names = lambda *patterns: {path.name for path in parts.matching(patterns, folder)}
        self.assertEqual(names("*.py", "!*_test.py"), {"a.py"})
        self.assertEqual(names("*.py", "!*_test.py", "b_test.py"), {"a.py", "b_test.py"})
        self.assertEqual(names("!*_test.py", "*.py"), {"a.py", "a_test.py", "b_test.py"})

    def test_results_stay_current_when_patterns_change(self):
        line = lambda item, sources: records.Measurement(item, "a GPU", {}, "0123456", {
            "item": item, "sources": sources})  # fmt: skip
        lines = [line("a/one", "old"), line("a/two", "older"), line("b/one", "old"), line("c/one", "old"),
                 records.Measurement("no item", "a GPU", {}, "0123456", {})]
        found, counts = rehash.rehashed(lines, {"a": "old", "b": "old", "c": "old"},
                                        {"a": "new", "c": "old"})
        self.assertEqual([one.values.get("sources") for one in found],
                         ["new", "older", "old", "old", None])
        self.assertEqual([one.name for one in found], [one.name for one in lines])
        self.assertEqual(counts, {"a": 1})

    def test_rehash_compares_checkouts(self):
        folder, results = temporary(self), temporary(self)
        for name in ("scripts", "python/tilemoe/bench", "examples/pretrain", "include", "src",
                     "benchmarks/kernels"):  # fmt: skip
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        there = folder / "scripts" / "gpu" / "parts.py"
        there.write_text(there.read_text().replace('STEPS = (*KERNELS, "benchmarks/kernels/*")',
                                                   "STEPS = KERNELS"))
        old = parts.digest(parts.KERNELS)
        new = parts.digest(parts.PARTS["kernels"].sources)
        self.assertNotEqual(old, new)
        records.write(results / "kernels.jsonl", [records.Measurement("x", "a GPU", {}, "0123456", {
            "item": "kernels/olmoe", "sources": old})])  # fmt: skip

        def hash_after():
            with contextlib.redirect_stdout(io.StringIO()) as said:
                rehash.main(folder, results)
            return records.read(results / "kernels.jsonl")[0].values["sources"], said.getvalue()

        (folder / "src" / "more.cpp").write_text("int more;")
        found, said = hash_after()
        self.assertEqual(found, old)
        self.assertIn("kernels: its files have changed\n", said)
        (folder / "src" / "more.cpp").unlink()
        found, said = hash_after()
        self.assertEqual(found, new)
        self.assertIn("kernels: 1 lines\n", said)

    def test_a_hash_is_of_all_that_a_program_imports(self):
        for name in ("sizes", "one-gpu-ranks", "ranks", "two-gpus"):
            part = parts.PARTS[name]
            items = part.items(parts.supposed(part), ROOT / "build" / "absent")
            words = {pathlib.Path(str(word)) for item in items for word in item.command}
            programs = {word for word in words if word.suffix == ".py" and stages.TESTS in word.parents}
            self.assertTrue(programs, name)
            self.assertLessEqual(with_imports(programs), parts.matching(part.sources), name)

    def test_every_pattern_names_files(self):
        for part in parts.PARTS.values():
            for pattern in part.sources:
                self.assertTrue(any(ROOT.glob(pattern.removeprefix("!"))), pattern)


class Spread(unittest.TestCase):
    """A part whose items run on several GPUs, after the helper."""

    # The helper is slow. Each item waits for the other, which runs on another GPU.
    HELPER = "sleep 0.3; touch made"
    ITEM = """[ -e made ] || exit 3
touch on-$CUDA_VISIBLE_DEVICES
for i in $(seq 100); do [ $(ls on-* | wc -l) = 2 ] && exit; sleep 0.1; done; exit 4"""

    def measured(self, gpus, left, items=("a", "b"), visible=None, min_s=None, **of_part):
        folder = temporary(self)
        report = lambda _: [records.Measurement("recipes/x", "a GPU", {}, "0123456", {})]

        def item(name):
            text = self.HELPER if name == "corpus" else self.ITEM
            words = ["sh", "-c", f"cd {folder}; {text}"]
            seconds = min_s or (5 if name == "corpus" else 15)
            return stages.Item(name, words, 20, report, min_s=seconds)

        part = parts.Part("recipes", "recipes", 9, ("pyproject.toml",),
                          lambda *_: [item(name) for name in ("corpus", *items)], parts.KEPT,
                          **of_part)
        machine = types.SimpleNamespace(gpus=[1] * gpus)
        facts = {"device": "a GPU", "versions": {}, "commit": "0123456", "gpus": []}
        output = measure.Output(folder / "out")
        self.addCleanup(output.log.close)
        failed = measure.measure(part, machine, facts, folder, measure.Results(folder), output,
                                 os.environ | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}),
                                 time.monotonic() + left, False)
        self.gpus = sorted(path.name for path in folder.glob("on-*"))
        return failed, {one.values["item"] for one in output.lines}

    def test_items_run_at_a_time_on_their_own_gpus(self):
        for visible, gpus in ((None, ["on-0", "on-1"]), ("3,2", ["on-2", "on-3"])):
            failed, measured = self.measured(2, 60, visible=visible, spreads=True)
            self.assertEqual(failed, [])
            self.assertEqual(measured, {"recipes/corpus", "recipes/a", "recipes/b"})
            self.assertEqual(self.gpus, gpus)

    def test_an_item_without_time_is_not_started(self):
        failed, measured = self.measured(2, 14, spreads=True)
        self.assertEqual(failed, [f"recipes, {one}: not started: the time is over" for one in "ab"])
        self.assertEqual(measured, {"recipes/corpus"})

    def test_an_item_that_the_time_ends_has_no_line(self):
        failed, measured = self.measured(1, 2, ("a",), min_s=1, spreads=True, keeps_status=True)
        self.assertEqual(failed, ["recipes, a: ended: the time is over"])
        self.assertEqual(measured, {"recipes/corpus"})

    def test_only_prepares(self):
        folder = temporary(self)
        words = lambda name: ["sh", "-c", f"touch {folder}/{name}"]
        part = parts.Part("recipes", "recipes", 9, ("pyproject.toml",), lambda *_: [
            stages.Item(name, words(name), 20, lambda _: {}) for name in ("corpus", "a")], parts.KEPT)
        output = measure.Output(folder / "out")
        self.addCleanup(output.log.close)
        facts = {"device": "a GPU", "versions": {}, "commit": "0123456", "gpus": []}
        measure.measure(part, types.SimpleNamespace(gpus=[1]), facts, folder, measure.Results(folder),
                        output, os.environ, time.monotonic() + 20, False, prepare=True)
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["corpus", "out", "recipes"])

    def test_a_part_knows_which_of_its_items_will_run(self):
        folder, wanted = temporary(self), []

        def items(machine, _):
            wanted.append(machine.wanted)
            return [stages.Item(name, ["true"], 20, lambda _: {}) for name in machine.wanted or "abc"]

        part = parts.Part("recipes", "recipes", 9, ("pyproject.toml",), items, parts.KEPT)
        machine = types.SimpleNamespace(gpus=[1], wanted=None)
        part = parts.only(part, ["a", "b"], machine)
        results = types.SimpleNamespace(current=lambda _: {"b"}, digest=lambda _: "0")
        facts = {"device": "a GPU", "versions": {}, "commit": "0123456", "gpus": []}
        output = measure.Output(folder / "out")
        self.addCleanup(output.log.close)
        for again, names in ((False, ["a"]), (True, ["a", "b"])):
            machine.wanted = ["of another part"]
            measure.measure(part, machine, facts, folder, results, output, os.environ,
                            time.monotonic() + 20, again)
            self.assertEqual(wanted[-1], names)


class Parts(unittest.TestCase):
    def items(self, part):
        return part.items(parts.supposed(part), pathlib.Path("absent"))

    def test_are_parts_of_the_results(self):
        for part in parts.PARTS.values():
            names = [item.name for item in self.items(part)]
            self.assertEqual(len(set(names)), len(names), part.name)
            self.assertTrue(measure.measuring(names), part.name)
            self.assertLessEqual(part.seconds, measure.PART_LIMIT_S)
            for item in self.items(part):
                self.assertLessEqual(item.limit_s, measure.PART_LIMIT_S)

    def test_own_different_lines(self):
        for file in sorted(measure.RESULTS.glob("*.jsonl")):
            owners = [one for one in parts.PARTS.values() if one.file == file.stem]
            for line in records.read(file) if owners else []:
                of = [one.name for one in owners if parts.re.match(one.owns, line.name)]
                self.assertLessEqual(len(of), 1, line.name)

    def test_the_first_twenty_minutes_are_the_peers_and_trainings(self):
        first, total = [], 0
        for part in parts.PARTS.values():
            total += part.seconds
            if total <= 1200 and part.gpus == 1:
                first.append(part.name)
        self.assertEqual(first[:3], ["peers", "rounding", "training"])
        timed = [one.seconds * one.calls for one in parts.PARTS.values()
                 if one.gpus == 1 and not one.keeps_status]
        self.assertLessEqual(sum(timed), 7300)

    def test_items_of_more_gpus_come_after_those_of_two(self):
        part = parts.PARTS["parallel"]
        line = lambda gpus: records.Measurement(f"a/{gpus}", "b", {}, "0123456",
                                                {"item": f"parallel/{gpus}-gpus-t4096"})
        other = records.Measurement("a", "b", {}, "0123456", {})
        found = measure.ordered(part, [line(4), line(2), other, line(8)])
        self.assertEqual([one.name for one in found], ["a", "a/2", "a/4", "a/8"])

    def line(self, name, **values):
        return records.Measurement(name, "a GPU", {}, "0123456", values)

    def test_lines_have_the_names_of_the_results(self):
        (one,) = parts.of_decode(self.line("bench/qwen3-235b-t16/tilemoe", forward_ms=[1.0, 2.0, 3.0]))
        self.assertEqual(one.name, "decode/qwen3-235b/T=16/tilemoe")
        self.assertEqual(one.values["forward_us"], [1e3, 2e3, 3e3])
        names = lambda found: [line.name for line in found]
        self.assertEqual(names(parts.of_release(self.line("bench/olmoe/sonic-moe"))),
                         ["release/olmoe/sonic-moe"])
        self.assertEqual(names(parts.of_archs(self.line("bench/olmoe/tilemoe"))),
                         ["archs/olmoe/tilemoe-sm90", "archs-scattermoe/olmoe/tilemoe-sm90"])
        self.assertEqual(names(parts.of_archs(self.line("bench/olmoe/scattermoe"))),
                         ["archs-scattermoe/olmoe/scattermoe"])
        of = lambda item, peer: names(parts.of_memory(self.line(f"bench/olmoe/{peer}", item=item)))
        self.assertEqual(of("memory/olmoe", "tilemoe"), ["memory-options/olmoe/tilemoe-dh-over-h"])
        self.assertEqual(of("memory/olmoe", "tilemoe-keeps-h"), ["memory-options/olmoe/tilemoe"])
        self.assertEqual(of("memory/blocks-4", "tilemoe"), ["memory-curve/olmoe/4"])

    def test_a_training_has_the_layers_that_fit(self):
        part = parts.PARTS["training"]
        machine = parts.supposed(part)
        layers = lambda: ["--layers" in item.command for item in part.items(machine, ROOT)[1:]]
        self.assertEqual(layers(), [True] * 4)
        for item in part.items(machine, ROOT)[1:]:
            self.assertEqual(item.command[item.command.index("--layers") + 1], "16")
        machine.gpus = [143771]
        self.assertEqual(layers(), [False] * 4)

    def test_a_training_on_either_gpu_is_current(self):
        part, folder = parts.PARTS["training"], temporary(self)
        results = measure.Results(folder)
        for own in parts.names_of(part):
            lines = [records.Measurement(name, "a GPU", {}, "0123456", {
                "item": f"training/{name}", "sources": results.digest(part)}) for name in own]
            records.write(folder / "pretrain.jsonl", lines[1:])  # the first one is the corpus
            self.assertEqual(measure.state(part, results), ("current", True))
            records.write(folder / "pretrain.jsonl", lines[2:])
            self.assertFalse(measure.state(part, results)[1])

    def test_trainings_that_are_no_longer_measured_are_removed(self):
        part, folder = parts.PARTS["training"], temporary(self)
        results = measure.Results(folder)
        line = lambda name, **values: records.Measurement(name, "a GPU", {}, "0123456", values)
        new = [line(name, item=f"training/{name}", sources=results.digest(part))
               for name in parts.names_of(part)[0][1:]]
        kept = [line("no item"), line("of another part", item="fsdp/x", sources="0")]
        records.write(folder / "pretrain.jsonl", [*kept, line("old", item="training/old", sources="0")])
        records.write(folder / "measured.jsonl", new)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            measure.merge([folder / "measured.jsonl"], results)
        self.assertIn("training: current; 1 older lines were removed", said.getvalue())
        found = {one.name for one in records.read(folder / "pretrain.jsonl")}
        self.assertEqual(found, {one.name for one in [*kept, *new]})

    def test_recipes_are_trained_by_seeds(self):
        part = parts.PARTS["recipes"]
        items = self.items(part)
        self.assertEqual([one.name for one in items[:5]],
                         ["corpus", *(f"S3-{of}-s0" for of in ("bf16", "grouped_mm", "fp8")),
                          "S3-bf16-s1"])
        self.assertEqual(len(items), 21)
        self.assertLessEqual(5 * (105 + 140 + 110 + 110) + part.calls * 80, part.calls * part.seconds)
        self.assertEqual(items[3].command[-2:], ["--runs", "S3-fp8-s0"])
        self.assertFalse(any(parts.ROOT in pathlib.Path(str(one)).parents
                             for one in items[0].command[-6:-4]), "a commit changes no pair")
        corpus = temporary(self) / "corpus"
        corpus.mkdir()
        (corpus / "manifest.json").touch()
        again = part.items(parts.supposed(part), corpus.parent)
        self.assertEqual([one.name for one in again], [one.name for one in items[1:]])

    def test_kernels_are_compiled_once(self):
        machine, folder = parts.supposed(parts.PARTS["peers"]), temporary(self)
        machine.cache = folder
        compiled = lambda *layers: parts.compiled_first(machine, ROOT, layers, "sonic-moe")
        machine.wanted = ["wide", "compile"]
        (item,) = compiled("olmoe", "wide", "off-tiles")
        self.assertIn("wide", item.command)
        self.assertNotIn("olmoe", item.command, "it is not wanted, or it is current")
        machine.wanted = ["compile"]
        self.assertEqual(compiled("olmoe", "wide", "off-tiles"), [])
        machine.wanted = None
        (item,) = compiled("olmoe", "wide", "off-tiles")
        (folder / "cache-sonic-moe").mkdir()
        with self.assertRaisesRegex(ValueError, "compiled for no layer"):
            item.report("  olmoe: skip sonic-moe: TypeError\n")
        item.report("  wide: sonic-moe compiled, 9 s\n  off-tiles: skip sonic-moe: a multiple of 8\n")
        (item,) = compiled("olmoe", "wide", "off-tiles")
        self.assertIn("olmoe", item.command)
        self.assertNotIn("wide", item.command)
        item.report("  olmoe: sonic-moe compiled, 3 s\n")
        self.assertEqual(compiled("olmoe", "wide", "off-tiles"), [])

    def test_packages_of_a_training_are_on_its_path(self):
        part = parts.PARTS["training"]
        machine = parts.supposed(part)
        folder = temporary(self)
        deeper = folder / "sonic-moe" / "nvidia_cutlass_dsl" / "dsl_packages"
        deeper.mkdir(parents=True)
        machine.peers = folder
        of = {item.name: item for item in part.items(machine, ROOT)}
        path = next(word for word in of["sonic-moe-half-8"].command
                    if str(word).startswith("PYTHONPATH="))
        self.assertTrue(path.endswith(f":{folder / 'sonic-moe'}:{deeper}"), path)
        cached = f"QUACK_CACHE_DIR={ROOT.parent / 'cache-sonic-moe' / 'quack'}"
        self.assertIn(cached, of["sonic-moe-half-8"].command)
        self.assertEqual(of["scattermoe-blocks-16"].missing, "--wheel was not given")


if __name__ == "__main__":
    unittest.main()
