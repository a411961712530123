"""--device cuda runs the tests of the layer on a GPU: the files named here, but for the tests that
are marked `cpu`, which are reported as skipped. A skipped test that skips.py does not expect makes
the run fail."""

import os

# torch.compile without vector instructions, in every process: trying each kind takes a minute, and
# a graph that one process cached with them does not compile in one that has switched them off.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

import pytest
import torch

import skips
import target

ON_BOTH = {
    "arguments_test.py", "autograd_test.py", "capacity_test.py", "composition_test.py",
    "flops_test.py", "from_modules_test.py", "functional_test.py", "gemms_test.py",
    "huggingface_test.py",
    "invariance_test.py", "module_routing_test.py", "module_test.py", "operators_test.py",
    "overwrite_test.py", "quantization_test.py", "router_logits_test.py", "router_test.py",
    "token_mask_test.py", "torchtitan_test.py",
    "transformers_routers_test.py",
}  # fmt: skip
ON_CUDA_ALONE = {
    "cuda_documentation_test.py", "cuda_gemms_test.py", "cuda_memory_test.py",
    "cuda_first_use_test.py",
    "cuda_quantized_test.py", "cuda_transformers_test.py", "cuda_two_devices_test.py", "cuda_test.py",
}  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu")
    parser.addoption(
        "--without",
        action="append",
        choices=list(skips.NEED),
        default=[],
        help="a package that is not installed: the tests that need it may be skipped",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu: needs the CPU, or float32")
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
            item.add_marker(pytest.mark.skip(reason=skips.OF_THE_CPU))


# ---------------------------------------------------------------- what was skipped

skipped = []  # (test or file, reason); those of all processes, in the one that reports


def pytest_runtest_logreport(report):
    if report.skipped:
        where = report.longrepr  # (file, line, "Skipped: reason") but for an expected failure
        reason = where[2] if isinstance(where, tuple) else str(where)
        skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


pytest_collectreport = pytest_runtest_logreport  # a file that is skipped as a whole


def unexpected(config):
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        return []
    return skips.unexpected(skipped, config.getoption("--without"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    ended = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if exitstatus in ended and unexpected(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if lines := unexpected(terminalreporter.config):
        terminalreporter.section("skipped, and not expected to be (skips.py)", red=True)
        for test, reason in lines:
            terminalreporter.line(f"{test}: {reason}")
