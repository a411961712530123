#!/usr/bin/env python3
"""Writes the tables of docs/measured.md, docs/benchmarks.md and README.md from the results files of
scripts/gpu/run.py, gpu_peers.py, cpu_layer.py and train_study.py, and on every page marks the links
to results of other kernels (marks.py).

  python3 benchmarks/gpu_tables.py             # rewrites what stands between the pages' lines
  python3 benchmarks/gpu_tables.py --check     # status 1 where a page differs from the files
"""

import argparse
import statistics
import sys

from kit_tables import few_tokens, kits
from marks import LEGEND, ROOT, marked
from parallel_tables import expert_parallel
from peer_tables import EAGER, PASSES, beside_peers, mebibytes, peers, readme_peers, torch_layers
from results_tables import (
    SHAPE,
    config,
    marks,
    milliseconds,
    paragraph,
    passed,
    results_of,
    stage,
    step_of,
    table,
)

BEGIN, END = "<!-- gpu_tables.py writes {} from here -->\n", "<!-- to here -->\n"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
CHECKS = ["test", "repeat", "huge", *(f"sanitize-{i}" for i in range(1, 5))]
# In the order in which they run.
STEPS = [
    "router",
    "top_k",
    "route",
    "up_projection",
    "down_projection",
    "combine",
    "activation_gradient",
    "score_gradient",
    "weight_gradient_2",
    "router_backward",
    "router_gradient",
    "input_gradient",
    "combine_dX",
    "weight_gradient_1",
    "bias_gradient",
]


def heading(title, results, command):
    """Where and at which commit it was measured, and by which stage."""
    return (
        f"### {title}\n{results['name']}, driver {results['driver_version']}, commit "
        f"`{results['commit']}`: [`gpu_{results['stage']}.json`]"
        f"(../benchmarks/results/gpu_{results['stage']}.json), by `scripts/gpu/run.py {command}`.\n\n"
    )


def share(part, whole):
    return f"{100 * part / whole:.0f} %" if part and whole else ""


def layers(results):
    """The whole layer, case by case."""
    rows = []
    for item in passed(results):
        entry = item["report"][0]
        shape = " ".join(f"{name}={entry['shape'][name]}" for name in SHAPE)
        kind = ", ".join(
            k for k in (entry["routing"], entry["rounding"]) if k not in ("random", "none")
        )
        cells = [config(entry, results), shape, kind]
        for key, name in (("fwd_ms", "forward"), ("bwd_ms", "backward")):
            host = entry["host_ms"].get(name)
            cells += [
                milliseconds(entry[key]),
                share(entry["limit_ms"].get(name), entry[key]),
                "" if host is None else f"{1000 * host:.0f}",
            ]
        rows.append(cells)
    return table(
        [
            "config",
            "shape",
            "routing",
            "forward, ms",
            "limit / time",
            "host, us",
            "backward, ms",
            "limit / time",
            "host, us",
        ],
        rows,
    )


def steps(results):
    """The steps that have a dense product to be compared with, and what the others take."""
    rows = []
    for item in passed(results):
        entry = item["report"][0]
        if (entry["routing"], entry["rounding"]) != ("random", "none"):
            continue
        for name, step in sorted(entry["steps"].items(), key=lambda s: STEPS.index(s[0])):
            dense = "dense_ms" in step
            rows.append(
                [
                    config(entry, results),
                    name,
                    milliseconds(step["ms"]),
                    share(step["limit_ms"], step["ms"]),
                    share(step["dense_ms"], step["ms"]) if dense else "",
                    f"{step['tflops']:.0f}" if dense else "",
                    f"{step['gb_per_s']:.0f}",
                ]
            )
    return table(["config", "step", "ms", "limit / time", "dense / time", "TFLOP/s", "GB/s"], rows)


THREE_KERNELS = ["up_projection", "down_projection", "combine"]


