"""What writes tables of results files (gpu_tables.py, peer_tables.py) shares."""

import json
import re

from marks import RESULTS, mark

SHAPE = "TdnEK"


def results_of(file):
    file = RESULTS / file
    return json.loads(file.read_text()) if file.exists() else None


def stage(name):
    return results_of(f"gpu_{name}.json")


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def visible(text):
    """What a reader sees of a line of Markdown: no addresses of links."""
    return re.sub(r"\]\([^)]*\)", "]", text)


def paragraph(text):
    """In lines of at most 116 letters that a reader sees; a mark behind a link has room."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(visible(longer)) > 116:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines) + "\n"


def passed(results):
    """Those of the kit that the GPU takes by itself; run.py names any other one's."""
    return [i for i in results["items"] if i["status"] == "passed" and "kit" not in i]


def marks(results, *entries):
    """A space and the marks of numbers of a results file, by its own stamp and its entries'."""
    hashed = {"machine_code": results.get("machine_code")}
    found = mark(results, *({**hashed, **entry} for entry in entries))
    return f" {found}" if found else ""


def config(entry, results):
    """Its name, its commit where that is not the others', and its marks."""
    commit = entry["commit"]
    at = "" if commit == results["commit"] else f" (at `{commit[:7]}`)"
    return entry["config"] + at + marks(results, entry)


def milliseconds(value):
    return "" if value is None else f"{value:.3f}"


# The first of these in a kernel's name says which step it is.
KERNELS = {
    "combine_rows": "combine",
    "ActivationGradientEpilogue": "activation_gradient",
    "SwiGLUEpilogue": "up_projection",
    "ActivationEpilogue": "up_projection",
    "WeightGradientEpilogue": "weight_gradient_1, _2",
    "SummedWeights": "input_gradient",
    "StoreEpilogue": "down_projection",
}


def step_of(kernel):
    """The step that a kernel of the library belongs to; "others" of all other kernels."""
    return next((step for part, step in KERNELS.items() if part in kernel), "others")
