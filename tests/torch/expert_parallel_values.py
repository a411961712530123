"""Scenarios of expert_parallel_worker.py: what ranks compute, and what they refuse."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import module_support
import reference
import tilemoe
import tilemoe.expert_parallel
from comparison import LIMITS, assert_close
from expert_parallel_job import (
    E, K, LOSSES, SHARED, compare, d, full, layer_of, layouts, limits_of, n, own_of, parts_by_hand,
    spread_call,
)  # fmt: skip
from processes import expect, on
from stored import rounded
from tilemoe.routing import narrowed_to_experts


def module_equals_one_process(job):
    for dtype in job.dtypes:
        for options in ({}, dict(bias=True, scoring="sigmoid", selection_bias=True, **SHARED),
                        dict(scoring="softmax_over_all", keep_gathered=True, router_bias=True),
                        dict(chunks=3, bias=True, **SHARED),
                        dict(dispatch="pull", bias=True, **SHARED)):  # fmt: skip
            whole, spread = job.make(dtype, **options, **LOSSES)
            for counts in layouts(job.world).values():
                spread.rank_tokens = counts
                limits = LIMITS[dtype]._replace(whole=2 * LIMITS[dtype].whole, row=0.3, smallest=0.3)
                compare(job, whole, spread, counts, dtype, limits=limits)


def rounding_is_over_all_tokens(job):
    """Token rounding counts the tokens of all ranks, of each rounding_tokens of them in order."""
    options = dict(router_dtype=torch.float32, **LOSSES)
    for dtype in job.dtypes:
        for rounding, size in (("nearest", None), ("up", 6), ("down", None), ("balanced", None),
                               ("stochastic", 6)):  # fmt: skip
            whole, spread = job.make(dtype, rounding=rounding, m=4, rounding_tokens=size, **options)
            every = (
                layouts(job.world).values()
                if size is None
                else [[12] * job.world, [12] * (job.world - 1) + [18]]
            )
            for counts in every:
                spread.rank_tokens = counts
                drawn = dict(seed=3, offset=7) if rounding == "stochastic" else {}
                limits = LIMITS[dtype]._replace(whole=3 * LIMITS[dtype].whole, row=0.5, smallest=0.3)
                compare(job, whole, spread, counts, dtype, limits=limits, **drawn)
                whole.eval(), spread.eval()
                compare(job, whole, spread, counts, dtype, limits=limits)
                whole.train(), spread.train()
    spread.rank_tokens = 40
    x = job.batch([9] * job.world, dtype)[0][:9]
    expect("token rounding requires the tokens of each rank", lambda: spread(x, seed=1, offset=1))


def ids_of_elsewhere(job):
    """Experts that a rollout chose, some of them none, of all ranks' experts."""
    for dispatch in ("all_gather", "pull"):
        ids_of_elsewhere_by(job, dispatch)


def ids_of_elsewhere_by(job, dispatch):
    dtype = job.dtype
    options = dict(scoring="sigmoid_renormalized", dispatch=dispatch, **LOSSES)
    whole, spread = job.make(dtype, **options)
    for counts in layouts(job.world).values():
        g = torch.Generator().manual_seed(7)
        ids = torch.rand(sum(counts), E, generator=g).argsort(-1)[:, :K].to(job.device)
        ids[::3, 0], ids[1::4, 1], ids[2::5] = -1, E + 5, 2**30
        for wide in (ids.int(), ids.long() + (ids == E + 5) * 2**33):
            spread.rank_tokens = counts
            compare(job, whole, spread, counts, dtype, ids=wide, limits=limits_of(dtype))


def padding(job):
    """A rank's losses are the means over the real tokens of all ranks, whose tokens have no padding,
    some, or are all padding."""
    dtype = job.dtype
    for dispatch in ("all_gather", "pull"):
        whole, spread = job.make(dtype, dispatch=dispatch, **LOSSES)
        for counts in layouts(job.world).values():
            mask = torch.arange(sum(counts), device=job.device) % 3 > 0
            mask[: counts[0]] = False
            for token_mask in (mask, torch.zeros_like(mask)):
                spread.rank_tokens = counts
                limits = limits_of(dtype)
                compare(job, whole, spread, counts, dtype, token_mask=token_mask, limits=limits)


