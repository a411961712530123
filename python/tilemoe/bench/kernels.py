"""Names of kernels: what step of a layer a kernel is, and the name without its arguments."""

import re

# A kernel's step, TileMoE's first: the first pattern that its name contains.
STEPS = {
    "up-projection": r"SwiGLUEpilogue|ActivationEpilogue",
    "activation gradient": r"ActivationGradientEpilogue",
    "weight gradients": r"WeightGradientEpilogue",
    "input gradient": r"SummedWeights|WeightsByParts|DensePart",
    "down-projection": r"StoreEpilogue",
    "combine": r"combine",
    "routing": r"route|top_k|routing|score_gradient|bias_gradient",
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
