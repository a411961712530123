"""The source tree: which file may include which, where things must lie, and how long a file may be.

docs/contributing.md ("Map of folders") describes the folders. Python modules of the tests have unique names.
"""

import collections
import pathlib
import re
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIXES = {".h", ".cpp", ".cu", ".inc"}

# A folder and all folders whose files its files may include. "." is src itself.
ALLOWED = {
    ".": {"layer", "routing", "core", "cpu", "cuda"},  # the C interface selects the backend
    "layer": {"routing", "core"},
    "cpu": {"routing", "core"},
    "routing": {"core"},
    "core": set(),
    "cuda": {"cuda/ops", "cuda/kernels", "cuda/gemm/schedule", "cuda/core", "routing", "core"},
    "cuda/ops": {"cuda/gemm/epilogue", "cuda/gemm", "cuda/gemm/load", "cuda/gemm/schedule", "cuda/ptx",
                 "cuda/core", "core",
                 # The logits of the router are a GEMM among the kernels of routing.
                 "cuda/kernels", "routing"},
    # The order of the experts (rank_experts.cu) is the scheduler's.
    "cuda/kernels": {"cuda/gemm/schedule", "cuda/ptx", "cuda/core", "routing", "core"},
    "cuda/gemm/epilogue": {"cuda/gemm", "cuda/gemm/load", "cuda/gemm/schedule", "cuda/ptx", "cuda/core", "core"},
    "cuda/gemm": {"cuda/gemm/load", "cuda/gemm/schedule", "cuda/ptx", "cuda/core", "core"},
    "cuda/gemm/load": {"cuda/gemm/schedule", "cuda/ptx", "cuda/core", "core"},
    "cuda/gemm/schedule": {"cuda/ptx", "cuda/core", "core"},
    "cuda/ptx": {"cuda/core", "core"},
    "cuda/core": {"core"},
}
# The chapters, and the lines that they may have; every other file has at most LINES.
CHAPTERS = {"cuda/gemm/sm80.h", "cuda/gemm/sm90.h", "cuda/gemm/sm100.h"}
CHAPTER_LINES, LINES = 500, 350

# Two headers of one name, and why.
SAME_NAME = {
    "activation.h": "the same step on two backends",
}
# Headers with one includer that are files even if they fit into it, and why.
ONE_INCLUDER = {
    "cpu/activations-inl.h": "the place of an activation",
    "cuda/gemm/epilogue/sm90_activation.h": "ops names the parts of an arch, and an epilogue is no part of ops",
    "cuda/gemm/epilogue/sm90_quantize.h": "ops names the parts of an arch, and an epilogue is no part of ops",
    "cuda/gemm/epilogue/sm90_whole_gradient.h": "as sm90_activation.h",
    "cuda/gemm/load/sm80_weights.h": "ops names the parts of an arch, and a loader is no part of ops",
    "cuda/gemm/sm90_fp8_adapter.h": "as sm80_codes_mma.h",
    "cuda/gemm/sm80_codes_mma.h": "ops names the parts of an arch, and MMAs are no part of ops",
}
# Headers of ptx without an instruction: the simulator compiles them as they are.
WITHOUT_TWIN = {"address.h", "descriptors.h"}