def order_of_chunks(counts, chunks):
    """Tokens of all ranks as they are gathered in chunks: the first of every rank's, and so on."""
    max_count, firsts = max(counts), [sum(counts[:rank]) for rank in range(len(counts))]
    chunks = max(1, min(chunks, max_count))
    cuts = [max_count * chunk // chunks for chunk in range(chunks + 1)]
    return [
        first + row
        for begin, end in zip(cuts, cuts[1:])
        for first, count in zip(firsts, counts)
        for row in range(begin, min(end, count))
    ]


def bits_are_those_of_the_parts(job):
    """A rank's partial sums are the layer's own; the owner adds them in float32 in the order of the
    ranks, and rounds once. Whether gathered rows are kept changes no bit, nor does a second run; in
    chunks weights' gradients are sums in the chunks' order of the tokens, and that is all."""
    for dtype in [*job.dtypes, torch.float16]:
        layer = {name: t.to(job.device) for name, t in layer_of(dtype).items()}
        for counts in layouts(job.world).values():
            x, dO, own = job.batch(counts, dtype)
            g = torch.Generator().manual_seed(3)
            logits = torch.randn(sum(counts), E, generator=g).to(job.device)
            choice = dict(scoring="sigmoid", routed_scaling_factor=2.5)
            one_by_one = parts_by_hand(x, dO, logits, layer, job.world, **choice)
            for how in ({}, dict(keep_gathered=True), dict(capacity_factor=float(job.world)),
                        dict(overlap=False), dict(overwrite_H=False), dict(chunks=2),
                        dict(chunks=3, keep_gathered=True), dict(chunks=4, overlap=False),
                        dict(chunks=2, overwrite_H=False), dict(chunks=1000),
                        dict(chunks="auto"), dict(dispatch="pull"),
                        dict(dispatch="pull", keep_gathered=True),
                        dict(dispatch="pull", overlap=False, capacity_factor=float(job.world)),
                        dict(dispatch="pull", overwrite_H=False)):  # fmt: skip
                # For so small a T, "auto" chooses one chunk.
                chunks = how.get("chunks", 1)
                order = order_of_chunks(counts, 1 if chunks == "auto" else chunks)
                sums = parts_by_hand(x[order], dO[order], logits[order], layer, job.world, **choice)
                want = one_by_one | {k: t for k, t in sums.items() if k[1:] in layer}
                both = how in ({}, dict(dispatch="pull"))
                for tokens in (counts, max(counts) + 3)[: 2 if both else 1]:
                    got, aux = spread_call(
                        job, x, dO, logits, layer, own, rank_tokens=tokens, **choice, **how
                    )
                    assert aux.overflow == 0
                    scores, ids = tilemoe.top_k(logits[own], K, **choice)
                    assert torch.equal(aux.ids, ids) and torch.equal(aux.scores, scores)
                    for name, tensor in got.items():
                        wanted = own_of(job, name, want[name], own)
                        assert torch.equal(tensor, wanted), (dtype, counts, how, name)


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, ctx.dtype), None


