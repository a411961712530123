#!/usr/bin/env python3
"""The layer by each of the library's kits on one GPU, beside ScatterMoE, and which bars that meets.

  python3 benchmarks/gpu_kits.py --tilemoe DIR --scattermoe DIR --cache DIR

Each DIR holds Python packages, as `pip install --target DIR` leaves them. All is called from
PyTorch, in rounds, as gpu_peers.py does it:

  tilemoe            as it chooses its kit by itself
  tilemoe-sm90       the products by wgmma
  tilemoe-sm80       the products by mma.sync, as GPUs before Hopper have them
  torch-dense        the experts' products as dense ones, by cuBLAS: what the GPU can do
  scattermoe         as it is
  scattermoe-sm80    with TRITON_OVERRIDE_ARCH=sm80: its kernels by mma.sync too

The last two run in processes of their own. A layer counts where the kernels that ran are the kit's,
and where ScatterMoE's PTX has mma.sync and no wgmma. Results are kept a layer at a time: run it
again after it was cut off, or with other layers of --config, and it adds to the same file. Its
status is 1 until all layers are measured and all bars met.

It writes build/gpu/gpu_kits.json; benchmarks/gpu_tables.py makes the pages' tables of it.
"""

import argparse
import pathlib
import re
import statistics
import sys

import layer_runs

LAYERS = [
    "7b-n256",
    "7b-n1024",
    "30b-n256",
    "30b-n1024",
    "olmoe",
    "qwen3-235b",
    "gpt-oss-20b",
    "few-rows",
]
SM90, SM80, SCATTER, SCATTER_SM80 = "tilemoe-sm90", "tilemoe-sm80", "scattermoe", "scattermoe-sm80"
PEERS = [SM90, SM80, "torch-dense", SCATTER, SCATTER_SM80]
# What a peer's time over tilemoe-sm80's has to be, forward and backward together: the geometric
# mean over the layers, and on each of them.
BARS = {SM90: {"mean": 0.60, "each": 0.55}, SCATTER_SM80: {"mean": 1.4, "each": 1.2}}
PASSES = {"forward": ["fwd_ms"], "backward": ["bwd_ms"], "both": ["fwd_ms", "bwd_ms"]}


def by_peer(report):
    return {entry["backend"]: entry for entry in report}


def ratios(report, over, under):
    """{pass: a peer's time over another's, the median of the rounds' ratios}."""
    found = by_peer(report)
    rounds = list(zip(found[over]["round_times"], found[under]["round_times"]))
    of = lambda keys: [sum(a[k] for k in keys) / sum(b[k] for k in keys) for a, b in rounds]
    return {name: statistics.median(of(keys)) for name, keys in PASSES.items()}


def kernels_ms(entry):
    """Of all its kernels, forward and backward; None where none were seen."""
    found = [ms for of_pass in entry.get("kernels", {}).values() for ms in of_pass.values()]
    return sum(found) if found else None


def kits_of(entry):
    """Of the library's products that ran: {"sm80", "sm90"} or fewer."""
    names = [name for of_pass in entry.get("kernels", {}).values() for name in of_pass]
    ours = " ".join(name for name in names if "tilemoe::" in name)
    return {kit.lower() for kit in re.findall(r"\b[Ss]m(?:80|90)\b", ours)}


def why_not_counted(entry):
    """What shows that a peer ran other kernels than its name says; None where nothing does."""
    name, settings = entry["backend"], entry["settings"]
    if name in (SM80, SM90):
        kit, ran = name.removeprefix("tilemoe-"), kits_of(entry)
        if ran != {kit}:
            return f"{name} ran kernels of {' and '.join(sorted(ran)) or 'no kit'}"
    if name == SCATTER_SM80:
        if settings.get("with wgmma") != 0:
            return f"{name} has wgmma in its PTX, or its PTX was not found"
        if not settings["with mma.sync"]:
            return f"{name} has no mma.sync in its PTX"
    return None


def without(report, peers):
    """Why a layer has no ratio of these peers: a sentence, or None where it has."""
    found = by_peer(report)
    for peer in peers:
        if peer not in found:
            return report[0]["left_out"].get(peer, f"{peer} was not run")
        if reason := why_not_counted(found[peer]):
            return reason
    return None


