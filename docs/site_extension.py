"""Extend Sphinx for the documentation site.

The pages also work on GitHub, so their links and pictures are GitHub's. doxygen reads the reference
of C, and the options of Python are data.
"""

import pathlib
import re
import shutil
import subprocess
from typing import get_type_hints

import package_source
from docutils import nodes
from project_urls import project_urls
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from tilemoe import _options_table, options  # imports no torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "include" / "tilemoe"
LOG = logging.getLogger(__name__)

# The navigation. index.md is read on GitHub without Sphinx's directives.
NAVIGATION = {
    "Guides": (
        "quickstart", "pytorch", "distributed", "finetuning", "reinforcement_learning", "cpp",
    ),
    "Reference": ("results", "api/python", "api/c"),
    "Internals": ("mathematics", "kernels", "contributing"),
}  # fmt: skip


def add_navigation(app, docname, source):
    if docname == app.config.root_doc:
        for caption, pages in NAVIGATION.items():
            lines = ("```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```")
            source[0] += "\n" + "\n".join(lines) + "\n"


# ---------------------------------------------------------------- links to files of the repository


class RepositoryLinks(SphinxTransform):
    """Show the path of a file out of docs/ in place of a relative link to it.

    The path is a link if the repository has a public address (cmake/project_urls.txt).
    """

    default_priority = 5  # before Sphinx copies files that pages link to

    def apply(self, **_):
        for node in list(self.document.findall(nodes.Element)):
            if isinstance(node, (addnodes.download_reference, addnodes.pending_xref)):
                if node.get("reftype") == "myst":
                    self.change(node)

    def change(self, node):
        target, _, anchor = node["reftarget"].partition("#")
        if node.get("refdomain") == "doc":  # the absolute path without a suffix
            if not target.startswith("/"):
                return
            path = pathlib.Path(target + ".md")
        elif target.startswith(("../", "./")):
            path = pathlib.Path(self.env.doc2path(self.env.docname)).parent / target
        else:
            return
        path = path.resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            LOG.warning("%s is not in the repository", target, location=node)
            return
        shown = str(path.relative_to(ROOT)) + ("/" if path.is_dir() else "")
        anchor = node.get("reftargetid") or anchor
        address = project_urls().get("Repository")
        if address is None:
            text = node.astext()
            literal = nodes.literal(shown, shown)
            parts = node.children[0].children if isinstance(node.children[0], nodes.inline) else []
            same = text.rstrip("/") == shown.rstrip("/") or shown.rstrip("/").endswith(f"/{text}")
            new = [literal] if same else [*parts, nodes.Text(" ("), literal, nodes.Text(")")]
        else:
            uri = f"{address}/blob/main/{shown}" + (f"#{anchor}" if anchor else "")
            new = [nodes.reference("", "", *node.children, refuri=uri, internal=False)]
        node.replace_self(new)


# ---------------------------------------------------------------- pictures of two themes


class Pictures(SphinxTransform):
    """Replace GitHub's <picture> of a light and a dark file by two images: furo shows one."""

    default_priority = 5
    ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')

    def apply(self, **_):
        for paragraph in list(self.document.findall(nodes.paragraph)):
            raw = [one for one in paragraph.children if isinstance(one, nodes.raw)]
            text = "".join(one.astext() for one in raw)
            if not text.startswith("<picture>"):
                continue
            images = []
            for source, image in re.findall(r"<source([^>]*)>\s*<img([^>]*)>", text):
                source, image = (dict(self.ATTRIBUTE.findall(one)) for one in (source, image))
                for uri, theme in ((image["src"], "light"), (source["srcset"], "dark")):
                    images.append(nodes.image(uri=uri, alt=image["alt"], classes=[f"only-{theme}"]))
            paragraph.replace_self(images)


# ---------------------------------------------------------------- Python


def copy_package(app):
    (folder,) = app.config.autoapi_dirs
    package_source.copy_package(ROOT / "python" / "tilemoe", pathlib.Path(folder))


IN_BOTH = "Aux|Fp8Weight|LoRA"  # classes of tilemoe and of tilemoe.jax


