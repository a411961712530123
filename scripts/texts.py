"""Read files as pieces of text: names, comments and strings of code, and paragraphs of prose.

A reader of prose yields (paragraph, line, is_public) of a file. Public are pages, docstrings,
messages and the comments of public headers. Code and addresses are replaced by the word X_, and
markup is removed.
"""

import ast
import html
import io
import re
import subprocess
import tokenize

C_LIKE = re.compile(r"\.(h|c|cpp|cu|cuh|inc|dict)$|\.(cu|h)\.in$")
WITH_HASH = re.compile(r"\.(cmake|sh)$|(^|/)CMakeLists\.txt$|^\.ci/run$")
NAME = re.compile(r"[A-Za-z_]\w*")
C_TOKEN = re.compile(
    r'(?P<text>//(?:[^\n\\]|\\.)*|/\*(?:.|\n)*?\*/|R"(?P<mark>[^\s()\\]*)\((?:.|\n)*?\)(?P=mark)"'
    r'|"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*)|(?P<name>[A-Za-z_]\w*)'
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
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
    (re.compile(r"\$\$[^$]+\$\$|(?<![\w$])\$(?! )[^$\n]+(?<! )\$(?!\w)"), "X_"),
    (
        re.compile(
            r"\*{1,3}(?=\S)|(?<=\S)\*{1,3}|(?<!\w)_{1,2}(?=[A-Za-z])|(?<=[a-z.])_{1,2}(?!\w)"
        ),
        "",
    ),
]


def tracked_files(root):
    """Return the paths, below the root, of the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, stdout=subprocess.PIPE)
    return [name for name in listed.stdout.decode().split("\0") if name]


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


def read_page(text):
    text = re.sub(r"\A---\n.*?\n---\n", keep_lines, text, flags=re.DOTALL)
    for paragraph, line in paragraphs(without_markup(FENCE.sub(keep_lines, text)), 1):
        yield paragraph, line, True


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


def is_message(words):
    return len(re.findall(r"[A-Za-z]{2,}", words)) >= 3


def of_comment(text):
    """Return a comment without its marks and without tags of doxygen."""
    text = re.sub(
        r"(?m)^[ \t]*(?://+[!<]?|/\*+<?|\*(?!/)|#+ ?(?:noqa.*|type:.*)?)[ \t]?|\*/$", "", text
    )
    return without_markup(re.sub(r"[@\\](?:param|p|c|ref|brief|file)\b", "", text))


def of_string(text):
    """Return a literal of C++, or several, without quotes and escapes."""
    text = re.sub(r'"(\s*)"', r"\1", text).strip('R"()')
    return without_markup(text.replace("\\n", "  ").replace('\\"', '"'))


def read_python(text):
    """Yield docstrings, strings and comments of a module; all but short strings are public."""
    docstrings, inside = set(), set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            docstrings.add(node.body[0].value)
        elif isinstance(node, ast.JoinedStr):
            inside.update(part for part in ast.walk(node) if part is not node)
    for node in ast.walk(tree):
        if node in docstrings:
            for paragraph, line in paragraphs(docstring_text(node.value), node.lineno):
                yield paragraph, line, True
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node not in inside:
            words = without_markup(string_text(node)).strip()
            for paragraph, _ in paragraphs(words, 1) if " " in words else ():
                yield paragraph, node.lineno, is_message(words)
    for kind, piece, line in python_pieces(text):
        if kind == "comment":
            for paragraph, at in paragraphs(of_comment(piece), line):
                yield paragraph, at, True


def reader_of_code(pieces_of, public=()):
    """Return a reader of comments and strings; those of the kinds `public` are public."""

    def read(text):
        for kind, piece, line in pieces_of(text):
            is_comment = kind == "comment"
            words = of_comment(piece) if is_comment else of_string(piece)
            if is_comment or (kind == "string" and " " in words.strip()):
                for paragraph, at in paragraphs(words, line):
                    yield paragraph, at, kind in public and (is_comment or is_message(words))

    return read


def reader_of(kind, path):
    """Return the reader of a file, or None. Kinds: page, python, program, header, shell, code."""
    if kind in ("page", "python"):
        return read_page if kind == "page" else read_python
    if C_LIKE.search(path):
        public = {"program": ("string",), "header": ("comment",)}.get(kind, ())
        return reader_of_code(c_pieces, public)
    if path.endswith((".py", ".pyi")):
        return reader_of_code(python_pieces)
    if WITH_HASH.search(path):
        return reader_of_code(hash_pieces, ("comment", "string") if kind == "shell" else ())
    return None
