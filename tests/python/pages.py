"""The project's pages of Markdown, taken apart: snippets, links and anchors."""

import html
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]

FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```[^\n]*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]*)\)")


class Snippet(NamedTuple):
    line: int
    language: str
    text: str


def all_pages():
    """README and its neighbours, the documentation, and the READMEs of folders."""
    folders = ("apps", "benchmarks", "docs", "examples", "simulator", "tests")
    in_folders = (page for folder in folders for page in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *in_folders])


def blank(match):
    """As many lines with nothing on them, so that those below keep their numbers."""
    return "\n" * match.group().count("\n")


def snippets(page):
    """[Snippet] of a page's text."""
    return [
        Snippet(page.count("\n", 0, found.start()) + 1, found[2].strip(), found[3])
        for found in FENCE.finditer(page)
    ]


def without_snippets(page):
    return FENCE.sub(blank, page)


def visible(text):
    """A line of a page as a reader sees it: no addresses of links."""
    return LINK.sub(r"\2", text)


def links(page):
    """[(line, address)] of links and pictures."""
    text = CODE.sub(lambda found: "`" + "x" * len(found[2]) + "`", without_snippets(page))
    found = [(m.start(), m[3]) for m in LINK.finditer(text)]
    # An inline code as a link's text hides nothing of its address.
    found += [(m.start(), m[1]) for m in re.finditer(r"(?:src|srcset|href)=\"([^\"]*)\"", text)]
    return [(text.count("\n", 0, at) + 1, html.unescape(address)) for at, address in found]


def anchors(page):
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    found = {}
    for heading in re.findall(r"^#{1,6} +(.*?)#*$", without_snippets(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", visible(heading).strip().lower()).replace(" ", "-")
        count = found.get(words, 0)
        found[words] = count + 1
        yield f"{words}-{count}" if count else words
