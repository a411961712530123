"""The pictures of docs/token_rounding.md."""

from tilemoe.bench.plots import plt, save

COLOURS = {
    "nearest": "#1b6ca8",
    "renormalized": "#0b8f8f",
    "up": "#b45f06",
    "down": "#741b47",
    "stochastic": "#38761d",
    "balanced": "#7f6000",
    "capacity": "#555555",
}


def panels(models):
    figure, axes = plt.subplots(
        1, len(models), figsize=(4.2 * len(models), 3), layout="constrained", squeeze=False
    )
    for model, panel in zip(models, axes[0]):
        panel.set_title(model, loc="left")
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        panel.set_xlabel("tiles an expert, T K / (E m)")
    return figure, dict(zip(models, axes[0]))


def quality(differences, output):
    """Differences from top-K with their intervals; the methods stand beside each other."""
    models = list(dict.fromkeys(model for model, _, _ in differences))
    figure, by_model = panels(models)
    for (model, method, tiles), off in differences.items():
        beside = 2 ** (0.07 * list(COLOURS).index(method))
        by_model[model].errorbar(
            [tiles * beside], [off.mean], yerr=[off.half or 0], fmt="o", capsize=3,
            color=COLOURS[method], label=method,
        )  # fmt: skip
    for panel in by_model.values():
        panel.axhline(0, color="black", linewidth=0.6)
        panel.set_ylabel("held-out loss beyond top-K's, %")
        handles, labels = panel.get_legend_handles_labels()
        unique = dict(zip(labels, handles))
        panel.legend(unique.values(), unique.keys(), frameon=False)
    save(figure, output)


def dropped(losses, output):
    """losses: {(model, method): [(share of pairs dropped, loss beyond top-K's) of each run]}, in %."""
    figure, panel = plt.subplots(figsize=(4.6, 3), layout="constrained")
    shapes = dict(zip(dict.fromkeys(model for model, _ in losses), "osD^"))
    for (model, method), points in losses.items():
        panel.plot(
            *zip(*points), shapes[model], color=COLOURS[method], fillstyle="none",
            label=f"{model} {method}",
        )  # fmt: skip
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_xlabel("pairs dropped, %")
    panel.set_ylabel("held-out loss beyond top-K's, %")
    panel.legend(frameon=False)
    save(figure, output)


TIMED = {  # what was timed, in words
    "kernels, ns a pair": "the three forward kernels, a pair",
    "forward, ms": "forward",
    "both passes, ms": "forward and backward",
    "training step, ms": "training step",
}


def time(ratios, output):
    """Panels of one scale; above 1 rounding gains time."""
    models = list(dict.fromkeys(model for model, _ in ratios))
    measured = list(dict.fromkeys(column for columns in ratios.values() for column in columns))
    figure, by_model = panels(models)
    handles = {}
    for model, panel in by_model.items():
        for column in measured:
            points = [
                (tiles, columns[column][0] / columns[column][1])
                for (of, tiles), columns in ratios.items()
                if of == model and column in columns
            ]
            if points:
                colour = f"C{measured.index(column)}"
                (handles[TIMED[column]],) = panel.plot(*zip(*points), "o-", color=colour)
        panel.axhline(1, color="black", linewidth=0.6)
        panel.sharey(by_model[models[0]])
    by_model[models[0]].set_ylabel("time of top-K over that of nearest")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
    save(figure, output)


def draw(differences, losses, ratios, folder):
    """differences: {(model, method, tiles): an interval}; losses: dropped()'s; ratios: {(model,
    tiles): {what was timed: (top-K's, nearest's)}}."""
    if differences:
        quality(differences, folder / "quality.svg")
        dropped(losses, folder / "dropped.svg")
    if ratios:
        time(ratios, folder / "time.svg")
