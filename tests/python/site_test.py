"""The documentation site, without Sphinx: the reference of Python names every public object, and the
copy of the package that autoapi reads has what it must have."""

import ast
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "python")]
import package_source  # noqa: E402

PACKAGE = ROOT / "python" / "tilemoe"
REFERENCE = ROOT / "docs" / "api" / "python.md"
MODULES = {
    "tilemoe": "__init__.py", "tilemoe.expert_parallel": "expert_parallel.py",
    "tilemoe.jax": "jax/__init__.py", "tilemoe.peft": "peft.py",
    "tilemoe.state_dict": "state_dict.py", "tilemoe.torchtitan": "torchtitan.py",
    "tilemoe.transformers": "transformers.py",
}  # fmt: skip
# Older names, and a string.
UNNAMED = {"tilemoe.set_block_turns", "tilemoe.set_kit", "tilemoe.topk_router",
           "tilemoe.__version__", "tilemoe.jax.__version__"}  # fmt: skip
SOURCE = '''
from typing import TYPE_CHECKING, NamedTuple, overload
if TYPE_CHECKING:
    from .lora import LoRA

_scores = Reader("scores", OfScores)


class Aux(NamedTuple):
    """A result."""

    ids: Tensor  # (T, K) int32: the chosen experts
    name: str  # of the layer


@overload
def scores(x: int, **options: Unpack[OfScores]) -> int: ...
@_scores.shows
def scores(x: Tensor, **options: Unpack[OfScores]) -> Tensor:
    """Compute scores.

    Args:
        x: logits.

    Shape:
        x (T, E).
    """
'''


class Reference(unittest.TestCase):
    def test_names_every_public_object(self):
        public = set()
        for module, file in MODULES.items():
            for node in ast.parse((PACKAGE / file).read_text()).body:
                if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
                    public |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
        named = re.findall(r"^\.\. autoapi\w+:: ([\w.]+)$", REFERENCE.read_text(), re.MULTILINE)
        self.assertEqual(len(named), len(set(named)))
        self.assertEqual(public - UNNAMED, set(named))
        self.assertLessEqual({name.rpartition(".")[0] for name in named}, set(MODULES))


class Copy(unittest.TestCase):
    def test_has_imports_fields_and_options(self):
        copy = package_source.readable(SOURCE)
        ast.parse(copy)
        self.assertIn("\nfrom .lora import LoRA\n", copy)
        self.assertNotIn("@overload", copy)
        self.assertIn('    ids: Tensor\n    """``(T, K) int32``. The chosen experts"""\n', copy)
        self.assertIn('    name: str\n    """of the layer"""\n', copy)
        options = [f":py:attr:`~tilemoe.options.Options.{name}`"
                   for name in ("scoring", "routed_scaling_factor")]  # fmt: skip
        self.assertIn(f"        x: logits.\n        **options: {', '.join(options)}.\n\n    Shape",
                      copy)  # fmt: skip

    def test_of_each_file_is_python(self):
        files = list(PACKAGE.rglob("*.py"))
        self.assertGreater(len(files), 50)
        for file in files:
            copy = package_source.readable(file.read_text())
            with self.subTest(file.name):
                ast.parse(copy)
                self.assertNotRegex(copy, r"(?m)^if _?TYPE_CHECKING:|^@overload")
        shown = package_source.readable((PACKAGE / "functional.py").read_text())
        self.assertEqual(shown.count("        **options: :py:attr:"), 4)


if __name__ == "__main__":
    unittest.main()
