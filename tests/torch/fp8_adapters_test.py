"""recipe="fp8_forward" with adapters on frozen FP8 experts: forward against an evaluation in float64 that
rounds at the same points, gradients against those of the dequantised layer, and what is refused."""

import pytest
import torch

import tilemoe
from fp8_emulation import codes
from random_layers import normal
from target import DEVICE

T, d, n, E, K, RANK = 61, 208, 256, 6, 2, 16  # blocks of x are ragged
SCALE = 1.5


def layer(dtype, n=n, gate_layout="concatenated", of=("W1", "W2")):
    """-> (tensors of `moe`, factors of adapters by name)."""
    split = gate_layout == "split"
    shapes = {"W1": (n if split else 2 * n, d), "W2": (d, n)} | ({"W1_up": (n, d)} if split else {})
    made = {
        "x": normal(T, d, seed=1, dtype=dtype).requires_grad_(),
        "logits_or_scores": normal(T, E, seed=2, dtype=torch.float32).requires_grad_(),
    }
    factors = {}
    for seed, (name, (out, width)) in enumerate(shapes.items(), 3):
        W = normal(E, out, width, seed=seed, dtype=dtype, scale=width**-0.5)
        made[name] = tilemoe.quantize_experts(W, "fp8")
        if name[:2] in of:
            part = name.removeprefix("W")
            A = normal(E, RANK, width, seed=seed + 10, dtype=torch.float32, scale=width**-0.5)
            B = normal(E, out, RANK, seed=seed + 20, dtype=torch.float32, scale=RANK**-0.5)
            factors |= {f"A{part}": A.requires_grad_(), f"B{part}": B.requires_grad_()}
    return made, factors


def computed(made, factors, dO, recipe, **how):
    """-> {O, dX, ds, dA1, ...}"""
    lora = tilemoe.LoRA(**factors, scale=SCALE)
    O = tilemoe.moe(**made, K=K, lora=lora, recipe=recipe, **how)
    leaves = {"dX": made["x"], "ds": made["logits_or_scores"]}
    leaves |= {f"d{name}": factor for name, factor in factors.items()}
    return {"O": O.detach(), **dict(zip(leaves, torch.autograd.grad(O, list(leaves.values()), dO)))}


def in_float64(made, factors, rounds):
    """O, rounded where the recipe rounds: P1 is computed from x, P2 from A in 16 bits."""
    dtype = made["x"].dtype
    stored = (lambda t: t.to(dtype).double()) if rounds else (lambda t: t)
    of_codes = codes if rounds else (lambda t: t)
    W = {name: made[name].dequantize(torch.float32).double() for name in ("W1", "W1_up", "W2")
         if name in made}  # fmt: skip
    adapter = lambda part: [
        stored(scale * factors[f"{kind}{part}"].detach().double())
        for kind, scale in (("A", 1.0), ("B", SCALE))
    ]
    x = made["x"].detach().double()
    scores, ids = made["logits_or_scores"].detach().topk(K)
    scores = scores.softmax(-1).double()

    def times(rows, name, adapted, e):
        """rows W^T + P B^T; `adapted`: the rows that P is computed from."""
        part = name.removeprefix("W")
        out = of_codes(rows) @ W[name][e].T
        if f"A{part}" not in factors:
            return out
        A, B = adapter(part)
        return out + stored(adapted @ A[e].T) @ B[e].T

    O = torch.zeros_like(x)
    for e in range(E):
        token, place = (ids == e).nonzero(as_tuple=True)
        rows = x[token]
        H = torch.cat([times(rows, name, rows, e) for name in ("W1", "W1_up") if name in W], -1)
        gate, up = H.chunk(2, -1)
        A = torch.relu(gate) * up
        O.index_add_(0, token, scores[token, place, None] * stored(times(A, "W2", stored(A), e)))
    return stored(O)


def error(got, exact):
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


KINDS = {
    "both": {},
    "split": {"gate_layout": "split", "n": 336},
    "W1": {"of": ("W1",)},
    "W2": {"of": ("W2",)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_rounding(dtype, kind):
    made, factors = layer(dtype, **KINDS[kind])
    how = {"activation": "reglu"} | {k: v for k, v in KINDS[kind].items() if k == "gate_layout"}
    dO = normal(T, d, seed=30, dtype=dtype)
    got = computed(made, factors, dO, "fp8_forward", **how)
    exact, rounded = (in_float64(made, factors, rounds) for rounds in (False, True))
    of_rounding = error(rounded, exact)
    assert 0.5 * of_rounding <= error(got["O"], exact) <= 1.05 * of_rounding
    without = {name: torch.zeros_like(factor) for name, factor in factors.items()}
    assert error(in_float64(made, without, False), exact) > 0.1, "the adapters add too little"

    wide = computed(made, factors, dO, "bf16", **how)  # from another H
    for name, value in wide.items():
        assert error(got[name], value) < 0.15, name  # a gate changes sign
    assert error(got["O"], wide["O"]) > 0.01, "the recipe was not used"


def test_inference_has_the_bits_of_training():
    made, factors = layer(torch.bfloat16)
    dO = normal(T, d, seed=30, dtype=torch.bfloat16)
    O = computed(made, factors, dO, "fp8_forward")["O"]
    with torch.no_grad():
        lora = tilemoe.LoRA(**factors, scale=SCALE)
        assert torch.equal(O, tilemoe.moe(**made, K=K, lora=lora, recipe="fp8_forward"))
    assert O.device.type == torch.device(DEVICE).type


def test_recipe_fp8_is_refused():
    made, factors = layer(torch.bfloat16)
    with pytest.raises(NotImplementedError, match="fp8_forward"):
        computed(made, factors, normal(T, d, seed=30, dtype=torch.bfloat16), "fp8")
