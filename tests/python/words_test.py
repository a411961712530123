"""The check of names: what it finds, and what it leaves alone."""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_words  # noqa: E402

WORDS = check_words.Words()


def found(name, text):
    """What the check finds in a file of this name and text: [(line, word)]."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / name).write_text(text, encoding="utf-8")
        all_of_it = check_words.findings(WORDS, pathlib.Path(folder), name)
        return sorted({(line, word) for line, word, _ in all_of_it})


@contextlib.contextmanager
def tree(**files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (pathlib.Path(folder) / name.replace("__", ".")).write_text(text, encoding="utf-8")
        yield folder


def run(root, *files):
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "check_words.py"), "--root", root, *files],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


class Table(unittest.TestCase):
    def test_each_rule_finds_its_example(self):
        self.assertGreater(len(WORDS.names), 30)
        for rule in WORDS.names:
            with self.subTest(word=rule.word):
                replacements = [to for _, to in WORDS.of_name(rule.example)]
                self.assertIn(rule.replacement, replacements)


class Names(unittest.TestCase):
    def test_are_split_at_underscores_and_capitals(self):
        for name in ("kits", "kit_of", "KitName", "kKits", "KIT", "BuiltKit", "a_kit_"):
            self.assertEqual(found("a.cpp", f"int {name};\n"), [(1, name)], name)

    def test_that_only_look_alike_are_left_alone(self):
        legal = ("toolkit CUDAToolkit scikit_build almost_all kMaxRows shared shared_memory sharex share_of reproduction"
                 " pair_row pairs PairScratch slash task mask basket return turn_on yearly nearly earliest"
                 " adjacent_find threshold outermost checked_product OuterProduct block_turns tilemoe_set_cuda_kit"
                 " TILEMOE_ROUTE_TOKENS_MOST_T")
        self.assertEqual(found("a.cpp", "\n".join(legal.split())), [])

    def test_of_every_kind_of_code(self):
        for name, text in (("a.h", "struct HeldTile;"), ("a.cu", "struct HeldTile;"),
                           ("a.inc", "ROW(HeldTile)"), ("a.py", "HeldTile = 1"),
                           ("a.cmake", "set(HeldTile 1)"), ("CMakeLists.txt", "set(HeldTile 1)"),
                           ("a.sh", "HeldTile=1")):
            self.assertEqual(found(name, "\n" + text + "\n"), [(2, "HeldTile")], name)

    def test_of_files(self):
        self.assertEqual(found("few_tokens.h", ""), [(0, "few_tokens.h")])
        self.assertEqual(found("slab.md", "a slab\n"), [(0, "slab.md")])
        self.assertEqual(found("decode.h", ""), [])


class Text(unittest.TestCase):
    def test_has_its_names_checked_with_their_line(self):
        self.assertEqual(found("a.cpp", '// One.\n// By kit_of\nint x;  // HeldTile\nauto y = "told_full";\n'),
                         [(2, "kit_of"), (3, "HeldTile"), (4, "told_full")])
        self.assertEqual(found("a.py", '"""Reads it.\n\nThe kit_of.\n"""\n# held_out_loss\n'),
                         [(3, "kit_of"), (5, "held_out_loss")])
        self.assertEqual(found("a.sh", "# kit_of text\necho 'x'\n"), [(1, "kit_of")])

    def test_is_left_to_the_check_of_prose(self):
        self.assertEqual(found("a.cpp", "// A kit tells the slab.\n"), [])


class Program(unittest.TestCase):
    def test_exits_with_1_and_names_file_line_and_replacement(self):
        with tree(a__cpp="int x;\nint slab;\n", b__py="y = 1\n") as root:
            result = run(root, "a.cpp", "b.py")
            self.assertEqual((result.returncode, result.stdout), (1, "a.cpp:2: slab -> fragment\n"))
            result = run(root, "b.py")
            self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))

    def test_reads_what_git_tracks(self):
        with tree(a__cpp="int kit;\n", b__cpp="int slab;\n") as root:
            for command in (["init", "-q"], ["add", "b.cpp"]):
                subprocess.run(["git", *command], cwd=root, check=True)
            self.assertEqual(run(root).stdout, "b.cpp:1: slab -> fragment\n")

    def test_finds_nothing_in_this_tree(self):
        result = run(str(ROOT))
        self.assertEqual((result.returncode, result.stdout), (0, ""))


if __name__ == "__main__":
    unittest.main()
