"""Parse the command line: parser, older names of options, and numbers.

A number out of range, or a text that is not a number, is an error with the option's name.
"""

import argparse
import math
import re
import sys


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations of options, with errors in one line."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


class OlderName(argparse.Action):
    """Action of argparse for an older name of the option of `dest`.

    The option works with a warning, and the help does not list it.
    """

    def __init__(self, **given):
        super().__init__(**{**given, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser, namespace, value, option_string=None):
        newer = "--" + self.dest.replace("_", "-")
        warning = f"{parser.prog}: warning: {option_string} is the older name of {newer}"
        print(warning, file=sys.stderr)
        setattr(namespace, self.dest, value)


def whole(minimum, maximum=math.inf):
    """Return a type of argparse: an int in [minimum, maximum]."""

    def parsed(text):
        if not re.fullmatch(r"[+-]?[0-9]+", text) or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(
                f"expected an integer {_range(minimum, maximum)}, got {text!r}"
            )
        return int(text)

    return parsed


def real(minimum, maximum=math.inf, above=False):
    """Return a type of argparse: a finite float in [minimum, maximum).

    With `above`, the interval is (minimum, maximum).
    """

    def parsed(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        in_range = minimum < value < maximum if above else minimum <= value < maximum
        if not (math.isfinite(value) and in_range):
            expected = _range(minimum, maximum, "(" if above else "[", ")")
            raise argparse.ArgumentTypeError(f"expected a number {expected}, got {text!r}")
        return value

    return parsed


def _range(minimum, maximum, lower="[", upper="]"):
    if maximum < math.inf:
        return f"in {lower}{minimum}, {maximum}{upper}"
    return f"{'>=' if lower == '[' else '>'} {minimum}"
