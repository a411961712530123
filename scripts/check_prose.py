#!/usr/bin/env python3
"""Check the prose of the project against the rules of docs/prose.toml.

  scripts/check_prose.py               every file that git tracks
  scripts/check_prose.py FILE...       these files
  scripts/check_prose.py --root DIR    the files of another tree

Read public text: pages, docstrings, messages (strings of at least three words), comments of Python
and of the public headers; and, for rules with `everywhere`, the comments and strings of all code.
Print file:line: rule: text -> message. The exit status is 1 if a rule of level `error` found
something.
"""

import argparse
import fnmatch
import pathlib
import re
import sys

import texts

try:
    import tomllib
except ImportError:  # Python 3.10 and older
    import tomli as tomllib

RULES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "prose.toml"
START = r"(?:^|(?<=[.!?:;]) |(?<=[.!?][)\"']) )"


class Rule:
    def __init__(self, name, table):
        self.name, self.level, self.pages = name, table["level"], table.get("pages")
        self.is_everywhere = table.get("everywhere", False)
        self.hit, self.miss = table["hit"], table["miss"]
        flags = 0 if table.get("case") else re.IGNORECASE
        swap = table.get("swap") or {token: table["message"] for token in table["tokens"]}
        self.patterns = [
            (re.compile(token.replace("(START)", START), flags), message)
            for token, message in swap.items()
        ]

    def find(self, text):
        """Yield (offset, matched text, message)."""
        for pattern, message in self.patterns:
            for match in pattern.finditer(text.replace("\n", " ")):
                found = match.group()
                yield match.start() + len(found) - len(found.lstrip()), found.strip(), message


class Prose:
    def __init__(self, table=RULES):
        data = tomllib.loads(table.read_text(encoding="utf-8"))
        self.rules = [Rule(name, rule) for name, rule in data["rules"].items()]
        self.files, self.allowed = data["files"], data.get("allow", [])
        self.used = set()

    def reader(self, path):
        """Return the function that reads a file's text, or None."""
        kind = next(
            (kind for kind, patterns in self.files.items() if matches(path, patterns)), None
        )
        return None if kind == "skipped" else texts.reader_of(kind, path)

    def is_allowed(self, path, rule, paragraph, offset, found):
        for number, entry in enumerate(self.allowed):
            if entry["file"] == path and entry["rule"] == rule.name:
                for match in re.finditer(
                    r"\s+".join(map(re.escape, entry["text"].split())), paragraph
                ):
                    if match.start() <= offset and offset + len(found) <= match.end():
                        self.used.add(number)
                        return True
        return False

    def findings(self, path, text):
        """Yield (line, rule, found text, message) of a file."""
        for paragraph, line, is_public in self.reader(path)(text):
            for rule in self.rules:
                if (is_public or rule.is_everywhere) and matches(path, rule.pages or ["*"]):
                    for offset, found, message in rule.find(paragraph):
                        if not self.is_allowed(path, rule, paragraph, offset, found):
                            yield (
                                line + paragraph.count("\n", 0, offset),
                                rule,
                                around(paragraph, offset, found),
                                message,
                            )


def around(text, offset, found):
    """Return what was found, in brackets, between the words next to it."""
    before, after = text[:offset].split(" ")[-4:], text[offset + len(found) :].split(" ")[:4]
    return " ".join(f"{' '.join(before)}[{found}]{' '.join(after)}".split())


def matches(path, patterns):
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", help="paths below the root")
    parser.add_argument(
        "--root", type=pathlib.Path, default=RULES.parents[1], help="folder of the tree"
    )
    parser.add_argument(
        "--rule", action="append", help="name of a rule to check; repeat it for several"
    )
    parser.add_argument("--all-levels", action="store_true", help="print suggestions too")
    options = parser.parse_args()
    prose = Prose()
    names = [rule.name for rule in prose.rules]
    for name in set(options.rule or ()) - set(names):
        parser.error(f"--rule must be one of {', '.join(names)}, got {name}")
    prose.rules = [
        rule
        for rule in prose.rules
        if rule.name in (options.rule or names)
        and (rule.level != "suggestion" or options.all_levels)
    ]
    files = options.files or texts.tracked_files(options.root)
    count = 0
    for path in files:
        if prose.reader(path) and (options.root / path).is_file():
            found = prose.findings(path, (options.root / path).read_text(encoding="utf-8"))
            for line, rule, words, message in sorted(
                set(found), key=lambda at: (at[0], at[1].name, at[2])
            ):
                level = "" if rule.level == "error" else f"{rule.level}: "
                print(f"{path}:{line}: {level}{rule.name}: {words} -> {message}")
                count += rule.level == "error"
    if count:
        print(f"{count} errors by the rules of docs/prose.toml", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
