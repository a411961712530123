"""Which numbers of the pages are of other kernels than today's, or of a tree with changes: marks in
the tables, and behind each link to a results file. docs/benchmarks.md explains them."""

import functools
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CURRENT = ROOT / "benchmarks" / "kernel_hash.json"
DIRTY, OTHER_KERNELS, NO_HASH = "†", "‡", "§"
LEGEND = (
    f"{DIRTY} the tree had changes that no commit has; {OTHER_KERNELS} the kernels are others "
    f"today; {NO_HASH} from before results kept a hash of the kernels, which may be others today."
)
LINK = re.compile(
    r"\]\(((?:\.\./)*)benchmarks/results/([\w./-]+\.json)\)"
    r"(?:\[[†‡§]+\]\([^)]*#marks\))?"
)


@functools.cache
def current_hash():
    return json.loads(CURRENT.read_text())["hash"]


def mark(*stamps):
    """Of numbers that have stamps, dicts with `commit` and, of a GPU's, `machine_code`."""
    hashes = [(stamp.get("machine_code") or {}).get("hash") for stamp in stamps]
    found = DIRTY if any("-dirty" in (stamp["commit"] or "") for stamp in stamps) else ""
    if any(one not in (None, current_hash()) for one in hashes):
        found += OTHER_KERNELS
    return found + (NO_HASH if None in hashes else "")


def _stamps(value, outer=None):
    """Of everything in a results file that names a commit; what lies in it has its hash too. Of
    other implementations' numbers, and of an earlier build's beside ours, the commit alone counts."""
    if isinstance(value, dict):
        if "commit" in value:
            here = {
                "commit": value["commit"],
                "machine_code": value.get("machine_code") or (outer or {}).get("machine_code"),
            }
            backend = value.get("backend", "tilemoe")
            if backend == "tilemoe-before" or "tilemoe" not in backend:
                here["machine_code"] = {"hash": current_hash()}
            yield here
            outer = here
        value = value.values()
    elif not isinstance(value, list):
        return
    for one in value:
        yield from _stamps(one, outer)


@functools.cache
def mark_of_file(name):
    """Of a results file; nothing where no GPU is in it."""
    text = (RESULTS / name).read_text()
    stamps = list(_stamps(json.loads(text)))
    if "NVIDIA" not in text:
        return DIRTY if any("-dirty" in (stamp["commit"] or "") for stamp in stamps) else ""
    # The file's own stamp stands above its entries', which have the same hash.
    return mark(*stamps) if stamps else NO_HASH


def marked(text):
    """The text with the mark of each results file behind the links to it."""

    def link(match):
        up, name = match.groups()
        found = mark_of_file(name)
        legend = f"[{found}]({up}docs/benchmarks.md#marks)" if found else ""
        return f"]({up}benchmarks/results/{name}){legend}"

    return LINK.sub(link, text)
