"""The folder for the kernel hub (TILEMOE_HUB, made by scripts/hub.sh) as Hugging Face's kernels load
it, elsewhere than where it was made, and together with the package itself. TILEMOE_KERNELS is where
kernels is installed: transformers, in other tests, behaves differently if it finds it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HUB = Path(os.environ["TILEMOE_HUB"])
(VARIANT,) = (HUB / "build").iterdir()
METADATA = json.loads((VARIANT / "metadata.json").read_text())
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
TORCH = {"libtorch_cpu.so", "libtorch_cuda.so", "libgomp.so.1"}  # in the process before ours are

DIGEST = """
import sys
from pathlib import Path
from kernels import Metadata

variant = Path(sys.argv[1])
digest = Metadata.read_from_file(variant / "metadata.json").digest
print(len(digest.files))
digest.validate(type(digest).hash_variant(digest.algorithm, variant))
"""

# Both copies compute the same layer; the folder's comes first and alone.
WITH_THE_PACKAGE = """
import os, sys
from pathlib import Path
import torch
from kernels import get_local_kernel

folder, namespace = Path(sys.argv[1]), sys.argv[2]
os.environ["TILEMOE_LIBRARY_DIR"] = "/nowhere"  # of the package alone
kernel = get_local_kernel(folder)
assert Path(kernel.__file__).is_relative_to(folder), kernel.__file__
assert "tilemoe" not in sys.modules and not hasattr(torch.ops.tilemoe, "moe")
del os.environ["TILEMOE_LIBRARY_DIR"]
import tilemoe

assert kernel.__version__ == tilemoe.__version__ and kernel.MoE is not tilemoe.MoE
called = []
class Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        called.append(function.namespace)
        return function(*args, **(kwargs or {}))

results = []
for package in (kernel, tilemoe):
    torch.manual_seed(0)
    layer = package.MoE(d=32, n=16, E=8, K=2, balance_coefficient=0.01, return_aux=True)
    x = torch.randn(48, 32, requires_grad=True)
    with Names():
        out, aux = layer(x)
        (out.square().sum() + aux.loss).backward()
    results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    ours = {name for name in called if name.startswith("tilemoe")}
    assert ours == {package._library.NAMESPACE}, ours
    called.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x)[0], out)
assert kernel._library.NAMESPACE == namespace != tilemoe._library.NAMESPACE
assert len(results[0]) == 5 and all(map(torch.equal, *results))

# Each has kernels of its own.
with open("/proc/self/maps") as maps:
    loaded = {line.split()[-1] for line in maps if "/libtilemoe_cuda" in line}
assert len(loaded) == 2 * (kernel._library.why_no_cuda() is None), loaded
assert all(tensor.count_nonzero() for tensor in results[0])
kernel.show_config()
"""


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    return shutil.copytree(HUB, tmp_path_factory.mktemp("elsewhere") / "hub")


def output(*command, **environment):
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def with_kernels(program, *arguments):
    """-> what it prints."""
    path = os.environ["TILEMOE_KERNELS"]
    return output(
        sys.executable, "-c", program, *arguments, PYTHONPATH=path, HF_HUB_OFFLINE="1"
    )


def libraries():
    found = list(VARIANT.rglob("*.so*"))
    assert {"libtilemoe_torch.so"} <= {path.name for path in found}
    return found


def test_computes_together_with_the_package(moved):
    out = with_kernels(WITH_THE_PACKAGE, moved, METADATA["id"])
    assert str(moved) in out


def test_imports_itself_and_torch_alone():
    files = list(VARIANT.rglob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                first = name.split(".")[0]
                typing_alone = {"typing_extensions"}  # under TYPE_CHECKING
                assert first == "torch" or first in sys.stdlib_module_names | typing_alone, path


def test_needs_only_torch_and_the_system():
    names = {path.name for path in libraries()}
    for path in libraries():
        dynamic = output("readelf", "-dW", path)
        assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) <= names | SYSTEM | TORCH
        assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) == ["$ORIGIN"], path


def test_metadata():
    kernel = tomllib.loads((HUB / "build.toml").read_text())["general"]
    assert {key: METADATA[key] for key in ("name", "version", "license")} == {
        key: kernel[key] for key in ("name", "version", "license")
    }
    backend = METADATA["backend"]["type"]
    names = {path.name for path in libraries()}
    assert ("libtilemoe_torch_cuda.so" in names) == (backend == "cuda")
    assert (f"libtilemoe_cuda-{METADATA['id']}.so" in names) == (backend == "cuda")
    assert re.fullmatch(rf"tilemoe_{backend}_[0-9a-f]{{12}}(_dirty)?", METADATA["id"])


def test_digest_is_of_what_is_there():
    assert int(with_kernels(DIGEST, VARIANT)) > 15


def test_carries_the_licenses():
    names = {path.name for path in (VARIANT / "licenses").iterdir()}
    assert names == {"LICENSE", "libdnnl2.txt", "libhwy1.txt", "ocl-icd-libopencl1.txt"}
