"""Expert and tensor parallelism of transformers with TileMoE's experts: two processes (gloo) against
one with `eager` experts. Run by torch.distributed.run it is the worker of its own test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import launcher
import tilemoe.transformers
from transformers_models_test import build, run
from transformers_support import relative_error

SCENARIOS = [("qwen3_moe", "expert"), ("gpt_oss", "expert"), ("gpt_oss", "tensor")]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def load(folder, experts, parallelism=None):
    more = {}
    if parallelism is not None:
        more["distributed_config"] = DistributedConfig(
            tp_size=2, enable_expert_parallel=parallelism == "expert"
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation=experts, dtype=torch.float32, **more
    )


def worker(folder):
    dist.init_process_group("gloo")
    tilemoe.transformers.register()
    for name, parallelism in SCENARIOS:
        want = run(load(folder / name, "eager"))
        model = load(folder / name, "tilemoe", parallelism)
        got = {key: whole(tensor) for key, tensor in run(model).items()}
        assert got.keys() == want.keys()
        worst = max(relative_error(got[key], want[key].double()) for key in want)
        experts = model.model.layers[0].mlp.experts
        if dist.get_rank() == 0:
            print(f"{name} {parallelism}: {experts.num_experts} experts here, error {worst:.3g}")
        assert experts.num_experts == (3 if parallelism == "expert" else 6)
        assert worst <= 1e-5, f"{name} {parallelism}: error {worst:.3g}"
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    for name in {name for name, _ in SCENARIOS}:
        build(name).save_pretrained(tmp_path / name)
    job = subprocess.run(
        [*launcher.python(2), __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    print(job.stdout)
    assert job.returncode == 0, job.stderr
    for name, parallelism in SCENARIOS:
        assert f"{name} {parallelism}" in job.stdout


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
