"""Common code of the tests: refusals, equal bits, the operators that run, programs of their own."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import launcher


def refused(kind, sentence, call, *args, **named):
    """The call raises `kind`, in whose message the regular expression is found. -> the exception"""
    with pytest.raises(kind, match=sentence) as raised:
        call(*args, **named)
    return raised.value


def short(value):
    """The id of a parameter."""
    return str(value)[:30]


def same_bits(got, want):
    """Dictionaries of tensors."""
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


class Calls(TorchDispatchMode):
    """Records the operators of tilemoe that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tilemoe":
            self.seen.append((function._opname, args))
        return function(*args, **(kwargs or {}))

    def of(self, name):
        return [args for seen, args in self.seen if seen == name]

    @property
    def names(self):
        """The operators that compute gradients of experts."""
        starts = "experts_backward", "moe_with_router_backward"
        return [name for name, _ in self.seen if name.startswith(starts)]


# conftest.py switches vector instructions off for all processes.
WITHOUT_PRECOMPILED_HEADERS = {"cpp_cache_precompile_headers": False}


def compiled(function, backend="aot_eager", **options):
    """One graph, by a compiler that has seen nothing before."""
    torch._dynamo.reset()
    if backend == "inductor":
        options["options"] = WITHOUT_PRECOMPILED_HEADERS
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def start(*command, path=(), timeout=300, cwd=None, **environment):
    """A program that has this one's packages, and those of `path`. -> CompletedProcess"""
    places = {"PYTHONPATH": os.pathsep.join(map(str, [*path, *sys.path]))}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout, cwd=cwd,
        env=os.environ | places | environment,
    )  # fmt: skip


def found_by_ranks(worker, processes=2):
    """The JSON in the last line of a program of several processes."""
    done = start(*launcher.python(processes), worker, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def python(*words, **options):
    """start() of this Python, which has to succeed. -> what it printed"""
    done = start(sys.executable, *words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
