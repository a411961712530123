"""Compare the layer with other implementations: `python -m tilemoe bench`.

Only the TileMoE peers import tilemoe, so worker.py runs in a Python without it.
"""


def run(argv):
    """Run the command line `argv`.

    Args:
        argv: Arguments of the command.

    Returns:
        The exit status: 0 done, 1 the work failed, 2 wrong usage.
    """
    from .cli import run

    return run(argv)
