"""The layer with quantised weights: the bits of the layer with their values, forward and backward,
alone and with adapters; the module; and fine-tuning. The formats are in quantization_test.py."""

import copy
import io
import pickle

import pytest
import torch

import lora_test
import tilemoe
from checks import Calls, refused, same_bits
from peak_memory_test import allocations, live_sums, saved_by_forward
from quantized_support import (
    KINDS, WEIGHTS, E, K, T, agree, agree_of_kind, d, factors, layer, n, quantized,
)  # fmt: skip
from random_layers import normal
from target import DEVICE
from tilemoe import _formats

FORMATS = _formats.FORMATS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_dequantized_layer(format, kind, adapters):
    for dtype in DTYPES:
        agree_of_kind(KINDS[kind], format, dtype, adapters)


@pytest.mark.parametrize("format", FORMATS)
def test_biases_and_an_activation_without_gate(format):
    tensors = layer(torch.float32, bias=True)
    tensors["b1"] = tensors["b1"][:, :n].detach().requires_grad_()
    tensors["W1"] = tensors["W1"][:, :n].contiguous()
    agree(*quantized(tensors, format), factors(tensors), K=K, activation="relu_squared")


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("name", ["W1", "W2"])
def test_one_weight_alone(name, adapters):
    """The other one is trained, or frozen."""
    tensors = layer()
    other = {"W1": "W2", "W2": "W1"}[name]
    for trained in (True, False):
        tensors[other].requires_grad_(trained)
        narrow, values = quantized(tensors, "nf4", (name,))
        agree(narrow, values, factors(tensors) if adapters else None, K=K)


def test_different_formats():
    tensors = layer(torch.bfloat16)
    narrow, values = quantized(tensors, "fp8", ("W1",))
    of_W2 = quantized(tensors, "mxfp4", ("W2",))
    narrow["W2"], values["W2"] = (of["W2"] for of in of_W2)
    agree(narrow, values, factors(tensors), K=K)


@pytest.mark.parametrize("format", ["fp8", "nf4_double"])
@pytest.mark.parametrize("how", [dict(weight_blocks=3), dict(weight_blocks=E + 2, column_blocks=2),
                                 dict(weight_blocks=2, overwrite_H=True)], ids=str)  # fmt: skip
def test_blocks_of_experts(format, how):
    tensors = layer(gate_layout="split")
    narrow, values = quantized(tensors, format)
    agree(narrow, values, factors(tensors), K=K, gate_layout="split", **how)


def test_experts_without_rows():
    """Their scratch is not written, whatever their codes are."""
    tensors = layer()
    narrow, values = quantized(tensors, "fp8")
    for name in ("W1", "W2"):
        codes = narrow[name].codes.clone()
        codes.view(torch.uint8)[2:4] = 0x7F  # NaN
        narrow[name] = narrow[name]._replace(codes=codes)
    scores, ids = tilemoe.top_k(tensors.pop("logits_or_scores").detach(), K)[:2]
    ids[(ids == 2) | (ids == 3)] = -1
    for of in (narrow, values):
        of["logits_or_scores"] = scores
        of.pop("W1_up", None)
    narrow["logits_or_scores"] = values["logits_or_scores"] = scores.requires_grad_()
    agree(narrow, values, ids=ids)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("layout", ["concatenated", "split"])
def test_float64(dtype, layout):
    """By the independent reference of the adapters' tests."""
    tensors = layer(dtype, gate_layout=layout)
    narrow, values = quantized(tensors, "nf4_double")
    swap = {name: narrow[name] for name in WEIGHTS if name in narrow}
    edit = lambda given: {**given, **swap}
    lora_test.check("moe", values, factors(tensors), edit=edit, K=K, gate_layout=layout)


def swap_experts(weight):
    codes = weight.codes.clone()
    parts = codes.view(E, -1)
    parts[[0, 1]] = parts[[1, 0]]
    return weight._replace(codes=codes)


def roll_scales(weight):
    return weight._replace(scales=weight.scales.roll(1, 0))


