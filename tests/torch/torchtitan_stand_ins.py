"""Stand-ins of what torchtitan's dispatchers move tokens with, over torch.distributed on CPUs: the
interface and the layout of DeepEP's `ElasticBuffer` and of its hybrid-ep branch's `HybridEPBuffer`,
and nothing of how they work. Everything between these buffers and the experts is torchtitan's own.

A buffer returns NaN for everything that it need not define. It takes bfloat16 alone, and its combine
only the rows of its dispatch.
"""

import sys
import types

import torch
import torch.distributed as dist

# torchtitan's own part of it requires types of an operator that torch 2.11 does not have.
HAS_HYBRIDEP = hasattr(getattr(torch._library, "opaque_object", None), "CustomClassBase")


class _Received:
    """Which tokens of all ranks (R, T) a rank has, and what it does not have of theirs."""

    def __init__(self, group, chosen):
        """chosen (T, E) of this rank's tokens."""
        self.group, self.rank = group, dist.get_rank(group)
        everyone = _gathered(group, chosen)  # (R, T, E)
        E_local = chosen.shape[1] // dist.get_world_size(group)
        self.first = self.rank * E_local
        self.own = everyone[..., self.first : self.first + E_local]  # (R, T, E_local)
        self.tokens = self.own.any(-1)  # (R, T)
        self.counts = self.own.sum((0, 1))  # (E_local)

    def rows(self, x):
        """x (T, ...) of this rank -> (received, ...)."""
        return _gathered(self.group, x)[self.tokens]

    def sums(self, rows):
        """rows (received, ...) -> (T, ...): the ranks' sums for this rank's tokens."""
        assert rows.shape[0] == self.tokens.sum()
        every = torch.zeros(*self.tokens.shape, *rows.shape[1:])
        every[self.tokens] = rows.float()
        dist.all_reduce(every, group=self.group)
        return every[self.rank].to(rows.dtype)


def _gathered(group, tensor):
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return torch.stack(every)


class ElasticBuffer:
    """DeepEP's, as torchtitan.distributed.deepep.deepep calls it, in the compact form."""

    def __init__(self, group, *, num_bytes, num_max_tokens_per_rank, **_):
        self.group, self.num_bytes = group, num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank

    @staticmethod
    def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, **_):
        return 2 * num_max_tokens_per_rank * hidden

    def get_theoretical_num_sms(self, num_experts, num_topk):
        return 1

    def dispatch(self, x, *, topk_idx=None, topk_weights=None, num_experts=None, handle=None,
                 num_sms=0, do_expand=False, **_):  # fmt: skip
        assert x.dtype == torch.bfloat16 and not do_expand
        ids = scores = None
        if handle is None:
            chosen = torch.zeros(x.shape[0], num_experts + 1, dtype=torch.bool)
            chosen = chosen.scatter(1, topk_idx % (num_experts + 1), True)[:, :num_experts]
            received = _Received(self.group, chosen)
            handle = types.SimpleNamespace(
                received=received, num_sms=num_sms,
                num_recv_tokens_per_expert_list=received.counts.tolist(),
            )  # fmt: skip
            ids = received.rows(topk_idx) - received.first
            ids = ids.masked_fill((ids < 0) | (ids >= received.own.shape[-1]), -1)
            scores = received.rows(topk_weights).masked_fill(ids < 0, torch.nan)
        return handle.received.rows(x), ids, scores, handle, None

    def combine(self, x, *, handle, topk_weights=None, **_):
        assert x.dtype == torch.bfloat16
        sums = None if topk_weights is None else handle.received.sums(topk_weights)
        event = types.SimpleNamespace(current_stream_wait=lambda: None)
        return handle.received.sums(x), sums, event


