#!/usr/bin/env python3
"""Write docs/results.md and parts of README.md and docs/distributed.md from the results files.

  python3 benchmarks/results_page.py             # writes them
  python3 benchmarks/results_page.py --check     # status 1 if a page differs from the results

The parts are between the lines <!-- results --> and <!-- /results -->. README's row of Hopper GPUs
has the number of GPUs on which tests ran.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
DISTRIBUTED = ROOT / "docs" / "distributed.md"
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
import records  # noqa: E402
from layers import LAYERS  # noqa: E402

sys.path.append(str(ROOT / "examples" / "pretrain"))
import paired  # noqa: E402

SONIC, COMPILED, EAGER = "sonic-moe", "torch-grouped_mm-compiled", "torch-grouped_mm"
PEERS = {SONIC: "sonic-moe", COMPILED: "`grouped_mm`, compiled", EAGER: "`grouped_mm`, eager"}
SCATTER = {"scattermoe": "ScatterMoE"}
VS_PEERS = [f"vs {name}" for name in PEERS.values()]
MODELS = {"olmoe": "OLMoE", "gpt-oss-20b": "gpt-oss-20b", "qwen3-235b": "Qwen3-235B",
          "kimi-linear": "Kimi Linear", "qwen3-next": "Qwen3-Next"}  # fmt: skip
WAYS = {"own": "none, all experts on each GPU", "lossless": "all-gather, memory for every routing",
        "serial": "all-gather, 1 chunk",
        "serial-kept": "all-gather, 1 chunk, `keep_gathered`", "chunks-2": "all-gather, 2 chunks",
        "chunks-auto": "all-gather, `chunks=\"auto\"`", "pull": "pull",
        "pull-lossless": "pull, memory for every routing",
        "usual": "all-to-all, `grouped_mm`", "torchtitan": "torchtitan's all-to-all"}  # fmt: skip
NAMED = {"7b-n256-zipf": "7b-n256, Zipf load",
         "qwen3-235b-zipf": "qwen3-235b, Zipf load",
         "7b-n256-one-expert": "7b-n256, K = 1, all tokens choose one expert",
         "gpt-oss-20b-biases": "gpt-oss-20b, biases and clamp, weights as in transformers",
         "gpt-oss-20b-biases-alone": "gpt-oss-20b, biases and clamp"}  # fmt: skip
FORMATS = {"fp8": "FP8", "mxfp4": "MXFP4", "nf4": "NF4", "nf4_double": "NF4, double",
           "nvfp4": "NVFP4"}  # fmt: skip
SHOWN = ("sonic-moe", "quack-kernels", "torchtitan", "torch", "jax", "onednn", "nccl", "driver")
MIB, GIB = 2**20, 2**30
PASSES = ("forward", "backward")


class Results:
    """The measurements of a results file, by name."""

    def __init__(self, file):
        self.all = {one.name: one for one in records.read(RESULTS / f"{file}.jsonl")}

    def of(self, part):
        """Return {rest of the name: measurement} of the names that start with `part`."""
        start = part + "/"
        return {n.removeprefix(start): one for n, one in self.all.items() if n.startswith(start)}

    def table_of(self, part):
        """Return {layer: {peer: measurement}} of the names part/layer/peer."""
        found = {}
        for name, one in self.of(part).items():
            layer, peer = name.rsplit("/", 1)
            found.setdefault(layer, {})[peer] = one
        return found


def commits_of(lines):
    """Return "commit 0123456", or "commits ..." if the lines have several."""
    commits = sorted({one.commit[:7] for one in lines})
    return f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def measured(one, *others, shown=SHOWN):
    """Return "Measured on ..." with the devices, the commits and the versions of all lines."""
    versions = {}  # of each name, in the lines' order
    for each in (one, *others):
        for name, version in each.versions.items():
            versions.setdefault(name, {})[version] = None
    versions = {name: " and ".join(found) for name, found in versions.items()}
    said = [f"{name} {versions[name]}" for name in shown if name in versions]
    known, ours = versions.get("tilemoe"), commits_of((one, *others))
    ours = f"TileMoE {known} ({ours})" if known else f"TileMoE at {ours}"
    devices = dict.fromkeys(f"one {each.device}" if each.device.startswith("NVIDIA") else each.device
                            for each in (one, *others))  # fmt: skip
    return ", ".join([f"Measured on {' and '.join(devices)}", ours, *said])


def source(file, one, *others, note=""):
    """Return the line below a table: its conditions, as a link to the file has them."""
    rounds = dict.fromkeys(each.values["rounds"] for each in (one, *others) if "rounds" in each.values)
    rounds = f", {' or '.join(map(str, rounds))} rounds" if rounds else ""
    link = f"[`{file}.jsonl`](../benchmarks/results/{file}.jsonl)"
    return paragraph(f"{measured(one, *others)}{note}{rounds}: {link}.")


def table(header, rows):
    header = header.split(" | ") if isinstance(header, str) else header
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def paragraph(text):
    """Wrap a text to lines of at most 120 characters."""
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def section(title, text, *tables):
    return "\n\n".join([f"## {title}", *([paragraph(text)] if text else []), *tables])


def passes(one, digits=2):
    return " / ".join(f"{one.median(f'{way}_ms'):.{digits}f}" for way in PASSES)


def sizes():
    """List the layers that the other tables name."""
    shown = {name: LAYERS["cuda"][name]._asdict()
             for file in ("peers", "kernels", "router")
             for name in [one.split("/")[1] for one in Results(file).all]
             if name in LAYERS["cuda"]}  # fmt: skip
    shown["qwen3-30b"] = Results("adapters").all["bench/qwen3-30b/tilemoe"].values
    shown["CPU"] = next(iter(Results("cpu_layer").all.values())).values
    return section(
        "Sizes",
        "Tables without a column T use this T.",
        table("layer | tokens T | hidden size d | intermediate size n | experts E | "
              "experts per token K",
              [[name, *(of[letter] for letter in "TdnEK")] for name, of in shown.items()]),
    )  # fmt: skip


def layer_and_tokens(name, one):
    """Return two cells: the layer of a name such as qwen3-30b-512, and its T."""
    return [name.removesuffix(f"-{one.values['T']}"), one.values["T"]]


def peak(one):
    """Return the peak memory above weights, inputs and the output's gradient."""
    return one.values["peak_bytes"] - one.values["resident_bytes"]


