"""The wheel as a file (TILEMOE_WHEEL), and as it is installed: what it weighs, brings, needs and shows.
The libraries of its CPU half and of its CUDA half are read with binutils."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "cmake"), str(ROOT / "scripts")]
import kernel_hash  # noqa: E402
from project_urls import project_urls  # noqa: E402

WHEEL = Path(os.environ["TILEMOE_WHEEL"])
TAG = "py3-none-manylinux_2_34_x86_64"  # RHEL 9, Debian 12, Ubuntu 22.04 and newer
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}  # what that tag allows
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
KERNELS = "libtilemoe_cuda.so"  # which the other libraries with CUDA link
CUDA = (KERNELS, "libtilemoe_torch_cuda.so", "libtilemoe_jax_cuda.so")
TORCH = {"libtorch_cpu.so", "libtorch_cuda.so", "libgomp.so.1"}  # in the process before ours are


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """{file name: path} of every shared library of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(WHEEL).extractall(folder)
    return {path.name: path for path in folder.rglob("*.so*")}


@pytest.fixture(scope="module")
def ours(libraries):
    found = {name: path for name, path in libraries.items() if name.startswith("libtilemoe")}
    assert set(found) - set(CUDA) == {"libtilemoe_torch.so", "libtilemoe_jax.so"}
    assert set(found) & set(CUDA) in (set(), set(CUDA))
    return found


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_tag():
    assert WHEEL.name.endswith(f"-{TAG}.whl")


def test_size():
    assert 2**20 < WHEEL.stat().st_size < 40 * 2**20


def test_says_whether_it_has_cuda(ours):
    assert (KERNELS in ours) == ("+cpu" not in WHEEL.name)


def test_contains_the_kernels_and_the_cuda_runtime_once(ours):
    for mark in (b".nv_fatbin", b"cudaErrorMemoryAllocation"):  # a section, a name of an error
        contained = {name for name, path in ours.items() if mark in path.read_bytes()}
        assert contained == {KERNELS} & set(ours), mark


def test_exports_the_c_interface_and_the_targets_of_jax(ours):
    header = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()
    public = set(re.findall(r"^TILEMOE_API [^(]*?(tilemoe_\w+)\(", header, re.MULTILINE))
    assert len(public) > 40 and "tilemoe_forward" in public
    for name, path in ours.items():
        lines = output("nm", "-D", "--defined-only", path).splitlines()
        exported = {line.split()[-1] for line in lines if " A " not in line}  # A: the version itself
        if name == KERNELS:  # with the package's own version: no other library has these
            runtime = {symbol for symbol in exported if symbol.startswith("tilemoe_runtime_")}
            assert len(runtime) == 3
            assert exported - runtime == {f"{symbol}@@tilemoe" for symbol in public}
        elif name.startswith("libtilemoe_jax"):
            assert exported and all(symbol.startswith("tilemoe_jax_") for symbol in exported), name
        else:
            assert not exported, name


def test_takes_the_kernels_from_the_package_alone(ours):
    for name in set(CUDA) & set(ours) - {KERNELS}:
        undefined = output("nm", "-D", "--undefined-only", ours[name])
        called = re.findall(r" U (tilemoe_\S+)", undefined)
        assert "tilemoe_forward@tilemoe" in called
        assert all(symbol.endswith("@tilemoe") for symbol in called), name


def test_links_no_python(libraries):
    for path in libraries.values():
        assert not re.search(r" _?Py[A-Z_]", output("nm", "-D", path))


def test_is_stripped(libraries):
    for path in libraries.values():
        assert not re.search(r"\.symtab|\.debug_", output("readelf", "-SW", path))


def test_needs_only_torch_and_the_system(libraries):
    for path in libraries.values():
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", path)))
        assert needed - SYSTEM - TORCH <= set(libraries)
        if path.name.startswith(("libtilemoe_jax", KERNELS)):
            assert needed - SYSTEM - set(libraries) <= {"libgomp.so.1"}, "JAX is used without torch"


def test_the_cuda_library_has_no_cpu_backend(ours):
    if KERNELS not in ours:
        assert "+cpu" in WHEEL.name
        return
    for name, path in ours.items():
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", path))
        of_the_cpu = any(one.startswith(("libdnnl", "libhwy", "libgomp")) for one in needed)
        assert of_the_cpu == (name not in CUDA), name
        assert (KERNELS in needed) == (name in CUDA and name != KERNELS), name


