"""Compare the time and the memory of the layer with other implementations.

Each round runs every peer once, one after another, with cold caches; numbers are medians and
quartiles over the rounds, ratios are those of the rounds' ratios. A peer that is not installed,
fails or does not compute the layer is skipped with the reason.
"""

import argparse
import pathlib
import signal
import sys
import threading
from dataclasses import fields, replace

import torch

from .._command.errors import DONE, FAILED, WRONG_USAGE, Failed, WrongUsage
from . import huggingface_config, machine, records, report, session
from .measure import PASSES, LeftOut
from .peers import RECIPES, TileMoE, all_peers, arch_variables
from .problem import ACTIVATIONS, CASES, DTYPES, SHAPE, Case

DEFAULT_LAYER = {"cpu": "cpu-t512", "cuda": "olmoe"}
DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}  # of --config
ROUNDINGS = ("nearest", "up", "down", "balanced", "stochastic")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise WrongUsage(f"bench: {message}")


def _parser():
    parser = _Parser(
        prog="tilemoe bench", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument_group("what to measure").add_argument
    add("layers", nargs="*", metavar="LAYER", help="Layers of --list; default: one for the device")
    add("--list", action="store_true", help="Print the layers and the peers")
    add("--shape", nargs=5, type=int, metavar=tuple(SHAPE), help="Layer by its sizes")
    add("--config", metavar="FILE", help="Layer of a Hugging Face model: its config.json")
    add(
        "--tokens",
        nargs="+",
        type=int,
        metavar="T",
        help="Token counts instead of the layers' T, one case each",
    )
    add(
        "--pass",
        dest="passes",
        choices=PASSES,
        help="Passes; default: both; inference: no gradients",
    )
    add(
        "--graph",
        action="store_true",
        help="Forward without gradients in a CUDA graph, with cold weights, for small T",
    )
    add("--device", choices=["cpu", "cuda"], help="Device; default: cuda if torch finds a GPU")
    add("--dtype", choices=DTYPES, help="Data type; default: float32 on a CPU, bfloat16 on a GPU")
    add("--activation", choices=ACTIVATIONS)
    add("--zipf", action="store_true", help="Choose experts by popularity 1/(e + 1)")
    add("--biases", action="store_true", help="With b1 and b2, TileMoE only")
    add("--frozen", action="store_true", help="No gradients of the router and of weights")
    add(
        "--lora-rank",
        type=int,
        default=0,
        metavar="R",
        help="Frozen weights with low-rank adapters of W1 and W2, in float32",
    )
    add("--rounding", choices=ROUNDINGS, help="Token rounding, TileMoE only")
    add = parser.add_argument_group("options of TileMoE").add_argument
    add(
        "--recipe",
        nargs="+",
        choices=RECIPES,
        default=[],
        help="Compare with the layer computed in FP8, its weights quantised before",
    )
    add("--arch", metavar="ARCH", help="Arch of the kernels: sm80, sm90, ...")
    add(
        "--overwrite-H",
        action="store_true",
        help="Overwrite saved activations in the backward pass (lower peak memory)",
    )
    add(
        "--column-blocks",
        type=int,
        metavar="N",
        help="Compute expert outputs in N column blocks: less memory, slightly slower",
    )
    add(
        "--weight-blocks",
        type=int,
        metavar="N",
        help="Dequantise quantised weights in N blocks of experts",
    )
    add = parser.add_argument_group("peers").add_argument
    add(
        "--against", nargs="+", metavar="PEER", help="Peers to run, or none; default: all installed"
    )
    add("--python", nargs="+", default=[], metavar="PEER=PYTHON", help="Another Python for a peer")
    add(
        "--packages",
        nargs="+",
        default=[],
        metavar="PEER=DIR",
        help="Folder of packages for a peer (pip install --target), before all others",
    )
    add("--cache", type=pathlib.Path, metavar="DIR", help="Folder for the peers' compiled kernels")
    add(
        "--may-leave-out",
        action="store_true",
        help="Exit with 0 if a peer of --against cannot compute a layer",
    )
    add(
        "--compile-only",
        action="store_true",
        help="Compile the peers of --against, several cases at once; measure nothing",
    )
    add = parser.add_argument_group("how to measure").add_argument
    add("--rounds", type=int, default=15, help="default: 15")
    add("--timeout", type=float, default=900.0, metavar="S", help="Seconds for one step of a peer")
    add("--threads", type=int, default=0, help="CPU threads; default: torch's number")
    add = parser.add_argument_group("what to print").add_argument
    add("--kernels", action="store_true", help="On a GPU, the profile by kernel")
    add("--host", action="store_true", help="Host time per call, warm and of the first call")
    add("--json", type=pathlib.Path, metavar="FILE", help="Write a results file of JSON lines")
    return parser


def _device(args):
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Failed("--device cuda: torch finds no GPU (torch.cuda.is_available() is False)")
    if device == "cpu":
        for option in ("graph", "kernels", "arch"):
            if getattr(args, option):
                raise WrongUsage(f"--{option} requires a GPU, got --device cpu")
    return device


def _cases(args, device):
    if unknown := [name for name in args.layers if name not in CASES]:
        raise WrongUsage(f"layer must be one of {', '.join(CASES)}, got {unknown[0]}")
    dtype = "float32" if device == "cpu" else "bfloat16"
    try:
        cases = [CASES[name] for name in args.layers]
        if args.shape:
            cases.append(Case("-".join(f"{l}{s}" for l, s in zip(SHAPE, args.shape)), *args.shape))
        if args.config:
            sizes, activation, model, note = huggingface_config.read(args.config)
            if note:
                _say(note)
            T = DEFAULT_TOKENS[device]
            name = f"{model}-t{T}" if args.tokens is None else model
            cases.append(Case(name, T, **sizes, activation=activation))
        if device == "cpu" and not args.tokens and any(case.device == "cuda" for case in cases):
            _say("warning: layers of this size need minutes per round on a CPU; --tokens sets T")
        cases = cases or [CASES[DEFAULT_LAYER[device]]]
        if args.tokens:
            cases = [replace(c, name=f"{c.name}-t{T}", T=T) for c in cases for T in args.tokens]
        changes = {"device": device, "dtype": args.dtype or dtype, "zipf": args.zipf,
                   "biases": args.biases, "rounding": args.rounding,
                   "frozen": args.frozen or args.lora_rank != 0,
                   "lora_rank": args.lora_rank}  # fmt: skip
        changes |= {"activation": args.activation} if args.activation else {}
        return [replace(case, **changes) for case in cases]
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _by_peer(option, words, known):
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise WrongUsage(
                f"{option} must be PEER=... with PEER one of {', '.join(known)}, got {word}"
            )
        found[name] = value
    return found


def _peers(args):
    """Return the classes, TileMoE first, and the places of peers in another Python or folder."""
    known = all_peers()
    wanted = args.against
    if wanted is None:
        wanted = [name for name, peer in known.items() if not peer.only_if_named]
        wanted = [] if args.recipe else wanted
    elif wanted == ["none"]:
        wanted = []
    if unknown := [name for name in wanted if name not in known]:
        raise WrongUsage(f"--against must be none or some of {', '.join(known)}, got {unknown[0]}")
    pythons = _by_peer("--python", args.python, known)
    packages = _by_peer("--packages", args.packages, known)
    for name, folder in packages.items():
        if not pathlib.Path(folder).is_dir():
            raise WrongUsage(f"no folder found at {folder} (--packages {name})")
    places = {name: session.Place(pythons.get(name, sys.executable),
                                  pathlib.Path(packages[name]) if name in packages else None)
              for name in {**pythons, **packages}}  # fmt: skip
    wanted = [*(RECIPES[recipe].name for recipe in args.recipe), *wanted]
    return [known[name] for name in dict.fromkeys([TileMoE.name, *wanted])], places


def _list():
    for case in CASES.values():
        shape = " ".join(f"{letter}={size}" for letter, size in case.shape.items())
        print(f"{case.name:18} {shape}, {case.dtype}, {case.device}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = CASES[DEFAULT_LAYER[device]]
    for name, peer in all_peers().items():
        print(f"{name:26} {peer.missing(case) or 'available'}")


def _check_json(path):
    """Check, before minutes of work, that the file can be written and is a results file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            records.read(path)
        unfinished = path.with_name(path.name + ".part")
        unfinished.touch()
        unfinished.unlink()
    except ValueError as error:
        raise WrongUsage(f"--json {path}: expected a new file or a results file: {error}") from None
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}") from None


def _say(line):
    print(f"  {line}", file=sys.stderr, flush=True)


def _run(args):
    if args.list:
        return _list()
    for option, minimum in (("rounds", 1), ("timeout", 1), ("threads", 0)):
        if getattr(args, option) < minimum:
            raise WrongUsage(f"--{option} must be >= {minimum}, got {getattr(args, option):g}")
    if args.graph and args.passes not in (None, "inference"):
        raise WrongUsage(f"--graph requires --pass inference, got {args.passes}")
    if args.graph and args.host:
        raise WrongUsage(
            "--host is not supported with --graph: a CUDA graph has no host time per call"
        )
    device = _device(args)
    cases, (peers, places) = _cases(args, device), _peers(args)
    options = {"overwrite_H": True} if args.overwrite_H else {}
    options |= {"column_blocks": args.column_blocks} if args.column_blocks is not None else {}
    options |= {"weight_blocks": args.weight_blocks} if args.weight_blocks is not None else {}
    same = {field.name for field in fields(session.Settings)} - {"passes", "places", "options"}
    settings = session.Settings(
        passes="inference" if args.graph else args.passes or "both", places=places, options=options,
        variables=arch_variables(args.arch) if args.arch else {},
        **{name: getattr(args, name) for name in same - {"variables"}},
    )  # fmt: skip
    if args.compile_only:
        if not args.cache:
            raise WrongUsage("--compile-only requires --cache DIR for the compiled kernels")
        return session.compile_ahead(cases, peers[1:], settings, _say)
    if args.json:
        _check_json(args.json)
    if warning := machine.load_warning():
        _say(warning)
    measurements, failed = [], []
    named = [] if args.may_leave_out else args.against or []
    for case in cases:
        try:
            result = session.run(case, peers, settings, say=_say)
        except LeftOut as reason:
            failed.append(f"{case.name}: {reason}")
            _say(f"not measured: {failed[-1]}")
            continue
        print(report.of(result), end="\n\n" if case is not cases[-1] else "\n", flush=True)
        measurements += result.measurements
        failed += [f"{case.name}: {peer}: {why}" for peer, why in result.left_out.items()
                   if peer in named]  # fmt: skip
        if args.json:  # after each case, for an interrupted run
            records.write(args.json, measurements)
    if args.json and measurements:
        print(f"written to {args.json}")
    if failed:
        raise Failed("not measured: " + "; ".join(failed))
    return None


def run(argv):
    """Run the command line, and return the exit status.

    Args:
        argv: Arguments of the command.
    """
    before = signal.getsignal(signal.SIGTERM)
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread:  # SIGTERM also ends the workers
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        _run(_parser().parse_intermixed_args(argv))
    except WrongUsage as error:
        print(f"tilemoe: error: {error}", file=sys.stderr)
        return WRONG_USAGE
    except Failed as error:
        print(f"tilemoe: error: {error}", file=sys.stderr)
        return FAILED
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before)
    return DONE
