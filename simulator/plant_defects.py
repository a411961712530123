#!/usr/bin/env python3
"""plant_defects.py SOURCE FOLDER: writes the kernels' files that defects.inc names to FOLDER/cuda, each
defect behind a switch. Lines keep their numbers."""
import pathlib
import re
import sys

ROW = re.compile(r'^DEFECT\((\w+), "([^"]+)",\s*R"\((.*?)\)",\s*R"\((.*?)\)",', re.S | re.M)


def main(source, folder):
    rows = ROW.findall((source / "simulator" / "defects.inc").read_text())
    texts = {}
    for number, (name, file, old, new) in enumerate(rows, start=1):
        path = source / "src" / "cuda" / file
        count = path.read_text().count(old) if path.exists() else 0
        if count != 1:
            sys.exit(f"simulator/defects.inc: {name}: its text occurs {count} times in src/cuda/{file}, "
                     "not once; change the row as the kernel was changed")
        text = texts.get(file) or path.read_text()
        if old not in text:
            sys.exit(f"simulator/defects.inc: {name}: its text overlaps that of an earlier row")
        planted = f"{{ if (::tilemoe::simulator::planted({number})) {{ {new} }} else {{ {old} }} }}"
        texts[file] = text.replace(old, planted)
    for file, text in texts.items():
        made = folder / "cuda" / file
        made.parent.mkdir(parents=True, exist_ok=True)
        if not made.exists() or made.read_text() != text:
            made.write_text(text)


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
