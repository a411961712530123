"""What a results file says of the GPU it is from."""

import subprocess
import sys


def facts(script, *query):
    """nvidia-smi's answers for the first GPU by name; ends the program where there is none."""
    try:
        answers = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"],
            capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        sys.exit(f"{script}: error: no GPU answers here (nvidia-smi); run this where there is one")
    return dict(zip(query, answers.split(", ")))
