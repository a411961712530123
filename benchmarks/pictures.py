#!/usr/bin/env python3
"""Draw README.md's two pictures, for light and for dark pages, from benchmarks/results/*.jsonl.

python3 benchmarks/pictures.py             # writes docs/images/{speed,memory}-{light,dark}.svg
python3 benchmarks/pictures.py --check     # status 1 if a picture differs from the results
"""

import argparse
import html
import re
import sys

from results_page import (
    COMPILED,
    EAGER,
    GIB,
    NAMES,
    ROOT,
    SONIC,
    Results,
    less,
    peak,
    studied,
    tokens_per_day,
)

IMAGES = ROOT / "docs" / "images"
PAGES = ROOT / "README.md", ROOT / "docs" / "index.md"
WIDTH, HEIGHT = 660, 195
LEFT, RIGHT = 122, 648  # where the bars start; where the axis and the right column end
TOP, ROW, THICK = 60, 33, 20
BEYOND = 1.38  # the axis over the longest bar: room for the values and the right column
THEMES = {  # text, secondary text, TileMoE's bar, the others'
    "light": ("#1f2328", "#59636e", "#0969da", "#afb8c1"),
    "dark": ("#e6edf3", "#9198a1", "#4493f8", "#59636e"),
}


def bars(theme, title, head, rows, digits):
    """Return an SVG of horizontal bars.

    rows: [(label, value, text of the right column)], with TileMoE first.
    """
    ink, faint, ours, others = THEMES[theme]
    scale = (RIGHT - LEFT) / (BEYOND * max(value for _, value, _ in rows))

    def text(x, y, words, anchor="start", bold=False, colour=ink, size=12.5):
        weight = ' font-weight="600"' if bold else ""
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{html.escape(words)}</text>'
        )

    drawn = [text(8, 20, title, bold=True), text(RIGHT, 46, head, "end", colour=faint, size=12)]
    for index, (label, value, compared) in enumerate(rows):
        y, first = TOP + index * ROW, index == 0
        end, base = LEFT + scale * value, y + THICK / 2 + 4.5
        drawn += [
            text(LEFT - 8, base, label, "end", first),
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{THICK}" rx="2" '
            f'fill="{ours if first else others}"/>',
            text(end + 7, base, f"{value:.{digits}f}", bold=first),
            text(RIGHT, base, compared, "end"),
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="-apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif">',
            f"<title>{html.escape(title)}</title>",
            *drawn,
            "</svg>\n",
        ]
    )


def training():
    """Return what the first picture shows: a title without the unit, the unit, and the rows."""
    best = studied()
    ours = tokens_per_day(best["tilemoe"])
    rows = [
        (
            NAMES[experts],
            tokens_per_day(one),
            "" if experts == "tilemoe" else f"{ours / tokens_per_day(one):.2f}x faster",
        )
        for experts, one in best.items()
    ]
    one = best["tilemoe"]
    gpu = one.device.removeprefix("NVIDIA ").split()[0]
    layers = one.values["layers"]
    model = "a 7B MoE" if layers == 40 else f"{layers} layers of a 7B MoE"
    return f"Training {model} on one {gpu}", "billion tokens per day", rows


def speed(theme):
    title, unit, rows = training()
    return bars(theme, f"{title}: {unit}", "TileMoE is", rows, 2)


def alternative(text):
    """Return a page with the text that replaces the first picture."""
    title, unit, rows = training()
    labels = ", ".join(label.replace(",", "") for label, _, _ in rows)
    return re.sub(r'alt="[^"]*"(?= src="[a-z/]*speed-light.svg")',
                  f'alt="{title}, in {unit}: {labels}"', text)  # fmt: skip


def memory(theme):
    of = Results("peers").table_of("bench")["qwen3-235b"]
    labels = {
        "tilemoe": "TileMoE",
        SONIC: "sonic-moe",
        COMPILED: "torch, compiled",
        EAGER: "torch, eager",
    }
    rows = [
        (label, peak(of[peer]) / GIB, "" if peer == "tilemoe" else less(of["tilemoe"], of[peer]))
        for peer, label in labels.items()
    ]
    title = "Peak memory of one Qwen3-235B layer, forward + backward: GiB"
    return bars(theme, title, "TileMoE needs", rows, 1)


def main(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    for picture in (speed, memory):
        for theme in THEMES:
            file = IMAGES / f"{picture.__name__}-{theme}.svg"
            drawn = picture(theme)
            if args.check and (not file.exists() or file.read_text() != drawn):
                sys.exit(
                    f"pictures.py: error: {file.name} differs from the results; run pictures.py"
                )
            if not args.check:
                file.write_text(drawn)
    for file in PAGES:
        text = file.read_text()
        if args.check and text != alternative(text):
            sys.exit(f"pictures.py: error: {file.name} describes another picture; run pictures.py")
        if not args.check:
            file.write_text(alternative(text))


if __name__ == "__main__":
    main()
