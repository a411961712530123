#!/usr/bin/env python3
"""Draws a results file of cpu_layer.py: time and memory of the layer and its peers.

  python3 benchmarks/plot_layer.py benchmarks/results/cpu_layer.json docs/images/cpu_layer.svg
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
try:
    from plots import look, plt, save
except ImportError:
    sys.exit(
        "plot_layer.py: error: this Python has no matplotlib; "
        f"{sys.executable} -m pip install -r benchmarks/requirements.txt"
    )


def stacked(axes, entries, parts, unit):
    """A horizontal bar for each entry: the two parts, and their sum at its end."""
    for row, entry in enumerate(entries):
        _, first_colour, second_colour = look(entry["backend"])
        first, second = parts(entry)
        axes.barh(row, first, color=first_colour, height=0.6)
        axes.barh(row, second, left=first, color=second_colour, height=0.6)
        axes.text(first + second, row, f" {first + second:.0f} {unit}", va="center")
    axes.set_yticks(range(len(entries)), [look(entry["backend"])[0] for entry in entries])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(unit)


def times(entry):
    return entry["fwd_ms"], entry["bwd_ms"]


def memory(entry):
    saved, peak = entry["saved_bytes"] / 2**20, entry["peak_bytes"] / 2**20
    return saved, peak - saved


def draw(entries, output):
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in entries))
    first = entries[0]
    figure, panels = plt.subplots(
        len(dtypes), 2, figsize=(9, 0.5 + 1.5 * len(dtypes)), squeeze=False, layout="constrained"
    )
    for dtype, (time_axes, memory_axes) in zip(dtypes, panels):
        chosen = [entry for entry in entries if entry["dtype"] == dtype]
        stacked(time_axes, chosen, times, "ms")
        time_axes.set_title(f"{dtype}: forward (dark), backward", loc="left")
        stacked(memory_axes, [e for e in chosen if e["saved_bytes"] is not None], memory, "MiB")
        memory_axes.set_title(f"{dtype}: kept (dark), peak", loc="left")
    shape = " ".join(f"{name}={first['shape'][name]}" for name in "TdnEK")
    figure.suptitle(f"One MoE layer, {shape}; {first['threads']} threads of {first['device']}")
    save(figure, output)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path, help="an .svg or .png")
    parser.add_argument("--dtypes", nargs="+", help="only these; else all in the file")
    args = parser.parse_args()
    try:
        entries = json.loads(args.results.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"plot_layer.py: error: {args.results}: {error}")
    if args.dtypes:
        entries = [entry for entry in entries if entry["dtype"] in args.dtypes]
    if not entries:
        sys.exit(f"plot_layer.py: error: {args.results} has no such entries")
    draw(entries, args.output)


if __name__ == "__main__":
    main()
