"""The layers that are timed, by the names that `tilemoe bench` gives them."""

from dataclasses import dataclass, replace

import torch

from .layers import LAYERS

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


def _cases():
    cases = [Case(name, *layer, device="cuda", dtype="bfloat16")
             for name, layer in LAYERS["cuda"].items()]  # fmt: skip
    cases += [Case(name, *layer) for name, layer in LAYERS["cpu"].items()]
    cpu = LAYERS["cpu"]["cpu-t4096"]
    cases += [Case("cpu-zipf", *cpu, zipf=True), Case("cpu-rounded", *cpu, rounding="nearest")]
    return {case.name: case for case in cases}


CASES = _cases()
