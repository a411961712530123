"""The parts of the results files: what measures them, and which sources they depend on.

A part is a list of items (stages.py). The lines of an item have the item's name and a hash of the
sources in their values, `item` and `sources`: an item whose line has the hash of the present
sources is current, and is not measured again.
"""

import dataclasses
import hashlib
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import sys
import sysconfig
import tokenize
from typing import Callable

import several_gpus
import stages
from several_gpus import EXAMPLE
from stages import CONFIGS, ROOT, Machine, records

sys.path.append(str(EXAMPLE))
import paired  # noqa: E402

KERNELS = ("include/**/*.h", "include/**/*.inc", "src/**/*.h", "src/**/*.cpp", "src/**/*.cu",
           "src/**/*.inc")
NOT_ON_GPUS = ("src/cpu/",)
TORCH = (*KERNELS, "bindings/torch/*.cpp", "bindings/torch/*.h", "bindings/torch/*.inc",
         "python/tilemoe/*.py")
BENCH = (*TORCH, "python/tilemoe/bench/*.py", "python/tilemoe/bench/*.inc")
STEPS = (*KERNELS, "benchmarks/kernels/*")
RANKS = (*BENCH, "python/tilemoe/distributed/*.py", "benchmarks/expert_parallel.py")
TRAINING = (*TORCH, "examples/pretrain/*.py")
RECIPES = (*TRAINING, "examples/pretrain/recipes.json")
JAX = (*KERNELS, "bindings/jax/*.cpp", "bindings/jax/*.h", "python/tilemoe/jax/*.py")
TESTS = (*KERNELS, "tests/*.h", "tests/cuda/*")
TORCH_TESTS = (*RANKS, "tests/torch/*.py")
# The programs next to the package's tests, and the test that one of them imports.
WORKERS = (*TORCH_TESTS, "!tests/torch/*_test.py", "tests/torch/peak_memory_test.py")
RANK_TESTS = (*WORKERS, "scripts/gpu/pretrain_two_gpus.py", "examples/pretrain/*.py")

README_LAYERS = ["qwen3-235b", "gpt-oss-20b", "30b-n256", "olmoe", "qwen3-next", "kimi-linear"]
OTHER_LAYERS = ["7b-n256", "7b-n1024", "wide", "few-rows", "off-tiles"]
PEERS = ["sonic-moe", "torch-grouped_mm-compiled", "torch-grouped_mm", "scattermoe"]
ROUNDS = "11"
# Sizes off the tiles, which not every library supports: the line of TileMoE then has the reason.
MAY_BE_LEFT_OUT = ["off-tiles"]
ARCH_LAYERS = ["7b-n256", "30b-n256", "olmoe", "qwen3-235b", "gpt-oss-20b", "few-rows"]
CODES_TOKENS = [1, 16, 64, 256, 512, 1024, 2048, 4096]
COLUMN_BLOCKS = [1, 2, 3, 4, 6, 8]
MEMORY_WAYS = ["tilemoe-keeps-h", "tilemoe-small-peak", "torch-grouped_mm"]
# (experts, recomputation, sequences) of trainings on one GPU. The whole 7B model fits 120 GB or
# more; below, as many layers as fit with every implementation. sonic-moe is last: the first time it
# tunes for minutes, and what it has tuned stays in the cache for the next call.
OTHER_TRAININGS = [("scattermoe", "blocks", 16), ("grouped_mm", "blocks", 16),
                   ("sonic-moe", "half", 8)]
TRAININGS = {True: [("tilemoe", "none", 7), *OTHER_TRAININGS],
             False: [("tilemoe", "none", 8), *OTHER_TRAININGS]}


# Lines without an item stay when a part is measured again: examples/pretrain/results.md quotes them.
KEPT = r"(?!)"


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    file: str  # in benchmarks/results, without the ending
    seconds: int  # expected, of one call
    sources: tuple  # patterns of files
    items: Callable  # machine, folder -> items
    owns: str  # a regular expression: names of the file's lines that this part writes
    lines: Callable = lambda one: [one]  # measurement of a program -> lines of the file
    gpus: int = 1
    keeps_status: bool = False  # True: an item's status is a line, of tests for example
    calls: int = 1  # of measure.py, to measure all items on one GPU
    spreads: bool = False  # True: the items run at a time, each on a GPU of its own


# ---------------------------------------------------------------- sources


