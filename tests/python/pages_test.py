"""The promises of the project's pages to their readers: links that lead somewhere, snippets that the
programs understand. Needs the command line, in TILEMOE; no network."""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import unittest

import pages
from pages import ROOT

PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in pages.all_pages()}
TERMINAL = ("sh",)
OUTPUT = ("", "bibtex")  # what nobody runs: a program's output, formulas, a citation

# Programs outside the project that a snippet may call. Their arguments are theirs to check.
FOREIGN = {
    ".", "cc", "cd", "cmake", "cp", "ctest", "export", "git", "pip", "python3", "sudo", "source", "build/fuzz/tests/fuzz_c_interface",
    "build/fuzz/tests/train/fuzz_checkpoint", ".venv/bin/pip",
}  # fmt: skip
# Modules outside the project. tests/torch/torchtitan_trainer_test.py runs what is shown of torchtitan's.
FOREIGN_MODULES = {"pip", "pytest", "torchtitan.train", "venv"}
PYTHONS = {"python", "python3", ".venv/bin/python"}
# An option's names end in what cannot be part of a name.
OPTION = re.compile(r"--[a-z0-9][\w-]*")


def problems(found):
    """The message of a failed check, a line a finding."""
    return "\n" + "\n".join(found)


def commands(text):
    """[[word]] of a snippet of the shell: a list for each command, comments and operators left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words = []
        for word in lexer:
            if set(word) <= set("&|;"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


@functools.cache
def help_of(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def options_in(folder):
    """Every option that the Python files of a folder name."""
    return {
        option for file in folder.glob("*.py") for option in OPTION.findall(file.read_text())
    }


def wrong_with_a_command(words):
    """Nothing, or what the program would not understand."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable for this command
        words = words[1:]
    if not words:
        return None
    program, rest = words[0], words[1:]
    if pathlib.Path(program).name == "tilemoe":
        return wrong_with_tilemoe(rest)
    if pathlib.Path(program).name == "tilemoe_simulate":
        known = OPTION.findall((ROOT / "simulator" / "main.cpp").read_text())
        unknown = [word for word in rest if OPTION.fullmatch(word) and word not in known]
        return f"tilemoe_simulate has no {', '.join(unknown)}" if unknown else None
    if program == "cmake" and "--preset" in rest:
        known = {p["name"] for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
        name = rest[rest.index("--preset") + 1]
        return None if name in known else f"no preset {name} in CMakePresets.json"
    if program == "torchrun" or (program in PYTHONS and rest and rest[0] != "-c"):
        return wrong_with_python(rest)
    if program.endswith((".sh", ".py")) or program.startswith("scripts/"):
        return wrong_with_a_script(program, rest)
    return None if program in FOREIGN | PYTHONS else f"what is {program}?"


def wrong_with_tilemoe(rest):
    program = os.environ["TILEMOE"]
    if rest[0] not in re.findall(r"^  (\w+) ", help_of(program, "--help"), re.MULTILINE):
        return f"tilemoe has no command {rest[0]}"
    known = OPTION.findall(help_of(program, rest[0], "--help"))
    unknown = [word for word in rest if OPTION.fullmatch(word) and word not in known]
    return f"tilemoe {rest[0]} has no {', '.join(unknown)}" if unknown else None


def wrong_with_python(rest):
    """Reads `python FILE ...`, `torchrun [its own options] FILE ...`, and the same with `-m MODULE`."""
    at = next((i for i, word in enumerate(rest) if word == "-m" or word.endswith(".py")), None)
    if at is not None and rest[at] == "-m":
        module, options = rest[at + 1], rest[at + 2 :]
        if module in FOREIGN_MODULES:
            return None
        folder = ROOT / "python" / module.replace(".", "/")
        if module == "tilemoe":  # its commands' options are in a folder each
            folder /= "bench" if options[:1] == ["bench"] else "_command"
        return wrong_options(folder, options) if folder.is_dir() else f"no module {module}"
    return "no file to run" if at is None else wrong_with_a_script(rest[at], rest[at + 1 :])


def wrong_with_a_script(program, rest):
    file = ROOT / program
    if not file.is_file():
        return f"no file {program}"
    if file.suffix == ".py":
        return wrong_options(file.parent, rest)
    if not os.access(file, os.X_OK):
        return f"{program} cannot be executed"
    # Options that a script does not know are passed to the program that it names.
    words = [word for word in rest if OPTION.fullmatch(word)]
    text = file.read_text()
    if "tilemoe train" in text:
        return wrong_with_tilemoe(["train", *words])
    unknown = [word for word in words if word not in text]
    return f"{program} has no {', '.join(unknown)}" if unknown else None


def wrong_options(folder, rest):
    unknown = [
        word for word in rest if OPTION.fullmatch(word) and word not in options_in(folder)
    ]
    return f"{folder.relative_to(ROOT)} has no {', '.join(unknown)}" if unknown else None


def normalised(code):
    """Lines of C or C++ without comments and white space."""
    code = re.sub(r"/\*.*?\*/", "", code, flags=re.DOTALL)
    lines = (re.sub(r"//.*", "", line) for line in code.splitlines())
    return [bare for bare in ("".join(line.split()) for line in lines) if bare]


@functools.cache
def compiled_programs():
    """The text of each program in C and C++ that the tests compile and run, on one line."""
    files = [*(ROOT / "examples").glob("*.c*"), *(ROOT / "tests" / "package").glob("*.c*")]
    return ["".join(normalised(file.read_text())) for file in files]


def stands_in(lines, program):
    """Whether the lines stand in the program, one after the other; a line of dots leaves some out."""
    at = 0
    for chunk in "".join(lines).split("..."):
        found = program.find(chunk, at)
        if found < 0:
            return False
        at = found + len(chunk)
    return True


class Snippets(unittest.TestCase):
    def each(self, *languages):
        for name, text in PAGES.items():
            for snippet in pages.snippets(text):
                if snippet.language in languages:
                    yield f"{name}:{snippet.line}", snippet.text

    def test_all_are_of_a_kind_that_is_checked(self):
        # Python is run by tests/torch/documentation_test.py, which has the package.
        # scripts/docs.sh reads directives of reStructuredText.
        known = (*TERMINAL, *OUTPUT, "c", "cpp", "python", "{eval-rst}")
        wrong = [
            f"{name}:{s.line}: a snippet of {s.language}"
            for name, text in PAGES.items()
            for s in pages.snippets(text)
            if s.language not in known
        ]
        start = r"(?:\S*/)?(?:tilemoe|python3?|pip|cmake|torchrun|\S+\.sh|\S+/run\.py) |PYTHONPATH="
        wrong += [f"{at}: commands without `sh`" for at, text in self.each("") if re.match(start, text)]
        self.assertFalse(wrong, problems(wrong))

    def test_the_shell_can_read_its_own(self):
        wrong = []
        for at, text in self.each(*TERMINAL):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            wrong += [f"{at}: {done.stderr.strip()}"] if done.returncode or done.stderr else []
        self.assertFalse(wrong, problems(wrong))

    def test_programs_know_their_options(self):
        found = [
            (at, " ".join(words), wrong_with_a_command(words))
            for at, text in self.each(*TERMINAL)
            for words in commands(text)
        ]
        self.assertGreater(len(found), 40)
        wrong = [f"{at}: {command}: {why}" for at, command, why in found if why]
        self.assertFalse(wrong, problems(wrong))

    def test_what_is_shown_of_c_is_compiled(self):
        wrong = []
        for at, text in self.each("c", "cpp"):
            lines = normalised(text)
            self.assertGreater(len(lines), 1, at)
            if not any(stands_in(lines, program) for program in compiled_programs()):
                wrong.append(f"{at}: in no program that is compiled")
        self.assertFalse(wrong, problems(wrong))


class Links(unittest.TestCase):
    def test_each_leads_somewhere(self):
        wrong, count = [], 0
        for name, text in PAGES.items():
            for line, address in pages.links(text):
                if re.match(r"https?:|mailto:", address):
                    continue
                count += 1
                path, _, anchor = address.partition("#")
                target = (ROOT / name).parent / path if path else ROOT / name
                if not target.exists():
                    wrong.append(f"{name}:{line}: nothing at {address}")
                elif anchor and anchor not in pages.anchors(target.read_text()):
                    wrong.append(f"{name}:{line}: no heading for {address}")
        self.assertGreater(count, 200)
        self.assertFalse(wrong, problems(wrong))

    def test_the_index_has_every_page(self):
        index = {address for _, address in pages.links(PAGES["docs/index.md"])}
        docs = ROOT / "docs"
        found = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
        self.assertEqual(found - index, {"index.md"})


if __name__ == "__main__":
    unittest.main()
