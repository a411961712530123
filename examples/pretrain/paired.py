"""Name the trainings of a study and compare those of one seed in pairs, without torch.

A training has a name: model, method, tiles per expert if the method has them, and seed, such as
`S1-nearest-2-s0`. study.py runs a study, which is a JSON file.
"""

import statistics
from typing import NamedTuple

# Student's t by degrees of freedom, from one on, with 2.5 % on either side.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SAME = (
    "initial",
    "batches",
    "steps",
    "tokens_of_step",
    "validation_tokens",
)  # equal values of a pair


class Named(NamedTuple):
    model: str
    method: str
    tiles: int | None  # mean tiles per expert, T K / (E m); None: it does not depend on them
    seed: int

    def __str__(self):
        tiles = () if self.tiles is None else (str(self.tiles),)
        return "-".join((self.model, self.method, *tiles, f"s{self.seed}"))

    @classmethod
    def parsed(cls, text):
        """Return the training of a name; a model's name may contain hyphens."""
        *names, seed = text.split("-")
        tiles = int(names.pop()) if names and names[-1].isdecimal() else None
        if len(names) < 2 or not seed[1:].isdecimal():
            raise ValueError(f"expected MODEL-METHOD-sSEED or MODEL-METHOD-TILES-sSEED, got {text}")
        return cls("-".join(names[:-1]), names[-1], tiles, int(seed[1:]))


def has_tiles(study, method):
    """Return whether a method has tiles: the base never has, others if the study's runs have."""
    return method != study["base"] and any("tiles" in group for group in study["runs"])


def runs(study):
    """Return all trainings of a study's JSON file, in its order; each once."""
    return list(dict.fromkeys(
        Named(model, method, tiles if has_tiles(study, method) else None, seed)
        for group in study["runs"] for seed in group["seeds"] for model in study["models"]
        for method in group["methods"] for tiles in group.get("tiles", [None])
    ))  # fmt: skip


def named(lines, study):
    """Return {Named: line} of the lines of a study, whose names start with it."""
    start = f"{study}/"
    found = (line for line in lines if line.name.startswith(start))
    return {Named.parsed(line.name.removeprefix(start)): line for line in found}


def interval(values):
    """Return the mean of values, and half of its 95 % confidence interval, None of one value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, STUDENT[n - 2] * (variance / n) ** 0.5


def pairs(lines, base):
    """Return {(model, method, tiles): [(values, those of the base with the same seed)]}.

    lines is {Named: line}, and base is a method without tiles.
    """
    found = {}
    for run, line in lines.items():
        plain = lines.get(Named(run.model, base, None, run.seed))
        if run.method == base or plain is None:
            continue
        for key in (*SAME, "options"):
            if line.values.get(key, "") != plain.values.get(key, ""):
                raise ValueError(f"{line.name} and {plain.name} must have the same {key}")
        found.setdefault(run[:3], []).append((line.values, plain.values))
    return found


def loss_off(runs):
    """Return the mean of the pairs' differences of the loss in %, and half of its interval."""
    return interval([100 * (a["loss"] / b["loss"] - 1) for a, b in runs])


def text_of(mean, half):
    return f"{mean:+.2f}" + ("" if half is None else f" ± {half:.2f}")


def against_null(lines, study):
    """Return the rows of a table: each method's differences of the loss, compared with the null's.

    study has the methods' order, `base`, `null` and `limit`. The last cells are the upper end of
    the interval minus that of the null method, which differs from the base by rounding errors
    alone, and whether that is at most the limit; empty with fewer than two seeds.
    """
    order, rows = list(study["methods"]), []
    found = pairs(lines, study["base"])
    for model, method, tiles in sorted(found, key=lambda of: (of[0], order.index(of[1]))):
        runs, null = found[model, method, tiles], found.get((model, study["null"], None), [])
        mean, half = loss_off(runs)
        ends = above = limit = ""
        if half is not None:
            ends = f"[{mean - half:+.2f}, {mean + half:+.2f}]"
        if half is not None and method != study["null"] and len(null) > 1:
            off = mean + half - sum(loss_off(null))
            above, limit = f"{off:+.2f}", "met" if off <= study["limit"] else "not met"
        rows.append([model, f"`{method}`", len(runs), text_of(mean, half), ends, above, limit])
    return rows
