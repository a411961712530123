"""Compute PEFT's low-rank adapters of experts in TileMoE's GEMMs.

Example::

    import tilemoe.peft
    import tilemoe.transformers
    tilemoe.transformers.register()
    tilemoe.peft.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tilemoe")
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=weights))

The adapters remain PEFT's parameters, in PEFT's layout: PEFT saves, loads, merges, disables and
selects them. Neither the sum of a weight and its adapter nor the gradient of a frozen weight is
computed.
"""

from . import MoE as _MoE  # noqa: F401  first: loads the package's modules in their order
from .integrations.peft import register

__all__ = ["register"]
