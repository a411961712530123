"""Layers on two GPUs of one process: one after another and from two threads, with equal bits. Run
by --device cuda; scripts/gpu/run.py's stage two-gpus runs it where there are two."""

import threading

import pytest
import torch

import module_support
import tilemoe
from random_layers import K, T, d, logits_layer, normal, results
from module_support import same_bits

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="this machine has one GPU"
)
DEVICES = ["cuda:0", "cuda:1"]
ROUNDED = dict(rounding="nearest", m=8)


def moved(tensors, device):
    return {k: t.detach().to(device).requires_grad_(t.requires_grad) for k, t in tensors.items()}


def layers(seed=0):
    """The same layer on each GPU, and what each of its tensors is to be."""
    tensors = logits_layer(torch.bfloat16, bias=True)
    with torch.no_grad():
        tensors["x"].copy_(normal(T, d, seed=40 + seed, dtype=torch.bfloat16))
    want = results(tilemoe.moe, moved(tensors, DEVICES[0]), K=K, **ROUNDED)
    return [moved(tensors, device) for device in DEVICES], want


def run(tensors):
    """O and every gradient, on the tensors' device, whichever the current one is."""
    O = tilemoe.moe(**tensors, K=K, **ROUNDED)
    dO = normal(T, d, seed=30, dtype=O.dtype).to(O.device)
    gradients = torch.autograd.grad(O, list(tensors.values()), dO)
    return {"O": O, **{f"d{name}": g for name, g in zip(tensors, gradients)}}


def same_on(device, got, want):
    torch.cuda.synchronize(device)
    assert all(tensor.device == torch.device(device) for tensor in got.values())
    same_bits({name: t.to(DEVICES[0]) for name, t in got.items()}, want)


def test_alternately_without_a_change_of_device():
    of_devices, want = layers()
    for _ in range(5):
        for device, tensors in zip(DEVICES, of_devices):
            same_on(device, run(tensors), want)
            assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_does_not_matter(current):
    of_devices, want = layers()
    with torch.cuda.device(current):
        for device, tensors in zip(DEVICES, of_devices):
            same_on(device, run(tensors), want)


def test_from_two_threads_at_once():
    """Each thread has its device and data; the launches of both go on side by side."""
    problems = [layers(seed) for seed in (0, 1)]
    begin, wrong = threading.Barrier(2), []

    def work(i):
        try:
            torch.cuda.set_device(i)
            of_devices, want = problems[i]
            begin.wait(timeout=60)
            got = [run(of_devices[i]) for _ in range(30)]
            for one in got:
                same_on(DEVICES[i], one, want)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)
            begin.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]


def test_from_two_threads_on_one_module_each():
    """Modules, their losses and their backward, whose thread autograd has for each device."""
    options = dict(balance_coefficient=0.1, z_coefficient=0.01)
    one = module_support.make(**options)
    x, dO = module_support.batch()
    want = module_support.run(one, x, dO)
    got = {}

    def work(device):
        moe = module_support.make(**options).to(device)
        mine = x.detach().to(device).requires_grad_()
        got[device] = [module_support.run(moe, mine, dO.to(device)) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in DEVICES:
        assert len(got[device]) == 20
        for one in got[device]:
            same_on(device, one, want)


def test_graphs_of_two_devices():
    of_devices, want = layers()
    graphs = []
    for device, tensors in zip(DEVICES, of_devices):
        with torch.cuda.device(device):
            dO = normal(T, d, seed=30, dtype=torch.bfloat16).to(device)

            def both(tensors=tensors, dO=dO):
                O = tilemoe.moe(**tensors, K=K, **ROUNDED)
                return [O.detach(), *torch.autograd.grad(O, list(tensors.values()), dO)]

            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # A stream of this device: torch.cuda.graph's own is of the first one that captured.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                graphs.append((graph, both(), dO))  # a replay reads dO: it must live
    for _ in range(3):
        for device, (graph, out, _) in zip(DEVICES, graphs):
            with torch.cuda.device(device):
                graph.replay()
            same_on(device, dict(zip(want, out)), want)
