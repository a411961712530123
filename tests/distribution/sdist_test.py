"""The source distribution as a file (TILEMOE_SDIST): what it has, and that CMake finds what it names.
`scripts/test_wheel.sh` builds and runs it."""

import email
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "cmake"))
from project_urls import project_urls  # noqa: E402

SDIST = Path(os.environ["TILEMOE_SDIST"])
# The sources of the package and its descriptions. Tests run in the repository.
PARTS = (
    "CMakeLists.txt", "bindings", "cmake", "include", "pyproject.toml", "python", "src", "verify",
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md",
)  # fmt: skip


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(SDIST) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def run(*command):
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_has_the_sources_and_nothing_else(unpacked):
    git = ("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    sources = {name for name in run(*git, "--", *PARTS).split("\0") if (ROOT / name).is_file()}
    assert len(sources) > 200
    found = {p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*") if p.is_file()}
    assert found == sources | {"PKG-INFO"}


def test_cmake_finds_what_it_names(unpacked, tmp_path):
    off = [f"-DTILEMOE_{part}=OFF" for part in ("BUILD_APPS", "BUILD_TESTS", "INSTALL")]
    run(
        "cmake", "-S", unpacked, "-B", tmp_path, "-G", "Ninja", "-DTILEMOE_TORCH=ON", *off,
        f"-DTILEMOE_TORCH_PYTHON={sys.executable}",
    )  # fmt: skip


def test_says_what_it_is(unpacked):
    metadata = email.message_from_string((unpacked / "PKG-INFO").read_text())
    assert SDIST.name == f"tilemoe-{metadata['Version']}.tar.gz"
    assert "+" not in metadata["Version"]  # it is for a build with CUDA and for one without
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "bindings/jax/vendored/xla/LICENSE"]
    assert metadata["Author"] in (ROOT / "CITATION.cff").read_text()
    urls = [f"{name}, {address}" for name, address in project_urls().items()]
    assert metadata.get_all("Project-URL", []) == urls
    assert not any(c.startswith("License ::") for c in metadata.get_all("Classifier"))
