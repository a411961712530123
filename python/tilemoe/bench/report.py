"""The tables."""


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


def _row(entry, speed):
    host, peak = entry["host_ms"], entry.get("peak_bytes")
    return [
        entry["backend"],
        _milliseconds(entry.get("fwd_ms")),
        _milliseconds(entry.get("bwd_ms")),
        _speed(entry["tflops"]),
        _microseconds(host.get("forward")),
        _microseconds(host.get("backward")),
        _mebibytes(entry.get("saved_bytes")),
        _mebibytes(None if peak is None else peak - entry["resident_bytes"]),
        "" if speed is None else f"{speed:.3f}",
    ]


HEADER = [
    "", "forward, ms", "backward, ms", "FLOP/s", "host fwd, us", "host bwd, us", "kept, MiB",
    "peak*, MiB", "TileMoE's speed",
]  # fmt: skip


def table(entries):
    """One case's entries as lines of text."""
    ours = entries[0]
    shape = " ".join(f"{letter}={size}" for letter, size in ours["shape"].items())
    where = ours["device"]
    if "threads" in ours:
        where = f"{ours['threads']} threads of {where}"
    lines = [f"{ours['config']}: {shape}, {ours['dtype']}, {ours['rounds']} rounds, {where}"]
    rows = [HEADER]
    rows += [_row(entry, ours["speed_against"].get(entry["backend"])) for entry in entries]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
        lines.append("  " + "  ".join(cells).rstrip())
    lines.append("  * above weights, X and dO")
    lines += [f"  left out: {name}: {reason}" for name, reason in ours["left_out"].items()]
    return "\n".join(lines)
