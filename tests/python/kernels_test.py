"""tilemoe_kernels on the CPU: what it measures, its results file, its errors."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))
import records

STEPS = ["top_k", "route", "up_projection", "down_projection", "combine", "activation_gradient",
         "score_gradient", "weight_gradient_2", "input_gradient", "combine_dX", "weight_gradient_1",
         "router_backward", "forward", "backward"]
FORWARD = [*STEPS[:5], "forward"]
# Of frozen experts with low-rank adapters.
ADAPTERS = ["pack_lora", "lora_P1", "lora_P2", "lora_Q2", "lora_gradient_2", "lora_Q1",
            "lora_gradient_1"]
ADAPTED = ["top_k", "route", "pack_lora", "lora_P1", "up_projection", "lora_P2", "down_projection",
           "combine", "lora_Q2", "activation_gradient", "score_gradient", "lora_gradient_2",
           "lora_Q1", "input_gradient", "combine_dX", "lora_gradient_1", "router_backward",
           "forward", "backward"]


class Kernels(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.file = pathlib.Path(temporary.name) / "out.jsonl"

    def run_program(self, *words, limit=""):
        command = f"{limit} exec {os.environ['TILEMOE_KERNELS']} --device cpu --threads 1 \"$@\""
        return subprocess.run(["bash", "-c", command, "sh", *map(str, words)], capture_output=True,
                              text=True, timeout=600)

    def measure(self, *words):
        done = self.run_program(*words, "--json", self.file)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = records.read(self.file)
        names = [one.name for one in found]
        self.assertEqual(len(set(names)), len(names))
        for one in found:
            self.assertEqual(set(one.versions), {"tilemoe", "compiler"})
            self.assertTrue(one.commit and one.device)
            first, median, third = one.values["ms"]
            self.assertTrue(0 < first <= median <= third, one)
            self.assertIn(one.name.split("/")[-1], done.stdout)
        return {one.name: one.values for one in found}

    def test_output_that_cannot_be_written_is_an_error(self):
        done = self.run_program("--list", limit="exec >/dev/full;")
        self.assertEqual((done.returncode, done.stderr),
                         (1, "tilemoe_kernels: error: cannot write the output\n"))

    def test_times_every_step(self):
        found = self.measure("cpu-t512", "--tokens", 32, "--repeat", 3)
        self.assertEqual(list(found), [f"kernels/cpu-t512-t32/{step}" for step in STEPS])
        for values in found.values():
            self.assertEqual(values["rows"], 32 * 4)
            self.assertNotIn("limit_ms", values, "it is not known for a CPU")
        up = found["kernels/cpu-t512-t32/up_projection"]
        flop = 2 * 128 * 512 * 512
        moved = 4 * (32 * 512 + 32 * 512 * 512 + 128 * (512 + 256))
        for rate, amount in ("tflop_per_s", flop * 1e-9), ("gb_per_s", moved * 1e-6):
            for one, ms in zip(up[rate], reversed(up["ms"])):
                self.assertAlmostEqual(one * ms, amount, delta=1e-3 * amount)
        self.assertNotIn("tflop_per_s", found["kernels/cpu-t512-t32/top_k"])

    def test_a_limit_is_of_operations_or_bytes(self):
        """1e12 operations or 20e9 bytes per second; a pass has the sum of its steps' limits."""
        found = self.measure("cpu-t512", "--tokens", 32, "--repeat", 1, "--pass", "forward",
                             "--limits", 1, 20)
        values = {name.split("/")[-1]: one for name, one in found.items()}
        self.assertEqual(list(values), FORWARD)
        limits = {name: one["limit_ms"] for name, one in values.items()}
        moved = 4 * (32 * 512 + 32 * 512 * 512 + 128 * (512 + 256))
        self.assertAlmostEqual(limits["up_projection"], moved / 20e9 * 1e3, delta=1e-3)
        self.assertAlmostEqual(limits.pop("forward"), sum(limits.values()), delta=1e-3)
        for one in values.values():
            self.assertAlmostEqual(one["limit_over_ms"][1] * one["ms"][1] / one["limit_ms"], 1,
                                   delta=1e-3)
        by_flop = self.measure("cpu-t512", "--tokens", 32, "--repeat", 1, "--pass", "forward",
                               "--limits", "1e-3", "1e6")["kernels/cpu-t512-t32/up_projection"]
        self.assertAlmostEqual(by_flop["limit_ms"], 2 * 128 * 512 * 512 / 1e9 * 1e3, delta=1e-1)

    def test_changes_the_layer(self):
        few = ["cpu-t512", "--tokens", 16, "--repeat", 1]
        steps = lambda *words: [name.split("/")[-1] for name in self.measure(*few, *words)]
        self.assertIn("bias_gradient", steps("--biases", "--dh-over-h"))
        self.assertEqual(steps("--column-blocks", 2), STEPS)
        self.assertEqual(steps("--weights", "gpt-oss", "--load", "zipf"), STEPS)
        self.assertEqual(steps("--pass", "backward"),
                         [step for step in STEPS if step not in FORWARD])
        adapted = steps("--lora-rank", 16)
        self.assertEqual(adapted, ADAPTED)
        self.assertEqual([step for step in adapted if step not in ADAPTERS],
                         [step for step in STEPS if not step.startswith("weight_gradient")])
        rounded = self.measure("cpu-t512", "--repeat", 1, "--rounding", "up", "--pass", "forward",
                               "--dtype", "bfloat16")
        self.assertNotIn("kernels/cpu-t512/top_k", rounded)
        self.assertTrue(all(values["rows"] % 128 == 0 for values in rounded.values()))
        one = self.measure(*few, "--load", "one-expert")
        self.assertEqual({values["rows"] for values in one.values()}, {16})

    def test_computes_in_fp8(self):
        """n is 64: gate and up are split. Weights in 16 bits have the same gradients."""
        few = ["cpu-fine-grained", "--tokens", 4, "--repeat", 1, "--dtype", "bfloat16",
               "--quantized", "none", "fp8"]
        quantize = {"quantize_X", "quantize_dO", "quantize_dH"}
        for recipe, name, own in (
                ("fp8", "recipe", quantize),
                ("fp8_forward", "forward",
                 {"quantize_X", "dequantize_W2_again", "dequantize_W1_again"})):
            found = {}
            for full in self.measure(*few, "--recipe", recipe):
                _, layer, step = full.split("/")
                found.setdefault(layer, []).append(step)
            fp8 = found[f"cpu-fine-grained-t4-fp8-{name}"]
            self.assertEqual(found["cpu-fine-grained-t4"], STEPS)
            self.assertEqual(set(fp8), set(STEPS) | own)
            self.assertEqual([step for step in fp8 if step not in own], STEPS)
        adapted = self.measure(*few[:-2], "fp8", "--recipe", "fp8_forward", "--lora-rank", 8)
        self.assertEqual({name.split("/")[-1] for name in adapted},
                         set(ADAPTED) | {"quantize_X", "dequantize_W1_again", "dequantize_W2_again"})

    def test_times_routing(self):
        found = self.measure("--routing", "cpu-t512", "--repeat", 1)
        names = [name.removeprefix("routing/cpu-t512/") for name in found]
        for name in ("top_k", "route", "top_k and route", "top_k, sigmoid, 4 of 8 groups",
                     "rounded, nearest", "rounded, balanced", "rounded, nearest, each 256"):
            self.assertIn(name, names)
        self.assertNotIn("rounded, nearest, each 2048", names, "of 512 tokens")

    def test_refuses_in_one_sentence_and_keeps_the_file(self):
        self.file.write_text("kept\n")
        json = ["--json", self.file]
        for words, status, part in (
                (["nothing", *json], 2, "unknown layer nothing, expected one of 7b-n256,"),
                (["--repeat", "0", *json], 2, "--repeat"),
                (["--repeat", "many"], 2, "many"),
                (["--tokens", "0"], 2, "--tokens"),
                (["--limits", "5"], 2, "--limits"),
                (["--limits", "-5", "3"], 2, "--limits"),
                (["--gemm", "--routing"], 2, "--gemm excludes --routing"),
                (["--routing", "--lora-rank", "8"], 2, "--routing excludes --lora-rank"),
                (["cpu-t512", "--lora-rank", "12"], 1, "rank_1 is 12, expected a multiple of 8"),
                (["--dance"], 2, "--dance"),
                (["--gemm", *json], 1, "--gemm requires a GPU: "),
                (["--configurations", *json], 1, "--configurations requires a GPU: "),
                (["cpu-t512", "--json", "/nowhere/out"], 1, "cannot write /nowhere/out")):
            done = self.run_program(*words)
            self.assertEqual(done.returncode, status, (words, done.stderr))
            self.assertTrue(done.stderr.startswith("tilemoe_kernels: error: "), done.stderr)
            self.assertIn(part, done.stderr)
        done = self.run_program("7b-n256", *json, limit="ulimit -v 1000000;")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"7b-n256 requires [\d.]+ GiB of memory")
        self.assertEqual(self.file.read_text(), "kept\n")

    def test_help_and_list(self):
        for words in ["--help"], ["--list"]:
            done = self.run_program(*words)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("7b-n256: T=24576, d=1536, n=256, E=128, K=8, bfloat16\n", done.stdout)


if __name__ == "__main__":
    unittest.main()
