#!/usr/bin/env python3
"""The layer's memory against its time, by the number of column blocks of Y and dX~.

Measures a forward and a backward with dH over H in so many blocks, all in turn, round by round, or
draws what was measured:

  python3 benchmarks/memory_curve.py --tilemoe PROGRAM benchmarks/results/memory_curve.json
  python3 benchmarks/memory_curve.py --draw docs/images/memory_curve.svg benchmarks/results/memory_curve.json
"""

import argparse
import json
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "python" / "tilemoe" / "bench"))  # a file of it needs no package
MIB = 2**20


def measure(args):
    """An entry of `tilemoe bench` for each number of blocks, the first's with `time_of_first` 1."""
    import machine_code
    from rounds import Worker

    workers = [Worker([args.tilemoe, "bench", "--device", "cuda", "--config", args.config,
                       "--dh-over-h", "--column-blocks", str(blocks), "--baseline", "none",
                       "--rounds-from-stdin"]) for blocks in args.blocks]
    rounds = []
    for index in range(args.rounds):
        order = range(len(workers)) if index % 2 == 0 else reversed(range(len(workers)))
        taken = {}
        for number in order:
            (times,) = workers[number].round().values()
            taken[number] = sum(times.values())
        rounds.append(taken)
    entries = [entry for worker in workers for entry in worker.finish()]
    for number, entry in enumerate(entries):
        entry["machine_code"] = machine_code.stamp(args.tilemoe)
        entry["round_ms"] = [taken[number] for taken in rounds]
        entry["time_of_first"] = statistics.median(taken[number] / taken[0] for taken in rounds)
    return entries


def draw(entries, output):
    try:
        from plots import look, plt, save
    except ImportError:
        sys.exit("memory_curve.py: error: this Python has no matplotlib; "
                 f"{sys.executable} -m pip install -r benchmarks/requirements.txt")
    first = entries[0]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    peaks = [entry["library_peak_bytes"] / MIB for entry in entries]
    slower = [100 * (entry["time_of_first"] - 1) for entry in entries]
    axes.plot(peaks, slower, "o-", color=look("tilemoe-cuda")[1])
    for entry, x, y in zip(entries, peaks, slower):
        blocks = entry["column_blocks"]
        axes.annotate(f" {blocks} block{'s' if blocks > 1 else ''}", (x, y), va="bottom")
    axes.set_xlabel("the library's peak: H, the routing and the larger workspace, MiB")
    axes.set_ylabel("forward and backward, % slower")
    axes.margins(x=0.12, y=0.15)
    axes.set_xlim(left=0)
    shape = " ".join(f"{name}={first['shape'][name]}" for name in "TdnEK")
    axes.set_title(f"{first['config']}, {shape}, dH over H\n{first['device']}", loc="left",
                   fontsize=9)
    save(figure, output)


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--draw", type=pathlib.Path, help="draw the results here, measure nothing")
    parser.add_argument("--tilemoe", type=pathlib.Path, help="the program; else build/release's")
    parser.add_argument("--config", default="7b-n256", help="see `tilemoe bench --list`")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    args.tilemoe = args.tilemoe or HERE.parent / "build" / "release" / "apps" / "tilemoe" / "tilemoe"
    if args.draw:
        return draw(json.loads(args.results.read_text()), args.draw)
    if not args.tilemoe.exists():
        sys.exit(f"memory_curve.py: error: {args.tilemoe} is not there")
    entries = measure(args)
    args.results.write_text(json.dumps(entries, indent=1) + "\n")
    for entry in entries:
        print(f"{entry['config']} {entry['column_blocks']} blocks: "
              f"{entry['library_peak_bytes'] / MIB:.1f} MiB, forward {entry['fwd_ms']:.3f} ms, "
              f"backward {entry['bwd_ms']:.3f} ms, {entry['time_of_first']:.3f} of the first's time")


if __name__ == "__main__":
    main()
