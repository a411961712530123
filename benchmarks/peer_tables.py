"""The tables of layers beside others', from gpu_peers.json and gpu_torch_layer.json, for
gpu_tables.py."""

from marks import LEGEND
from results_tables import (
    SHAPE,
    config,
    marks,
    milliseconds,
    paragraph,
    passed,
    results_of,
    stage,
    table,
)

SONIC, COMPILED, EAGER = "sonic-moe", "torch-grouped_mm-compiled", "torch-grouped_mm"


PASSES = ("fwd_ms", "bwd_ms")


def by_peer(item):
    """{peer: entry}, ours first, of a layer of gpu_peers.json."""
    return {entry["backend"]: entry for entry in item["report"]}


def ours_of(item):
    return item["report"][0]


def over(ours, peer, keys=PASSES):
    """Our time over a peer's, forward / backward."""
    ratios = ours["time_of_peers"].get(peer)
    return "" if ratios is None else " / ".join(f"{ratios[key]:.3f}" for key in keys)


def mebibytes(value):
    return "" if value is None else f"{value / 2**20:.0f}"


def above(entry, key):
    """MiB above weights, inputs and dO."""
    value = entry.get(key)
    return "" if value is None else mebibytes(value - entry["resident_bytes"])


def shape_of(entry):
    return " ".join(str(entry["shape"][name]) for name in SHAPE)


def peer_row(item):
    """The cells of config and marks: ours', and whether the tree had changes for any peer's."""
    ours, others = ours_of(item), item["report"][1:]
    hashed = {"machine_code": ours.get("machine_code")}
    stamps = ({"backend": o["backend"], "commit": o["commit"], **hashed} for o in others)
    return ours["config"] + marks(ours, *stamps)


def said_of_peers(results):
    """Where, with what and how gpu_peers.json was measured."""
    entries = by_peer(passed(results)[0])
    versions = entries[SONIC if SONIC in entries else "tilemoe"]["versions"]
    commits = sorted({ours_of(item)["commit"] or "unknown" for item in passed(results)})
    words = lambda value: ", ".join(value) if isinstance(value, list) else str(value)
    settings = "; ".join(
        f"{name}: " + ", ".join(f"{k} {words(v)}" for k, v in entry["settings"].items())
        for name, entry in entries.items()
        if entry.get("settings")
    )
    return (
        f"{results['name']}, driver {results['driver_version']}, TileMoE at "
        f"{', '.join(f'`{one}`' for one in commits)}, {results['rounds']} rounds; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + (f". Settings: {settings}" if settings else "")
        + "."
    )


def peers(results):
    """Every layer and peer."""
    rows = []
    for item in passed(results):
        ours = ours_of(item)
        for name, entry in by_peer(item).items():
            host = [
                f"{1000 * entry['host_ms'][way]:.0f}" if way in entry["host_ms"] else ""
                for way in ("forward", "backward")
            ]
            rows.append(
                [
                    peer_row(item)
                    if entry is ours
                    else ours["config"]
                    + marks(
                        ours,
                        entry
                        | {"machine_code": entry.get("machine_code") or ours.get("machine_code")},
                    ),
                    name,
                    *(milliseconds(entry[key]) for key in PASSES),
                    over(ours, name),
                    *host,
                    mebibytes(entry["saved_bytes"]),
                    above(entry, "peak_bytes"),
                    above(entry, "reserved_bytes"),
                    above(entry, "floor_bytes"),
                ]
            )
    header = [
        "layer",
        "peer",
        "forward, ms",
        "backward, ms",
        "TileMoE's time over it",
        "host fwd, us",
        "host bwd, us",
        "kept, MiB",
        "peak, MiB",
        "reserved, MiB",
        "floor, MiB",
    ]
    return said_of_peers(results) + "\n\n" + table(header, rows)


def span(ratios):
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


IMPLEMENTATIONS = {
    "tilemoe": "TileMoE",
    SONIC: "sonic-moe",
    COMPILED: "`grouped_mm`, compiled",
    EAGER: "`grouped_mm`, eager",
}


def spans(results, name):
    """The least and the greatest of our time over a peer's, forward and backward."""
    ratios = [r for r in (ours_of(i)["time_of_peers"].get(name) for i in passed(results)) if r]
    forward, backward = (span([r[key] for r in ratios]) for key in PASSES)
    return f"{forward} of the time of {IMPLEMENTATIONS[name]} forward and {backward} backward"


def versions_of(results):
    found = by_peer(passed(results)[0])
    return found[SONIC]["versions"] | found["tilemoe"]["versions"]


def times(entry):
    """Forward / backward in ms; nothing of a peer that was not timed."""
    return "" if entry is None else " / ".join(f"{entry[key]:.2f}" for key in PASSES)


