"""A build without the CPU backend (TILEMOE_CPU=OFF): it looks for neither oneDNN nor Highway, links
neither, and refuses the CPU with the reason. Compiles what such a build has except the kernels."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Next to the wheel's build: ccache has its objects, known by paths relative to the build's folder.
BUILD = ROOT / "build" / "gpu_alone"
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
CPU, UNSUPPORTED = 0, 2  # tilemoe_device, tilemoe_status

CALLS = """
import tilemoe, torch

layer = tilemoe.MoE(d=16, n=8, E=4, K=2, return_aux=False)
x = torch.randn(5, 16)
for call in (
    lambda: layer(x),
    lambda: tilemoe.top_k(torch.randn(5, 4), K=2),
    lambda: torch.compile(layer, backend="aot_eager")(x),
):
    try:
        call()
    except NotImplementedError as error:
        print(error)
tilemoe.show_config()
"""
# Tensors of a GPU without a GPU, as torch.compile traces them.
TRACED = """
import tilemoe, torch
from torch._subclasses import FakeTensorMode

tilemoe._library._no_cuda = None  # this build's CUDA library is not made
with FakeTensorMode():
    randn = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    O = tilemoe.moe(randn(5, 16), randn(5, 4), randn(4, 16, 16), randn(4, 16, 8), K=2)
print(tuple(O.shape), O.device.type)
"""


def run(*command, **environment):
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def configure(folder, *options):
    """-> CompletedProcess. CMake fails where a package that is hidden from it is required."""
    hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("dnnl", "hwy", "OpenMP")]
    command = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    return subprocess.run(
        [*command, *hidden, *options], capture_output=True, text=True, check=False
    )


def build(folder):
    """Everything but the CUDA backend's own objects."""
    done = configure(
        folder, "-DTILEMOE_CPU=OFF", "-DTILEMOE_CUDA=ON", "-DTILEMOE_CUDA_ARCHS=90a",
        "-DTILEMOE_WERROR=ON", "-DTILEMOE_TORCH=ON", f"-DTILEMOE_TORCH_PYTHON={sys.executable}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Command line and tests: not built" in done.stdout
    parts = (
        "tilemoe_objects", "tilemoe_cpu_objects", "tilemoe_torch_operators", "tilemoe_torch",
        "torch_commit",
    )  # fmt: skip
    run("cmake", "--build", folder, "-j", "2", "--target", *parts)


def link_library(folder):
    """-> the library's objects alone as a shared library; what stands for the CUDA backend is linked
    in place of it."""
    core, cpu = (
        list((folder / "src" / "CMakeFiles" / f"{part}.dir").rglob("*.o"))
        for part in ("tilemoe_objects", "tilemoe_cpu_objects")
    )
    assert core and [path.name for path in cpu] == ["absent.cpp.o"]
    objects = [*core, *cpu]
    file = folder / "library.so"
    run(
        "c++", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,--no-undefined",
        f"-I{ROOT}/include", f"-I{ROOT}/src", ROOT / "src" / "cuda" / "absent.cpp", *objects,
        "-o", file,
    )  # fmt: skip
    return file


def needed(file):
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", file)))


def check_c_interface(library):
    tilemoe = ctypes.CDLL(library)
    tilemoe.tilemoe_last_error.restype = ctypes.c_char_p
    refused = b"without the CPU backend (TILEMOE_CPU=OFF)"
    assert tilemoe.tilemoe_device_available(CPU) == 0
    assert refused in tilemoe.tilemoe_last_error()
    assert tilemoe.tilemoe_num_threads() == 0
    assert tilemoe.tilemoe_set_num_threads(1) == UNSUPPORTED
    assert refused in tilemoe.tilemoe_last_error()


def check_python(libraries):
    environment = {"PYTHONPATH": str(ROOT / "python"), "TILEMOE_LIBRARY_DIR": str(libraries)}
    why = "TileMoE was built without its CPU backend; rebuild with TILEMOE_CPU=ON"
    out = run(sys.executable, "-c", CALLS, **environment)
    assert out.startswith(3 * f"{why} (got a tensor on cpu)\n"), out
    assert re.search(rf"^CPU +no: {re.escape(why)}$", out, re.MULTILINE), out
    assert run(sys.executable, "-c", TRACED, **environment) == "(5, 16) cuda\n"


def test_has_no_cpu_backend():
    """One test, so that what it compiles is compiled once."""
    shutil.rmtree(BUILD, ignore_errors=True)
    build(BUILD)
    library = link_library(BUILD)
    libraries = BUILD / "bindings" / "torch"
    assert needed(library) <= SYSTEM
    assert needed(libraries / "libtilemoe_torch.so") <= SYSTEM | {"libtorch_cpu.so"}
    objects = list(libraries.rglob("tilemoe_torch_operators.dir/*.o"))
    assert len(objects) > 3
    for file in (library, libraries / "libtilemoe_torch.so", *objects):
        assert not re.search("dnnl|hwy", run("nm", "--demangle", file)), file
    check_c_interface(library)
    check_python(libraries)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["CPU=OFF", "CUDA=OFF"], "TILEMOE_CPU and TILEMOE_CUDA are both OFF"),
        (["CPU=maybe", "CUDA=OFF"], "TILEMOE_CPU is 'maybe', expected ON or OFF"),
        (["CPU=ON", "CUDA=OFF"], "module dnnl called with REQUIRED"),  # what is hidden is required
    ],
)
def test_configuration_fails(options, sentence, tmp_path):
    done = configure(tmp_path, *(f"-DTILEMOE_{option}" for option in options), "-DTILEMOE_TORCH=OFF")
    assert done.returncode != 0 and sentence in " ".join(done.stderr.split()), done.stderr
