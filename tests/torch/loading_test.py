"""Importing the package: how long it takes, and what it says where something is missing or broken."""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import checks

CPU, CUDA = "libtilemoe_torch.so", "libtilemoe_torch_cuda.so"
KERNELS = "libtilemoe_cuda.so"  # which CUDA links


def succeeds(program, **environment):
    """-> what it printed."""
    return checks.python("-c", program, **environment).strip()


def last_line(program, **environment):
    """-> of what a program says that fails."""
    done = checks.start(sys.executable, "-c", program, **environment)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def libraries(tmp_path):
    """A copy of the libraries, which may be spoilt, as a wheel has them: with what it bundles two
    folders up."""
    installed = Path(importlib.util.find_spec("tilemoe").origin).parent
    source = Path(os.environ.get("TILEMOE_LIBRARY_DIR", installed / "lib"))
    copy = tmp_path / "tilemoe" / "lib"
    ours = (CPU, CUDA, KERNELS)
    shutil.copytree(source, copy, ignore=lambda _, names: {n for n in names if n not in ours})
    bundled = installed.parent / "tilemoe.libs"
    if bundled.exists():
        (tmp_path / bundled.name).symlink_to(bundled)
    return copy


WORKS = """
import tilemoe, torch
x = torch.randn(5, 16)
O = tilemoe.moe(x, torch.randn(5, 4), torch.randn(4, 16, 16), torch.randn(4, 16, 8), K=2)
print(tuple(O.shape))
"""

# A GPU's tensors without a GPU: torch only traces.
ON_CUDA = """
import tilemoe, torch
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    randn = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.{dtype})
    try:
        tilemoe.moe(randn(5, 16), randn(5, 4), randn(4, 16, 16), randn(4, 16, 8), K=2)
    except NotImplementedError as error:
        print(error)
"""


def refused_on_cuda(libraries, dtype="bfloat16"):
    """-> the sentence."""
    program = WORKS + ON_CUDA.format(dtype=dtype)
    works, out = succeeds(program, TILEMOE_LIBRARY_DIR=str(libraries)).splitlines()
    assert works == "(5, 16)"
    return out


def import_fails(libraries):
    """-> the last line of what the import says: at once after torch, else at the first use."""
    lasts = {
        last_line(program, TILEMOE_LIBRARY_DIR=str(libraries))
        for program in ("import torch, tilemoe", "import tilemoe; tilemoe.moe")
    }
    (last,) = lasts
    assert re.match("ImportError: (no|cannot load the) TileMoE operators at ", last)
    return last


def test_import_time():
    program = "import time, torch; t = time.perf_counter(); import tilemoe; print(time.perf_counter() - t)"
    assert any(float(succeeds(program)) < 0.5 for _ in range(3))


def test_needs_no_gpu(libraries):
    assert succeeds(WORKS, TILEMOE_LIBRARY_DIR=str(libraries), CUDA_VISIBLE_DEVICES="") == "(5, 16)"


def test_cpu_library_absent(libraries):
    (libraries / CPU).unlink()
    assert str(libraries / CPU) in import_fails(libraries)


def test_cpu_library_corrupt(libraries):
    (libraries / CPU).write_bytes(b"\x7fELF")
    assert re.search(rf"cannot load the TileMoE operators at .*{CPU} \(.*\)$", import_fails(libraries))


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import tilemoe"
WHAT_NEEDS_NONE = f"""{WITHOUT_TORCH}
from tilemoe.bench import layers, records, report
from tilemoe.options import Options
assert layers.LAYERS["cuda"] and records.Measurement and report.NAME_WIDTH
print(Options(K=2).numbers, [name for name in sys.modules if name.startswith("torch.")])
"""


@pytest.mark.parametrize(
    "use",
    ["tilemoe.moe", "tilemoe.MoE", "tilemoe.__version__", "from tilemoe import top_k"],
)
def test_torch_absent(use):
    assert last_line(f"{WITHOUT_TORCH}\n{use}") == (
        "ImportError: TileMoE requires torch >= 2.10, which is not installed; run pip install "
        "'tilemoe[torch]', or import tilemoe.jax, which requires only jax"
    )


def test_every_public_name_is_loaded():
    import tilemoe

    names = [name for of in tilemoe._MODULES.values() for name in of]
    assert sorted([*names, "__version__"]) == sorted(tilemoe.__all__)


def test_imports_torch_when_it_is_used():
    without = "import sys, tilemoe; assert 'torch' not in sys.modules"
    assert succeeds(f"{without}; print(tilemoe.functional.__name__)") == "tilemoe.functional"
    assert succeeds(f"{without}; print(tilemoe.MoE.__module__)") == "tilemoe.module"
    operator = "print(tilemoe.moe.__name__, torch.ops.tilemoe.moe.default.name())"
    assert succeeds(f"{without}; import torch; {operator}") == "moe tilemoe::moe"
    operator = "print(torch.ops.tilemoe.moe.default.name())"
    assert succeeds(f"import torch, tilemoe; {operator}") == "tilemoe::moe"
    assert last_line(f"{without}; tilemoe.none").startswith("AttributeError: module 'tilemoe'")


@pytest.mark.parametrize("name", ["expert_parallel", "peft", "state_dict", "torchtitan", "transformers"])
def test_a_public_module_is_imported_before_torch(name):
    """In a new process; a module that is loaded in the middle of another one lacks names."""
    package = {"peft": "peft", "torchtitan": "torchtitan", "transformers": "transformers"}.get(name)
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    program = f"import sys, tilemoe.{name}; print('torch' in sys.modules)"
    assert succeeds(program) == "True"


def test_what_needs_no_torch():
    assert succeeds(WHAT_NEEDS_NONE) == "[0, 2, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0] []"
    program = f"{WITHOUT_TORCH}; sys.argv = ['options']; from tilemoe import _options_table as t; t.main()"
    assert succeeds(program).startswith("| option | default |")
    assert last_line(f"{WITHOUT_TORCH}\ntilemoe.none").startswith("AttributeError: module 'tilemoe'")


def test_torch_too_old():
    program = "import torch; torch.__version__ = '2.9.1'; import tilemoe"
    assert last_line(program) == (
        "ImportError: TileMoE requires torch >= 2.10, got 2.9.1; run pip install -U torch"
    )


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA tensors")
class TestCuda:
    def test_library_absent(self, libraries):
        (libraries / CUDA).unlink(missing_ok=True)
        out = refused_on_cuda(libraries)
        assert out == (
            "TileMoE was built without CUDA; install the CUDA wheel or rebuild with "
            "TILEMOE_CUDA=ON (got a tensor on cuda:0)"
        )

    def test_library_corrupt(self, libraries):
        (libraries / CUDA).write_bytes(b"\x7fELF")
        out = refused_on_cuda(libraries)
        said = r"the CUDA library of TileMoE cannot be loaded \(.*\) \(got a tensor on cuda:0\)"
        assert re.fullmatch(said, out)

    def test_kernels_absent(self, libraries):
        if not (libraries / CUDA).exists():
            pytest.skip("built without CUDA")
        (libraries / KERNELS).unlink()
        out = refused_on_cuda(libraries)
        reason = rf"\({KERNELS}: .*\) \(got a tensor on cuda:0\)"
        said = f"the CUDA library of TileMoE cannot be loaded {reason}"
        assert re.fullmatch(said, out)

    def test_float32(self, libraries):
        if not (libraries / CUDA).exists():
            pytest.skip("built without CUDA")
        assert "x must be bfloat16 or float16 on CUDA, got float32" in refused_on_cuda(libraries, dtype="float32")