def swap_halves(weight):
    return weight._replace(codes=weight.codes >> 4 | weight.codes << 4)


def without_offset(weight):
    return weight._replace(scale_offset=torch.zeros_like(weight.scale_offset))


@pytest.mark.parametrize("slip", [swap_experts, roll_scales, swap_halves, without_offset])
@pytest.mark.parametrize("name", ["W1", "W2"])
def test_the_comparison_finds(slip, name):
    tensors = layer()
    narrow, values = quantized(tensors, "nf4_double")
    agree(narrow, values, K=K)
    narrow[name] = slip(narrow[name])
    with pytest.raises(AssertionError):
        agree(narrow, values, K=K)


# ---------------------------------------------------------------- memory


def saved_by(tensors, **how):
    """The memory that forward keeps, without the layer's own tensors."""
    O, kept = saved_by_forward(lambda: tilemoe.moe(**tensors, K=K, **how))
    own = [t for t in tensors.values() if isinstance(t, torch.Tensor)]
    own += [a for t in tensors.values() if not isinstance(t, torch.Tensor) for a in t.arrays
            if a is not None]  # fmt: skip
    for tensor in own:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert O.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_of_16_bits_is_saved(format):
    tensors = layer(torch.bfloat16)
    narrow, values = quantized(tensors, format)
    # Only the scalars that stand for the weights' shapes.
    assert saved_by(narrow) <= saved_by(values) + 64 < values["W2"].nbytes + saved_by(values)


@pytest.mark.cpu
@pytest.mark.parametrize("blocks", [1, E])
def test_the_peak_has_one_weight_in_16_bits(blocks):
    """Above that of the dequantised layer, forward and backward."""
    tensors = layer(torch.bfloat16)
    narrow, values = quantized(tensors, "nf4")
    leaves = [tensors["x"], tensors["logits_or_scores"]]

    def peak(weights):
        step = lambda: torch.autograd.grad(
            tilemoe.moe(**weights, K=K, weight_blocks=blocks).sum(), leaves
        )
        step()
        return max(live_sums(allocations(step)))

    scratch = values["W1"].nbytes // blocks
    assert scratch / 2 < peak(narrow) - peak(values) <= scratch + 4096


@pytest.mark.parametrize("format", [1, 2, 3, 4, 5])
def test_layer_bytes_count_the_scratch(format):
    of = lambda formats, blocks=1: torch.ops.tilemoe.layer_bytes(
        torch.empty(0, dtype=torch.bfloat16, device=DEVICE), [T, E, d, n, T * K],
        tilemoe.options.Options(K=K, weight_blocks=blocks).numbers, formats,
    )  # fmt: skip
    plain, both = of([]), of([format, 0, format, 0, 0, 0])
    of_W1, of_W2 = E * 2 * n * d * 2, E * d * n * 2
    assert of([format, 0, 0, 0, 0, 0])[2] >= of_W1  # forward
    assert max(of_W1, of_W2) <= both[2] <= plain[2] + of_W1 + 4096
    assert of([format, 0, format, 0, 0, 0], blocks=E)[2] < both[2]
    assert both[3] >= of_W1 and both[:2] == plain[:2] and both[4] == 0


def test_one_call_of_each_pass():
    tensors = layer()
    narrow, _ = quantized(tensors, "nf4")
    with Calls() as calls:
        tilemoe.moe(**narrow, K=K).sum().backward()
    assert [name for name, _ in calls.seen] == [
        "route_logits", "experts_lora", "experts_lora_backward_over_H", "router_backward",
    ]  # fmt: skip


# ---------------------------------------------------------------- refusals


