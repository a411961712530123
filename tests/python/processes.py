"""Waiting for what other processes do."""

import pathlib
import time


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def text_of(file):
    """Returns its contents by now; nothing if it does not exist."""
    return file.read_text() if file.exists() else ""


def has_ended(pid):
    """Whether a process, child or not, has ended; one that nobody has waited for has ended too."""
    try:
        return "zombie" in pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
