"""benchmarks/gpu_kits.py: its ratios and bars on reports that are made up here, what it asks of a
stand-in for `python -m tilemoe.bench`, and its tables. tests/torch/bench_test.py has the peers."""

import json
import math
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from processes import has_ended, text_of, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import gpu_kits  # noqa: E402
import gpu_tables  # noqa: E402
import marks  # noqa: E402
import results_tables  # noqa: E402
from gpu_kits import SCATTER, SCATTER_SM80, SM80, SM90  # noqa: E402

GEMM = "void tilemoe::cuda::{0}::grouped_gemm<tilemoe::cuda::{0}::{1}Epilogue<3>>"
MMA = {"kernels": 5, "with wgmma": 0, "with mma.sync": 3}


def entry(peer, rounds, config="olmoe", **more):
    """A peer's. rounds: its (forward, backward) ms in each."""
    kit = peer.removeprefix("tilemoe-")
    products = {GEMM.format(kit, "SwiGLU"): rounds[0][0] / 2, "tilemoe::cuda::route<1>": 0.25}
    forward, backward = (sum(times) / len(rounds) for times in zip(*rounds))
    return {
        "backend": peer,
        "config": config,
        "commit": "abc",
        "machine_code": marks.current(),
        "shape": {"T": 8, "d": 16, "n": 24, "E": 4, "K": 2},
        "fwd_ms": forward,
        "bwd_ms": backward,
        "fwd_plus_bwd_ms": forward + backward,
        "tflops": 100.0,
        "round_times": [{"fwd_ms": a, "bwd_ms": b} for a, b in rounds],
        "settings": MMA if peer == SCATTER_SM80 else {},
        "kernels": {"forward": products} if peer in (SM80, SM90) else {"forward": {"x": 2.0}},
        "versions": {"torch": "2.11.0"},
        "left_out": {},
        **more,
    }


def report(sm90, sm80, scatter, config="olmoe"):
    """Of a layer: the same in every round, half of it forward."""
    times = {"tilemoe": sm90, SM90: sm90, SM80: sm80, SCATTER: scatter, SCATTER_SM80: scatter}
    return [entry(peer, [(ms / 2, ms / 2)] * 3, config) for peer, ms in times.items()]


def of(found, peer):
    return next(one for one in found if one["backend"] == peer)


def items(*times):
    """Of all the bars' layers, by (sm90, sm80, scatter) each, the last again where there are too
    few."""
    times = [*times, *[times[-1]] * (len(gpu_kits.LAYERS) - len(times))]
    return [
        {"item": name, "status": "passed", "report": report(*of_layer, config=name)}
        for name, of_layer in zip(gpu_kits.LAYERS, times)
    ]


class Ratios(unittest.TestCase):
    def test_are_medians_of_the_rounds_ratios(self):
        """Where a slow round would move the ratio of medians."""
        found = [entry(SM90, [(1, 2), (10, 20), (3, 3)]), entry(SM80, [(2, 4), (10, 25), (4, 8)])]
        got = gpu_kits.ratios(found, SM90, SM80)
        self.assertEqual(got["forward"], 0.75)  # of 0.5, 1.0, 0.75
        self.assertEqual(got["backward"], 0.5)  # of 0.5, 0.8, 0.375
        self.assertEqual(got["both"], 0.5)  # of 3/6, 30/35, 6/12

    def test_of_kernels_alone(self):
        found = report(4.0, 8.0, 16.0)
        got = gpu_kits.by_kernels({"olmoe": found}, SCATTER_SM80)
        self.assertEqual(got, {"olmoe": 2.0 / (8.0 / 4 + 0.25)})
        of(found, SCATTER_SM80)["kernels"] = {}
        self.assertEqual(gpu_kits.by_kernels({"olmoe": found}, SCATTER_SM80), {})


