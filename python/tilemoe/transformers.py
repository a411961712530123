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

import inspect
import warnings

import torch

from ._transformers_experts import experts_forward
from ._transformers_forms import Form, form_of, refuse_quantized, refuse_weights


def register(name: str = "tilemoe") -> None:
    """Add TileMoE to transformers' experts implementations, and from transformers 5.23 on to its
    implementations of expert parallelism. Nothing else is changed.

    Afterwards `experts_implementation=name` in `from_pretrained` or `from_config`, or
    `model.set_experts_implementation(name)`, selects it, and `ep_implementation=name` of a
    `DistributedConfig` selects its expert parallelism.
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
    """Find the form of every experts module of `model`, before the first forward.

    Forward does the same at its first call. Call prepare() to get an error early, or to compile the
    model with `fullgraph=True` before it has run: a form is found outside a graph and is a constant
    in the graph. Call it under the torch.autocast that the model will run under, since that decides
    the dtype.

    Args:
        model: a model of transformers, or an experts module.

    Returns:
        The form of each experts module, by the module's name. If it is empty, a warning says why
        TileMoE computes nothing of the model.

    Raises:
        NotImplementedError: an experts module computes something else than TileMoE, or a weight has
            a dtype, width or device that no kernel supports. The message names the class and what
            is not supported.
    """
    forms = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "has_gate"):
            refuse_quantized(module)
            forms[name] = form_of(module)
            refuse_weights(module)
    if not forms:
        warnings.warn(_why_none(model), stacklevel=2)
    return forms


def _why_none(model: torch.nn.Module) -> str:
    why = f"TileMoE computes nothing of this {type(model).__qualname__}: "
    for name, module in model.named_modules():
        cls, last = type(module).__qualname__, name.rpartition(".")[2]
        if "Experts" not in cls and last != "experts":
            continue
        reason = "is not decorated with transformers.integrations.use_experts_implementation"
        if cls.startswith("FP8"):
            reason = "has implementations of its own, which TileMoE does not replace"
        return f"{why}{name or 'it'} is a {cls}, which {reason}"
    return why + "it has no experts module"
