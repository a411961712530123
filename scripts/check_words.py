#!/usr/bin/env python3
"""Find names with words that this project does not use, and print replacements (scripts/words.txt).

  scripts/check_words.py               every file that git tracks
  scripts/check_words.py FILE...       only these files
  scripts/check_words.py --root DIR    the files of another tree

Read the names of all files, and the identifiers in code (C, C++, CUDA, Python, CMake, shell), in
comments and in strings. Print file:line: name -> replacement. The exit status is 1 if a name was
found.
scripts/check_prose.py checks text.
"""

import argparse
import pathlib
import re
import sys

import texts

TABLE = pathlib.Path(__file__).resolve().with_name("words.txt")
# The table and its tests, the changelog, and data.
SKIPPED = re.compile(
    r"^(scripts/(words\.txt|check_(words|prose)\.py)|tests/python/(words|prose)_test\.py"
    r"|CHANGELOG\.md|(benchmarks/results|tests/data|docs/images|bindings/jax/vendored)/.*)$"
)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Rule:
    def __init__(self, line):
        word, rest = line.split(" -> ", 1)
        self.word = word.strip()
        self.replacement, self.example = (part.strip() for part in rest.rsplit(" | ", 1))
        pattern = " ".join(
            re.escape(part[:-1]) + r"[a-z]*" if part.endswith("*") else re.escape(part)
            for part in self.word.lstrip("^").split()
        )
        begin = r"^(?:k )?" if self.word.startswith("^") else r"(?:^|(?<= ))"
        self.pattern = re.compile(begin + pattern + r"(?= |$)")


class Words:
    def __init__(self, table=TABLE):
        self.names, allowed = [], []
        section = None
        for line in table.read_text(encoding="utf-8").splitlines():
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if line in ("[names]", "[allowed]"):
                section = line[1:-1]
            elif section == "allowed":
                pattern, reason = line.split(" -- ")
                if not reason:
                    raise ValueError(f"{table}: no reason for {pattern}")
                allowed.append(pattern)
            else:
                self.names.append(Rule(line))
        self.allowed = re.compile("|".join(f"(?:{pattern})" for pattern in allowed) or r"(?!)")

    def of_name(self, name):
        """Return the rules that an identifier or the name of a file breaks."""
        if self.allowed.fullmatch(name):
            return []
        parts = " ".join(part.lower() for part in PART.findall(name))
        return [(name, rule.replacement) for rule in self.names if rule.pattern.search(parts)]

    def in_text(self, text, line):
        """Yield (line, word, replacement) of the identifiers in a comment or string."""
        for match in texts.NAME.finditer(text):
            if re.search(r"[a-z0-9]_[a-z0-9]|[a-z0-9][A-Z]", match.group()):
                for name, replacement in self.of_name(match.group()):
                    yield line + text.count("\n", 0, match.start()), name, replacement


def findings(words, root, path):
    """Yield (line, word, replacement) of a file; line 0 is its name."""
    for part in pathlib.PurePosixPath(path).parts:
        for word, replacement in words.of_name(part):
            yield 0, word, replacement
    if texts.C_LIKE.search(path):
        pieces = texts.c_pieces
    elif path.endswith((".py", ".pyi")):
        pieces = texts.python_pieces
    elif texts.WITH_HASH.search(path):
        pieces = texts.hash_pieces
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
            yield from words.in_text(piece, line)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", help="paths below the root")
    parser.add_argument("--root", type=pathlib.Path, default=TABLE.parents[1])
    options = parser.parse_args()
    files = options.files or texts.tracked_files(options.root)
    words = Words()
    count = 0
    for path in files:
        if SKIPPED.match(path) or not (options.root / path).is_file():
            continue
        for line, word, replacement in sorted(set(findings(words, options.root, path))):
            print(f"{path}:{line}: {word} -> {replacement}")
            count += 1
    if count:
        print(f"{count} names of scripts/words.txt in {len(files)} files", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
