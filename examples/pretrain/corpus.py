"""Plain text files -> a corpus of byte tokens that training maps into memory.

    python examples/pretrain/corpus.py runs/corpus docs README.md

Every file is a document: its bytes (tokens 0 to 255), then the token 256. Equal documents are
taken once. A document is held out when the hash of its bytes says so, so that adding files moves
none between the parts. The folder has train.bin, held_out.bin (uint16, little-endian) and
manifest.json with counts and hashes.
"""

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

END = 256  # of a document
VOCABULARY = 257
PARTS = ("train", "held_out")


def files_of(paths):
    """Files and folders -> files, sorted, so that the order is that of no file system."""
    for path in map(Path, paths):
        yield from sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else (path,)


def build(folder, paths, held_out=0.05):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seen, sums = set(), {part: hashlib.sha256() for part in PARTS}
    parts = {part: {"documents": 0, "tokens": 0} for part in PARTS}
    outputs = {part: open(folder / f"{part}.bin", "wb") for part in PARTS}
    for path in files_of(paths):
        text = path.read_bytes()
        digest = hashlib.sha256(text).digest()
        if not text or digest in seen:
            continue
        seen.add(digest)
        share = int.from_bytes(digest[:8], "little") / 2**64  # uniform in [0, 1)
        part = "held_out" if share < held_out else "train"
        tokens = np.append(np.frombuffer(text, np.uint8).astype("<u2"), np.uint16(END))
        data = tokens.astype("<u2").tobytes()
        outputs[part].write(data)
        sums[part].update(data)
        parts[part]["documents"] += 1
        parts[part]["tokens"] += len(tokens)
    for part in PARTS:
        outputs[part].close()
        parts[part]["sha256"] = sums[part].hexdigest()
    manifest = {"vocabulary": VOCABULARY, "tokens": "bytes, 256 ends a document", **parts}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="where the corpus goes")
    parser.add_argument("text", nargs="+", help="files, or folders with files")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the documents")
    args = parser.parse_args()
    print(json.dumps(build(args.folder, args.text, args.held_out), indent=2))


if __name__ == "__main__":
    main()
