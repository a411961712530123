"""Read sequences of a corpus in an order that a seed and a number determine.

Sequence i of the training is a function of corpus, seed, context and i alone. So the position in
the data is one number, and the number of processes that share a batch has no effect.
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
    """Return manifest.json, which lists every shard of both parts with its tokens and SHA-256."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise Refusal(f"no corpus found in {folder}; build it with examples/pretrain/corpus.py")
    try:
        described = json.loads(path.read_text())
        if "held_out" in described:  # name of the validation part in corpora of earlier versions
            described["validation"] = described.pop("held_out")
        for part in PARTS:
            for shard in described[part]["shards"]:
                _ = Path(shard["file"]), shard["tokens"] + 0, shard["sha256"] + ""
        _ = described["vocabulary"] + 0, described["train"]["sha256"] + ""
    except (ValueError, LookupError, TypeError) as error:
        raise Refusal(f"{path} must be the manifest of a corpus ({error!r}); {AGAIN}") from None
    return described


def opened(folder, shard):
    """Map a shard's tokens, after checking its size against the manifest."""
    path = Path(folder) / shard["file"]
    if not path.is_file():
        raise Refusal(f"{path} is missing; {AGAIN}")
    size = path.stat().st_size
    if size != 2 * shard["tokens"]:
        raise Refusal(
            (
                f"{path} has {size} bytes, expected {shard['tokens']} tokens of two bytes as "
                "in manifest.json; "
            )
            + AGAIN
        )
    if size == 0:
        return np.zeros(0, dtype="<u2")  # an empty file cannot be mapped
    return np.memmap(path, dtype="<u2", mode="r")


def verify(folder):
    """Read every shard once and compare it with the manifest.

    The SHA-256 must match, and tokens must be below the vocabulary. Verified shards are recorded in
    verified.json with size and time, and read again only if one of them has changed.
    """
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
                    f"{folder / shard['file']} has token {tokens.max()}, expected tokens "
                    f"below the vocabulary {vocabulary}; {AGAIN}"
                )
            done += tokens.nbytes
            progress(done, total)
        if digest.hexdigest() != shard["sha256"]:
            raise Refusal(f"{folder / shard['file']} differs from manifest.json; {AGAIN}")
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
    """Store the stamps if the folder is writable; else every start reads the shards."""
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
        # A window is in one shard; its last token is the first of the next window.
        counts = [max(0, shard["tokens"] - 1) // context for shard in shards]
        self.ends = np.cumsum(counts)  # ends of windows, by shard
        self.windows = int(sum(counts))
        if self.windows == 0:
            raise Refusal(
                f"{folder}: {part} has {described[part]['tokens']} tokens, expected at "
                f"least {context + 1}, one sequence"
            )

    @lru_cache(maxsize=2)
    def _order(self, epoch):
        # RandomState's numbers are the same in every version of numpy, default_rng's are not.
        return np.random.RandomState((self.seed + epoch) % 2**32).permutation(self.windows)

    def window(self, i):
        """Return the window of sequence i: every epoch has each window once, in its own order."""
        epoch, rest = divmod(i, self.windows)
        return int(self._order(epoch)[rest])

    def tokens(self, window):
        """Return the tokens (context + 1) of a window."""
        shard = int(np.searchsorted(self.ends, window, side="right"))
        start = (window - (int(self.ends[shard - 1]) if shard else 0)) * self.context
        return self.shards[shard][start : start + self.context + 1]

    def sequences(self, numbers):
        """Return the sequences (len(numbers), context + 1) int64."""
        rows = [self.tokens(self.window(i)).astype(np.int64) for i in numbers]
        return torch.from_numpy(np.stack(rows))
