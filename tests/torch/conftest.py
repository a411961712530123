"""--device cuda runs the tests of the layer on a GPU: the files named here, but for the tests that
are marked `cpu`, which are reported as skipped."""

import pytest
import torch

import target

ON_BOTH = {
    "autograd_test.py",
    "composition_test.py",
    "functional_test.py",
    "module_test.py",
    "operators_test.py",
    "overwrite_test.py",
}
ON_CUDA_ALONE = {"cuda_memory_test.py", "cuda_test.py", "cuda_transformers_test.py"}


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu: of the CPU alone, or of float32")
    if config.getoption("--device") == "cpu":
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError(f"--device cuda: torch {torch.__version__} sees no GPU here")
    target.run_on_cuda()


def pytest_report_header():
    if target.DEVICE == "cuda":
        return f"device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return "device: cpu"


def pytest_ignore_collect(collection_path):
    # Modules are read on one device alone: what they make at import is on it.
    if collection_path.name.endswith("_test.py"):
        wanted = ON_BOTH | ON_CUDA_ALONE if target.DEVICE == "cuda" else set()
        left_out = ON_CUDA_ALONE if target.DEVICE == "cpu" else set()
        if (wanted and collection_path.name not in wanted) or collection_path.name in left_out:
            return True
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if target.DEVICE == "cuda" and item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="of the CPU alone, or of float32"))
