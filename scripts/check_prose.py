#!/usr/bin/env python3
"""Check the prose of the project against the rules of docs/prose.toml.

  scripts/check_prose.py               every file that git tracks, without those of `excluded`
  scripts/check_prose.py FILE...       these files, excluded or not
  scripts/check_prose.py --root DIR    the files of another tree

Read the text of pages, docstrings, messages (strings of at least three words), comments of Python
and comments of the public headers; skip code, addresses of links and HTML. Print file:line: rule:
text -> message. Exit with 1 if a rule of level `error` found something.
"""

import argparse
import ast
import fnmatch
import html
import pathlib
import re
import subprocess
import sys

import check_words

try:
    import tomllib
except ImportError:  # Python 3.10 and older
    import tomli as tomllib

RULES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "prose.toml"
START = r"(?:^|(?<=[.!?:;]) |(?<=[.!?][)\"']) )"
ITEM = re.compile(
    r"\s*(?:[-*+]|\d+[.)]) +|\s*(?:>\s?)+|\s*\*{0,2}\w+(?: \([^)]*\))?: |\s*:\w[\w ]*: "
)
FENCE = re.compile(r"^([ >]*)(```+|~~~+)(.*?)^[ >]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
MARKUP = [
    (re.compile(r"<!--.*?-->|<!?/?[a-zA-Z][^<>]*>", re.DOTALL), ""),
    (re.compile(r"(?:\{[\w:]+\}|:[\w:]+:)?(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL), "X_"),
    (
        re.compile(
            r"!?\[((?:[^][]|\[[^]]*\])*)\](?:\([^()\s]*(?:\([^()]*\))?[^()\s]*(?:\s\"[^\"]*\")?\)|\[[^]]*\])"
        ),
        r"\1",
    ),
    (re.compile(r"\b(?:https?|mailto):[^\s)>]+|(?<![\w-])--[a-z][\w-]*"), "X_"),
    (re.compile(r"(?<![\w$])\$[^$]+\$(?!\w)"), "X_"),
    (
        re.compile(
            r"\*{1,3}(?=\S)|(?<=\S)\*{1,3}|(?<!\w)_{1,2}(?=[A-Za-z])|(?<=[a-z.])_{1,2}(?!\w)"
        ),
        "",
    ),
]


def keep_lines(match, text=""):
    """Return `text` and the line ends of what it replaces, so that lines keep their numbers."""
    return match.expand(text) + "\n" * (match.group().count("\n") - match.expand(text).count("\n"))


def without_markup(text):
    for pattern, replacement in MARKUP:
        text = pattern.sub(lambda match, to=replacement: keep_lines(match, to), text)
    return html.unescape(text)


def paragraphs(text, line):
    """Yield (paragraph, line): text between empty lines, an item of a list, a cell of a table."""
    part, begin = [], line
    for number, row in enumerate([*text.split("\n"), ""], line):
        table = row.lstrip().startswith("|")
        item = ITEM.match(row)
        if part and (not row.strip() or item or table):
            yield "\n".join(part), begin
            part = []
        if table:
            yield from (
                (cell.strip(), number) for cell in re.split(r"(?<!\\)\|", row) if cell.strip(" :-")
            )
        elif row.strip():
            begin = begin if part else number
            part.append(" ".join((row[item.end() :] if item else row).split()))
            if row.startswith("#"):  # a heading, which begins no sentence
                yield part.pop(), number


def page_pieces(text):
    text = re.sub(r"\A---\n.*?\n---\n", keep_lines, text, flags=re.DOTALL)
    yield from paragraphs(without_markup(FENCE.sub(keep_lines, text)), 1)


def docstring_text(text):
    """Return a docstring without its examples: lines of >>> and blocks after a double colon."""
    rows, block = [], None
    for row in text.split("\n"):
        indent = len(row) - len(row.lstrip())
        if block is not None and row.strip() and indent <= block:
            block = None
        rows.append("" if block is not None or row.lstrip().startswith((">>>", "...")) else row)
        if row.rstrip().endswith("::"):
            block = indent
    return without_markup("\n".join(rows))


def string_text(node):
    """Return the text of a string or f-string, with X_ for its fields."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else "X_" for part in node.values)


def python_pieces(text):
    docstrings, inside = set(), set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) and ast.get_docstring(node):
            docstrings.add(node.body[0].value)
        elif isinstance(node, ast.JoinedStr):
            inside.update(part for part in ast.walk(node) if part is not node)
    for node in ast.walk(tree):
        if node in docstrings:
            yield from paragraphs(docstring_text(node.value), node.lineno)
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node not in inside:
            words = string_text(node)
            if len(re.findall(r"[A-Za-z]{2,}", words)) >= 3:
                yield from ((part, node.lineno) for part, _ in paragraphs(without_markup(words), 1))
    for kind, piece, line in check_words.python_pieces(text):
        if kind == "comment":
            yield from paragraphs(
                without_markup(re.sub(r"(?m)^\s*#+ ?(noqa.*|type:.*)?", "", piece)), line
            )


def c_comments(text):
    for kind, piece, line in check_words.c_pieces(text):
        if kind == "comment":
            piece = re.sub(r"(?m)^[ \t]*(?://+[!<]?|/\*+<?|\*(?!/))[ \t]?|\*/$", "", piece)
            yield from paragraphs(
                without_markup(re.sub(r"[@\\](?:param|p|c|ref|brief|file)\b", "", piece)), line
            )


def c_strings(text):
    for kind, piece, line in check_words.c_pieces(text):
        words = (
            re.sub(r'"(\s*)"', r"\1", piece).strip('R"()').replace("\\n", "  ").replace('\\"', '"')
        )
        if kind == "string" and len(re.findall(r"[A-Za-z]{2,}", words)) >= 3:
            yield from paragraphs(without_markup(words), line)


READERS = {
    "pages": page_pieces,
    "python": python_pieces,
    "strings": c_strings,
    "comments": c_comments,
}


class Rule:
    def __init__(self, name, table):
        self.name, self.level, self.pages = name, table["level"], table.get("pages")
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
        self.excluded = self.files.pop("excluded")
        self.used = set()

    def reader(self, path):
        """Return the function that reads a file's text, or None."""
        kind = next(
            (kind for kind, patterns in self.files.items() if matches(path, patterns)), None
        )
        return READERS.get(kind)

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
        for paragraph, line in self.reader(path)(text):
            for rule in self.rules:
                if rule.pages is None or matches(path, rule.pages):
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
    files = options.files
    if not files:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=options.root, check=True, stdout=subprocess.PIPE
        )
        files = [
            name
            for name in listed.stdout.decode().split("\0")
            if name and not matches(name, prose.excluded)
        ]
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
