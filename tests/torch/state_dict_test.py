"""Conversions of state dicts: every round trip bit for bit, and the converted weights compute the
same layer by the other library's own formula."""

import pytest
import torch
import torch.nn.functional as F

import tilemoe
from checks import refused, short
from comparison import assert_close
from module_support import E, d, make, n, same_bits
from tilemoe.state_dict import (
    from_huggingface, from_scattermoe, from_torchtitan, to_huggingface, to_scattermoe,
    to_torchtitan,
)  # fmt: skip

def as_bytes(state):
    """float8 has no comparison."""
    return {key: t.contiguous().view(torch.uint8) for key, t in state.items()}


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
    """As ScatterMoE's GLUMLP and MLP name and shape it, with a router next to it."""
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
        "layers.3.moe.gate.weight", "layers.3.moe.gate.e_score_correction_bias",
        "layers.3.moe.experts.gate_up_proj", "layers.3.moe.experts.down_proj",
        "layers.3.attention.wq.weight", "norm.weight",
    }  # fmt: skip
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
    with pytest.raises(ValueError, match="requires experts with a gate and without biases, got .*gate_up_proj_bias"):
        to_torchtitan(make(bias=True).state_dict())
    with pytest.raises(ValueError, match="requires experts with a gate and without biases, got .*up_proj"):
        to_torchtitan(make(activation="relu").state_dict())
    incomplete = titan_state()
    del incomplete[TITAN + "w3_EFD"]
    refused(ValueError, "requires .*w3_EFD in the state dict", from_torchtitan, incomplete)
    incomplete = titan_state()
    del incomplete[TITAN + "w1_EFD"]
    refused(ValueError, "requires .*w1_EFD in the state dict", from_torchtitan, incomplete)
    odd = scatter_state(True, False) | {"experts.weight": torch.ones(E, n + 1, d)}
    refused(ValueError, f"expected dimension 1 to be {n} or {2 * n}", from_scattermoe, odd)


def test_the_given_state_is_left_as_it_is():
    theirs = titan_state()
    before = {k: t.clone() for k, t in theirs.items()}
    ours = from_torchtitan(theirs)
    ours["experts.gate_up_proj"].zero_()
    same_bits(theirs, before)


# ---------------------------------------------------------------- Hugging Face's


def hub_state(prefix="", names=("gate_proj", "up_proj", "down_proj"), router="gate"):
    """As the hub's files have a layer of single experts."""
    g = torch.Generator().manual_seed(0)
    gate, up, down = names
    state = {f"{router}.weight": torch.randn(E, d, generator=g)}
    for e in (*range(1, E), 0):  # files are in no order of experts
        state[f"experts.{e}.{down}.weight"] = torch.randn(d, n, generator=g)
        state[f"experts.{e}.{gate}.weight"] = torch.randn(n, d, generator=g)
        state[f"experts.{e}.{up}.weight"] = torch.randn(n, d, generator=g)
    return {prefix + name: t for name, t in state.items()}


def gpt_oss_state():
    g = torch.Generator().manual_seed(0)
    return {
        "router.weight": torch.randn(E, d, generator=g),
        "router.bias": torch.randn(E, generator=g),
        "experts.gate_up_proj": torch.randn(E, d, 2 * n, generator=g),
        "experts.gate_up_proj_bias": torch.randn(E, 2 * n, generator=g),
        "experts.down_proj": torch.randn(E, n, d, generator=g),
        "experts.down_proj_bias": torch.randn(E, d, generator=g),
    }


def test_shared_experts_round_trip():
    options = dict(shared_intermediate_size=16)
    for family, more in {
        "deepseek_v3": dict(scoring="sigmoid", selection_bias=True),
        "qwen3_next": dict(shared_expert_gate=True),
    }.items():
        own = make(**options, **more).state_dict()
        theirs = to_huggingface(own, family)
        shared = "shared_expert." if family == "qwen3_next" else "shared_experts."
        assert shared + "up_proj.weight" in theirs
        same_bits(from_huggingface(theirs), own)
    titan = to_torchtitan(own)
    assert {"shared_experts.w3.weight", "shared_experts.gate.weight"} <= set(titan)
    assert torch.equal(titan["shared_experts.w3.weight"], own["shared_experts.up_proj.weight"])
    same_bits(from_torchtitan(titan), own)


