"""The same experts on torch's grouped_mm, what TileMoE is compared with: the same parameters."""

import torch
import torch.nn.functional as F

import tilemoe
from tilemoe.module import Experts


class GroupedMMExperts(Experts):
    """SwiGLU experts of a tilemoe.MoE without token rounding: sort by expert, gather, grouped_mm,
    SwiGLU, grouped_mm, weighted sum. Backward is autograd's, and no step waits for the device."""

    def forward(self, x, logits, spread, *, K, scoring, selection_bias, rounding, **_):
        """x (T, d), logits (T, E) -> O (T, d), its aux."""
        if rounding is not None:
            raise ValueError("--experts grouped_mm has no token rounding")
        scores, ids = tilemoe.topk_router(logits, K, scoring=scoring, selection_bias=selection_bias)
        expert, order = ids.flatten().sort(stable=True)  # (T K), and the pair of a row
        token = order // K
        every = torch.arange(logits.shape[1], device=x.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, every, right=True).to(torch.int32)  # (E)
        gate, up = F.grouped_mm(x[token], self.gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
        Y = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)  # (T K, d)
        weighted = Y * scores.flatten()[order, None]
        out = torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, weighted.float())
        counts = ends.diff(prepend=ends.new_zeros(1))
        none = ends.new_zeros(())
        return out.to(x.dtype), tilemoe.Aux(counts, none, none, none)
