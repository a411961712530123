#!/usr/bin/env python3
"""Writes the GPU's tables of docs/measured.md and README.md from the results files of
scripts/gpu/run.py.

  python3 benchmarks/gpu_tables.py             # rewrites what stands between the pages' marks
  python3 benchmarks/gpu_tables.py --check     # status 1 where a page differs from the files
"""

import argparse
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURED, README = ROOT / "docs" / "measured.md", ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- gpu_tables.py writes from here -->\n", "<!-- to here -->\n"
SHAPE = "TdnEK"
CHECKS = ["test", "repeat", "huge", *(f"sanitize-{i}" for i in range(1, 5))]
# In the order in which they run.
STEPS = ["router", "top_k", "route", "up_projection", "down_projection", "combine",
         "activation_gradient", "score_gradient", "weight_gradient_2", "router_backward",
         "router_gradient", "input_gradient", "combine_dX", "weight_gradient_1", "bias_gradient"]


def stage(name):
    file = RESULTS / f"gpu_{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def heading(title, results, command):
    """Where and at which commit it was measured, and by which stage."""
    return (f"### {title}\n{results['name']}, driver {results['driver_version']}, commit "
            f"`{results['commit']}`: [`gpu_{results['stage']}.json`]"
            f"(../benchmarks/results/gpu_{results['stage']}.json), by `scripts/gpu/run.py {command}`.\n\n")


def passed(results):
    return [i for i in results["items"] if i["status"] == "passed"]


def share(part, whole):
    return f"{100 * part / whole:.0f} %" if part and whole else ""


def config(entry, results):
    """Its name, and its commit where that is not the others'."""
    commit = entry["commit"]
    return entry["config"] + ("" if commit == results["commit"] else f" (at `{commit[:7]}`)")


def milliseconds(value):
    return "" if value is None else f"{value:.3f}"


def layers(results):
    """The whole layer, case by case."""
    rows = []
    for item in passed(results):
        entry = item["report"][0]
        shape = " ".join(f"{name}={entry['shape'][name]}" for name in SHAPE)
        kind = ", ".join(k for k in (entry["routing"], entry["rounding"])
                         if k not in ("random", "none"))
        cells = [config(entry, results), shape, kind]
        for key, name in (("fwd_ms", "forward"), ("bwd_ms", "backward")):
            host = entry["host_ms"].get(name)
            cells += [milliseconds(entry[key]), share(entry["limit_ms"].get(name), entry[key]),
                      "" if host is None else f"{1000 * host:.0f}"]
        rows.append(cells)
    return table(["config", "shape", "routing", "forward, ms", "limit / time", "host, us",
                  "backward, ms", "limit / time", "host, us"], rows)


def steps(results):
    """The steps that have a dense product to be compared with, and what the others take."""
    rows = []
    for item in passed(results):
        entry = item["report"][0]
        if (entry["routing"], entry["rounding"]) != ("random", "none"):
            continue
        for name, step in sorted(entry["steps"].items(), key=lambda s: STEPS.index(s[0])):
            dense = "dense_ms" in step
            rows.append([config(entry, results), name, milliseconds(step["ms"]),
                         share(step["limit_ms"], step["ms"]),
                         share(step["dense_ms"], step["ms"]) if dense else "",
                         f"{step['tflops']:.0f}" if dense else "", f"{step['gb_per_s']:.0f}"])
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
        rows.append([config, f"{tiles:.0f}", str(plain["rows"]), str(rounded["rows"]),
                     *(f"{ns:.2f}" for ns in nanoseconds),
                     f"{nanoseconds[0] / nanoseconds[1]:.3f}",
                     milliseconds(plain["fwd_ms"]), milliseconds(rounded["fwd_ms"])])
    return table(["config", "tiles an expert", "pairs, top-K", "pairs, nearest", "ns a pair, top-K",
                  "ns a pair, nearest", "ratio", "forward, top-K, ms", "forward, nearest, ms"], rows)


def configurations(results):
    """The cost model's picks, tile orders and early launches."""
    report = results["items"][0]["report"]
    name = lambda entry: [entry["config"], entry["step"]] if "step" in entry else [entry["config"]]
    picks = [[*name(e), ", ".join(f"{tile} {ms:.3f}" for tile, ms in e["ms"].items()), e["pick"],
              f"{e['pick_over_best']:.3f}"] for e in report["projections"]]
    groups = [[*name(e), *(milliseconds(ms) for ms in e["ms"].values())]
              for e in report["column_groups"]]
    widths = list(report["column_groups"][0]["ms"])
    early = [[*name(e), milliseconds(e["ms"]["off"]), milliseconds(e["ms"]["on"])]
             for e in report["early_launch"]]
    return (table(["config", "step", "tiles, ms", "the cost model's pick", "pick / best"], picks)
            + "\nBlocks of columns that go together (of 256 columns), ms:\n\n"
            + table(["config", "step", *widths], groups)
            + "\nProgrammatic dependent launch of the three kernels, ms:\n\n"
            + table(["config", "off", "on"], early))


