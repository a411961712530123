"""The example that is studied: importing this makes its modules those of any program here."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]  # of the repository
RESULTS = ROOT / "benchmarks" / "results"

sys.path.append(str(FOLDER))
