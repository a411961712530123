"""Wheels in a folder of their own, beside what this Python has."""

import hashlib
import pathlib
import shutil
import subprocess
import sys


def chosen(wheel, packages):
    """The wheel and, of a folder of wheels (or None), all."""
    return [pathlib.Path(wheel), *(sorted(packages.glob("*.whl")) if packages else [])]


def install(wheel, packages, folder):
    """Needs no network, and takes nothing that the wheels ask for."""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                    "--no-compile", "--disable-pip-version-check", "--target", folder,
                    *chosen(wheel, packages)], check=True)


def digest(wheel, packages):
    """Of their contents and names."""
    sha = hashlib.sha256()
    for path in chosen(wheel, packages):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:12]


def install_once(wheel, packages, folder):
    """Into a folder that has these wheels and nothing else, unless it has them already -> digest"""
    wanted, note = digest(wheel, packages), folder / "wheels.sha256"
    if not note.exists() or note.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        install(wheel, packages, folder)
        note.write_text(wanted)
    return wanted