def times_faster(ours, peer, quantity):
    return f"{peer.median(quantity) / ours.median(quantity):.2f}x"


def above_weights(one):
    return one.values["peak_bytes"] - one.values["resident_bytes"]


def less(ours, peer):
    return f"{100 * (1 - peak(ours) / peak(peer)):.0f} % less"


def quack(one):
    """Return the header of a column of sonic-moe, with the version of quack that it ran on."""
    return f"sonic-moe, quack {one.versions['quack-kernels']}"


def compared(found):
    """Return the lines of TileMoE and of sonic-moe, for the conditions of their comparison."""
    return [of[name] for name in ("tilemoe", SONIC) for of in found]


def layers():
    """Compare the layer from PyTorch with its peers."""
    results, rows, memory = Results("peers"), [], []
    found, release = results.table_of("bench"), results.table_of("release")
    peers = PEERS | SCATTER if any(SCATTER.keys() <= of.keys() for of in found.values()) else PEERS
    both = lambda ours, peer: " / ".join(times_faster(ours, peer, f"{way}_ms") for way in PASSES)
    newest = quack(next(iter(found.values()))[SONIC])
    for layer, of in found.items():
        ours, older = of["tilemoe"], release.get(layer)
        shown = [peer in of and (peer != SONIC or quack(of[peer]) == newest) for peer in peers]
        ratios = [both(ours, of[peer]) if there else "" for peer, there in zip(peers, shown)]
        if release:
            there = older and SONIC in older
            ratios.append(both(older["tilemoe"], older[SONIC]) if there else "")
        rows.append([layer, passes(ours), *ratios])
        cell = lambda peer, of=of: f"{peak(of[peer]) / MIB:.0f}" if peer in of else ""
        memory.append([layer, *map(cell, ("tilemoe", *peers)),
                       f"{of['tilemoe'].values['saved_bytes'] / MIB:.0f}"])  # fmt: skip
    vs = [f"vs {newest if peer == SONIC else name}" for peer, name in peers.items()]
    vs += [f"vs {quack(next(iter(release.values()))[SONIC])}"] if release else []
    return section(
        "Layers",
        "From PyTorch, router included.",
        table(["layer", "TileMoE, ms", *vs], rows),
        source("peers", *compared(found.values())),
        "Peak memory and TileMoE's saved memory, MiB:",
        table(["layer", "TileMoE", *peers.values(), "saved"], memory),
    )


def adapters():
    """Compare the layer with low-rank adapters with the frozen layer and with its peers."""
    found = Results("adapters").table_of("bench")
    rows = []
    for name, of in found.items():
        if name.endswith("-sm80"):
            continue
        ours, old = of["tilemoe"], found[f"{name}-sm80"]
        rows.append([*layer_and_tokens(name, ours), passes(ours),
                     times_faster(of["tilemoe-frozen"], ours, "total_ms"),
                     *(times_faster(ours, of[peer], "total_ms")
                       for peer in (COMPILED, "peft-grouped_mm", "peft-tilemoe")),
                     times_faster(old["tilemoe-frozen"], old["tilemoe"], "total_ms"),
                     f"{peak(ours) / MIB:.0f} ({peak(of['tilemoe-frozen']) / MIB:.0f})"])
    ours = found["qwen3-30b"]["tilemoe"]
    return section(
        "Low-rank adapters",
        f"Frozen weights, float32 adapters of rank {ours.values['lora_rank']} on W1 and W2. "
        "\"/ frozen\": the time divided by that without adapters.",
        table("layer | T | ms | / frozen | vs `grouped_mm`, compiled | vs PEFT, `grouped_mm` | "
              "vs PEFT, `tilemoe.peft` | / frozen, `sm80` | peak, MiB (frozen)", rows),
        source("adapters", ours),
    )  # fmt: skip


def activations():
    """Compare a layer of gathered_mm, an activation in PyTorch and combine_mm with grouped_mm."""
    found = Results("activations").table_of("bench")
    rows = [[*(of["tilemoe"].values[size] for size in "TdnEK"), passes(of["tilemoe"]),
             times_faster(of["tilemoe"], of[COMPILED], "total_ms"),
             f"{peak(of['tilemoe']) / MIB:.0f} ({peak(of[COMPILED]) / MIB:.0f})"]
            for of in found.values()]  # fmt: skip
    one = next(iter(found.values()))["tilemoe"]
    return section(
        "User-defined activations",
        "Gated Mish.",
        table("T | d | n | E | K | ms | vs `grouped_mm`, compiled | peak, MiB", rows),
        source("activations", one),
    )