def test_gpt_oss_is_turned_over():
    theirs = gpt_oss_state()
    ours = from_huggingface(theirs)
    W1 = theirs["experts.gate_up_proj"]
    assert torch.equal(ours["experts.gate_up_proj"][:, :n], W1[:, :, 0::2].mT)
    assert torch.equal(ours["experts.gate_up_proj"][:, n:], W1[:, :, 1::2].mT)
    b1 = theirs["experts.gate_up_proj_bias"]
    assert torch.equal(ours["experts.gate_up_proj_bias"], torch.cat([b1[:, 0::2], b1[:, 1::2]], 1))
    assert torch.equal(ours["experts.down_proj"], theirs["experts.down_proj"].mT)
    make(bias=True, router_bias=True).load_state_dict(ours)
    same_bits(to_huggingface(ours, "gpt_oss"), theirs)
    square = gpt_oss_state() | {
        "experts.gate_up_proj": torch.rand(E, d, 2 * d),
        "experts.gate_up_proj_bias": torch.rand(E, 2 * d),
        "experts.down_proj": torch.rand(E, d, d),
    }
    turned = from_huggingface(square)["experts.down_proj"]
    assert torch.equal(turned, square["experts.down_proj"].mT)


def without(state, name):
    return {key: t for key, t in state.items() if key != name}


def test_what_is_missing_or_does_not_fit_is_named():
    hub, gpt_oss = hub_state("mlp."), gpt_oss_state()
    last = f"mlp.experts.{E - 1}."
    for name in ("gate_proj", "up_proj", "down_proj"):
        for e in (0, 2, E - 1):
            missing = f"mlp.experts.{e}.{name}.weight"
            refused(ValueError, f"requires {missing} in the state dict", from_huggingface, without(hub, missing))
    gone = {key: t for key, t in hub.items() if not key.startswith(last)}
    refused(ValueError, f"requires {last}gate_proj.weight in the state dict", from_huggingface, gone)
    short = hub | {"mlp.gate.weight": torch.ones(E - 1, d)}
    refused(ValueError, f"expected {E - 1} experts, the rows of mlp.gate.weight", from_huggingface, short)
    narrow = hub | {"mlp.experts.2.down_proj.weight": torch.ones(d, n - 8)}
    with pytest.raises(ValueError, match=rf"experts.2.down_proj.weight has shape \({d}, {n - 8}\)"):
        from_huggingface(narrow)
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj"):
        with pytest.raises(ValueError, match=f"requires experts.{name} in the state dict"):
            from_huggingface(without(gpt_oss, "experts." + name))
    odd = gpt_oss | {"experts.down_proj": torch.ones(E, n + 8, d)}
    with pytest.raises(ValueError, match=r"expected \(E, 2n, d\) and \(E, d, n\), or gpt-oss's"):
        from_huggingface(odd)


