"""The results files, and what is written and drawn from them: docs/results.md, README.md's table
and pictures. Without torch."""

import pathlib
import re
import shutil
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import pictures  # noqa: E402
import results_page  # noqa: E402
from results_page import records  # noqa: E402

FILES = sorted(results_page.RESULTS.iterdir())
# Files that no table shows: a decision links to this one.
UNSHOWN = {"orders.jsonl"}
# By these a table chooses its rows.
CHOSEN_BY = {"layers", "processes"}


def bytes_in(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def changed(value):
    """The value of a measurement with other numbers."""
    if isinstance(value, list):
        return [changed(one) for one in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 2 * value + 1
    return value


class Copied(unittest.TestCase):
    """Runs with a copy of the results in place of them."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name) / "results"
        shutil.copytree(results_page.RESULTS, self.folder)
        patch = mock.patch.object(results_page, "RESULTS", self.folder)
        patch.start()
        self.addCleanup(patch.stop)

    def change(self, name, part=""):
        """Double the numbers of the measurements whose names start with `part`."""
        file = self.folder / name
        of = lambda one: {
            key: value if key in CHOSEN_BY else changed(value) for key, value in one.values.items()
        }
        records.write(
            file,
            [
                records.Measurement(
                    one.name,
                    one.device,
                    one.versions,
                    one.commit,
                    of(one) if one.name.startswith(part) else one.values,
                )
                for one in records.read(file)
            ],
        )


class Pages(Copied):
    def test_are_what_the_results_say(self):
        results_page.main(["--check"])
        pictures.main(["--check"])

    def test_every_file_is_shown(self):
        self.assertGreater(len(FILES), 10)
        for file in FILES:
            if file.name not in UNSHOWN:
                with self.subTest(file.name):
                    self.change(file.name)
                    with self.assertRaisesRegex(SystemExit, "results.md differs"):
                        results_page.main(["--check"])
                    shutil.copy(file, self.folder)
        results_page.main(["--check"])

    def test_has_few_words_that_nothing_generates(self):
        count = lambda text: sum(
            len(one.strip("# ").split())
            for one in text.split("\n\n")
            if not one.startswith(("|", "Measured "))  # tables, and the conditions below them
        )
        self.assertEqual(count("## A\n\nb c\n\n| d |\n\nMeasured on e\n"), 3)
        self.assertLessEqual(count(results_page.page()), 400)

    def test_each_measurement_has_its_conditions(self):
        for part in results_page.SECTIONS[1:-1]:
            with self.subTest(part.__name__):
                self.assertRegex(
                    part().replace("\n", " "),
                    r"\|  Measured .*commits? \w{7}.*\[`\w+\.jsonl`\]",
                )

    def test_readme_has_the_table(self):
        text = "a\n<!-- results -->\nold\n<!-- /results -->\nb\n"
        written = results_page.readme(text)
        self.assertRegex(
            written, r"\Aa\n<!-- results -->\n\| one layer(?s:.)*<!-- /results -->\nb\n\Z"
        )
        self.assertNotIn("old", written)
        self.assertEqual(results_page.readme(written), written)
        self.assertEqual(results_page.readme("a\nb\n"), "a\nb\n")
        self.change("peers.jsonl", "bench/olmoe/sonic-moe")
        self.assertNotEqual(results_page.readme(text), written)

    def test_pictures_show_their_numbers(self):
        for name, file, part in (
            ("speed", "pretrain.jsonl", "pretrain-study/7B-40-sonic-moe-half-8"),
            ("memory", "peers.jsonl", "bench/qwen3-235b/sonic-moe"),
        ):
            text = (pictures.IMAGES / f"{name}-light.svg").read_text()
            self.assertEqual(len(re.findall("<rect", text)), 4)
            self.assertGreaterEqual(len(re.findall("<text", text)), 13)
            self.change(file, part)
            with self.assertRaisesRegex(SystemExit, f"{name}-light.svg differs"):
                pictures.main(["--check"])
            shutil.copy(ROOT / "benchmarks" / "results" / file, self.folder)


class Outcomes(unittest.TestCase):
    def test_of_each_form(self):
        for values, expected in (
            ({"tests": 7, "failures": 1, "skipped": ["a", "b"]}, (7, 1, 2)),
            ({"tests": 7, "failures": 0, "skipped": 3}, (7, 0, 3)),
            (
                {"said": "4 cases, 12 tensors, 2 failures; 36 results were spoiled on purpose"},
                (4, 2, 0),
            ),
            ({"said": "RACECHECK SUMMARY: 3 hazards displayed (0 errors, 0 warnings)"}, (0, 3, 0)),
            ({"one": "passed", "other": "failed"}, (2, 1, 0)),
            ({"tests": 2, "failures": 0, "status": "exit status 1"}, (2, 1, 0)),
        ):
            self.assertEqual(results_page.counts({"status": "passed", **values}), expected)


class Files(unittest.TestCase):
    def test_are_measurements_with_different_names(self):
        for file in [*FILES, *(ROOT / "tests" / "data").glob("*.jsonl")]:
            with self.subTest(file.name):
                self.assertEqual(file.suffix, ".jsonl")
                found = records.read(file)
                self.assertGreater(len(found), 0)
                self.assertEqual(len({one.name for one in found}), len(found))
                for one in found:
                    self.assertRegex(one.commit, r"\A[0-9a-f]{7,12}\b", one.name)

    def test_are_small(self):
        self.assertLessEqual(bytes_in(results_page.RESULTS), 600_000)
        self.assertLessEqual(bytes_in(pictures.IMAGES), 250_000)


class Records(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.file = pathlib.Path(temporary.name) / "a.jsonl"

    def test_are_read_as_written(self):
        one = records.Measurement(
            "a/b", "a GPU", {"torch": "2.11.0"}, "0123456", {"ms": [1.0, 2.5, 3.0]}
        )
        records.write(self.file, [one, one])
        self.assertEqual(records.read(self.file), [one, one])
        self.assertEqual(one.median("ms"), 2.5)

    def test_numbers_are_shortened_and_whole_ones_kept(self):
        values = {"ms": 1.23456789, "bytes": 123456789, "of": [2 / 3, 1.0, 2.0]}
        records.write(self.file, [records.Measurement("a", "b", {}, "c", values)])
        self.assertEqual(
            records.read(self.file)[0].values,
            {"ms": 1.23457, "bytes": 123456789, "of": [0.666667, 1.0, 2.0]},
        )

    def test_quartiles(self):
        self.assertEqual(records.quartiles([5, 1, 2, 4, 3]), [2, 3, 4])
        self.assertEqual(records.quartiles([7]), [7, 7, 7])

    def test_a_line_that_is_no_measurement_is_named(self):
        for line in ("{", '{"name": "a"}', "[]"):
            self.file.write_text(
                f'{{"name":"a","device":"b","versions":{{}},"commit":"c","values":{{}}}}\n{line}\n'
            )
            with self.assertRaisesRegex(ValueError, "a.jsonl:2: expected a measurement"):
                records.read(self.file)

    def test_a_failed_write_keeps_the_file(self):
        one = records.Measurement("a", "b", {}, "c", {"ms": 1.0})
        records.write(self.file, [one])
        wrong = records.Measurement("a", "b", {}, "c", {"ms": object()})
        with self.assertRaises(TypeError):
            records.write(self.file, [one, wrong])
        self.assertEqual(records.read(self.file), [one])


if __name__ == "__main__":
    unittest.main()
