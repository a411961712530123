"""What commands write from results files into pages: tables, between two marks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from marks import marked  # noqa: E402  of numbers whose kernels may be others today

END = "<!-- to here -->\n"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def with_part(text, begin, part):
    """The page's text with `part` between the mark `begin` and END."""
    before, rest = text.split(begin)
    _, after = rest.split(END)
    return before + begin + marked(part) + END + after
