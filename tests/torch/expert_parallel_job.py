"""Common code of the scenarios of expert_parallel_worker.py: a rank's layer and its tokens, the same
computed by one process, and by its parts."""

import json

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, init_device_mesh

import module_support
import staged
import tilemoe
from comparison import LIMITS, assert_close
from tilemoe import expert_parallel


d, n, E, K = 32, 24, 8, 3
LOSSES = dict(balance_coefficient=0.3, z_coefficient=0.1)
SHARED = dict(shared_intermediate_size=16, shared_expert_gate=True)


class Job:
    reads_peers = False  # where a pull reads others' memory on a CPU, too

    def __init__(self, rank, world, folder, device, dispatch="all_gather"):
        self.dispatch = dispatch  # of a scenario that processes do not outlive
        self.rank, self.world, self.folder, self.device = rank, world, folder, device
        self.mesh = init_device_mesh(device, (world,), mesh_dim_names=("ep",))
        self.group = self.mesh.get_group()
        self.dtypes = [torch.bfloat16] + [torch.float32] * (device == "cpu")
        self.dtype = self.dtypes[-1]  # of a layer whose test is of something else

    def report(self, scenario, result=""):
        """Writes the result of a process that will not."""
        file = self.folder / f"{self.rank}.json"
        results = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(results | {scenario: result}))

    def make(self, dtype, seed=0, mesh=None, **options):
        """The whole layer, and the same with its experts spread over a mesh."""
        whole = module_support.make(seed, dtype=dtype, sizes=(d, n, E, K), **options).to(self.device)
        torch.manual_seed(1)
        mesh = self.mesh if mesh is None else mesh
        options |= dict(expert_mesh=mesh, device=self.device)
        spread = tilemoe.MoE(d, n, E, K, return_aux=True, dtype=dtype, **options)
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(spread, whole.state_dict(), options=full)
        return whole, spread

    def batch(self, counts, dtype, seed=1):
        """x, dO of the tokens of all ranks (sum of counts, d); this rank's slice of them."""
        x, dO = module_support.batch(seed, dtype, (sum(counts),), width=d)
        first = sum(counts[: self.rank])
        own = slice(first, first + counts[self.rank])
        return x.detach().to(self.device), dO.to(self.device), own


