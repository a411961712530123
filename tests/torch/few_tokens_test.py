"""benchmarks/gpu_few_tokens.py on small layers on the CPU: which copies it makes, what it counts,
refuses and judges. Its graphs need a GPU."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

import tilemoe
from tilemoe.bench.cases import CASES, Case

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_few_tokens as few  # noqa: E402

SMALL = Case("small", T=4, d=32, n=16, E=8, K=2)
EXPERT_BYTES = 3 * 32 * 16 * 4


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(few, "LEAST_FORWARDS", 3)


@pytest.fixture
def kits(monkeypatch):
    """[(kit that a forward of a layer ran with)], by a stand-in for the choice of one."""
    chosen, seen = ["auto"], []
    forward = tilemoe.MoE.forward

    def watched(self, x):
        seen.append(chosen[0])
        return forward(self, x)

    monkeypatch.setattr(tilemoe, "set_kit", lambda kit: chosen.__setitem__(0, kit), raising=False)
    monkeypatch.setattr(tilemoe.MoE, "forward", watched)
    return chosen, seen


def layers(count, T=4):
    return [few.Layer(SMALL, seed).of(T) for seed in range(count)]


def test_copies_are_as_many_as_the_cache_needs():
    """An eighth of the experts' bytes each: with one copy fewer it would not hold."""
    for l2 in (1, EXPERT_BYTES, 3 * EXPERT_BYTES):
        made = few.make_layers(SMALL, l2)
        touched = [layer.of(1).touched() for layer in made]
        assert touched == [2] * len(made)
        assert few.between_visits(touched, EXPERT_BYTES) >= 3 * l2
        assert len(made) == 2 or few.between_visits(touched[1:], EXPERT_BYTES) < 3 * l2
    assert len(made) == 6
    assert not torch.equal(made[0].problem.W1, made[1].problem.W1)
    with pytest.raises(ValueError, match="small: 64 copies read less than 3 times the L2"):
        few.make_layers(SMALL, 1 << 40)


def test_between_visits_leaves_out_the_copy_itself():
    assert few.between_visits([8, 5, 7], 10) == 120
    assert few.between_visits([8], 10) == 0


def test_touched_experts_are_those_of_the_routing():
    for layer in layers(3):
        ids = layer.problem.logits().topk(2).indices
        assert layer.touched() == len(ids.unique())
        assert layer.module.return_aux is False
    assert layers(1)[0].of(1).touched() == 2


def test_weights_are_shared_and_not_copied():
    layer = few.Layer(SMALL, 0)
    held = {p.data_ptr() for p in layer.module.parameters()}
    assert held == {w.data_ptr() for w in layer.problem.weights}
    assert layer.of(1).problem.W1 is layer.problem.W1
    assert layer.of(3).problem.X.shape == (3, 32) and layer.of(3).case.T == 3


@pytest.mark.parametrize("name", [few.OURS, few.TORCH])
def test_what_is_timed_is_the_layer(name, quick):
    made = layers(2)
    rotation = few.Rotation(name, made)
    assert rotation.forwards == 4  # the least is 3, of 2 copies
    assert 1 <= rotation.check(made) <= 8
    assert rotation.timed() > 0 and rotation.launches() == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: torch.zeros_like(out),
        lambda out: out.flip(0),
        lambda out: 1.001 * out,
        lambda out: out * torch.nan,
    ],
)
def test_what_is_wrong_is_not_timed(spoil, quick, monkeypatch):
    forward = tilemoe.MoE.forward
    monkeypatch.setattr(tilemoe.MoE, "forward", lambda self, x: spoil(forward(self, x)))
    made = [few.Layer(SMALL, seed) for seed in range(2)]
    monkeypatch.setattr(few.Layer, "touched", lambda self: 2)
    entry = few.measure(made, 4, [few.OURS, few.TORCH], 1, 1)
    assert entry["left_out"][few.OURS].startswith("Wrong: O of copy 0 is off by")
    assert set(entry["us"]) == set(entry["checked_tokens"]) == {few.TORCH}