def rounding(results):
    """The three kernels' time for a pair: top-K's beside that of rounded routing."""
    entries = {(e["config"], e["rounding"]): e for e in (i["report"][0] for i in passed(results))}
    rows = []
    for (config, rule), rounded in entries.items():
        plain = entries.get((config, "none"))
        if rule == "none" or plain is None:
            continue
        nanoseconds = []
        for entry in (plain, rounded):
            ms = sum(entry["steps"][step]["ms"] for step in THREE_KERNELS)
            nanoseconds.append(1e6 * ms / entry["rows"])
        shape = plain["shape"]
        tiles = shape["T"] * shape["K"] / (shape["E"] * 128)
        rows.append(
            [
                config + marks(results, plain, rounded),
                f"{tiles:.0f}",
                str(plain["rows"]),
                str(rounded["rows"]),
                *(f"{ns:.2f}" for ns in nanoseconds),
                f"{nanoseconds[0] / nanoseconds[1]:.3f}",
                milliseconds(plain["fwd_ms"]),
                milliseconds(rounded["fwd_ms"]),
            ]
        )
    return table(
        [
            "config",
            "tiles an expert",
            "pairs, top-K",
            "pairs, nearest",
            "ns a pair, top-K",
            "ns a pair, nearest",
            "ratio",
            "forward, top-K, ms",
            "forward, nearest, ms",
        ],
        rows,
    )


def configurations(results):
    """The cost model's picks, tile orders and early launches."""
    report = results["items"][0]["report"]
    found = marks(results, report)
    name = lambda entry: [entry["config"] + found, *([entry["step"]] if "step" in entry else [])]
    picks = [
        [
            *name(e),
            ", ".join(f"{tile} {ms:.3f}" for tile, ms in e["ms"].items()),
            e["pick"],
            f"{e['pick_over_best']:.3f}",
        ]
        for e in report["projections"]
    ]
    groups = [
        [*name(e), *(milliseconds(ms) for ms in e["ms"].values())] for e in report["column_groups"]
    ]
    widths = list(report["column_groups"][0]["ms"])
    early = [
        [*name(e), milliseconds(e["ms"]["off"]), milliseconds(e["ms"]["on"])]
        for e in report["early_launch"]
    ]
    return (
        table(["config", "step", "tiles, ms", "the cost model's pick", "pick / best"], picks)
        + "\nBlocks of columns that go together (of 256 columns), ms:\n\n"
        + table(["config", "step", *widths], groups)
        + "\nProgrammatic dependent launch of the three kernels, ms:\n\n"
        + table(["config", "off", "on"], early)
    )


# What routing was built in the place of top-K's two steps.
PLACES = ["top_k", "route", "both", "nearest", "balanced", "nearest, each 2048", "nearest, each 256"]


def routing(results):
    """Top-K and the routing from its pairs, or token rounding in their place; choice in groups."""
    entries = results["items"][0]["report"]
    found = marks(results)
    name = lambda e: [e["config"] + found, *(str(e[k]) for k in "TEK"), e["dtype"]]
    us = lambda value: f"{value:.1f}"
    plain = [
        [*name(e), *(us(e["us"][k]) if k in e["us"] else "" for k in PLACES)]
        for e in entries
        if "n_group" not in e
    ]
    groups = [
        [
            *name(e),
            f"{e['topk_group']} of {e['n_group']}",
            *(us(e["us"][k]) for k in ("among_all", "among_best_groups")),
            us(e["us"]["among_best_groups"] - e["us"]["among_all"]),
        ]
        for e in entries
        if "n_group" in e
    ]
    header = ["config", "T", "E", "K", "logits"]
    return (
        table([*header, "top-K, us", "routing, us", *PLACES[2:]], plain)
        + "\nTop-K by sigmoid, renormalised, among all experts and among the best groups:\n\n"
        + table([*header, "groups", "all, us", "best groups, us", "more, us"], groups)
    )


def tests(all_results):
    first, rows = all_results[0], []
    for results in all_results:
        where = [results["stage"]]
        where += [results["name"]] if results["name"] != first["name"] else []
        where += [f"at `{results['commit'][:7]}`"] if results["commit"] != first["commit"] else []
        where.append(marks(results).strip())
        for item in results["items"]:
            report = item.get("report")
            if isinstance(report, dict):
                report = f"{report['tests']} tests, {report['failures']} failures" + (
                    f", skipped: {', '.join(report['skipped'])}" if report["skipped"] else ""
                )
            elif isinstance(report, list):
                report = "; ".join(report)
            rows.append(
                [", ".join(filter(None, where)), item["item"], item["status"], report or ""]
            )
    return table(["stage", "what", "", "said"], rows)


