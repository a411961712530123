#!/usr/bin/env python3
"""Draws the pictures of README.md from gpu_peers.json: the speed of whole layers, and memory against
granularity. Each in two files, for light and for dark pages.

  python3 benchmarks/plot_peers.py benchmarks/results/gpu_peers.json docs/images/peers
"""

import argparse
import json
import pathlib
import sys

from peer_tables import COMPILED, EAGER, SONIC, by_peer
from results_tables import passed

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
try:
    from plots import look, plt, save
except ImportError:
    sys.exit(
        "plot_peers.py: error: this Python has no matplotlib; "
        f"{sys.executable} -m pip install -r benchmarks/requirements.txt"
    )

PEERS = ("tilemoe", SONIC, COMPILED, EAGER)
MODELS = {  # the layers of released models; the others are in the tables
    "olmoe": "OLMoE",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-235b": "Qwen3-235B",
    "kimi-linear": "Kimi Linear",
    "qwen3-next": "Qwen3-Next",
}
GRANULARITY = ("7b-n1024", "7b-n256")  # equal operations and weights, experts a quarter as wide
MIB = 2**20
THEMES = {  # text, lines of the grid, bars: TileMoE's stands out from the others
    "light": ("#1f2328", "#d1d9e0", ("#0969da", "#57606a", "#8c959f", "#c4cbd2")),
    "dark": ("#e6edf3", "#3d444d", ("#4493f8", "#b7bec6", "#858d96", "#565e67")),
}


def bars(axes, theme, groups, label, number):
    """`groups`: {name: {peer: value}}. A bar for each peer, with its value above it."""
    text, grid, colours = THEMES[theme]
    width = 0.8 / len(PEERS)
    for index, (peer, colour) in enumerate(zip(PEERS, colours)):
        at = [i + (index - (len(PEERS) - 1) / 2) * width for i in range(len(groups))]
        values = [of[peer] for of in groups.values()]
        drawn = axes.bar(at, values, width * 0.94, color=colour, label=look(peer)[0])
        weight = "bold" if peer == "tilemoe" else "normal"
        axes.bar_label(drawn, [number(v) for v in values], color=text, fontsize=7.5, fontweight=weight)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(label, loc="left", color=text, fontsize=10)
    axes.yaxis.grid(True, color=grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=text, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def finish(figure, axes, theme, output):
    text = THEMES[theme][0]
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, labelcolor=text)
    figure.patch.set_alpha(0)
    for one in figure.axes:
        one.patch.set_alpha(0)
    save(figure, output)


def speed(layers, device, theme, output):
    """Forward and backward of a layer of each model: two operations a multiply-add."""
    groups = {
        words: {peer: layers[layer][peer]["tflops"] for peer in PEERS}
        for layer, words in MODELS.items()
    }
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    title = f"TFLOP/s of one layer, forward and backward, {device} (higher is better)"
    bars(axes, theme, groups, title, lambda value: f"{value:.0f}")
    finish(figure, axes, theme, output)


def memory(layers, device, theme, output):
    """What is kept for backward, and the peak, with wide and with narrow experts."""
    found = [layers[name] for name in GRANULARITY]
    shapes = [of["tilemoe"]["shape"] for of in found]
    words = [f"{s['E']} experts of width {s['n']},\n{s['K']} a token" for s in shapes]
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    parts = (
        ("MiB kept from forward to backward", lambda e: e["saved_bytes"] / MIB),
        (
            "MiB at the peak, above weights and inputs",
            lambda e: (e["peak_bytes"] - e["resident_bytes"]) / MIB,
        ),
    )
    for axes, (title, value) in zip(both, parts):
        groups = {
            name: {peer: value(of[peer]) for peer in PEERS} for name, of in zip(words, found)
        }
        bars(axes, theme, groups, f"{title} (lower is better)", lambda v: f"{v:.0f}")
    finish(figure, both[0], theme, output)


def draw(results, folder):
    """Every picture; their paths."""
    layers = {item["item"]: by_peer(item) for item in passed(results)}
    paths = []
    for theme in THEMES:
        for picture in (speed, memory):
            paths.append(folder / f"{picture.__name__}-{theme}.svg")
            picture(layers, results["name"], theme, paths[-1])
    return paths


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    draw(json.loads(args.results.read_text()), args.folder)


if __name__ == "__main__":
    main()