class _RoundedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, dtype):
        return rounded(part, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def in_float64(x, dO, logits, layer, world, dtype):
    """parts_by_hand in float64; with a dtype it rounds where the library stores, and each rank's
    partial O and dX once."""
    leaf = lambda t: t.detach().double().requires_grad_()
    x, logits, layer = leaf(x), leaf(logits), {name: leaf(t) for name, t in layer.items()}
    scores, ids = reference.top_k(logits, K)
    size, O = E // world, 0
    for rank in range(world):
        own = {name: t[rank * size :][:size] for name, t in layer.items()}
        part = reference.moe(
            _RoundedGradient.apply(x, dtype), scores, ids=ids - rank * size, stored=dtype, **own
        )
        O = O + _RoundedOutput.apply(part, dtype)
    tensors = {"X": x, "logits": logits} | layer
    gradients = torch.autograd.grad(O, list(tensors.values()), dO.double())
    return {"O": O.detach()} | {f"d{name}": g for name, g in zip(tensors, gradients)}


def errors_are_those_of_one_more_rounding(job):
    """By the whole, over four problems together: at most 1.05 times the float64 evaluation's."""
    for dtype in (torch.bfloat16, torch.float16):
        squares = {}
        for seed in range(4):
            counts = [61 + 7 * r for r in range(job.world)]
            layer = {name: t.to(job.device) for name, t in layer_of(dtype, seed).items()}
            x, dO, own = job.batch(counts, dtype, seed)
            g = torch.Generator().manual_seed(seed)
            logits = torch.randn(sum(counts), E, generator=g).to(job.device)
            want, rounding = (in_float64(x, dO, logits, layer, job.world, of) for of in (None, dtype))
            got, _ = spread_call(job, x, dO, logits, layer, own, rank_tokens=counts)
            how = dict(rank_tokens=counts, dispatch="pull")
            pulled, _ = spread_call(job, x, dO, logits, layer, own, **how)
            for name, tensor in got.items():
                assert torch.equal(tensor, pulled[name]), (dtype, seed, name)
                mine = own_of(job, name, want[name], own)
                stored = own_of(job, name, rounding[name], own).to(tensor.dtype)
                norm = mine.norm() ** 2
                both = squares.setdefault(name, torch.zeros(2, dtype=torch.float64))
                both += torch.stack(
                    [(t.double() - mine).norm() ** 2 / norm for t in (tensor, stored)]
                ).cpu()
        for name, (ours, bar) in squares.items():
            if job.rank == 0:
                print(f"{dtype} {name}: {(ours / 4).sqrt():.4%}, evaluation {(bar / 4).sqrt():.4%}")
            assert ours.sqrt() <= 1.05 * bar.sqrt(), (dtype, name, ours.sqrt() / bar.sqrt())
            assert 0.1 * bar <= ours, name


def nothing_is_lost_by_default(job):
    """Every token chooses the last rank's experts, from logits, rounded, or as given ids, which may
    name an expert twice: outputs and every gradient are those of one process."""
    size = E // job.world
    for dtype in job.dtypes:
        for options in ({}, dict(chunks=3), dict(dispatch="pull"), dict(rounding="nearest", m=4)):
            whole, spread = job.make(dtype, router_bias=True, **options, **LOSSES)
            with torch.no_grad():
                for layer in (whole, spread):
                    layer.gate.bias[-min(size, K) :] += 9.0
            limits = limits_of(dtype)
            if "rounding" in options:
                limits = LIMITS[dtype]._replace(whole=3 * LIMITS[dtype].whole, row=0.5, smallest=0.3)
            for counts in layouts(job.world).values():
                spread.rank_tokens = counts
                compare(job, whole, spread, counts, dtype, limits=limits)
                if "rounding" not in options:
                    ids = (E - 1 - torch.arange(K, device=job.device) % size).expand(sum(counts), K)
                    compare(job, whole, spread, counts, dtype, limits=limits, ids=ids.contiguous())


def overflow_is_nan_or_dropped(job):
    """All tokens choose the last rank's experts: as many places as it takes hold them all, one less
    spoils the outputs of every rank, or drops one pair."""
    layer = {name: t.to(job.device) for name, t in layer_of(job.dtype).items()}
    counts = [9] * job.world
    x, dO, own = job.batch(counts, job.dtype)
    logits = torch.randn(sum(counts), E, generator=torch.Generator().manual_seed(1)) / 8
    size = E // job.world
    used = min(size, K)
    logits[:, -used:] += 9.0
    pairs = sum(counts) * used  # of the last rank
    if used < K:
        logits[:, :size] -= 9.0 * (job.world > 2)
    logits = logits.to(job.device)
    exactly = pairs * job.world / (sum(counts) * K)
    assert exactly <= job.world
    want = parts_by_hand(x, dO, logits, layer, job.world)
    ways = dict(), dict(dispatch="pull")
    enough = dict(), *(dict(capacity_factor=f) for f in (None, exactly, float(job.world)))
    for how in (a | b for a, b in itertools.product(enough, ways)):
        got, aux = spread_call(job, x, dO, logits, layer, own, **how)
        assert aux.overflow == 0
        for name, tensor in got.items():
            assert torch.equal(tensor, own_of(job, name, want[name], own)), (name, how)
    less = (pairs - 1) * job.world / (sum(counts) * K) - 1e-9
    for how in (*ways, dict(chunks=4)):
        how |= dict(capacity_factor=less)
        got, aux = spread_call(job, x, dO, logits, layer, own, **how)
        assert aux.overflow >= 1 and got["O"].isnan().all()
        got, aux = spread_call(job, x, dO, logits, layer, own, **how, on_overflow="drop")
        assert aux.overflow >= 1 and all(t.isfinite().all() for t in got.values())
        same = torch.tensor([torch.equal(got["O"], want["O"][own])], device=job.device)
        everyone = [torch.zeros_like(same) for _ in range(job.world)]
        dist.all_gather(everyone, same)
        # The pair of the highest expert's last token is left out: the last rank's token.
        assert [bool(s) for s in everyone] == [True] * (job.world - 1) + [False]
        assert torch.equal(got["O"][:-1], want["O"][own][:-1])
    # Places for fewer pairs than tokens that need a rank: its last ones are not pulled.
    few = 5
    how = dict(capacity_factor=(few - 0.5) * job.world / (sum(counts) * K), on_overflow="drop")
    got, aux = spread_call(job, x, dO, logits, layer, own, dispatch="pull", **how)
    _, of_gathered = spread_call(job, x, dO, logits, layer, own, **how)
    assert aux.overflow == of_gathered.overflow > 0
    assert all(t.isfinite().all() for t in got.values())
    scores, ids = tilemoe.top_k(logits, K)
    O = torch.zeros(x.shape, device=job.device)
    for rank in range(job.world):
        mine = {name: t[rank * size :][:size] for name, t in layer.items()}
        at = (ids // size == rank).any(1).nonzero()[:few, 0]
        of_rank, s = narrowed_to_experts(ids[at] - rank * size, scores[at], size)
        part = tilemoe.moe(x[at], s, ids=of_rank, capacity=few, on_overflow="drop", **mine)
        O[at] += part.float()
    assert torch.equal(got["O"], O.to(x.dtype)[own])


@on("cpu")
def values_are_drawn_alike(job):
    """Ranks with one seed have the layer that one process has with it, and none of its experts twice."""
    torch.manual_seed(11)
    whole = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True)
    torch.manual_seed(11)
    spread = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True, expert_mesh=job.mesh)
    module_support.same_bits({k: full(t) for k, t in spread.state_dict().items()}, whole.state_dict())
    torch.manual_seed(11)
    late = tilemoe.MoE(d, n, E, K, return_aux=False, bias=True, expert_mesh=job.mesh, device="meta")
    assert late.experts.down_proj.device.type == "meta"
    late.to_empty(device="cpu")
    torch.manual_seed(11)
    late.reset_parameters()
    module_support.same_bits({k: full(t) for k, t in late.state_dict().items()}, whole.state_dict())


