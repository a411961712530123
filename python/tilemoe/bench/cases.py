"""The layers that are timed, by the names that `tilemoe bench` gives them."""

from dataclasses import dataclass, replace

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = "TdnEK"


@dataclass(frozen=True)
class Case:
    name: str
    T: int
    d: int
    n: int
    E: int
    K: int
    device: str = "cpu"
    dtype: str = "float32"
    zipf: bool = False  # experts by popularity 1/(e + 1), else the router's own choice
    rounding: str | None = None

    @property
    def shape(self):
        return {letter: getattr(self, letter) for letter in SHAPE}

    @property
    def rows(self):
        """M; with rounding, about as many."""
        return self.T * self.K

    def flop(self, passes):
        """Of the passes timed: six products a pair forward, twelve backward."""
        products = {"forward": 6, "inference": 6, "backward": 12, "both": 18}[passes]
        return products * self.rows * self.d * self.n

    def granularities(self):
        """The case with other n at the same n * K and n * E: equal work and equal weights."""
        for K in (1, 2, 4, 8, 16, 32):
            n, E = self.n * self.K // K, self.E * K // self.K
            exact = n * K == self.n * self.K and E * self.K == self.E * K
            if exact and K <= E and n % 8 == 0:
                yield replace(self, name=f"{self.name} n={n}", n=n, E=E, K=K)


def _gpu(name, *shape):
    return Case(name, *shape, device="cuda", dtype="bfloat16")


# verify/registry.cpp's, which this file cannot read where the package is installed.
CASES = {
    case.name: case
    for case in (
        Case("cpu-t4096", 4096, 512, 256, 32, 4),
        Case("cpu-t512", 512, 512, 256, 32, 4),
        Case("cpu-fine-grained", 4096, 512, 64, 128, 16),
        Case("cpu-zipf", 4096, 512, 256, 32, 4, zipf=True),
        Case("cpu-rounded", 4096, 512, 256, 32, 4, rounding="nearest"),
        _gpu("7b-n256", 24576, 1536, 256, 128, 8),
        _gpu("7b-n1024", 24576, 1536, 1024, 32, 2),
        _gpu("30b-n256", 32768, 4096, 256, 256, 16),
        _gpu("30b-n1024", 32768, 4096, 1024, 64, 4),
        _gpu("olmoe", 32768, 2048, 1024, 64, 8),
        _gpu("qwen3-235b", 32768, 4096, 1536, 128, 8),
        _gpu("gpt-oss-20b", 32768, 2880, 2880, 32, 4),
        _gpu("kimi-linear", 32768, 2304, 1024, 256, 8),
        _gpu("qwen3-next", 32768, 2048, 512, 512, 10),
        _gpu("wide", 8192, 2048, 3072, 8, 2),
        _gpu("few-rows", 2048, 2048, 768, 128, 8),
    )
}
