"""Write the log of a run.

log.jsonl and TensorBoard have every step, the screen one of N steps. The first process writes them.
"""

import json
import math
import statistics
import sys
import time

QUIET = ("batch",)  # only in the log: a checksum is compared, not plotted


class Progress:
    """Print at most one line per second of bytes that are done."""

    def __init__(self, what):
        self.what, self.began = what, time.monotonic()
        self.said = self.began

    def __call__(self, done, total=None, always=False):
        now = time.monotonic()
        if not always and now < self.said + 1:
            return
        self.said = now
        of = f" of {total / 1e6:.0f}" if total else ""
        rate = done / 1e6 / max(1e-9, now - self.began)
        print(f"{self.what}: {done / 1e6:.1f}{of} MB, {rate:.1f} MB/s", file=sys.stderr)


def duration(seconds):
    """Return a duration in readable units."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


def counted(number, noun, plural="s"):
    return f"{number} {noun}{plural if number != 1 else ''}"


class Screen:
    """Terminal output of a run of `steps` steps of `tokens` tokens each.

    It prints a line every `every` steps, and after the first and the last one. A line has the mean
    loss and the speed of the steps since the previous line; the remaining time is by the clock,
    including evaluations and saves.
    """

    def __init__(self, rank, steps, tokens, every, clock=time.monotonic):
        self.is_first, self.steps, self.tokens, self.every = rank == 0, steps, tokens, every
        self.clock, self.said, self.began = clock, 0, clock()
        self.losses, self.seconds = [], 0.0

    def say(self, text):
        if self.is_first:
            print(text, flush=True)

    def step(self, record, seconds):
        """Record a step; record: that of the log; seconds: duration of the step."""
        self.losses.append(record["loss"])
        self.seconds += seconds
        step, now = record["step"], self.clock()
        if self.said and step % self.every and step != self.steps:
            return
        done = len(self.losses)
        fields = [
            f"step {step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {statistics.fmean(self.losses):.4f}",
            f"gradient norm {record['gradient_norm']:.3g}",
            f"{done * self.tokens / self.seconds:,.0f} tokens/s",
        ]
        if self.said:  # the first step also compiles and allocates
            fields.append(f"{duration((now - self.began) / done * (self.steps - step))} left")
        self.say("   ".join(fields))
        self.said, self.began, self.losses, self.seconds = step, now, [], 0.0

    def evaluated(self, step, loss, tokens_per_byte):
        """Print an evaluation; loss: nats per token of the validation part."""
        bits = loss / math.log(2) * tokens_per_byte
        self.say(f"step {step}: validation loss {loss:.4f}, {bits:.3f} bits per byte")


def tensorboard(folder):
    """Return a writer of TensorBoard's files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit(
            f"--tensorboard requires its package; run pip install tensorboard ({error})"
        )
    return SummaryWriter(folder)


class Log:
    def __init__(self, folder, rank, with_tensorboard=False):
        self.path = folder / "log.jsonl"
        self.file = open(self.path, "a", buffering=1) if rank == 0 else None
        self.writer = tensorboard(folder) if with_tensorboard and rank == 0 else None

    def write(self, record):
        if self.file is None:
            return
        self.file.write(json.dumps(record) + "\n")
        step = record.get("step", record.get("evaluated"))
        if self.writer is not None and step is not None:
            for name, value in record.items():
                if name not in ("step", "evaluated", *QUIET):
                    self.writer.add_scalar(name, value, step)

    def close(self):
        if self.writer is not None:
            self.writer.close()
