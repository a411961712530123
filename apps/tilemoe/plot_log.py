#!/usr/bin/env python3
"""Plot a training log: `plot_log.py LOG.jsonl [--out FOLDER] [--format png|svg|pdf]`.

Write two pictures next to the log: NAME-loss (training and validation bits per byte) and NAME-load
(tokens of each expert by step, one column per layer). `tilemoe plot` runs this file.
"""

import sys

# Before anything is imported that a file may shadow: modules come from Python's folders, never from
# the current one, which may be the log's. (Python has imported `os` at its start.)
try:
    CURRENT = sys.modules["os"].getcwd()
except OSError:  # it was removed
    CURRENT = ""
sys.path[:] = [path for path in sys.path if path not in ("", ".", CURRENT)]

import argparse
import json
import math
import os

PACKAGE = "python3-matplotlib"
MAX_COLUMNS = 400  # the load picture averages steps to at most this number


def fail(reason):
    sys.exit(f"tilemoe: error: {reason}")


def read_log(path):
    """Return the lines of a log as objects, without an incomplete last line of a run that still writes."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {error}")
    lines.pop()
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            objects.append(json.loads(line))
        except (ValueError, RecursionError):
            fail(f"{path} line {number}: not JSON; expected a log of `tilemoe train`")
        wrong = what_is_wrong_with(objects[-1])
        if wrong:
            fail(f"{path} line {number}: {wrong}; expected a log of `tilemoe train`")
    loads = {tuple(map(len, line["expert_load"])) for line in objects if line.get("expert_load")}
    if len(loads) > 1:
        fail(f"{path}: the layers or experts of \"expert_load\" change from line to line")
    return objects


def is_number(value):
    """Return whether `value` is a number that can be drawn; 10^400 is not."""
    return type(value) in (int, float) and abs(value) < 1e300


def what_is_wrong_with(line):
    """Return why the fields of `line` cannot be drawn, or None."""
    if not isinstance(line, dict):
        return "not an object"
    if line.get("event") not in ("step", "eval"):
        return None
    if not is_number(line.get("step")):
        return '"step" is not a number'
    if "loss" not in line or not (line["loss"] is None or is_number(line["loss"])):
        return '"loss" is not a number'
    load = line.get("expert_load")
    if load is not None and not (
            isinstance(load, list)
            and all(isinstance(layer, list) and layer and all(map(is_number, layer)) for layer in load)
            and len(set(map(len, load))) <= 1):
        return '"expert_load" is not a list of lists of numbers'
    return None


def plain(text):
    """Return `text` for matplotlib, with dollar signs escaped."""
    return os.fsencode(text).decode(errors="replace").replace("$", r"\$")


def bits(nats):
    return math.nan if nats is None else nats / math.log(2)


def running_mean(values, window):
    """Return the mean over the last `window` values, without NaN."""
    means, total, count = [], 0.0, 0
    for i, value in enumerate(values):
        leaving = values[i - window] if i >= window else math.nan
        if not math.isnan(value):
            total, count = total + value, count + 1
        if not math.isnan(leaving):
            total, count = total - leaving, count - 1
        means.append(total / count if count else math.nan)
    return means


def draw_loss(plt, steps, evaluations, title):
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    x = [line["step"] for line in steps]
    y = [bits(line["loss"]) for line in steps]
    window = max(1, len(y) // 50)
    axes.plot(x, y, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(x, running_mean(y, window), color="tab:blue",
              label=f"training, mean of {window} steps" if window > 1 else "training")
    if evaluations:
        validation_x = [line["step"] for line in evaluations]
        validation_y = [bits(line["loss"]) for line in evaluations]
        axes.plot(validation_x, validation_y, color="tab:orange", marker="o", label="validation")
        axes.annotate(f"{validation_y[-1]:.3f}", (validation_x[-1], validation_y[-1]),
                      xytext=(-4, 7), textcoords="offset points", ha="right", color="tab:orange")
    # The first steps fall from 8 bits per byte: the later steps set the scale.
    later = sorted(value for value in y[len(y) // 20:] if not math.isnan(value))
    if later:
        low = min([later[0]] + [bits(line["loss"]) for line in evaluations])
        high = later[-1]
        margin = 0.05 * (high - low) + 1e-3
        axes.set_ylim(low - margin, high + margin)
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_load(plt, steps, title):
    """Plot the tokens of each expert over the mean of all by step, and below it the extremes."""
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm

    load = np.array([line["expert_load"] for line in steps], dtype=float)  # (steps, layers, E)
    mean = load.mean(axis=2, keepdims=True)
    share = np.divide(load, mean, out=np.ones_like(load), where=mean > 0)
    first, last = steps[0]["step"], steps[-1]["step"]
    layers, experts = share.shape[1:]
    columns = min(len(steps), MAX_COLUMNS)
    edges = np.linspace(0, len(steps), columns + 1).astype(int)
    binned = np.add.reduceat(share, edges[:-1], axis=0) / np.diff(edges)[:, None, None]

    figure, axes = plt.subplots(2, layers, figsize=(1 + 5 * layers, 5.5), layout="constrained",
                                squeeze=False, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    for layer in range(layers):
        image = axes[0, layer].imshow(
            binned[:, layer].T, aspect="auto", origin="lower", interpolation="nearest",
            cmap="RdBu_r", norm=TwoSlopeNorm(1, 0, 2), extent=(first, last + 1, -0.5, experts - 0.5))
        axes[0, layer].set(title=f"layer {layer}", ylabel="expert" if layer == 0 else None)
        x = [line["step"] for line in steps]
        axes[1, layer].plot(x, share[:, layer].max(axis=1), color="tab:red", linewidth=0.8,
                            label="most loaded")
        axes[1, layer].plot(x, share[:, layer].min(axis=1), color="tab:blue", linewidth=0.8,
                            label="least loaded")
        axes[1, layer].set(xlabel="step", ylabel="load / mean" if layer == 0 else None, ylim=(0, None))
        axes[1, layer].grid(alpha=0.3)
    axes[1, 0].legend()
    figure.colorbar(image, ax=axes[0, :], label="load / mean", extend="max")
    figure.suptitle(title)
    return figure


def main():
    parser = argparse.ArgumentParser(prog="tilemoe plot", description=__doc__.split("\n")[0])
    parser.add_argument("log")
    parser.add_argument("--out", help="folder of the pictures (default: the log's)")
    parser.add_argument("--format", default="png", choices=["png", "svg", "pdf"])
    arguments = parser.parse_args()

    log = read_log(arguments.log)
    steps = [line for line in log if line.get("event") == "step"]
    evaluations = [line for line in log
                   if line.get("event") == "eval" and line.get("loss") is not None]
    if not steps:
        fail(f"{arguments.log} has no steps to draw")
    try:
        import matplotlib
    except ImportError:
        fail(f"plotting requires matplotlib, which {sys.executable} does not have; install it with\n"
             f"  sudo apt-get install -y {PACKAGE}")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stem, _ = os.path.splitext(os.path.basename(arguments.log))
    folder = arguments.out or os.path.dirname(arguments.log) or "."
    title = plain(os.path.basename(os.path.dirname(os.path.abspath(arguments.log))))
    figures = {"loss": draw_loss(plt, steps, evaluations, f"{title}: loss")}
    loaded = [line for line in steps if line.get("expert_load")]
    if loaded:
        figures["load"] = draw_load(plt, loaded, f"{title}: tokens per expert")
    try:
        os.makedirs(folder, exist_ok=True)
        for name, figure in figures.items():
            path = os.path.join(folder, f"{stem}-{name}.{arguments.format}")
            figure.savefig(path, dpi=120)
            sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    except OSError as error:
        fail(f"cannot write the pictures: {error}")


if __name__ == "__main__":
    main()