def quantized():
    """Compare the layer with adapters on quantised weights with the one on 16-bit weights."""
    results = Results("quantized")
    found, steps = results.table_of("bench"), results.table_of("kernels")
    peers = [f"tilemoe-{name.replace('_', '-')}" for name in FORMATS]
    times = [[*layer_and_tokens(name, of["tilemoe"]), passes(of["tilemoe"]),
              *(times_faster(of["tilemoe"], of[peer], "total_ms") for peer in peers)]
             for name, of in found.items()]  # fmt: skip
    memory = [[*layer_and_tokens(name, of["tilemoe"]),
               *(f"{peak(of[peer]) / MIB:.0f}" for peer in ("tilemoe", *peers))]
              for name, of in found.items()]  # fmt: skip
    speed = []
    for name in FORMATS:
        of = {layer: rows for layer, rows in steps.items() if layer.endswith(f"-{name}")}
        fractions = [rows[step].values["limit_ms"] / rows[step].median("ms")
                     for rows in of.values() for step in ("dequantize_W1", "dequantize_W2")]
        speed.append([FORMATS[name], *(f"{100 * fraction:.0f} %" for fraction in fractions)])
    one = found["qwen3-30b"]["tilemoe"]
    layers = [layer.removesuffix("-nf4") for layer in steps if layer.endswith("-nf4")]
    return section(
        "Quantised weights",
        "Time with the adapters above, divided by that with bfloat16 weights.",
        table(["layer", "T", "bfloat16, ms", *FORMATS.values()], times),
        source("quantized", one),
        "Peak memory, MiB:",
        table(["layer", "T", "bfloat16", *FORMATS.values()], memory),
        "Dequantisation, bandwidth divided by that of a copy:",
        table(["format", *(f"{layer}, {weight}" for layer in layers for weight in ("W1", "W2"))],
              speed),
    )  # fmt: skip


def fp8():
    """Compare a layer in FP8 with the one in bfloat16, and its kernels with dense GEMMs and copies."""
    results = Results("fp8")
    whole = {name: {impl.removeprefix("tilemoe-recipe-"): one for impl, one in of.items()}
             for name, of in results.table_of("bench").items()}  # fmt: skip
    layers = [[name, passes(of["tilemoe"]), passes(of["fp8"]),
               *(times_faster(of["fp8"], of["tilemoe"], f"{way}_ms") for way in (*PASSES, "total")),
               times_faster(of["fp8-each"], of["tilemoe"], "total_ms")]
              for name, of in whole.items()]  # fmt: skip
    memory = [[name, *(f"{of_one(of[impl]) / of_one(of['tilemoe']):.3f}"
                       for impl in ("fp8", "fp8-save-h")
                       for of_one in (lambda one: one.values["saved_bytes"], above_weights))]
              for name, of in whole.items()]  # fmt: skip
    found = results.of("fp8-kernels")
    rows = [[name, *(f"{one.median(f'{of}_tflop_per_s'):.0f}"
                     for of in ("up", "dense", "dense_fast_accum")),
             *(f"{one.median(of):.2f}" for of in ("up_rate_over_dense", "quantize_x_over_copy",
                                                  "quantize_W1_over_copy"))]
            for name, one in found.items()]  # fmt: skip
    one = next(iter(results.table_of("bench").values()))["tilemoe"]
    return section(
        "FP8 recipe",
        "Whole layers, weights quantised before. \"x\": bfloat16's time divided by FP8's.",
        table("layer | bfloat16, ms | FP8, ms | forward | backward | both | both, weights quantised in "
              "each pass", layers),
        source("fp8", one),
        "Saved bytes, and peak above weights and codes, divided by bfloat16's:",
        table("layer | saved | peak | saved, H in FP8 | peak, H in FP8", memory),
        paragraph("TFLOP/s of the up-projection and of a dense FP8 GEMM of cuBLASLt; time of quantisation "
                  "divided by that of a copy:"),
        table("layer | up-projection | dense | dense, fast accumulation | up / dense | x, 1 x 128 | "
              "W1, 128 x 128", rows),
        source("fp8", next(iter(found.values()))),
    )  # fmt: skip


def recipes():
    """Compare the validation loss of trainings with the recipes, in pairs of one seed."""
    study = json.loads((ROOT / "examples" / "pretrain" / "recipes.json").read_text())
    lines = paired.named(Results("recipes").all.values(), "recipes")
    one = next(iter(lines.values()))
    tokens = one.values["steps"] * one.values["tokens_of_step"] / 1e6
    halves = [paired.loss_off(runs)[1] for runs in paired.pairs(lines, study["base"]).values()]
    few = any(half is None or half > study["limit"] for half in halves)
    return section(
        "Loss with FP8",
        f"After {tokens:.0f}M tokens, compared with bfloat16; `{study['null']}`: other rounding errors alone."
        + " Too few seeds for the limit." * few,
        table("model | method | seeds | validation loss, % | 95 % interval | upper end above that of "
              f"`{study['null']}` | limit of {study['limit']:g} %", paired.against_null(lines, study)),
        source("recipes", *lines.values()),
    )  # fmt: skip


def codes():
    """Compare sm80's GEMMs that read codes with those that read values, in forward."""
    found = {}
    for name, one in Results("codes").of("codes").items():
        layer, _, name = name.rpartition("-")
        found.setdefault(layer, {})[name] = one
    one = next(iter(found.values()))["fp8"]
    rows = [[of["fp8"].values["T"], f"{of['fp8'].values['rows_an_expert']:.3g}",
             f"{of['fp8'].median('16_bits_ms'):.2f}",
             *(f"{of[name].median('dequantised_ms'):.2f} / {of[name].median('codes_ms'):.2f}"
               for name in FORMATS)] for of in found.values()]  # fmt: skip
    return section(
        "GEMMs that read quantised weights",
        "Layer few-rows with `sm80`, forward in ms: weights dequantised first / GEMMs that read "
        "codes.",
        table(["T", "rows / E", "bfloat16", *FORMATS.values()], rows),
        source("codes", one),
    )


