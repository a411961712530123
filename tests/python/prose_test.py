"""The check of prose: the findings of its rules, the text that it reads of a file; docstrings; spelling.

Needs ruff and codespell (requirements.txt).
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_prose  # noqa: E402
import texts  # noqa: E402

PROSE = check_prose.Prose()


def found(path, text):
    """Return what the check finds in a file of this path and text: [(line, rule)]."""
    return sorted((line, rule.name) for line, rule, _, _ in PROSE.findings(path, text))


@contextlib.contextmanager
def tree(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        yield folder


def run(root, *arguments):
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "check_prose.py"), "--root", root, *arguments],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


class Rules(unittest.TestCase):
    def test_each_finds_its_hits_and_leaves_its_misses(self):
        self.assertGreater(len(PROSE.rules), 12)
        for rule in PROSE.rules:
            self.assertTrue(rule.hit and rule.miss, rule.name)
            for text in rule.hit:
                self.assertTrue(list(rule.find(text)), (rule.name, text))
            for text in rule.miss:
                text = texts.without_markup(text)
                self.assertEqual(list(rule.find(text)), [], (rule.name, text))

    def test_every_expression_finds_something(self):
        for rule in PROSE.rules:
            with self.subTest(rule=rule.name):
                idle = [pattern.pattern for pattern, _ in rule.patterns
                        if not any(pattern.search(text) for text in rule.hit)]
                self.assertEqual(idle, [])

    def test_levels(self):
        self.assertEqual({rule.level for rule in PROSE.rules}, {"error", "warning", "suggestion"})

    def test_few_exceptions_with_reasons(self):
        self.assertLessEqual(len(PROSE.allowed), 20)
        names = {rule.name for rule in PROSE.rules}
        for entry in PROSE.allowed:
            self.assertEqual(set(entry), {"file", "rule", "text", "reason"})
            self.assertIn(entry["rule"], names)
            self.assertGreater(len(entry["reason"]), 10)
            at = entry["file"], entry["rule"], entry["text"]
            file = ROOT / entry["file"]
            PROSE.used.clear()
            list(PROSE.findings(entry["file"], file.read_text(encoding="utf-8")))
            self.assertIn(PROSE.allowed.index(entry), PROSE.used, f"{at}: needed no longer")


class Pages(unittest.TestCase):
    def found(self, text):
        return found("docs/a.md", text)

    def test_lines_and_cells(self):
        self.assertEqual(self.found("One.\n\nIt runs\nbeside it.\n"), [(4, "word")])
        self.assertEqual(self.found("The time goes\non.\n"), [(1, "idiom")])
        self.assertEqual(self.found("| a | b |\n|---|---|\n| one | Of a warp |\n"), [(3, "verbless-opening")])
        self.assertEqual(self.found("1. one\n2. Where X is\n"), [(2, "where-opening")])
        self.assertEqual(self.found("bytes\n\na token\n"), [])

    def test_code_links_and_html_are_no_prose(self):
        self.assertEqual(self.found("```python\nbeside = 1\n```\n"), [])
        self.assertEqual(self.found("- a\n\n  ```\n  beside\n  ```\n\nbeside\n"), [(7, "word")])
        self.assertEqual(self.found("The option `beside=`, ``so many`` and\n`told\nby` it."), [])
        self.assertEqual(self.found("[text](beside.md#by-itself) <img alt='beside'> <!-- so\nmany -->"), [])
        self.assertEqual(self.found("[tiles in turn](a.md)"), [(1, "word")])
        self.assertEqual(self.found("It runs **beside** _it_."), [(1, "word")])
        self.assertEqual(self.found("with {repo}`beside` and $beside$"), [])
        self.assertEqual(self.found("One costs $5, stored\nbeside one of $6."), [(2, "word")])

    def test_headings_begin_no_sentence(self):
        self.assertEqual(self.found("# What a token's bits depend on\nA step\n"), [])
        self.assertEqual(self.found("## Tiles in turn\n"), [(1, "word")])


class Python(unittest.TestCase):
    def found(self, text):
        return found("python/a.py", text)

    def test_docstrings_messages_and_comments(self):
        self.assertEqual(self.found('"""Read it.\n\nWhere rows end, zero.\n"""\n'), [(3, "where-opening")])
        self.assertEqual(self.found('def f():\n    """Read it.\n\n    Args:\n        x: Of a warp.\n    """\n'), [(5, "verbless-opening")])
        self.assertEqual(self.found('raise E(f"{x} is no "\n        f"number")\n'), [(1, "is-no")])
        self.assertEqual(self.found("x = 1  # runs beside it\n# as\n# ever\n"), [(1, "word"), (2, "idiom")])

    def test_code_is_no_prose(self):
        self.assertEqual(self.found('"""Read it.\n\n>>> beside\n\nExample::\n\n    beside\n\nbeside ``beside``\n"""\n'), [(9, "word")])
        self.assertEqual(self.found("beside = told['beside']\n"), [])


class C(unittest.TestCase):
    def test_comments_of_public_headers(self):
        self.assertEqual(found("include/tilemoe/a.h", "/* One\n * by itself. */\nint x;  ///< so many\n"), [(2, "word"), (3, "word")])
        self.assertEqual(found("include/tilemoe/a.h", 'int as_ever; const char* x = "it is no number";\n'), [])

    def test_strings_of_programs(self):
        self.assertEqual(found("src/a.cpp", '// nobody\nf("it is %d", beside,\n  "x is "\n  "no number");\n'), [(3, "is-no")])
        self.assertEqual(found("apps/a.cpp", 'f("as ever", "one \\"is\\"\\nbeside it");\n'), [(1, "word")])

    def test_words_of_all_code(self):
        for path in ("src/a.cu", "tests/a.h", "include/tilemoe/a.h", "a.inc", "apps/a.cpp"):
            text = '// One.\n// A slab\nint x;  // told which: nobody says\nauto y = "so many rows";\n'
            some = [one for one in found(path, text) if one[1] in ("word", "opening")]
            self.assertEqual(some, [(2, "word"), (4, "word")], path)
        self.assertEqual(found("src/a.cpp", "// It arrives by\n// itself. Of a warp, each\n"), [(1, "word"), (2, "opening")])
        self.assertEqual(found("tests/a.py", '"""One.\n\nA kit.\n"""\nx = "kit"  # asks\n'), [(3, "word"), (5, "word")])
        self.assertEqual(found("tests/a.sh", "# held-out text\n"), [(1, "word")])
        self.assertEqual(found("tests/a.cpp", "// nobody says it goes on\n"), [])

    def test_other_files_are_left_alone(self):
        for path in ("CHANGELOG.md", "a.txt", "bindings/jax/vendored/a.h", "docs/prose.toml"):
            self.assertIsNone(PROSE.reader(path), path)


class Program(unittest.TestCase):
    def test_status_and_output(self):
        with tree({"docs/a.md": "One.\n\nA tile beside it had been written.\n", "b.md": "A tile.\n"}) as root:
            done = run(root, "docs/a.md", "b.md")
            self.assertEqual(done.returncode, 1)
            self.assertIn("docs/a.md:3: word: A tile [beside] it had been -> ", done.stdout)
            self.assertIn("docs/a.md:3: warning: history: ", done.stdout)
            self.assertEqual(run(root, "--rule", "marks", "docs/a.md").returncode, 0)
            self.assertEqual((run(root, "b.md").returncode, run(root, "b.md").stdout), (0, ""))

    def test_warnings_pass_and_suggestions_wait(self):
        with tree({"docs/a.md": "It is so. The tile had been there.\n"}) as root:
            done = run(root, "docs/a.md")
            self.assertEqual((done.returncode, done.stdout.count("\n")), (0, 1))
            done = run(root, "--all-levels", "docs/a.md")
            self.assertEqual((done.returncode, done.stdout.count("\n")), (0, 2))

    def test_named_files_are_read_though_excluded(self):
        name = PROSE.excluded[0] if PROSE.excluded else self.skipTest("none is excluded")
        with tree({name: "It runs beside it.\n" if name.endswith(".md") else "# beside it\n"}) as root:
            subprocess.run(["git", "init", "-q"], cwd=root, check=True)
            subprocess.run(["git", "add", "."], cwd=root, check=True)
            self.assertEqual(run(root).returncode, 0)

    def test_finds_no_error_in_this_tree(self):
        done = run(str(ROOT))
        print(done.stdout, end="")  # the warnings
        self.assertEqual((done.returncode, done.stderr), (0, ""))


def module(name, *arguments, folder=ROOT):
    return subprocess.run([sys.executable, "-m", name, *arguments], cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True)


class Docstrings(unittest.TestCase):
    def check(self, *paths):
        return module("ruff", "check", "--no-cache", "--output-format", "concise", *paths)

    def test_of_the_public_modules_and_scripts(self):
        done = self.check()
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_rules_are_switched_on(self):
        text = 'def f(a, b):\n    """Gives the sum\n    of two\n\n    Args:\n        a: One.\n    """\n'
        command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise",
                   "--stdin-filename"]
        all_of_them = {"D205", "D400", "D401", "D417"}
        for name, rules in (("python/tilemoe/a.py", all_of_them), ("python/tilemoe/jax/__init__.py", all_of_them),
                            ("benchmarks/a.py", all_of_them), ("examples/a/b.py", all_of_them),
                            ("scripts/gpu/a.py", all_of_them), ("python/tilemoe/_a.py", set()),
                            ("python/tilemoe/_command/a.py", set())):
            done = subprocess.run([*command, str(ROOT / name), "-"], cwd=ROOT, input=text, stdout=subprocess.PIPE,
                                  universal_newlines=True)
            self.assertEqual({rule for rule in all_of_them if rule in done.stdout}, rules, name)


class Spelling(unittest.TestCase):
    # Names, and files with words that are wrong on purpose or with data.
    NAMES = "astroid,dout,ofmodule,statics"
    SKIPPED = ("benchmarks/results/", "tests/", "docs/images/", "bindings/jax/vendored/", "scripts/words.txt")

    def test_of_everything_that_git_tracks(self):
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, universal_newlines=True,
                                check=True)
        files = [str(ROOT / name) for name in listed.stdout.splitlines()
                 if not name.startswith(self.SKIPPED) and not name.endswith((".json", ".jsonl", ".svg", ".png"))]
        self.assertGreater(len(files), 500)
        with tempfile.TemporaryDirectory() as folder:  # codespell does not read a pyproject.toml like ours
            check = lambda *names: module("codespell_lib", "-L", self.NAMES, *names, folder=folder)
            done = check(*filter(os.path.exists, files))
            self.assertEqual((done.stdout, done.returncode), ("", 0))
            wrong = pathlib.Path(folder) / "page.md"
            wrong.write_text("It is recieved.\n")
            self.assertIn("recieved ==> received", check(wrong).stdout)


if __name__ == "__main__":
    unittest.main()
