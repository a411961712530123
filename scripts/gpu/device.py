"""Facts of a GPU in a results file."""

import os
import subprocess
import sys


def each(script, *query):
    """nvidia-smi's answers by name, for every GPU of CUDA_VISIBLE_DEVICES; ends the program if
    none answers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={named}"] if named else []
    try:
        lines = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader", *chosen],
            capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    if not lines:
        sys.exit(f"{script}: error: no GPU answers here (nvidia-smi); run this where one does")
    return [dict(zip(query, line.split(", "))) for line in lines]


def facts(script, *query):
    """Those for the first GPU."""
    return each(script, *query)[0]