def router():
    """Compare the router's logits with one order of the sum with torch's linear layer."""
    found = {}
    for name, one in Results("router").of("router").items():
        layer, dtype, tokens = name.split("/")
        found.setdefault((layer, tokens), {})[dtype] = one
    one = next(iter(found.values()))["bfloat16"]
    us = lambda one, side: f"{1000 * one.median(f'{side}_ms'):.1f}"
    rows = [[layer, of["bfloat16"].values["T"],
             *(f"{us(of[dtype], 'tilemoe')} / {us(of[dtype], 'linear')} = "
               f"{of[dtype].median('ratio'):.2f}" for dtype in ("bfloat16", "float32"))]
            for (layer, _), of in found.items()]  # fmt: skip
    return section(
        "Router logits",
        "Time in us: `tilemoe.router_logits` / torch's linear layer.",
        table("layer | T | bfloat16 logits | float32 logits", rows),
        source("router", one),
    )


def limits():
    """Compare the layer from C++ with the limits of the hardware."""
    found = Results("kernels").table_of("kernels")
    rows = []
    for layer, of in found.items():
        both = [of[way] for way in PASSES]
        fractions = [one.values["limit_ms"] / one.median("ms") for one in both]
        rows.append([NAMED.get(layer, layer),
                     " / ".join(f"{one.median('ms'):.2f}" for one in both),
                     " / ".join(f"{100 * share:.0f} %" for share in fractions)])  # fmt: skip
    return section(
        "Layers from C++",
        "Back-to-back passes. The limit is the sum of the steps' limits "
        "([definition](kernels.md#hardware-facts)).",
        table("layer | forward / backward, ms | limit / time", rows),
        source("kernels", found["7b-n256"]["forward"]),
    )


def archs():
    """Compare the kernels of sm90, of sm80 and of ScatterMoE on one GPU."""
    file = Results("archs")
    found, others = file.table_of("archs"), file.table_of("archs-scattermoe")
    rows = []
    for layer, of in found.items():
        new, old = of["tilemoe-sm90"], of["tilemoe-sm80"]
        cells = [layer, passes(new), passes(old), times_faster(new, old, "total_ms")]
        other = others[layer]
        for ours, peer in (("tilemoe-sm90", "scattermoe"), ("tilemoe-sm80", "scattermoe-sm80")):
            cells.append(times_faster(other[ours], other[peer], "total_ms"))
        rows.append(cells)
    lines = [one for of in (*found.values(), *others.values()) for one in of.values()]
    return section(
        "Archs",
        "`sm80` runs on a Hopper GPU; \"ScatterMoE, `sm80`\" is compiled for older GPUs.",
        table("layer | `sm90`, ms | `sm80`, ms | `sm90` vs `sm80` | `sm90` vs ScatterMoE | "
              "`sm80` vs ScatterMoE, `sm80`", rows),
        source("archs", *lines),
    )  # fmt: skip


def copied_bytes_per_s(device):
    """Return the rate of a copy, which the kernels' times on the device are compared with."""
    rates = [one.values["limit_gb_per_s"] for one in Results("kernels").all.values()
             if one.device == device and "limit_gb_per_s" in one.values]
    if not rates:
        sys.exit(f"results_page.py: error: decode was measured on {device}, but no kernels were; "
                 "measure both on one GPU")
    return 1e9 * statistics.median(rates)


def decode():
    """Report one forward pass in decode."""
    rows = []
    found = Results("decode").table_of("decode")
    one = next(iter(found.values()))["tilemoe"]
    rate = copied_bytes_per_s(one.device)
    for layer, of in found.items():
        ours, eager = of["tilemoe"], of[EAGER]
        limit = ours.values["weight_bytes"] / rate * 1e6
        rows.append([layer.partition("/")[0], ours.values["T"], f"{ours.values['experts']:.1f}",
                     f"{ours.median('forward_us'):.1f}", f"{limit:.1f}",
                     f"{of['tilemoe-sm80'].median('forward_us'):.1f}",
                     f"{ours.values['launches']:.0f}",
                     times_faster(ours, eager, "forward_us")])  # fmt: skip
    return section(
        "Decode",
        "Forward without gradients. Limit: the chosen experts' weights at the speed of a copy.",
        table("layer | T | experts read | TileMoE, us | limit, us | `sm80`, us | launches | "
              "vs `grouped_mm`, eager", rows),
        source("decode", one),
    )  # fmt: skip


def cpu():
    file = Results("cpu_layer")
    found = file.table_of("cpu-layer")
    rows = []
    names = {"tilemoe-cpu": "TileMoE", "onednn-dense": "oneDNN, dense GEMMs of the same size",
             EAGER: PEERS[EAGER]}  # fmt: skip
    for dtype, of in found.items():
        for peer, one in of.items():
            saved = one.values.get("saved_bytes")
            rows.append([dtype, names.get(peer, peer), passes(one, 1),
                         times_faster(of["tilemoe-cpu"], one, "total_ms"),
                         "" if saved is None else f"{saved / MIB:.0f}"])  # fmt: skip
    one = found["float32"]["tilemoe-cpu"]
    return section(
        "Layer on a CPU",
        f"{one.values['threads']} threads.",
        table("dtype | implementation | forward / backward, ms | TileMoE is faster by | saved, MiB",
              rows),
        source("cpu_layer", one, found["float32"][EAGER]),
    )  # fmt: skip


def memory():
    """Report time and memory by column blocks and by options of the module."""
    file = Results("memory")
    curve, options = file.of("memory-curve"), file.table_of("memory-options")
    first = next(iter(curve.values()))
    peak_of = lambda one: one.values.get("library_peak_bytes") or peak(one)
    ratio = lambda one: one.values.get("ratio_to_one_block", one.median("total_ms") / whole)
    whole = first.median("total_ms")
    rows = [[one.values["column_blocks"], f"{peak_of(one) / MIB:.0f}",
             f"{one.median('total_ms'):.2f}", f"{100 * (ratio(one) - 1):.1f} %"]
            for one in curve.values()]  # fmt: skip
    ways = ("tilemoe", "tilemoe-dh-over-h", "tilemoe-small-peak", EAGER)
    both = lambda one: f"{one.median('total_ms'):.2f} ms, {peak(one) / MIB:.0f} MiB"
    layers = [[layer, *(both(of[way]) for way in ways)] for layer, of in options.items()]
    one, other = next(iter(curve.values())), next(iter(options.values()))["tilemoe"]
    which = ("from PyTorch" if "peak_bytes" in one.values
             else "from C++ with `overwrite_H`; the peak includes H and the routing")
    return section(
        "Memory",
        f"Layer 7b-n256 {which}.",
        table("`column_blocks` | peak, MiB | both passes, ms | slower", rows),
        source("memory", one),
        "From PyTorch, both passes:",
        table("layer | `overwrite_H=False` | `overwrite_H=True` (default) | and `column_blocks=4` "
              f"| {PEERS[EAGER]}", layers),
        source("memory", other),
    )  # fmt: skip


