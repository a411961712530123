"""The tables of the kits, from gpu_kits.json and gpu_few_tokens.json, for gpu_tables.py."""

import statistics

import gpu_kits
from peer_tables import PASSES, by_peer, ours_of, peer_row, said_of_peers, shape_of
from results_tables import marks, milliseconds, passed, step_of, table

NAMES = {
    "tilemoe": "TileMoE, its own choice",
    gpu_kits.SM90: "TileMoE, `sm90`",
    gpu_kits.SM80: "TileMoE, `sm80`",
    "torch-dense": "the products, dense, cuBLAS",
    gpu_kits.SCATTER: "ScatterMoE",
    gpu_kits.SCATTER_SM80: "ScatterMoE, `mma.sync`",
    "torch-grouped_mm": "`grouped_mm`, eager",
}


def ratio(value):
    return "" if value is None else f"{value:.3f}"


def layers(results):
    """Every layer and peer: times, their part by kernels alone, and the ratios to the sm80 kit."""
    rows = []
    for item in passed(results):
        report = item["report"]
        found = by_peer(item)
        for name, entry in found.items():
            over = {}
            if gpu_kits.SM80 in found and name != gpu_kits.SM80:
                over = gpu_kits.ratios(report, name, gpu_kits.SM80)
            kernels = gpu_kits.kernels_ms(entry)
            rows.append(
                [
                    peer_row(item),
                    NAMES.get(name, name),
                    *(milliseconds(entry[key]) for key in PASSES),
                    milliseconds(entry["fwd_plus_bwd_ms"]),
                    milliseconds(kernels),
                    f"{entry['tflops']:.0f}",
                    *(ratio(over.get(way)) for way in gpu_kits.PASSES),
                ]
            )
    header = [
        "layer",
        "what",
        "forward, ms",
        "backward, ms",
        "both, ms",
        "kernels alone, ms",
        "TFLOP/s",
        "over `sm80`, forward",
        "backward",
        "both",
    ]
    return table(header, rows)


def means(results):
    """The ratios of both passes over the layers that count."""
    rows = []
    for bar in results["bars"]:
        if not bar["layers"]:
            continue
        alone = results["by_kernels"].get(bar["of"], {}).values()
        rows.append(
            [
                NAMES[bar["of"]],
                ratio(bar.get("mean")),
                ratio(bar.get("least")),
                f"{statistics.geometric_mean(alone):.3f}" if alone else "",
                f"{min(alone):.3f}" if alone else "",
                ", ".join(f"{name}: {why}" for name, why in bar["without"].items()),
            ]
        )
    header = [
        "time over TileMoE's by `sm80`",
        "geometric mean",
        "least",
        "by kernels alone: geometric mean",
        "least",
        "without",
    ]
    return table(header, rows)


def steps(results):
    """Each step's kernels by kit."""
    rows = []
    for item in passed(results):
        found = by_peer(item)
        times = {}
        for kit in (gpu_kits.SM90, gpu_kits.SM80):
            for way, kernels in found.get(kit, {}).get("kernels", {}).items():
                for kernel, ms in kernels.items():
                    of_step = times.setdefault((way, step_of(kernel)), {})
                    of_step[kit] = of_step.get(kit, 0.0) + ms
        for (way, step), of in times.items():
            both = [of.get(kit) for kit in (gpu_kits.SM90, gpu_kits.SM80)]
            cells = [peer_row(item), way, step, *map(milliseconds, both)]
            rows.append([*cells, ratio(both[0] / both[1]) if all(both) else ""])
    header = ["layer", "pass", "step", "`sm90`, ms", "`sm80`, ms", "`sm90` over `sm80`"]
    return table(header, rows) if rows else ""


def kits(results):
    """All of gpu_kits.json."""
    shapes = ", ".join(f"{ours_of(i)['config']} {shape_of(ours_of(i))}" for i in passed(results))
    text = (
        f"{said_of_peers(results)} T d n E K: {shapes}.\n\n{layers(results)}"
        f"\nForward and backward together, over these layers:\n\n{means(results)}"
    )
    if by_step := steps(results):
        text += f"\nKernels by torch's profiler, medians of calls:\n\n{by_step}"
    return text


def few_tokens(results):
    """All of gpu_few_tokens.json."""
    rows = []
    for entry in results["entries"]:
        for name, us in entry["us"].items():
            rows.append(
                [
                    entry["config"] + marks(results, {"commit": results["commit"], "backend": name}),
                    str(entry["shape"]["T"]),
                    NAMES[name],
                    f"{statistics.mean(entry['touched']):.1f}",
                    f"{entry['touched_bytes'] / 1e6:.1f}",
                    f"{us:.1f}",
                    f"{entry['touched_bytes'] / us * 1e-6:.2f}",
                    f"{entry['bytes_us']:.1f}" if entry["bytes_us"] else "",
                    f"{entry['launches'][name]:g}",
                    str(entry["copies"]),
                ]
            )
    header = [
        "layer",
        "T",
        "what",
        "experts touched",
        "their MB",
        "us",
        "TB/s",
        "limit, us",
        "launches",
        "copies",
    ]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['device']}, driver {results['driver_version']}, commit `{results['commit']}`, "
        f"{results['rounds']} rounds; {versions}. The limit is what the touched experts' weights "
        "take at the GPU's bandwidth.\n\n" + table(header, rows)
    )
