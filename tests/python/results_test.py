"""The results files, and what is written and drawn from them: docs/results.md, README.md's table
and pictures. Without torch."""

import dataclasses
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
# Files that no table shows: a decision links to the first, and rates are fitted to the second.
UNSHOWN = {"orders.jsonl", "fitted.jsonl"}
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

    def without(self, file, part):
        """Leave out the measurements whose names start with `part`."""
        path = self.folder / f"{file}.jsonl"
        records.write(path, [one for one in records.read(path) if not one.name.startswith(part)])

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
        self.assertLessEqual(count(results_page.page()), 460)

    def test_each_measurement_has_its_conditions(self):
        for part in results_page.SECTIONS[1:-1]:
            with self.subTest(part.__name__):
                self.assertRegex(
                    part().replace("\n", " "),
                    r"\|  Measured .*commits? \w{7}.*\[`\w+\.jsonl`\]",
                )

    def test_limit_of_decode_is_the_copy_of_its_gpu(self):
        def line(name, device="a GPU", **values):
            return records.Measurement(name, device, {}, "0123456", values)

        read = dict(T=1, experts=8.0, launches=4.0, rounds=7, weight_bytes=3_000_000)
        records.write(
            self.folder / "decode.jsonl",
            [
                line(f"decode/a/T=1/{peer}", forward_us=[us] * 3, **read)
                for peer, us in (("tilemoe", 8.0), ("tilemoe-sm80", 9.0), ("torch-grouped_mm", 16.0))
            ],
        )
        copies = [
            line(f"kernels/a/{i}", device, limit_gb_per_s=rate)
            for i, (device, rate) in enumerate([("a GPU", 1500.0), ("another", 1.0)])
        ]
        records.write(self.folder / "kernels.jsonl", copies)
        self.assertIn("| a | 1 | 8.0 | 8.0 | 2.0 | 9.0 | 4 | 2.00x |", results_page.decode())
        records.write(self.folder / "kernels.jsonl", copies[1:])
        with self.assertRaisesRegex(SystemExit, "decode was measured on a GPU, but no kernels"):
            results_page.decode()

    def test_fp8_is_shown_once_it_is_measured(self):
        has_file = (self.folder / "fp8.jsonl").exists()
        values = lambda forward, backward, saved=100, peak=500: {
            "T": 8,
            "saved_bytes": saved,
            "peak_bytes": peak,
            "resident_bytes": 300,
            "rounds": 7,
            "forward_ms": [forward] * 3,
            "backward_ms": [backward] * 3,
            "total_ms": [forward + backward] * 3,
        }
        of_kernels = {
            key: [number] * 3
            for key, number in {
                "up_tflop_per_s": 900.0,
                "dense_tflop_per_s": 1000.0,
                "dense_fast_accum_tflop_per_s": 1200.0,
                "up_rate_over_dense": 0.9,
                "quantize_x_over_copy": 1.1,
                "quantize_W1_over_copy": 1.2,
            }.items()
        }
        of = lambda name, values: records.Measurement(
            name, "NVIDIA H200", {"tilemoe": "1", "torch": "2"}, "abcdef0123", values
        )
        records.write(
            self.folder / "fp8.jsonl",
            [
                of("bench/olmoe/tilemoe", values(4.0, 8.0)),
                of("bench/olmoe/tilemoe-recipe-fp8", values(3.0, 7.0)),
                of("bench/olmoe/tilemoe-recipe-fp8-each", values(4.0, 7.0)),
                of("bench/olmoe/tilemoe-recipe-fp8-save-h", values(3.0, 7.5, 60, 480)),
                of("fp8-kernels/olmoe", of_kernels | {"rounds": 9}),
            ],
        )
        text = results_page.fp8()
        self.assertIn("| olmoe | 4.00 / 8.00 | 3.00 / 7.00 | 1.33x | 1.14x | 1.20x | 1.09x |", text)
        self.assertIn("| olmoe | 1.000 | 1.000 | 0.600 | 0.900 |", text)
        self.assertIn("| olmoe | 900 | 1000 | 1200 | 0.90 | 1.10 | 1.20 |", text)
        self.assertIn("Measured on one NVIDIA H200, TileMoE 1 (commit abcdef0)", text)
        self.assertIn("7 rounds: [`fp8.jsonl`]", text.replace("\n", " "))
        self.assertEqual(results_page.fp8 in results_page.SECTIONS, has_file)

    def test_recipes_are_shown_once_they_are_measured(self):
        has_file = (self.folder / "recipes.jsonl").exists()
        lines = []
        for method, off in (("bf16", 0.0), ("grouped_mm", 0.001), ("fp8", 0.004)):
            for seed in (0, 1, 2):
                values = {"initial": seed, "steps": 458, "tokens_of_step": 131072}
                values |= {"loss": (2 + seed) * (1 + off)}
                lines.append(
                    records.Measurement(
                        f"recipes/S3-{method}-s{seed}",
                        "NVIDIA H200",
                        {"tilemoe": "1", "torch": "2"},
                        f"{'abc' if seed else 'def'}def0123",
                        values,
                    )
                )
        records.write(self.folder / "recipes.jsonl", lines)
        text = results_page.recipes()
        said = text.replace("\n", " ")
        self.assertIn("| S3 | `grouped_mm` | 3 | +0.10 ± 0.00 | [+0.10, +0.10] |  |  |", text)
        self.assertIn("| S3 | `fp8` | 3 | +0.40 ± 0.00 | [+0.40, +0.40] | +0.30 | met |", text)
        self.assertIn("After 60M tokens", said)
        self.assertNotIn("Too few seeds", said)
        self.assertIn("| upper end above that of `grouped_mm` | limit of 0.5 % |", text)
        self.assertRegex(said, r"Measured on .*commits abcdef0, defdef0\).*: \[`recipes.jsonl`\]")
        self.assertEqual(results_page.recipes in results_page.SECTIONS, has_file)
        with mock.patch.object(
            results_page, "SECTIONS", {*results_page.SECTIONS, results_page.recipes}
        ):
            self.test_has_few_words_that_nothing_generates()
        lines[-1].values["loss"] *= 1.01  # of FP8: its interval becomes wider than the limit
        records.write(self.folder / "recipes.jsonl", lines)
        self.assertIn("errors alone. Too few seeds for the limit.\n", results_page.recipes())
        records.write(self.folder / "recipes.jsonl", [one for one in lines if "-s0" in one.name])
        self.assertIn("Too few seeds", results_page.recipes())  # no interval

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

    def test_distributed_has_no_section_before_a_run(self):
        self.without("expert_parallel", "expert-parallel/")
        self.assertEqual(results_page.layers_of_ranks(), "")

    def test_readme_has_the_number_of_gpus_that_were_tested(self):
        row = "| H100 | yes | tested on one and two GPUs |"
        self.without("gpu_tests", "ranks/")
        self.assertEqual(results_page.readme(row), row)
        file = self.folder / "gpu_tests.jsonl"
        line = lambda status: records.Measurement("ranks/pull", "b", {}, "0123456",
                                                  {"gpus": 4, "status": status})  # fmt: skip
        lines = records.read(file)
        records.write(file, [*lines, line("exit status 1")])
        self.assertEqual(results_page.readme(row), row)
        records.write(file, [*lines, line("passed")])
        written = results_page.readme(row)
        self.assertEqual(written, "| H100 | yes | tested on one, two and four GPUs |")
        self.assertEqual(results_page.readme(written), written)

    def test_readme_names_slower_passes(self):
        path = self.folder / "peers.jsonl"
        lines = {one.name: one for one in records.read(path)}
        for layer, forward, backward in (("olmoe", 0.9, 2.0), ("qwen3-next", 1.001, 1.2)):
            ours = lines[f"bench/{layer}/tilemoe"].median
            sonic = lines[f"bench/{layer}/sonic-moe"].values
            sonic["forward_ms"] = ours("forward_ms") * forward
            sonic["backward_ms"] = ours("backward_ms") * backward
        for layer in ("gpt-oss-20b", "qwen3-235b", "kimi-linear"):
            lines[f"bench/{layer}/sonic-moe"].values.update(forward_ms=1e3, backward_ms=1e3)
        records.write(path, lines.values())
        said = " ".join(results_page.readme_table().split())
        self.assertIn(" Slower than sonic-moe: olmoe's forward pass by 11 %. `python", said)
        lines["bench/olmoe/sonic-moe"].values["forward_ms"] = 1e3
        records.write(path, lines.values())
        self.assertNotIn("Slower", results_page.readme_table())

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


