"""The command line and the output that the small programs of the bench share."""

import argparse
import dataclasses
import json
import pathlib

import torch

from . import records


def parser_of(name, doc, rounds, layers=(), device=True, of_rounds=""):
    """Return the parser of a program's command line.

    Args:
        name: Module in tilemoe.bench.
        doc: Docstring of the module.
        rounds: Default of --rounds.
        layers: Names of layers, if the program measures the layers of its arguments.
        device: Whether the program has --device.
        of_rounds: Text of the help of --rounds before the default.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tilemoe.bench.{name}", description=doc, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    if layers:
        parser.add_argument(
            "layers", nargs="*", metavar="LAYER", help=f"Layers: {', '.join(layers)}"
        )
    if device:
        parser.add_argument(
            "--device", choices=["cpu", "cuda"], help="Device; default: cuda if torch finds a GPU"
        )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"{of_rounds}default: {rounds}"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="Write a results file")
    return parser


def arguments_of(parser, argv, layers=()):
    """Return the arguments, with known layers and a device.

    Args:
        parser: Parser of the command line.
        argv: Arguments of the command.
        layers: Names of layers.
    """
    args = parser.parse_args(argv)
    if unknown := [name for name in getattr(args, "layers", ()) if name not in layers]:
        parser.error(f"layer must be one of {', '.join(layers)}, got {unknown[0]}")
    if "device" in args and args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def report(measurements, file, prints=True):
    """Print measurements as they are made, and write them to a results file.

    Args:
        measurements: Iterable of `Measurement`.
        file: Results file, or None. It is written after each measurement, for an interrupted run.
        prints: Print each as JSON.
    """
    made = []
    for one in measurements:
        made.append(one)
        if prints:
            print(json.dumps(dataclasses.asdict(one)), flush=True)
        if file:
            records.write(file, made)
