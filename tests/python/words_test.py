"""The check of words: what it finds, and what it leaves alone."""

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
        self.assertGreater(len(WORDS.prose), 25)
        for rule in WORDS.names:
            with self.subTest(word=rule.word):
                replacements = [to for _, to in WORDS.of_name(rule.example)]
                self.assertIn(rule.replacement, replacements)
        for rule in WORDS.prose:
            with self.subTest(word=rule.word):
                replacements = [to for _, _, to in WORDS.of_text("// " + rule.example, 1)]
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


class Prose(unittest.TestCase):
    def test_of_comments_and_strings_with_its_line(self):
        self.assertEqual(found("a.cpp", '// One.\n// A kit\nint x;  // beside it\nauto y = "so many rows";\n'),
                         [(2, "kit"), (3, "beside"), (4, "so many")])
        self.assertEqual(found("a.c", "/* One\n * by itself. */\n"), [(2, "by itself")])
        self.assertEqual(found("a.py", '"""Reads it.\n\nA kit.\n"""\nx = "asks"  # told\n'),
                         [(3, "kit"), (5, "asks")])
        self.assertEqual(found("a.cpp", "// Runs beside the\n// next product.\n"), [(1, "beside"), (1, "the next product")])
        self.assertEqual(found("a.sh", "# held-out text\necho 'x'\n"), [(1, "held-out")])

    def test_over_the_end_of_a_line(self):
        self.assertEqual(found("a.cpp", "// It arrives by\n// itself.\n"), [(1, "by itself")])

    def test_code_is_no_prose(self):
        self.assertEqual(found("a.cpp", "f(beside_);\n"), [(1, "beside_")])
        self.assertEqual(found("a.cpp", "so = many;\n"), [])

    def test_plain_english_and_arithmetic_are_left_alone(self):
        text = ("// The product of both numbers; at most 8 rows, the least of them. Pairs of a token and an\n"
                "// expert. Two threads share a row. A scale of 1, of the same size. It turns the mask into a sum.\n"
                "// Besides, the older name --kit and TILEMOE_KIT still work.\n")
        self.assertEqual(found("a.cpp", text), [])

    def test_openings(self):
        self.assertEqual([line for line, _ in found("a.cpp", "// One. Of a warp, each lane\n")], [1])
        self.assertEqual([line for line, _ in found("a.cpp", "// What a block may have\n")], [1])
        self.assertEqual(found("a.cpp", "// The sum of a warp, in float32: what the block has\n"), [])


class Program(unittest.TestCase):
    def test_exits_with_1_and_names_file_line_and_replacement(self):
        with tree(a__cpp="int x;\n// the slab\n", b__py="y = 1\n") as root:
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
