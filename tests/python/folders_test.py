"""The folders of src/cuda: what each may include, as docs/development.md says. And names of Python modules."""

import collections
import pathlib
import re
import unittest

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "src"
# Each may include those after it, and none before.
LAYERS = ["cuda", "cuda/instances", "cuda/sm100", "cuda/sm90", "cuda/sm80", "cuda/step", "cuda/rowwise",
          "cuda/load", "cuda/epilogue", "cuda/schedule", "cuda/ptx", "cuda/core"]
# Below, and of no business.
ASIDE = {("cuda/sm100", "cuda/sm90"), ("cuda/sm100", "cuda/sm80"), ("cuda/sm90", "cuda/sm80"),
         ("cuda/step", "cuda/rowwise"), ("cuda/step", "cuda/load"), ("cuda/step", "cuda/epilogue"),
         ("cuda/step", "cuda/ptx"), ("cuda/rowwise", "cuda/load"), ("cuda/rowwise", "cuda/epilogue"),
         ("cuda/load", "cuda/epilogue"), ("cuda/load", "cuda/schedule"), ("cuda/sm80", "cuda/load")}


def files():
    return [path for path in sorted((SOURCES / "cuda").rglob("*"))
            if path.suffix in (".h", ".cpp", ".cu", ".inc")]


def folder(path):
    return str(path.parent.relative_to(SOURCES))


class Folders(unittest.TestCase):
    def test_arrows_point_down(self):
        arrows = 0
        for path in files():
            here = folder(path)
            for name in re.findall(r'#include "(cuda/[^"]+)"', path.read_text()):
                there = folder(SOURCES / name)
                if there == here:
                    continue
                arrows += 1
                with self.subTest(file=str(path.relative_to(SOURCES)), includes=name):
                    self.assertTrue((SOURCES / name).is_file())
                    self.assertLess(LAYERS.index(here), LAYERS.index(there))
                    self.assertNotIn((here, there), ASIDE)
        self.assertGreater(arrows, 100)

    def test_layers_below_name_nothing_of_cuda_s(self):
        """The files that all backends share include of the CUDA backend its entry alone."""
        for path in sorted(SOURCES.glob("*.[hc]*")):
            for name in re.findall(r'#include "(cuda/[^"]+)"', path.read_text()):
                self.assertEqual(name, "cuda/backend.h", path.name)

    def test_instructions_stand_in_one_drawer(self):
        for path in files():
            if folder(path) != "cuda/ptx":
                self.assertIsNone(re.search(r"\basm\b", path.read_text()), path.name)

    def test_one_name_is_one_module(self):
        """The package's tests import from these folders in one process, in any order."""
        found = collections.defaultdict(list)
        for folder in ("benchmarks", "examples/pretrain", "tests/torch"):
            for path in sorted((SOURCES.parent / folder).glob("*.py")):
                found[path.stem].append(folder)
        self.assertGreater(len(found), 80)
        self.assertEqual({name: where for name, where in found.items() if len(where) > 1}, {})


if __name__ == "__main__":
    unittest.main()