def test_experts_in_fp8():
    """The hub's files, one weight per expert: a quantised layer computes with their values."""
    g, e4m3 = torch.Generator().manual_seed(0), torch.float8_e4m3fn
    wide, long = 256, 384  # n, d: two and three blocks
    hub, values = {"mlp.gate.weight": torch.randn(E, long, generator=g)}, {}
    for e in range(E):
        for name, shape in (("gate", (wide, long)), ("up", (wide, long)), ("down", (long, wide))):
            codes = torch.randn(shape, generator=g).to(e4m3)
            scales = torch.rand(shape[0] // 128, shape[1] // 128, generator=g) / 16
            key = f"mlp.experts.{e}.{name}_proj.weight"
            hub |= {key: codes, key + "_scale_inv": scales}
            whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            values[key] = codes.float() * whole
    ours = from_huggingface(hub)
    same_bits(as_bytes(to_huggingface(ours, "qwen3_moe")), as_bytes(hub))
    build = lambda: make(sizes=(long, wide, E, 2))
    layer, want = tilemoe.quantize_(build(), "fp8"), build()
    load = lambda layer, state: layer.load_state_dict(
        {key.removeprefix("mlp."): tensor for key, tensor in state.items()}
    )
    load(layer, ours)
    unscaled = {key: values.get(key, t) for key, t in hub.items() if "_scale_inv" not in key}
    load(want, from_huggingface(unscaled))
    x = torch.randn(5, long, generator=g)
    assert torch.equal(layer(x)[0], want(x)[0])
    refused(
        ValueError, "requires .*experts.1.up_proj.weight_scale_inv in the state dict", from_huggingface,
        without(hub, "mlp.experts.1.up_proj.weight_scale_inv"),
    )  # fmt: skip


def test_gpt_oss_in_mxfp4():
    """Its blocks are not transposed; gate and up rows are interleaved, as in 16 bits."""
    g, wide, long = torch.Generator().manual_seed(0), 64, 96
    hub = {
        "mlp.router.weight": torch.randn(E, long, generator=g),
        "mlp.router.bias": torch.randn(E, generator=g),
        "mlp.experts.gate_up_proj_bias": torch.randn(E, 2 * wide, generator=g),
        "mlp.experts.down_proj_bias": torch.randn(E, long, generator=g),
    }
    dequantized = dict(hub)
    for name, out, width in (("gate_up_proj", 2 * wide, long), ("down_proj", long, wide)):
        W = torch.randn(E, out, width, generator=g) * width**-0.5
        quantized = tilemoe.quantize_experts(W, "mxfp4")
        hub |= quantized.state_dict(f"mlp.experts.{name}")
        dequantized[f"mlp.experts.{name}"] = quantized.dequantize().mT.contiguous()
    ours = from_huggingface(hub)
    same_bits(to_huggingface(ours, "gpt_oss"), hub)
    build = lambda: make(
        sizes=(long, wide, E, 2), bias=True, router_bias=True, clamp=7.0, alpha=1.702, up_shift=1.0,
        scoring="softmax_over_chosen",
    )  # fmt: skip
    layer, want = tilemoe.quantize_(build(), "mxfp4"), build()
    for of, state in ((layer, ours), (want, from_huggingface(dequantized))):
        of.load_state_dict({key.removeprefix("mlp."): tensor for key, tensor in state.items()})
    x = torch.randn(5, long, generator=g)
    assert torch.equal(layer(x)[0], want(x)[0])


def test_other_quantized_weights_are_refused():
    scaled = hub_state() | {"experts.0.up_proj.weight_scale_inv": torch.ones(1, 1)}
    sentence = "weight_scale_inv is quantised, expected 16 bits, or routed experts in MXFP4 or FP8"
    refused(ValueError, sentence, from_huggingface, scaled)
    low = hub_state()
    for dtype, why in ((torch.float8_e4m3fn, "_scale_inv in the state dict"), (torch.int8, "expected 16")):
        low["experts.1.up_proj.weight"] = low["experts.1.up_proj.weight"].to(dtype)
        refused(ValueError, f"experts.1.up_proj.weight.*{why}", from_huggingface, low)
    shared = {"shared_experts.up_proj.weight": torch.ones(4, 8).to(torch.float8_e4m3fn)}
    refused(ValueError, "shared_experts.up_proj.weight is quantised, expected 16 bits", from_huggingface, shared)
    W = torch.ones(24, 128).to(torch.float8_e4m3fn)
    odd = {f"experts.0.{name}_proj.weight": W for name in ("gate", "up")}
    odd["experts.0.down_proj.weight"] = W.mT
    odd |= {key + "_scale_inv": torch.ones(1, 1) for key in odd}
    refused(ValueError, "number of gate rows in FP8 must be a multiple of 128, got 24", from_huggingface, odd)


@pytest.mark.parametrize(
    "family, options, name",
    [
        ("mixtral", dict(router_bias=True), "gate.bias"),
        ("olmoe", dict(shared_intermediate_size=16), "shared_experts.gate_proj.weight"),
        ("deepseek_v3", dict(shared_intermediate_size=16, shared_expert_gate=True), "gate.weight"),
        ("qwen3_moe", dict(scoring="sigmoid", selection_bias=True), "e_score_correction_bias"),
        ("qwen3_next", dict(bias=True), "gate_up_proj_bias"),
        ("gpt_oss", dict(activation="relu", bias=True, router_bias=True), "experts.up_proj"),
    ],
    ids=short,
)
def test_what_a_family_has_no_place_for_is_refused(family, options, name):
    with pytest.raises(ValueError, match=f"{family} does not support .*{name}"):
        to_huggingface(make(**options).state_dict(), family)
    refused(ValueError, "model_type must be one of .*, got 'llama'", to_huggingface, {}, "llama")
