"""Save checkpoints of torch.distributed.checkpoint that exist as a whole or not at all.

A save goes to `step-N.partial`; when every process has written and flushed its part, the folder is
renamed to `step-N`, which is atomic in a file system. Only then are older checkpoints removed. A
job that is killed at any moment therefore finds the last finished one.
"""

import fcntl
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from configs import Refusal
from parallel import agree


def finished(folder):
    """Return the folders of the checkpoints in a folder, oldest first."""
    return sorted(p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", p.name))


def read(state, folder, alone=False):
    """Read into the tensors of a state; `alone`: in this process, without a process group."""
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=alone)
    except CheckpointException as error:
        reason = next((repr(why) for why, _ in error.failures.values()), "no reason given")
        raise Refusal(
            f"torch {torch.__version__} cannot read {folder}, which is damaged or from a "
            f"newer torch ({reason})"
        ) from error


class Checkpoints:
    def __init__(self, folder, keep):
        self.folder, self.keep = Path(folder), keep
        self.lock = None  # held by the first process, which writes and removes names
        why = None
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = locked(self.folder)
            if self.lock is None:
                why = f"another process is training in {self.folder.parent}"
        agree(why)
        if dist.get_rank() == 0:
            for left in self.folder.glob("step-*.partial"):
                shutil.rmtree(left)
        dist.barrier()

    def last(self):
        return next(reversed(finished(self.folder)), None)

    def save(self, step, model, optimizer, progress):
        """Save; progress: numbers and strings, including the position in the data."""
        final = self.folder / f"step-{step:09d}"
        partial = final.with_suffix(".partial")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "progress": progress}
        # The writer flushes its files (sync_files), and save() returns when all processes are done.
        dcp.save(state, checkpoint_id=partial)
        dist.barrier()
        if dist.get_rank() == 0:
            flush(partial)
            os.rename(partial, final)
            flush(self.folder)
            for old in finished(self.folder)[
                : -self.keep
            ]:  # a partly removed one is not a checkpoint
                os.rename(old, old.with_suffix(".partial"))
                shutil.rmtree(old.with_suffix(".partial"))
        dist.barrier()

    def progress(self, folder, like):
        """Return what save() received, before anything else is read; `like` has its keys."""
        state = {"progress": dict(like)}
        read(state, folder)
        return state["progress"]

    def load(self, folder, model, optimizer):
        """Load into model and optimizer, whatever number of processes wrote it."""
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        read(state, folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Descriptor:
    """Descriptor of an opened file or folder; closed with its last reference."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.close(self.number)


def locked(folder):
    """Return an object that holds the folder's lock, or None if another process holds it.

    The lock leaves no file behind and ends with the process. Some network file systems do not
    support it; the user must then prevent a second process.
    """
    descriptor = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    try:
        fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        pass
    return descriptor


def flush(folder):
    """Flush a folder's entries to the disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
