"""Quantised weights: codes and scales of the formats' owners bit for bit, every code dequantised
exactly, and the state dicts of checkpoints. The layer with them is in quantized_layer_test.py."""

import json
import pickle

import pytest
import torch

import quantization_vectors as vectors
import tilemoe
from checks import refused
from random_layers import normal
from target import DEVICE
from tilemoe import QuantizedExperts, _formats, quantize_experts

STORED = json.loads(vectors.STORED.read_text())
FORMATS = _formats.FORMATS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E, R, C = 3, 192, 128


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(got, want):
    """Equal arrays, or both None."""
    for field, array, other in zip(got._fields, got, want, strict=True):
        assert (array is None) == (other is None), field
        assert array is None or torch.equal(bits(array), bits(other)), field


# ---------------------------------------------------------------- the owners


@pytest.mark.parametrize("format", [format for format in FORMATS if format in STORED])
def test_codes_and_scales_are_the_owners(format):
    quantized = quantize_experts(vectors.weight().to(DEVICE), format)
    arrays = quantized.arrays._asdict() | {"dequantized": quantized.dequantize()}
    for name, array in arrays.items():
        if array is not None:
            assert vectors.stored(array) == STORED[format][name], name


@pytest.mark.parametrize("format", ["nf4", "nf4_double"])
def test_a_state_dict_is_bitsandbytes(format):
    """Names, shapes and dtypes of all tensors, and the bytes of its JSON."""
    made = quantize_experts(vectors.weight(), format).state_dict("X")
    assert {name: vectors.stored(tensor) for name, tensor in made.items()} == {
        "X" if name == "codes" else f"X.{name}": STORED[format][name]
        for name in ("codes", *(key for key in STORED[format] if key not in _OF_ARRAYS))
    }


_OF_ARRAYS = ("codes", "scales", "scale_map", "scale_of_scales", "scale_offset", "dequantized")


class _Config:  # of transformers' quantiser
    weight_block_size, scale_fmt = (128, 128), "float"


