"""Write the tables of options in docs/pytorch.md. This module imports no torch."""

from __future__ import annotations

import argparse
import pathlib
import re
from typing import get_type_hints

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
    """Return each table: a row per option with its default and text, and who accepts the options."""
    beginnings = {first: name for name, first in TABLES.items()}
    names: dict[str, list[str]] = {}
    for name in options.FIELDS:
        if name in beginnings:
            current = names.setdefault(beginnings[name], [])
        current.append(name)
    return {table: _table(of_table) for table, of_table in names.items()}


def _table(names: list[str]) -> str:
    takers = [_takers(name) for name in names]
    common = max(takers, key=takers.count)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, own in zip(names, takers):
        field = options.FIELDS[name]
        default = field.default if not isinstance(field.default, str) else f'"{field.default}"'
        text = re.sub(r'("\w+")', r"`\1`", field.metadata["doc"])
        text += f" Accepted only by {own}." * (own != common)
        rows.append(f"| `{name}` | `{default}` | {text} |")
    rest = "The other options are" if len({*takers}) > 1 else "All are"
    return "\n".join([*rows, "", f"{rest} accepted by {common}."]) + "\n"


def _takers(name: str) -> str:
    functions = [f for f, kind in FUNCTIONS.items() if name in get_type_hints(kind)]
    if len(functions) == len(FUNCTIONS):
        return "`MoE` and all functions of the layer"
    *first, last = ", ".join(functions).split(", ")
    return f"{', '.join(first)} and {last}" if first else last


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
