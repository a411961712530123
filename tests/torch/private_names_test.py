"""Names that torch does not promise to keep: a torch without one shows it here by that name."""

import operator
import re
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.autograd import forward_ad

import tilemoe

SOURCES = sorted(Path(tilemoe.__file__).parent.rglob("*.py"))
# Read with getattr: without it the package does less, and nothing wrong.
OPTIONAL = {
    "torch._C._autograd._get_current_graph_task_keep_graph": "H is never overwritten",
    "torch._C._storage_Use_Count": "H is never overwritten",
    "torch._C._cuda_isCurrentStreamCapturing": "H in a CUDA graph is taken for one outside of it",
    "torch._C._current_autograd_node": "every gradient is computed",
    "torch._C._is_any_autocast_enabled": "each device's autocast is read",
    "torch._C._will_engine_execute_node": "every gradient is computed",
}


def private_names():
    found = set()
    for source in SOURCES:
        text = source.read_text()
        found |= set(re.findall(r"torch\._C(?:\.\w+)+", text))
        found |= {f"torch.autograd.{name}" for name in re.findall(r"forward_ad\._\w+", text)}
        pairs = re.findall(r'getattr\((torch\._C(?:\.\w+)*), "(\w+)"', text)
        found |= {f"{owner}.{name}" for owner, name in pairs}
    return sorted(found)


@pytest.mark.parametrize("name", private_names())
def test_this_torch_has_it(name):
    assert operator.attrgetter(name.removeprefix("torch."))(torch) is not None


def test_the_optional_ones_are_those_read_with_getattr():
    text = "".join(source.read_text() for source in SOURCES)
    found = {
        f"{owner}.{name}"
        for owner, name in re.findall(r'getattr\((torch\._C(?:\.\w+)*), "(\w+)"', text)
    }
    assert found == set(OPTIONAL)


def test_what_is_read_of_others():
    assert isinstance(forward_ad._current_level, int)
    assert torch.distributed.distributed_c10d.default_pg_timeout.total_seconds() > 0
    assert hasattr(torch.distributed.ProcessGroup, "_get_backend")
