"""What marks numbers of other kernels or of a changed tree (benchmarks/marks.py), and the tables of
layers beside others (benchmarks/gpu_tables.py), on results that are made up here."""

import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import gpu_tables  # noqa: E402
import marks  # noqa: E402
import peer_tables  # noqa: E402
import results_tables  # noqa: E402

NOW = {name: marks.current()[name] for name in ("hash", "sm80")}
THEN = {name: "0" * 16 for name in NOW}
GPU = {"device": "NVIDIA H100"}


def entry(backend, ms, ours=None, **more):
    """A peer's, on a layer of its 0.5 ms forward and `ms` backward."""
    found = {
        "config": "some-layer",
        "backend": backend,
        "commit": "abc",
        "fwd_ms": 0.5,
        "bwd_ms": ms,
        "shape": {"T": 8, "d": 16, "n": 24, "E": 4, "K": 2},
        "host_ms": {"forward": 0.1, "backward": 0.2},
        "saved_bytes": 2**20,
        "peak_bytes": 7 * 2**20,
        "resident_bytes": 2**21,
        "settings": {},
        "versions": {"torch": "2.11.0", backend: "1.2"},
        **more,
    }
    return found


class Marks(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for module in (marks, results_tables):
            patch = mock.patch.object(module, "RESULTS", self.folder)
            patch.start()
            self.addCleanup(patch.stop)
        marks.mark_of_file.cache_clear()
        self.addCleanup(marks.mark_of_file.cache_clear)

    def mark(self, results):
        (self.folder / "a.json").write_text(json.dumps(results))
        marks.mark_of_file.cache_clear()
        return marks.mark_of_file("a.json")

    def test_marks_of_numbers(self):
        self.assertEqual(marks.mark({"commit": "abc", "machine_code": NOW}), "")
        self.assertEqual(marks.mark({"commit": "abc", "machine_code": THEN}), "‡")
        self.assertEqual(marks.mark({"commit": "abc"}), "§")
        self.assertEqual(marks.mark({"commit": None, "machine_code": None}), "§")
        self.assertEqual(marks.mark({"commit": "abc-dirty", "machine_code": NOW}), "†")
        self.assertEqual(
            marks.mark({"commit": "abc-dirty"}, {"commit": "b", "machine_code": THEN}), "†‡§"
        )

    def test_marks_of_files(self):
        for code, expected in ((NOW, ""), (THEN, "‡"), (None, "§")):
            top = {**GPU, "commit": "abc", "machine_code": code}
            self.assertEqual(self.mark({**top, "items": [{"report": {"commit": "abc"}}]}), expected)
            self.assertEqual(self.mark([{"backend": "tilemoe-keeps-h", **top}]), expected)
        self.assertEqual(self.mark({**GPU, "items": []}), "§")
        mixed = [{**GPU, "commit": "abc", "machine_code": NOW}, {**GPU, "commit": "abc"}]
        self.assertEqual(self.mark(mixed), "§")
        self.assertEqual(self.mark([{"commit": "abc", "device": "Intel"}]), "")
        self.assertEqual(self.mark([{"commit": "abc-dirty", "device": "Intel"}]), "†")

    def test_of_others_only_a_changed_tree_counts(self):
        ours = {**GPU, "backend": "tilemoe", "commit": "abc", "machine_code": NOW}
        theirs = {"backend": "sonic-moe", "commit": "abc"}
        self.assertEqual(self.mark([ours, theirs]), "")
        self.assertEqual(self.mark([ours, {**theirs, "commit": "abc-dirty"}]), "†")
        self.assertEqual(
            self.mark([ours, {**ours, "backend": "tilemoe-before", "machine_code": THEN}]), ""
        )

    def test_of_the_kit_sm80_both_hashes_count(self):
        only = {"hash": NOW["hash"]}
        for code, expected in ((NOW, ""), ({**NOW, "sm80": "0" * 16}, "‡"), (only, "§")):
            top = {**GPU, "commit": "abc", "machine_code": code}
            for named in ({"kit": "sm80"}, {"backend": "tilemoe-sm80"}):
                self.assertEqual(marks.mark({**top, **named}), expected)
                self.assertEqual(self.mark({**top, "items": [named]}), expected)
            self.assertEqual(self.mark({**top, "entries": [{"us": {"tilemoe-sm80": 1.0}}]}), expected)
            for named in ({"kit": "sm90"}, {"backend": "tilemoe-sm90"}, {}):
                self.assertEqual(marks.mark({**top, **named}), "")
                self.assertEqual(self.mark({**top, "items": [named]}), "")
            theirs = {"commit": "abc", "backend": "scattermoe-sm80"}
            self.assertEqual(self.mark([{**top, "backend": "tilemoe-sm90"}, theirs]), "")
        for commit, code in marks.SM80_OF.items():
            expected = "" if code == NOW["sm80"] else "‡"
            stamp = {"commit": commit, "machine_code": only, "kit": "sm80"}
            self.assertEqual(marks.mark(stamp), expected)

    def test_links_get_keep_and_lose_marks(self):
        plain = "It takes 2 ms ([file](../benchmarks/results/a.json)), as said."
        marked = plain.replace(".json)", ".json)[‡](../docs/benchmarks.md#marks)")
        for code, expected in ((THEN, marked), (NOW, plain)):
            self.mark({**GPU, "commit": "abc", "machine_code": code})
            for before in (plain, marked, marked.replace("‡", "†§")):
                self.assertEqual(marks.marked(before), expected)

    def test_an_unmarked_page_is_found(self):
        self.mark({**GPU, "commit": "abc", "machine_code": THEN})
        page = self.folder / "page.md"
        page.write_text("[file](benchmarks/results/a.json)\n")
        with mock.patch.object(gpu_tables, "ROOT", self.folder):
            self.assertNotEqual(gpu_tables.written(page), page.read_text())
            page.write_text(gpu_tables.written(page))
            self.assertEqual(gpu_tables.written(page), page.read_text())

    def peers(self, ours, *others):
        ratios = {e["backend"]: {"fwd_ms": 0.9, "bwd_ms": 0.5} for e in others}
        items = [
            {
                "item": "some-layer",
                "status": "passed",
                "report": [{**ours, "time_of_peers": ratios}, *others],
            },
            {"item": "another", "status": "not begun: the time was over"},
        ]
        results = {
            "stage": "peers",
            "name": "NVIDIA H200",
            "driver_version": "1",
            "rounds": 15,
            "items": items,
        }
        (self.folder / "gpu_peers.json").write_text(json.dumps(results))
        every = peer_tables.peers(results_tables.stage("peers"))
        return peer_tables.readme_peers(), peer_tables.beside_peers(), every

    def test_tables_of_layers_beside_others(self):
        ours = entry(
            "tilemoe", 1.0, machine_code=NOW, reserved_bytes=8 * 2**20, floor_bytes=6 * 2**20
        )
        sonic = entry("sonic-moe", 2.0, settings={"tiles": ["a", "b"]})
        times, ratios, long = self.peers(ours, sonic)
        self.assertIn("0.90 of the time of sonic-moe forward and 0.50 backward", " ".join(times.split()))
        self.assertIn("| some-layer | 8 16 24 4 2 | 0.50 / 1.00 | 0.50 / 2.00 |  |  |", times)
        self.assertIn("| some-layer | 0.900 / 0.500 |  |  | 5 | 5 |  |  |", ratios)
        self.assertNotIn("grouped_mm`, compiled forward", " ".join(ratios.split()))
        self.assertIn(
            "| some-layer | tilemoe | 0.500 | 1.000 |  | 100 | 200 | 1 | 5 | 6 | 4 |", long
        )
        self.assertIn("| some-layer | sonic-moe | 0.500 | 2.000 | 0.900 / 0.500 |", long)
        self.assertIn("sonic-moe: tiles a, b.", long)

    def test_those_tables_mark_layers(self):
        for code, commit, expected in (
            (THEN, "abc", "‡"),
            (None, "abc", "§"),
            (NOW, "a-dirty", "†"),
        ):
            ours = entry("tilemoe", 1.0, machine_code=code)
            times, ratios, long = self.peers(ours, entry("sonic-moe", 2.0, commit=commit))
            self.assertIn(f"| some-layer {expected} | 8 16", times)
            self.assertIn(f"| some-layer {expected} | 0.900", ratios)
            self.assertIn(f"| some-layer {expected} | sonic-moe", long)


if __name__ == "__main__":
    unittest.main()
