"""A process of fp8_shards_test.py: layers with recipe="fp8" whose parameters are sharded by FSDP-2, or
whose experts are on several ranks, against the whole layer. The first process prints, as JSON, the
error of each case, or null. Words: names of cases; without names, all.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tilemoe
import tilemoe.expert_parallel
from processes import expect
from tilemoe.distributed.fp8_shards import Fp8Gathered, Fp8Shard

d, n, E, K, T = 208, 128, 6, 2, 40
WEIGHTS = ("gate_up_proj", "down_proj")


class Model(torch.nn.Module):
    def __init__(self, recomputes=False, **how):
        super().__init__()
        kinds = {"recipe": "fp8", "dtype": torch.bfloat16, **how}
        self.layers = torch.nn.ModuleList(tilemoe.MoE(d, n, E, K, **kinds) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            # No residual: FSDP adds its gradient to the others in another order, in 16 bits.
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def model(**how):
    torch.manual_seed(3)
    return Model(**how)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(T, d, generator=generator, device="cpu").bfloat16().to(MESH.device_type)


def backward(made, number, share=1):
    (made(batch(number)).float().square().sum() / share).backward()


def sharded(made, prepared=True, **how):
    if prepared:
        tilemoe.gather_in_fp8_(made)
    for layer in made.layers:
        fully_shard(layer, mesh=MESH, **how)
    return fully_shard(made, mesh=MESH, **how)


def same_gradients(whole, parts):
    different = [
        name
        for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True)
        if not torch.equal(a.grad, b.grad.full_tensor())
    ]
    assert not different, different


class Gathers:
    """Record what the ranks gather of the experts' weights, and the quantisations of shards."""

    def __enter__(self):
        self.bytes, self.before, self.codes = [], Fp8Shard.fsdp_pre_all_gather, []
        before = self.before

        def hook(self_, mesh, outer_size, outer_stride, module, mp_policy):
            inputs, how = before(self_, mesh, outer_size, outer_stride, module, mp_policy)
            self.bytes.append(sum(t.nbytes for t in inputs) / self_.numel())
            self.codes.append(inputs[0].data_ptr())
            return inputs, how

        Fp8Shard.fsdp_pre_all_gather = hook
        return self

    def __exit__(self, *_):
        Fp8Shard.fsdp_pre_all_gather = self.before


def gradients_and_steps(recomputes=False):
    """Two micro-batches and an optimizer step, twice: the bits of the whole model."""
    whole, parts = model(), sharded(model(recomputes=recomputes))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, parts)]
    made = []
    for step in range(2):
        sums = []
        for number in range(2):
            for rank in range(2):
                backward(whole, 4 * step + 2 * number + rank, 2)
            sums.append([p.grad for p in whole.parameters()])
            whole.zero_grad()
        for parameter, first, second in zip(whole.parameters(), *sums):
            parameter.grad = first + second  # in the order of the ranks' micro-batches
        with Gathers() as gathers:
            for number in range(2):
                backward(parts, 4 * step + 2 * number + dist.get_rank())
        same_gradients(whole, parts)
        assert len(gathers.bytes) >= 8 and max(gathers.bytes) < 1.01, gathers.bytes
        assert len(set(gathers.codes)) == 4  # a shard is quantised once in a step
        made.append(gathers.codes)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b.full_tensor())
    with torch.no_grad():
        assert torch.equal(parts(batch(9)), whole(batch(9)))