class Tree:
    """The sources below `root`/src as a graph, and what is wrong with them."""

    def __init__(self, root):
        self.root = root
        source = root / "src"
        self.text = {path.relative_to(source).as_posix(): path.read_text()
                     for path in sorted(source.rglob("*")) if path.suffix in SUFFIXES}
        self.includes = {name: [other for other in includes_of(text) if other in self.text]
                         for name, text in self.text.items()}

    def lines(self, name):
        return self.text[name].count("\n")

    def headers(self):
        return [name for name in self.text if name.endswith(".h")]

    def upward_includes(self):
        wrong = []
        for name, others in self.includes.items():
            here = folder(name)
            if here not in ALLOWED:
                wrong.append(f"{name}: no rule for the folder {here}")
                continue
            wrong += [f"{name} includes {other}" for other in others
                      if folder(other) != here and folder(other) not in ALLOWED[here]]
        return wrong

    def missing_includes(self):
        """Names in quotes with the folder of a source that are no file."""
        folders = {folder(name).split("/")[0] for name in self.text} - {"."}
        return [f"{name} includes {other}" for name, text in self.text.items() for other in includes_of(text)
                if other.split("/")[0] in folders and other not in self.text]

    def cycles(self):
        """One cycle of files, as a list, or an empty list."""
        state, path = {}, []

        def visit(name):
            state[name] = "open"
            path.append(name)
            for other in self.includes[name]:
                if state.get(other) == "open":
                    return path[path.index(other):] + [other]
                if other not in state and (found := visit(other)):
                    return found
            state[name] = "done"
            path.pop()
            return []

        return next((found for name in self.text if name not in state and (found := visit(name))), [])

    def same_names(self):
        named = collections.defaultdict(list)
        for name in self.headers():
            named[pathlib.PurePath(name).name].append(name)
        return {name: where for name, where in named.items() if len(where) > 1}

    def instructions_outside_ptx(self):
        return [name for name, text in self.text.items()
                if name.startswith("cuda/") and folder(name) != "cuda/ptx" and re.search(r"\basm\b", text)]

    def long_files(self):
        return [f"{name}: {self.lines(name)} lines" for name in self.text
                if self.lines(name) > (CHAPTER_LINES if name in CHAPTERS else LINES)]

    def lone_headers(self, that_fit=True):
        """Headers that nothing includes but one file of src, with which they would fit."""
        users = collections.defaultdict(set)
        for top in ("src", "tests", "simulator", "benchmarks", "verify", "apps", "bindings", "examples"):
            for path in sorted((self.root / top).rglob("*")):
                if path.suffix in SUFFIXES | {".in"}:
                    for other in includes_of(path.read_text()):
                        users[other].add(path.relative_to(self.root).as_posix())
        lone = []
        for name in self.headers():
            if len(users[name]) != 1:
                continue
            user = min(users[name]).removeprefix("src/")
            if user in self.text:
                limit = CHAPTER_LINES if user in CHAPTERS else LINES
                if not that_fit or self.lines(name) + self.lines(user) <= limit:
                    lone.append(f"{name} of {user}")
        return lone

    def ptx_without_twin(self):
        twins = {path.name for path in (self.root / "simulator/include/cuda/ptx").glob("*.h")}
        real = {pathlib.PurePath(name).name for name in self.headers() if folder(name) == "cuda/ptx"}
        return sorted((real - twins - WITHOUT_TWIN) | (twins - real) | (twins & WITHOUT_TWIN))


def folder(name):
    return pathlib.PurePath(name).parent.as_posix()


def includes_of(text):
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)


