"""Writes ../results.md's table of measured speeds from the files of measure.py.

python examples/pretrain/study/tables.py           # rewrites what stands between the page's marks
python examples/pretrain/study/tables.py --check   # status 1 where the page differs
"""

import argparse
import json
import sys

from example import FOLDER, RESULTS
from pages import table, with_part

PAGE = FOLDER / "results.md"
BEGIN = "<!-- tables.py writes from here -->\n"
HEADER = ["config", "layers", "experts", "micro-batch", "tokens/s", "MFU", "peak, GiB", "ms"]


def row(entry):
    if "does_not_fit" in entry:
        numbers = ["", "", "does not fit", ""]
    else:
        speed, mfu = entry["tokens_per_s_and_process"], entry["mfu"]
        numbers = [f"{speed:,.0f}", f"{mfu:.1%}", f"{entry['peak_bytes'] / 2**30:.1f}"]
        numbers.append(f"{entry['ms']:.1f}")
    layers = entry["layers"] or "all"
    return [entry["config"], str(layers), entry["experts"], str(entry["micro_batch"]), *numbers]


def section(file):
    """A file's table under a line that says where, how and by which policy it was measured."""
    measured = json.loads(file.read_text())
    entries, versions = measured["entries"], measured["versions"]
    first = entries[0]
    how = f"state and compute {first['precision']}"
    how += ", torch.compile" if first["compile"] else ""
    how += f", recompute {first['recompute']}, {measured['processes']} process"
    lines = [
        f"{measured['device']}, torch {versions['torch']}, {how}: "
        f"[`{file.name}`](../../benchmarks/results/{file.name})",
        "",
        table(HEADER, map(row, entries)),
    ]
    return "\n".join(lines)


def page(text, files):
    return with_part(text, BEGIN, "\n".join(map(section, files)))


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    text = PAGE.read_text()
    written = page(text, sorted(RESULTS.glob("pretrain_speed_*.json")))
    if args.check:
        return int(written != text)
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
