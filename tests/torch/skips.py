"""Which tests may be skipped, and where. conftest.py counts what a run skipped; one that is not
expected here makes the run fail, so that no test goes missing unseen."""

import re
from typing import NamedTuple

import torch

import target

OF_THE_CPU = "needs the CPU, or float32"
ONE_GPU = "this machine has one GPU"
NO_CUDA_LIBRARY = "built without CUDA"
NO_CUDA_TENSORS = "this torch has no CUDA tensors"
OLDER_TORCH = "torchtitan's models require a newer torch"


class Skip(NamedTuple):
    test: str  # file::name, parameters left out; the file, or its class, for all that is in it
    reason: str  # what the report says, or the beginning of it
    here: bool  # whether this machine is one where that is expected


# Files and tests that need a package, which `--without PACKAGE` says is not installed. Where they
# should be installed (scripts/test_torch.sh, a GPU machine) nothing is said, and a missing one fails.
NEED = {
    "torchtitan": ["documentation_test.py::test_a_block", "private_apis_test.py", "torchtitan_test.py", "torchtitan_models_test.py", "torchtitan_trainer_test.py"],
    "transformers": [
        "documentation_test.py::test_a_block",
        "documentation_test.py::test_a_model_of_transformers", "finetune_lora_test.py",
        "finetune_test.py", "huggingface_test.py", "peft_distributed_test.py",
        "peft_layouts_test.py", "peft_operations_test.py", "peft_refusals_test.py", "peft_test.py",
        "pretrain_trained_test.py::test_an_exported_run_is_loaded_and_is_the_same",
        "pretrain_trained_test.py::test_an_exported_tokenizer_gives_the_same_tokens",
        "pretrain_trained_test.py::test_transformers_computes_the_same_function",
        "quantization_test.py::test_fp8_is_transformers",
        "quantization_test.py::test_mxfp4_dequantizes_as_transformers", "quantized_loading_test.py",
        "private_apis_test.py", "quantized_peft_test.py", "routing_replay_test.py",
        "transformers_forms_test.py", "transformers_models_test.py", "transformers_norm_test.py",
        "transformers_routers_test.py",
        "transformers_test.py",
    ],  # fmt: skip
    "accelerate": [
        "finetune_lora_test.py", "finetune_test.py", "quantized_loading_test.py",
        "quantized_peft_test.py",
    ],  # fmt: skip
    "peft": [
        "cuda_documentation_test.py::test_the_block_of_finetuning",
        "documentation_test.py::test_a_block",
        "documentation_test.py::test_a_model_of_transformers", "finetune_lora_test.py",
        "peft_distributed_test.py",
        "peft_layouts_test.py", "peft_operations_test.py", "peft_refusals_test.py", "peft_test.py",
        "quantized_peft_test.py",
    ],  # fmt: skip
    "trl": ["peft_trl_test.py"],
    "mypy": ["typing_test.py::test_a_type_checker_accepts_the_package_and_a_program_that_uses_it"],
    "tokenizers": [
        "pretrain_corpus_test.py::test_a_tokenizer_of_its_own_gives_the_text_back",
        "pretrain_trained_test.py::test_a_runs_tokenizer_is_text_and_back",
        "pretrain_trained_test.py::test_an_exported_tokenizer_gives_the_same_tokens",
    ],
    "tensorboard": ["pretrain_test.py::test_tensorboard_has_what_the_log_has"],
}


def expected(without=()):
    """-> [Skip] of this machine: its device, and the packages that it is said not to have."""
    # Not before the options of conftest.py are known.
    import torchtitan_stand_ins
    from tilemoe import _library

    on_cuda = target.DEVICE == "cuda"
    has_cuda_library = (_library.directory() / "libtilemoe_torch_cuda.so").exists()
    of_the_cpu = (
        "arguments_test.py::test_counts_that_the_rows_do_not_have",
        "arguments_test.py::test_torch_jit_trace_is_refused",
        "arguments_test.py::test_unusual_tensors_in_every_place",
        "autograd_test.py::test_a_mapped_checkpoint_that_is_assigned",
        "autograd_test.py::test_a_pipelines_split_backward",
        "autograd_test.py::test_compile_of_weights_off_16_bytes",
        "autograd_test.py::test_directions_by_differences",
        "autograd_test.py::test_threads_follow_torch",
        "autograd_test.py::test_weights_off_16_bytes",
        "capacity_test.py::test_bits_do_not_depend_on_a_capacity_that_suffices",
        "capacity_test.py::test_from_logits_too",
        "capacity_test.py::test_past_it_pairs_are_dropped_on_request",
        "functional_test.py::test_gpt_oss_form",
        "gemms_test.py::test_bits_are_those_of_the_layer_with_a_gate_in_float32",
        "huggingface_test.py::test_a_model_as_its_files_have_it",
        "module_test.py::test_gpt_oss_form", "operators_test.py::test_a_type_that_no_kernel_has",
        "operators_test.py::test_other_devices_are_refused",
        "overwrite_test.py::test_of_two_threads_with_one_graph_only_one_writes_dH",
        "quantization_test.py::test_codes_off_16_bytes_are_copied",
        "torchtitan_test.py::test_a_layers_state_dict_is_the_modules_too",
        "torchtitan_test.py::test_its_dispatchers_over_two_processes", "typing_test.py",
    )  # fmt: skip
    of_two_gpus = (
        "cuda_test.py::test_another_gpu_than_the_current_one",
        "cuda_two_devices_test.py",
    )
    found = [Skip(test, OF_THE_CPU, on_cuda) for test in of_the_cpu]
    found += [
        Skip(test, ONE_GPU, on_cuda and torch.cuda.device_count() < 2) for test in of_two_gpus
    ]
    found += [
        Skip("loading_test.py::TestCuda", NO_CUDA_TENSORS, torch.version.cuda is None),
        Skip("loading_test.py::TestCuda::test_float32", NO_CUDA_LIBRARY, not has_cuda_library),
        Skip("loading_test.py::TestCuda::test_kernels_absent", NO_CUDA_LIBRARY, not has_cuda_library),
        Skip("torchtitan_models_test.py", OLDER_TORCH, not torchtitan_stand_ins.HAS_HYBRIDEP),
        Skip("torchtitan_trainer_test.py", OLDER_TORCH, not torchtitan_stand_ins.HAS_HYBRIDEP),
        # Expert parallelism of transformers 5.23, which is next to the newest torch alone.
        Skip("private_apis_test.py", "transformers has none", not torchtitan_stand_ins.HAS_HYBRIDEP),
        # scripts/test_torch.sh installs TRL next to the newest torch alone.
        Skip("peft_trl_test.py", "trl is not installed", not torchtitan_stand_ins.HAS_HYBRIDEP),
    ]
    for package, tests in NEED.items():
        reason = f"{package} is not installed"
        found += [Skip(test, reason, package in without) for test in tests]
    return found


def unexpected(skipped, without=()):
    """skipped: (pytest's name of a test or file, reason) each -> those that no Skip allows."""
    allowed = [skip for skip in expected(without) if skip.here]

    def may(nodeid, reason):
        # "tests/torch/file.py::test[a-b]" -> "file.py::test"
        test = re.sub(r"\[.*", "", nodeid, flags=re.DOTALL).rsplit("/", 1)[-1]
        return any(
            test == skip.test or test.startswith(skip.test + "::")
            for skip in allowed
            if reason.startswith(skip.reason)
        )

    return [one for one in skipped if not may(*one)]
