"""Sequences of a corpus in an order that a seed and a number fix.

Sequence i of the training is a function of corpus, seed, context and i alone. So the position in
the data is one number, and how many processes share a batch changes nothing about it.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from configs import Refusal


class Corpus:
    def __init__(self, folder, part, context, seed=0):
        manifest = Path(folder) / "manifest.json"
        if not manifest.exists():
            raise Refusal(f"{folder} has no corpus: examples/pretrain/corpus.py makes one")
        described = json.loads(manifest.read_text())
        self.vocabulary, self.sha256 = described["vocabulary"], described[part]["sha256"]
        self.context, self.seed = context, seed
        shards = described[part]["shards"]
        self.shards = [np.memmap(Path(folder) / s["file"], dtype="<u2", mode="r") for s in shards]
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
