"""Read the text of a corpus from the user's files, or from packages of the distribution.

Every source is a generator of documents, (name, bytes), in the same order on every machine. A file
larger than `largest` bytes gives one byte more than that, which shows its size: the rest is not
read.
"""

import gzip
import shutil
import subprocess
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Packages and their contents; --packages selects others. Together 1.1 GB of text.
PACKAGES = {
    "linux-source": "the Linux kernel: C, and its documentation in English",
    "dict-gcide": "a dictionary of English",
    "dict-wn": "WordNet, a thesaurus of English",
    "dict-foldoc": "a dictionary of computing",
}
SUFFIXES = {".c", ".h", ".s", ".rst", ".txt", ".py", ".pl", ".sh", ".dts", ".dtsi", ".yaml", ".md"}
NAMES = {"Kconfig", "Makefile"}
LARGEST = 1 << 18  # default maximum bytes of a document
PIECE = 1 << 16  # bytes of a dictionary per document
READS = 16  # of files, at a time


def contents(file, size, largest):
    """Read an opened file of `size` bytes; a read of N bytes allocates N bytes first."""
    return file.read() if size <= largest else file.read(largest + 1)


def read(path, largest):
    with path.open("rb") as file:
        return contents(file, path.stat().st_size, largest)


def files(paths, largest=LARGEST):
    """Yield files, and all files of folders. A cold disk is faster with several reads at a time."""
    with ThreadPoolExecutor(READS) as pool:
        for path in map(Path, paths):
            if not path.exists():
                raise ValueError(f"no file or folder found at {path}")
            inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            for first in range(0, len(inside), 4 * READS):
                some = inside[first : first + 4 * READS]
                read_ahead = pool.map(lambda file: read(file, largest), some)
                yield from zip(map(str, some), read_ahead)


def packages(names, largest, say=print):
    """Yield documents of Debian packages, which apt fetches into a temporary folder."""
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise ValueError(f"--packages requires {tool}; pass your own files on other systems")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for part in with_dependency(name):
                say(f"fetching {part}")
                run("apt-get", "download", part, cwd=folder)
            for archive in sorted(Path(folder).glob("*.deb")):
                say(f"reading {archive.name}")
                run("dpkg-deb", "-x", str(archive), folder, cwd=folder)
            root = Path(folder, "usr")
            for file in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
                yield from documents_of(name, file, largest)


def with_dependency(name):
    """Return the package on which linux-source, an empty package, depends."""
    listed = run("apt-cache", "depends", "--no-recommends", "--no-suggests", name)
    needed = [line.split()[-1] for line in listed.splitlines() if "Depends:" in line]
    return [name, *(part for part in needed if part.startswith(name + "-"))]


def documents_of(package, file, largest):
    if file.name.endswith((".tar.xz", ".tar.bz2", ".tar.gz")):
        with tarfile.open(file, "r|*") as archive:
            for member in archive:
                path = Path(member.name)
                if member.isfile() and (path.suffix.lower() in SUFFIXES or path.name in NAMES):
                    opened = archive.extractfile(member)
                    yield f"{package}/{member.name}", contents(opened, member.size, largest)
    elif file.name.endswith(".dict.dz"):
        with gzip.open(file) as lines:
            for number, piece in enumerate(iter(lambda: lines.readlines(PIECE), [])):
                yield f"{package}/{file.name}/{number}", b"".join(piece)
    elif file.suffix in SUFFIXES:
        yield f"{package}/{file.name}", read(file, largest)


def run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ValueError(f"{' '.join(command)} failed: {last}")
    return done.stdout
