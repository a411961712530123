"""A case, one layer's weights and one batch. All peers get the same."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .layers import LAYERS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = "TdnEK"
ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "reglu": F.relu,
}


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
    activation: str = "swiglu"
    zipf: bool = False  # experts by popularity 1/(e + 1), else the router's own choice
    rounding: str | None = None
    biases: bool = False

    def __post_init__(self):
        for letter in SHAPE:
            step = 8 if letter in "dn" else 1
            if (size := getattr(self, letter)) < 1 or size % step:
                kind = "a positive multiple of 8" if step == 8 else "at least 1"
                raise ValueError(f"{self.name}: {letter} is {size}, expected {kind}")
        if self.K > self.E:
            raise ValueError(f"{self.name}: K is {self.K}, expected at most E = {self.E}")

    @property
    def shape(self):
        return {letter: getattr(self, letter) for letter in SHAPE}

    @property
    def rows(self):
        """M; with rounding, about as many."""
        return self.T * self.K

    def flop(self, passes):
        """FLOP of the timed passes: six GEMM dimensions per row forward, twelve backward."""
        factor = {"forward": 6, "inference": 6, "backward": 12, "both": 18}[passes]
        return factor * self.rows * self.d * self.n


CASES = {
    name: Case(name, *sizes, device=device, dtype="float32" if device == "cpu" else "bfloat16")
    for device, layers in LAYERS.items()
    for name, sizes in layers.items()
}


def glu(H, activation):
    """H (M, 2n), gate columns first -> A (M, n)"""
    gate, up = H.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class Problem:
    """X (T, d), router (E, d), W1 (E, 2n, d) with gate rows first, W2 (E, d, n), dO (T, d);
    prepared (T, E): the logits if the case prescribes the experts' popularity, else None; biases:
    [], or b1 (E, 2n) and b2 (E, d)."""

    def __init__(self, case, seed=0, x_scale=0.2, w_scale=0.02):
        dtype, device = DTYPES[case.dtype], torch.device(case.device)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(scale, *shape):
            values = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
            return values.mul_(scale)

        T, d, n, E = case.T, case.d, case.n, case.E
        self.case, self.K, self.rounding = case, case.K, case.rounding
        self.X = normal(x_scale, T, d)
        self.router = normal(d**-0.5, E, d)
        self.W1 = normal(w_scale, E, 2 * n, d)
        self.W2 = normal(w_scale, E, d, n)
        self.dO = normal(x_scale, T, d)
        self.biases = [normal(w_scale, E, 2 * n), normal(w_scale, E, d)] if case.biases else []
        self.prepared = None
        if case.zipf:
            # The largest of log p + Gumbel noise are draws by p without replacement. The GEMM with
            # a router of zeros runs nevertheless and leaves them as they are.
            uniform = torch.rand(T, E, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
            popularity = torch.arange(1, E + 1, device=device, dtype=torch.float32).reciprocal()
            self.prepared = (popularity.log() - uniform.log().neg().log()).to(dtype)
            self.router.zero_()
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def leaves(self):
        return [self.X, self.router, self.W1, self.W2, *self.biases]

    def logits(self):
        """(T, E), the router's GEMM: a part of every layer that is timed."""
        if self.prepared is None:
            return self.X @ self.router.t()
        return torch.addmm(self.prepared, self.X, self.router.t())

    def resident_bytes(self):
        """Bytes of all tensors that the caller owns before the first call."""
        return sum(t.untyped_storage().nbytes() for t in [*self.leaves, self.dO])
