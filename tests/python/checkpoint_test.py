"""Checkpoints read by the safetensors package: what they hold, and that the model of
examples/read_checkpoint.py gives the logits that the program gives."""

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

import numpy as np
from safetensors import safe_open

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples"))
import read_checkpoint  # noqa: E402

TILEMOE, PRINT_LOGITS = os.environ["TILEMOE"], os.environ["PRINT_LOGITS"]

SIZES = ["--layers", "2", "--width", "48", "--experts", "12", "--top-k", "3", "--expert-width", "24",
         "--heads", "3", "--head-width", "16", "--taps", "3", "--batch", "4", "--length", "40"]
STEPS = 25
# Relative to the logits' rms, NumPy in float64 against the program in float32.
TOLERANCE = 2e-5


def words(seed, count):
    rng = random.Random(seed)
    known = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 6))) for _ in range(50)]
    return " ".join(rng.choice(known) for _ in range(count))


class Checkpoint(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.run_folder = os.path.join(temporary.name, "run")
        self.text = os.path.join(temporary.name, "text.txt")
        with open(self.text, "w", encoding="ascii") as file:
            file.write("\n\n".join(words(seed, 100) for seed in range(40)))

    def train(self, *options):
        subprocess.run([TILEMOE, "train", "--text", self.text, "--out", self.run_folder,
                        "--steps", str(STEPS), "--warm-up", "5", *SIZES, *options],
                       check=True, stdout=subprocess.DEVNULL, timeout=600)
        return os.path.join(self.run_folder, f"step-{STEPS:08}.safetensors")

    def check_logits(self, *options, unused=()):
        path = self.train(*options)
        weights, state = read_checkpoint.load(path, np.float64)
        data = words(99, 30).encode()
        printed = subprocess.run([PRINT_LOGITS, path], input=data, check=True, capture_output=True)
        expected = np.frombuffer(printed.stdout, np.float32).reshape(len(data), 256)
        rms = np.sqrt(np.square(expected, dtype=np.float64).mean())
        self.assertGreater(rms, 0.1, "the model has learnt nothing, so its logits mean nothing")

        def error(tensors):
            found = read_checkpoint.logits(tensors, state["config"], data)
            return np.abs(found - expected).max() / rms

        self.assertTrue(error(weights) <= TOLERANCE, f"the logits differ by {error(weights):.2e}")
        for name in weights.keys() - set(unused):  # each tensor takes part
            spoilt = {**weights, name: np.zeros_like(weights[name])}
            self.assertFalse(error(spoilt) <= 10 * TOLERANCE, f"{name} makes no difference")

    def test_every_activation_has_a_formula(self):
        text = subprocess.run([TILEMOE, "info", "--json"], check=True, stdout=subprocess.PIPE).stdout
        names = json.loads(text)["backends"][0]["supports"]["activations"]
        self.assertIn("swiglu", names)
        h = np.linspace(-8, 8, 33)
        for name in names:
            with self.subTest(name):
                gated, function = read_checkpoint.activation(name.replace("_", "-"))
                a = function(h, h[::-1]) if gated else function(h)
                self.assertTrue(np.isfinite(a).all() and np.ptp(a) > 0)

    def test_gated_linear_unit(self):
        self.check_logits("--activation", "glu")

    def test_top_k_swiglu(self):
        self.check_logits()

    def test_softmax_over_all(self):
        self.check_logits("--scoring", "softmax-all", "--activation", "geglu")

    def test_sigmoid_with_selection_bias(self):
        self.check_logits("--scoring", "sigmoid-renormalized", "--bias-rate", "0.02",
                          "--activation", "reglu")

    def test_token_rounding(self):
        self.check_logits("--routing", "nearest", "--m", "8", "--activation", "relu-squared")

    def test_dense(self):
        self.check_logits("--dense", "--activation", "gelu-tanh", "--embedded-bytes", "1")

    def test_no_experts(self):
        self.check_logits("--experts-off",
                          unused=["blocks.0.moe_norm.weight", "blocks.1.moe_norm.weight"])

    def test_contents(self):
        path = self.train()
        with open(path, "rb") as file:
            whole = file.read()
        header_bytes = struct.unpack("<Q", whole[:8])[0]
        metadata = json.loads(whole[8:8 + header_bytes])["__metadata__"]
        digits = metadata["file_sha256"].encode()
        self.assertEqual(len(digits), 64)
        self.assertEqual(hashlib.sha256(whole.replace(digits, b"0" * 64, 1)).hexdigest().encode(), digits)
        state = json.loads(metadata["state"])
        with open(self.text, "rb") as file:
            self.assertEqual(hashlib.sha256(file.read()).hexdigest(), state["text"]["sha256"])
        self.assertEqual(state["step"], STEPS)
        self.assertEqual(state["config"]["experts"], 12)
        self.assertTrue({"random", "data"} <= state.keys())
        with safe_open(path, framework="numpy") as file:
            shapes = {name: file.get_tensor(name).shape for name in file.keys()}
            moments = [file.get_tensor(name) for name in shapes if name.startswith("optimizer.")]
        weights, _ = read_checkpoint.load(path)
        self.assertEqual(shapes["blocks.1.moe.experts.w1"], (12, 48, 48))
        self.assertEqual(len(moments), 2 * len(weights))
        self.assertTrue(all(np.abs(moment).max() > 0 for moment in moments))

    def test_example_runs(self):
        example = read_checkpoint.__file__
        result = subprocess.run([sys.executable, example, self.train(), "abc"], check=True, text=True,
                                capture_output=True)
        self.assertIn(f"step {STEPS}, text ", result.stdout)
        self.assertIn("%", result.stdout)


if __name__ == "__main__":
    unittest.main()
