"""Facts of a GPU in a results file."""

import os
import subprocess
import sys


def each(script, *query):
    """Return nvidia-smi's values by name for each GPU of CUDA_VISIBLE_DEVICES.

    End the program if nvidia-smi fails.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={named}"] if named else []
    try:
        lines = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader", *chosen],
            capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    if not lines:
        sys.exit(f"{script}: error: nvidia-smi found no GPU; this script needs one")
    return [dict(zip(query, line.split(", "))) for line in lines]


def facts(script, *query):
    """Return the values of the first GPU."""
    return each(script, *query)[0]
