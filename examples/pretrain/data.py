"""Sequences of a corpus in an order that a seed and a number fix.

Sequence i of the training is a function of corpus, seed, context and i alone. So the position in
the data is one number, and how many processes share a batch changes nothing about it.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch


class Corpus:
    def __init__(self, folder, part, context, seed=0):
        manifest = json.loads((Path(folder) / "manifest.json").read_text())
        self.vocabulary, self.sha256 = manifest["vocabulary"], manifest[part]["sha256"]
        self.context, self.seed = context, seed
        self.windows = max(0, manifest[part]["tokens"] - 1) // context  # a token of each is shared
        if self.windows == 0:
            raise ValueError(
                f"{folder}: {part} has {manifest[part]['tokens']} tokens, a sequence takes "
                f"{context + 1}"
            )
        self.tokens = np.memmap(Path(folder) / f"{part}.bin", dtype="<u2", mode="r")

    @lru_cache(maxsize=2)
    def _order(self, epoch):
        # RandomState's numbers are frozen in every version of numpy, default_rng's are not.
        return np.random.RandomState((self.seed + epoch) % 2**32).permutation(self.windows)

    def window(self, i):
        """The window of sequence i: every epoch has each of them once, in an order of its own."""
        epoch, rest = divmod(i, self.windows)
        return int(self._order(epoch)[rest])

    def sequences(self, numbers):
        """-> (len(numbers), context + 1) int64."""
        starts = [self.window(i) * self.context for i in numbers]
        rows = [self.tokens[s : s + self.context + 1].astype(np.int64) for s in starts]
        return torch.from_numpy(np.stack(rows))
