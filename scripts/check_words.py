#!/usr/bin/env python3
"""Find words that this project does not use, and print their replacements (scripts/words.txt).

  scripts/check_words.py               every file that git tracks
  scripts/check_words.py FILE...       only these files
  scripts/check_words.py --root DIR    the files of another tree

Read the names of all files, and the identifiers, comments and strings of code (C, C++, CUDA,
Python, CMake, shell). Print file:line: word -> replacement. The exit status is 1 if a word was
found.
"""

import argparse
import io
import pathlib
import re
import subprocess
import sys
import tokenize

TABLE = pathlib.Path(__file__).resolve().with_name("words.txt")
# The table and its tests, the changelog, and data.
SKIPPED = re.compile(
    r"^(scripts/(words\.txt|check_words\.py)|tests/python/(words|prose)_test\.py|CHANGELOG\.md"
    r"|(benchmarks/results|tests/data|docs/images|bindings/jax/vendored)/.*)$"
)
C_LIKE = re.compile(r"\.(h|c|cpp|cu|cuh|inc|dict)$|\.(cu|h)\.in$")
WITH_HASH = re.compile(r"\.(cmake|sh)$|(^|/)CMakeLists\.txt$|^\.ci/run$")
C_TOKEN = re.compile(
    r'(?P<text>//(?:[^\n\\]|\\.)*|/\*(?:.|\n)*?\*/|R"(?P<mark>[^\s()\\]*)\((?:.|\n)*?\)(?P=mark)"'
    r'|"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*)|(?P<name>[A-Za-z_]\w*)'
)
NAME = re.compile(r"[A-Za-z_]\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Rule:
    def __init__(self, line, kind):
        word, rest = line.split(" -> ", 1)
        self.word = word.strip()
        self.replacement, self.example = (part.strip() for part in rest.rsplit(" | ", 1))
        if kind == "names":
            parts = self.word.lstrip("^").split()
            pattern = " ".join(
                re.escape(part[:-1]) + r"[a-z]*" if part.endswith("*") else re.escape(part)
                for part in parts
            )
            begin = r"^(?:k )?" if self.word.startswith("^") else r"(?:^|(?<= ))"
            self.pattern = re.compile(begin + pattern + r"(?= |$)")
        else:
            self.pattern = re.compile(self.word, re.IGNORECASE | re.MULTILINE)


class Words:
    def __init__(self, table=TABLE):
        self.names, self.prose, allowed = [], [], []
        section = None
        for line in table.read_text(encoding="utf-8").splitlines():
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if line in ("[names]", "[prose]", "[allowed]"):
                section = line[1:-1]
            elif section == "allowed":
                pattern, reason = line.split(" -- ")
                if not reason:
                    raise ValueError(f"{table}: no reason for {pattern}")
                allowed.append(pattern)
            else:
                getattr(self, section).append(Rule(line, section))
        self.allowed = re.compile("|".join(f"(?:{pattern})" for pattern in allowed) or r"(?!)")

    def of_name(self, name):
        """Return the rules that an identifier or the name of a file breaks."""
        if self.allowed.fullmatch(name):
            return []
        parts = " ".join(part.lower() for part in PART.findall(name))
        return [(name, rule.replacement) for rule in self.names if rule.pattern.search(parts)]

    def of_text(self, text, line):
        """Yield (line, word, replacement) of a comment or string that begins at `line`."""
        if self.allowed.fullmatch(f'"{text}"'):  # a string of Python has no quotes here
            return
        # Replace comment marks by spaces: phrases continue over line ends, and offsets stay valid.
        plain = re.sub(r"(?m)^[ \t]*(?://+|\*(?!/)|#+)", lambda m: " " * len(m.group()), text)
        # Hide the allowed identifiers, except those that are also plain words.
        plain = re.sub(r"(?<![\w-])(?:" + self.allowed.pattern + r")(?![\w-])",
                       lambda m: m.group() if m.group().isalpha() and m.group().islower()
                       else "`" * len(m.group()), plain)
        flat = re.sub(r"\s*\n\s*", lambda m: " " * len(m.group()), plain)
        for rule in self.prose:
            for match in rule.pattern.finditer(squeeze(flat)):
                yield line + text[: unsqueeze(flat, match.start())].count("\n"), \
                    match.group().strip(" ."), rule.replacement
        for match in NAME.finditer(plain):
            if re.search(r"[a-z0-9]_[a-z0-9]|[a-z0-9][A-Z]", match.group()):
                for name, replacement in self.of_name(match.group()):
                    yield line + plain[: match.start()].count("\n"), name, replacement


def squeeze(text):
    """Return the text with single spaces, and without spaces and comment marks at its start."""
    return re.sub(r" +", " ", re.sub(r"^[ /*#]+", "", text))


def unsqueeze(text, place):
    """Return the offset in `text` of the character at offset `place` of squeeze(text)."""
    at = len(re.match(r"^[ /*#]*", text).group())
    for _ in range(place):
        at += len(re.match(r" +", text[at:]).group()) if text[at : at + 1] == " " else 1
    return at


def c_pieces(text):
    """Yield (kind, text, line) of C, C++ and CUDA; adjacent // lines are one comment.

    The kinds are name, comment and string; adjacent strings are one.
    """
    comment, begin, end = "", 0, -2
    for match in C_TOKEN.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["name"]:
            yield "name", match["name"], line
        elif match["text"].startswith("//"):
            if comment and line == end + 1:
                comment += "\n" + match["text"]
            else:
                if comment:
                    yield "comment", comment, begin
                comment, begin = match["text"], line
            end = line
        else:
            yield "comment" if match["text"].startswith("/") else "string", match["text"], line
    if comment:
        yield "comment", comment, begin


def python_pieces(text):
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        yield from hash_pieces(text)
        return
    comment, begin, end = "", 0, -2
    for token in tokens:
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] == end + 1:
                comment += "\n" + token.string
            else:
                if comment:
                    yield "comment", comment, begin
                comment, begin = token.string, token.start[0]
            end = token.start[0]
        elif token.type == tokenize.NAME:
            yield "name", token.string, token.start[0]
        elif token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING_M"):
            yield "string", token.string.strip("rbfuRBFU").strip("\"'"), token.start[0]
    if comment:
        yield "comment", comment, begin