def test_wrong_weights_are_named():
    tensors = layer(gate_layout="split")
    narrow, values = quantized(tensors, "nf4")
    call = lambda **given: tilemoe.moe(**{**narrow, **given}, K=K, gate_layout="split")
    pair = "W1 is nf4, transposed=False and W1_up is {}, expected the same"
    refused(ValueError, pair.format("not quantised"), call, W1_up=values["W1_up"])
    fp8 = tilemoe.quantize_experts(values["W1_up"], "fp8")
    refused(ValueError, pair.format("fp8, transposed=False"), call, W1_up=fp8)
    transposed = tilemoe.quantize_experts(values["W1_up"], "nf4", transposed=True)
    refused(ValueError, pair.format("nf4, transposed=True"), call, W1_up=transposed)
    W2 = narrow["W2"]
    for sentence, change in (
        (r"W2.codes is torch.uint8 \(43000, 1\), .* \(43008, 1\)", dict(codes=W2.codes[:-8])),
        ("W2.scales is None, expected torch.float32", dict(scales=None)),
        ("W2.scale_map is given", dict(scale_map=W2.scales[:256])),
    ):
        refused(ValueError, sentence, call, W2=W2._replace(**change))
    fewer_rows = tilemoe.quantize_experts(values["W1"][:, :-8], "nf4")
    refused(ValueError, "W1 has shape .*, W2 has shape", call, W1=fewer_rows)
    fewer_rows = tilemoe.quantize_experts(values["W1_up"][:, :-8], "nf4")
    refused(ValueError, "W1_up has shape .* and W1 .* the same", call, W1_up=fewer_rows)
    refused(ValueError, "W2.codes is on meta", call, W2=W2.to("meta"))
    requiring = W2._replace(scales=W2.scales.clone().requires_grad_())
    refused(NotImplementedError, "an array of a quantised weight requires", call, W2=requiring)
    refused(ValueError, "weight_blocks must be >= 1, got 0", call, weight_blocks=0)


def test_the_library_refuses_a_gradient_of_a_quantized_weight():
    tensors = layer()
    narrow, _ = quantized(tensors, "nf4")
    with Calls() as calls:
        tilemoe.moe(**narrow, K=K, overwrite_H=False).sum().backward()
    ((*arguments, wanted),) = calls.of("experts_lora_backward")
    sentence = "expected no bits of quantised weights"
    op = torch.ops.tilemoe.experts_lora_backward.default
    refused(RuntimeError, sentence, op, *arguments, wanted | 4)


# ---------------------------------------------------------------- the module


def module(format=None, **how):
    """An MoE with a seed of its own; quantised if a format is given."""
    torch.manual_seed(3)
    made = tilemoe.MoE(d, n, E, K, device=DEVICE, **how)
    if how.get("lora_rank"):
        torch.nn.init.normal_(made.experts.lora_B1, std=0.1)
    return made if format is None else tilemoe.quantize_(made, format)


def with_values(quantized_module, **how):
    """The same in 16 bits, or float32: with the values of the quantised weights."""
    made = module(**how)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            value = getattr(quantized_module.experts, name).value().dequantize()
            getattr(made.experts, name).copy_(value)
        return made


