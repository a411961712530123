"""PEFT's adapters of experts by TileMoE, against PEFT's own around `eager` experts in float64."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import tilemoe.peft
import tilemoe.transformers
from tilemoe._layout import FACTORS, GRADIENTS
from checks import Calls
from peft_support import (
    CONFIGS, W1, W2, adapted, assert_same, eager, nothing_materialised, run, train,
)  # fmt: skip

OUTPUTS = GRADIENTS + FACTORS  # of experts_lora_backward, in the order of the bits of `wanted`


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()
    tilemoe.peft.register()


@pytest.mark.parametrize("name", CONFIGS)
def test_five_steps_are_those_of_eager(name, monkeypatch):
    model = adapted(name)
    want = train(eager(model))
    with nothing_materialised(monkeypatch):
        got = train(model)
    for step, of_step in enumerate(want):
        assert sum("lora_" in key for key in of_step) == len(of_step) - 1 >= 4
        assert_same(got[step], of_step)
    assert abs(want[-1]["loss"] - want[0]["loss"]) > 1e-3


@pytest.mark.parametrize("targets", [[W1], [W2]])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_one_weight(name, targets, monkeypatch):
    model = adapted(name, targets)
    want = run(eager(model))
    with nothing_materialised(monkeypatch):
        assert_same(run(model), want)


def test_no_gradient_of_a_frozen_weight_is_computed():
    """One call of the layer's operator per layer and direction, with both weights' factors, which
    computes the gradients of x, the router's scores and the factors."""
    model = adapted()
    with Calls() as calls:
        run(model)
    seen = [args for name, args in calls.seen if name.startswith("experts_lora_backward")]
    assert len(seen) == len([name for name, _ in calls.seen if name == "experts_lora"]) == 2
    computed = {
        name for args in seen for bit, name in enumerate(OUTPUTS) if args[-1] & 1 << bit
    }
    assert computed == {"dX", "ds", "A1", "B1", "A2", "B2"}


def expert_major(adapter, wrapper, name):
    B = wrapper.lora_B[name].weight.unflatten(1, (wrapper.num_experts, -1)).transpose(0, 1)
    return adapter._replace(B=B)


FAULTS = {
    "B is read as expert-major": expert_major,
    "the next expert's factors": lambda adapter, *_: adapter._replace(
        A=adapter.A.roll(1, 0), B=adapter.B.roll(1, 0)
    ),
    "the scale is applied twice": lambda adapter, *_: adapter._replace(scale=adapter.scale**2),
    "no scale": lambda adapter, *_: adapter._replace(scale=1.0),
    "A is not trained": lambda adapter, *_: adapter._replace(A=adapter.A.detach()),
    "B is not trained": lambda adapter, *_: adapter._replace(B=adapter.B.detach()),
    "no adapter": lambda adapter, *_: adapter._replace(B=adapter.B * 0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_the_comparison_notices_a_fault(fault, weight, monkeypatch):
    real = tilemoe.integrations.peft._adapter

    def faulty(wrapper, name):
        adapter, is_meant = real(wrapper, name), wrapper.parameter_name == weight
        return FAULTS[fault](adapter, wrapper, name) if is_meant else adapter

    model = adapted()
    want = run(eager(model))
    monkeypatch.setattr(tilemoe.integrations.peft, "_adapter", faulty)
    with pytest.raises(AssertionError):
        assert_same(run(model), want, limit=1e-3)
