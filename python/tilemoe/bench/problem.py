"""Define a case, the weights of one layer and one batch, the same for all peers."""

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
    "mishglu": F.mish,  # not in the library: for gathered_mm and combine_mm
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
    zipf: bool = False  # choose experts by popularity 1/(e + 1) instead of the router's logits
    rounding: str | None = None
    biases: bool = False
    frozen: bool = False  # no gradients of the router, of weights and of biases
    lora_rank: int = 0  # rank of adapters on W1 and W2, which are frozen; 0: none

    def __post_init__(self):
        for letter in SHAPE:
            step = 8 if letter in "dn" else 1
            if (size := getattr(self, letter)) < 1 or size % step:
                kind = "a positive multiple of 8" if step == 8 else ">= 1"
                raise ValueError(f"{self.name}: {letter} must be {kind}, got {size}")
        if not 0 <= self.lora_rank <= 256 or self.lora_rank % 8:
            raise ValueError(
                f"{self.name}: lora_rank must be a multiple of 8 in [0, 256], got {self.lora_rank}"
            )
        if self.lora_rank and not self.frozen:
            raise ValueError(f"{self.name}: lora_rank requires frozen=True")
        if self.K > self.E:
            raise ValueError(f"{self.name}: K must be <= E = {self.E}, got {self.K}")

    @property
    def shape(self):
        return {letter: getattr(self, letter) for letter in SHAPE}

    @property
    def rows(self):
        """Return M; with rounding, an approximation."""
        return self.T * self.K

    def flop(self, passes):
        """Return the FLOP of the timed passes.

        These are six GEMM dimensions per row in forward and twelve in backward, six if the weights
        are frozen. Those of adapters are not counted.
        """
        backward = 6 if self.frozen else 12
        factor = {"forward": 6, "inference": 6, "backward": backward, "both": 6 + backward}[passes]
        return factor * self.rows * self.d * self.n


CASES = {
    name: Case(name, *sizes, device=device, dtype="float32" if device == "cpu" else "bfloat16")
    for device, layers in LAYERS.items()
    for name, sizes in layers.items()
}


def glu(H, activation):
    """Compute A (M, n) from H (M, 2n), gate columns first."""
    gate, up = H.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class Problem:
    """Tensors of a case.

    X (T, d), router (E, d), W1 (E, 2n, d) with gate rows first, W2 (E, d, n), dO (T, d); prepared
    (T, E): the logits if the case prescribes the experts' popularity, else None; biases: [], or b1
    (E, 2n) and b2 (E, d); adapters: [], or A1 (E, r, d), B1 (E, 2n, r), A2 (E, r, n) and B2 (E, d,
    r) in float32, with values that the case's dtype can represent.
    """

    LORA_SCALE = 2.0

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
            # The largest values of log p + Gumbel noise are draws by p without replacement. The
            # GEMM with a router of zeros runs nevertheless and does not change them.
            uniform = torch.rand(T, E, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
            popularity = torch.arange(1, E + 1, device=device, dtype=torch.float32).reciprocal()
            self.prepared = (popularity.log() - uniform.log().neg().log()).to(dtype)
            self.router.zero_()
        self.adapters = []
        if r := case.lora_rank:
            shapes = (d**-0.5, r, d), (w_scale, 2 * n, r), (n**-0.5, r, n), (w_scale, d, r)
            self.adapters = [normal(scale, E, *shape).float() for scale, *shape in shapes]
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def weights(self):
        return [self.router, self.W1, self.W2, *self.biases]

    @property
    def leaves(self):
        """Return the tensors with gradients, in the order in which peers return them."""
        return [self.X, *self.adapters, *([] if self.case.frozen else self.weights)]

    @property
    def names(self):
        """Return the names of the output and of the leaves' gradients."""
        adapters = ("dA1", "dB1", "dA2", "dB2") if self.adapters else ()
        weights = () if self.case.frozen else ("drouter", "dW1", "dW2", "db1", "db2")
        return ("O", "dX", *adapters, *weights)

    def logits(self):
        """Return (T, E), the router's GEMM: a part of every layer that is timed."""
        if self.prepared is None:
            return self.X @ self.router.t()
        return torch.addmm(self.prepared, self.X, self.router.t())

    def resident_bytes(self):
        """Return the bytes of all tensors that the caller owns before the first call."""
        tensors = [self.X, *self.weights, *self.adapters, self.dO]
        return sum(t.untyped_storage().nbytes() for t in tensors)
