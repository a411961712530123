"""Write the tables of options in docs/pytorch.md. This module imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
from typing import Any, get_type_hints

from . import options

BEGIN, END = "<!-- python -m tilemoe.options: {} -->\n", "<!-- end -->\n"
# Tables and their first options, in the order of Options.
TABLES = {
    "routing": "K",
    "experts": "activation",
    "memory": "column_blocks",
    "parallel": "capacity_factor",
}
FUNCTIONS = {
    "`MoE`": options.OfModule,
    "`moe`": options.OfMoe,
    "`moe_general`, `grouped_experts`": options.OfRows,
    "`expert_parallel.moe`": options.OfRanks,
}


def tables() -> dict[str, str]:
    """Return each table: a row per option with its default, the functions that accept it, its text."""
    beginnings = {first: name for name, first in TABLES.items()}
    found: dict[str, str] = {}
    for name, field in options.FIELDS.items():
        if name in beginnings:
            current = beginnings[name]
            found[current] = "| option | default | accepted by | meaning |\n|---|---|---|---|\n"
        found[current] += _row(name, field)
    return found


def _row(name: str, field: dataclasses.Field[Any]) -> str:
    default = field.default if not isinstance(field.default, str) else f'"{field.default}"'
    functions = [f for f, kind in FUNCTIONS.items() if name in get_type_hints(kind)]
    takers = "all" if len(functions) == len(FUNCTIONS) else ", ".join(functions)
    text = re.sub(r'("\w+")', r"`\1`", field.metadata["doc"])
    return f"| `{name}` | `{default}` | {takers} | {text} |\n"


def written(page: str) -> str:
    """Return the page with each table between its two marks."""
    for name, table in tables().items():
        before, rest = page.split(BEGIN.format(name))
        _, _, after = rest.partition(END)
        page = before + BEGIN.format(name) + table + END + after
    return page


def main() -> None:
    about = "Print the tables of options, or write them into pages."
    parser = argparse.ArgumentParser(prog="python -m tilemoe.options", description=about)
    parser.add_argument("page", nargs="*", type=pathlib.Path)
    pages = parser.parse_args().page
    for page in pages:
        page.write_text(written(page.read_text()))
    if not pages:
        print("\n".join(tables().values()), end="")
