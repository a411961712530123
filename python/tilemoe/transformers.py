"""Compute the experts of Hugging Face transformers with TileMoE.

Example::

    import tilemoe.transformers
    tilemoe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tilemoe")

The model's weights are read in place, in the layout that their class declares: nothing is copied,
converted or renamed, so checkpoints, optimizers and adapters do not change.

Experts of checkpoints in MXFP4 and FP8 stay quantised. A checkpoint in 16 bits can be quantised
while it is loaded::

    config = tilemoe.transformers.QuantizedExpertsConfig("nf4")
    model = AutoModelForCausalLM.from_pretrained(
        name, experts_implementation="tilemoe", quantization_config=config
    )

The activation is not derived from a name: the class's own `_apply_gate` (or `act_fn`, without a
gate) is evaluated once, on the CPU, over a grid of values, and the form with the same values and
gradients is used. The class's own forward then computes random tokens with small random weights,
and the result must equal TileMoE's. NotImplementedError is raised for a class with another gate,
with another forward, or with a parameter, buffer, submodule or flag that the experts interface does
not describe.
"""

from typing import TYPE_CHECKING, Any

from .integrations.routing_replay import record_routing, replay_routing
from .integrations.transformers import prepare, register
from .integrations.transformers_recipe import set_recipe

if TYPE_CHECKING:
    from .integrations.quantized_loading import QuantizedExpertsConfig, quantize

__all__ = [
    "QuantizedExpertsConfig",
    "prepare",
    "quantize",
    "record_routing",
    "register",
    "replay_routing",
    "set_recipe",
]


def __getattr__(name: str) -> Any:
    """Return a class that derives from transformers', which is imported only then."""
    if name in ("QuantizedExpertsConfig", "quantize"):
        from .integrations import quantized_loading

        return getattr(quantized_loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
