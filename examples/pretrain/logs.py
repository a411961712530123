"""What a run says of itself: log.jsonl, a line for the eye, TensorBoard. The first process does."""

import json
import sys
import time

QUIET = ("batch",)  # in the log alone: a checksum is compared, not read


class Progress:
    """A line a second, at most, of bytes that are done."""

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


def tensorboard(folder):
    """A writer of TensorBoard's files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit(f"--tensorboard needs its package: pip install tensorboard ({error})")
    return SummaryWriter(folder)


class Log:
    def __init__(self, folder, rank, with_tensorboard=False):
        self.file = open(folder / "log.jsonl", "a", buffering=1) if rank == 0 else None
        self.writer = tensorboard(folder) if with_tensorboard and rank == 0 else None

    def write(self, record):
        if self.file is None:
            return
        self.file.write(json.dumps(record) + "\n")
        text = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()}
        print(" ".join(f"{k} {v}" for k, v in text.items() if k not in QUIET), flush=True)
        step = record.get("step", record.get("evaluated"))
        if self.writer is not None and step is not None:
            for name, value in record.items():
                if name not in ("step", "evaluated", *QUIET):
                    self.writer.add_scalar(name, value, step)

    def close(self):
        if self.writer is not None:
            self.writer.close()
