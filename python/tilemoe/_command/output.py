"""Tables, the line of progress, and files that a command writes."""

import sys
from pathlib import Path

from .errors import Failed


def table(titles, rows, left):
    """Lines of text; `left` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    for row in (titles, ["-" * width for width in widths], *rows):
        cells = [cell.ljust(width) if i in left else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]  # fmt: skip
        yield "  ".join(cells).rstrip()


class StatusLine:
    """A line that each draw overwrites, on a terminal; otherwise nothing is printed."""

    def __init__(self):
        self._width = 0 if sys.stderr.isatty() else None

    def draw(self, text):
        if self._width is None:
            return
        sys.stderr.write(f"\r{text:{self._width}}")
        sys.stderr.flush()
        self._width = len(text)

    def clear(self):
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()


def check_writable(file):
    """Checks, before minutes of work, that the file can be written. Does not change its content."""
    if file is None:
        return
    try:
        with Path(file).open("a"):
            pass
    except OSError as error:
        raise Failed(f"cannot write {file}: {error.strerror}") from None


def write(file, text):
    if file is not None:
        Path(file).write_text(text)