class Folders(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tree = Tree(ROOT)

    def test_tree_is_found(self):
        self.assertGreater(len(self.tree.text), 120)
        self.assertGreater(sum(map(len, self.tree.includes.values())), 400)
        self.assertEqual(self.tree.missing_includes(), [])

    def test_arrows_point_down(self):
        self.assertEqual(self.tree.upward_includes(), [])

    def test_files_form_no_cycle(self):
        self.assertEqual(self.tree.cycles(), [])

    def test_a_name_is_one_header(self):
        self.assertEqual(set(self.tree.same_names()), set(SAME_NAME))

    def test_instructions_lie_in_ptx(self):
        self.assertEqual(self.tree.instructions_outside_ptx(), [])

    def test_files_are_short(self):
        self.assertEqual(self.tree.long_files(), [])

    def test_a_header_has_two_includers(self):
        def names(lines):
            return {line.split(" of ")[0] for line in lines}
        self.assertEqual(names(self.tree.lone_headers()) - set(ONE_INCLUDER), set())
        of_any_length = names(self.tree.lone_headers(that_fit=False))
        self.assertEqual(set(ONE_INCLUDER) - of_any_length, set(), "these need no exception any more")

    def test_ptx_has_twins_in_the_simulator(self):
        self.assertEqual(self.tree.ptx_without_twin(), [])

    def test_one_name_is_one_module(self):
        """The package's tests import from these folders in one process, in any order."""
        found = collections.defaultdict(list)
        for where in ("benchmarks", "examples/pretrain", "tests/torch"):
            for path in sorted((ROOT / where).glob("*.py")):
                found[path.stem].append(where)
        self.assertGreater(len(found), 80)
        self.assertEqual({name: where for name, where in found.items() if len(where) > 1}, {})


class Planted(unittest.TestCase):
    """Each check finds its fault in a small tree, and nothing in the tree without the fault."""

    CLEAN = {
        "src/core/check.h": "",
        "src/core/numbers.h": '#include "core/check.h"\n',
        "src/layer/layer.cpp": '#include "core/check.h"\n#include "core/numbers.h"\n',
        "src/routing/spec.cpp": '#include "core/numbers.h"\n',
        "src/cuda/ptx/copy.h": 'asm volatile("");\n',
        "src/cuda/kernels/sum_rows.cu": '#include "cuda/ptx/copy.h"\n',
        "src/cuda/kernels/top_k.cu": '#include "cuda/ptx/copy.h"\n',
        "src/cuda/gemm/sm90.h": "\n" * CHAPTER_LINES,
        "simulator/include/cuda/ptx/copy.h": "",
    }

    def found(self, check, **changed):
        with tempfile.TemporaryDirectory() as root:
            for name, text in {**self.CLEAN, **changed.get("files", {})}.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return getattr(Tree(pathlib.Path(root)), check)()

    def expect(self, check, files, *, named):
        self.assertFalse(self.found(check), "in the clean tree")
        self.assertIn(named, str(self.found(check, files=files)))

    def test_include_that_points_up(self):
        self.expect("upward_includes", {"src/core/check.h": '#include "layer/layer.h"\n', "src/layer/layer.h": ""},
                    named="core/check.h includes layer/layer.h")
        self.expect("upward_includes", {"src/cuda/ptx/copy.h": '#include "cuda/gemm/sm90.h"\n'}, named="ptx/copy.h")
        self.expect("upward_includes", {"src/cpu/gemm.cpp": '#include "cuda/ptx/copy.h"\n'}, named="cpu/gemm.cpp")

    def test_folder_without_rule(self):
        self.expect("upward_includes", {"src/misc/a.h": ""}, named="no rule for the folder misc")

    def test_include_of_no_file(self):
        self.expect("missing_includes", {"src/core/check.h": '#include "core/gone.h"\n'}, named="core/gone.h")

    def test_cycle(self):
        self.expect("cycles", {"src/core/check.h": '#include "core/numbers.h"\n'}, named="core/numbers.h")

    def test_two_headers_of_one_name(self):
        self.expect("same_names", {"src/cpu/check.h": ""}, named="cpu/check.h")

    def test_instruction_elsewhere(self):
        self.expect("instructions_outside_ptx", {"src/cuda/kernels/top_k.cu": 'asm("");\n'}, named="top_k.cu")

    def test_long_file(self):
        self.expect("long_files", {"src/core/check.h": "\n" * (LINES + 1)}, named="core/check.h: 351")
        self.expect("long_files", {"src/cuda/gemm/sm90.h": "\n" * (CHAPTER_LINES + 1)}, named="sm90.h: 501")

    def test_header_of_one_file(self):
        alone = {"src/core/one.h": "\n", "src/core/one.cpp": '#include "core/one.h"\n'}
        self.expect("lone_headers", alone, named="core/one.h of core/one.cpp")
        self.assertFalse(self.found("lone_headers", files={**alone, "src/core/one.h": "\n" * LINES}))
        self.assertFalse(self.found("lone_headers", files={**alone, "tests/t.cpp": '#include "core/one.h"\n'}))

    def test_instruction_without_twin(self):
        self.expect("ptx_without_twin", {"src/cuda/ptx/tma.h": ""}, named="tma.h")
        self.expect("ptx_without_twin", {"simulator/include/cuda/ptx/gone.h": ""}, named="gone.h")
        self.expect("ptx_without_twin", {"simulator/include/cuda/ptx/address.h": "", "src/cuda/ptx/address.h": ""},
                    named="address.h")


if __name__ == "__main__":
    unittest.main()