def peers(results):
    rows = []
    for item in passed(results):
        ours, peer = item["report"]
        for key, ratio in ours["time_of_peers"].items():
            rows.append([ours["config"], {"fwd_ms": "forward", "bwd_ms": "backward"}[key],
                         milliseconds(ours[key]), milliseconds(peer[key]), f"{ratio:.3f}"])
    versions = [i["report"][1]["versions"] for i in passed(results)][:1]
    said = ", ".join(f"{name} {version}" for name, version in versions[0].items()) if versions else ""
    header = ["config", "pass", "TileMoE, ms", "sonic-moe, ms", "ratio"]
    return f"In turn, round by round, in one call; {said}.\n\n" + table(header, rows)


def tests(all_results):
    first, rows = all_results[0], []
    for results in all_results:
        where = [results["stage"]]
        where += [results["name"]] if results["name"] != first["name"] else []
        where += [f"at `{results['commit'][:7]}`"] if results["commit"] != first["commit"] else []
        for item in results["items"]:
            report = item.get("report")
            if isinstance(report, dict):
                report = f"{report['tests']} tests, {report['failures']} failures" + (
                    f", skipped: {', '.join(report['skipped'])}" if report["skipped"] else "")
            elif isinstance(report, list):
                report = "; ".join(report)
            rows.append([", ".join(where), item["item"], item["status"], report or ""])
    return table(["stage", "what", "", "said"], rows)


# The first of these in a kernel's name says which step it is.
KERNELS = {"combine_rows": "combine", "ActivationGradientEpilogue": "activation_gradient",
           "SwiGLUEpilogue": "up_projection", "ActivationEpilogue": "up_projection",
           "WeightGradientEpilogue": "weight_gradient_1, _2", "SummedWeights": "input_gradient",
           "StoreEpilogue": "down_projection"}


def profiles(results):
    """Medians over the launches of each step."""
    launches = {}
    for item in passed(results):
        for launch in item["report"]:
            step = next(step for part, step in KERNELS.items() if part in launch["kernel"])
            launches.setdefault((item["item"], step), []).append(launch)
    rows = []
    for (config, step), all_of_it in launches.items():
        value = lambda metric: statistics.median(launch[metric] for launch in all_of_it)
        moved = value("dram__bytes_read.sum") + value("dram__bytes_write.sum")
        rows.append([config, step, milliseconds(value("gpu__time_duration.sum") * 1e-6),
                     f"{value('lts__t_sectors.avg.pct_of_peak_sustained_elapsed'):.0f} %",
                     f"{value('sm__cycles_elapsed.avg.per_second') * 1e-9:.2f}",
                     f"{moved * 1e-9:.2f}", f"{value('lts__t_sector_hit_rate.pct'):.0f} %"])
    return table(["config", "step", "ms", "of L2's peak", "GHz", "DRAM, GB", "L2 hits"], rows)


def page_part():
    text = ""
    if results := stage("bench"):
        text += heading("The layer", results, "bench") + layers(results) + "\n"
        text += heading("Its steps", results, "bench") + steps(results) + "\n"
    if results := stage("rounding"):
        text += heading("Token rounding", results, "rounding") + rounding(results) + "\n"
    if results := stage("configurations"):
        text += (heading("Tiles, orders and launches", results, "configurations")
                 + configurations(results) + "\n")
    if results := stage("peer"):
        text += heading("Against sonic-moe", results, "peer") + peers(results) + "\n"
    if results := stage("profile"):
        text += heading("Counters", results, "profile") + profiles(results) + "\n"
    checks = [r for r in map(stage, CHECKS) if r]
    if checks:
        text += heading("Tests and sanitizers", checks[0], "test repeat huge sanitize-1 ...")
        text += tests(checks)
    return text


def summary():
    """The configurations' whole layers, for a page that tells no more."""
    results, rows = stage("bench"), []
    for item in passed(results):
        entry = item["report"][0]
        if (entry["routing"], entry["rounding"]) == ("random", "none"):
            cells = [f"{entry[key]:.2f} ({entry['limit_ms'][name]:.2f})"
                     for key, name in (("fwd_ms", "forward"), ("bwd_ms", "backward"))]
            shape = ", ".join(str(entry["shape"][name]) for name in SHAPE)
            rows.append([config(entry, results), shape, *cells])
    return table(["", "T, d, n, E, K", "forward, ms (limit)", "backward, ms (limit)"], rows)


def with_part(page, part):
    """The page with `part` between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit("gpu_tables.py: error: a page has lost its marks")
    return before + BEGIN + part + END + after


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    for file, part in ((MEASURED, page_part()), (README, summary())):
        page = file.read_text()
        new = with_part(page, part)
        if args.check and new != page:
            sys.exit(f"gpu_tables.py: {file.relative_to(ROOT)} is not what the results say; "
                     "run me without --check")
        if not args.check:
            file.write_text(new)


if __name__ == "__main__":
    main()
