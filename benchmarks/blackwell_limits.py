#!/usr/bin/env python3
"""What the limits of a B200 leave a layer, by arithmetic: nothing is run.

  benchmarks/blackwell_limits.py    # writes benchmarks/results/blackwell_limits.json

A kernel takes at least the longest of three times: its products at the published rate, its tensors
once through memory at the published rate, and what blocks of 128 by 256 read of L2, at the bytes a
cycle that were measured on an H100: L2's rate on a B200 is not published. Blocks read L2 by
themselves, as the kit sm100 does, or in pairs that read W's columns once."""

import argparse
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "blackwell_limits.json"

# Published of a B200; the clock is what the rate of its products comes to. L2: of an H100.
B200 = {"flops": 2250e12, "memory_bytes": 8e12, "multiprocessors": 148, "clock": 1.85e9,
        "l2_bytes_a_cycle": 44}
BLOCK_M, BLOCK_N = 128, 256
LAYERS = {  # T, d, n, E, K
    "7b-n256": (24576, 1536, 256, 128, 8),
    "7b-n1024": (24576, 1536, 1024, 32, 2),
    "30b-n256": (32768, 4096, 256, 256, 16),
    "olmoe": (32768, 2048, 1024, 64, 8),
    "gpt-oss-20b": (32768, 2880, 2880, 32, 4),
    "qwen3-235b": (32768, 4096, 1536, 128, 8),
}


def kernels(T, d, n, E, K):
    """(pass, name, products as (groups, rows, columns, sum) or None, numbers of 16 bits that are read
    or written) of each kernel."""
    M, W1, W2 = T * K, 2 * n * d * E, n * d * E
    rows = M / E
    return [
        ("forward", "up-projection", (E, rows, 2 * n, d), T * d + W1 + 3 * M * n),
        ("forward", "down-projection", (E, rows, d, n), M * n + W2 + M * d),
        ("forward", "combine", None, M * d + T * d),
        ("backward", "activation gradient", (E, rows, n, d), T * d + W2 + 5 * M * n),
        ("backward", "dW2", (E, d, n, rows), T * d + M * n + W2),
        ("backward", "input gradient", (E, rows, d, 2 * n), 2 * M * n + W1 + M * d),
        ("backward", "combine", None, M * d + T * d),
        ("backward", "dW1", (E, 2 * n, d, rows), T * d + 2 * M * n + W1),
    ]


def times(product, numbers, gpu):
    """-> ms by products, by memory, and by L2 of blocks alone and in pairs."""
    memory = 2 * numbers / gpu["memory_bytes"]
    if product is None:
        return {"products": 0, "memory": 1e3 * memory, "l2_alone": 0, "l2_in_pairs": 0}
    groups, rows, columns, steps = product
    blocks = groups * -(-rows // BLOCK_M) * -(-columns // BLOCK_N)
    l2 = gpu["multiprocessors"] * gpu["clock"] * gpu["l2_bytes_a_cycle"]
    read = lambda b_rows: blocks * steps * 2 * (BLOCK_M + b_rows) / l2
    return {"products": 1e3 * 2 * groups * rows * columns * steps / gpu["flops"],
            "memory": 1e3 * memory,
            "l2_alone": 1e3 * read(BLOCK_N), "l2_in_pairs": 1e3 * read(BLOCK_N / 2)}


def layer(sizes, gpu=B200):
    total = {}
    for which, name, product, numbers in kernels(*sizes):
        of = times(product, numbers, gpu)
        limit = max(of["products"], of["memory"])
        entry = total.setdefault(which, {"limit_ms": 0, "alone_ms": 0, "in_pairs_ms": 0,
                                         "kernels": []})
        entry["limit_ms"] += limit
        entry["alone_ms"] += max(limit, of["l2_alone"])
        entry["in_pairs_ms"] += max(limit, of["l2_in_pairs"])
        entry["kernels"].append({"name": name, "ms": of})
    return total


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def main():
    argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    layers = {name: {"sizes": sizes, **layer(sizes)} for name, sizes in LAYERS.items()}
    OUT.write_text(json.dumps({"command": "benchmarks/blackwell_limits.py", "gpu": B200,
                               "layers": rounded(layers)}, indent=1) + "\n")
    print("| layer | forward / backward: limit, ms | blocks in pairs | blocks alone |\n|---|---|---|---|")
    for name, of in layers.items():
        cells = [" / ".join(f"{of[which][key]:.2f}" for which in ("forward", "backward"))
                 for key in ("limit_ms", "in_pairs_ms", "alone_ms")]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