def expert_parallel():
    """Compare ways to exchange tokens; more ranks have the same number of tokens each."""
    found = Results("expert_parallel").table_of("expert-parallel")
    step = lambda one: one.median("step_ms")
    times = {(layer.partition("/")[0], one.values["T"], one.values["ranks"], way): step(one)
             for layer, of in found.items() for way, one in of.items()
             if "step_ms" in one.values}  # fmt: skip
    scaled = any(ranks > 2 for _, _, ranks, _ in times)
    rows = []
    for layer, of in found.items():
        for way, one in of.items():
            name, _, ctas = way.partition("@")
            if name not in WAYS:  # more chunks, which are never faster, and the links
                continue
            values, plan = one.values, one.values.get("plan_bytes")
            said = WAYS[name] + (f", {ctas} CTAs per SM" if ctas else "")
            said += ", CUDA graph" if values.get("in_graph", "graph" in values) else ""
            layer = layer.partition("/")[0].removesuffix("-graph")
            of_two = times.get((layer, values["T"], 2, way))
            rows.append([layer, values["T"], *([values["ranks"]] if scaled else []), said,
                         f"{step(one):.2f}", f"{one.median('time_over_own'):.2f}",
                         *([f"{100 * of_two / step(one):.0f} %" if of_two else ""] * scaled),
                         f"{values['peak_bytes'] / GIB:.2f}",
                         "" if plan is None else f"{plan / GIB:.2f}"])  # fmt: skip
    of = next(iter(found.values()))
    links = of.get("links", of["own"])
    titan = next((one["torchtitan"] for one in found.values() if "torchtitan" in one), of["own"])
    header = ["layer", "T", *["GPUs"] * scaled, "exchange, TileMoE's with `capacity_factor=1.5`",
              "both passes, ms", "time / that without communication",
              *["speed / that on 2 GPUs"] * scaled, "peak, GiB", "plan, GiB"]  # fmt: skip
    return section(
        "Expert parallelism",
        "T tokens per GPU, time of the slowest rank; an all-gather sends "
        f"{links.median('all_gather_gb_per_s'):.0f} GB/s per GPU.",
        table(header, rows),
        source("expert_parallel", of["own"], titan, *(each["own"] for each in found.values())),
    )  # fmt: skip


def trainings():
    """Return [((device, layers, processes, ranks that share experts), measurement)].

    Those of measure.py; examples/pretrain/results.md quotes the older ones.
    """
    return [((one.device, one.values["layers"], one.values["processes"],
              one.values.get("expert_parallel", 1)), one)
            for one in Results("pretrain").of("pretrain-study").values() if "item" in one.values]


def best_of(configuration):
    """Return {experts: the fastest training of a configuration}, the fastest first."""
    best = {}
    for one in (one for of, one in trainings() if of == configuration):
        kept = best.setdefault(one.values["experts"], one)
        if tokens_per_day(one) > tokens_per_day(kept):
            best[one.values["experts"]] = one
    return dict(sorted(best.items(), key=lambda item: -tokens_per_day(item[1])))


def studied():
    """Return the trainings on one GPU by experts."""
    alone = [of for of, _ in trainings() if of[2] == 1 and {"tilemoe"} < set(best_of(of))]
    return best_of(alone[0])


def tokens_per_day(one):
    """Return billions of tokens per day and GPU."""
    return one.median("tokens_per_s_and_process") * 86400 / 1e9


NAMES = {"tilemoe": "TileMoE", "sonic-moe": "sonic-moe", "scattermoe": "ScatterMoE",
         "grouped_mm": "torch, compiled"}  # fmt: skip


def scaling(one):
    """Return the cell of a training's speed per GPU, divided by that on the fewest GPUs.

    Both have equal micro-batches, and both are compiled or neither is. The cell is empty if no fewer
    GPUs were measured.
    """
    same = ("experts", "layers", "recompute", "micro_batch", "compile")
    alike = [other for _, other in trainings()
             if other.device == one.device
             and all(other.values[key] == one.values[key] for key in same)
             and other.values.get("expert_parallel", 1) == 1]  # fmt: skip
    fewest = min(alike, key=lambda other: other.values["processes"], default=one)
    if fewest.values["processes"] >= one.values["processes"]:
        return ""
    return f"{100 * tokens_per_day(one) / tokens_per_day(fewest):.0f} %"


def training_row(one, ours, scaled):
    """Return the row of a training; scaled: a list of one cell or none."""
    values, shared = one.values, one.values.get("expert_parallel", 1)
    named = NAMES[values["experts"]] + (f", experts shared by {shared}" if shared > 1 else "")
    named += f", {values['layers']} layers" if values["layers"] != 40 else ""
    faster = f"{tokens_per_day(ours) / tokens_per_day(one):.2f}x" if ours else ""
    mfu = f"{100 * one.median('mfu'):.1f} %" if "mfu" in values else ""
    return [named,
            *(values[key] for key in ("processes", "recompute", "micro_batch")),
            f"{one.median('step_ms'):.0f}", f"{tokens_per_day(one):.2f}", mfu,
            f"{one.median('peak_bytes') / GIB:.0f}", faster, *scaled]  # fmt: skip


