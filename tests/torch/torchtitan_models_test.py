"""torchtitan's whole models, and its part of HybridEP: what requires a newer torch than its experts
do. Two and four processes on this machine (gloo)."""

import pathlib

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import torchtitan_stand_ins

if not torchtitan_stand_ins.HAS_HYBRIDEP:
    pytest.skip("torchtitan's models require a newer torch", allow_module_level=True)

import torchtitan_worker
from processes import launch

MODELS = pathlib.Path(__file__).with_name("torchtitan_models_worker.py")
SCENARIOS = {
    2: ["biases_are_added_once_over_tensor_parallel_ranks", "gpt_oss_over_experts"],
    4: ["qwen3_over_four_ranks"],
}


def passes(program, names, world, folder, only=""):
    for rank, result in enumerate(launch(program, names, world, folder, "cpu", only)):
        assert not any(result.values()), f"rank {rank}: {result}"


@pytest.mark.parametrize("world", SCENARIOS)
def test_models_are_those_of_one_process(tmp_path, world):
    passes(MODELS, SCENARIOS[world], world, tmp_path)


def test_hybridep_over_two_processes(tmp_path):
    names = [scenario.__name__ for scenario in torchtitan_worker.OF_HYBRIDEP]
    passes(torchtitan_worker.__file__, names, 2, tmp_path, "hybridep")