def no_tokens_anywhere(job):
    for how in (dict(), dict(chunks=2), dict(dispatch="pull")):
        _, spread = job.make(job.dtype, **how, **LOSSES)
        x = torch.zeros(0, d, dtype=job.dtype, device=job.device, requires_grad=True)
        out, aux = spread(x)
        assert out.shape == (0, d) and aux.loss == 0
        (out.sum() + aux.loss).backward()
        assert all((full(p.grad) == 0).all() for p in spread.parameters() if p.grad is not None)


def low_rank_adapters(job):
    """Factors are spread as their experts; their gradients are those of one process."""
    for dtype in job.dtypes:
        for how in (dict(), dict(dispatch="pull", bias=True), dict(keep_gathered=True),
                    dict(rounding="nearest", m=4)):  # fmt: skip
            whole, spread = job.make(dtype, lora_rank=(8, 5), lora_alpha=16, **how, **LOSSES)
            for parameter in (*whole.parameters(), *spread.parameters()):
                parameter.requires_grad_()  # as `compare` expects; the base has gradients as well
            generator = torch.Generator().manual_seed(5)
            for name in ("lora_B1", "lora_B2"):
                B = getattr(whole.experts, name)
                values = torch.randn(B.shape, generator=generator, device="cpu") / 4
                first, size = job.rank * E // job.world, E // job.world
                with torch.no_grad():
                    B.copy_(values)
                    getattr(spread.experts, name).to_local().copy_(values[first : first + size])
            limits = LIMITS[dtype]._replace(whole=3 * LIMITS[dtype].whole, row=0.5, smallest=0.3)
            for counts in layouts(job.world).values():
                spread.rank_tokens = counts
                compare(job, whole, spread, counts, dtype, limits=limits)
    spread.eval()  # without rounding
    spread.rank_tokens = None
    x = job.batch([9] * job.world, dtype)[0][:9]
    own = {name: tensor.detach().to_local() for name, tensor in spread.experts.named_parameters()}
    factors = [own[f"lora_{name}"] for name in ("A1", "B1", "A2", "B2")]
    O = tilemoe.expert_parallel.moe(
        x, spread.gate(x).detach(), own["gate_up_proj"], own["down_proj"], K=K,
        group=job.mesh.get_group(), lora=tilemoe.LoRA(*factors, scale=spread.experts.lora_scale),
    )  # fmt: skip
    assert torch.equal(O, spread(x)[0])
    quantized_weights(job, x, spread, own, tilemoe.LoRA(*factors, scale=spread.experts.lora_scale))
    if job.world == 1:  # without chunks
        return
    _, spread = job.make(job.dtype, lora_rank=8, chunks=2)
    spread.rank_tokens = None
    try:
        spread(torch.zeros(5, d, dtype=job.dtype, device=job.device))
    except NotImplementedError as error:
        assert "lora requires chunks=1" in str(error), error
    else:
        raise AssertionError("chunks with adapters are not refused")


