"""`tilemoe plot`: pictures that show the log, and errors that say what to do."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import matplotlib.image

TILEMOE = os.environ["TILEMOE"]


def log_lines(steps=60, loss=lambda step: 4 / step + 1, load=lambda step: [10, 20, 30, 40]):
    lines = [{"event": "start", "config": {}}]
    for step in range(1, steps + 1):
        lines.append({"event": "step", "step": step, "loss": loss(step), "lr": 1e-3,
                      "grad_norm": 1.0, "tokens_per_s": 100, "expert_load": [load(step)] * 2})
        if step % 20 == 0:
            lines.append({"event": "eval", "step": step, "loss": 1.1})
    return [json.dumps(line) for line in lines]


class Plot(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = self.temporary.name

    def plot(self, text, *options, python=sys.executable, **environment):
        """The result of plotting a log of that text, and the pictures by name."""
        log = os.path.join(self.folder, "log.jsonl")
        with open(log, "w", encoding="utf-8") as file:
            file.write(text)
        result = subprocess.run(
            [TILEMOE, "plot", log, "--python", python, *options], text=True, capture_output=True,
            env={**os.environ, **environment}, timeout=300)
        pictures = {}
        for path in result.stdout.split():
            with open(path, "rb") as file:
                pictures[os.path.relpath(path, self.folder)] = file.read()
        return result, pictures

    def pictures_of(self, lines):
        result, pictures = self.plot("\n".join(lines) + "\n")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(set(pictures), {"log-loss.png", "log-load.png"})
        return pictures

    def test_pictures_show_the_log(self):
        pictures = self.pictures_of(log_lines())
        for name in pictures:
            pixels = matplotlib.image.imread(os.path.join(self.folder, name))
            self.assertGreater(pixels.shape[0], 300)
            self.assertGreater(pixels[..., :3].std(), 0.05, "the picture is blank")
        other_loss = self.pictures_of(log_lines(loss=lambda step: 5 / step + 1))
        self.assertNotEqual(pictures["log-loss.png"], other_loss["log-loss.png"])
        self.assertEqual(pictures["log-load.png"], other_loss["log-load.png"])
        other_load = self.pictures_of(log_lines(load=lambda step: [10, 20, 40, 30]))
        self.assertEqual(pictures["log-loss.png"], other_load["log-loss.png"])
        self.assertNotEqual(pictures["log-load.png"], other_load["log-load.png"])

    def test_a_runs_folder_stands_for_its_log(self):
        pictures = self.pictures_of(log_lines())
        result = subprocess.run([TILEMOE, "plot", self.folder, "--python", sys.executable], text=True,
                                capture_output=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual({os.path.relpath(path, self.folder) for path in result.stdout.split()},
                         set(pictures))

    def test_what_is_not_a_number_or_missing_is_left_out(self):
        self.pictures_of(log_lines(loss=lambda step: None if step % 7 == 0 else 1.0))
        self.pictures_of(log_lines(steps=1))
        self.pictures_of(log_lines(steps=1, loss=lambda step: None))
        self.pictures_of(log_lines(load=lambda step: [0, 0, 0, 0]))
        dense = [line.replace("expert_load", "other") for line in log_lines()]
        result, pictures = self.plot("\n".join(dense) + "\n")
        self.assertEqual((result.returncode, set(pictures)), (0, {"log-loss.png"}))

    def test_a_run_that_still_writes_is_drawn(self):
        lines = log_lines()
        result, _ = self.plot("\n".join(lines) + '\n{"event":"st')
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_folder_and_format(self):
        folder = os.path.join(self.folder, "new", "folder")
        result, pictures = self.plot("\n".join(log_lines()) + "\n", "--out", folder, "--format", "svg")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"<svg", pictures["new/folder/log-loss.svg"])

    def error(self, text, **arguments):
        result, pictures = self.plot(text, **arguments)
        self.assertEqual((result.returncode, pictures), (1, {}))
        self.assertNotIn("Traceback", result.stderr)
        return result.stderr

    def test_says_which_package_is_missing(self):
        bare = os.path.join(self.folder, "python-without-packages")
        with open(bare, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        os.chmod(bare, 0o755)
        log = "\n".join(log_lines()) + "\n"
        for python in (bare, os.path.join(self.folder, "no-python")):
            error = self.error(log, python=python)
            self.assertIn("sudo apt-get install -y python3-matplotlib", error)

    def test_imports_nothing_from_the_current_folder(self):
        """Whatever lies next to the log, and whoever put the folder on the path."""
        hostile = os.path.join(self.folder, "hostile")
        os.mkdir(hostile)
        for module in ("json", "argparse", "math", "matplotlib", "numpy", "importlib"):
            with open(os.path.join(hostile, f"{module}.py"), "w", encoding="utf-8") as file:
                file.write(f"open({os.path.join(self.folder, 'ran')!r}, 'a').write({module!r})\n")
        log = os.path.join(hostile, "log.jsonl")
        with open(log, "w", encoding="utf-8") as file:
            file.write("\n".join(log_lines()) + "\n")
        for path, python in ((None, []), ("", ["--python", sys.executable])):
            environment = {**os.environ, "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]}
            environment.pop("PYTHONPATH", None)
            if path is not None:
                environment["PYTHONPATH"] = path + ":/nowhere"
            result = subprocess.run([TILEMOE, "plot", "log.jsonl", *python], cwd=hostile,
                                    env=environment, text=True, capture_output=True, timeout=300)
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.folder, "ran")))
        # The script alone, as an old Python runs it, which has no option to leave the folder out.
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "apps", "tilemoe",
                              "plot_log.py")
        with open(script, encoding="utf-8") as file:
            result = subprocess.run([sys.executable, "-c", file.read(), "log.jsonl"], cwd=hostile,
                                    text=True, capture_output=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.folder, "ran")))

    def test_any_name_of_a_log_or_folder_is_drawn(self):
        for name in ("-x$\\frac{$", b"a$b\xff\n"):
            folder = os.path.join(os.fsencode(self.folder), os.fsencode(name))
            os.mkdir(folder)
            with open(os.path.join(folder, b"-log.jsonl"), "w", encoding="utf-8") as file:
                file.write("\n".join(log_lines()) + "\n")
            result = subprocess.run([TILEMOE, "plot", "--python", sys.executable, "--out=-out", "--",
                                     "-log.jsonl"], cwd=folder, capture_output=True, timeout=300)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stdout.split(), [b"-out/-log-loss.png", b"-out/-log-load.png"])

    def test_says_what_is_wrong_with_the_log(self):
        self.assertIn("line 2: not JSON", self.error('{"event":"start"}\nloss 1\n'))
        self.assertIn("line 1: not an object", self.error("[1]\n"))
        self.assertIn("no steps", self.error('{"event":"start"}\n'))
        step = json.loads(log_lines(1)[1])
        for field, values in {"step": [None, "1", [], True, 10**400],
                              "loss": ["2", [1], {}, 10**400, float("nan")],
                              "expert_load": [1, [1], [[]], [["1"]], [[1, 2], [1]], {"a": 1}]}.items():
            for value in values:
                self.assertIn(f'line 1: "{field}" is not', self.error(json.dumps({**step, field: value}) + "\n"))
        self.assertIn("line 1: not JSON", self.error("[" * 100_000 + "\n"))
        changed = {**step, "expert_load": [[1, 2]]}
        self.assertIn("change from line to line",
                      self.error(json.dumps(step) + "\n" + json.dumps(changed) + "\n"))
        os.remove(os.path.join(self.folder, "log.jsonl"))
        result = subprocess.run([TILEMOE, "plot", "none.jsonl", "--python", sys.executable], text=True,
                                capture_output=True)
        self.assertEqual(result.returncode, 1)
        self.assertIn("none.jsonl", result.stderr)


if __name__ == "__main__":
    unittest.main()
