"""Writes the tables and pictures of docs/token_rounding.md from the metrics of rounding.py and the
times of rounding_time.py.

    python examples/pretrain/study/rounding_tables.py           # rewrites what is between the marks
    python examples/pretrain/study/rounding_tables.py --check   # status 1 where the page differs
"""

import argparse
import json
import statistics
import sys

from example import RESULTS, ROOT
from pages import table, with_part
from rounding import Named, study

PAGE = ROOT / "docs" / "token_rounding.md"
PICTURES = ROOT / "docs" / "images" / "token_rounding"
BEGIN = "<!-- rounding_tables.py writes from here -->\n"
# Student's t with so many degrees of freedom, from one on, beyond which 2.5 % lie on either side.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SAME = ("initial", "batches", "steps", "tokens_of_step", "held_out_tokens", "options")


def load(folder):
    """-> {Named: metrics}, in the study's order."""
    found = {}
    for file in folder.glob("*.json"):
        metrics = json.loads(file.read_text())
        found[Named(*(metrics[key] for key in Named._fields))] = metrics
    order = {run: i for i, run in enumerate(study())}
    return {run: found[run] for run in sorted(found, key=lambda run: order.get(run, len(order)))}


class Interval:
    """The mean of some values, and how far from it the mean of all may be, 95 times of 100."""

    def __init__(self, values):
        self.values, self.mean, self.half = values, statistics.fmean(values), None
        n = len(values)
        if n > 1:
            variance = sum((value - self.mean) ** 2 for value in values) / (n - 1)
            self.half = STUDENT[n - 2] * (variance / n) ** 0.5

    def text(self, digits):
        half = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:+.{digits}f}{half}"


def groups(runs):
    """-> {(model, method, tiles): [(metrics, those of top-K with the same seed)]}."""
    found = {}
    for run, metrics in runs.items():
        plain = runs.get(Named(run.model, "top_k", None, run.seed))
        if run.method == "top_k" or plain is None:
            continue
        for key in SAME:
            if metrics[key] != plain[key]:
                raise ValueError(f"{run} and {plain['name']} are no pair: their {key} differ")
        found.setdefault(run[:3], []).append((metrics, plain))
    return dict(sorted(found.items(), key=place))


def place(item):
    """Models, then the methods of most runs, then tiles."""
    model, method, tiles = item[0]
    return model, method != "nearest", method, tiles


def difference(pairs):
    """% of top-K's held-out loss, both evaluated with top-K."""
    loss = lambda metrics: metrics["held_out"]["top_k"]
    return Interval([100 * (loss(a) / loss(b) - 1) for a, b in pairs])


def by_dropping(found):
    """-> {(model, method): [(pairs dropped, difference) of each run]}, in %."""
    losses = {}
    for (model, method, _), pairs in found.items():
        points = losses.setdefault((model, method), [])
        for pair in pairs:
            points.append((100 * pair[0]["whole"]["pairs_dropped"], difference([pair]).mean))
    return losses


def of_evaluation(pairs):
    """% by which top-K's evaluation is worse than that with the training's own routing."""
    held_out = [metrics["held_out"] for metrics, _ in pairs]
    return Interval([100 * (h["top_k"] / h["as_trained"] - 1) for h in held_out])


def quality(found):
    rows = []
    for (model, method, tiles), pairs in found.items():
        loss = statistics.fmean(metrics["held_out"]["top_k"] for metrics, _ in pairs)
        plain = statistics.fmean(metrics["held_out"]["top_k"] for _, metrics in pairs)
        off = difference(pairs)
        cells = [model, f"`{method}`", str(tiles), f"{pairs[0][0]['T']:,}", str(len(pairs))]
        cells += [f"{plain:.4f}", f"{loss:.4f}", off.text(3)]
        rows.append([*cells, of_evaluation(pairs).text(3)])
    header = ["model", "method", "tiles", "T", "seeds", "loss, top-K", "loss", "difference, %"]
    return table([*header, "top-K in place of its own routing, %"], rows)


def routing(runs):
    """Means over the training, of all seeds."""
    by_kind = {}
    for run, metrics in runs.items():
        by_kind.setdefault(run[:3], []).append(metrics["whole"])
    rows = []
    for (model, method, tiles), wholes in by_kind.items():
        mean = {key: statistics.fmean(whole[key] for whole in wholes) for key in wholes[0]}
        shares = [mean[key] for key in ("pairs_dropped", "pairs_added", "tokens_without")]
        cells = [model, f"`{method}`", str(tiles or ""), *(f"{100 * s:.3f}" for s in shares)]
        rows.append([*cells, f"{mean['load']:.2f}", f"{mean['balance']:.3f}"])
    header = ["model", "method", "tiles", "pairs dropped, %", "pairs added, %"]
    header += ["tokens without an expert, %", "largest load over the mean", "balance loss"]
    return table(header, rows)


def nanoseconds(entry):
    """Of the forward's kernels, a pair."""
    kernels = entry.get("profile_ms", {}).get("forward", {}).get("kernels")
    return kernels and 1e6 * kernels / entry["rows"]


def whole_layer(entry):
    return entry["fwd_ms"] + entry["bwd_ms"] if "bwd_ms" in entry else None


