"""Hugging Face transformers' experts, computed by TileMoE.

    import tilemoe.transformers
    tilemoe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tilemoe")

The model's weights are read in place, in the layout that their class declares: nothing is copied,
converted or renamed, so checkpoints, optimizers and adapters do not change.

The activation is not derived from a name: the class's own `_apply_gate` (or `act_fn`, without a
gate) is evaluated once, on the CPU, over a grid of values, and the form with the same values and
gradients is used. The class's own forward then computes random tokens with small random weights, and
the result must equal TileMoE's. A class with another gate, with another forward, or with a
parameter, buffer, submodule or flag that the experts interface does not describe, raises
NotImplementedError.
"""

from .integrations.transformers import prepare, register

__all__ = ["prepare", "register"]
