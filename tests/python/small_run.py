"""A training that takes a second, for tests that need a run's folder or many of them."""

import os
import random
import subprocess

import kill_resume

TILEMOE = os.environ["TILEMOE"]
SIZES = ["--layers", "1", "--width", "48", "--experts", "8", "--top-k", "2", "--expert-width", "32",
         "--heads", "3", "--head-width", "16", "--batch", "2", "--length", "32"]
STEPS = 30


def tilemoe(*arguments, **options):
    """The finished process; what it wrote is text unless `text` says otherwise."""
    return subprocess.run([TILEMOE, *arguments], capture_output=True, timeout=300,
                          **{"text": True, **options})


def make(folder, *options):
    """Trains in FOLDER/run on FOLDER/text.txt; returns both paths."""
    text, run = os.path.join(folder, "text.txt"), os.path.join(folder, "run")
    kill_resume.make_text(text, random.Random(1))
    result = tilemoe("train", "--text", text, "--out", run, "--steps", str(STEPS), "--save-every", "10",
                     *SIZES, *options)
    assert result.returncode == 0, result.stderr
    return text, run


def contents(folder):
    """Every file below a folder, by its name: what it holds, and when it was written."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = (file.read(), os.stat(path).st_mtime_ns)
    return found
