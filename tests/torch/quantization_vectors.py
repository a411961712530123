"""The owners' codes and scales of one weight, as hashes in quantization_vectors.json, which
quantization_test.py compares with. To write the file again, or to compare it with other versions:

    python tests/torch/quantization_vectors.py --triton-kernels DIR [--compare]

It needs bitsandbytes and torchao, and DIR with the package triton_kernels of the Triton repository
(python/triton_kernels), which transformers loads for MXFP4. The tests need none of them."""

import argparse
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import torch

STORED = Path(__file__).with_suffix(".json")
# 1080 scales of NF4: five blocks of them, the last one partial. Rows are whole blocks: else
# bitsandbytes 0.50.2 takes wrong scales where it has AVX-512.
SHAPE = 3, 120, 192


def weight():
    """A bfloat16 weight without random numbers, whose bits no version of torch changes. Its blocks'
    largest magnitudes have an exact sum, which no order of summation changes."""
    with torch.device("cpu"):
        return _weight(*SHAPE)


def _weight(E, R, C):
    i = torch.arange(E * R * C, dtype=torch.int64)
    total = torch.zeros(len(i), dtype=torch.int64)
    for term in range(1, 4):
        bits = i * 2654435761 * term % 2**32
        bits = (bits ^ bits >> 15) * 2246822519 % 2**32
        total += (bits ^ bits >> 13) % 2**16
    W = (total.double() / 3 / 2**15 - 1).view(E, R, C)  # in [-1, 1), bell-shaped
    W *= 2.0 ** (torch.arange(R) % 3 - 1).view(1, R, 1)
    W[0, :4] = 0
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, -6.0])
    W[1, 7] = halves.repeat(C // len(halves)) / 4  # between e2m1's numbers
    return W.to(torch.bfloat16)


def stored(tensor):
    """[shape, dtype, hash of its bytes]"""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [list(tensor.shape), dtype, hashlib.sha256(data).hexdigest()]


def of_bitsandbytes(W, double):
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        W, blocksize=64, compress_statistics=double, quant_type="nf4"
    )
    made = {"codes": codes, "scales": state.absmax}
    if double:
        made |= {
            "scale_map": state.state2.code, "scale_of_scales": state.state2.absmax,
            "scale_offset": state.offset.reshape(1),
        }  # fmt: skip
    made |= state.as_dict(packed=True)  # the names and the JSON of its state dict
    return {**made, "dequantized": functional.dequantize_4bit(codes, state)}


def of_torchao(W):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(W.abs().amax((1, 2), keepdim=True))
    made = NVFP4Tensor.to_nvfp4(W, per_tensor_scale=scale)
    return {
        "codes": made.qdata, "scales": made.scale, "scale_of_scales": scale.flatten(),
        "dequantized": made.dequantize(W.dtype),
    }  # fmt: skip


def of_triton_kernels(W, where):
    sys.path.insert(0, str(where))
    from triton_kernels.numerics_details import mxfp

    codes, scales = mxfp.downcast_to_mxfp_torch(W.mT, torch.uint8, axis=1)
    dequantized = mxfp.upcast_from_mxfp_torch(codes, scales, W.dtype, axis=1)
    E, R, C = W.shape
    return {
        "codes": codes.mT.reshape(E, R, C // 32, 16), "scales": scales.mT,
        "dequantized": dequantized.mT,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton-kernels", type=Path, required=True)
    parser.add_argument("--compare", action="store_true", help="do not write the file")
    args = parser.parse_args()
    W = weight()
    found = {
        "mxfp4": of_triton_kernels(W, args.triton_kernels),
        "nf4": of_bitsandbytes(W, double=False),
        "nf4_double": of_bitsandbytes(W, double=True),
        "nvfp4": of_torchao(W),
    }
    packages = "bitsandbytes", "torchao"
    vectors = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        **{format: {k: stored(t) for k, t in made.items()} for format, made in found.items()},
    }
    if args.compare:
        before = json.loads(STORED.read_text())
        changed = [name for name in found if before[name] != vectors[name]]
        sys.exit(f"changed: {', '.join(changed)}" if changed else None)
    STORED.write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
