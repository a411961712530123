"""Copy the package's source in a form that autoapi reads in full.

autoapi reads the docstrings and the statements of a module. In the copy, imports for type checkers
are plain imports, comments of fields are docstrings, functions that take options link to them, and
overloads are removed.
"""

import ast
import re
import shutil
import textwrap
from typing import get_type_hints

from tilemoe import options  # imports no torch

TYPE_CHECKING = re.compile(r"^if _?TYPE_CHECKING:\n((?:(?:    .*)?\n)+)", re.MULTILINE)
FIELD = re.compile(r"^(    \w+: .*?)  # (.*)$", re.MULTILINE)


def copy_package(package, folder):
    shutil.rmtree(folder, ignore_errors=True)
    for file in package.rglob("*.py"):
        copy = folder / file.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(readable(file.read_text()))


def readable(source):
    source = TYPE_CHECKING.sub(lambda one: textwrap.dedent(one[1]), source)
    lines = FIELD.sub(with_docstring, source).splitlines()
    body = ast.parse("\n".join(lines)).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for node in reversed(body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
            if "overload" in decorators:
                del lines[node.decorator_list[0].lineno - 1 : node.end_lineno]
            elif "shows" in decorators:
                add_options(lines, node, classes)
    return "\n".join(lines) + "\n"


def with_docstring(field):
    """Make a docstring of a field's comment, "shape and dtype: meaning" or "meaning"."""
    shape, colon, text = field[2].partition(": ")
    text = f"``{shape}``. {text[0].upper()}{text[1:]}" if colon else shape
    return f'{field[1]}\n    """{text}"""'


def names_of(kind, classes):
    """Return the names of options in a TypedDict of this file or of tilemoe.options."""
    if kind not in classes:
        return set(get_type_hints(getattr(options, kind)))
    node = classes[kind]
    bases = (base.id for base in node.bases if base.id != "TypedDict")
    own = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
    return own.union(*(names_of(base, classes) for base in bases))


def add_options(lines, node, classes):
    """Link to the options at the end of the docstring's Args."""
    init = [one for one in node.body if getattr(one, "name", None) == "__init__"]
    function = init[0] if init else node
    kind = ast.unparse(function.args.kwarg.annotation).removeprefix("Unpack[").removesuffix("]")
    names = names_of(kind, classes)
    links = ", ".join(
        f":py:attr:`~tilemoe.options.Options.{name}`" for name in options.FIELDS if name in names
    )
    docstring = node.body[0]
    for at in range(docstring.lineno, docstring.end_lineno):
        if lines[at].strip() in ("Shape:", "Returns:", "Raises:"):
            lines.insert(at - 1, f"        **options: {links}.")
            return
    raise ValueError(f"the docstring of {node.name} has no section after Args")