def quantized_weights(job, x, spread, own, lora):
    """A rank's experts with and without adapters: the bits of those with the dequantised weights."""
    narrow = [
        tilemoe.quantize_experts(own[name], "fp8") for name in ("gate_up_proj", "down_proj")
    ]
    logits, group = spread.gate(x).detach(), job.mesh.get_group()
    for adapters in (lora, None):
        found = []
        for W1, W2 in (narrow, [weight.dequantize(x.dtype) for weight in narrow]):
            leaf = x.detach().clone().requires_grad_()
            O = tilemoe.expert_parallel.moe(
                leaf, logits, W1, W2, K=K, group=group, lora=adapters
            )
            O.square().sum().backward()
            found.append((O, leaf.grad))
        assert all(torch.equal(a, b) and a.any() for a, b in zip(*found))
    try:
        tilemoe.quantize_(spread, "fp8")
    except NotImplementedError as error:
        assert "quantize_ does not support experts with an expert_mesh" in str(error), error
    else:
        raise AssertionError("quantize_ of spread experts is not refused")
    if job.world > 1:
        try:
            tilemoe.expert_parallel.moe(x, logits, *narrow, K=K, group=group, chunks=2)
        except NotImplementedError as error:
            assert "quantised weights require chunks=1" in str(error), error
        else:
            raise AssertionError("chunks with quantised weights are not refused")