def training_speed():
    tables = []
    configurations = sorted({of for of, _ in trainings()}, key=lambda of: (of[0], -of[1], *of[2:]))
    for device in dict.fromkeys(of[0] for of in configurations):
        rows, measurements = [], []
        here = [of for of in configurations if of[0] == device]
        scaled = any(scaling(one) for of in here for one in best_of(of).values())
        for of in here:
            best = best_of(of)
            rows += [training_row(one, best.get("tilemoe"), [scaling(one)] if scaled else [])
                     for one in best.values()]  # fmt: skip
            measurements += best.values()
        ours, torch = (" and ".join(dict.fromkeys(one.versions[name] for one in measurements
                                                  if name in one.versions))
                       for name in ("tilemoe", "torch"))  # fmt: skip
        said = (f"Measured on {device}, TileMoE {ours} ({commits_of(measurements)}), torch {torch}: "
                "[`pretrain.jsonl`](../benchmarks/results/pretrain.jsonl).")  # fmt: skip
        header = ["experts", "GPUs", "recompute", "micro-batch", "step, ms",
                  "billion tokens per day and GPU", "MFU", "peak, GiB", "TileMoE is faster by",
                  *["speed per GPU / that on the fewest GPUs"] * scaled]  # fmt: skip
        tables += [table(header, rows), paragraph(said)]
    return section(
        "Training speed",
        "A 7B model with 40 MoE layers, on one GPU at each implementation's fastest measured setting "
        "([more](../examples/pretrain/results.md)).",
        *tables,
    )


def rounding_of_layers(found):
    """Compare token rounding with top-K on layers of real sizes."""
    kernels = lambda one: sum(one.values[f"kernels_{way}_ms"] for way in PASSES)
    share = lambda one, key: f"{100 * one.values[key] / (one.values['T'] * one.values['K']):.2f} %"
    rows = []
    for layer, of in found.items():
        plain = of["top-k"]
        for rule, one in of.items():
            rows.append([layer, rule, passes(one), f"{kernels(one):.2f}",
                         f"{kernels(plain) / kernels(one):.3f}x",
                         times_faster(one, plain, "forward_ms"),
                         times_faster(one, plain, "backward_ms"),
                         share(one, "dropped"), share(one, "added")])  # fmt: skip
    return section(
        "Token rounding",
        "\"vs\" is top-K's time divided by the rule's; m = 128.",
        table("layer | rule | ms | kernels, ms | kernels vs top-K | forward vs top-K | "
              "backward vs top-K | pairs dropped | pairs added", rows),
        source("rounding", next(iter(found.values()))["top-k"]),
        *routing_alone(),
    )  # fmt: skip


def routing_alone():
    """Return the table of the routing's time and its source."""
    routings = Results("routing").table_of("routing")
    us = lambda one: f"{1000 * one.median('ms'):.1f}"
    routed = [[layer, us(of["top_k and route"]), us(of["rounded, nearest"])]
              for layer, of in routings.items()]  # fmt: skip
    first = next(iter(routings.values()))["route"]
    return ["The routing alone, us:", table("layer | top-K | `nearest`", routed),
            source("routing", first)]  # fmt: skip


def rounding():
    """Report the time that token rounding saves."""
    if layers_of := Results("rounding").table_of("rounding-layer"):
        return rounding_of_layers(layers_of)
    found = Results("rounding").of("rounding-time")
    rows = []
    for name, plain in found.items():
        part, model, tiles, method = name.split("/")
        if part != "layer" or method != "top_k":
            continue
        at = (model, tiles, "nearest")
        rounded, step = found["/".join(("layer", *at))], found.get("/".join(("step", *at)))
        gain = lambda quantity: f"{plain.median(quantity) / rounded.median(quantity):.3f}x"
        kernels = lambda one: one.values["forward.kernels_ms"] / one.values["rows"]
        whole = found.get(f"step/{model}/{tiles}/top_k")
        steps = f"{whole.median('step_ms') / step.median('step_ms'):.3f}x" if step and whole else ""
        if model == "sparse":  # not a model of examples/pretrain
            model = ", ".join(f"{letter} = {plain.values[letter]}" for letter in "dnK")
        rows.append([model, tiles, plain.values["T"],
                     f"{kernels(plain) / kernels(rounded):.3f}x",
                     gain("forward_ms"), gain("backward_ms"),
                     steps])  # fmt: skip
    one = next(iter(found.values()))
    return section(
        "Token rounding",
        "The time with top-K divided by that with `rounding=\"nearest\"`, m = 128.",
        table("[model](../examples/pretrain/reference.md#configurations) | tiles per expert | T | "
              "forward kernels, per pair | forward | backward | training step", rows),
        source("rounding", one),
        *routing_alone(),
    )