def judged(reports, peer, bar):
    """How a peer's times over tilemoe-sm80's stand to their bar. reports: {layer: report}"""
    lacking = {name: "not measured" for name in LAYERS if name not in reports}
    counted = {}
    for name, report in reports.items():
        if reason := without(report, (peer, SM80)):
            lacking[name] = reason
        else:
            counted[name] = ratios(report, peer, SM80)["both"]
    result = {"of": peer, "over": SM80, "bar": bar, "layers": counted, "without": lacking}
    if not counted:
        return {**result, "met": None}
    mean, each = statistics.geometric_mean(counted.values()), min(counted.values())
    met = mean >= bar["mean"] and each >= bar["each"]
    return {**result, "mean": mean, "least": each, "met": None if met and lacking else met}


def by_kernels(reports, peer):
    """The ratios of the sums of both's kernels' times, which do not have what a peer waits for the
    host: {layer: ratio}. ScatterMoE's routing keeps the host waiting for the device."""
    found = {}
    for name, report in reports.items():
        sums = [kernels_ms(by_peer(report).get(one, {})) for one in (peer, SM80)]
        if all(sums):
            found[name] = sums[0] / sums[1]
    return found


def judge(items):
    """What the results file says of all the layers that the bars are for."""
    reports = {item["item"]: item["report"] for item in items if item["item"] in LAYERS}
    bars = [judged(reports, peer, bar) for peer, bar in BARS.items()]
    return {"bars": bars, "by_kernels": {peer: by_kernels(reports, peer) for peer in BARS}}


def sentence(bar):
    """A judged bar in a line."""
    line = f"{bar['of']} over {bar['over']}: "
    if "mean" in bar:
        line += f"geometric mean {bar['mean']:.3f}, least {bar['least']:.3f}; "
    line += f"bar {bar['bar']['mean']:.2f} and {bar['bar']['each']:.2f}: "
    line += {True: "met", False: "not met", None: "not judged"}[bar["met"]]
    if bar["without"]:
        line += "; without " + ", ".join(f"{k} ({why})" for k, why in bar["without"].items())
    return line


def summary(report):
    """A line for each peer of a layer."""
    found = by_peer(report)
    for name, entry in found.items():
        line = (
            f"{entry['config']:12} {name:16} {entry['fwd_ms']:8.3f} {entry['bwd_ms']:8.3f} "
            f"{entry['fwd_plus_bwd_ms']:8.3f} ms, {entry['tflops']:5.0f} TFLOP/s"
        )
        if SM80 in found and name != SM80:
            over = ratios(report, name, SM80)
            line += "; over tilemoe-sm80 " + ", ".join(f"{k} {v:.3f}" for k, v in over.items())
        if (kernels := kernels_ms(entry)) is not None:
            line += f"; kernels alone {kernels:.3f} ms"
        yield line


def places(args):
    """The bench's options that have ScatterMoE run by itself."""
    peers = [peer for peer in (SCATTER, SCATTER_SM80) if peer in args.against]
    if args.scattermoe:
        return layer_runs.packages_options({peer: args.scattermoe for peer in peers})
    return ["--python", *(f"{peer}={sys.executable}" for peer in peers)] if peers else []


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    layer_runs.add_options(parser, LAYERS, "build/gpu/gpu_kits.json")
    add = parser.add_argument
    add("--scattermoe", type=pathlib.Path, help="a folder with it; else this Python's")
    add("--against", nargs="*", metavar="PEER", default=PEERS, help="these alone")
    args = parser.parse_args()
    layer_runs.require_folders("gpu_kits.py", args.tilemoe, args.scattermoe)

    folders = {"tilemoe": layer_runs.package_folders("gpu_kits.py", args.tilemoe)}
    if args.scattermoe:
        folders["scattermoe"] = [args.scattermoe / "scattermoe"]
    here = layer_runs.facts("gpu_kits.py", args, args.against, folders)
    runs = layer_runs.Runs(args, "kits", LAYERS, here, judge)
    options = places(args)
    if args.scattermoe:
        peers = [peer for peer in args.against if peer.startswith(SCATTER)]
        runs.compile_ahead(peers, folders["scattermoe"], options)
    runs.run("--kernels", "--against", *args.against, *options)
    runs.write()  # judged anew, where nothing was measured too

    for report in runs.reports():
        print("\n".join(summary(report)))
    bars = judge([item for item in runs.items.values() if item["status"] == "passed"])["bars"]
    print("\n".join(map(sentence, bars)))
    missing = runs.missing()
    print("\n".join(missing) or f"all {len(args.config)} layers measured: {args.out}")
    sys.exit(1 if missing or not all(bar["met"] for bar in bars) else 0)


if __name__ == "__main__":
    main()