class _Quantizer:
    quantization_config = _Config


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_transformers(dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    W = normal(2, 256, 384, seed=1, dtype=dtype)
    W[0, :128] = 0
    W[1, :128, :128] *= 1e-3
    quantized = quantize_experts(W, "fp8")
    theirs = fp8.Fp8Quantize(_Quantizer).convert({"X": W})
    assert theirs.keys() == quantized.state_dict("X").keys()
    for name, tensor in quantized.state_dict("X").items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(bits(tensor), bits(theirs[name])), name
    dequantize = fp8.Fp8Dequantize(_Quantizer)._dequantize_one
    for out in DTYPES:
        want = dequantize(theirs["X"], theirs["X_scale_inv"], out)
        assert torch.equal(quantized.dequantize(out), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_dequantizes_as_transformers(dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    quantized = quantize_experts(normal(E, R, C, seed=2, dtype=dtype), "mxfp4")
    theirs = mxfp4.convert_moe_packed_tensors(quantized.codes, quantized.scales, dtype=dtype)
    assert torch.equal(quantized.dequantize(), theirs.mT)


# ---------------------------------------------------------------- exact dequantisation


def every_code(format):
    """A weight that has every code with every scale byte, or with scales of many magnitudes."""
    with torch.device("cpu"):
        return _every_code(format).to(DEVICE)


def _every_code(format):
    byte = lambda count: torch.arange(count, dtype=torch.int32).to(torch.uint8)
    numbers = torch.cat([normal(60, seed=3, dtype=torch.float32).cpu() ** 9, torch.zeros(4)])
    pairs = byte(256).repeat(64)  # bytes of two codes
    if format == "fp8":
        shape, codes = (64, 128, 8), byte(256).view(1, 32, 8).repeat(64, 4, 1)
        arrays = _formats.Arrays(codes.view(torch.float8_e4m3fn), numbers.view(64, 1, 1))
    elif format == "mxfp4":
        shape = (1, 16, 256 * 32)
        codes = torch.arange(16).view(16, 1, 1) * 17 + torch.zeros(16, 256, 16)
        scales = byte(256).expand(1, 16, 256).contiguous()
        arrays = _formats.Arrays(codes.to(torch.uint8).view(1, 16, 256, 16), scales)
    elif format == "nvfp4":
        shape = (2, 16, 256 * 16)
        codes = torch.arange(16).view(16, 1) * 17 + torch.zeros(2, 16, 256 * 8)
        scales = byte(256).expand(2, 16, 256).contiguous().view(torch.float8_e4m3fn)
        arrays = _formats.Arrays(codes.to(torch.uint8), scales, scale_of_scales=numbers[:2].clone())
    elif format == "nf4":
        shape = (8, 64, 64)
        arrays = _formats.Arrays(pairs.view(-1, 1), numbers.repeat(8))
    else:
        shape = (8, 64, 64)
        arrays = _formats.Arrays(
            pairs.view(-1, 1), byte(256).repeat(2), _formats.dynamic_map(), numbers[:2].clone(),
            torch.tensor([0.125]),
        )  # fmt: skip
    return QuantizedExperts(format, shape, False, *arrays, torch.float32)


def values_of(weight):
    """The values in float32, from the formats' definitions: products and sums of float64 that are
    rounded one by one."""
    single = lambda tensor: tensor.float().double()
    codes, scales = weight.codes.cpu(), weight.scales.cpu()
    of_scales = None if weight.scale_of_scales is None else weight.scale_of_scales.cpu().double()
    e2m1 = torch.tensor([*_formats.E2M1, *(-v for v in _formats.E2M1)]).double()
    if weight.format == "fp8":
        return single(codes.double() * scales.double()).float()
    high, low = (codes >> 4).long(), (codes & 15).long()
    if weight.format in ("mxfp4", "nvfp4"):
        values = e2m1[torch.stack((low, high), -1)].view(*weight.shape[:2], scales.shape[2], -1)
        if weight.format == "mxfp4":
            factors = 2.0 ** (scales.double() - 127)
            factors[scales == 255] = torch.nan
        else:
            factors = single(of_scales.view(-1, 1, 1) * scales.double())
        return single(values * factors.unsqueeze(-1)).float().view(weight.shape)
    if weight.format == "nf4_double":
        nested = of_scales.repeat_interleave(256)[: len(scales)]
        scales = single(weight.scale_map.cpu().double()[scales.long()] * nested)
        scales = single(scales + weight.scale_offset.cpu().double())
    values = torch.tensor(_formats.NF4).double()[torch.stack((high, low), -1).view(-1, 64)]
    return single(values * scales.double().view(-1, 1)).float().view(weight.shape)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_and_scale_is_exact(format):
    weight = every_code(format)
    with torch.device("cpu"):
        want = values_of(weight).to(DEVICE)
    for dtype in DTYPES:
        got = weight.dequantize(dtype)
        expected = want.to(dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        keep = ~expected.isnan()
        assert keep.any() and torch.equal(bits(got[keep]), bits(expected[keep])), dtype


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_both_implementations_agree(format, transposed):
    """The library's, and torch's operations, which give float32 on a GPU."""
    weight = quantize_experts(
        normal(E, R, C, seed=4, dtype=torch.bfloat16), format, transposed=transposed
    )
    for dtype in DTYPES:
        out = torch.empty(weight.stored_shape, dtype=dtype, device=DEVICE)
        _formats.DEQUANTIZE[format](weight.arrays, out)
        got = weight.dequantize(dtype)
        assert torch.equal(got, out.mT if transposed else out) and got.shape == (E, R, C)


# ---------------------------------------------------------------- layouts and sizes


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_change_nothing(format, monkeypatch):
    W = normal(E, 300, C, seed=5, dtype=torch.bfloat16)
    whole = quantize_experts(W, format)
    monkeypatch.setattr(_formats, "_PIECE", 128 * C)
    same(quantize_experts(W, format).arrays, whole.arrays)
    out = torch.empty(W.shape, dtype=W.dtype, device=DEVICE)
    _formats.DEQUANTIZE[format](whole.arrays, out)
    assert torch.equal(out, whole.dequantize())


@pytest.mark.parametrize("format", FORMATS)
def test_strides_of_the_weight(format):
    """None for `transposed` keeps the memory's order, and blocks of e2m1 along the inputs."""
    W = normal(E, C, R, seed=6, dtype=torch.bfloat16).mT  # (E, R, C)
    quantized = quantize_experts(W, format)
    assert quantized.transposed == (format not in ("mxfp4", "nvfp4"))
    if quantized.transposed:
        same(quantized.arrays, quantize_experts(W.mT, format).arrays)
    contiguous = quantize_experts(W.contiguous(), format)
    assert not contiguous.transposed
    same(contiguous.arrays, quantize_experts(W, format, transposed=False).arrays)


def test_partial_blocks_of_fp8():
    W = normal(2, 200, 72, seed=7, dtype=torch.bfloat16)
    quantized = quantize_experts(W, "fp8")
    assert quantized.scales.shape == (2, 2, 1)
    padded = torch.nn.functional.pad(W, (0, 56, 0, 56))
    assert torch.equal(quantized.scales, quantize_experts(padded, "fp8").scales)
    error = (quantized.dequantize().float() - W.float()).abs().max()
    assert error < 0.04 * W.float().abs().max()


@pytest.mark.parametrize(
    "format, limit",
    [("mxfp4", 0.27), ("nf4_double", 0.27), ("nf4", 0.29), ("nvfp4", 0.29), ("fp8", 0.51)],
)
def test_memory(format, limit):
    W = normal(4, 256, 512, seed=8, dtype=torch.bfloat16)
    assert quantize_experts(W, format).nbytes <= limit * W.nbytes


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format):
    zeros = torch.zeros(2, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(quantize_experts(zeros, format).dequantize(), zeros)


# ---------------------------------------------------------------- state dicts

NAMES = {
    "fp8": ["X", "X_scale_inv"],
    "mxfp4": ["X_blocks", "X_scales"],
    "nf4": ["X", "X.absmax", "X.quant_map", "X.quant_state.bitsandbytes__nf4"],
    "nf4_double": [
        "X", "X.absmax", "X.nested_absmax", "X.nested_quant_map", "X.quant_map",
        "X.quant_state.bitsandbytes__nf4",
    ],
    "nvfp4": ["X", "X_scale", "X_scale_2"],
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_state_dicts(format, transposed):
    W = normal(E, R, C, seed=9, dtype=torch.float16)
    quantized = quantize_experts(W, format, transposed=transposed)
    tensors = quantized.state_dict("X")
    assert sorted(tensors) == sorted(quantized.names("X")) == NAMES[format]
    other = {f"Y{name[1:]}": tensor for name, tensor in quantized.state_dict("X").items()}
    found = QuantizedExperts.from_state_dict(
        {**tensors, **other, "more": W}, "X", transposed=transposed, dtype=torch.float16
    )
    same(found.arrays, quantized.arrays)
    assert found[:3] == quantized[:3] and found.dtype == torch.float16
    for name in tensors:
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        refused((KeyError, ValueError), "X", QuantizedExperts.from_state_dict, rest, "X")


def test_scales_of_powers_of_two():
    """float8_e8m0fnu, as in newer FP8 and MXFP4 checkpoints."""
    W = normal(E, R, C, seed=10, dtype=torch.bfloat16)
    fp8, mxfp4 = (quantize_experts(W, format) for format in ("fp8", "mxfp4"))
    tensors = fp8.state_dict("X")
    tensors["X_scale_inv"] = tensors["X_scale_inv"].to(torch.float8_e8m0fnu)
    found = QuantizedExperts.from_state_dict(tensors, "X")
    assert torch.equal(found.scales, tensors["X_scale_inv"].float())
    tensors = mxfp4.state_dict("X")
    tensors["X_scales"] = tensors["X_scales"].view(torch.float8_e8m0fnu)
    same(QuantizedExperts.from_state_dict(tensors, "X").arrays, mxfp4.arrays)


@pytest.mark.cpu
def test_codes_off_16_bytes_are_copied():
    quantized = quantize_experts(normal(E, R, C, seed=11, dtype=torch.bfloat16), "mxfp4")
    tensors = quantized.state_dict("X")
    memory = torch.empty(quantized.codes.numel() + 8, dtype=torch.uint8)
    tensors["X_blocks"] = memory[8:].view(quantized.codes.shape).copy_(quantized.codes)
    found = QuantizedExperts.from_state_dict(tensors, "X")
    assert found.codes.data_ptr() % 16 == 0
    same(found.arrays, quantized.arrays)


def test_other_states_of_bitsandbytes_are_refused():
    W = normal(E, R, C, seed=12, dtype=torch.bfloat16)
    tensors = quantize_experts(W, "nf4").state_dict("X")
    name = "X.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    for change, said in (
        ({"blocksize": 128}, "X: blocksize must be 64, got 128"),
        ({"nested_blocksize": 64}, "X: nested_blocksize must be 256, got 64"),
        ({"quant_type": "fp4"}, "X: quant_type must be 'nf4', got 'fp4'"),
        ({"dtype": "float64"}, f"{name} must be float32, bfloat16 or float16, got torch.float64"),
        ({"shape": [2, 8]}, r"X has shape \(2, 8\)"),
    ):
        changed = torch.tensor(list(json.dumps(state | change).encode()), dtype=torch.uint8)
        given = tensors | {name: changed}
        refused(ValueError, said, QuantizedExperts.from_state_dict, given, "X")
    wrong = tensors | {"X.quant_map": tensors["X.quant_map"] * 2}
    refused(ValueError, "X.quant_map", QuantizedExperts.from_state_dict, wrong, "X")


# ---------------------------------------------------------------- the class


@pytest.mark.parametrize("format", ["mxfp4", "nf4_double"])
def test_copies(format):
    quantized = quantize_experts(normal(E, R, C, seed=13, dtype=torch.bfloat16), format)
    same(pickle.loads(pickle.dumps(quantized)).arrays, quantized.arrays)
    same(quantized.to("cpu").to(DEVICE).arrays, quantized.arrays)
    assert quantized.to("meta").codes.is_meta and quantized.device.type == DEVICE
    assert format in repr(quantized) and str((E, R, C)) in repr(quantized)


@pytest.mark.parametrize("format", FORMATS)
def test_the_default_device_is_not_read(format):
    W = normal(E, R, C, seed=16, dtype=torch.bfloat16)
    want = quantize_experts(W, format)
    with torch.device("meta"):
        quantized = quantize_experts(W, format)
        found = QuantizedExperts.from_state_dict(quantized.state_dict("X"), "X")
        values = found.dequantize()
    same(quantized.arrays, want.arrays)
    same(found.arrays, want.arrays)
    assert torch.equal(values, want.dequantize())


def test_wrong_weights_are_refused():
    W = normal(E, R, C, seed=14, dtype=torch.bfloat16)
    refused(ValueError, "format must be one of fp8, mxfp4.*, got 'int4'", quantize_experts, W, "int4")
    refused(TypeError, "W is a builtins.int", quantize_experts, 3, "nf4")
    refused(ValueError, r"W has shape \(192, 128\)", quantize_experts, W[0], "nf4")
    refused(ValueError, "W must be float32, bfloat16 or float16, got torch.float64", quantize_experts, W.double(), "nf4")
    refused(ValueError, "W cannot be mxfp4: its inner size must be a multiple of 32, got 120", quantize_experts,
            W[..., :120], "mxfp4")  # fmt: skip
    refused(ValueError, "cannot be nf4: its number of elements must be a multiple of 64, got 24", quantize_experts, W[:1, :3, :8], "nf4")
    refused(ValueError, "dtype must be float32, bfloat16 or float16, got torch.int8", quantize_experts, W, "nf4", dtype=torch.int8)


@pytest.mark.parametrize("format", FORMATS)
def test_wrong_arrays_are_named(format):
    quantized = quantize_experts(normal(E, R, C, seed=15, dtype=torch.bfloat16), format)
    for field, array in quantized.arrays._asdict().items():
        if array is None:
            continue
        for wrong in (None, array[:-1], array.to(torch.float64)):
            changed = quantized._replace(**{field: wrong})
            refused(ValueError, f"the weight.{field} is", changed.dequantize)
    refused(ValueError, "the weight.format must be one of .*, got 'x'", quantized._replace(format="x").dequantize)