def without_comments(name, text):
    """Return a source without comments, docstrings, empty lines and indentation."""
    if name.endswith(".py"):
        text = _without_python_comments(text)
    else:
        text = re.sub(r"//[^\n]*", "", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def _without_python_comments(text):
    lines, at_start = text.splitlines(keepends=True), True
    cuts = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and at_start and token.string[0] not in "fF"
        if token.type == tokenize.COMMENT or docstring:
            cuts.append((token.start, token.end))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            at_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for (row, column), (last_row, last_column) in reversed(cuts):
        rest = lines[last_row - 1][last_column:]
        lines[row - 1 : last_row] = [lines[row - 1][:column] + rest]
    return "".join(lines)


def matching(patterns, root=ROOT):
    """Return the files that match the patterns; "!pattern" removes files of earlier patterns."""
    files = set()
    for pattern in patterns:
        found = {path for path in root.glob(pattern.removeprefix("!")) if path.is_file()}
        files = files - found if pattern.startswith("!") else files | found
    return files


def digest(patterns, root=ROOT):
    """Return a hash of the files that match the patterns; comments do not count."""
    named = {path.relative_to(root).as_posix(): path for path in matching(patterns, root)}
    sha = hashlib.sha256()
    for name, path in sorted(named.items()):
        if not name.startswith(NOT_ON_GPUS):
            sha.update(f"{name}\n{without_comments(name, path.read_text())}\n".encode())
    return sha.hexdigest()[:10]


# ---------------------------------------------------------------- items


def peer_folders(machine, item, *peers, of="sonic-moe"):
    """Return --packages of the peers, or set the item's reason why it cannot run.

    of: the folder that has sonic-moe and a quack.
    """
    places = {"sonic-moe": of, "scattermoe": "scattermoe", "scattermoe-sm80": "scattermoe"}
    words = []
    for peer in peers:
        folder = machine.peers / places[peer] if getattr(machine, "peers", None) else None
        if folder is None or not folder.is_dir():
            item.missing = item.missing or f"--peers has no folder {places[peer]}"
        words.append(f"{peer}={folder}")
    item.command += ["--packages", *map(str, words)]


def cache(machine, folder, of):
    """Return the folder of compiled kernels: one for each quack, shared by the parts."""
    return (getattr(machine, "cache", None) or folder.parent) / f"cache-{of}"


def bench_item(machine, folder, name, words, against, limit_s=300, packages=(), of="sonic-moe"):
    file = folder / f"{name}.jsonl"
    item = machine.torch_item(
        name, ["-m", "tilemoe", "bench", *words, "--device", "cuda", "--against", *against,
               "--json", file], limit_s, lambda _: records.read(file))
    if packages:
        peer_folders(machine, item, *packages, of=of)
        item.command += ["--cache", cache(machine, folder, of)]
    return item


def compiled_first(machine, folder, layers, of):
    """Return items: one that compiles sonic-moe's kernels, several at a time, or none if it has.

    Only layers that are wanted are compiled.
    """
    place = cache(machine, folder, of)
    note = place / "compiled.txt"
    known = note.read_text().split() if note.exists() else []
    wanted = layers if machine.wanted is None else machine.wanted
    layers = [layer for layer in layers if layer in wanted and layer not in known]

    def report(output):
        found = re.findall(r"^ *(\S+): (sonic-moe compiled|skip sonic-moe)", output, re.M)
        if not any(said == "sonic-moe compiled" for _, said in found):
            raise ValueError("sonic-moe was compiled for no layer")
        note.write_text("\n".join([*known, *(layer for layer, _ in found)]))
        return {}

    item = machine.torch_item("compile", ["-m", "tilemoe", "bench", *layers, "--device", "cuda",
                                          "--against", "sonic-moe", "--compile-only"], 500, report)
    peer_folders(machine, item, "sonic-moe", of=of)
    item.command += ["--cache", place]
    return [item] if layers else []


def words_of(layer):
    return [layer, "--rounds", ROUNDS, *["--may-leave-out"] * (layer in MAY_BE_LEFT_OUT)]


def peers(layers):
    """Compare layers with all libraries; sonic-moe on the quack of the folder sonic-moe."""
    def items(machine, folder):
        return [*compiled_first(machine, folder, layers, "sonic-moe"),
                *(bench_item(machine, folder, layer, words_of(layer), PEERS,
                             packages=["sonic-moe", "scattermoe"]) for layer in layers)]

    return items


def release(machine, folder):
    """Compare with sonic-moe on the quack of its release, in the folder sonic-moe-release."""
    of, layers = "sonic-moe-release", README_LAYERS + OTHER_LAYERS
    return [*compiled_first(machine, folder, layers, of),
            *(bench_item(machine, folder, layer, words_of(layer), ["sonic-moe"],
                         packages=["sonic-moe"], of=of) for layer in layers)]


def of_release(one):
    return [renamed(one, one.name.replace("bench/", "release/", 1))]


def renamed(one, name, **values):
    return dataclasses.replace(one, name=name, values=one.values | values)


def rounding(machine, folder):
    """Compare token rounding with top-K."""
    def item(layer):
        file = folder / f"{layer}.jsonl"
        words = ["-m", "tilemoe.bench.rounding", layer, "--device", "cuda", "--rules", "top-k",
                 "nearest", "balanced", "--json", file]
        return machine.torch_item(layer, words, 60, lambda _: records.read(file))

    return [item(layer) for layer in ("7b-n256", "30b-n256", "qwen3-next")]


def training(machine, folder):
    """Train the 7B model on one GPU with each implementation of the experts."""
    whole = several_gpus.is_large(machine)
    corpus = folder / "corpus"

    def item(experts, recompute, batch):
        name = f"{experts}-{recompute}-{batch}"
        file = folder / f"{name}.jsonl"
        words = [EXAMPLE / "speed.py", "measure", "--data", corpus, "--out", file, "--config", "7B",
                 "--compile", "--micro-batches", str(batch), "--recompute", recompute, "--rounds",
                 "1", "--warmup-steps", "4", "--measured-steps", "8", "--profile", "1",
                 "--implementations", experts]
        words += [] if whole else ["--layers", str(several_gpus.SHORT)]
        limit_s = 500 if experts == "sonic-moe" else 150  # it may have to compile
        made = machine.torch_item(name, words, limit_s, lambda _: several_gpus.trained(file))
        if experts in ("sonic-moe", "scattermoe"):
            with_packages(machine, made, experts, cache(machine, folder, experts))
        return made

    return [*several_gpus.corpus_items(machine, corpus),
            *(item(*one) for one in TRAININGS[whole])]


def recipes(machine, folder):
    """Train with each recipe of the experts, in pairs of one seed.

    A training takes about 105 s on an H100, with FP8 110 s, and 140 s with grouped_mm, which is not
    compiled.
    The corpus is the source of Python and of torch: the same in all calls on machines that have the
    same versions, so that trainings of different calls are paired.
    """
    corpus, study = folder / "corpus", json.loads((EXAMPLE / "recipes.json").read_text())

    def item(run):
        file = folder / f"{run}.jsonl"
        words = [EXAMPLE / "recipes.py", "--data", corpus, "--out", file, "--runs", str(run)]
        made = machine.torch_item(str(run), words, 240, lambda _: several_gpus.trained(file))
        made.min_s = 110
        return made

    torch = importlib.util.find_spec("torch")
    text = [sysconfig.get_path("stdlib"), *([pathlib.Path(torch.origin).parent] if torch else [])]
    return [*several_gpus.corpus_items(machine, corpus, [*text, "--megabytes", "130"], 240),
            *map(item, paired.runs(study))]


def with_packages(machine, item, peer, compiled):
    """Add the folder of a peer's packages to the item's PYTHONPATH, and that of its kernels."""
    folder = machine.peers / peer if getattr(machine, "peers", None) else None
    if folder is None or not folder.is_dir():
        item.missing = item.missing or f"--peers has no folder {peer}"
        return
    deeper = [folder / "nvidia_cutlass_dsl" / name for name in ("python_packages", "dsl_packages")]
    path = ":".join(map(str, [folder, *(one for one in deeper if one.is_dir())]))
    at = next(i for i, word in enumerate(item.command) if str(word).startswith("PYTHONPATH="))
    item.command[at] = f"{item.command[at]}:{path}"
    item.command[at:at] = [f"QUACK_CACHE_DIR={compiled / 'quack'}",
                           f"CUTE_DSL_CACHE_DIR={compiled / 'cute'}", "QUACK_CACHE_AUTOTUNING=1",
                           f"QUACK_COMPILE_WORKERS={os.cpu_count()}"]


def decode(machine, folder):
    """Time small T in a CUDA graph with cold weights."""
    def item(layer):
        words = [layer, "--pass", "inference", "--graph", "--tokens", "1", "16", "64", "--kernels"]
        return bench_item(machine, folder, layer, words, ["torch-grouped_mm", "tilemoe-sm80"])

    return [item(layer) for layer in ("qwen3-235b", "7b-n256")]


def of_decode(one):
    _, layer, peer = one.name.split("/")
    layer, tokens = layer.rsplit("-t", 1)
    us = [1000 * ms for ms in one.values["forward_ms"]]
    return [renamed(one, f"decode/{layer}/T={tokens}/{peer}", forward_us=us)]


def memory(machine, folder):
    """Measure time and peak memory by options of the module."""
    options = lambda layer: bench_item(machine, folder, layer, [layer, "--rounds", ROUNDS],
                                       MEMORY_WAYS)
    blocks = lambda count: bench_item(
        machine, folder, f"blocks-{count}", ["7b-n256", "--overwrite-H", "--column-blocks",
                                             str(count), "--rounds", ROUNDS], ["none"], 60)
    return [*(options(layer) for layer in ("7b-n256", "7b-n1024", "olmoe", "qwen3-235b")),
            *(blocks(count) for count in COLUMN_BLOCKS)]


def of_memory(one):
    """Name the lines by the option: the layer's default is to overwrite H."""
    item, (_, layer, peer) = one.values["item"], one.name.split("/")
    if "/blocks-" in item:
        count = int(item.rsplit("-", 1)[1])
        return [renamed(one, f"memory-curve/{layer}/{count}", column_blocks=count)]
    named = {"tilemoe": "tilemoe-dh-over-h", "tilemoe-keeps-h": "tilemoe"}
    return [renamed(one, f"memory-options/{layer}/{named.get(peer, peer)}")]


def archs(machine, folder):
    """Compare sm90, sm80 and ScatterMoE with and without Hopper's instructions."""
    against = ["tilemoe-sm80", "scattermoe", "scattermoe-sm80"]
    return [bench_item(machine, folder, layer, [layer, "--rounds", ROUNDS], against,
                       packages=against[1:]) for layer in ARCH_LAYERS]


def of_archs(one):
    _, layer, peer = one.name.split("/")
    peer = "tilemoe-sm90" if peer == "tilemoe" else peer
    found = [renamed(one, f"archs-scattermoe/{layer}/{peer}")]
    return [renamed(one, f"archs/{layer}/{peer}"), *found] if "tilemoe" in peer else found


def kernels(machine, folder):
    """Time the steps of the layers from C++."""
    every = stages.kernels(machine, folder)
    return [one for one in every
            if one.arch is None and one.name not in ("routing", "gemm")
            and not one.name.startswith("sparse-")]


def routing(machine, folder):
    return [one for one in stages.kernels(machine, folder) if one.name == "routing"]


def codes(machine, folder):
    words = ["few-rows", "--codes", "--quantized", *stages.FORMATS, "--tokens",
             *map(str, CODES_TOKENS)]
    item = stages.timed(machine, folder, "codes", words, arch="sm80")
    item.missing = item.missing or ("sm80" not in machine.archs and "sm80 does not run") or None
    return [item]


def jax(machine, folder):
    return [one for one in stages.jax(machine, folder) if one.name.startswith(("time", "memory"))]


def in_order(stage):
    """Return the items of a stage of run.py as items of a part."""
    return lambda machine, folder: (stages.STAGES | several_gpus.STAGES)[stage](machine, folder)


def fp8(machine, folder):
    """Return the items of the stage that measure."""
    return [item for item in stages.fp8(machine, folder)
            if item.name in (*stages.FP8_LAYERS, "kernels")]


def tests(stage, seconds, sources=TESTS, gpus=1):
    return Part(stage, "gpu_tests", seconds, sources, in_order(stage), rf"^{stage}/", gpus=gpus,
                keeps_status=True)


HELPERS = ("compile", "corpus")  # items that measure nothing: they run before others that do

# The most useful first. Seconds: of runs on an H100, rounded up, those of peers on an H200, where
# sonic-moe tunes for a minute per layer; "compile" takes two to eight minutes.
PARTS = {part.name: part for part in (
    Part("peers", "peers", 450, BENCH, peers(README_LAYERS),
         rf"^bench/(?!({'|'.join(map(re.escape, OTHER_LAYERS))})/)", calls=2),
    Part("rounding", "rounding", 60, BENCH, rounding, r"^rounding-layer/"),
    Part("training", "pretrain", 500, TRAINING, training, KEPT),
    Part("kernels", "kernels", 160, STEPS, kernels, r"^kernels/"),
    Part("more-peers", "peers", 500, BENCH, peers(OTHER_LAYERS),
         rf"^bench/({'|'.join(map(re.escape, OTHER_LAYERS))})/"),
    Part("release", "peers", 400, BENCH, release, r"^release/", of_release),
    Part("adapters", "adapters", 280, BENCH, in_order("adapters"), r"^(bench|adapters)/"),
    Part("decode", "decode", 90, BENCH, decode, r"^decode/", of_decode),
    Part("routing", "routing", 20, STEPS, routing, r"^routing/"),
    Part("router", "router", 45, BENCH, in_order("router"), r"^router/"),
    Part("quantized", "quantized", 210, BENCH + STEPS, in_order("quantized"),
         r"^(bench|kernels|quantized)/"),
    Part("fp8", "fp8", 285, BENCH, fp8, r"^(bench|fp8-kernels)/"),
    Part("recipes", "recipes", 500, RECIPES, recipes, KEPT, calls=6, spreads=True),
    Part("memory", "memory", 210, BENCH, memory, r"^memory-", of_memory),
    Part("activations", "activations", 210, BENCH, in_order("activations"),
         r"^(bench|activations)/"),
    Part("jax", "jax", 150, JAX, jax, r"^jax/"),
    Part("archs", "archs", 240, BENCH, archs, r"^archs", of_archs),
    Part("codes", "codes", 40, STEPS, codes, r"^codes/"),
    Part("parallel", "expert_parallel", 250, RANKS, in_order("parallel"), r"^expert-parallel/",
         gpus=2),
    Part("fsdp", "pretrain", 240, TRAINING, in_order("fsdp"), KEPT, gpus=2),
    tests("ranks", 420, RANK_TESTS, gpus=2),
    tests("two-gpus", 180, (*RANK_TESTS, "tests/torch/cuda_two_devices_test.py", *TESTS), gpus=2),
    tests("test", 240), tests("torch", 400, TORCH_TESTS), tests("sizes", 120, WORKERS),
    tests("one-gpu-ranks", 130, WORKERS),
    tests("repeat", 60), tests("ptx", 60), tests("huge", 140),
    *(tests(f"sanitize-{i}", 240) for i in range(1, 5)),
)}  # fmt: skip


MEMORIES = (81559, 143771)  # MiB of an H100 and of an H200: some items depend on it


def supposed(part, gpus=None, mib=MEMORIES[0]):
    """Return a machine with all that a part needs, to list its items."""
    machine = Machine(ROOT / "build" / "absent")
    machine.archs, machine.gpus = ["sm90", "sm80"], [mib] * (gpus or part.gpus)
    return machine


def names_of(part, gpus=None, machine=None):
    """Return the names of the part's items on a machine, or for each size of a GPU's memory."""
    folder = ROOT / "build" / "absent"
    machines = [machine] if machine else [supposed(part, gpus, mib) for mib in MEMORIES]
    return [[item.name for item in part.items(one, folder)] for one in machines]


def named(words):
    """Return {part: items} for words `part` or `part/item`; without items, all of the part's.

    Raises:
        ValueError: A part does not exist.
    """
    wanted = {}
    for word in words:
        name, _, item = word.partition("/")
        if name not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {name!r}")
        wanted.setdefault(name, []).extend([item] if item else [])
    return wanted


def chosen(words, machine=None):
    """Return {name: part} for words as in named(), of the items that a machine has.

    Raises:
        ValueError: A part or an item does not exist.
    """
    return {name: only(PARTS[name], items, machine) if items else PARTS[name]
            for name, items in named(words).items()}


def only(part, items, machine=None):
    """Return the part with only these items, and the helpers that they need."""
    names = names_of(part, machine=machine)
    every = {name: None for of in names for name in of if name not in HELPERS}
    for item in items:
        if item not in every:
            raise ValueError(f"item of {part.name} must be one of {', '.join(every)}, got {item!r}")
    made = lambda machine, folder: [one for one in part.items(machine, folder)
                                    if one.name in (*items, *HELPERS)]
    seconds = math.ceil(part.seconds * part.calls * len(set(items)) / len(every))
    return dataclasses.replace(part, items=made, seconds=min(seconds, part.seconds), calls=1)
