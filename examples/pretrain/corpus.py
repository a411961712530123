"""Build a corpus of tokens that training maps into memory.

    python examples/pretrain/corpus.py runs/corpus --packages            # Linux and dictionaries
    python examples/pretrain/corpus.py runs/corpus docs README.md        # your own files
    python examples/pretrain/corpus.py runs/corpus docs --bytes          # tokens are bytes

Three stages each leave a file that exists as a whole or not at all, so that an interrupted command
continues from the last stage:

1. text.bin, documents.json: the documents, each once, in the order of their hashes. Two documents
   are the same if they differ in white space alone.
2. tokenizer.json: byte-level BPE, trained on the first of the training documents.
3. train-*.bin, validation-*.bin: shards of uint16 tokens, little-endian. A document's hash decides
   its part: adding files moves no document between the parts.

manifest.json, with counts and hashes, is written last; text.bin is then removed.
"""

import hashlib
import json
import os
import sys
from itertools import chain
from pathlib import Path

import numpy as np

import sources
from logs import Progress
from options import OlderName, Parser, real, whole

PARTS = ("train", "validation")
OLDER = "held_out"  # name of the validation part in corpora of earlier versions
BYTES = 257  # vocabulary of bytes: 256 ends a document
END = "<|end|>"
SHARD = 32 << 20  # bytes of text
SAMPLE = 64 << 20  # bytes for the training of the tokenizer


def write(path, data):
    """Write the file as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(partial, path)


def share(digest):
    """Return a number uniform in [0, 1), from the end of the document's hash."""
    return int(digest[-16:], 16) / 2**64


def gather(folder, documents, largest, limit):
    """Run stage 1; return [(hash, first byte, bytes)] in text.bin, and what was skipped."""
    index = folder / "documents.json"
    if index.exists():
        return json.loads(index.read_text())
    seen, kept, left = set(), [], {"same": 0, "empty": 0, "too large": 0, "not UTF-8": 0}
    at, progress = 0, Progress("text")
    with open(folder / "text.bin", "wb") as text:
        for _, content in documents:
            words = content.split()
            digest = hashlib.sha256(b" ".join(words)).hexdigest()
            reason = (
                "empty" if not words
                else "too large" if len(content) > largest
                else "same" if digest in seen
                else None if is_utf8(content)
                else "not UTF-8"
            )  # fmt: skip
            if reason is not None:
                left[reason] += 1
                continue
            seen.add(digest)
            text.write(content)
            kept.append((digest, at, len(content)))
            at += len(content)
            progress(at)
    progress(at, always=True)
    kept.sort()
    size, taken = 0, []
    for document in kept:
        if limit is not None and size + document[2] > limit:
            break
        taken.append(document)
        size += document[2]
    if not taken:
        raise ValueError(f"no document remains; skipped were {left}")
    left["past the limit"] = len(kept) - len(taken)
    result = {"documents": taken, "left out": left}
    write(index, json.dumps(result))
    return result


def is_utf8(content):
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


class Bytes:
    vocabulary, end = BYTES, BYTES - 1

    def encode(self, documents):
        return [np.frombuffer(document, np.uint8) for document in documents]


class BPE:
    """Run stage 2 with Hugging Face's tokenizers: every byte is a token, so nothing is unknown."""

    def __init__(self, folder, vocabulary, sample):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                "a tokenizer requires the package tokenizers; run pip install tokenizers, or "
                "use --bytes"
            )
        path = folder / "tokenizer.json"
        if not path.exists():
            self.train(tokenizers, path, vocabulary, sample)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.vocabulary = self.tokenizer.get_vocab_size()
        self.end = self.tokenizer.token_to_id(END)
        if self.vocabulary > vocabulary:
            raise ValueError(f"{path} has {self.vocabulary} tokens; remove {folder}")

    @staticmethod
    def train(tokenizers, path, vocabulary, sample):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet,
            show_progress=sys.stderr.isatty(),
        )  # fmt: skip
        print(f"tokenizer: training {vocabulary} tokens", file=sys.stderr)
        tokenizer.train_from_iterator((document.decode() for document in sample), trainer)
        write(path, tokenizer.to_str())

    def encode(self, documents):
        # Special tokens in the text would end documents: here they are text.
        self.tokenizer.encode_special_tokens = True
        texts = [document.decode() for document in documents]
        return [np.array(e.ids) for e in self.tokenizer.encode_batch_fast(texts)]


def first(documents, size):
    for document in documents:
        size -= len(document)
        if size < 0:
            return
        yield document


def shards(documents):
    """Split [(hash, first byte, bytes)] into lists of at most SHARD bytes or one document."""
    shard, size = [], 0
    for document in documents:
        if shard and size + document[2] > SHARD:
            yield shard
            shard, size = [], 0
        shard.append(document)
        size += document[2]
    if shard:
        yield shard


