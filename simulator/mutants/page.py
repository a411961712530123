"""The tables of docs/mutants.md, from the results file."""

import collections
import re

from defects import ROOT, all_defects, number_of_line
from gpu import TOOLS

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


# ---- of what no run finds

COMMENT = re.compile(r"//\s*(.*?)\s*$")


def comment_at(lines, at):
    """The comment that a line ends with, or else the nearest one above it; in one line."""
    first = at
    if not COMMENT.search(lines[at]):
        while first > 0 and not lines[first].lstrip().startswith("//"):
            first -= 1
        while first > 0 and lines[first - 1].lstrip().startswith("//"):
            first -= 1
    comment = COMMENT.search(lines[first])
    if not comment:
        return ""
    words = [comment[1]]
    for line in lines[first + 1:]:
        if not line.lstrip().startswith("//"):
            break
        words.append(COMMENT.search(line)[1])
    return " ".join(words)


def unfound(results):
    """Dropped calls that nothing was found of, with what the sources say at their places."""
    rows = []
    for defect in all_defects():
        one = results.get(defect.id)
        if one and defect.id.startswith("drop/") and kind_of(one) in ("**nothing**", "not reached"):
            lines = (ROOT / defect.file).read_text().splitlines()
            rows.append([place_of(defect.id, one), f"`{one['text']}`",
                         comment_at(lines, number_of_line(defect) - 1).replace("|", "\\|")])
    return "\n### Found by nothing\n" + table(
        ["place", "what is dropped", "what the source says there"], sorted(rows)) if rows else ""


# ---- of a GPU

def outcome_of(one, what):
    return one.get(what, {}).get("outcome")


def finders(one):
    """The tools that reported something, of those that were run."""
    run = [tool for tool in TOOLS if tool in one]
    found = [tool for tool in run if outcome_of(one, tool) == "found"]
    return ", ".join(found) if found else "nothing" if run else ""


def who_found_what(defects, of_gpu):
    """Of the defects that a GPU ran, how many each way of looking tells."""
    rows = []
    for name, words in [*CLASSES.items(), (None, "all")]:
        both = [(defects[id_], one) for id_, one in of_gpu.items()
                if name in (class_of(id_), None) and id_ in defects and "plain" in one]
        if not both:
            continue
        wrong = [one for _, one in both if outcome_of(one, "plain") != "right"]
        tools = [[one for _, one in both if outcome_of(one, tool) == "found"] for tool in TOOLS]
        asked = [count((one for _, one in both), lambda one, tool=tool: tool in one)
                 for tool in TOOLS]
        alone = [one for simulated, one in both if simulated["found"] and one not in wrong
                 and finders(one) in ("nothing", "")]
        rows.append([words, len(both), count((one for one, _ in both), lambda one: one["found"]),
                     len(wrong), *(f"{len(found)} of {run}" if run else ""
                                   for found, run in zip(tools, asked)), len(alone)])
    return table(["defects", "number", "simulator", "GPU, alone", *TOOLS, "simulator only"], rows)


def text_of_gpu(defects, results):
    clean = all(one["outcome"] in ("right", "nothing") for one in results["without_a_defect"])
    return (f"\n### On a GPU\n{results['name']}, driver {results['driver_version']}, "
            f"{results['cuda'].split(',')[-2].strip()} of nvcc, commit `{results['commit']}`; "
            "[`gpu_mutants.json`](../benchmarks/results/gpu_mutants.json), by "
            "`simulator/mutants/mutants.py gpu`. Without a defect: "
            f"{'outputs right, no report' if clean else '**not clean**'}. `GPU, alone` is a wrong "
            "output, an error or a hang.\n\n" + who_found_what(defects, results["defects"]))


def output_of(result):
    """What it is beside a finding, or without one: right, and by which schedule, or wrong."""
    if right := result["found_while_right"]:
        return f"right, {right['schedule']}" if "schedule" in right else "right"
    return "wrong" if result["found"] or result["wrong"] else "right"


def every_one(results, of_gpu):
    rows = []
    for name, one in sorted(results.items(), key=lambda item: (item[1]["file"], item[1]["line"])):
        found = one["found"]
        text = one["text"].replace("|", "\\|")
        row = [place_of(name, one), f"`{text}`", kind_of(one), site_of(one),
               f"{found['case']}, {found['device']}, {found['seed']}" if found else "",
               output_of(one)]
        if of_gpu is not None:
            on_gpu = of_gpu.get(name, {})
            row += [outcome_of(on_gpu, "plain") or "", finders(on_gpu)]
        rows.append(row)
    return table(["place", "what is dropped or changed", "first finding", "at",
                  "case, device, seed", "output",
                  *(["on a GPU", "sanitizers"] if of_gpu is not None else [])], rows)


def of_schedules(results):
    """How many are found beside a right output by another schedule alone."""
    ordered = count(results.values(), lambda one: "schedule" in (one["found_while_right"] or {}))
    return f"; {ordered} are found beside a right output in an ordered schedule alone" if ordered else ""


def text_of(results, of_gpu=None):
    defects = results["defects"]
    clean = all(case["right"] and not case["findings"] for case in results["cases"])
    commits = ", ".join(f"`{one}`" for one in sorted({one["commit"] for one in defects.values()}))
    compilers = ", ".join(sorted({one["compiler"] for one in defects.values()}))
    return (f"Commit {commits}, {compilers}; "
            f"[`simulator_mutants.json`](../benchmarks/results/simulator_mutants.json), by "
            f"`simulator/mutants/mutants.py run`. {len(results['cases'])} cases without a defect: "
            f"{'no finding, outputs right' if clean else '**not clean**'}. Each defect has up to "
            f"{max(one['seeds'] for one in defects.values())} seeds"
            f"{of_schedules(defects)}.\n\n" + by_class(defects) + "\n" +
            by_finding(defects) + unfound(defects) + (text_of_gpu(defects, of_gpu) if of_gpu else "") +
            "\n### Every defect\n" + every_one(defects, of_gpu and of_gpu["defects"]))


def page_with(text, page):
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]