def profiles(results):
    """Medians over the launches of each step."""
    launches = {}
    for item in passed(results):
        for launch in item["report"]:
            launches.setdefault((item["item"], step_of(launch["kernel"])), []).append(launch)
    rows = []
    for (config, step), all_of_it in launches.items():
        value = lambda metric: statistics.median(launch[metric] for launch in all_of_it)
        moved = value("dram__bytes_read.sum") + value("dram__bytes_write.sum")
        rows.append(
            [
                config + marks(results),
                step,
                milliseconds(value("gpu__time_duration.sum") * 1e-6),
                f"{value('lts__t_sectors.avg.pct_of_peak_sustained_elapsed'):.0f} %",
                f"{value('sm__cycles_elapsed.avg.per_second') * 1e-9:.2f}",
                f"{moved * 1e-9:.2f}",
                f"{value('lts__t_sector_hit_rate.pct'):.0f} %",
            ]
        )
    return table(["config", "step", "ms", "of L2's peak", "GHz", "DRAM, GB", "L2 hits"], rows)


def measured_page():
    text = ""
    if results := stage("peers"):
        text += (
            "### Beside other layers\n[`gpu_peers.json`](../benchmarks/results/gpu_peers.json), "
            "by `benchmarks/gpu_peers.py`. " + peers(results) + "\n"
        )
    if results := stage("kits"):
        text += (
            "### Kits\n[`gpu_kits.json`](../benchmarks/results/gpu_kits.json), by "
            "`benchmarks/gpu_kits.py`. " + kits(results) + "\n"
        )
    if results := stage("kits_scattermoe"):
        text += (
            "### Kits beside ScatterMoE\n"
            "[`gpu_kits_scattermoe.json`](../benchmarks/results/gpu_kits_scattermoe.json), by "
            "`benchmarks/gpu_kits.py`. " + kits(results) + "\n"
        )
    if results := stage("few_tokens"):
        text += (
            "### Few tokens\n[`gpu_few_tokens.json`](../benchmarks/results/gpu_few_tokens.json), by "
            "`benchmarks/gpu_few_tokens.py`. " + few_tokens(results) + "\n"
        )
    if results := stage("expert_parallel"):
        text += (
            "### Expert parallelism\n"
            "[`gpu_expert_parallel.json`](../benchmarks/results/gpu_expert_parallel.json), by "
            "`benchmarks/gpu_expert_parallel.py`. " + expert_parallel(results) + "\n"
        )
    if results := stage("bench"):
        text += heading("The layer", results, "bench") + layers(results) + "\n"
        text += heading("Its steps", results, "bench") + steps(results) + "\n"
    if results := stage("rounding"):
        text += heading("Token rounding", results, "rounding") + rounding(results) + "\n"
    if results := stage("configurations"):
        text += (
            heading("Tiles, orders and launches", results, "configurations")
            + configurations(results)
            + "\n"
        )
    if results := stage("routing"):
        text += heading("Routing", results, "routing") + routing(results) + "\n"
    if results := stage("profile"):
        text += heading("Counters", results, "profile") + profiles(results) + "\n"
    checks = [r for r in map(stage, CHECKS) if r]
    if checks:
        text += heading("Tests and sanitizers", checks[0], "test repeat huge sanitize-1 ...")
        text += tests(checks)
    return f"{LEGEND}\n\n{text}"


def cpp_layers():
    """The configurations' whole layers from C++."""
    results, rows = stage("bench"), []
    said = paragraph(
        f"One {results['name']}, driver {results['driver_version']}, a run of its own, passes back to "
        'back. "Limit" is what the operations at 798 TFLOP/s or the bytes at 3.0 TB/s take, step by '
        "step ([file](../benchmarks/results/gpu_bench.json); [steps and other routings]"
        "(measured.md#the-layer))."
    )
    for item in passed(results):
        entry = item["report"][0]
        if (entry["routing"], entry["rounding"], entry["biases"]) == ("random", "none", False):
            cells = [
                f"{entry[key]:.2f} ({entry['limit_ms'][name]:.2f})"
                for key, name in (("fwd_ms", "forward"), ("bwd_ms", "backward"))
            ]
            shape = " ".join(str(entry["shape"][name]) for name in SHAPE)
            rows.append([config(entry, results), shape, *cells])
    header = ["layer", "T d n E K", "forward, ms (limit)", "backward, ms (limit)"]
    return said + "\n" + table(header, rows)


def cpu_entries():
    """{(backend, dtype): entry} of cpu_layer.json."""
    return {(e["backend"], e["dtype"]): e for e in results_of("cpu_layer.json")}


def readme_cpu():
    """The CPU in two sentences."""
    ours = cpu_entries()["tilemoe-cpu", "float32"]
    torch = cpu_entries()[EAGER, "float32"]
    return paragraph(
        f"On {ours['threads']} CPU cores, in float32, the layer runs at "
        f"{ours['speed_against'][EAGER]:.2f} times the speed of `grouped_mm`, eager, in torch "
        f"{torch['versions']['torch'].partition('+')[0]}, and keeps {mebibytes(ours['saved_bytes'])} MiB "
        f"for backward instead of {mebibytes(torch['saved_bytes'])} "
        "([file](benchmarks/results/cpu_layer.json), [more](docs/results.md#on-a-cpu))."
    )


