"""The table of gpu_expert_parallel.json, for gpu_tables.py."""

from results_tables import marks, milliseconds, table

NAMES = {
    "own": "all experts on each GPU",
    "serial": "in one piece",
    "serial-kept": "in one piece, gathered X kept",
    "chunks-2": "in 2 chunks",
    "chunks-4": "in 4 chunks",
    "pull": "rows pulled",
    "pull-kept": "rows pulled, pulled X kept",
    "usual": "a send for every pair, `grouped_mm`",
}


def way(name):
    of, _, turns = name.partition("@")
    return NAMES.get(of, of) + (f", {turns} block turns" if turns else "")


def gib(bytes_):
    return "" if bytes_ is None else f"{bytes_ / 2**30:.2f}"


def expert_parallel(results):
    """All of it."""
    rows, links = [], []
    for entry in results["entries"]:
        sizes = " ".join(f"{letter}={size}" for letter, size in entry["shape"].items())
        said = ", ".join(f"{name} {link['GB_per_s']:.0f}" for name, link in entry["links"].items())
        links.append(f"{entry['layer']} {said}")
        for name, ms in entry["ms"].items():
            rows.append(
                [
                    entry["layer"] + marks(results, {"commit": results["commit"]}),
                    sizes,
                    way(name) + (", in a graph" if name in entry["in_graph"] else ""),
                    milliseconds(ms),
                    f"{entry['over_own'][name]:.3f}" if entry["over_own"] else "",
                    gib(entry["peak_bytes"][name]),
                    gib(entry["plan_bytes"][name]),
                ]
            )
    header = ["layer", "of a GPU", "way", "both, ms", "over own", "peak, GiB", "plan, GiB"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['ranks']} x {results['device']} of one host, driver {results['driver_version']}, "
        f"commit `{results['commit']}`, {results['rounds']} rounds; {versions}. Forward and backward, "
        f"the slowest rank. GB/s that leave a GPU: {'; '.join(links)}.\n\n" + table(header, rows)
    )
