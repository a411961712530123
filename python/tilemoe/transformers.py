"""Hugging Face transformers' experts, computed by TileMoE.

    import tilemoe.transformers
    tilemoe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tilemoe")

The model's weights are read where they lie, in the layout their class declares: nothing is copied,
converted or renamed, so checkpoints, optimizers and adapters see what they always saw.

What a class computes between its two products is not taken from its name: its own `_apply_gate` (or
`act_fn`, without a gate) is asked once, on the CPU, over a grid of values, and the form that gives
the same values is used. A class that fits none, or keeps parameters that the experts interface does
not know, is refused with NotImplementedError; it is never computed as something else.
"""

import inspect

import torch

from ._transformers_experts import experts_forward
from ._transformers_forms import Form, form_of, refuse_weights


def register(name: str = "tilemoe") -> None:
    """Adds TileMoE to transformers' experts implementations, and where there is such a thing
    (transformers 5.23) to its implementations of expert parallelism. Nothing else is changed.

    Afterwards `experts_implementation=name` in `from_pretrained` or `from_config`, or
    `model.set_experts_implementation(name)`, selects it, and `ep_implementation=name` of a
    `DistributedConfig` how tokens come to experts that are on several ranks.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
    except ImportError as error:
        raise ImportError("tilemoe.transformers needs transformers 5.17 or newer") from error
    if "is_concatenated" not in inspect.signature(use_experts_implementation).parameters:
        import transformers

        raise ImportError(
            "tilemoe.transformers needs transformers 5.17 or newer, but transformers is "
            + transformers.__version__
        )
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return
    from ._transformers_expert_parallel import TileMoEEP

    EPImplementationInterface.register(name, TileMoEEP)


def prepare(model: torch.nn.Module) -> dict[str, Form]:
    """The form of every experts module of `model`, by name; NotImplementedError if one has none, or
    has weights that no kernel computes with where they lie.

    Forward asks by itself. Ask beforehand to hear of a refusal early, or to compile the model with
    `fullgraph=True`: the question cannot be part of a graph, its answer can. A model that will be
    called under torch.autocast is asked under it, since that decides in which dtype it computes.
    """
    forms = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "has_gate"):
            forms[name] = form_of(module)
            refuse_weights(module)
    return forms