class Measured(Copied):
    """Files as scripts/gpu/measure.py writes them: their rows appear."""

    GPU, COMMIT = "NVIDIA H100 80GB HBM3", "abcdef012345"

    def add(self, file, name, device=None, versions=(), **values):
        path = self.folder / f"{file}.jsonl"
        found = records.read(path) if path.exists() else []
        of = {"tilemoe": "0.2.0", "torch": "2.11.0", **dict(versions)}
        one = records.Measurement(name, device or self.GPU, of, self.COMMIT, values)
        records.write(path, [*found, one])

    def copied(self, file, old, new, **versions):
        """Add lines that differ from those of `old` in the name and in the versions."""
        path = self.folder / f"{file}.jsonl"
        lines = records.read(path)
        more = [records.Measurement(new + one.name[len(old) :], one.device,
                                    one.versions | versions, one.commit, one.values)
                for one in lines if one.name.startswith(old)]  # fmt: skip
        self.assertGreater(len(more), 0)
        records.write(path, [*lines, *more])

    def test_expert_parallelism_of_several_numbers_of_gpus(self):
        (self.folder / "expert_parallel.jsonl").unlink()
        for ranks, ms in ((2, 50.0), (4, 52.0)):
            name = f"expert-parallel/qwen3-235b/T=4096/R={ranks}"
            line = dict(device=f"{ranks} x {self.GPU}", T=4096, ranks=ranks)
            self.add("expert_parallel", f"{name}/links", all_gather_gb_per_s=250.0, **line)
            line |= dict(peak_bytes=2**30, time_over_own=[1.0, 1.25, 2.0])
            self.add("expert_parallel", f"{name}/own", step_ms=[1, 40.0, 50], **line)
            for way, faster in (("lossless@4", 0), ("lossless", 0), ("pull-lossless", 1)):
                self.add("expert_parallel", f"{name}/{way}", step_ms=[1, ms - faster, 99],
                         plan_bytes=2**31, in_graph=True, **line)  # fmt: skip
            self.add("expert_parallel", f"{name}/torchtitan", step_ms=[1, 80, 99], in_graph=False,
                     versions={"torchtitan": "0.3.0"}, **line)  # fmt: skip
        shown = results_page.expert_parallel()
        for row in (
            "| qwen3-235b | 4096 | 2 | all-gather, memory for every routing, 4 CTAs per SM, CUDA graph "
            "| 50.00 | 1.25 | 100 % | 1.00 | 2.00 |",
            "| 52.00 | 1.25 | 96 % | 1.00 | 2.00 |",
            "| qwen3-235b | 4096 | 4 | torchtitan's all-to-all | 80.00 | 1.25 | 100 % | 1.00 |  |",
        ):
            self.assertIn(row, shown)
        self.assertIn("an all-gather sends 250 GB/s", shown)
        self.assertIn("torchtitan 0.3.0", shown)
        page = results_page.DISTRIBUTED.read_text()
        written = results_page.distributed(page)
        self.assertIn("| qwen3-235b | 4096 | 4 | 52.00 | 1.54x | 51.00: pull, memory for every "
                      "routing | 1.0, 1.0 | 96 % |", written)  # fmt: skip
        self.assertIn("\n### Speed\n", written)
        self.assertIn("\n\n<!-- /results -->\n\n### Uneven", written)
        self.assertNotIn("links", shown)

    def training(self, experts, processes, speed, layers=16, **values):
        name = f"7B-{layers}-{experts}-none-{values.get('micro_batch', 4)}-x1-p{processes}"
        name += "-ep2" * (values.get("expert_parallel", 1) > 1)
        values = dict(layers=layers, experts=experts, processes=processes, recompute="none",
                      micro_batch=4, compile=True, item="training/x") | values  # fmt: skip
        self.add("pretrain", f"pretrain-study/{name}", step_ms=[1, 100, 2], peak_bytes=2**36,
                 tokens_per_s_and_process=[1, speed, 2], **values)  # fmt: skip

    def test_trainings_of_another_gpu_have_a_table(self):
        path = self.folder / "pretrain.jsonl"
        records.write(path, [one for one in records.read(path) if "item" not in one.values])
        before = results_page.training_speed()
        self.training("tilemoe", 1, 50_000)
        self.training("grouped_mm", 1, 40_000)
        self.training("tilemoe", 2, 48_000)
        self.training("tilemoe", 1, 55_000, micro_batch=8)
        self.training("tilemoe", 2, 20_000, layers=40)
        self.training("tilemoe", 4, 18_000, layers=40)
        self.training("tilemoe", 2, 19_000, layers=40, expert_parallel=2)
        self.training("tilemoe", 4, 17_000, layers=40, expert_parallel=2, compile=False)
        self.training("tilemoe", 1, 60_000, layers=40, device="another GPU")
        shown = results_page.training_speed()
        self.assertIn(before.partition("| TileMoE")[2].partition("Measured")[0], shown)
        for row in (
            "| TileMoE, 16 layers | 1 | none | 8 | 100 | 4.75 |  | 64 | 1.00x |  |",
            "| torch, compiled, 16 layers | 1 | none | 4 | 100 | 3.46 |  | 64 | 1.38x |  |",
            "| TileMoE, 16 layers | 2 | none | 4 | 100 | 4.15 |  | 64 | 1.00x | 96 % |",
            "| TileMoE | 2 | none | 4 | 100 | 1.73 |  | 64 | 1.00x |  |",
            "| TileMoE, experts shared by 2 | 2 | none | 4 | 100 | 1.64 |  | 64 | 1.00x |  |",
            "| TileMoE | 4 | none | 4 | 100 | 1.56 |  | 64 | 1.00x | 90 % |",
            "| TileMoE, experts shared by 2 | 4 | none | 4 | 100 | 1.47 |  | 64 | 1.00x |  |",
        ):
            self.assertIn(row, shown)
        picture = pictures.speed("light")
        self.assertIn("Training 16 layers of a 7B MoE on one H100", picture)
        self.assertIn("1.38x faster", picture)
        page = (ROOT / "README.md").read_text()
        self.assertIn('alt="Training 16 layers of a 7B MoE on one H100, in billion tokens per day: '
                      'TileMoE, torch compiled"', pictures.alternative(page))  # fmt: skip
        with self.assertRaisesRegex(SystemExit, "svg differs"):
            pictures.main(["--check"])

    def test_a_training_without_an_item_is_not_shown(self):
        before = results_page.training_speed()
        self.training("tilemoe", 8, 50_000, item=None)
        path = self.folder / "pretrain.jsonl"
        *others, added = records.read(path)
        del added.values["item"]
        records.write(path, [*others, added])
        self.assertEqual(results_page.training_speed(), before)
        self.training("tilemoe", 8, 50_000)
        self.assertIn("| TileMoE, 16 layers | 8 |", results_page.training_speed())

    def test_trainings_on_several_gpus_alone_leave_the_picture(self):
        before = pictures.speed("dark")
        self.training("tilemoe", 1, 50_000)
        self.training("tilemoe", 2, 48_000)
        self.assertEqual(pictures.speed("dark"), before)

    def test_token_rounding_of_layers_replaces_the_older_table(self):
        for rule, ms, dropped in (("top-k", 2.0, 0), ("nearest", 1.6, 19661)):
            self.add("rounding", f"rounding-layer/7b-n256/{rule}", T=24576, K=8, dropped=dropped,
                     added=dropped // 2, forward_ms=[1, ms, 3], backward_ms=[1, 2 * ms, 3],
                     kernels_forward_ms=ms, kernels_backward_ms=ms)  # fmt: skip
        shown = results_page.rounding()
        self.assertIn("| 7b-n256 | nearest | 1.60 / 3.20 | 3.20 | 1.250x | 1.25x | 1.25x | 10.00 % "
                      "| 5.00 % |", shown)  # fmt: skip
        self.assertNotIn("S1", shown)
        self.assertIn("The routing alone", shown)

    def test_layers_next_to_two_versions_of_quack_and_scattermoe(self):
        self.copied("peers", "bench/", "release/", **{"quack-kernels": "0.0.1"})
        layers = [one.name.split("/")[1] for one in records.read(self.folder / "peers.jsonl")
                  if one.name.startswith("bench/") and one.name.endswith("/sonic-moe")]
        for layer in layers:
            old = f"bench/{layer}/torch-grouped_mm-compiled"
            self.copied("peers", old, f"bench/{layer}/scattermoe")
        shown = results_page.layers()
        self.assertIn("| vs ScatterMoE | vs sonic-moe, quack 0.0.1 |", shown)
        row = next(line for line in shown.splitlines() if line.startswith("| olmoe |"))
        cells = row.split(" | ")
        self.assertEqual(cells[2], cells[-1].removesuffix(" |"))
        self.assertEqual(cells[3], cells[5])
        self.assertNotIn("release", results_page.readme_table())

    def test_a_layer_next_to_another_quack_has_no_ratio(self):
        path = self.folder / "peers.jsonl"
        quack = lambda one: "0.0.1" if one.name == "bench/olmoe/sonic-moe" else "0.0.2"
        lines = [dataclasses.replace(one, versions=one.versions | {"quack-kernels": quack(one)})
                 for one in records.read(path) if not one.name.startswith("release/")]  # fmt: skip
        records.write(path, sorted(lines, key=lambda one: one.name.startswith("bench/olmoe/")))
        shown = results_page.layers()
        times = shown.split("Peak memory")[0]
        cells = {line.split(" | ")[0]: line.split(" | ") for line in times.splitlines()}
        self.assertEqual(cells["| layer"][2], "vs sonic-moe, quack 0.0.2")
        self.assertEqual(cells["| olmoe"][2], "")
        self.assertRegex(cells["| wide"][2], "x / ")
        for text in (shown, results_page.readme_table()):
            self.assertRegex(" ".join(text.split()), "quack-kernels 0.0.[12] and 0.0.[12], ")

    def test_memory_from_pytorch_and_jax_and_ranks(self):
        path = self.folder / "memory.jsonl"
        records.write(path, [one for one in records.read(path) if "curve" not in one.name])
        for blocks, ms in ((1, 4.0), (2, 5.0)):
            self.add("memory", f"memory-curve/7b-n256/{blocks}", column_blocks=blocks,
                     total_ms=[1, ms, 9], peak_bytes=3 * 2**20, resident_bytes=2**20)  # fmt: skip
        shown = results_page.memory()
        self.assertIn("Layer 7b-n256 from PyTorch.", shown)
        self.assertIn("| 2 | 2 | 5.00 | 25.0 % |", shown)
        times = {"tilemoe.jax ms": 3.0, "tilemoe (torch) ms": 3.1, "ragged_dot's tokens": 512,
                 "ragged_dot per token": 7.25}  # fmt: skip
        self.add("jax", "jax/time/time-wide", **times)
        self.assertIn("| wide | 3.00 | 3.10 | 512 | 7.2x |", results_page.jax())
        self.without("gpu_tests", "ranks/")
        self.add("gpu_tests", "ranks/pull", gpus=2, status="passed", seconds=30.0, one="passed")
        self.assertIn("| expert parallelism, links between GPUs | NVIDIA H100 80GB HBM3 | 0.2.0 | "
                      "abcdef0 | 1 | 1 | 0 | 0 | 30 |", results_page.tests())  # fmt: skip


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
        self.assertLessEqual(bytes_in(results_page.RESULTS), 850_000)
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
