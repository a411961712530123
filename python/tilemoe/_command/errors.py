"""Define the errors that end the command."""

DONE, FAILED, WRONG_USAGE = 0, 1, 2


class WrongUsage(Exception):
    """The command line is wrong: one sentence that names the option. Nothing was done."""


class Failed(Exception):
    """The work failed: one sentence."""
