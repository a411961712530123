"""Writes docs/training_speed.md's tables and its picture from what speed_study.py measured.

python examples/pretrain/study/speed_page.py           # between the page's marks; and the picture
python examples/pretrain/study/speed_page.py --check   # status 1 where the page differs
"""

import argparse
import json
import sys

import example
from configs import CONFIGS
from pages import table, with_part
from plan import PEAKS, flop_of_token
from speed_study import RESULTS

PAGE = example.ROOT / "docs" / "training_speed.md"
PICTURE = PAGE.parent / "images" / "training_speed.svg"
LAYERS = example.RESULTS / "gpu_torch_layer.json"
BEGIN = "<!-- speed_page.py writes from here -->\n"
STEP = 65_536  # tokens of a GPU from one update to the next, where a column says so
SETTING = ("device", "config", "layers", "processes", "recompute", "micro_batch", "share", "kept",
           "once")  # fmt: skip
HEADER = ["GPU", "config", "layers", "GPUs", "recompute", "micro-batch", "experts by"]
PER_DAY = f"10^9 tokens/day/GPU, an update in {STEP:,} tokens"
KINDS = ("experts", "attention", "products", "head", "elementwise and other",
         "copies of parameters", "communication", "optimizer")  # fmt: skip
LAYER_NAMES = {"tilemoe": "tilemoe", "grouped_mm": "torch-grouped_mm"}  # of LAYERS' backends


def micro_batch(e):
    """The column of that name: its sequences, and how a step goes about them."""
    size = f"{e['micro_batch']} x {e['share']}" if e["share"] > 1 else str(e["micro_batch"])
    size += ", kept" * e["kept"] + ", reduced once" * e["once"]
    return size + f", {e['turns']} turns" * (e["turns"] > 1)


