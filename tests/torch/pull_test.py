"""Exchanges on a stream of their own, as dispatch="pull" has them on GPUs: the streams here only
record who waits for whom, in order."""

import contextlib
import gc
import weakref

import pytest
import torch

from tilemoe.distributed import pull as pulling


class Stream:
    device = torch.device("cpu")

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    log = []
    current = [Stream("current", log)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return log, current, Stream("side", log)


STARTED, WAITED = "side waits for current", "current waits for side"


def test_tensors_live_until_the_current_stream_waits(streams):
    log, _, side = streams
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    underway = pulling._Underway(side, (tensor, None))
    del tensor
    assert alive() is not None and log == [STARTED]
    underway.wait()
    assert alive() is None and log == [STARTED, WAITED]
    del underway
    assert log == [STARTED, WAITED]  # no more than once


def test_what_nobody_waits_for_is_not_reused_before_it_was_read(streams):
    log, _, side = streams
    underway = pulling._Underway(side, (torch.zeros(3),))
    del underway
    assert log == [STARTED, WAITED]


def test_a_wait_of_another_stream_holds_the_tensors_own_stream_too(streams):
    log, current, side = streams
    underway = pulling._Underway(side, (torch.zeros(3),))
    current[0] = Stream("another", log)
    underway.wait()
    assert log[0] == STARTED and sorted(log[1:]) == ["another waits for side", WAITED]


def test_an_exchange_that_fails_under_way(streams, monkeypatch):
    log, _, side = streams

    class Handle:
        rank, buffer_ptrs = 0, [0]

        def get_buffer(self, rank, shape, dtype):
            log.append("side reads")
            return torch.zeros(shape, dtype=dtype)

        def barrier(self, channel, timeout):
            raise RuntimeError("a rank is gone")

    link = object.__new__(pulling._Link)
    link.stream, link.device, link._timeout_ms = side, side.device, 1
    monkeypatch.setattr(link, "_handle", lambda group, size: Handle(), raising=False)
    own, places = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        link._exchange(None, own, 2, places, None, torch.empty(2, 8))
    gc.collect()
    assert log == [STARTED, "side reads", WAITED]


def test_links_go_with_their_group(monkeypatch):
    class Group:
        pass

    made = []

    class Link:
        def __init__(self, group, device):
            made.append(weakref.ref(self))

    class Team:
        group = Group()

    monkeypatch.setattr(pulling, "_Link", Link)
    device = torch.device("cpu")
    assert pulling._link_of(Team, device) is pulling._link_of(Team, device)
    (link,) = made
    assert link() is not None
    del Team.group
    gc.collect()
    assert link() is None