def composes(job):
    """Checkpointing, two walks, autocast, small T in inference, leading shapes, a frozen router."""
    for how in (dict(), dict(chunks=2), dict(dispatch="pull")):
        composes_with(job, *job.make(job.dtype, **how, **SHARED))


def composes_with(job, whole, spread):
    counts = [12] * job.world
    x, dO, own = job.batch(counts, job.dtype)
    mine = x[own].reshape(3, 4, d)
    leaf = mine.clone().requires_grad_()
    out, aux = spread(leaf)
    assert out.shape == mine.shape
    wanted = [p for p in spread.parameters()]
    want = torch.autograd.grad(out, [leaf, *wanted], dO[own].reshape(out.shape))
    again, _ = checkpoint(spread, leaf, use_reentrant=False)
    got = torch.autograd.grad(again, [leaf, *wanted], dO[own].reshape(out.shape))
    assert torch.equal(out, again) and all(torch.equal(full(a), full(b)) for a, b in zip(got, want))
    again, _ = spread(leaf)  # two walks of the graph, as pipelines split backward
    first = torch.autograd.grad(again, [leaf], dO[own].reshape(out.shape), retain_graph=True)
    second = torch.autograd.grad(again, wanted, dO[own].reshape(out.shape))
    assert all(torch.equal(full(a), full(b)) for a, b in zip((*first, *second), want))
    with torch.autocast(job.device, torch.bfloat16):
        low, _ = spread(mine)
        want_low, _ = whole(x)
    assert low.dtype == torch.bfloat16
    limits = limits_of(torch.bfloat16)
    assert_close(low.reshape(-1, d), want_low[own].double(), "autocast", limits)
    spread.eval(), whole.eval()
    with torch.no_grad():
        out, want = spread(mine)[0].reshape(-1, d), whole(x)[0][own]
        assert_close(out, want.double(), "evaluation", limits_of(job.dtype))
    spread.train(), whole.train()
    for layer in (spread, whole):
        layer.gate.requires_grad_(False)
    out, _ = spread(mine)
    out.backward(dO[own].reshape(out.shape))
    assert spread.gate.weight.grad is None and spread.experts.down_proj.grad is not None


def refusals(job):
    make = lambda **options: tilemoe.MoE(  # noqa: E731
        **(dict(d=d, n=n, E=E, K=K, return_aux=False, expert_mesh=job.mesh) | options),
        dtype=job.dtype,
        device=job.device,
    )
    expect("E must be a multiple of expert_mesh's", lambda: make(E=7))
    expect("capacity_factor must be None or a finite number > 0, got 0", lambda: make(capacity_factor=0))
    for chunks in (0, True, 2.0, "all"):
        message = f"chunks must be 'auto' or an int >= 1, got {chunks!r}"
        expect(message, lambda chunks=chunks: make(chunks=chunks))
    expect("dispatch must be one of all_gather, pull, auto, got 'push'", lambda: make(dispatch="push"))
    expect("chunks must be 1 or 'auto' with dispatch='pull', got 2", lambda: make(dispatch="pull", chunks=2))
    expect("on_overflow must be one of nan, drop, got 'zero'", lambda: make(on_overflow="zero"))
    expect("expert_gradients must be 'mean' or 'sum', got 'max'", lambda: make(expert_gradients="max"))
    moe = make()
    x = torch.zeros(5, d, dtype=job.dtype, device=job.device)
    for tokens, message in (
        (4, "has 5 tokens, expected at most 4, the maximum in rank_tokens"),
        ([5] * (job.world + 1), f"rank_tokens must have one number for each of the {job.world} ranks"),
        ([6] * job.world, f"rank {job.rank} has 5 tokens, but rank_tokens has 6 for this rank"),
    ):
        moe.rank_tokens = tokens
        expect(message, lambda: moe(x))
    moe.rank_tokens = None
    expect("x must be a plain tensor with expert_mesh, got a DTensor", lambda: moe(DTensor.from_local(x, job.mesh, [Shard(0)])))
