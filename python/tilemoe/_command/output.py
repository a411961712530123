"""Write tables, the status line, and files of a command."""

import sys
from pathlib import Path

from .errors import Failed


def table(titles, rows, left):
    """Return lines of text; `left` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    for row in (titles, ["-" * width for width in widths], *rows):
        cells = [cell.ljust(width) if i in left else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]  # fmt: skip
        yield "  ".join(cells).rstrip()


class StatusLine:
    """Status line that each draw overwrites; printed only on a terminal."""

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
    """Check that the file can be written, before minutes of work, without changing it."""
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
