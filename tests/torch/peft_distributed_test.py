"""PEFT's adapters of experts in two processes (gloo), with FSDP-2 and with expert parallelism,
against PEFT's own around `eager` experts in float64 in one process. Run by torch.distributed.run it
is the worker of its own test."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from peft import get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import launcher
import tilemoe.peft
import tilemoe.transformers
from checks import refused, start
from peft_support import (
    BOTH, W1, adapted, assert_same, build, config_of, eager, fill, run, tokens,
)  # fmt: skip

HAS_INTERFACE = hasattr(DistributedConfig, "ep_implementation")  # of 5.23
STEPS = 3
NAMES = ["qwen3_moe", "gpt_oss"]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model, seeds, of_ranks=lambda found: found):
    """-> the loss and the gradients of each step, then the adapters. seeds: of the step's batches;
    of_ranks: what becomes of one rank's losses and gradients."""
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(adapters.values(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        ids = torch.cat([tokens(10 * step + seed) for seed in seeds])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        of_ranks({"loss": loss.detach()} | {name: p.grad for name, p in adapters.items()})
        gradients = {name: whole(p.grad).clone() for name, p in adapters.items()}
        steps.append({"loss": loss.detach()} | gradients)
        optimizer.step()
    return [*steps, {name: whole(p.detach()) for name, p in adapters.items()}]


def mean(found):
    """Takes the mean over ranks in place, as data parallelism does."""
    for tensor in found.values():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def mean_loss(found):
    mean({"loss": found["loss"]})


def compared(got, want):
    for step, of_step in zip(got, want, strict=True):
        assert_same(step, of_step)
    assert len(want[0]) == 9


def fsdp(folder):
    """Each rank has a batch of its own. FSDP takes the mean of the gradients."""
    want = trained(eager(adapted()), [0, 1])
    for are_apart in (False, True):  # experts gathered separately from their adapters
        model = adapted()
        for layer in model.base_model.model.model.layers:
            if are_apart:
                fully_shard(layer.mlp.experts.get_base_layer())
            fully_shard(layer)
        fully_shard(model)
        compared(trained(model, [dist.get_rank()], mean_loss), want)


def loaded(folder, name="qwen3_moe", targets=BOTH, **parallelism):
    model = AutoModelForCausalLM.from_pretrained(
        folder / name, experts_implementation="tilemoe", dtype=torch.float32,
        distributed_config=DistributedConfig(**parallelism),
    )  # fmt: skip
    if HAS_INTERFACE:  # PEFT makes no adapter of W2 while the plan of tensor parallelism names it
        model.tp_plan.pop("model.layers.*.mlp.experts.down_proj", None)
    return fill(get_peft_model(model, config_of(targets)))


def one_batch(folder):
    """Ranks with the same batch: each has half of the experts, and all of each gradient."""
    how = dict(enable_expert_parallel=True)
    if HAS_INTERFACE:
        how = dict(ep_size=2, ep_implementation="tilemoe")
    for name in NAMES:
        model = loaded(folder, name, tp_size=2, **how)
        assert model.base_model.model.model.layers[0].mlp.experts.get_base_layer().num_experts == 3
        compared(trained(model, [0]), trained(eager(adapted(name)), [0]))


def own_batches(folder):
    """Ranks with batches of their own, whose gradients data parallelism has to average."""
    model = loaded(folder, fsdp_size=2, ep_size=2, ep_implementation="tilemoe")
    compared(trained(model, [dist.get_rank()], mean), trained(eager(adapted()), [0, 1]))


def tensor_parallelism(folder):
    model = loaded(folder, targets=[W1], tp_size=2)  # PEFT refuses W2's
    message = "parts of each expert's gate_up_proj .* use expert parallelism, not tensor"
    refused(NotImplementedError, message, run, model)


def another_implementation(folder):
    model = loaded(folder, fsdp_size=2, ep_size=2, ep_implementation="all_to_all")
    refused(NotImplementedError, "require ep_implementation='tilemoe'", run, model)


SCENARIOS = [fsdp, one_batch]
SCENARIOS += [own_batches, another_implementation] if HAS_INTERFACE else [tensor_parallelism]


def worker(folder):
    dist.init_process_group("gloo")
    tilemoe.transformers.register()
    tilemoe.peft.register()
    for scenario in SCENARIOS:
        scenario(folder)
        if dist.get_rank() == 0:
            print(f"{scenario.__name__} passed")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as examples/expert_parallel.py does


def test_two_processes_equal_one(tmp_path):
    tilemoe.transformers.register()
    for name in NAMES:
        build(name).save_pretrained(tmp_path / name)
    job = start(*launcher.python(2), __file__, tmp_path, timeout=None, OMP_NUM_THREADS="1")
    assert job.returncode == 0, job.stdout + job.stderr
    for scenario in SCENARIOS:
        assert f"{scenario.__name__} passed" in job.stdout


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
