"""Read and write results files: JSON lines, one measurement per line; without torch.

A measurement is an object with these keys and no others::

    name      what was measured, for example "peers/qwen3-235b/sonic-moe"
    device    the GPU or CPU
    versions  {"tilemoe": ..., "torch": ..., "driver": ...} of what was measured
    commit    of the source that was measured
    values    {quantity with its unit: number, text, or [first quartile, median, third quartile]}

Quantities end in their unit: "forward_ms", "peak_bytes", "tokens_per_s".
"""

import dataclasses
import json
import os
import pathlib
import statistics

DIGITS = 6  # significant digits of a number that is not whole


@dataclasses.dataclass(frozen=True)
class Measurement:
    name: str
    device: str
    versions: dict
    commit: str
    values: dict

    def median(self, quantity):
        value = self.values[quantity]
        return value[1] if isinstance(value, list) else value


def quartiles(samples):
    """Return [first quartile, median, third quartile] of numbers; of one number, three copies."""
    samples = list(samples)
    if len(samples) < 2:
        return samples * 3
    return statistics.quantiles(samples, n=4, method="inclusive")


def _shortened(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, (list, tuple)):
        return [_shortened(one) for one in value]
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    return value


def write(path, measurements):
    """Write a results file; an existing file is replaced as a whole, or kept on failure.

    Args:
        path: File to write.
        measurements: Measurements, in their order.
    """
    lines = (json.dumps({**dataclasses.asdict(one), "values": _shortened(one.values)})
             for one in measurements)  # fmt: skip
    path = pathlib.Path(path)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("".join(line + "\n" for line in lines))
    os.replace(unfinished, path)


def read(path):
    """Return a results file's measurements, in their order.

    Args:
        path: File to read.

    Raises:
        ValueError: A line is not a measurement; the message names the file and the line.
    """
    measurements = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), start=1):
        try:
            measurements.append(Measurement(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: expected a measurement: {error}") from None
    return measurements
