"""Pictures of the entries that the benches write as JSON. Needs matplotlib, no torch."""

import re

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "tilemoe",  # the same file from the same numbers
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
import matplotlib.pyplot as plt  # noqa: E402

# Backend -> label, colour of the forward (or of what is saved), of the backward (or of the rest).
LOOKS = {
    "tilemoe": ("TileMoE", "#1b6ca8", "#7fb3d5"),
    "tilemoe-cpu": ("TileMoE", "#1b6ca8", "#7fb3d5"),
    "tilemoe-cuda": ("TileMoE", "#1b6ca8", "#7fb3d5"),
    "tilemoe-dh-over-h": ("TileMoE, dH over H", "#0b3c5d", "#6f93ad"),
    "tilemoe-small-peak": ("TileMoE, small peak", "#5b9aa0", "#b8d8d8"),
    "torch-grouped_mm": ("grouped_mm, eager", "#b45f06", "#e8b27a"),
    "torch-grouped_mm-compiled": ("grouped_mm, compiled", "#bf9000", "#ffe599"),
    "onednn-dense": ("oneDNN, the products alone", "#555555", "#aaaaaa"),
    "sonic-moe": ("sonic-moe", "#38761d", "#93c47d"),
    "scattermoe": ("ScatterMoE", "#741b47", "#c27ba0"),
    "transformers-tilemoe": ("transformers with TileMoE", "#134f5c", "#76a5af"),
    "transformers-eager": ("transformers eager", "#7f6000", "#ffd966"),
    "transformers-grouped_mm": ("transformers grouped_mm", "#990000", "#ea9999"),
    "transformers-batched_mm": ("transformers batched_mm", "#351c75", "#b4a7d6"),
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Kinds of kernels, TileMoE's steps first: what a name contains.
KINDS = {
    "up-projection": r"up_projection|SwiGLUEpilogue|ActivationEpilogue",
    "activation gradient": r"activation_gradient|ActivationGradientEpilogue",
    "weight gradients": r"weight_gradient|WeightGradientEpilogue",
    "input gradient": r"input_gradient|SummedWeights|DensePart",
    "down-projection": r"down_projection|StoreEpilogue",
    "combine": r"combine",
    "router and routing": r"route|top_k|routing|score_gradient|bias_gradient",
    "other matrix products": r"(?i)gemm|nvjet|cutlass|cublas|mma",
    "gather, scatter, sort": r"(?i)gather|scatter|index|sort|scan",
    "elementwise": r"(?i)elementwise|triton|softmax|reduce",
    "other": r"",
}


def look(backend):
    return LOOKS.get(backend, (backend, "#333333", "#999999"))


def save(figure, output):
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
    plt.close(figure)


def _unique(values):
    return list(dict.fromkeys(values))


def _bars(axes, entries, value):
    """Grouped by case, a colour a backend."""
    configs, backends = (_unique(e[key] for e in entries) for key in ("config", "backend"))
    width = 0.8 / len(backends)
    for index, backend in enumerate(backends):
        mine = {e["config"]: value(e) for e in entries if e["backend"] == backend}
        at = [i + (index - (len(backends) - 1) / 2) * width for i in range(len(configs))]
        heights = [mine.get(config, 0) for config in configs]
        axes.bar(at, heights, width, label=look(backend)[0], color=look(backend)[1])
    axes.set_xticks(range(len(configs)), configs)


def _gflops(entry, key, flop):
    """Per second, of the pass whose time is at `key`; 0 where it was not timed."""
    d, n = (entry["shape"][letter] for letter in "dn")
    ms = entry.get(key)
    return flop * entry["rows"] * d * n / ms * 1e-6 if ms else 0


def throughput(entries, output):
    """Speed of each pass; two operations a multiply-add of the layer's products."""
    passes = [(key, flop, title) for key, flop, title in
              (("fwd_ms", 6, "forward"), ("bwd_ms", 12, "backward"))
              if any(key in e for e in entries)]  # fmt: skip
    configs = len(_unique(e["config"] for e in entries))
    figure, panels = plt.subplots(
        len(passes), 1, figsize=(max(8, 1.6 * configs + 2), 2.6 * len(passes)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, (key, flop, title) in zip(panels[:, 0], passes):
        fastest = max(_gflops(entry, key, flop) for entry in entries)
        unit, scale = ("TFLOP/s", 1e3) if fastest >= 1e3 else ("GFLOP/s", 1)
        _bars(axes, entries, lambda entry: _gflops(entry, key, flop) / scale)
        axes.set_title(f"{title}, {unit}", loc="left")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"One MoE layer, {entries[0]['dtype']}, {entries[0]['device']}")
    save(figure, output)


def _contract(dtype, point):
    """Bytes of X, H and 16 a (token, expert) pair, the most that TileMoE keeps."""
    T, d, n, K = (point[letter] for letter in "TdnK")
    return BYTES[dtype] * (T * d + 2 * T * K * n) + 16 * T * K


def memory(entries, output):
    """What is kept and the peak against granularity d/n at constant n * K, of one case."""
    figure, (kept, peak) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for entry in entries:
        points = entry["granularity"]
        x = [point["d"] / point["n"] for point in points]
        label, colour, _ = look(entry["backend"])
        kept.plot(x, [p["saved_bytes"] / 2**20 for p in points], "o-", color=colour, label=label)
        above = [(p["peak_bytes"] - p["resident_bytes"]) / 2**20 for p in points]
        peak.plot(x, above, "o-", color=colour, label=label)
    first = max((e for e in entries), key=lambda e: len(e["granularity"]))
    points = first["granularity"]
    kept.plot([p["d"] / p["n"] for p in points],
              [_contract(first["dtype"], p) / 2**20 for p in points],
              "--", color="black", linewidth=1, label="X, H and the routing")  # fmt: skip
    for axes, title in ((kept, "kept for backward, MiB"), (peak, "peak above weights, X, dO, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("d/n, at constant n K and n E")
        axes.set_title(title, loc="left")
    handles, labels = kept.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    shape = " ".join(f"{name}={first['shape'][name]}" for name in "Td")
    figure.suptitle(f"{first['config']}: {shape}, {first['dtype']}, {first['device']}")
    save(figure, output)


def parts(entry):
    """[(name, ms)] in the order in which they ran: kernels, or the steps of `tilemoe bench`."""
    kernels = entry.get("kernels") or {}
    found = [(name, ms) for times in kernels.values() for name, ms in times.items()]
    if not found:
        found = [(name, step["ms"]) for name, step in (entry.get("steps") or {}).items()
                 if "ms" in step]  # fmt: skip
    return found


def kind(name):
    """What a kernel, or a step of `tilemoe bench`, works on, in words: the first of KINDS that fits."""
    return next(words for words, pattern in KINDS.items() if re.search(pattern, name))


def kernels(entries, output):
    """A bar for each backend, all on one scale, of the kinds of its kernels."""
    totals = {}
    for entry in entries:
        of = totals.setdefault(entry["backend"], dict.fromkeys(KINDS, 0.0))
        for name, ms in parts(entry):
            of[kind(name)] += ms
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.5 * len(totals)), layout="constrained")
    longest = max(sum(of.values()) for of in totals.values())
    colours = plt.get_cmap("tab20").colors
    for row, of in enumerate(totals.values()):
        left = 0.0
        for index, (words, ms) in enumerate(of.items()):
            label = words if any(other[words] for other in totals.values()) else None
            axes.barh(row, ms, left=left, color=colours[index], label=None if row else label)
            if ms > 0.05 * longest:
                axes.text(left + ms / 2, row, f"{ms:.2f}", ha="center", va="center", fontsize=7)
            left += ms
        axes.text(left, row, f" {left:.2f} ms", va="center")
    axes.set_yticks(range(len(totals)), [look(backend)[0] for backend in totals])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("ms of kernels")
    first = entries[0]
    where = f", {first['device']}" if "device" in first else ""
    axes.set_title(f"{first['config']}{where}", loc="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, output)


def draw(entries, folder):
    """All pictures that the entries have numbers for; their paths."""
    timed = [e for e in entries if "fwd_ms" in e or "bwd_ms" in e]
    paths = []
    for dtype in _unique(e["dtype"] for e in timed):
        paths.append(folder / f"throughput_{dtype}.svg")
        throughput([e for e in timed if e["dtype"] == dtype], paths[-1])
    for config in _unique(e["config"] for e in entries):
        mine = [e for e in entries if e["config"] == config]
        if any(e.get("granularity") for e in mine):
            paths.append(folder / f"memory_{config}.svg")
            memory([e for e in mine if e.get("granularity")], paths[-1])
        if any(parts(e) for e in mine):
            paths.append(folder / f"kernels_{config}.svg")
            kernels([e for e in mine if parts(e)], paths[-1])
    return paths
