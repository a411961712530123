"""Conversions of state dicts: every round trip bit for bit, and the converted weights compute the
same layer by the other library's own formula."""

import pytest
import torch
import torch.nn.functional as F

from comparison import assert_close
from module_support import E, d, make, n, same_bits
from tilemoe.state_dict import from_scattermoe, from_torchtitan, to_scattermoe, to_torchtitan

TITAN = "routed_experts.inner_experts."


def titan_state(prefix=""):
    """As torchtitan 0.3.0's MoE names and shapes it."""
    g = torch.Generator().manual_seed(0)
    state = {
        "router.gate.weight": torch.randn(E, d, generator=g),
        "expert_bias_E": torch.randn(E, generator=g),
        TITAN + "w1_EFD": torch.randn(E, n, d, generator=g),
        TITAN + "w2_EDF": torch.randn(E, d, n, generator=g),
        TITAN + "w3_EFD": torch.randn(E, n, d, generator=g),
    }
    return {prefix + name: t for name, t in state.items()}


def scatter_state(gated, bias, prefix=""):
    """As ScatterMoE's GLUMLP and MLP name and shape it, with a router beside it."""
    g = torch.Generator().manual_seed(0)
    width = 2 * n if gated else n
    state = {
        "gate.weight": torch.randn(E, d, generator=g),
        "experts.weight": torch.randn(E, width, d, generator=g),
        "output_experts.weight": torch.randn(E, d, n, generator=g),
    }
    if bias:
        state["experts.bias"] = torch.randn(E, width, generator=g)
        state["output_experts.bias"] = torch.randn(E, d, generator=g)
    return {prefix + name: t for name, t in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchtitan_round_trips(dtype):
    theirs = {k: t.to(dtype) for k, t in titan_state("layers.3.moe.").items()}
    theirs |= {"layers.3.attention.wq.weight": torch.ones(2), "norm.weight": torch.ones(3)}
    ours = from_torchtitan(theirs)
    assert set(ours) == {
        "layers.3.moe.gate.weight",
        "layers.3.moe.gate.e_score_correction_bias",
        "layers.3.moe.experts.gate_up_proj",
        "layers.3.moe.experts.down_proj",
        "layers.3.attention.wq.weight",
        "norm.weight",
    }
    same_bits(to_torchtitan(ours), theirs)
    own = make(scoring="sigmoid", selection_bias=True).to(dtype).state_dict()
    same_bits(from_torchtitan(to_torchtitan(own)), own)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_scattermoe_round_trips(gated, bias):
    theirs = scatter_state(gated, bias, "h.0.mlp.") | {"h.0.ln.weight": torch.ones(3)}
    same_bits(to_scattermoe(from_scattermoe(theirs)), theirs)
    own = make(bias=bias, activation="swiglu" if gated else "relu").state_dict()
    same_bits(from_scattermoe(to_scattermoe(own)), own)


def one_expert(state_dict, **options):
    moe = make(**options)
    moe.K = 1
    moe.load_state_dict(state_dict)
    return moe


def test_torchtitan_computes_the_same():
    theirs = titan_state()
    theirs = {k: t if k == "router.gate.weight" else t * n**-0.5 for k, t in theirs.items()}
    del theirs["expert_bias_E"]
    moe = one_expert(from_torchtitan(theirs))
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(4))
    e = int((x @ theirs["router.gate.weight"].T).argmax())
    w1, w2, w3 = (theirs[TITAN + name][e].double() for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    want = (F.silu(x.double() @ w1.T) * (x.double() @ w3.T)) @ w2.T
    assert_close(moe(x)[0], want, "out")


@pytest.mark.parametrize("gated", [True, False])
def test_scattermoe_computes_the_same(gated):
    theirs = scatter_state(gated, bias=True)
    theirs = {k: t if k == "gate.weight" else t * n**-0.5 for k, t in theirs.items()}
    activation = "swiglu" if gated else "silu"
    moe = one_expert(from_scattermoe(theirs), activation=activation, bias=True)
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(4))
    e = int((x @ theirs["gate.weight"].T).argmax())
    w, b = theirs["experts.weight"][e].double(), theirs["experts.bias"][e].double()
    H = x.double() @ w.T + b
    if gated:
        h, gates = H.chunk(2, dim=-1)  # ScatterMoE's order
        A = F.silu(gates) * h
    else:
        A = F.silu(H)
    out = theirs["output_experts.weight"][e].double()
    want = A @ out.T + theirs["output_experts.bias"][e].double()
    assert_close(moe(x)[0], want, "out")


def test_what_has_no_place_is_refused():
    with pytest.raises(ValueError, match="gate_up_proj_bias: torchtitan's experts have a gate"):
        to_torchtitan(make(bias=True).state_dict())
    with pytest.raises(ValueError, match="up_proj: torchtitan's experts have a gate"):
        to_torchtitan(make(activation="relu").state_dict())
    incomplete = titan_state()
    del incomplete[TITAN + "w3_EFD"]
    with pytest.raises(ValueError, match="w3_EFD is not"):
        from_torchtitan(incomplete)
    incomplete = titan_state()
    del incomplete[TITAN + "w1_EFD"]
    with pytest.raises(ValueError, match="w1_EFD is not"):
        from_torchtitan(incomplete)
    odd = scatter_state(True, False) | {"experts.weight": torch.ones(E, n + 1, d)}
    with pytest.raises(ValueError, match=f"expected dimension 1 to be {n} or {2 * n}"):
        from_scattermoe(odd)


def test_the_given_state_is_left_as_it_is():
    theirs = titan_state()
    before = {k: t.clone() for k, t in theirs.items()}
    ours = from_torchtitan(theirs)
    ours["experts.gate_up_proj"].zero_()
    same_bits(theirs, before)
