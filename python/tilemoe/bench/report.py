"""Format the bench's output for a case: table, host times, kernels, and a line per peer."""

from .._command.output import table
from .kernels import short, step

NAME_WIDTH = 72


def _number(value):
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _mebibytes(value):
    return f"{value / 2**20:.0f}" if value >= 10 * 2**20 else f"{value / 2**20:.2g}"


def _ratio(value):
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _cells(values, key, write):
    """Return the median and the quartiles of a quantity; empty if it was not measured."""
    if key not in values:
        return ["", ""]
    first, median, third = values[key]
    return [write(median), f"{write(first)}-{write(third)}"]


def _peer(measurement):
    return measurement.name.rpartition("/")[2]


def _indented(titles, rows, left):
    return [f"  {line}" for line in table(titles, rows, left)]


def _row(measurement, scale):
    values = measurement.values
    return [
        _peer(measurement),
        *_cells(values, "forward_ms", _number),
        *_cells(values, "backward_ms", _number),
        f"{values['tflop_per_s'][1] * scale:.4g}",
        *(
            _mebibytes(values[key]) if key in values else ""
            for key in ("saved_bytes", "peak_bytes")
        ),
        *_cells(values, "time_over_tilemoe", _ratio),
    ]


def times(result):
    """Return the table of a case, and the peers that were skipped."""
    first, case = result.measurements[0], result.case
    shape = " ".join(f"{letter}={size}" for letter, size in case.shape.items())
    frozen = f"adapters of rank {case.lora_rank}, " if case.lora_rank else "frozen weights, "
    lines = [f"{case.name}: {shape}, {case.dtype}, {case.activation}, "
             f"{frozen if case.frozen else ''}{first.values['pass']}, "
             f"{first.values['rounds']} rounds, {first.device}"]  # fmt: skip
    scale, unit = (1, "TFLOP/s") if first.median("tflop_per_s") >= 1 else (1e3, "GFLOP/s")
    titles = ["", "forward, ms", "quartiles", "backward, ms", "quartiles", unit, "kept, MiB",
              "peak, MiB", "time / TileMoE's", "quartiles"]  # fmt: skip
    rows = [_row(one, scale) for one in result.measurements]
    failed = {peer: reason for peer, reason in result.left_out.items()
              if reason.startswith("out of memory")}  # fmt: skip
    rows += [[peer, "out of memory", *[""] * (len(titles) - 2)] for peer in failed]
    used = [i for i in range(len(titles)) if i == 0 or any(row[i] for row in rows)]
    pick = lambda row: [row[i] for i in used]
    lines += _indented(pick(titles), [pick(row) for row in rows], left={0})
    lines += [f"  left out: {peer}: {reason}" for peer, reason in result.left_out.items()]
    return lines


def host_times(result):
    """Return microseconds of the host per warm call, and milliseconds of the first call."""
    titles = ["host", "forward, us", "quartiles", "backward, us", "quartiles", "first forward, ms",
              "first backward, ms"]  # fmt: skip
    rows = []
    for one in result.measurements:
        firsts = (one.values.get(f"host_first_{which}_ms") for which in ("forward", "backward"))
        rows.append([_peer(one), *_cells(one.values, "host_forward_us", "{:.0f}".format),
                     *_cells(one.values, "host_backward_us", "{:.0f}".format),
                     *("" if ms is None else f"{ms:.1f}" for ms in firsts)])  # fmt: skip
    return _indented(titles, rows, left={0})


def kernels(result):
    """Return for each peer its kernels, the longest first."""
    titles = ["pass", "us", "share", "calls", "step", "kernel"]
    for peer, found in result.kernels.items():
        total = sum(us for *_, us in found)
        yield f"  {peer}: {total:.1f} us in kernels"
        rows = [[which, f"{us:.1f}", f"{100 * us / total:.1f} %", f"{calls:g}", step(name),
                 short(name)[:NAME_WIDTH]]
                for which, name, calls, us in sorted(found, key=lambda one: -one[3])]  # fmt: skip
        yield from _indented(titles, rows, left={0, 4, 5})


def summary(result):
    """Return one line per peer: TileMoE's speed and peak memory relative to it."""
    ours, *others = result.measurements
    for other in others:
        speed = other.values["time_over_tilemoe"][1]
        how = f"{_ratio(speed)} faster than" if speed >= 1.005 else f"{_ratio(speed)} as fast as"
        line = f"TileMoE: {how} {_peer(other)}"
        if {"peak_bytes"} <= ours.values.keys() & other.values.keys():
            memory = ours.values["peak_bytes"] / other.values["peak_bytes"]
            line += f", {_ratio(memory)} the peak memory"
        yield line


def of(result):
    """Return all lines of a case."""
    lines = times(result)
    if any("host_first_forward_ms" in one.values or "host_first_backward_ms" in one.values
           for one in result.measurements):  # fmt: skip
        lines += ["", *host_times(result)]
    if any(result.kernels.values()):
        lines += ["", *kernels(result)]
    return "\n".join([*lines, "", *summary(result)]).rstrip()
