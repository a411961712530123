"""The tables of docs/mutants.md, from the results file."""

import collections
import re

from defects import ROOT

PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants.py writes from here -->\n", "<!-- to here -->\n"
CLASSES = {
    "drop": "a call dropped",
    "wrong-fence": "a fence of the wrong kind",
    "parity": "a parity flipped",
    "arrivals": "an arrival too few or too many",
    "early-release": "a stage released early",
    "word": "a field of tcgen05's words off",
    "bytes": "a stage's bytes miscounted",
    "swizzle": "a swizzle or stride off",
    "guard": "a guard of rows or columns missing",
    "slot": "a store's slot reused early",
    "cluster": "a cluster's other block forgotten",
    "past-end": "rows past an expert's end",
}


def class_of(name):
    return name.split("/")[0]


def kind_of(result):
    """Of the finding; or what else there was."""
    if result["found"]:
        return result["found"]["finding"].split(":")[0]
    if result["wrong"]:
        return "wrong output alone"
    return "**nothing**" if result["reached"] else "not reached"


def table(head, rows):
    line = "| {} |\n"
    return "".join([line.format(" | ".join(head)), "|" + "---|" * len(head) + "\n",
                    *(line.format(" | ".join(str(cell) for cell in row)) for row in rows)])


def count(results, key):
    return sum(bool(key(one)) for one in results)


def by_class(results):
    rows = []
    for name, words in [*CLASSES.items(), (None, "all")]:
        own = [one for id_, one in results.items() if name in (class_of(id_), None)]
        if own:
            rows.append([words, len(own), count(own, lambda one: one["found"]),
                         count(own, lambda one: one["found_while_right"]),
                         count(own, lambda one: one["found"] and one["found"]["seed"] == 1),
                         count(own, lambda one: not one["found"] and one["wrong"])])
    return table(["defects", "number", "found", "beside a right output", "by the first seed",
                  "wrong output alone"], rows)


def by_finding(results):
    kinds = collections.Counter(kind_of(one) for one in results.values())
    return table(["first finding", "defects"], kinds.most_common())


def place_of(name, result):
    file = result["file"].removeprefix("src/cuda/")
    place = f"{file}:{result['line']}"
    return place if name.startswith("drop/") else f"{place}, {name}"


def site_of(result):
    """Where the first finding was."""
    found = result["found"] and re.search(r" at\s+(\S+)", result["found"]["finding"])
    return found[1] if found else ""


def every_one(results):
    rows = []
    for name, one in sorted(results.items(), key=lambda item: (item[1]["file"], item[1]["line"])):
        found = one["found"]
        text = one["text"].replace("|", "\\|")
        rows.append([place_of(name, one), f"`{text}`", kind_of(one), site_of(one),
                     f"{found['case']}, {found['device']}, {found['seed']}" if found else "",
                     "right" if one["found_while_right"] else "wrong" if found or one["wrong"]
                     else "right"])
    return table(["place", "what is dropped or changed", "first finding", "at",
                  "case, device, seed", "output"], rows)


def text_of(results):
    defects = results["defects"]
    clean = all(case["right"] and not case["findings"] for case in results["cases"])
    return (f"Commit `{results['commit']}`, {results['compiler']}; "
            f"[`simulator_mutants.json`](../benchmarks/results/simulator_mutants.json), by "
            f"`simulator/mutants/mutants.py run`. {len(results['cases'])} cases without a defect: "
            f"{'no finding, outputs right' if clean else '**not clean**'}. Each defect has up to "
            f"{results['seeds']} seeds.\n\n" + by_class(defects) + "\n" + by_finding(defects) +
            "\n### Every defect\n" + every_one(defects))


def page_with(text, page):
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]
