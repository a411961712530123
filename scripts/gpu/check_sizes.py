#!/usr/bin/env python3
"""Checks layers of real models' sizes on this machine's GPU, every row of every tensor, through the
installed package as a user calls it (tests/torch/real_sizes.py says against what and how strictly).

  scripts/gpu/check_sizes.py qwen3-235b --json qwen3-235b.json
  scripts/gpu/check_sizes.py                                       # all of them

Writes what it found after each layer. Its status is 1 where a bound does not hold.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "torch"))

import real_sizes  # noqa: E402


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layers", nargs="*", metavar="layer", help=", ".join(real_sizes.LAYERS))
    parser.add_argument("--device", default="cuda", help="cpu would take hours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    args = parser.parse_args()
    for name in args.layers:
        if name not in real_sizes.LAYERS:
            parser.error(f"no layer is called {name}; there are {', '.join(real_sizes.LAYERS)}")
    found = {}
    for name in args.layers or real_sizes.LAYERS:
        one = found[name] = real_sizes.check(real_sizes.LAYERS[name], args.device, args.seed)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        for output, verdict in one["outputs"].items():
            print(
                f"{name} {output}: error {verdict['error']:.3e}, expected "
                f"{verdict['expected_error']:.3e}; worst row {verdict['worst_row']:.3e}, expected "
                f"{verdict['expected_worst_row']:.3e}; off the plain layer at most "
                f"{verdict['worst_row_off_plain']:.3e}"
            )
        print(f"{name}: {one['spoilings_tried']} spoilings, {one['seconds']} s", flush=True)
        for line in one["failed"]:
            print(f"{name}: FAILED: {line}", flush=True)
    return 1 if any(one["failed"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
