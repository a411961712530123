"""Compare the layer with other implementations of it: `python -m tilemoe bench`, docs/pytorch.md.

Only the peers that are TileMoE import tilemoe, so worker.py runs in a Python without it."""


def run(argv):
    """Run the command line `argv`.

    Returns:
        The exit status: 0 done, 1 the work failed, 2 wrong usage.
    """
    from .cli import run

    return run(argv)
