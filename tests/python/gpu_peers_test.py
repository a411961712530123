"""benchmarks/gpu_peers.py on a stand-in for `python -m tilemoe.bench`: what it asks for, keeps and
says. tests/torch/bench_test.py runs the real one."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Writes down how it was called; a layer called slow takes for ever, one called wrong fails.
BENCH = """
import json, os, pathlib, sys, time
words = sys.argv[1:]
of = lambda name: words[words.index(name) + 1]
environment = {key: os.environ.get(key) for key in ("QUACK_CACHE_DIR", "TILEMOE_LIBRARY_DIR")}
with open(pathlib.Path(__file__).parents[3] / "calls", "a") as calls:
    print(json.dumps({"words": words, **environment}), file=calls)
if "--compile-only" in words:
    sys.exit(0)
layer = of("--config")
if layer == "slow":
    time.sleep(100)
if layer == "wrong":
    sys.exit(3)
entry = {"backend": "tilemoe", "config": layer, "fwd_ms": 1.0, "bwd_ms": 2.0, "peak_bytes": 2**22, "resident_bytes": 0,
         "time_of_peers": {}, "left_out": {"sonic-moe": "no"} if layer == "alone" else {}}
pathlib.Path(of("--json")).write_text(json.dumps([entry]))
"""


class GpuPeers(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.out = self.folder / "out" / "peers.json"
        for name, text in (
            ("tilemoe/bench/__main__.py", BENCH),
            ("tilemoe/__init__.py", ""),
            ("tilemoe/bench/__init__.py", ""),
        ):
            self.file(f"ours/{name}", text)
        self.file("before/tilemoe/__init__.py", "")
        self.file("sonic/sonicmoe/__init__.py", "")
        self.file("sonic/quack/__init__.py", "")

    def file(self, name, text):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run_layers(self, *layers, options=()):
        return subprocess.run(
            [
                sys.executable,
                ROOT / "benchmarks" / "gpu_peers.py",
                "--device",
                "cpu",
                "--tilemoe",
                self.folder / "ours",
                "--out",
                self.out,
                "--config",
                *layers,
                *options,
            ],
            text=True,
            capture_output=True,
            timeout=60,
            env={**os.environ, "TILEMOE_LIBRARY_DIR": "/elsewhere"},
        )

    def calls(self):
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def statuses(self):
        return {i["item"]: i["status"] for i in json.loads(self.out.read_text())["items"]}

    def test_keeps_layers_and_goes_on(self):
        said = self.run_layers("one", "wrong", "two")
        self.assertEqual(said.returncode, 1)
        self.assertIn("wrong: exit status 3", said.stdout)
        self.assertEqual(
            self.statuses(), {"one": "passed", "wrong": "exit status 3", "two": "passed"}
        )
        self.assertEqual(self.run_layers("one", "two").returncode, 0)
        self.assertEqual(len(self.calls()), 3, "what was measured was measured again")
        self.run_layers("one", options=["--again"])
        self.run_layers("one", options=["--rounds", "51"])
        self.assertEqual(len(self.calls()), 5)
        self.file("ours/tilemoe/changed.py", "")
        self.run_layers("one", options=["--rounds", "51"])
        self.assertEqual(len(self.calls()), 6, "results of another build were kept")

    def test_keeps_layers_when_the_time_is_over(self):
        said = self.run_layers("one", "slow", "two", options=["--seconds", "4"])
        self.assertEqual(said.returncode, 1)
        statuses = self.statuses()
        self.assertEqual(statuses["one"], "passed")
        self.assertTrue(statuses["slow"].startswith("not done in "), statuses)
        self.assertIn("two: not begun: the time was over", said.stdout)

    def test_what_the_bench_is_told(self):
        sonic, before, cache = (self.folder / name for name in ("sonic", "before", "cache"))
        options = ["--sonic-moe", sonic, "--before", before, "--cache", cache]
        self.assertEqual(self.run_layers("one", "two", options=options).returncode, 0)
        ahead, one, two = self.calls()
        self.assertIn("--compile-only", ahead["words"])
        self.assertEqual(ahead["words"][ahead["words"].index("--config") + 1 :][:2], ["one", "two"])
        against = one["words"][
            one["words"].index("--against") + 1 : one["words"].index("--packages")
        ]
        self.assertEqual(
            against,
            [
                "tilemoe-keeps-h",
                "tilemoe-before",
                "sonic-moe",
                "torch-grouped_mm-compiled",
                "torch-grouped_mm",
            ],
        )
        for folder, peer in ((sonic, "sonic-moe"), (before, "tilemoe-before")):
            self.assertIn(f"{peer}={folder.resolve()}", one["words"])
        self.assertEqual(one["QUACK_CACHE_DIR"], str(cache.resolve() / "quack"))
        self.assertIsNone(one["TILEMOE_LIBRARY_DIR"])
        self.run_layers("one", "two", options=[*options, "--again"])
        self.assertEqual(sum("--compile-only" in call["words"] for call in self.calls()), 1)

    def test_a_missing_peer_is_told(self):
        said = self.run_layers("alone")
        self.assertEqual(said.returncode, 1)
        self.assertIn("alone: without sonic-moe: no", said.stdout)

    def test_ends_without_a_folder(self):
        said = self.run_layers("one", options=["--before", "/nowhere"])
        self.assertIn("gpu_peers.py: error: /nowhere is not there", said.stderr)


if __name__ == "__main__":
    unittest.main()