TIMED = {  # column: (part, what of an entry, digits)
    "kernels, ns a pair": ("layer", nanoseconds, 2),
    "forward, ms": ("layer", lambda e: e["fwd_ms"], 3),
    "both passes, ms": ("layer", whole_layer, 3),
    "training step, ms": ("step", lambda e: e.get("ms"), 1),
}


def ratios(entries):
    """-> {(model, tiles): {column: (top-K's, nearest's)}}, what was measured."""
    found = {}
    for column, (part, value, _) in TIMED.items():
        for plain in (e for e in entries if e["part"] == part and e["method"] == "top_k"):
            at = plain["model"], plain["tiles"]
            same = lambda e: (e["part"], e["method"], e["model"], e["tiles"])
            rounded = next(e for e in entries if same(e) == (part, "nearest", *at))
            if value(plain) and value(rounded):
                found.setdefault(at, {})[column] = value(plain), value(rounded)
    return dict(sorted(found.items()))


def times(entries):
    rows = []
    for (model, tiles), columns in ratios(entries).items():
        cells = []
        for column, (_, _, digits) in TIMED.items():
            if column in columns:
                plain, rounded = columns[column]
                cells += [f"{plain:.{digits}f}", f"{rounded:.{digits}f}", f"{plain / rounded:.3f}"]
            else:
                cells += [""] * 3
        T = next(e["T"] for e in entries if (e["model"], e["tiles"]) == (model, tiles))
        rows.append([model, str(tiles), f"{T:,}", *cells])
    columns = [f"{column}{which}" for column in TIMED for which in (", top-K", ", nearest")]
    with_ratio = [c for i in range(0, len(columns), 2) for c in (*columns[i : i + 2], "ratio")]
    return table(["model", "tiles", "T", *with_ratio], rows)


def sparsest(entries):
    """What rounding gains where it gains most, in words."""
    of_kernels = next(iter(TIMED))
    least = {}  # of a model: its fewest tiles
    for (model, tiles), columns in ratios(entries).items():
        if of_kernels in columns and tiles <= least.get(model, (tiles,))[0]:
            plain, rounded = columns[of_kernels]
            least[model] = tiles, plain / rounded
    said = [f"{model} {ratio:.3f} at {tiles}" for model, (tiles, ratio) in least.items()]
    return (
        "Time of top-K's kernels over that of `nearest`, a pair, at the fewest tiles an expert: "
        f"{', '.join(said)}.\n"
    )


def missing(runs):
    """The study's runs that are not there."""
    left, alike = {}, {}
    for run in study():
        if run not in runs:
            left.setdefault(run[:3], []).append(str(run.seed))
    for (model, method, tiles), seeds in left.items():
        alike.setdefault((f"`{method}`", str(tiles or "any"), ", ".join(seeds)), []).append(model)
    rows = [[", ".join(models), *rest] for rest, models in alike.items()]
    return table(["models", "method", "tiles", "seeds"], rows) if rows else "All runs were made.\n"


def where(entries):
    """What was measured, where and how: one sentence for all that agree."""
    said = set()
    for e in entries:
        versions = e["versions"]
        said.add(f"{e['device']}, torch {versions['torch']}, commit `{e['commit']}`")
    return "; ".join(sorted(said))


def sections(runs, entries):
    found, written = groups(runs), []
    if runs:
        first = next(iter(runs.values()))
        written.append(
            f"{len(runs)} of {len(set(study()) | set(runs))} runs; "
            f"{first['steps'] * first['tokens_of_step'] / 1e6:.0f} million tokens each, "
            f"{first['unique_tokens'] / 1e6:.0f} million of them different, "
            f"{first['tokens_of_step']:,} a step; {first['held_out_tokens'] / 1e6:.2f} million "
            f"held-out tokens. {where(runs.values())}.\n"
        )
    written.append("### Quality\n")
    if found:
        written.append(picture("quality", "difference from top-K by tiles an expert"))
        written.append(quality(found))
        written.append(picture("dropped", "difference from top-K by the share of pairs dropped"))
    else:
        written.append("No pair of runs has been made yet.\n")
    if runs:
        written += ["### What routing did\n", routing(runs)]
    written.append("### Time\n")
    if entries:
        written.append(f"{where(entries)}.\n")
        written.append(picture("time", "time of top-K over that of nearest, by tiles an expert"))
        written += [times(entries), sparsest(entries)]
    else:
        written.append("Not measured yet.\n")
    return "\n".join([*written, "### Not run yet\n", missing(runs)])


def picture(name, says):
    return f"![{says}](images/token_rounding/{name}.svg)\n"


def page(text, runs, entries):
    return with_part(text, BEGIN, sections(runs, entries))


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    times_file = RESULTS / "rounding_time.json"
    entries = json.loads(times_file.read_text())["entries"] if times_file.exists() else []
    runs, text = load(RESULTS / "rounding"), PAGE.read_text()
    written = page(text, runs, entries)
    if args.check:
        return int(written != text)
    PAGE.write_text(written)
    import rounding_plots  # needs matplotlib, which --check does without

    found = groups(runs)
    differences = {of: difference(pairs) for of, pairs in found.items()}
    rounding_plots.draw(differences, by_dropping(found), ratios(entries), PICTURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
