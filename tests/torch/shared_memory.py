"""Stand-ins for torch's symmetric memory, for processes on a CPU: files that each of
them maps, and gloo's barriers. Streams are nothing, since all is done when its call returns."""

import contextlib
import itertools
import types
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from tilemoe.distributed import pull as pulling


class Handle:
    def __init__(self, rank, memories, group):
        self.rank, self.world_size = rank, len(memories)
        self.buffer_ptrs = [memory.data_ptr() for memory in memories]
        self._memories, self._group = memories, group

    def get_buffer(self, rank, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memories[rank][:size].view(dtype).view(shape)

    def barrier(self, channel, timeout_ms):
        dist.barrier(group=self._group)


class Memory:
    """empty and rendezvous of files in a folder: a rank's n-th goes with its peers' n-th."""

    def __init__(self, folder, rank):
        self._folder, self._rank = folder, rank
        self._count, self._nth = itertools.count(), {}

    def empty(self, size, dtype, device):
        nth = next(self._count)
        memory = self._map(self._rank, nth, size)
        self._nth[memory.data_ptr()] = nth
        return memory

    def rendezvous(self, memory, group):
        nth = self._nth[memory.data_ptr()]
        dist.barrier(group=group)  # every rank has made its own
        memories = [
            memory if rank == dist.get_rank(group) else self._map(rank, nth, memory.numel())
            for rank in range(dist.get_world_size(group))
        ]
        dist.barrier(group=group)
        return Handle(dist.get_rank(group), memories, group)

    def _map(self, rank, nth, size):
        file = self._folder / f"memory{nth}of{rank}"
        return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def begin(folder, rank):
    """From here on ranks of this process pull as they do on GPUs."""
    memory = Memory(folder, rank)
    stream = types.SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda other: None)
    for where, name, what in (
        (symmetric, "empty", memory.empty),
        (symmetric, "rendezvous", memory.rendezvous),
        (torch.cuda, "Stream", lambda device: stream),
        (torch.cuda, "current_stream", lambda device: stream),
        (torch.cuda, "stream", contextlib.nullcontext),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (pulling.Pull, "_transport", lambda pull, like: pulling._link_of(pull.team, like.device)),
    ):
        mock.patch.object(where, name, what).start()