def small_model():
    """Report the command line's training on a CPU and on a GPU."""
    file = Results("train")
    on_cpu, on_gpu, same_text = map(file.of, ("train-cpu", "train-cuda", "train-devices/cpu"))
    names = {"top-k": "top-K", "nearest": "token rounding",
             "dense": "dense, of the same active width", "experts-off": "no experts"}  # fmt: skip
    of = lambda found, start: [one for name, one in found.items() if name.startswith(start)]
    bits = lambda found, start="": ", ".join(
        f"{one.values['bits_per_byte']:.3f}" for one in of(found, start))  # fmt: skip
    rows = [[name, bits(on_cpu, f"{routing}/")] for routing, name in names.items()]
    rows.append(["`xz -9`, given the training text", bits(on_cpu, "xz")])
    gpu, timed, kills = on_gpu["top-k/0"], on_cpu["timed"], file.all["kill-resume"]
    where = f"{gpu.device} (commit {gpu.commit[:7]})"
    rows.append([f"top-K, another text, {where}", bits(on_gpu, "top-k/")])
    rows.append(["top-K, that text, CPU", bits(same_text)])
    return section(
        "Training on a CPU",
        f"`tilemoe train` with defaults, {timed.values['seconds']:.0f} s: validation loss in "
        "bits per byte, per seed.",
        table("routing | bits per byte", rows),
        source("train", on_cpu["top-k/0"]),
        table("device | commit | tokens/s",
              [[one.device, one.commit[:7], f"{one.median('tokens_per_s'):,.0f}"]
               for one in (timed, gpu)]),
        f"A run killed {kills.values['kills']} times ended with the "
        f"{kills.values['log_lines_equal']:,} log lines of an uninterrupted run (commit "
        f"{kills.commit[:7]}).",
    )  # fmt: skip


def wheel():
    (one,) = Results("wheel").all.values()
    size = lambda key: f"{one.values[key] / MIB:.1f}"
    kernels = next(key for key in ("libtilemoe_cuda_bytes", "libtilemoe_torch_cuda_bytes")
                   if key in one.values)  # the second in wheels without JAX
    rows = [["wheel", size("bytes")],
            ["CUDA kernels", size(kernels)],
            ["oneDNN", size("libdnnl_bytes")],
            ["operators", size("libtilemoe_torch_bytes")]]  # fmt: skip
    said = (f"Measured with TileMoE {one.versions['tilemoe']} (commit {one.commit[:7]}), nvcc "
            f"{one.versions['nvcc']}, `{one.values['wheel']}`: "
            "[`wheel.jsonl`](../benchmarks/results/wheel.jsonl).")  # fmt: skip
    return section(
        "Size of the wheel",
        "",
        table("part | MiB, compressed", rows),
        paragraph(said),
    )


STAGES = {"test": "C++ tests and `tilemoe check`", "torch": "PyTorch package",
          "sizes": "layers of full size, against float64",
          "huge": "operands of more than 2^31 elements", "two-gpus": "two GPUs",
          "one-gpu-ranks": "expert parallelism, ranks of one GPU",
          "ranks": "expert parallelism, links between GPUs",
          "repeat": "the same bits 1000 times", "ptx": "kernels compiled from PTX by the driver",
          **{f"sanitize-{part}": f"compute-sanitizer, part {part}" for part in range(1, 5)}}
RAN, FAILED = ("tests", "cases", "passed"), ("failures", "errors", "hazards")


def counts(values):
    """Return (tests, failures, skipped) of an item of a stage.

    values: numbers, the program's last lines, or the results of scenarios by name.
    """
    found = dict(values)
    said = str(values.get("said", ""))
    for number, what in re.findall(r"(\d+) (cases|failures|errors|hazards)", said):
        found[what] = int(number)
    outcomes = [one for key, one in values.items() if key != "status"]
    scenarios = [one for one in outcomes if one in ("passed", "failed")]
    total = lambda keys: sum(found.get(key, 0) for key in keys)
    skipped = found.get("skipped", 0)
    failures = max(total(FAILED) + scenarios.count("failed"), int(values["status"] != "passed"))
    skipped = len(skipped) if isinstance(skipped, list) else skipped
    return total(RAN) + len(scenarios), failures, skipped


def tests():
    file = Results("gpu_tests")
    rows = []
    for stage, name in STAGES.items():
        found = list(file.of(stage).values())
        if not found:  # the stage has not run
            continue
        ran = map(sum, zip(*(counts(one.values) for one in found)))
        seconds = sum(one.values.get("seconds", 0) for one in found)
        of_all = lambda values: ", ".join(dict.fromkeys(values))
        rows.append([name, of_all(one.device for one in found),
                     of_all(one.versions["tilemoe"] for one in found),
                     of_all(one.commit[:7] for one in found), len(found), *ran, f"{seconds:.0f}"])
    simulated = Results("simulator").of("simulator")
    runs = [[name, one.versions["tilemoe"], one.commit[:7],
             *(one.values[key] for key in ("cases", "seeds", "runs")),
             one.values["runs_with_findings"] + one.values["runs_wrong"]]
            for name, one in simulated.items()]  # fmt: skip
    return section(
        "Tests on GPUs",
        "",
        table("stage | GPU | TileMoE | commit | items | tests | failed | skipped | s", rows),
        "Quick cases on simulated GPUs:",
        table("arch | TileMoE | commit | cases | seeds | runs | wrong or with a finding", runs),
    )


def jax():
    """Compare tilemoe.jax with PyTorch and with jax.lax.ragged_dot."""
    found = Results("jax").of("jax/time")
    rows = []
    for name, one in found.items():
        times = one.values
        rows.append([name.removeprefix("time-"), f"{times['tilemoe.jax ms']:.2f}",
                     f"{times['tilemoe (torch) ms']:.2f}", times["ragged_dot's tokens"],
                     f"{times['ragged_dot per token']:.1f}x"])  # fmt: skip
    return section(
        "JAX",
        "Both passes; `ragged_dot` per token, at the T that its memory permits.",
        table("layer | `tilemoe.jax`, ms | from PyTorch, ms | T of `ragged_dot` | vs `ragged_dot`",
              rows),
        source("jax", next(iter(found.values()))),
    )  # fmt: skip


SECTIONS = (sizes, layers, training_speed, memory, decode, expert_parallel, adapters, activations,
            quantized, *([fp8] if (RESULTS / "fp8.jsonl").exists() else []),
            *([recipes] if (RESULTS / "recipes.jsonl").exists() else []), codes, cpu, rounding, archs,
            limits, router,
            *([jax] if (RESULTS / "jax.jsonl").exists() else []),
            small_model, wheel, tests)  # fmt: skip
