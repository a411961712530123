"""One layer's weights and one batch, with the bench's distributions. All peers get the same."""

import copy

import torch

from .cases import DTYPES


class Problem:
    """X (T, d), router (E, d), W1 (E, 2n, d) with gate rows first, W2 (E, d, n), dO (T, d);
    prepared (T, E): the logits where the case prescribes the experts' popularity, else None."""

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
        self.prepared = None
        if case.zipf:
            # The largest of log p + Gumbel noise are draws by p without replacement. The product
            # with a router of zeros runs all the same and leaves them as they are.
            uniform = torch.rand(T, E, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
            popularity = torch.arange(1, E + 1, device=device, dtype=torch.float32).reciprocal()
            self.prepared = (popularity.log() - uniform.log().neg().log()).to(dtype)
            self.router.zero_()
        for leaf in self.leaves:
            leaf.requires_grad_()

    def of(self, case):
        """The same tensors for a case that differs in its rounding alone."""
        other = copy.copy(self)
        other.case, other.rounding = case, case.rounding
        return other

    @property
    def leaves(self):
        return [self.X, self.router, self.W1, self.W2]

    @property
    def weights(self):
        return self.leaves[1:]

    def logits(self):
        """(T, E), the router's product: a part of every layer that is timed."""
        if self.prepared is None:
            return self.X @ self.router.t()
        return torch.addmm(self.prepared, self.X, self.router.t())

    def resident_bytes(self):
        """Of all that the caller owns before the first call."""
        return sum(t.untyped_storage().nbytes() for t in [*self.leaves, self.dO])