class HybridEPBuffer:
    """The hybrid-ep branch's, of one node: `dispatch` and `combine` of tokens, and the same of
    pairs, sorted by expert, which torchtitan.distributed.deepep.hybridep calls."""

    def __init__(self, group, *, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, **_):
        self.group, self.local_rank = group, dist.get_rank(group)
        self.configurer = types.SimpleNamespace(
            buffer_config=types.SimpleNamespace(
                hidden_dim=hidden_dim, max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_of_experts_per_rank=num_local_experts,
            )  # fmt: skip
        )
        self.calls = []

    def dispatch(self, hidden, *, probs=None, routing_map=None, num_of_experts=None, handle=None):
        self.calls.append("dispatch")
        assert hidden.dtype == torch.bfloat16
        assert routing_map is not None or (handle is not None and num_of_experts is not None)
        if handle is None:
            received = _Received(self.group, routing_map)
            E_local = received.own.shape[-1]
            longer = torch.ones(3, E_local, dtype=torch.bool)  # past the received tokens
            is_here = torch.cat([received.own[received.tokens], longer])
            handle = received, None, None, received.tokens.sum(), is_here, hidden.shape[0], None
        received = handle[0]
        scores = None
        if probs is not None:
            scores = torch.full((int(received.tokens.sum()), probs.shape[1]), torch.nan)
            own = slice(received.first, received.first + received.own.shape[-1])
            scores[:, own] = received.rows(probs)[:, own]
        return received.rows(hidden), scores, None, handle

    def combine(self, hidden, *, probs=None, handle=None):
        self.calls.append("combine")
        assert hidden.dtype == torch.bfloat16
        received = handle[0]
        return received.sums(hidden), None if probs is None else received.sums(probs)

    def dispatch_with_permute(self, *, hidden, routing_map=None, probs=None, handle=None,
                              num_permuted_tokens=None, **_):  # fmt: skip
        self.calls.append("dispatch_with_permute")
        if handle is None:
            received = _Received(self.group, routing_map)
            here = received.own[received.tokens]  # (received, E_local)
            expert, token = here.T.nonzero().unbind(1)
            handle = received, token, expert, num_permuted_tokens
        received, token, expert, places = handle
        rows = torch.full((places, hidden.shape[1]), torch.nan, dtype=hidden.dtype)
        rows[: token.shape[0]] = received.rows(hidden)[token]
        scores = None
        if probs is not None:
            scores = torch.zeros(places)
            scores[: token.shape[0]] = received.rows(probs)[token, received.first + expert]
        return rows, scores, None, received.counts, handle

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, **_):
        self.calls.append("combine_with_unpermute")
        received, token, expert, _ = handle
        pairs = hidden[: token.shape[0]].float()
        rows = torch.zeros(int(received.tokens.sum()), hidden.shape[1]).index_add(0, token, pairs)
        sums = None
        if probs is not None:
            E_local = received.own.shape[-1]
            dense = torch.zeros(rows.shape[0], E_local * dist.get_world_size(self.group))
            dense[token, received.first + expert] = probs[: token.shape[0]]
            sums = received.sums(dense)
        return received.sums(rows.to(hidden.dtype)), sums


def indices_to_map(topk_idx, topk_weights, tokens, experts):
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, topk_idx, True)
    return chosen, torch.zeros(tokens, experts).scatter(1, topk_idx, topk_weights)


def install():
    """Makes torchtitan find them as deep_ep, and its own operators run on CPUs."""
    package = types.ModuleType("deep_ep")
    package.ElasticBuffer, package.HybridEPBuffer = ElasticBuffer, HybridEPBuffer
    module = types.ModuleType("deep_ep.hybrid_ep_buffer")
    module.indices_to_map = indices_to_map
    sys.modules |= {"deep_ep": package, "deep_ep.hybrid_ep_buffer": module}

    from torchtitan.distributed.deepep import deepep

    torch.library.impl(deepep._lib, "dispatch", "CPU")(deepep._dispatch_op_impl)
    torch.library.impl(deepep._lib, "combine", "CPU")(deepep._combine_op_impl)
    if HAS_HYBRIDEP:
        from torchtitan.distributed.deepep import hybridep

        for name in ("_dispatch_impl", "_combine_impl", "_dispatch_bwd_impl", "_combine_bwd_impl"):
            operator = getattr(hybridep, name)
            operator.register_kernel("cpu")(operator._init_fn)
