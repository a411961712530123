"""Write the table of options of docs/pytorch.md. Imports no torch."""

from __future__ import annotations

import argparse
import pathlib
import re
from typing import get_type_hints

from . import options

BEGIN, END = "<!-- python -m tilemoe.options -->\n", "<!-- end -->\n"
FUNCTIONS = {
    "`MoE`": options.OfModule,
    "`moe`": options.OfMoe,
    "`moe_general`, `grouped_experts`": options.OfRows,
    "`expert_parallel.moe`": options.OfRanks,
}


def table() -> str:
    """Return the table: one row per option with its default, its functions and its text."""
    rows = ["| option | default | of | |", "|---|---|---|---|"]
    for name, field in options.FIELDS.items():
        default = field.default if not isinstance(field.default, str) else f'"{field.default}"'
        functions = [f for f, kind in FUNCTIONS.items() if name in get_type_hints(kind)]
        takers = "all" if len(functions) == len(FUNCTIONS) else ", ".join(functions)
        text = re.sub(r'("\w+")', r"`\1`", field.metadata["doc"])
        rows.append(f"| `{name}` | `{default}` | {takers} | {text} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """Return the page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    about = "Print the table of options, or write it into pages."
    parser = argparse.ArgumentParser(prog="python -m tilemoe.options", description=about)
    parser.add_argument("page", nargs="*", type=pathlib.Path)
    pages = parser.parse_args().page
    for page in pages:
        page.write_text(written(page.read_text()))
    if not pages:
        print(table(), end="")
