"""Run the command with `python -m tilemoe`, like the console script `tilemoe`."""

import sys

from ._command import main

if __name__ == "__main__":
    sys.exit(main())