def full(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    return staged.full_tensor(tensor) if staged.in_use else tensor.full_tensor()


def mean(tensor):
    """The result of data parallel training for the ranks' gradients of a common parameter."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def step(moe, x, dO, factor=1.0, **arguments):
    """-> out, aux, {name: gradient of <out, dO> * factor + loss}, x's among them."""
    x = x.detach().clone().requires_grad_()
    out, aux = moe(x, **arguments)
    parameters = dict(moe.named_parameters())
    objective = (out * dO).sum(dtype=torch.float32) * factor + aux.loss
    gradients = torch.autograd.grad(objective, [*parameters.values(), x])
    return out.detach(), aux, dict(zip([*parameters, "x"], gradients))


def compare(job, whole, spread, counts, dtype, batch_seed=1, limits=None, **arguments):
    """One process with all tokens, and the ranks with theirs: outputs, counts and every gradient of
    the mean of the ranks' objectives. Ranks' partial sums are rounded once more."""
    x, dO, own = job.batch(counts, dtype, batch_seed)
    limits = limits or LIMITS[dtype]
    own_arguments = {
        k: v[own] if k in ("ids", "token_mask") else v for k, v in arguments.items()
    }
    want_out, want_aux, want = step(whole, x, dO, 1 / job.world, **arguments)
    out, aux, got = step(spread, x[own], dO[own], **own_arguments)
    assert_close(out, want_out[own].double(), "out", limits)
    assert_close(got.pop("x"), want.pop("x")[own].double() * job.world, "dx", limits)
    for name, gradient in got.items():
        of_experts = name.startswith("experts.")
        assert isinstance(gradient, DTensor) == of_experts, name
        gradient = full(gradient) if of_experts else mean(gradient)
        assert_close(gradient, want[name].double(), f"d{name}", limits)
    for name in ("balance", "z"):
        assert_close(getattr(aux, name), getattr(want_aux, name).double(), name)
    for name in ("expert_counts", "dropped", "added", "without"):
        total = getattr(aux, name).clone()
        dist.all_reduce(total)
        assert torch.equal(total, getattr(want_aux, name)), (name, total, getattr(want_aux, name))
    assert aux.overflow == 0
    assert torch.equal(aux.ids, want_aux.ids[own])
    assert_close(aux.scores, want_aux.scores[own].double(), "scores")
    return out, got


def limits_of(dtype):
    """Where ranks' partial sums are rounded once more."""
    limits = LIMITS[dtype]
    if dtype == torch.float32:
        return limits
    return limits._replace(whole=2 * limits.whole, row=0.3, smallest=0.3)


def layouts(world):
    """Tokens of each rank: the same, uneven, none on one rank, all on one. Two ranks have these in
    three; of four, whose own code is that of few experts and of several senders, the last two alone:
    the first of them is uneven, and other scenarios have the same number on each."""
    even, uneven = [13] * world, [11 + 5 * r for r in range(world)]
    empty, last = [0] + uneven[1:], [0] * (world - 1) + [29]
    if world == 4:
        return {"an empty rank": empty, "all on the last": last}
    return {"even": even, "uneven": uneven, "an empty rank": empty}


def parts_by_hand(x, dO, logits, layer, world, **choice):
    """The ranks' results, one after another in this process, from `tilemoe.moe` alone: O, dX,
    dlogits of all tokens, and every weight's gradient."""
    leaf = lambda t: t.detach().clone().requires_grad_()
    logits = leaf(logits)
    scores, ids = tilemoe.top_k(logits, K, **choice)
    size = E // world
    O = dX = ds = 0
    gradients = {name: [] for name in layer}
    for rank in range(world):
        own = {name: leaf(t[rank * size :][:size]) for name, t in layer.items()}
        x_of, s_of = leaf(x), leaf(scores)
        if K <= size:
            part = tilemoe.moe(x_of, s_of, ids=ids - rank * size, **own)
        else:  # fewer experts than a token chooses: its pairs in the order of the experts
            order = ids.argsort(1)
            tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(K)
            pairs = ids.gather(1, order).flatten() - rank * size, s_of.gather(1, order).flatten()
            part = tilemoe.moe_general(x_of, tokens, *pairs, **own)
        part.backward(dO)
        O = O + part.detach().float()
        dX = dX + x_of.grad.float()
        ds = ds + s_of.grad
        for name, t in own.items():
            gradients[name].append(t.grad)
    scores.backward(ds)
    made = {"O": O.to(x.dtype), "dX": dX.to(x.dtype), "dlogits": logits.grad}
    return made | {f"d{name}": torch.cat(of_ranks) for name, of_ranks in gradients.items()}


def layer_of(dtype, seed=0):
    made = module_support.make(seed, dtype=dtype, sizes=(d, n, E, K), bias=True)
    names = {"W1": "gate_up_proj", "W2": "down_proj", "b1": "gate_up_proj_bias", "b2": "down_proj_bias"}
    return {letter: getattr(made.experts, name).detach() for letter, name in names.items()}


def spread_call(job, x, dO, logits, layer, own, **options):
    """The functional form of this rank's slice -> as parts_by_hand, the rank's own, and aux."""
    size = E // job.world
    leaf = lambda t: t.detach().clone().requires_grad_()
    mine = {name: leaf(t[job.rank * size :][:size]) for name, t in layer.items()}
    x, logits = leaf(x[own]), leaf(logits[own])
    O, aux = expert_parallel.moe(
        x, logits, group=job.group, return_aux=True, **mine, **(dict(K=K) | options)
    )
    O.backward(dO[own])
    made = {"O": O.detach(), "dX": x.grad, "dlogits": logits.grad}
    return made | {f"d{name}": t.grad for name, t in mine.items()}, aux


def own_of(job, name, tensor, own):
    size = E // job.world
    return tensor[own] if name in ("O", "dX", "dlogits") else tensor[job.rank * size :][:size]
