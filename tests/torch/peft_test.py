"""PEFT's adapters of experts by TileMoE, against PEFT's own around `eager` experts in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import tilemoe.peft
import tilemoe.transformers
from tilemoe._layout import FACTORS, GRADIENTS
from checks import Calls
from peft_support import (
    CONFIGS, W1, W2, adapted, assert_same, eager, nothing_materialised, run, train,
)  # fmt: skip
from transformers_support import relative_error

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
    computed = {name for args in seen for bit, name in enumerate(OUTPUTS) if args[-1] & 1 << bit}
    assert computed == {"dX", "ds", "A1", "B1", "A2", "B2"}


def test_factors_written_without_a_new_version():
    """FSDP-2, DeepSpeed and writes to .data change a parameter's values, but not its version."""
    model = adapted()
    before = run(model)
    for key, parameter in model.named_parameters():
        if "experts.lora_B" in key:
            version = parameter._version
            parameter.data.neg_()
            assert parameter._version == version
    want = run(eager(model))
    assert relative_error(want["loss"], before["loss"].double()) > 1e-3
    assert_same(run(model), want)


class _Reads(TorchDispatchMode):
    """Counts the operators for whose result the host would wait on a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._opname in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_host_reads_no_value(name):
    model = adapted(name)
    run(model)  # finds the experts' form
    experts = model.base_model.model.model.layers[0].mlp.experts
    x = torch.randn(5, 24, requires_grad=True)
    ids, weights = torch.tensor([[0, 2, 5]] * 5), torch.rand(5, 3, requires_grad=True)
    with _Reads() as reads:
        experts(x, ids, weights).sum().backward()
    assert reads.seen == []
    with _Reads() as reads:
        x.sum().item()
    assert reads.seen == ["_local_scalar_dense"]


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
