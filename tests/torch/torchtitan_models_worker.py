"""Processes (gloo): whole models of torchtitan with TileMoE's experts, under FSDP-2, tensor and
expert parallelism as torchtitan makes them, compared with torchtitan's own in one process. Each
process runs every scenario of its number of ranks and writes FOLDER/RANK.json.

Of torchtitan are the models, routers, dispatchers, meshes, shardings, FSDP and the mixed precision of
its default, bfloat16 and float32. Not of it: attention (torchtitan_on_cpu.py). The trainer is in
torchtitan_trainer_test.py.
"""

import importlib
import sys
import types

import torchtitan_on_cpu  # before torchtitan, which looks for its device when it is imported

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan

import tilemoe.torchtitan
from processes import main_of

B, L = 2, 16  # of a data parallel rank
FLAVORS = {"gpt_oss": "debugmodel", "qwen3": "debugmodel_moe"}


class Job:
    def __init__(self, rank, world, folder, device):
        self.rank, self.world, self.folder = rank, world, folder
        self._dims = {}

    def dims(self, parallelism):
        """One for all models of the same degrees: torchtitan's FSDP requires the same mesh."""
        key = str(parallelism)
        if key not in self._dims:
            self._dims[key] = ParallelDims.from_config(parallelism, self.world)
        return self._dims[key]


def built(name, parallelism, override=None):
    """-> the specification, and a model of a small layer on meta."""
    spec = importlib.import_module(f"torchtitan.models.{name}").model_registry(
        FLAVORS[name], attn_backend="flex"
    )
    cfg = spec.model
    cfg.layers = cfg.layers[:1]
    for layer in cfg.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
        # By turns, the same ones for a token on every mesh: no logit is near another.
        layer.moe.router._debug_force_load_balance = True
    cfg.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    if override is not None:
        log = apply_overrides(OverrideConfig(imports=[f"tilemoe.torchtitan.{override}"]), cfg)
        assert len(log) == len(cfg.layers), log
    with torch.device("meta"):
        return spec, cfg.build()


def whole_model(name):
    """torchtitan's own, in this process alone, in bfloat16."""
    titan.set_spmd_backend("partial_dtensor")
    _, model = built(name, ParallelismConfig())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for parameter_name, p in model.named_parameters():
            if "mlp2_bias" in parameter_name:  # of a size that is seen
                p.normal_(std=0.1)
            p.copy_(p.bfloat16())
    return model


def parallel_model(job, name, override, **degrees):
    """-> the model of this rank, what its forward runs in, and its place among the data parallel."""
    parallelism = ParallelismConfig(**{f"{k}_parallel_degree": v for k, v in degrees.items()})
    titan.set_spmd_backend(parallelism.spmd_backend)
    dims = job.dims(parallelism)
    spec, model = built(name, parallelism, override)
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(), parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    context = titan.get_spmd_context(parallel_dims=dims)
    tp = degrees.get("tensor", 1)
    return model, context, (job.rank // tp, job.rank % tp)


def batch(ranks):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 2048, (ranks * B, L), generator=generator)
    return tokens, torch.randn(ranks * B, L, 2048, generator=generator)


def forward(model, tokens):
    positions = torch.arange(L).expand(tokens.shape)
    return model(tokens, attention_masks=None, positions=positions)


def error_of(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def errors(job, name, override, **degrees):
    """{name: relative error} of the logits and of every gradient, and the model."""
    model, context, (data_rank, tensor_rank) = parallel_model(job, name, override, **degrees)
    checkpoint = job.folder / name
    tp = degrees.get("tensor", 1)
    ranks = job.world // tp
    tokens, dO = batch(ranks)
    whole = whole_model(name)
    if not checkpoint.exists():
        dist.barrier()
        if job.rank == 0:
            dcp.save(whole.state_dict(), checkpoint_id=checkpoint, no_dist=True)
        dist.barrier()
    want = forward(whole.bfloat16(), tokens)
    want.backward(dO.to(want.dtype))
    titan.set_spmd_backend("spmd_types")

    state = model.state_dict()
    dcp.load(state, checkpoint_id=checkpoint)  # one process's
    model.load_state_dict(state)
    own = slice(data_rank * B, (data_rank + 1) * B)
    columns = slice(tensor_rank * 2048 // tp, (tensor_rank + 1) * 2048 // tp)
    with context():
        out = forward(model, tokens[own])
        out.backward(dO[own, :, columns].to(out.dtype))
    found = {"logits": error_of(out.detach(), want.detach()[own, :, columns])}
    for parameter_name, p in model.named_parameters():
        gradient = whole.get_parameter(parameter_name).grad
        found[parameter_name] = error_of(p.grad.full_tensor(), gradient)
    return found, model


LIMIT = 3e-2  # two ways of rounding to bfloat16 are some 1 % apart


def is_one_process(job, name, override, **degrees):
    found, model = errors(job, name, override, **degrees)
    worst = sorted(found.items(), key=lambda item: -item[1])[:3]
    print(f"{name} {override} {degrees}: {worst}")
    assert worst[0][1] <= LIMIT, worst
    return model


# ---------------------------------------------------------------- scenarios


def biases_are_added_once_over_tensor_parallel_ranks(job):
    """Under spmd_types, torchtitan's default, where parameters are plain."""
    for override in ("experts", "routed_experts"):
        is_one_process(job, "gpt_oss", override, tensor=2)
    theirs, _ = errors(job, "gpt_oss", None, tensor=2)
    assert theirs["logits"] > LIMIT, theirs["logits"]  # once a rank


def gpt_oss_over_experts(job):
    is_one_process(job, "gpt_oss", "routed_experts", expert=2)


def qwen3_over_four_ranks(job):
    """FSDP-2 and tensor parallelism; FSDP-2 and expert parallelism. The first one's checkpoint goes
    into the second."""
    first = is_one_process(job, "qwen3", "routed_experts", tensor=2)
    torch.optim.AdamW(first.parameters(), lr=1e-3).step()
    dcp.save(first.state_dict(), checkpoint_id=job.folder / "trained")
    second = is_one_process(job, "qwen3", "routed_experts", expert=4)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=job.folder / "trained")
    second.load_state_dict(state)
    before = whole_model("qwen3")
    for name, p in second.named_parameters():
        trained = p.full_tensor()
        assert torch.equal(trained, first.get_parameter(name).full_tensor()), name
        assert not torch.equal(trained, before.get_parameter(name)), name


SCENARIOS = {
    biases_are_added_once_over_tensor_parallel_ranks: (2,),
    gpt_oss_over_experts: (2,),
    qwen3_over_four_ranks: (4,),
}


if __name__ == "__main__":
    sys.exit(main_of(__file__, __doc__, SCENARIOS, Job))