def fused(values):
    like = lambda: [torch.ones_like(values)]  # noqa: E731
    how = dict(beta1=0.9, beta2=0.9, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
    torch._fused_adamw_([values], like(), like(), like(), [], [torch.ones(())], lr=1.0, **how)


def with_gradient(parameter):
    parameter.grad = torch.ones_like(parameter)
    return parameter


def writes():
    """Every way to write a shard makes its codes again."""
    parts = sharded(model())
    ways = {
        "DTensor": lambda p: p.mul_(-3),
        "foreach": lambda p: torch._foreach_mul_([p], -3),
        "to_local": lambda p: p.to_local().mul_(-3),
        "foreach of to_local": lambda p: torch._foreach_mul_([p.to_local()], -3),
        "local": lambda p: p._local_tensor.mul_(-3),
        "copy_": lambda p: p.copy_(p * -3),
        "fused": lambda p: fused(p.to_local()),
        "fused DTensor": lambda p: torch.optim.AdamW([with_gradient(p)], 1, fused=True).step(),
        "part": lambda p: p.to_local()[1].mul_(-3),
        # By memory that nothing watches:
        "quantize_weights": lambda p: (
            p._local_tensor.values().mul_(-3), tilemoe.quantize_weights(parts)
        ),
        "detached": lambda p: p.detach().mul_(-3),
    }  # fmt: skip
    missed = []
    with torch.no_grad():
        for name, write in ways.items():
            before = parts(batch(0))
            parts.reshard()
            for layer in parts.layers:
                layer.reshard()
                write(layer.experts.down_proj)
            if torch.equal(parts(batch(0)), before):
                missed.append(name)
            parts.reshard()
    assert not missed, missed


def mixed_precision():
    """Float32 parameters: codes of these values; the gradients of the gathered weights in 16 bits."""
    whole = model(dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = sharded(model(dtype=torch.float32), mp_policy=policy)
    with torch.autocast(MESH.device_type, torch.bfloat16):
        for number in range(2):
            backward(whole, number, 2)
    backward(parts, dist.get_rank())
    for (name, a), b in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        b = b[1].grad.full_tensor()
        assert b.dtype == torch.float32
        assert (a.grad - b).norm() <= 0.02 * a.grad.norm(), name


def saved_and_loaded():
    parts, other = sharded(model()), sharded(Model())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(parts.state_dict(), checkpoint_id=folder[0])
    want = other(batch(1))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    assert torch.equal(other(batch(0)), model()(batch(0)))
    assert not torch.equal(other(batch(1)), want)


def from_meta():
    with torch.device("meta"):
        parts = sharded(Model())
    parts.to_empty(device=MESH.device_type)
    with torch.no_grad():
        for a, b in zip(model().parameters(), parts.parameters(), strict=True):
            b.to_local().copy_(a.chunk(2)[dist.get_rank()])
    want = model()(batch(0))
    with torch.no_grad():
        assert torch.equal(parts(batch(0)), want)


def adapted_frozen():
    """Weights without gradients."""
    parts, whole = model(), model()
    for made in (parts, whole):
        for layer in made.layers:
            layer.experts.requires_grad_(False)
    sharded(parts)
    for number in range(2):
        backward(whole, number, 2)
    backward(parts, dist.get_rank())
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad.full_tensor())


def refusals():
    use = lambda made: made(batch(0))  # noqa: E731
    unprepared = sharded(model(), prepared=False)
    expect("requires tilemoe.gather_in_fp8_(model) before", lambda: use(unprepared), RuntimeError)
    expect("must be called before fully_shard", lambda: tilemoe.gather_in_fp8_(unprepared), ValueError)
    odd = tilemoe.gather_in_fp8_(tilemoe.MoE(d, n, 5, K, dtype=torch.bfloat16, recipe="fp8"))
    fully_shard(odd, mesh=MESH)
    expect("requires a number of experts that is a multiple", lambda: use(odd), NotImplementedError)
    traced = sharded(model())
    for layer in traced.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    expect("torch.compile does not support FP8 codes", lambda: use(traced), Exception)
    plain = sharded(model(recipe="bf16"))
    expect("gathered as FP8 codes", lambda: use(plain), RuntimeError)


def forward_alone():
    """recipe="fp8_forward" reads the gathered codes, and "auto" takes "fp8" of them."""
    for recipe in ("fp8_forward", "auto"):
        parts = sharded(model(recipe=recipe))
        whole = model(recipe="fp8" if recipe == "auto" else recipe)
        for number in range(2):
            backward(whole, number, 2)
        backward(parts, dist.get_rank())
        same_gradients(whole, parts)
    assert "fully_shard gathers FP8 codes" in parts.layers[0].recipe_choice.reason


def spread(dtype=torch.bfloat16, shards=False, **how):
    """Experts on two ranks, whose own codes each rank makes."""
    mesh = init_device_mesh(MESH.device_type, (1, 2), mesh_dim_names=("dp", "ep"))
    whole = model(dtype=dtype, **how).layers[0]
    torch.manual_seed(3)
    made = tilemoe.MoE(d, n, E, K, dtype=dtype, recipe="fp8", expert_mesh=mesh["ep"], **how)
    with torch.no_grad():
        made.gate.weight.copy_(whole.gate.weight)
        for name in WEIGHTS:
            local = getattr(made.experts, name).to_local()
            local.copy_(getattr(whole.experts, name).chunk(2)[dist.get_rank()])
    if shards:
        tilemoe.gather_in_fp8_(made)
        fully_shard(made, mesh=mesh["dp"])
    for number in range(2):
        O = whole(batch(number))
        (O.float().square().sum() / 2).backward()
        if number == dist.get_rank():
            want = O
    got = made(batch(dist.get_rank()))
    got.float().square().sum().backward()
    if not shards:
        codes = [tilemoe.fp8_weight(getattr(made.experts, name).to_local()) for name in WEIGHTS]
        x = batch(dist.get_rank())
        call = tilemoe.expert_parallel.moe
        again = call(x, made.gate(x), *codes, K=K, group=mesh["ep"].get_group(), recipe="fp8", **how)
        assert torch.equal(again, got)
    assert (got - want).float().norm() <= 0.01 * want.float().norm()
    for name in WEIGHTS:
        g = getattr(made.experts, name).grad
        g = g.full_tensor() if isinstance(g, DTensor) else g
        w = getattr(whole.experts, name).grad
        assert (g - w).float().norm() <= 0.01 * w.float().norm(), name


CASES = {
    "gradients and steps": gradients_and_steps,
    "checkpointing": lambda: gradients_and_steps(recomputes=True),
    "writes": writes,
    "mixed precision": mixed_precision,
    "state dicts": saved_and_loaded,
    "meta device": from_meta,
    "frozen": adapted_frozen,
    "refusals": refusals,
    "recipes": forward_alone,
    "experts on ranks": spread,
    "experts on ranks, H in FP8": lambda: spread(save_h="fp8"),
    "experts on ranks, sharded": lambda: spread(shards=True),
}


def main():
    global MESH
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("names", nargs="*", metavar="case")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for cuBLAS to be deterministic
    torch.set_default_device(options.device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    MESH = init_device_mesh(options.device, (dist.get_world_size(),))
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, case in CASES.items():
        if options.names and name not in options.names:
            continue
        error = None
        try:
            case()
        except BaseException:  # also CheckpointException; the other process may wait for this one
            error = traceback.format_exc()
        reasons = [None, None]
        dist.all_gather_object(reasons, error)
        found[name] = next((reason for reason in reasons if reason is not None), None)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    assert Fp8Gathered is not None
    main()
