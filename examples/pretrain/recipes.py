"""Measure the effect of the experts' recipe with short trainings that differ in it alone.

    python examples/pretrain/recipes.py --list
    python examples/pretrain/recipes.py --data runs/corpus --out recipes.jsonl --gpus 4
    python examples/pretrain/recipes.py --table --out benchmarks/results/recipes.jsonl

study.py explains what a study is. Training and evaluation have the same recipe. `grouped_mm` is
the null: bfloat16 with other rounding errors alone. A method meets the limit if the upper end of
the 95 % interval of its mean difference from bf16 is at most `limit` % above that of the null.
"""

import sys

import paired
from study import Study

HEADER = "model", "method", "seeds", "loss, %", "95 % interval", "upper end above null's", "limit"


class Recipes(Study):
    def table(self, lines):
        """Return validation losses in Markdown, as differences from bf16 of the same seed."""
        rows = [HEADER, ["---"] * len(HEADER), *paired.against_null(lines, self.study)]
        return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


STUDY = Recipes(__file__, __doc__)

if __name__ == "__main__":
    sys.exit(STUDY.main())
