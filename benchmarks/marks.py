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
# Results of this commit kept no hash of the kit sm80's kernels. This is that of the programs and of
# the wheel which they are of.
SM80_OF = {"30c99ca4474c": "ec12219834ff3522"}
LINK = re.compile(
    r"\]\(((?:\.\./)*)benchmarks/results/([\w./-]+\.json)\)"
    r"(?:\[[†‡§]+\]\([^)]*#marks\))?"
)


@functools.cache
def current():
    """What machine_code.stamp() says of the sources as they are."""
    return json.loads(CURRENT.read_text())


def of_sm80(value):
    """Whether a part of a results file is, or has, numbers of the kit sm80."""
    named = (value.get("kit"), value.get("backend"))
    return "sm80" in named or "tilemoe-sm80" in named or "tilemoe-sm80" in value


def _are_current(stamp):
    """For each hash that counts for these numbers, whether it is today's; None where they have none."""
    code = stamp.get("machine_code") or {}
    found = {"hash": code.get("hash")}
    if of_sm80(stamp):
        found["sm80"] = code.get("sm80") or SM80_OF.get(stamp["commit"])
    return [None if one is None else one == current()[which] for which, one in found.items()]


def mark(*stamps):
    """Of numbers that have stamps, dicts with `commit`, of a GPU's with `machine_code`, and of one
    kit's with `kit` or `backend`."""
    same = [one for stamp in stamps for one in _are_current(stamp)]
    found = DIRTY if any("-dirty" in (stamp["commit"] or "") for stamp in stamps) else ""
    if False in same:
        found += OTHER_KERNELS
    return found + (NO_HASH if None in same else "")


def _stamps(value, outer=None):
    """Of everything in a results file that names a commit or is of the kit sm80; what lies in it has
    its hashes too. Of other implementations' numbers, and of an earlier build's beside ours, the
    commit alone counts."""
    if isinstance(value, dict):
        if "commit" in value:
            here = {
                "commit": value["commit"],
                "machine_code": value.get("machine_code") or (outer or {}).get("machine_code"),
            }
            backend = value.get("backend", "tilemoe")
            if backend == "tilemoe-before" or "tilemoe" not in backend:
                here["machine_code"] = current()
            yield here
            outer = here
        if outer and of_sm80(value):
            yield {**outer, "kit": "sm80"}
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