def shorten_types(app, what, name, obj, directive, arguments, returned):
    """Name the package's types as users import them, and those of torch.distributed alone."""

    def short(text):
        text = re.sub(r"\btilemoe(\.jax)?(\.[a-z_]\w*)+\.(?=[A-Z])", r"tilemoe\1.", text or "")
        package = "tilemoe.jax" if name.startswith("tilemoe.jax.") else "tilemoe"
        text = re.sub(rf"(?<![\w.])(?=({IN_BOTH})\b)", f"{package}.", text)
        return re.sub(r"\btorch\.distributed(\.\w+)*\.(?=[A-Z])", "", text) or None

    return short(arguments) or arguments, short(returned)


class OptionTexts(SphinxDirective):
    """Document the fields of tilemoe.options.Options, which have their texts as data."""

    def run(self):
        found = [".. py:class:: tilemoe.options.Options", "   :no-index-entry:", ""]
        literal = lambda text: re.sub(r"`([^`]+)`|(\"\w+\")", r"``\1\2``", text)
        for name, field in options.FIELDS.items():
            takers = [
                of for of, kind in _options_table.FUNCTIONS.items() if name in get_type_hints(kind)
            ]
            text = literal(field.metadata["doc"])
            lines = (f":type: {options.Options.__annotations__[name]}",
                     f":value: {field.default!r}", "",
                     f"{text[0].upper()}{text[1:]}", "",
                     literal(f"Taken by {', '.join(takers)}."), "")  # fmt: skip
            found += [f"   .. py:attribute:: {name}", *(f"      {line}" for line in lines)]
        return self.parse_text_to_nodes("\n".join(found))


# ---------------------------------------------------------------- C and C++

DOXYGEN = """
OUTPUT_DIRECTORY = {output}
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
TYPEDEF_HIDES_STRUCT = YES
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
SEARCH_INCLUDES = NO
PREDEFINED = TILEMOE_API= TILEMOE_INT=
EXTRACT_ALL = YES
SORT_MEMBER_DOCS = NO
QUIET = YES
WARN_AS_ERROR = FAIL_ON_WARNINGS
INPUT = {input}
OPTIMIZE_OUTPUT_FOR_C = {is_c}
"""


ACTIVATIONS = re.compile(r"#define (TILEMOE_ACTIVATION)\(.*\n#include .*\n#undef \1")
ACTIVATION = re.compile(r"^TILEMOE_ACTIVATION\(\w+, +(\w+), +(\w+),", re.MULTILINE)


def header(file):
    """Return a public header with the enumerators that doxygen does not expand."""
    names = ACTIVATION.findall((INCLUDE / "activations.inc").read_text())
    enumerators = "\n".join(f"  k{name} = TILEMOE_{number}," for number, name in names)
    return ACTIVATIONS.sub(enumerators, file.read_text())


def run_doxygen(app):
    for project, folder in app.config.breathe_projects.items():
        is_c = project == "c"
        output = pathlib.Path(folder).parent
        shutil.rmtree(output, ignore_errors=True)
        copies = output / "include" / "tilemoe"
        copies.mkdir(parents=True)
        for file in INCLUDE.glob("*.h"):
            if (file.name == "tilemoe.h") == is_c:
                (copies / file.name).write_text(header(file))
        text = DOXYGEN.format(input=copies, output=output, is_c="YES" if is_c else "NO")
        try:
            subprocess.run(["doxygen", "-"], input=text, text=True, check=True)
        except FileNotFoundError:
            raise ExtensionError("doxygen is not installed: scripts/docs.sh installs it") from None
        except subprocess.CalledProcessError as error:
            raise ExtensionError(f"doxygen: exit status {error.returncode}") from None


def setup(app):
    app.connect("builder-inited", run_doxygen, priority=1)
    app.connect("builder-inited", copy_package, priority=1)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-signature", shorten_types)
    app.add_directive("tilemoe-options", OptionTexts)
    app.add_transform(RepositoryLinks)
    app.add_transform(Pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
