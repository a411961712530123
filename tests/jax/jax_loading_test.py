"""Importing `tilemoe.jax`: without torch, and what it says if something is missing or broken."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax_handlers
import pytest

import tilemoe.jax._library as library

CPU = "libtilemoe_jax.so"


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment
    )


def succeeds(program, **environment):
    done = run(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def last_line(program, **environment):
    done = run(program, **environment)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


WORKS = """
import sys
{first}
import jax.numpy as jnp, tilemoe.jax
O = tilemoe.jax.moe(jnp.ones((5, 16)), jnp.ones((5, 4)), jnp.ones((4, 16, 16)), jnp.ones((4, 16, 8)), K=2)
tilemoe.jax.show_config()
print(O.shape, "torch" in sys.modules and sys.modules["torch"] is not None)
"""


@pytest.mark.parametrize("first", ["", "sys.modules['torch'] = None"], ids=["unused", "absent"])
def test_without_torch(first):
    *config, last = succeeds(WORKS.format(first=first)).splitlines()
    assert last == "(5, 16) False"
    assert [line.split()[0] for line in config] == ["tilemoe", "jax", "python", "CPU", "CUDA"]
    assert re.match(r"CPU +cpu: \d+ threads", config[3])


def test_names_of_the_package_for_pytorch():
    program = "import sys; sys.modules['torch'] = None; import tilemoe.jax, tilemoe; tilemoe.moe"
    assert last_line(program) == (
        "ImportError: TileMoE requires torch >= 2.10, which is not installed; run pip install "
        "'tilemoe[torch]', or import tilemoe.jax, which requires only jax"
    )


def test_jax_absent_or_old():
    absent = "import sys; sys.modules['jax'] = None; import tilemoe.jax"
    assert last_line(absent) == (
        "ImportError: tilemoe.jax requires jax >= 0.10.2, which is not installed; run pip install "
        "'tilemoe[jax]'"
    )
    old = "import jax; jax.__version__ = '0.9.2'; import tilemoe.jax"
    assert last_line(old) == (
        "ImportError: tilemoe.jax requires jax >= 0.10.2, got 0.9.2; run pip install -U jax"
    )


@pytest.fixture
def libraries(tmp_path):
    """A copy of the folder of libraries, as a wheel has it: with what it bundles two folders up."""
    installed = Path(importlib.util.find_spec("tilemoe").origin).parent
    copy = tmp_path / "tilemoe" / "lib"
    copy.mkdir(parents=True)
    shutil.copy(library._find(CPU), copy / CPU)
    bundled = installed.parent / "tilemoe.libs"
    if bundled.exists():
        (tmp_path / bundled.name).symlink_to(bundled)
    return copy


def test_libraries(libraries):
    where = {"TILEMOE_LIBRARY_DIR": str(libraries)}
    config = succeeds(WORKS.format(first=""), **where).splitlines()
    assert re.match(r"CUDA +no: TileMoE was built without CUDA; install the CUDA wheel", config[4])
    (libraries / "libtilemoe_jax_cuda.so").write_bytes(b"\x7fELF")
    config = succeeds(WORKS.format(first=""), **where).splitlines()
    assert re.match(r"CUDA +no: the CUDA library of TileMoE cannot be loaded: ", config[4])
    (libraries / CPU).write_bytes(b"\x7fELF")
    assert "cannot load the TileMoE library for JAX: " in last_line("import tilemoe.jax", **where)
    for file in libraries.iterdir():
        file.unlink()
    last = last_line("import tilemoe.jax", **where)
    assert last.startswith("ImportError: no TileMoE libraries for JAX in ")


KERNELS_AFTER = """
import {}
for line in open("/proc/self/maps"):
    if line.rstrip().endswith("/libtilemoe_cuda.so"):
        print(line.split()[-1])
"""


def test_kernels_are_loaded_once():
    """By both packages in one process, in both orders."""
    if library._cuda is None:
        pytest.skip("built without CUDA")
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    alone = set(succeeds(KERNELS_AFTER.format("tilemoe.jax")).splitlines())
    assert len(alone) == 1
    for imports in ("torch, tilemoe, tilemoe.jax", "tilemoe.jax, torch, tilemoe.functional"):
        assert set(succeeds(KERNELS_AFTER.format(imports)).splitlines()) == alone


def test_handlers_are_compatible_with_command_buffers():
    """Those of GPUs say so; XLA reads it before it captures them."""
    if library._cuda is None:
        pytest.skip("built without CUDA")
    for handler in library.HANDLERS:
        of = jax_handlers.traits(getattr(library._cuda._c, f"tilemoe_jax_{handler}"))
        assert of == jax_handlers.COMMAND_BUFFER_COMPATIBLE, handler


def test_arrays_of_the_handlers():
    """What Python passes, by the names that the library reads: a wrong one is an assertion."""
    assert library.OPERANDS["top_k"] == ("logits", "selection_bias")
    assert library.RESULTS["top_k"] == ("scores", "ids", "counts")
    assert library.OPERANDS["forward"][:3] == ("X", "ids", "scores")
    assert library.RESULTS["backward"][-4:] == ("dH", "workspace", "dH_codes", "dH_scales")
