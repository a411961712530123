"""The check of layers of real sizes, on small ones and the CPU: right layers pass it, wrong ones and
wrong bounds do not."""

import json
import subprocess
import sys

import pytest
import torch

import real_sizes
import tilemoe
from real_sizes import OUTPUTS, Comparison
from tilemoe.bench.layers import Layer

SMALL = Layer(T=203, d=72, n=56, E=6, K=2)


def compared(layer=SMALL, edit=None, inputs=lambda tensors: None):
    """A comparison of what `tilemoe.moe` gives, or of `edit` of it."""
    tensors = real_sizes.make(layer, "cpu")
    inputs(tensors)
    ours = real_sizes.run(tensors, layer.K)
    if edit is not None:
        edit(ours)
    return Comparison(layer, tensors, ours)


def failed(comparison):
    """{output: names of the yardsticks that it fails by}"""
    return {name: v["failed"] for name, v in comparison.results().items() if v["failed"]}


@pytest.mark.parametrize("K", [2, 3, 5])
def test_a_right_layer_passes_and_its_spoiled_copies_do_not(K):
    comparison = compared(SMALL._replace(K=K))
    assert failed(comparison) == {} and comparison.strays == 0
    tried, missed = comparison.missed_spoilings()
    assert tried > 80 and missed == []
    for result in comparison.results().values():
        if result["expected_error"]:
            assert 0.95 < result["error"] / result["expected_error"] < 1.05


def test_all_of_it():
    found = real_sizes.check(SMALL, "cpu")
    assert found["failed"] == [] and list(found["outputs"]) == list(OUTPUTS)
    assert found["T"] == SMALL.T and found["spoilings_tried"] > 80
    json.dumps(found)


def test_an_expert_without_tokens():
    def nobody_chooses(tensors):
        tensors["logits"][:, SMALL.E - 1] = -50

    comparison = compared(inputs=nobody_chooses)
    assert failed(comparison) == {} and comparison.counts[-1] == 0
    assert comparison.missed_spoilings()[1] == []

    def a_trace(ours):
        ours["dW1"][-1, 3, 5] = 1e-30

    assert "exact" in failed(compared(inputs=nobody_chooses, edit=a_trace))["dW1"]


SLIPS = {
    "gate and up swapped": lambda real, x, l, W1, W2, K: real(x, l, W1.roll(56, 1), W2, K=K),
    "the last expert dropped": lambda real, x, l, W1, W2, K: real(
        x, l, W1, W2 * (torch.arange(6) < 5).view(6, 1, 1), K=K
    ),
    "one expert fewer": lambda real, x, l, W1, W2, K: real(x, l, W1, W2, K=K - 1),
    "another activation": lambda real, *given, K: real(*given, K=K, activation="geglu"),
    "no gradient of x": lambda real, x, *given, K: real(x.detach(), *given, K=K) + x * 0,
    "no gradient of W1": lambda real, x, l, W1, W2, K: real(x, l, W1.detach(), W2, K=K)
    + W1.sum() * 0,
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_layer_fails(slip, monkeypatch):
    real = tilemoe.moe
    monkeypatch.setattr(tilemoe, "moe", lambda *given, K: SLIPS[slip](real, *given, K=K))
    found = failed(compared())
    assert found and all(of == ["exact", "plain"] for of in found.values()), found


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_wrong_tensor_fails(name):
    def one_nan(ours):
        ours[name].view(-1)[-1] = torch.nan

    def half_a_percent_more(ours):
        ours[name] *= 1.008  # which bfloat16 rounds to within one part in 128, if at all

    def noise(ours):
        values = ours[name]
        values.add_(torch.randn(values.shape) * values * 4e-3)

    assert failed(compared(edit=one_nan)) == {name: ["exact", "plain"]}
    assert failed(compared(edit=half_a_percent_more)) == {name: ["exact"]}
    assert failed(compared(edit=noise)) == {name: ["exact"]}


def test_what_no_token_chose_has_no_gradient():
    def a_trace(ours):
        row = ours["dlogits"][-1]
        row[(row == 0).nonzero()[0]] = 1e-12

    assert compared(edit=a_trace).strays == 1


@pytest.mark.parametrize("bounds", [dict(LOOSE=2.0), dict(ROW=1e3, WHOLE=1e3)], ids=str)
def test_bounds_that_let_a_spoiled_copy_pass_are_reported(bounds, monkeypatch):
    for name, value in bounds.items():
        monkeypatch.setattr(real_sizes, name, value)
    _, missed = compared().missed_spoilings()
    yardstick = "plain" if "LOOSE" in bounds else "exact"
    assert missed and all(line.endswith(f": {yardstick}") for line in missed), missed


def test_other_bits_in_a_second_run_are_reported(monkeypatch):
    real, calls = tilemoe.moe, []

    def another_expert_first(x, logits, W1, W2, K):
        calls.append(K)
        return real(x, logits, W1, W2, K=K) * (1 if len(calls) == 1 else 1 + 2**-7)

    monkeypatch.setattr(tilemoe, "moe", another_expert_first)
    assert "O: other bits in a second run" in real_sizes.check(SMALL, "cpu")["failed"]


def test_the_command(tmp_path):
    """On a layer that takes no time, with a bound that holds and one that does not."""
    program = """
import sys
sys.path[:0] = {path!r}
import real_sizes
from tilemoe.bench.layers import Layer
real_sizes.LAYERS = {{"small": Layer(203, 72, 56, 6, 2)}}
real_sizes.WHOLE = float(sys.argv.pop(1))
sys.exit(real_sizes.main())
"""
    program = program.format(path=sys.path)
    file = tmp_path / "small.json"
    for whole, status in (1.05, 0), (0.5, 1):
        command = [sys.executable, "-c", program, whole, "small", "--device", "cpu", "--json", file]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        found = json.loads(file.read_text())
        assert bool(found["failures"]) == bool(found["failed"]) == bool(status)
        assert 0.95 < found["largest_error_over_expected"] < 1.05 and found["spoilings"] > 80
        assert ("FAILED: dW1: exact" in done.stdout) == bool(status)
