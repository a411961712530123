"""Sequences of a corpus in an order that a seed and a number fix.

Sequence i of the training is a function of corpus, seed, context and i alone. So the position in
the data is one number, and how many processes share a batch changes nothing about it.
"""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from configs import Refusal
from logs import Progress

PARTS = ("train", "validation")
CHUNK = 16 << 20  # bytes
AGAIN = "build the corpus again with examples/pretrain/corpus.py"


def manifest_of(folder):
    """manifest.json, which names every shard of both parts with its tokens and its SHA-256."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise Refusal(f"{folder} has no corpus: examples/pretrain/corpus.py makes one")
    try:
        described = json.loads(path.read_text())
        if "held_out" in described:  # the validation part in corpora of earlier versions
            described["validation"] = described.pop("held_out")
        for part in PARTS:
            for shard in described[part]["shards"]:
                _ = Path(shard["file"]), shard["tokens"] + 0, shard["sha256"] + ""
        _ = described["vocabulary"] + 0, described["train"]["sha256"] + ""
    except (ValueError, LookupError, TypeError) as error:
        raise Refusal(f"{path} is no manifest of a corpus ({error!r}): {AGAIN}") from None
    return described


def opened(folder, shard):
    """A shard's tokens, mapped; of the size that the manifest says."""
    path = Path(folder) / shard["file"]
    if not path.is_file():
        raise Refusal(f"{path} is missing: {AGAIN}")
    size = path.stat().st_size
    if size != 2 * shard["tokens"]:
        raise Refusal(
            f"{path} has {size} bytes, and manifest.json says {shard['tokens']} tokens of two: "
            + AGAIN
        )
    if size == 0:
        return np.zeros(0, dtype="<u2")  # which cannot be mapped
    return np.memmap(path, dtype="<u2", mode="r")


def verify(folder):
    """Reads every shard once and compares it with the manifest: its SHA-256, and tokens below the
    vocabulary. What was verified is kept in verified.json with the file's size and time, and read
    again only if one of them has changed."""
    described, folder = manifest_of(folder), Path(folder)
    shards = [shard for part in PARTS for shard in described[part]["shards"]]
    known, vocabulary = verified_before(folder), described["vocabulary"]
    stamps, waiting = {}, []
    for shard in shards:
        opened(folder, shard)
        name = shard["file"]
        file = (folder / name).stat()
        stamps[name] = [shard["sha256"], vocabulary, file.st_size, file.st_mtime_ns]
        if known.get(name) != stamps[name]:
            waiting.append(shard)
    total, done = sum(2 * shard["tokens"] for shard in waiting), 0
    progress = Progress(f"verifying {folder}")
    for shard in waiting:
        digest = hashlib.sha256()
        for tokens in chunks(opened(folder, shard)):
            digest.update(tokens)
            if tokens.max() >= vocabulary:
                raise Refusal(
                    f"{folder / shard['file']} has token {tokens.max()}, and the vocabulary has "
                    f"{vocabulary}: {AGAIN}"
                )
            done += tokens.nbytes
            progress(done, total)
        if digest.hexdigest() != shard["sha256"]:
            raise Refusal(f"{folder / shard['file']} is not what manifest.json says: {AGAIN}")
    if waiting:
        remember(folder / "verified.json", stamps)


def chunks(tokens):
    for first in range(0, len(tokens), CHUNK // 2):
        yield tokens[first : first + CHUNK // 2]


def verified_before(folder):
    try:
        known = json.loads((folder / "verified.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def remember(path, stamps):
    """Keeps the stamps if the folder may be written to; else every start reads the shards."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(stamps))
        os.replace(partial, path)
    except OSError:
        return


class Corpus:
    def __init__(self, folder, part, context, seed=0):
        described = manifest_of(folder)
        self.vocabulary, self.sha256 = described["vocabulary"], described[part]["sha256"]
        self.context, self.seed = context, seed
        self.tokens_per_byte = described[part]["tokens"] / max(1, described[part]["bytes"])
        shards = described[part]["shards"]
        self.shards = [opened(folder, shard) for shard in shards]
        # A window lies in one shard; its last token is the next one's first.
        counts = [max(0, shard["tokens"] - 1) // context for shard in shards]
        self.ends = np.cumsum(counts)  # of windows, by shard
        self.windows = int(sum(counts))
        if self.windows == 0:
            raise Refusal(
                f"{folder}: {part} has {described[part]['tokens']} tokens, a sequence takes "
                f"{context + 1}"
            )

    @lru_cache(maxsize=2)
    def _order(self, epoch):
        # RandomState's numbers are frozen in every version of numpy, default_rng's are not.
        return np.random.RandomState((self.seed + epoch) % 2**32).permutation(self.windows)

    def window(self, i):
        """The window of sequence i: every epoch has each of them once, in an order of its own."""
        epoch, rest = divmod(i, self.windows)
        return int(self._order(epoch)[rest])

    def tokens(self, window):
        """-> (context + 1)"""
        shard = int(np.searchsorted(self.ends, window, side="right"))
        start = (window - (int(self.ends[shard - 1]) if shard else 0)) * self.context
        return self.shards[shard][start : start + self.context + 1]

    def sequences(self, numbers):
        """-> (len(numbers), context + 1) int64."""
        rows = [self.tokens(self.window(i)).astype(np.int64) for i in numbers]
        return torch.from_numpy(np.stack(rows))
