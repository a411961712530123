"""The command line: its parser, older names of options, and its numbers: what is out of range, or
no number at all, is refused by name."""

import argparse
import math
import re
import sys


class Parser(argparse.ArgumentParser):
    """Options in full alone, and an error in one line."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


class OlderName(argparse.Action):
    """For `action=` of argparse: the older name of the option of `dest`. Works with a warning, and
    the help does not list it."""

    def __init__(self, **given):
        super().__init__(**{**given, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser, namespace, value, option_string=None):
        newer = "--" + self.dest.replace("_", "-")
        warning = f"{parser.prog}: warning: {option_string} is the older name of {newer}"
        print(warning, file=sys.stderr)
        setattr(namespace, self.dest, value)


def whole(minimum, maximum=math.inf):
    """For `type=` of argparse: an int in [minimum, maximum]."""

    def parsed(text):
        if not re.fullmatch(r"[+-]?[0-9]+", text) or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number {_range(minimum, maximum, 'of at least')}"
            )
        return int(text)

    return parsed


def real(minimum, maximum=math.inf, above=False):
    """For `type=` of argparse: a finite float in [minimum, maximum), or in (minimum, maximum) with
    `above`."""

    def parsed(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        in_range = minimum < value < maximum if above else minimum <= value < maximum
        if not (math.isfinite(value) and in_range):
            expected = _range(minimum, maximum, "above" if above else "of at least", "and below")
            raise argparse.ArgumentTypeError(f"{text!r} is no number {expected}")
        return value

    return parsed


def _range(minimum, maximum, lower, upper="and at most"):
    return f"{lower} {minimum}" + (f" {upper} {maximum}" if maximum < math.inf else "")
