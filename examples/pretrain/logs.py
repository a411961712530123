"""What a run says of itself: log.jsonl, a line for the eye, TensorBoard. The first process does."""

import json


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
        print(" ".join(f"{k} {v}" for k, v in text.items()), flush=True)
        step = record.get("step", record.get("evaluated"))
        if self.writer is not None and step is not None:
            for name, value in record.items():
                if name not in ("step", "evaluated", "batch"):
                    self.writer.add_scalar(name, value, step)

    def close(self):
        if self.writer is not None:
            self.writer.close()
