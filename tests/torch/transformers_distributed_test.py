"""Expert and tensor parallelism of transformers with TileMoE's experts: two processes (gloo) against
one with `eager` experts. Run by torch.distributed.run it is the worker of its own test.

The interface of transformers' expert parallelism is 5.23's. If it is not installed, a stand-in of
its base class, of AllReduceEP and of its registry takes its place (`stand_in`). If it is, a whole
model runs through it, in place of those that 5.17 spreads."""

import copy
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")

from torch.distributed.tensor import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import launcher
import tilemoe.transformers
from checks import start
from transformers_models_test import build, experts_of, run
from transformers_support import relative_error

HAS_INTERFACE = hasattr(DistributedConfig, "ep_implementation")
IMPLEMENTED = ["own batches", "no token here", "one batch", "one rank's experts"]
SCENARIOS = [("qwen3_moe", "expert"), ("gpt_oss", "expert"), ("gpt_oss", "tensor")]
if HAS_INTERFACE:
    SCENARIOS = [("qwen3_moe", "batches")]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def load(folder, experts, parallelism=None):
    more = {}
    if parallelism in ("expert", "tensor"):
        more["distributed_config"] = DistributedConfig(
            tp_size=2, enable_expert_parallel=parallelism == "expert"
        )
    elif parallelism is not None:
        more["distributed_config"] = DistributedConfig(
            fsdp_size=2, ep_size=2, ep_implementation="tilemoe"
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation=experts, dtype=torch.float32, **more
    )


def stand_in():
    """transformers.distributed.expert_parallel of 5.23, as far as TileMoE uses it."""

    class EPImplementation:
        def __init__(self, experts, ep_mesh, tp_mesh):
            self.experts_forward = experts.forward
            self.num_local_experts = experts.num_experts
            self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh
            self.shares_batch = tp_mesh.size() == ep_mesh.size()

    class SumOfGradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx, gradient):
            dist.all_reduce(gradient := gradient.clone())
            return gradient

    class SumOfOutputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            dist.all_reduce(tensor := tensor.clone())
            return tensor

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class AllReduceEP(EPImplementation):
        def __call__(self, hidden_states, top_k_index, top_k_weights):
            here = top_k_index // self.num_local_experts == self.ep_mesh.get_local_rank()
            ids = torch.where(here, top_k_index % self.num_local_experts, self.num_local_experts)
            weights = SumOfGradients.apply(top_k_weights).masked_fill(~here, 0.0)
            return SumOfOutputs.apply(
                self.experts_forward(SumOfGradients.apply(hidden_states), ids, weights)
            )

    class EPImplementationInterface:
        names = {}

        @classmethod
        def register(cls, name, implementation):
            cls.names[name] = implementation

        def __getitem__(self, name):
            return self.names[name]

    module = types.ModuleType("transformers.distributed.expert_parallel")
    module.EPImplementation, module.AllReduceEP = EPImplementation, AllReduceEP
    module.EPImplementationInterface = EPImplementationInterface
    sys.modules[module.__name__] = module


def implemented(whole, how):
    """Half of an experts module on each rank, through the implementation that is registered as
    tilemoe, against all of it with `eager` experts: the worst error of output and gradients."""
    from transformers.distributed.expert_parallel import EPImplementationInterface

    rank, E, d = dist.get_rank(), whole.num_experts, whole.down_proj.shape[1]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "alone"))
    half = copy.deepcopy(whole)
    half.num_experts = E // 2
    own = slice(rank * E // 2, (rank + 1) * E // 2)
    for name, p in whole.named_parameters():
        setattr(half, name, torch.nn.Parameter(p.detach()[own].clone()))
    one_batch = how == "one batch"
    counts = {"no token here": [0, 11], "one batch": [9, 9]}.get(how, [9, 14])
    K, last = (3, 1.0) if how == "one rank's experts" else (4, 0.0)
    implementation = EPImplementationInterface()["tilemoe"](
        half, mesh["ep"], mesh["ep"] if one_batch else mesh["alone"]
    )

    batches = []
    for r, count in enumerate(counts):
        generator = torch.Generator().manual_seed(0 if one_batch else r)
        x, dO = torch.randn(2, count, d, generator=generator)
        weights = torch.rand(count, K, generator=generator)
        order = torch.rand(count, E, generator=generator) - last * (torch.arange(E) >= E // 2)
        ids = order.argsort(-1)[:, :K]  # more than E / 2, or all of the last rank's
        batches.append((x.requires_grad_(), ids, weights.requires_grad_(), dO))
    x, ids, weights, dO = batches[rank]
    out = implementation(x, ids, weights)
    leaves = x, weights, *half.parameters()
    got = [out, *torch.autograd.grad(out, leaves, dO)]
    every = [torch.cat(parts).detach() for parts in zip(*batches[: 1 if one_batch else 2])]
    x, ids, weights, dO = every
    leaves = x.requires_grad_(), weights.requires_grad_(), *whole.parameters()
    out = whole(x, ids, weights)
    want = [out, *torch.autograd.grad(out, leaves, dO)]
    first = 0 if one_batch else sum(counts[:rank])
    tokens = slice(first, first + counts[rank])
    want = [w[tokens] if i < 3 else w[own] for i, w in enumerate(want)]
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if w.numel()]
    assert all(g.shape == w.shape for g, w in zip(got, want, strict=True))
    return max(relative_error(g.detach(), w.detach().double()) for g, w in pairs)


def worker(folder):
    dist.init_process_group("gloo")
    if not HAS_INTERFACE:
        stand_in()
    tilemoe.transformers.register()
    (experts, *_) = experts_of(build("qwen3_moe"))
    for how in IMPLEMENTED:
        worst = implemented(experts, how)
        assert worst <= 1e-5, f"{how}: error {worst:.3g}"
        if dist.get_rank() == 0:
            print(f"{how}: error {worst:.3g}")
    for name, parallelism in SCENARIOS:
        want = run(load(folder / name, "eager"))
        model = load(folder / name, "tilemoe", parallelism)
        got = {key: whole(tensor) for key, tensor in run(model).items()}
        assert got.keys() == want.keys()
        worst = max(relative_error(got[key], want[key].double()) for key in want)
        experts = model.model.layers[0].mlp.experts
        if dist.get_rank() == 0:
            print(f"{name} {parallelism}: {experts.num_experts} experts here, error {worst:.3g}")
        assert experts.num_experts == (6 if parallelism == "tensor" else 3)
        assert worst <= 1e-5, f"{name} {parallelism}: error {worst:.3g}"
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as examples/expert_parallel.py does


def test_two_processes_equal_one(tmp_path):
    for name in {name for name, _ in SCENARIOS}:
        build(name).save_pretrained(tmp_path / name)
    job = start(*launcher.python(2), __file__, tmp_path, timeout=None, OMP_NUM_THREADS="1")
    print(job.stdout)
    assert job.returncode == 0, job.stderr
    assert all(f"{how}: error" in job.stdout for how in IMPLEMENTED)
    for name, parallelism in SCENARIOS:
        assert f"{name} {parallelism}" in job.stdout


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
