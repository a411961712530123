"""The ways to compute a layer of several ranks that gpu_expert_parallel.py compares. Each is a whole
layer, router included; its problem has this rank's tokens and the weights of all experts, of which
each rank's own are a part that is not copied."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tilemoe
import tilemoe.expert_parallel
from tilemoe.bench import compiled
from tilemoe.bench.peers import TorchGroupedMM


class Way:
    """name@turns: the products with so many turns of blocks (tilemoe.set_block_turns)."""

    all_experts = False  # on every rank
    waits = False  # for the device: no graph can have it

    def __init__(self, problem, group, turns=1, **options):
        self.problem, self.group, self.turns, self.options = problem, group, turns, options
        self.W1, self.W2 = problem.W1, problem.W2
        if not self.all_experts:
            size = problem.case.E // dist.get_world_size(group)
            first = dist.get_rank(group) * size
            own = slice(first, first + size)
            self.W1 = problem.W1.detach()[own].requires_grad_()
            self.W2 = problem.W2.detach()[own].requires_grad_()

    def forward(self):
        """-> O (T, d)"""
        raise NotImplementedError

    def step(self):
        """-> O, dX, drouter, dW1, dW2"""
        tilemoe.set_block_turns(self.turns)
        O = self.forward()
        leaves = [self.problem.X, self.problem.router, self.W1, self.W2]
        return O, *torch.autograd.grad(O, leaves, self.problem.dO)


class Own(Way):
    """No expert parallelism: all experts, this rank's tokens."""

    all_experts = True

    def forward(self):
        p = self.problem
        return tilemoe.moe(p.X, p.logits(), self.W1, self.W2, K=p.K)


class Ours(Way):
    """tilemoe.expert_parallel with these options, and memory for 1.5 times the mean."""

    def __init__(self, problem, group, turns=1, **options):
        super().__init__(problem, group, turns, capacity_factor=1.5, **options)

    def forward(self):
        p = self.problem
        return tilemoe.expert_parallel.moe(
            p.X, p.logits(), self.W1, self.W2, group=self.group, K=p.K, **self.options
        )


class _Exchange(torch.autograd.Function):
    """rows (sum of sent, d) -> (sum of received, d)"""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.how = received, sent, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, *ctx.how), None, None, None


def exchanged(rows, sent, received, group):
    """sent, received: rows to and from each rank, on the host."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _Reordered(torch.autograd.Function):
    """rows[order], whose gradient reads too, by the inverse order, in place of adding."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(order, inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, gradient):
        order, inverse = ctx.saved_tensors
        return gradient[inverse], None, None


class Usual(Way):
    """A copy of a token's row for each of its pairs: sorted by expert, sent by all_to_all_single with
    the numbers of rows on the host, sorted again by expert, torch's grouped_mm, and back. Gather,
    SwiGLU and the weighted sum are torch-grouped_mm-compiled's, without atomics."""

    waits = True

    @staticmethod
    def missing():
        return None if hasattr(F, "grouped_mm") else "this torch has no grouped_mm"

    def forward(self):
        p, E_local, ranks = self.problem, self.W1.shape[0], dist.get_world_size(self.group)
        routed = TorchGroupedMM(p).route()
        s, order, ends = routed
        rows_of_pairs = inverse_of(order)
        counts = ends.diff(prepend=ends.new_zeros(1))  # (E)
        arriving = torch.empty_like(counts)  # of each rank for each of this one's experts
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_rank = torch.stack([counts, arriving]).view(2, ranks, E_local)
        sent, received = by_rank.sum(2).tolist()  # the host waits

        rows = compiled.Gather.apply(p.X, order, rows_of_pairs, p.K)
        rows = _Exchange.apply(rows, sent, received, self.group)
        expert = torch.arange(E_local, device=rows.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving, output_size=sum(received))
        by_expert = expert.sort(stable=True).indices
        back = inverse_of(by_expert)
        offs = by_rank[1].sum(0).cumsum(0).to(torch.int32)
        rows = _Reordered.apply(rows, by_expert, back)
        H = F.grouped_mm(rows, self.W1.transpose(1, 2), offs=offs)
        Y = F.grouped_mm(compiled.swiglu(H), self.W2.transpose(1, 2), offs=offs)
        Y = _Exchange.apply(_Reordered.apply(Y, back, by_expert), received, sent, self.group)
        return compiled.Combine.apply(Y, s, order, rows_of_pairs)


def inverse_of(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


WAYS = {
    "own": (Own, {}),
    "serial": (Ours, {}),
    "serial-kept": (Ours, dict(keep_gathered=True)),
    "in-turn": (Ours, dict(beside=False)),
    "chunks-2": (Ours, dict(chunks=2)),
    "chunks-4": (Ours, dict(chunks=4)),
    "chunks-auto": (Ours, dict(chunks="auto")),
    "chunks-4-kept": (Ours, dict(chunks=4, keep_gathered=True)),
    "pull": (Ours, dict(dispatch="pull")),
    "pull-kept": (Ours, dict(dispatch="pull", keep_gathered=True)),
    "usual": (Usual, {}),
}
DEFAULT_WAYS = ["own", "serial", "serial@4", "serial-kept", "chunks-2@4", "chunks-4", "chunks-4@4",
                "pull", "pull@4", "usual"]  # fmt: skip


def way_of(text, problem, group):
    """Of a name in WAYS, or NAME@TURNS."""
    name, _, turns = text.partition("@")
    kind, options = WAYS[name]
    return kind(problem, group, int(turns or 1), **options)
