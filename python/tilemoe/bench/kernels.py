"""Map names of kernels to steps of a layer, and remove their arguments."""

import re

# The step of a kernel is the first pattern that its name contains. TileMoE's patterns are first:
# the types of src/cuda/gemm/{epilogue,load} in the name of a GEMM. SummedWeights, the older name of
# WeightsByParts, and DensePart are in stored profiles.
STEPS = {
    "up-projection": r"SwiGLUEpilogue|ActivationEpilogue|QuantizingEpilogue",
    "activation gradient": r"ActivationGradientEpilogue",
    "weight gradients": r"WeightGradientEpilogue|reduce_splits|rank_rows",
    "input gradient": r"WeightsByParts|PartRows|SummedWeights|DensePart",
    "down-projection": r"StoreEpilogue",
    "combine": r"combine|sum_places",
    # The other kernels of src/cuda/kernels.
    "quantisation": r"quantize_blocks",
    "routing": r"route|top_k|routing|score_gradient|bias_gradient|tilemoe::cuda::\(anonymous",
    "other GEMMs": r"(?i)gemm|nvjet|cutlass|cublas|mma",
    "gather or sort": r"(?i)gather|scatter|index|sort|scan",
    "elementwise": r"(?i)elementwise|triton|softmax|reduce",
    "others": r"",
}


def step(kernel):
    return next(words for words, pattern in STEPS.items() if re.search(pattern, kernel))


def short(kernel):
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"\([\w:]+\)(?=\d)", "", name).partition("(")[0]  # without casts to an enum