def hash_pieces(text):
    """Yield (kind, text, line) of CMake and shell."""
    for number, line in enumerate(text.split("\n"), 1):
        match = re.search(r"(?:^|\s)#(?!!)(.*)$", line)
        code = line[: match.start()] if match else line
        if match:
            yield "comment", match[1], number
        for name in NAME.findall(code):
            yield "name", name, number
        for string in re.findall(r'"[^"]*\s[^"]*"', code):
            yield "string", string, number


def findings(words, root, path):
    """Yield (line, word, replacement) of a file; line 0 is its name."""
    for part in pathlib.PurePosixPath(path).parts:
        for word, replacement in words.of_name(part):
            yield 0, word, replacement
    if C_LIKE.search(path):
        pieces = c_pieces
    elif path.endswith((".py", ".pyi")):
        pieces = python_pieces
    elif WITH_HASH.search(path):
        pieces = hash_pieces
    else:
        return
    try:
        text = (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for kind, piece, line in pieces(text):
        if kind == "name":
            for word, replacement in words.of_name(piece):
                yield line, word, replacement
        else:
            yield from words.of_text(piece, line)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", help="paths below the root")
    parser.add_argument("--root", type=pathlib.Path, default=TABLE.parents[1])
    options = parser.parse_args()
    files = options.files
    if not files:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=options.root, check=True,
                                stdout=subprocess.PIPE)
        files = [name for name in listed.stdout.decode().split("\0") if name]
    words = Words()
    count = 0
    for path in files:
        if SKIPPED.match(path) or not (options.root / path).is_file():
            continue
        for line, word, replacement in sorted(set(findings(words, options.root, path))):
            print(f"{path}:{line}: {word} -> {replacement}")
            count += 1
    if count:
        print(f"{count} words of scripts/words.txt in {len(files)} files", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