def start(e):
    """The columns that say what was measured."""
    device = e["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    of = [e[key] for key in ("config", "layers", "processes", "recompute")]
    return [device, *of, micro_batch(e), e["experts"]]


def whole(e):
    return e["layers"] == CONFIGS[e["config"]].layers


def tokens(e):
    """Of a step, in each process."""
    return e["micro_batch"] * e["share"] * CONFIGS[e["config"]].context


def passes(e):
    """Milliseconds of a step without its update: forward, backward, their collectives."""
    return e["ms"] - e["update_ms"]


def speed(e):
    """Tokens a second and process, with STEP tokens from one update to the next."""
    return STEP / (STEP / tokens(e) * passes(e) + e["update_ms"]) * 1e3


def per_day(tokens_per_s):
    return f"{tokens_per_s * 86_400 / 1e9:.2f}"


def kernels(e, update=True):
    """Milliseconds of the profiled step's kernels but for communication, which waits for others."""
    without = ["communication"] if update else ["communication", "optimizer"]
    return sum(ms for kind, ms in e["kinds_ms"].items() if kind not in without)


def groups(entries, keys):
    """{what entries have in common: those entries}"""
    found = {}
    for e in entries:
        found.setdefault(tuple(e[key] for key in keys), []).append(e)
    return found


def compared(entries, keys):
    """tilemoe's entry and another's, of what has both."""
    for of in groups(entries, keys).values():
        ours = next((e for e in of if e["experts"] == "tilemoe"), None)
        for e in of if ours else ():
            if e is not ours:
                yield ours, e


def measured(entries):
    rows = []
    for e in entries:
        rows.append([
            *start(e), f"{e['ms']:.1f}", f"{e['update_ms']:.1f}",
            f"{e['tokens_per_s_and_process']:,.0f}", per_day(e["tokens_per_s_and_process"]),
            f"{e['mfu']:.1%}", f"{e['peak_bytes'] / 2**30:.1f}",
            f"{e['reserved_bytes'] / 2**30:.1f}", per_day(speed(e)),
        ])  # fmt: skip
    columns = ["step, ms", "of it update, ms", "tokens/s/GPU", "10^9 tokens/day/GPU", "MFU"]
    return table([*HEADER, *columns, "peak, GiB", "taken, GiB", PER_DAY], rows)


def against(entries):
    rows = []
    for ours, e in compared(entries, SETTING):
        layers = by_the_layer(ours), by_the_layer(e)
        predicted = "" if None in layers else f"{1 + (layers[1] - layers[0]) / ours['ms']:.2f}"
        ratios = [e["ms"] / ours["ms"], passes(e) / passes(ours), kernels(e) / kernels(ours)]
        ratios.append(e["peak_bytes"] / ours["peak_bytes"])
        rows.append([*start(e), *(f"{ratio:.2f}" for ratio in ratios), predicted])
    columns = ["step", "step without update", "kernels", "peak memory"]
    columns.append("step, by the layers' times alone")
    return table([*HEADER, *columns], rows)


def best(entries, by=speed, column=PER_DAY):
    """Of a whole model, each implementation at its fastest, by tokens a second."""
    keys = ("device", "config", "layers", "processes")
    fastest = {}
    for e in sorted(filter(whole, entries), key=by):
        fastest[tuple(e[key] for key in keys), e["experts"]] = e
    rows = []
    for ours, e in compared(fastest.values(), keys):
        size = f"{ours['recompute']}, {micro_batch(ours)}"
        rows.append([*start(e), per_day(by(e)), size, per_day(by(ours)), f"{by(ours) / by(e):.2f}"])
    columns = [column, "TileMoE's recompute, micro-batch", "its tokens", "ratio"]
    return table([*HEADER, *columns], rows)


def best_measured(entries):
    """By what was measured: an update in each step."""
    return best(entries, lambda e: e["tokens_per_s_and_process"], "10^9 tokens/day/GPU")


def whole_of(near, far):
    """near's model with all layers: the missing ones' time by the difference of two depths."""
    c = CONFIGS[near["config"]]
    more = (c.layers - near["layers"]) / (far["layers"] - near["layers"])
    line = lambda value: value(near) + more * (value(far) - value(near))
    update = line(lambda e: e["update_ms"])
    return near | {"layers": c.layers, "update_ms": update, "ms": line(passes) + update}


def depths(entries):
    keys = [key for key in (*SETTING, "experts") if key != "layers"]
    found = []
    for of in groups((e for e in entries if not whole(e)), keys).values():
        if len(of) > 1:
            near, far = min(of, key=lambda e: e["layers"]), max(of, key=lambda e: e["layers"])
            layer = (passes(far) - passes(near)) / (far["layers"] - near["layers"])
            found.append(whole_of(near, far) | {"layer": layer, "depths": (near, far)})
    times = {id(e): passes(e) / passes(ours) for ours, e in compared(found, SETTING)}
    rows = []
    for e in found:
        mfu = speed(e) * flop_of_token(CONFIGS[e["config"]]) / PEAKS["H100"]
        rows.append([
            *start(e), " and ".join(str(of["layers"]) for of in e["depths"]), f"{e['layer']:.2f}",
            f"{passes(e):.0f}", f"{e['update_ms']:.0f}", per_day(speed(e)), f"{mfu:.1%}",
            f"{times[id(e)]:.2f}" if id(e) in times else "",
        ])  # fmt: skip
    columns = ["measured layers", "one layer, ms", "step without update, ms", "update, ms", PER_DAY]
    return table([*HEADER, *columns, "MFU", "TileMoE's times this"], rows)


def largest(entries):
    rows = []
    found = [e for e in entries if "does_not_fit_micro_batch" in e]
    keys = [key for key in SETTING if key != "micro_batch"]
    times = {id(e): ours["micro_batch"] / e["micro_batch"] for ours, e in compared(found, keys)}
    for e in found:
        ratio = f"{times[id(e)]:.2f}" if id(e) in times else ""
        rows.append([*start(e), e["does_not_fit_micro_batch"], ratio])
    return table([*HEADER, "does not fit", "TileMoE's times this"], rows)


def scaling(entries):
    keys = [key for key in (*SETTING, "experts") if key != "processes"]
    rows = []
    for of in groups(entries, keys).values():
        alone = next((e for e in of if e["processes"] == 1), None)
        for e in of if alone and len(of) > 1 else ():
            of_one = passes(alone), kernels(alone, update=False)
            kept = [f"{ms / passes(e):.1%}" for ms in of_one]
            rows.append([*start(e), f"{passes(e):.1f}", f"{e['update_ms']:.1f}", *kept])
    columns = ["step without update, ms", "update, ms", "of one GPU's speed"]
    return table([*HEADER, *columns, "of the speed of its kernels"], rows)


def by_the_layer(e):
    """Milliseconds that the layer's own bench says for the experts of a step; None where that was
    on another GPU or of another layer."""
    c = CONFIGS[e["config"]]
    for layer in json.loads(LAYERS.read_text()):
        same = all(layer["shape"][key] == vars(c)[key] for key in "dnEK")
        named = layer["backend"] == LAYER_NAMES.get(e["experts"])
        if same and named and layer["device"] == e["device"]:
            ms = layer["fwd_ms"] + layer["bwd_ms"]
            return e["layers"] * ms * tokens(e) / layer["shape"]["T"]
    return None


def breakdown(entries):
    rows = []
    for e in entries:
        if "kinds_ms" in e:
            kinds = [e["kinds_ms"].get(kind, 0.0) for kind in KINDS]
            values = [*kinds, kernels(e), e["ms"], by_the_layer(e)]
            rows.append([*start(e), *("" if v is None else f"{v:.1f}" for v in values)])
    columns = [*KINDS, "all but communication", "step", "experts by the layer alone"]
    return table([*HEADER, *columns], rows)


PARTS = {
    "What was measured": measured,
    "The same micro-batch, over TileMoE's": against,
    "The whole model from some of its layers": depths,
    "Each at its fastest, as measured": best_measured,
    "Each at its fastest, with an update in 65,536 tokens": best,
    "The largest micro-batch": largest,
    "Several GPUs": scaling,
    "Where a step's time goes, ms": breakdown,
}


def page(text, entries):
    entries = [e for e in entries if "ms" in e]
    versions = {(e["device"], e["versions"]["torch"], e["commit"]) for e in entries}
    where = "; ".join(f"{d}, torch {t}, commit `{c}`" for d, t, c in sorted(versions))
    written = f"{where}: [`{RESULTS.name}`](../benchmarks/results/{RESULTS.name})\n"
    # What searched for the largest micro-batch may have measured few steps of it.
    timed = [e for e in entries if "does_not_fit_micro_batch" not in e]
    for title, part in PARTS.items():
        tabled = part(entries if part is largest else timed)
        if tabled.count("\n") > 2:
            written += f"\n### {title}\n{tabled}"
    return with_part(text, BEGIN, written)


LABELS = {
    "tilemoe": "TileMoE",
    "sonic-moe": "sonic-moe",
    "scattermoe": "ScatterMoE",
    "grouped_mm": "grouped_mm, compiled",
}
DRAWN = {1: "one H200", 4: "four H200s, FSDP-2"}  # the 7B model's, by GPUs


def draw(entries, output):
    """Each implementation at its fastest, on one GPU and on four: one scale, a panel for each."""
    from tilemoe.bench.plots import plt, save  # needs matplotlib

    rate = lambda e: e["tokens_per_s_and_process"] * 86_400 / 1e9
    figure, panels = plt.subplots(
        1, len(DRAWN), figsize=(8, 2), sharex=True, width_ratios=(1, 1), layout="constrained"
    )
    for panel, (processes, title) in zip(panels, DRAWN.items()):
        mine = [e for e in entries if e["config"] == "7B" and whole(e)]
        mine = [e for e in mine if e["processes"] == processes and "H200" in e["device"]]
        fastest = {e["experts"]: rate(e) for e in sorted(mine, key=rate)}
        names = [name for name in LABELS if name in fastest]
        colours = ["#0969da" if name == "tilemoe" else "#8c959f" for name in names]
        drawn = panel.barh(
            [LABELS[name] for name in names], [fastest[name] for name in names], color=colours
        )
        panel.bar_label(drawn, fmt=" %.2f")
        panel.invert_yaxis()
        panel.set_title(title, loc="left")
        panel.margins(x=0.15)
    figure.supxlabel("billions of tokens a day and GPU, a model of 7B (higher is better)", fontsize=9)
    save(figure, output)


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    text, entries = PAGE.read_text(), json.loads(RESULTS.read_text())
    written = page(text, entries)
    if args.check:
        return int(written != text)
    PAGE.write_text(written)
    draw([e for e in entries if "ms" in e and "does_not_fit_micro_batch" not in e], PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