class Bars(unittest.TestCase):
    def judged(self, made):
        by_peer = {bar["of"]: bar for bar in gpu_kits.judge(made)["bars"]}
        return by_peer[SM90], by_peer[SCATTER_SM80]

    def test_are_met(self):
        for bar in self.judged(items((6.1, 10, 14.5))):
            self.assertIs(bar["met"], True)
            self.assertEqual(bar["without"], {})
            self.assertEqual(len(bar["layers"]), len(gpu_kits.LAYERS))

    def test_the_mean_is_geometric(self):
        kits, scatter = self.judged(items((5.5, 10, 20), (9, 10, 12.1)))
        others = len(gpu_kits.LAYERS) - 1
        mean = math.exp((math.log(0.55) + others * math.log(0.9)) / (others + 1))
        self.assertAlmostEqual(kits["mean"], mean)
        self.assertAlmostEqual(kits["least"], 0.55)
        self.assertIs(kits["met"], True)
        self.assertAlmostEqual(scatter["least"], 1.21)
        self.assertIs(scatter["met"], False)  # its mean is below 1.4

    def test_one_layer_below_is_enough(self):
        kits, scatter = self.judged(items((5.4, 10, 11.9), (9, 10, 20)))
        for bar in (kits, scatter):
            self.assertGreater(bar["mean"], bar["bar"]["mean"])
            self.assertIs(bar["met"], False)

    def test_a_missing_layer_leaves_it_open_but_does_not_mend_it(self):
        kits, _ = self.judged(items((7, 10, 20))[1:])
        self.assertIsNone(kits["met"])
        self.assertEqual(kits["without"], {gpu_kits.LAYERS[0]: "not measured"})
        kits, _ = self.judged(items((7, 10, 20), (5, 10, 20))[1:])
        self.assertIs(kits["met"], False)
        kits, _ = self.judged([])
        self.assertIsNone(kits["met"])

    def test_other_layers_do_not_count(self):
        more = {"item": "wide", "status": "passed", "report": report(1, 10, 1, "wide")}
        for bar in self.judged([*items((7, 10, 20)), more]):
            self.assertIs(bar["met"], True)

    def test_what_did_not_run_as_named_does_not_count(self):
        """Another kit's kernels, none that were seen, wgmma in the PTX, no PTX at all."""
        both = {"forward": {GEMM.format("sm80", "Store"): 1.0, GEMM.format("Sm90", "Store"): 1.0}}
        for peer, changed, said, bar in (
            (SM80, {"kernels": {"forward": {GEMM.format("sm90", "Store"): 1.0}}}, "of sm90", 0),
            (SM80, {"kernels": both}, "of sm80 and sm90", 1),
            (SM90, {"kernels": {"forward": {"nvjet_sm90_tst": 1.0}}}, "of no kit", 0),
            (SM90, {"kernels": {}}, "of no kit", 0),
            (SCATTER_SM80, {"settings": {**MMA, "with wgmma": 1}}, "has wgmma", 1),
            (SCATTER_SM80, {"settings": {**MMA, "with mma.sync": 0}}, "no mma.sync", 1),
            (SCATTER_SM80, {"settings": {}}, "not found", 1),
        ):
            made = items((7, 10, 20))
            of(made[2]["report"], peer).update(changed)
            found = self.judged(made)[bar]
            self.assertIn(said, found["without"][gpu_kits.LAYERS[2]])
            self.assertIsNone(found["met"], said)

    def test_kernels_of_others_are_no_kits(self):
        made = items((7, 10, 20))
        kernels = of(made[0]["report"], SM80)["kernels"]
        kernels["backward"] = {"void cutlass::Kernel<cutlass::arch::Sm90>": 1.0}
        self.assertIs(self.judged(made)[0]["met"], True)

    def test_a_peer_that_was_left_out_says_why(self):
        made = items((7, 10, 20))
        made[0]["report"] = [e for e in made[0]["report"] if e["backend"] != SCATTER_SM80]
        made[0]["report"][0]["left_out"] = {SCATTER_SM80: "not installed"}
        kits, scatter = self.judged(made)
        self.assertIs(kits["met"], True)
        self.assertEqual(scatter["without"], {gpu_kits.LAYERS[0]: "not installed"})
        self.assertIn("without 7b-n256 (not installed)", gpu_kits.sentence(scatter))

    def test_sentences(self):
        kits, scatter = self.judged(items((7, 10, 11)))
        self.assertIn("mean 0.700, least 0.700; bar 0.60 and 0.55: met", gpu_kits.sentence(kits))
        self.assertIn("bar 1.40 and 1.20: not met", gpu_kits.sentence(scatter))


# Writes down how it was called, and gives the layer's report from the folder that it lies in.
BENCH = """
import json, os, pathlib, sys, time
words, here = sys.argv[1:], pathlib.Path(__file__).parents[3]
of = lambda name: words[words.index(name) + 1]
with open(here / "calls", "a") as calls:
    print(json.dumps(words), file=calls)
if "--compile-only" not in words:
    text = (here / f"{of('--config')}.report").read_text()
    pathlib.Path(of("--json")).write_text(text)
if (here / "slow").exists():
    (here / "pid").write_text(f"{os.getpid()}\\n")
    time.sleep(50)
"""