def test_expected_is_the_formula_and_names_tokens_at_an_edge():
    layer = layers(1)[0]
    O, clear = layer.expected()
    with torch.no_grad():
        assert (layer.module(layer.problem.X) - O).norm() <= 1e-5 * O.norm()
    assert clear.all() and O.shape == (4, 32)
    logits = layer.problem.logits().detach().clone()
    second, third = logits[1].argsort(descending=True)[1:3].tolist()
    logits[1, third] = logits[1, second]
    layer.problem.logits = lambda: logits
    assert layer.choice()[2].tolist() == [True, False, True, True]


def test_each_kit_runs_as_named_and_is_taken_back(quick, kits):
    chosen, seen = kits
    made = layers(2)
    for name, kit in ((few.OURS, "auto"), ("tilemoe-sm90", "sm90"), ("tilemoe-sm80", "sm80")):
        seen.clear()
        with few.kit_of(name):
            made[0].module(made[0].problem.X)
        assert seen == [kit] and chosen == ["auto"]
    with pytest.raises(RuntimeError), few.kit_of("tilemoe-sm80"):
        raise RuntimeError
    assert chosen == ["auto"]


def test_a_tilemoe_without_kits_says_so(quick, monkeypatch):
    monkeypatch.delattr(tilemoe, "set_kit", raising=False)
    entry = few.measure(layers(2), 1, ["tilemoe-sm80"], 1, 1)
    assert entry["left_out"] == {"tilemoe-sm80": "this tilemoe has no kits to choose from"}


def test_bars():
    megabytes_19 = 8 * 3 * 256 * 1536 * 2
    bar = lambda device: few.judged({"touched_bytes": megabytes_19, "us": {}}, device)["bar_us"]
    assert bar("NVIDIA H200") == pytest.approx(30.66, abs=0.01)
    assert bar("NVIDIA H100 80GB HBM3") == pytest.approx(32.55, abs=0.01)
    assert bar("NVIDIA A100") is None and few.bytes_us(1, "NVIDIA A100") is None
    assert few.bytes_us(8e6, "NVIDIA H200") == 2.0
    for us, met in ((30.6, True), (30.7, False), (float("nan"), False)):
        entry = {"touched_bytes": megabytes_19, "us": {few.OURS: us, "tilemoe-sm80": 1.0}}
        assert few.judged(entry, "NVIDIA H200")["met"] is met
    met = lambda name, device: few.judged({"touched_bytes": 1, "us": {name: 1.0}}, device)["met"]
    assert met(few.OURS, "NVIDIA A100") is None and met("tilemoe-sm80", "NVIDIA H200") is None


@pytest.mark.parametrize("more_us, status", [(1e9, 0), (-1e9, 1)])
def test_the_command(quick, kits, monkeypatch, tmp_path, capsys, more_us, status):
    tiny = dataclasses.replace(SMALL, name="tiny")
    monkeypatch.setitem(CASES, "tiny", tiny)
    monkeypatch.setattr(few, "CPU_L2_BYTES", EXPERT_BYTES)
    monkeypatch.setattr(few, "BYTES_PER_S", {"": 1e9})
    monkeypatch.setattr(few, "MORE_US", more_us)
    file = tmp_path / "out" / "few.json"
    words = ["--device", "cpu", "--config", "tiny", "--tokens", "1", "3", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["gpu_few_tokens.py", *words, "--json", str(file)])
    assert few.main() == status
    one, three = json.loads(file.read_text())["entries"]
    assert (one["shape"]["T"], three["shape"]["T"]) == (1, 3)
    assert one["touched_bytes"] == 2 * EXPERT_BYTES and one["copies"] == 3
    assert one["between_visits_bytes"] == 4 * EXPERT_BYTES
    for entry in (one, three):
        assert set(entry["us"]) == set(few.NAMES) and entry["left_out"] == {}
        assert entry["met"] is (status == 0)
        for name, times in entry["round_us"].items():
            assert len(times) == 3 and entry["us"][name] == sorted(times)[1]
    said = capsys.readouterr().out
    assert "tiny T=1: 2.0 experts, 0.0 MB, 3 copies; bar" in said
    assert said.endswith(
        "not judged: none\n" if status == 0 else "not judged: tiny T=1, tiny T=3\n"
    )


def test_without_a_gpu_it_ends(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_few_tokens.py"])
    with pytest.raises(SystemExit, match="error: torch sees no GPU here"):
        few.main()
