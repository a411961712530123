#!/usr/bin/env python3
"""Keep results current after a change of the file patterns in parts.py.

  git worktree add ../before COMMIT
  scripts/gpu/rehash.py ../before    # a checkout of a commit before the change

A line that was current in that checkout, by its own parts.py, gets the hash of the present patterns
if the files of the present patterns are equal there and here. Prints the number of lines per part.
"""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys

from measure import RESULTS
from parts import PARTS, digest, records

DIGESTS = """import functools, json, parts
of = functools.cache(parts.digest)
print(json.dumps({name: of(part.sources) for name, part in parts.PARTS.items()}))"""


def rehashed(lines, before, after):
    """Return the lines with new hashes, and the number of them that changed per part.

    before, after: {part: hash}; a part whose lines must stay as they are is not in `after`.
    """
    found, counts = [], {}
    for one in lines:
        part = one.values.get("item", "").partition("/")[0]
        if part in after and one.values.get("sources") == before.get(part) != after[part]:
            one = dataclasses.replace(one, values=one.values | {"sources": after[part]})
            counts[part] = counts.get(part, 0) + 1
        found.append(one)
    return found, counts


def main(checkout, results=RESULTS):
    checkout = pathlib.Path(checkout).resolve()
    said = subprocess.run([sys.executable, "-c", DIGESTS], cwd=checkout / "scripts" / "gpu",
                          check=True, capture_output=True, text=True).stdout
    before, of = json.loads(said), functools.cache(digest)
    after = {name: of(part.sources) for name, part in PARTS.items()
             if of(part.sources) == of(part.sources, checkout)}
    files = {results / f"{part.file}.jsonl" for part in PARTS.values()}
    for file in sorted(file for file in files if file.exists()):
        lines, counts = rehashed(records.read(file), before, after)
        if counts:
            records.write(file, lines)
        for part, count in counts.items():
            print(f"{part}: {count} lines")
    for part in PARTS:
        if part not in after:
            print(f"{part}: its files have changed")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    main(sys.argv[1])
