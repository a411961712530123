"""Measure the effect of token rounding with short trainings that differ in routing alone.

    python examples/pretrain/rounding.py --list
    python examples/pretrain/rounding.py --data runs/corpus --out rounding.jsonl --gpus 4
    python examples/pretrain/rounding.py --table --out benchmarks/results/rounding.jsonl

study.py explains what a study is. In the run `S1-nearest-2-s0`, T K / (E m) = 2 tiles. Every T
tokens of a step are routed separately, like micro-batches or ranks of T tokens. Attention, experts
and head compute all of the step's tokens together, and the balance and z losses are the step's: so
top-K is the same for every number of tiles, and its name has none.
"""

import statistics
import sys

import paired
from study import Study


def pairs(lines):
    """Return {(model, method, tiles): [(values, those of top-K with the same seed)]}."""
    found = paired.pairs(lines, "top_k")
    return dict(sorted(found.items(), key=lambda of: (of[0][0], of[0][1] != "nearest", of[0][1:])))


class Rounding(Study):
    def table(self, lines):
        """Return validation losses in Markdown, as differences from top-K of the same seed."""
        header = "model", "method", "tiles", "seeds", "loss, %", "pairs dropped, %", "pairs added, %"
        text = f"| {' | '.join(header)} |\n{'|---' * len(header)}|\n"
        for (model, method, tiles), runs in pairs(lines).items():
            off = paired.text_of(*paired.loss_off(runs))
            share = lambda key: 100 * statistics.fmean(values[key] for values, _ in runs)
            dropped, added = share("mean_pairs_dropped"), share("mean_pairs_added")
            cells = f"{model} | `{method}` | {tiles} | {len(runs)} | {off}"
            text += f"| {cells} | {dropped:.1f} | {added:.1f} |\n"
        return text


STUDY = Rounding(__file__, __doc__)

if __name__ == "__main__":
    sys.exit(STUDY.main())