def cpu_layer():
    """TileMoE, eager grouped_mm and oneDNN's products on the CPU, by type."""
    entries = cpu_entries()
    ours = entries["tilemoe-cpu", "float32"]
    torch = entries[EAGER, "float32"]
    shape = " ".join(f"{letter}={ours['shape'][letter]}" for letter in SHAPE)
    loads = [e["load_average"] for e in entries.values()]
    names = {
        "tilemoe-cpu": "TileMoE",
        EAGER: f"torch {torch['versions']['torch'].partition('+')[0]}, `grouped_mm`, eager",
        "onednn-dense": "oneDNN, the dense products alone",
    }
    rows = [
        [
            f"{names[backend]}, {dtype}",
            *(f"{entry[key]:.1f}" for key in PASSES),
            mebibytes(entry["saved_bytes"]),
        ]
        for (backend, dtype), entry in entries.items()
        if backend in names
    ]
    return (
        paragraph(
            f"{ours['device']}, {ours['threads']} threads, {shape}, router and routing included. All "
            f"took turns, {ours['rounds']} rounds (commit `{ours['commit']}`, load {min(loads):.1f} to "
            f"{max(loads):.1f}; [file](../benchmarks/results/cpu_layer.json), "
            "[how](benchmarks.md#the-comparison-on-a-cpu))."
        )
        + "\n"
        + table(["", "forward, ms", "backward, ms", "kept for backward, MiB"], rows)
        + "\n"
        + paragraph(
            f"In float32 that is {ours['speed_against'][EAGER]:.2f} times eager PyTorch's speed, and "
            f"{100 * ours['speed_against']['onednn-dense']:.0f} % of what the products alone reach."
        )
    )


def readme_training():
    """What the default training reaches."""
    study = results_of("train_cpu.json")["study"]
    bits = study["bits_per_byte"]
    spread = lambda name: " to ".join(f"{b:.2f}" for b in sorted({min(bits[name]), max(bits[name])}))
    return paragraph(
        f"By seed it ends at {spread('top-k')} bits a byte of held-out text; a dense layer of the same "
        f"active width ends at {spread('dense')}, and `xz -9`, given the training text, at "
        f"{study['xz_bits_per_byte']:.2f} ([file](benchmarks/results/train_cpu.json))."
    )


def huge_cases():
    """What `tilemoe check` said of operands of more than 2^31 elements."""
    results = stage("huge")
    by = lambda good: [
        f"`{item['item']}`" for item in results["items"] if (item["status"] == "passed") == good
    ]
    said = [
        f"{', '.join(names)} {word}"
        for names, word in ((by(True), "passed"), (by(False), "did not pass"))
        if names
    ]
    return paragraph(
        f"Operands of more than 2^31 elements, against float64, on one {results['name']} at commit "
        f"`{results['commit']}`: {'; '.join(said)} ([file](../benchmarks/results/gpu_huge.json))."
    )


PARTS = {
    "README.md": {
        "peers": readme_peers,
        "cpu": readme_cpu,
        "training": readme_training,
    },
    "docs/results.md": {
        "peers": beside_peers,
        "layers": cpp_layers,
        "torch": torch_layers,
        "cpu": cpu_layer,
        "huge": huge_cases,
    },
    "docs/measured.md": {"tables": measured_page},
    "docs/benchmarks.md": {"legend": lambda: paragraph(LEGEND)},
}


def with_part(page, name, part):
    """The page with `part` between its lines of this name."""
    before, begin, rest = page.partition(BEGIN.format(name))
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"gpu_tables.py: error: a page has lost its lines of {name}")
    return before + begin + part + END + after


def written(file):
    """The page as it is to be."""
    page = file.read_text()
    for name, part in PARTS.get(str(file.relative_to(ROOT)), {}).items():
        page = with_part(page, name, part())
    return marked(page)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    for file in PAGES:
        new = written(file)
        if args.check and new != file.read_text():
            sys.exit(
                f"gpu_tables.py: {file.relative_to(ROOT)} is not what the results say; "
                "run me without --check"
            )
        if not args.check and new != file.read_text():
            file.write_text(new)


if __name__ == "__main__":
    main()