def test_needs_no_newer_system_than_its_tag_says(libraries):
    for name, path in libraries.items():
        needs = re.findall(r" Name: ([A-Z]+)_([\d.]+) ", output("readelf", "-VW", path))
        assert needs, name
        for library, version in needs:
            if library in NEWEST:
                assert tuple(map(int, version.split("."))) <= NEWEST[library], (name, library, version)


def test_looks_for_libraries_in_the_wheel_alone(libraries):
    for name, path in libraries.items():
        found = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", output("readelf", "-dW", path))
        assert set(":".join(found).split(":")) <= {"", "$ORIGIN", "$ORIGIN/../../tilemoe.libs"}, name


def test_has_the_project_s_addresses_alone():
    assert importlib.metadata.metadata("tilemoe").get_all("Project-URL", []) == [
        f"{name}, {address}" for name, address in project_urls().items()
    ]


def test_carries_the_licenses(libraries):
    names = {Path(name).name for name in zipfile.ZipFile(WHEEL).namelist() if "/licenses/" in name}
    assert names == {"LICENSE", "libdnnl2.txt", "libhwy1.txt", "ocl-icd-libopencl1.txt"}
    of_xla = "/licenses/bindings/jax/vendored/xla/LICENSE"
    assert any(name.endswith(of_xla) for name in zipfile.ZipFile(WHEEL).namelist())
    bundled = {re.split(r"[-.]", name)[0] for name in libraries if not name.startswith("libtilemoe")}
    assert bundled == {"libdnnl", "libhwy", "libOpenCL"}


def test_says_its_commit():
    commit = zipfile.ZipFile(WHEEL).read("tilemoe/lib/commit.txt").decode()
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?\n", commit)


def test_contains_kernels_for_hopper(ours):
    if KERNELS not in ours:
        pytest.skip("a wheel for the CPU alone")
    found, nvcc = kernel_hash.kernels(ours[KERNELS])
    assert found[90].total() > 150 and re.fullmatch(r"\d+\.\d+\.\d+", nvcc)


def test_depends_on_nothing_but_its_extras():
    needed = importlib.metadata.requires("tilemoe")
    assert [one for one in needed if "extra ==" not in one] == []
    of_torch, of_jax, of_transformers = (
        [one.split(";")[0].strip() for one in needed if re.search(rf"extra == .{extra}\b", one)]
        for extra in ("torch", "jax", "transformers")
    )
    assert of_torch == ["torch>=2.10"] and of_jax == ["jax>=0.10.2"]
    assert of_transformers == ["tilemoe[torch]", "transformers>=5.17", "accelerate"]


def test_is_what_is_imported():
    origin = Path(importlib.util.find_spec("tilemoe").origin)
    assert origin.parent.parent == Path(sysconfig.get_path("platlib"))
    assert f"tilemoe-{importlib.metadata.version('tilemoe')}-" in WHEEL.name


def test_has_the_command(tmp_path):
    """By `python -m` and by its script, from the wheel and without a GPU."""
    script = Path(sysconfig.get_path("scripts")) / "tilemoe"
    version = importlib.metadata.version("tilemoe")
    kept = {k: v for k, v in os.environ.items() if k not in ("TILEMOE_LIBRARY_DIR", "PYTHONPATH")}
    environment = kept | {"CUDA_VISIBLE_DEVICES": ""}
    for command in ([sys.executable, "-m", "tilemoe"], [script]):
        run = lambda *words: subprocess.run(  # noqa: E731
            [*command, *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        info = run("info", "--json")
        assert info.returncode == 0, info.stderr
        found = json.loads(info.stdout)
        assert found["version"] == version and found["backends"][0]["available"]
        assert Path(found["libraries"]) == Path(sysconfig.get_path("platlib")) / "tilemoe" / "lib"
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", found["commit"])
        assert run("chek").returncode == 2
    check = run("check", "smallest", "--device", "cpu")  # by the script
    assert check.returncode == 0, check.stdout + check.stderr
    assert "3 cases, 48 tensors, 0 failures" in check.stdout
    assert run("doctor", "--device", "cuda").returncode == 1