def build(
    folder,
    documents,
    *,
    origin=None,
    vocabulary=BYTES,
    validation=0.05,
    largest=sources.LARGEST,
    limit=None,
):
    """Build a corpus from documents, (name, bytes) each, and return the manifest.

    `validation` is the fraction of the documents in that part. `origin` describes in JSON where
    they come from: a folder with other documents raises an error.
    """
    folder = Path(folder)
    if not BYTES <= vocabulary <= 1 << 16:
        raise ValueError(f"--vocabulary must be in [{BYTES}, 65536], got {vocabulary}")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"vocabulary": vocabulary, "validation": validation, "largest": largest}
    settings |= {"limit": limit, "origin": origin}
    settings_are(folder / "settings.json", settings)
    for path in folder.glob(f"{OLDER}-*.bin"):  # of an interrupted command of an earlier version
        os.replace(path, folder / path.name.replace(OLDER, "validation"))
    gathered = gather(folder, documents, largest, limit)
    text = np.memmap(folder / "text.bin", dtype=np.uint8, mode="r")
    read = lambda document: text[document[1] : document[1] + document[2]].tobytes()
    parts = {part: [] for part in PARTS}
    for document in gathered["documents"]:
        parts["validation" if share(document[0]) < validation else "train"].append(document)
    if not parts["train"] or validation > 0 and not parts["validation"]:
        counts = {part: len(chosen) for part, chosen in parts.items()}
        raise ValueError(f"too few documents for --validation {validation}: {counts}")
    sample = first(map(read, parts["train"]), SAMPLE)
    codec = Bytes() if vocabulary == BYTES else BPE(folder, vocabulary, sample)
    total = sum(size for _, _, size in gathered["documents"])
    done, progress, manifest = 0, Progress("tokens"), {"vocabulary": codec.vocabulary}
    manifest |= {"end": codec.end, "left out": gathered["left out"]}
    for part in PARTS:
        files = []
        for number, shard in enumerate(shards(parts[part])):
            path = folder / f"{part}-{number:05}.bin"
            if not path.exists():
                write(path, tokens_of(codec, map(read, shard)))
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            files.append({"file": path.name, "tokens": len(data) // 2, "sha256": digest})
            done += sum(size for _, _, size in shard)
            progress(done, total)
        manifest[part] = {
            "documents": len(parts[part]),
            "bytes": sum(size for _, _, size in parts[part]),
            "tokens": sum(file["tokens"] for file in files),
            "sha256": hashlib.sha256("".join(f["sha256"] for f in files).encode()).hexdigest(),
            "shards": files,
        }
    progress(done, total, always=True)
    write(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    for name in ("text.bin", "documents.json"):
        (folder / name).unlink()
    return manifest


def settings_are(path, settings):
    """Raise a ValueError if the folder has other settings."""
    if not path.exists():
        write(path, json.dumps(settings))
    begun = json.loads(path.read_text())
    if OLDER in begun:
        begun["validation"] = begun.pop(OLDER)
    changed = [
        f"{name} {begun.get(name)}, not {settings.get(name)}"
        for name in sorted(begun.keys() | settings.keys())
        if begun.get(name) != settings.get(name)
    ]
    if changed:
        raise ValueError(
            f"{path.parent} has a corpus with {'; '.join(changed)}; choose another folder"
        )


def tokens_of(codec, documents, batch=256):
    pieces, waiting = [], []
    for document in chain(documents, [None]):
        if document is not None:
            waiting.append(document)
        if len(waiting) == batch or document is None:
            for tokens in codec.encode(waiting):
                pieces += [tokens.astype("<u2"), np.array([codec.end], dtype="<u2")]
            waiting = []
    return np.concatenate(pieces).tobytes()


def main(argv=None):
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="folder of the corpus")
    add("text", nargs="*", help="files, or folders with files")
    packages = f"packages to read instead of files; without names {', '.join(sources.PACKAGES)}"
    add("--packages", nargs="*", metavar="PACKAGE", help=packages)
    add("--vocabulary", type=whole(1), default=16384, help="tokens of the tokenizer")
    add("--bytes", action="store_true", help="no tokenizer: a token is a byte")
    add(
        "--megabytes",
        type=real(0, above=True),
        help="maximum bytes of text: the first documents by their hashes",
    )
    add(
        "--largest",
        type=whole(1),
        default=sources.LARGEST,
        help="maximum bytes of a document; larger documents are skipped",
    )
    part = parser.add_mutually_exclusive_group()
    fraction = {"type": real(0, 1), "dest": "validation"}
    part.add_argument("--validation", default=0.05, help="fraction of the documents", **fraction)
    part.add_argument("--held-out", action=OlderName, **fraction)
    args = parser.parse_args(argv)
    if bool(args.text) == (args.packages is not None):
        parser.error("expected files, or --packages")
    if (args.folder / "manifest.json").exists():
        parser.error(f"{args.folder} already contains a corpus")
    if args.text:
        for path in args.text:  # before anything is written to the folder
            if not Path(path).exists():
                parser.exit(1, f"error: no file or folder found at {path}\n")
        origin = {"files": [str(Path(path).resolve()) for path in args.text]}
        documents = sources.files(args.text, args.largest)
    else:
        names = args.packages or list(sources.PACKAGES)
        origin = {"packages": names}
        say = lambda line: print(line, file=sys.stderr)
        documents = sources.packages(names, args.largest, say)
    limit = None if args.megabytes is None else int(args.megabytes * 1e6)
    try:
        manifest = build(
            args.folder, documents, origin=origin, validation=args.validation, largest=args.largest,
            vocabulary=BYTES if args.bytes else args.vocabulary, limit=limit,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    for part in PARTS:
        numbers = manifest[part]
        print(f"{part}: {numbers['documents']:,} documents, {numbers['bytes']:,} bytes, "
              f"{numbers['tokens']:,} tokens")  # fmt: skip


if __name__ == "__main__":
    main()