class Command(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for name, text in (
            ("ours/tilemoe/__init__.py", ""),
            ("ours/tilemoe/bench/__init__.py", ""),
            ("ours/tilemoe/bench/__main__.py", BENCH),
            ("scatter/scattermoe/__init__.py", ""),
        ):
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for item in items((7, 10, 20)):
            (self.folder / f"{item['item']}.report").write_text(json.dumps(item["report"]))

    def command(self, layers, options=()):
        command = [sys.executable, ROOT / "benchmarks" / "gpu_kits.py", "--device", "cpu",
                   "--tilemoe", self.folder / "ours", "--out", self.folder / "out" / "kits.json",
                   *options]  # fmt: skip
        return [*command, "--config", *layers] if layers else command

    def run_layers(self, *layers, options=()):
        out = self.folder / "out" / "kits.json"
        done = subprocess.run(
            self.command(layers, options), text=True, capture_output=True, timeout=60
        )
        return done, json.loads(out.read_text()) if out.exists() else None

    def calls(self):
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def test_two_calls_make_one_file(self):
        first, rest = gpu_kits.LAYERS[:3], gpu_kits.LAYERS[3:]
        done, results = self.run_layers(*first)
        self.assertEqual(done.returncode, 1)
        self.assertEqual([i["item"] for i in results["items"]], first)
        self.assertEqual([bar["met"] for bar in results["bars"]], [None, None])
        self.assertIn("not judged; without", done.stdout)
        done, results = self.run_layers(*rest)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([i["item"] for i in results["items"]], gpu_kits.LAYERS)
        self.assertEqual([bar["met"] for bar in results["bars"]], [True, True])
        self.assertEqual(len(self.calls()), len(gpu_kits.LAYERS))
        done, again = self.run_layers()
        self.assertEqual((done.returncode, again), (0, results))
        self.assertEqual(len(self.calls()), len(gpu_kits.LAYERS))

    def test_layers_of_another_gpu_count_if_all_else_is_equal(self):
        first, rest = gpu_kits.LAYERS[:3], gpu_kits.LAYERS[3:]
        self.run_layers(*first)
        other = self.folder / "other.json"
        (self.folder / "out" / "kits.json").rename(other)
        done, results = self.run_layers(*rest, options=["--also", other])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([i["item"] for i in results["items"]], gpu_kits.LAYERS)
        changed = {**json.loads(other.read_text()), "driver_version": "another"}
        other.write_text(json.dumps(changed))
        done, _ = self.run_layers(*rest, options=["--also", other])
        self.assertIn("was measured elsewhere", done.stderr)

    def test_takes_the_bench_along_when_it_is_ended(self):
        (self.folder / "slow").touch()
        pid = self.folder / "pid"
        with subprocess.Popen(
            self.command(["olmoe"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            until(lambda: text_of(pid).endswith("\n"))
            run.terminate()
            self.assertEqual(run.wait(timeout=20), 128 + signal.SIGTERM)
        until(lambda: has_ended(int(text_of(pid))))

    def test_an_unmet_bar_is_the_status(self):
        slow = report(5, 10, 20, gpu_kits.LAYERS[1])
        (self.folder / f"{gpu_kits.LAYERS[1]}.report").write_text(json.dumps(slow))
        done, results = self.run_layers()
        self.assertEqual(done.returncode, 1)
        self.assertEqual([bar["met"] for bar in results["bars"]], [False, True])
        self.assertIn("not met", done.stdout)

    def test_what_the_bench_is_told(self):
        scatter, cache = self.folder / "scatter", self.folder / "cache"
        self.run_layers("olmoe", options=["--scattermoe", scatter, "--cache", cache])
        ahead, olmoe = self.calls()
        self.assertIn("--compile-only", ahead)
        packages = olmoe[olmoe.index("--packages") + 1 :][:2]
        self.assertEqual(packages, [f"{p}={scatter.resolve()}" for p in (SCATTER, SCATTER_SM80)])
        against = olmoe[olmoe.index("--against") + 1 : olmoe.index("--packages")]
        self.assertEqual(against, [SM90, SM80, "torch-dense", SCATTER, SCATTER_SM80])
        self.assertIn("--kernels", olmoe)
        self.run_layers("olmoe", options=["--again"])  # without a cache, and not compiled ahead
        own = self.calls()[-1]
        pythons = own[own.index("--python") + 1 :][:2]
        self.assertEqual(pythons, [f"{p}={sys.executable}" for p in (SCATTER, SCATTER_SM80)])

    def test_compiles_only(self):
        scatter, cache = (["--scattermoe", self.folder / "scatter"], ["--cache", self.folder / "cache"])
        for lacking in (scatter, cache):
            done, _ = self.run_layers("olmoe", options=["--compile-only", *lacking])
            self.assertEqual(done.returncode, 1)
            self.assertIn("--compile-only needs a --cache, and the folder", done.stderr)
        given = ["--compile-only", *scatter, *cache]
        done, results = self.run_layers("olmoe", options=given)
        self.assertEqual((done.returncode, results), (0, None), done.stderr)
        self.assertEqual(len(self.calls()), 1)
        self.assertIn("--compile-only", self.calls()[0])
        self.run_layers("olmoe", options=[one for one in given if one != "--compile-only"])
        self.assertEqual(len(self.calls()), 2, "it was compiled before")
        self.assertNotIn("--compile-only", self.calls()[1])


class Tables(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for module in (marks, results_tables):
            patch = mock.patch.object(module, "RESULTS", self.folder)
            patch.start()
            self.addCleanup(patch.stop)

    def page(self, name, results):
        (self.folder / f"gpu_{name}.json").write_text(json.dumps(results))
        return gpu_tables.measured_page()

    def test_without_files_there_are_no_sections(self):
        page = gpu_tables.measured_page()
        self.assertNotIn("### Kits", page)
        self.assertNotIn("### Few tokens", page)

    def test_kits(self):
        made = items((6, 10, 15))
        results = {"stage": "kits", "name": "NVIDIA H200", "driver_version": "1", "rounds": 15,
                   **gpu_kits.judge(made), "items": [*made, {"item": "a", "status": "no"}]}  # fmt: skip
        page = self.page("kits", results)
        self.assertIn(
            "| olmoe | TileMoE, `sm90` | 3.000 | 3.000 | 6.000 | 1.750 | 100 | 0.600 | 0.600 | 0.600 |",
            page,
        )
        self.assertIn("| olmoe | TileMoE, `sm80` | 5.000 | 5.000 | 10.000 | 2.750 | 100 |  |  |  |", page)
        self.assertIn("| TileMoE, `sm90` | 0.600 | 0.600 | 0.636 | 0.636 |  |", page)
        self.assertIn("| ScatterMoE, `mma.sync` | 1.500 | 1.500 | 0.727 | 0.727 |  |", page)
        self.assertIn("| olmoe | forward | up_projection | 1.500 | 2.500 | 0.600 |", page)
        self.assertIn("| olmoe | forward | others | 0.250 | 0.250 | 1.000 |", page)
        self.assertIn("scattermoe-sm80: kernels 5, with wgmma 0, with mma.sync 3", page)

    def test_few_tokens(self):
        one = {
            "config": "7b-n256",
            "shape": {"T": 1, "d": 1536, "n": 256, "E": 128, "K": 8},
            "touched": [8, 7],
            "touched_bytes": 18e6,
            "copies": 12,
            "us": {"tilemoe": 30.0, "tilemoe-sm80": 36.0, "torch-grouped_mm": 90.0},
            "launches": {"tilemoe": 5.0, "tilemoe-sm80": 6.0, "torch-grouped_mm": 20.0},
            "bytes_us": 4.5,
        }
        results = {
            "device": "NVIDIA H200",
            "driver_version": "1",
            "commit": "abc",
            "machine_code": {"hash": "0" * 16},
            "rounds": 15,
            "versions": {"torch": "2.11.0"},
            "entries": [one, {**one, "config": "else", "bytes_us": None}],
        }
        page = self.page("few_tokens", results)
        row = "| {} ‡ | 1 | TileMoE, its own choice | 7.5 | 18.0 | 30.0 | 0.60 | {} | 5 | 12 |"
        self.assertIn(row.format("7b-n256", "4.5"), page)
        self.assertIn(row.format("else", ""), page)
        self.assertIn("| 7b-n256 ‡§ | 1 | TileMoE, `sm80` |", page, "of that kit there is no hash")
        self.assertIn("| TileMoE, `sm80` | 7.5 | 18.0 | 36.0 | 0.50 | 4.5 | 6 | 12 |", page)
        self.assertIn("| `grouped_mm`, eager | 7.5 | 18.0 | 90.0 | 0.20 | 4.5 | 20 | 12 |", page)


if __name__ == "__main__":
    unittest.main()