def readme_peers():
    """The times of all layers, a column an implementation."""
    results = stage("peers")
    versions = versions_of(results)
    rows = [
        [
            peer_row(item),
            shape_of(ours_of(item)),
            *(times(by_peer(item).get(name)) for name in IMPLEMENTATIONS),
        ]
        for item in passed(results)
    ]
    return (
        paragraph(
            f"One {results['name']}, bfloat16, the router included, all called from PyTorch and in "
            f"turn, medians of {results['rounds']} rounds, milliseconds forward / backward "
            f"([file](benchmarks/results/gpu_peers.json), [how](docs/benchmarks.md#beside-other-layers), "
            "[ratios and memory](docs/results.md)). "
            f"TileMoE {versions['tilemoe']}, sonic-moe {versions['sonic-moe']}, torch "
            f"{versions['torch']}. TileMoE takes {spans(results, SONIC)}."
        )
        + "\n"
        + table(["layer", "T d n E K", *IMPLEMENTATIONS.values()], rows)
    )


def beside_peers():
    """Our times over the others', and the peaks."""
    results = stage("peers")
    others = [name for name in IMPLEMENTATIONS if name != "tilemoe"]
    rows = []
    for item in passed(results):
        ours, found = ours_of(item), by_peer(item)
        rows.append(
            [
                peer_row(item),
                *(over(ours, name) for name in others),
                *(above(found.get(name, {}), "peak_bytes") for name in IMPLEMENTATIONS),
            ]
        )
    timed = set.intersection(*(set(by_peer(item)) for item in passed(results)))
    said = ", ".join(spans(results, name) for name in others if name in timed)
    return (
        paragraph(
            f"One {results['name']}, driver {results['driver_version']}, bfloat16, {results['rounds']} "
            f"rounds ([file](../benchmarks/results/gpu_peers.json), "
            "[how](benchmarks.md#beside-other-layers), [every number](measured.md#beside-other-layers))."
        )
        + "\n"
        + paragraph(f"TileMoE takes {said}.")
        + "\n"
        + table(
            [
                "layer",
                "over sonic-moe",
                "over `grouped_mm`, compiled",
                "over `grouped_mm`, eager",
                *(f"peak, MiB: {words}" for words in IMPLEMENTATIONS.values()),
            ],
            rows,
        )
        + spread_of_equal_kernels(results)
    )


def spread_of_equal_kernels(results):
    """What a turn's place does, from two peers whose forward kernels are the same."""
    found = {}
    for item in passed(results):
        same = by_peer(item).get("tilemoe-keeps-h")
        if same and same["fwd_ms"] > 1.02 * ours_of(item)["fwd_ms"]:
            found[item["item"]] = f"{same['fwd_ms'] / ours_of(item)['fwd_ms']:.2f}"
    if not found:
        return ""
    said = ", ".join(f"{ratio} times as long on {name}" for name, ratio in found.items())
    return (
        "\nAt the GPU's power limit a turn's time depends on the turn before it: with "
        f"`overwrite_H=False` the same forward kernels took {said}. There the forward ratios above "
        "flatter TileMoE by as much.\n"
    )


def torch_layers():
    """TileMoE and eager grouped_mm, of gpu_torch_layer.json."""
    cases = {}
    for entry in results_of("gpu_torch_layer.json"):
        cases.setdefault(entry["config"], {})[entry["backend"]] = entry
    rows = []
    for name, of in cases.items():
        ours, eager = of["tilemoe"], of[EAGER]
        times = [" / ".join(f"{e[key]:.3f}" for key in PASSES) for e in (ours, eager)]
        cells = [
            config(ours, ours),
            *times,
            f"{ours['speed_against'][EAGER]:.2f}",
            mebibytes(ours["saved_bytes"]),
            mebibytes(eager["saved_bytes"]),
        ]
        small = [of[one] for one in ("tilemoe-dh-over-h", "tilemoe-small-peak") if one in of]
        cells += [above(e, "peak_bytes") for e in (ours, *small, eager)]
        rows.append(cells)
    entry = ours
    header = [
        "layer",
        "TileMoE, ms",
        "`grouped_mm`, eager, ms",
        "speed",
        "kept, MiB",
        "`grouped_mm`",
        "peak, MiB",
        "dH over H",
        "and small peak",
        "`grouped_mm`",
    ]
    return (
        paragraph(
            f"One {entry['device']}, bfloat16, top-K over random logits, router included, forward / "
            f"backward, {entry['rounds']} rounds, torch {entry['versions']['torch']}, commit "
            f"`{entry['commit']}` ([file](../benchmarks/results/gpu_torch_layer.json)). "
            '"Peak" is above weights, inputs and dO.'
        )
        + "\n"
        + table(header, rows)
        + f"\n{paragraph(LEGEND)}"
    )
