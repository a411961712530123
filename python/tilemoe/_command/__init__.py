"""Run the command `tilemoe` (`python -m tilemoe`): info, doctor, check and bench.

Options and exit statuses are those of the C++ command line (apps/tilemoe). `info` and `doctor` run
without torch and without the operators, and report what is missing.
"""

import argparse
import difflib
import os
import sys

from . import check, doctor, info
from .errors import DONE, FAILED, WRONG_USAGE, Failed, WrongUsage
from .installation import version

EXIT_STATUS = (
    "Exit status: 0 done; 1 the work failed; 2 wrong usage; 128 and the number of the signal that "
    "ended it: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 141 closed pipe."
)
COMMANDS = {
    "info": (info, "Print versions, libraries and usable devices"),
    "doctor": (doctor, "Check the library on this machine's GPU, or report what is missing"),
    "check": (check, "Compare the layer with a float64 evaluation, tensor by tensor"),
    "bench": (None, "Compare the time of the layer with other implementations"),
}
OF_CPP = ("digest", "generate", "plot", "train")
_INTERRUPTED, _CLOSED_PIPE = 130, 141


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise WrongUsage(message)


def _parser():
    parser = _Parser(
        prog="tilemoe",
        description="TileMoE: the Mixture-of-Experts layer, forward and backward.",
        epilog=EXIT_STATUS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tilemoe {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, (module, summary) in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=summary, description=f"{summary}.", allow_abbrev=False
        )
        if module is not None:
            module.add_options(parsers[name])
    return parser, parsers


def _complaint(kind, word, known, place):
    nearest = difflib.get_close_matches(word, known, n=1)
    rest = f"did you mean {nearest[0]}?" if nearest else f"`{place} --help` lists the {kind}s"
    return f"unknown {kind} {word}; {rest}"


def _run(words):
    parser, parsers = _parser()
    name = words[0] if words else None
    if name is None:
        parser.print_help(sys.stderr)
        raise WrongUsage("a command is required; `tilemoe --help` lists the commands")
    if not name.startswith("-") and name not in COMMANDS:
        if name in OF_CPP:
            raise WrongUsage(
                f"{name} is only a command of the C++ program (apps/tilemoe/README.md)"
            )
        raise WrongUsage(_complaint("command", name, COMMANDS, "tilemoe"))
    if name == "bench":
        return _bench(words[1:])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        word = unknown[0].split("=")[0]
        of = parsers.get(args.command, parser)
        place = of.prog
        if word.startswith("-"):
            raise WrongUsage(_complaint("option", word, of._option_string_actions, place))
        raise WrongUsage(_complaint("argument", word, (), place))
    if args.command is None:
        raise WrongUsage("a command is required; `tilemoe --help` lists the commands")
    return COMMANDS[args.command][0].run(args)


def _bench(words):
    try:
        from .. import bench

        return bench.run(words)
    except ImportError as error:
        raise Failed(f"{error}; `tilemoe doctor` reports what is missing") from None


def _fail(status, error):
    print(f"tilemoe: error: {error}", file=sys.stderr)
    return status


def _with_output_written(status):
    """Flush standard output, which may fail if the disk is full."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _cannot_write(error)
    return status


def _cannot_write(error):
    with open(os.devnull, "w") as nothing:  # otherwise Python tries again when it exits
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _CLOSED_PIPE
    return _fail(FAILED, f"cannot write the output: {error.strerror}")


def main(words=None):
    """Run the command of `words`, else of the command line.

    Args:
        words: Arguments of the command.

    Returns:
        The exit status: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted.
    """
    words = sys.argv[1:] if words is None else words
    try:
        status = _run(words)
    except WrongUsage as error:
        return _fail(WRONG_USAGE, error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as error:  # --help and --version of argparse
        status = error.code or DONE
    except OSError as error:
        if error.filename is None:  # standard output has no name
            return _cannot_write(error)
        return _fail(FAILED, error)
    except (Failed, RuntimeError) as error:
        return _fail(FAILED, error)
    return _with_output_written(status)