@pytest.mark.parametrize("format", FORMATS)
def test_module(format):
    how = dict(lora_rank=8, dtype=torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    made = module(format, **how)
    assert [name for name, p in made.named_parameters() if p.requires_grad] == [
        f"experts.lora_{factor}" for factor in ("A1", "B1", "A2", "B2")
    ]
    assert {name for name, _ in made.named_parameters()} == {
        "gate.weight", *(f"experts.lora_{factor}" for factor in ("A1", "B1", "A2", "B2"))
    }  # fmt: skip
    x = normal(T, d, seed=3, dtype=how["dtype"])
    O = made(x)
    assert torch.equal(O, with_values(made, **how)(x))
    with torch.no_grad():
        assert torch.equal(made.eval()(x), O)
    state = made.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        names = getattr(made.experts, name).value().names(f"experts.{name}")
        assert set(names) == {key for key in state if key.startswith(f"experts.{name}")}

    memory = io.BytesIO()
    torch.save(made, memory)
    memory.seek(0)
    fresh = lambda: module(format, **how).requires_grad_(False)
    loaded = fresh()
    for parameter in loaded.parameters():
        parameter.zero_()
    assert not loaded.load_state_dict(state).missing_keys
    of_16_bits = fresh()
    of_16_bits.load_state_dict(module(**how).state_dict())
    with torch.device("meta"):
        assigned = tilemoe.quantize_(tilemoe.MoE(d, n, E, K, **how), format)
        assert assigned.state_dict().keys() == state.keys()
    assigned.load_state_dict(state, assign=True)
    for other in (
        copy.deepcopy(made), pickle.loads(pickle.dumps(made)),
        torch.load(memory, weights_only=False), loaded, of_16_bits, assigned,
    ):  # fmt: skip
        assert torch.equal(other.to(DEVICE)(x), O)


@pytest.mark.parametrize("format", FORMATS)
def test_the_state_dict_of_torchs_checkpoints(format):
    from torch.distributed.checkpoint import state_dict as dcp

    made, other = module(format), module(format)
    state = dcp.get_model_state_dict(made)
    assert state.keys() == made.state_dict().keys()
    for array in other.experts.down_proj.buffers():
        array.zero_()
    dcp.set_model_state_dict(other, state)
    same_bits(*(dict(of.named_buffers()) for of in (other, made)))


def test_a_module_that_moves_and_is_cast():
    made = module("fp8")
    arrays = made.experts.down_proj.value().arrays
    made.to(torch.bfloat16)
    cast = made.experts.down_proj.value().arrays
    assert made.gate.weight.dtype == torch.bfloat16 and cast.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(cast.scales, arrays.scales) and cast.scales.dtype == torch.float32
    assert made(normal(T, d, seed=4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert made.to("meta").experts.down_proj.value().device.type == "meta"


def test_wrong_state_dicts_are_refused():
    made, state = module("nf4"), module("nf4").state_dict()
    missing = {name: t for name, t in state.items() if "down_proj" not in name}
    refused(RuntimeError, 'Missing .*"experts.down_proj.absmax"', made.load_state_dict, missing)
    mxfp4 = module("mxfp4").state_dict()
    refused(RuntimeError, r"Missing(.|\n)*Unexpected", made.load_state_dict, mxfp4)
    other = tilemoe.quantize_(tilemoe.MoE(d, n + 32, E, K), "nf4").state_dict()
    refused(RuntimeError, "down_proj: expected Quantized.*, got Quantized", made.load_state_dict, other)


def test_quantize_refuses():
    refused(ValueError, "with experts of TileMoE, such as a tilemoe.MoE, got a torch.nn.modules.linear.Linear", tilemoe.quantize_,
            torch.nn.Linear(8, 8), "nf4")  # fmt: skip
    refused(ValueError, "expected experts that are not quantised", tilemoe.quantize_, module("nf4"), "nf4")
    refused(ValueError, "reset_parameters does not support quantised weights", module("nf4").reset_parameters)
    refused(ValueError, "multiple of 32", tilemoe.quantize_, tilemoe.MoE(40, 24, 7, 3), "mxfp4")


@pytest.mark.parametrize("format", ["nf4_double", "mxfp4", "fp8"])
def test_fine_tuning_has_the_losses_of_the_dequantized_model(format):
    """Two layers, a head, and AdamW on the adapters and the head: equal bits in every step."""
    how = dict(lora_rank=8, lora_alpha=16, shared_intermediate_size=32)
    dtype = dict(dtype=torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    layers = [module(format, **how, **dtype) for _ in range(2)]
    plain = [with_values(of, **how, **dtype) for of in layers]
    x = normal(T, d, seed=5, **dtype)
    target = torch.arange(T, device=DEVICE) % d

    def losses(blocks):
        head = torch.nn.Parameter(normal(d, d, seed=6, scale=d**-0.5, **dtype))
        trained = [p for block in blocks for p in block.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([*trained, head], lr=0.01)
        for _ in range(8):
            hidden = x
            for block in blocks:
                hidden = hidden + block(hidden)
            loss = torch.nn.functional.cross_entropy((hidden @ head).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    got = list(losses(layers))
    assert got == list(losses(plain)) and got[-1] < 0.8 * got[0]
