"""What commands write from results files into pages: tables, between two marks."""

END = "<!-- to here -->\n"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def with_part(text, begin, part):
    """The page's text with `part` between the mark `begin` and END."""
    before, rest = text.split(begin)
    _, after = rest.split(END)
    return before + begin + part + END + after
