"""Every block of the installed transformers that contains experts, built small, to record and
replay its routing."""

import ast
import importlib
import itertools
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from transformers_support import decorated_classes

d, n, E, K = 24, 16, 8, 3
LAYER = 5  # not one of the first, which a model may make otherwise
SIZES = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), d),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_hidden_size"), n),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"), n),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_router_topk",
         "top_k_experts"), K
    ),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "n_shared_experts": 1,
    "num_shared_experts": 1,
}  # fmt: skip


def blocks():
    """[(model's folder, class)]: the classes that make decorated experts."""
    names = {}
    for _, cls in decorated_classes():
        names.setdefault(cls.__module__, []).append(cls.__name__ + "(")
    found = []
    for module, experts in names.items():
        module = importlib.import_module(module)
        for node in ast.parse(Path(module.__file__).read_text()).body:
            functions = [f for f in getattr(node, "body", []) if isinstance(f, ast.FunctionDef)]
            inits = [ast.unparse(f) for f in functions if f.name == "__init__"]
            if inits and any(name in inits[0] for name in experts):
                found.append((module.__name__.split(".")[-2], getattr(module, node.name)))
    return found


class SmallConfig:
    """A model's default configuration, but for the sizes."""

    def __init__(self, config, implementation):
        sizes = {name: size for name, size in SIZES.items() if hasattr(config, name)}
        vars(self).update(sizes, default=config, _experts_implementation=implementation)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.default, name)


def build(cls, implementation="eager", layer=LAYER):
    """A small block of `cls`, in training."""
    torch.manual_seed(0)
    errors = []
    for config_class in vars(importlib.import_module(cls.__module__)).values():
        if not (isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig)):
            continue
        if config_class is PreTrainedConfig:
            continue
        config = config_class()
        parts = [config, getattr(config, "text_config", None)]
        for part, index in itertools.product(parts, ((), (layer,))):
            try:
                block = cls(SmallConfig(part, implementation), *index)
            except Exception as error:  # the configuration of another part, or another signature
                errors.append(error)
                continue
            return fill(block)
    raise AssertionError(f"no configuration builds {cls.__name__}: {errors}")


def fill(block):
    for p in block.parameters():
        p.data = torch.randn(p.shape) * 0.3
    for b in block.buffers():
        if b.is_floating_point():
            b.data = torch.randn(b.shape) * 0.1
    return block


def tokens(seed=1, shape=(2, 9)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, d, generator=generator).requires_grad_()


def run(block, x):
    """-> the output, and every gradient of its squares."""
    torch.manual_seed(2)
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    wanted = [x, *(p for p in block.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    return [out.detach(), *(g for g in gradients if g is not None)]
