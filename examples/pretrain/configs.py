"""Define the sizes of the models, one line each, with the symbols of docs/mathematics.md."""

from dataclasses import dataclass, replace

from tilemoe import choose_recipe


class Refusal(ValueError):
    """The request cannot be fulfilled: a sentence for the user, without a traceback."""


@dataclass(frozen=True)
class Config:
    d: int  # width of a token
    layers: int
    heads: int
    kv_heads: int  # each shared by heads / kv_heads queries
    context: int  # tokens of a sequence
    vocabulary: int
    E: int
    K: int
    n: int
    shared: int = 0  # width of the expert of every token; 0: none
    tied: bool = True  # the output layer is the embedding
    scoring: str = "softmax_over_chosen"
    selection_bias: bool = False
    balance_coefficient: float = 0.01
    z_coefficient: float = 0.001
    rounding: str | None = None
    m: int = 128
    # Tokens that are rounded, or limited by a capacity, together; None: a micro-batch.
    routing_tokens: int | None = None
    renormalize: bool = False  # a token's scores sum to 1 again after rounding
    capacity: float | None = None  # maximum pairs of an expert, as a multiple of its share
    recipe: str = "bf16"  # of the experts' GEMMs
    save_h: str | None = None  # format of the experts' saved H

    @property
    def head(self):
        return self.d // self.heads


CONFIGS = {
    # For tests: learns bytes on a CPU in seconds.
    "tiny": Config(32, 2, 4, 2, 32, 257, E=8, K=2, n=16, shared=16),
    # The same with DeepSeek-V3's balance: no loss, but a selection bias.
    "tiny-bias": Config(
        32, 2, 4, 2, 32, 257, E=8, K=2, n=16, scoring="sigmoid_renormalized",
        selection_bias=True, balance_coefficient=0.0, z_coefficient=0.0,
    ),
    # The same with experts that --recipe fp8 supports.
    "tiny-wide": Config(64, 2, 4, 2, 32, 257, E=8, K=2, n=128),
    # Large for a corpus of some 30 million tokens, small for a GPU; S2 is sparser.
    "S1": Config(512, 8, 8, 8, 1024, 16384, E=128, K=8, n=128),
    "S2": Config(512, 8, 8, 8, 1024, 16384, E=256, K=4, n=256),
    # S1 with fewer and wider experts.
    "S3": Config(512, 8, 8, 8, 1024, 16384, E=32, K=2, n=512),
    # Layers of the models of arXiv 2512.14080, in the number that gives the size in the name.
    "0.5B": Config(768, 12, 12, 12, 4096, 50304, E=64, K=8, n=256),
    "1.4B": Config(768, 18, 12, 12, 4096, 50304, E=128, K=8, n=256),
    # Layers of lm-engine's public 7B configuration.
    "7B": Config(1536, 40, 24, 24, 4096, 100352, E=128, K=8, n=256, shared=1024),
    "30B": Config(4096, 36, 32, 8, 4096, 100352, E=256, K=16, n=256),
}  # fmt: skip


def configuration(
    name, layers=None, rounding=None, routing_tokens=None, capacity=None, renormalize=False,
    recipe="bf16", save_h=None,
):  # fmt: skip
    """Return a configuration; `layers`: only the first N layers."""
    c = CONFIGS[name]
    if layers is not None and not 1 <= layers <= c.layers:
        raise Refusal(f"--layers must be in [1, {c.layers}] for {name}, got {layers}")
    if rounding is not None and capacity is not None:
        raise Refusal("--rounding and --capacity cannot be combined; use one of them")
    if renormalize and rounding is None:
        raise Refusal("--renormalize requires --rounding")
    if recipe != "bf16":
        choice = choose_recipe(1, c.d, c.n, c.E, c.K, capability=(9, 0))
        if choice.fp8_ms is None:
            raise Refusal(f"--recipe {recipe} does not support {name}: {choice.reason}")
        if capacity is not None or renormalize:
            raise Refusal("--recipe cannot be combined with --capacity and --renormalize")
    if save_h is not None and recipe != "fp8":
        raise Refusal(f"--save-h {save_h} requires --recipe fp8, got --recipe {recipe}")
    routing = {"routing_tokens": routing_tokens, "capacity": capacity, "renormalize": renormalize}
    routing |= {"recipe": recipe, "save_h": save_h}
    return replace(c, layers=layers or c.layers, rounding=rounding, **routing)