HEAD = """# Results

[`benchmarks/results_page.py`](../benchmarks/results_page.py) generates this page from
[`benchmarks/results`](../benchmarks/results) ([how to repeat](../benchmarks/README.md)).

## How it is measured

- The dtype is bfloat16 unless a table names another. X and dO are normal with standard deviation 0.2; the router
  computes the routing from X.
- Numbers are medians over rounds; each runs every implementation once.
- Caches are cold: a GPU writes 256 MiB before each pass, a CPU 64 MiB.
- CUDA events measure a GPU's time, without the host's.
- "a / b" is forward / backward. "vs" is the other implementation's time divided by TileMoE's.
- Peak memory excludes weights, X and dO.
- Compare numbers of one table only: a GPU's times vary by 2 to 6 % between days.
"""


def page():
    return "\n".join([HEAD, *(f"{part()}\n" for part in SECTIONS)])


def readme_table():
    found, rows = Results("peers").table_of("bench"), []
    for layer, name in MODELS.items():
        of = found[layer]
        ours = of["tilemoe"]
        rows.append([name, f"{ours.median('total_ms'):.1f}",
                     *(f"{of[peer].median('time_over_tilemoe'):.2f}x" for peer in PEERS),
                     less(ours, of[SONIC])])  # fmt: skip
    ours = found["olmoe"]["tilemoe"]
    device = ours.device.removeprefix("NVIDIA ")
    header = [f"one layer, {device}, bf16, T = {ours.values['T']:,}", "ms", *VS_PEERS,
              "peak memory vs sonic-moe"]  # fmt: skip
    said = ("Forward and backward, router included; \"x\" is the peer's time divided by TileMoE's. "
            f"{measured(*compared([found[name] for name in MODELS]), shown=SHOWN[:-1])}. "
            f"{slower(found)}`python -m tilemoe bench` "
            "compares them on your machine. [More results](docs/results.md).")  # fmt: skip
    return table(header, rows) + "\n\n" + paragraph(said)


def slower(found):
    """Return a sentence that names the passes of MODELS that are slower than sonic-moe's."""
    words = []
    for layer in MODELS:
        ours, sonic = found[layer]["tilemoe"], found[layer][SONIC]
        for way in PASSES:
            percent = 100 * (ours.median(f"{way}_ms") / sonic.median(f"{way}_ms") - 1)
            if percent >= 0.5:
                words.append(f"{layer}'s {way} pass by {percent:.0f} %")
    return f"Slower than sonic-moe: {', '.join(words)}. " if words else ""


PART = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


TESTED_ON = re.compile(r"tested on one[a-z, ]* GPUs")


def with_part(text, part):
    """Return a page with its part replaced."""
    return PART.sub(lambda found: f"{found[1]}{part}{found[2]}", text)


def readme(text):
    counts = {one.values["gpus"] for one in Results("gpu_tests").all.values()
              if one.values["status"] == "passed"}  # fmt: skip
    words = [word for count, word in ((2, "two"), (4, "four"), (8, "eight"))
             if count in counts]  # fmt: skip
    tested = " and ".join(["one", *words]) if len(words) < 2 else (
        ", ".join(["one", *words[:-1]]) + f" and {words[-1]}")
    return with_part(TESTED_ON.sub(f"tested on {tested} GPUs", text), f"{readme_table()}\n")


def distributed(text):
    return with_part(text, layers_of_ranks())


def layers_of_ranks():
    """Return the section of docs/distributed.md that compares layers, or nothing before a run."""
    found = {name: of for name, of in Results("expert_parallel").table_of("expert-parallel").items()
             if "lossless" in of and "torchtitan" in of}  # fmt: skip
    step = lambda one: one.median("step_ms")
    gib = lambda one: f"{one.values['peak_bytes'] / GIB:.1f}"
    scaled = len({of["lossless"].values["ranks"] for of in found.values()}) > 1
    rows = []
    for name, of in found.items():
        ours, titan = of["lossless"], of["torchtitan"]
        ways = {way: one for way, one in of.items() if "plan_bytes" in one.values}
        fastest = min(ways, key=lambda way: step(ways[way]))
        way, _, ctas = fastest.partition("@")
        said = WAYS[way] + (f", {ctas} CTAs per SM" if ctas else "")
        of_two = found.get(re.sub(r"R=\d+", "R=2", name), {}).get("lossless")
        rows.append([name.partition("/")[0], ours.values["T"], ours.values["ranks"],
                     f"{step(ours):.2f}", f"{step(titan) / step(ours):.2f}x",
                     f"{step(ways[fastest]):.2f}: {said}", f"{gib(ours)}, {gib(titan)}",
                     *[f"{100 * step(of_two) / step(ours):.0f} %" if of_two else ""] * scaled])  # fmt: skip
    if not rows:
        return ""
    one = next(iter(found.values()))
    compared = one["lossless"], one["torchtitan"], *(of["lossless"] for of in found.values())
    return "\n".join([
        "### Speed", "",
        paragraph("Forward and backward of a layer with the default memory, T tokens per GPU:"), "",
        table("layer | T | GPUs | ms | vs torchtitan's all-to-all | fastest, ms | "
              "peak, GiB: TileMoE, torchtitan" + " | speed / that on 2 GPUs" * scaled, rows), "",
        paragraph(f"{measured(*compared)}; [more](results.md#expert-parallelism)."), "",
    ]) + "\n"  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    for file, text in ((PAGE, page()), (README, readme(README.read_text())),
                       (DISTRIBUTED, distributed(DISTRIBUTED.read_text()))):
        if args.check and text != file.read_text():
            sys.exit(f"results_page.py: error: {file.name} differs from the results; "
                     "run results_page.py")  # fmt: skip
        if not args.check:
            file.write_text(text)


if __name__ == "__main__":
    main()
