"""Reads project_urls.txt, the one file with the project's public addresses."""

from pathlib import Path

FILE = Path(__file__).with_name("project_urls.txt")
NAMES = ("Homepage", "Repository", "Documentation", "Issues", "Changelog")


def project_urls(text=None):
    """-> {name: address}, of the file unless its text is given.

    Raises:
        ValueError: a line has another form, an unknown name, or an address without https.
    """
    urls = {}
    for line in (FILE.read_text(encoding="utf-8") if text is None else text).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, address = (part.strip() for part in line.partition("="))
        if name not in NAMES or name in urls or not address.startswith("https://"):
            raise ValueError(f"{FILE.name}: {line!r}, expected NAME = https://..., once of each name")
        urls[name] = address
    return urls
