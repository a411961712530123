"""The tables."""

import statistics

from . import machine


def _milliseconds(value):
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _mebibytes(value):
    if value is None:
        return ""
    value /= 2**20
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _microseconds(value):
    return "" if value is None else f"{1e3 * value:.0f}"


def _speed(tflops):
    if tflops is None:
        return ""
    return f"{1e3 * tflops:.4g} G" if tflops < 1 else f"{tflops:.4g} T"


def quartiles(values):
    """The first and the third of numbers; of one number, twice that number."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _spread(values, write):
    """ "1.02-1.10" """
    return "-".join(map(write, quartiles(values))) if values else ""


def _of_pass(entry, key):
    return [times[key] for times in entry["round_times"] if key in times]


def _ratios(ours, entry):
    """TileMoE's speed against a peer, round by round."""
    if entry is ours:
        return []
    pairs = zip(ours["round_times"], entry["round_times"])
    return [sum(theirs.values()) / sum(mine.values()) for mine, theirs in pairs]


def _row(entry, ours):
    host, peak = entry["host_ms"], entry.get("peak_bytes")
    speed = ours["speed_against"].get(entry["backend"])
    return [
        entry["backend"],
        _milliseconds(entry.get("fwd_ms")),
        _spread(_of_pass(entry, "fwd_ms"), _milliseconds),
        _milliseconds(entry.get("bwd_ms")),
        _spread(_of_pass(entry, "bwd_ms"), _milliseconds),
        _speed(entry["tflops"]),
        _microseconds(host.get("forward")),
        _microseconds(host.get("backward")),
        _mebibytes(entry.get("saved_bytes")),
        _mebibytes(None if peak is None else peak - entry["resident_bytes"]),
        "" if speed is None else f"{speed:.3f}",
        _spread(_ratios(ours, entry), "{:.3f}".format),
    ]


HEADER = [
    "", "forward, ms", "quartiles", "backward, ms", "quartiles", "FLOP/s", "host fwd, us",
    "host bwd, us", "kept, MiB", "peak*, MiB", "TileMoE's speed", "quartiles",
]  # fmt: skip


def table(entries):
    """One case's entries as lines of text."""
    ours = entries[0]
    shape = " ".join(f"{letter}={size}" for letter, size in ours["shape"].items())
    where = ours["device"]
    if "threads" in ours:
        where = f"{ours['threads']} threads of {where}"
    lines = [f"{ours['config']}: {shape}, {ours['dtype']}, {ours['rounds']} rounds, {where}"]
    load = f"{ours['load_average']:.1f} after the rounds, on {machine.cores()} cores"
    lines.append(f"  load average {load}")
    rows = [HEADER, *(_row(entry, ours) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
        lines.append("  " + "  ".join(cells).rstrip())
    lines.append("  * above weights, X and dO")
    lines += [f"  left out: {name}: {reason}" for name, reason in ours["left_out"].items()]
    return "\n".join(lines)
