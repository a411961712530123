"""Compute the experts of a tilemoe.MoE with other libraries.

Parameters, names and checkpoints are the same. Each implementation has SwiGLU experts without
biases, reads x (T, d) and logits (T, E), and chooses with TileMoE's router, so that only the
experts' own computation differs.
"""

import importlib.util

import torch
import torch.nn.functional as F

import tilemoe
from tilemoe.bench import peers as bench_peers
from tilemoe.module import Experts


class Peer(Experts):
    """Experts of another library, with the choice before them and the counts after."""

    name = ""
    module = None  # module to import
    install = ""
    one_graph = True  # torch.compile traces it without a break

    @classmethod
    def refusal(cls, c, device):
        """Return why it cannot run, in one sentence; or None."""
        if c.rounding is not None:
            return f"--experts {cls.name} does not support --rounding, got --rounding {c.rounding}"
        if c.capacity is not None:
            return f"--experts {cls.name} does not support --capacity, got --capacity {c.capacity}"
        if cls.module is not None and device != "cuda":
            return f"--experts {cls.name} requires a GPU, and this process has none"
        if cls.module is not None and importlib.util.find_spec(cls.module) is None:
            return f"--experts {cls.name} is not installed; run {cls.install}"
        return None

    def forward(self, x, logits, spread, *, options, selection_bias, **_):
        """Compute O (T, d) and its aux from x (T, d) and logits (T, E)."""
        scores, ids = tilemoe.topk_router(
            logits, options.K, scoring=options.scoring, selection_bias=selection_bias
        )
        out, counts = self.compute(x, scores, ids)
        none = [counts.new_zeros(())] * (len(tilemoe.Aux._fields) - 3)
        return out, tilemoe.Aux(counts, *none, ids=ids, scores=scores.detach())

    def compute(self, x, scores, ids):
        """Compute O (T, d) and counts (E) from x (T, d), scores and ids (T, K)."""
        raise NotImplementedError


class Sorted(Peer):
    """Experts whose rows are sorted by expert."""

    def compute(self, x, scores, ids):
        expert, order = ids.flatten().sort(stable=True)  # (T K), and the pair of a row
        every = torch.arange(self.gate_up_proj.shape[0], device=x.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, every, right=True).to(torch.int32)  # (E)
        out = self.compute_rows(x, scores, expert, order, ends)
        return out, ends.diff(prepend=ends.new_zeros(1))

    def compute_rows(self, x, scores, expert, order, ends):
        """Compute O (T, d) from each row's expert and pair (T K), and the experts' ends (E)."""
        raise NotImplementedError


class Permute(torch.autograd.Function):
    """Reorder rows.

    Autograd's own backward adds rows to zeros one by one, because it does not detect that an index
    is a permutation; this backward reads them in the previous order.
    """

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, drows):
        index, inverse = ctx.saved_tensors
        return Permute.apply(drows, inverse, index), None, None


class GroupedMM(Sorted):
    """Experts by torch's grouped_mm: gather, GEMM, SwiGLU, GEMM, weighted sum by token in float32.

    Backward is autograd's, without atomic additions, and no step waits for the device. Under
    torch.compile the gather, and the sum of the K pairs of a token, are one kernel each.
    """

    name = "grouped_mm"

    def compute_rows(self, x, scores, expert, order, ends):
        T, K = scores.shape
        row = torch.empty_like(order)  # row of each pair: the inverse of `order`
        row.scatter_(0, order, torch.arange(T * K, device=x.device))
        pairs = x[:, None].expand(T, K, -1).reshape(T * K, -1)
        rows = Permute.apply(pairs, order, row)  # (T K, d), by expert
        gate, up = F.grouped_mm(rows, self.gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
        Y = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)  # (T K, d)
        Y = Permute.apply(Y, row, order).view(T, K, -1)
        return (Y * scores[..., None]).sum(dim=1).to(x.dtype)


class ScatterMoE(Sorted):
    name = "scattermoe"
    module = "scattermoe"
    install = "pip install git+https://github.com/shawntan/scattermoe"
    one_graph = False

    def compute_rows(self, x, scores, expert, order, ends):
        from scattermoe.parallel_experts import parallel_linear

        K, scores = scores.shape[1], scores.to(x.dtype)
        H = parallel_linear(
            x, self.gate_up_proj.mT, K, expert, order, ends, grouped_out=True
        )  # (T K, 2n)
        gate, up = H.chunk(2, dim=-1)
        return parallel_linear(
            F.silu(gate) * up, self.down_proj.mT, 1, expert, order, ends,
            grouped_in=True, gates=scores,
        )  # fmt: skip


class SonicMoE(Peer):
    name = "sonic-moe"
    module = "sonicmoe"
    install = "pip install sonic-moe==0.1.2.post1 quack-kernels==0.3.11"
    one_graph = False

    @torch.compiler.disable  # it cannot be traced
    def compute(self, x, scores, ids):
        bench_peers.SonicMoE.keep_tiles()
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        (T, K), E = scores.shape, self.gate_up_proj.shape[0]
        token = torch.arange(T, device=x.device, dtype=torch.int32).repeat_interleave(K)
        return moe_general_routing_inputs(
            x, scores.flatten(), token, ids.flatten(), self.gate_up_proj.permute(1, 2, 0), None,
            self.down_proj.permute(1, 2, 0), None, E, torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU, not torch.is_grad_enabled(), concat_layout=True,
        )  # fmt: skip


PEERS = {peer.name: peer for peer in (GroupedMM, ScatterMoE, SonicMoE)}
IMPLEMENTATIONS = ("tilemoe", *PEERS)


def refusal(name, c, device):
    """Return why an implementation cannot run a configuration, in one sentence; or None."""
    return None if name == "tilemoe" else PEERS[name].refusal(c, device)


def is_one_graph(name):
    return name == "tilemoe" or PEERS[name].one_graph
