"""What a configuration takes, before anything of it is allocated."""

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import Config, Transformer

GIB = 2**30
# Bytes of a parameter's value, its gradient and AdamW's two moments; of its copy for computing.
STATE_BYTES = {"float32": (4, 4, 8), "mixed": (4, 4, 8), "bfloat16": (2, 2, 4)}
COMPUTE_DTYPE = {"float32": torch.float32, "mixed": torch.bfloat16, "bfloat16": torch.bfloat16}


def parameters(c: Config):
    """-> total, active: those that a token passes through, K of E experts of a layer."""
    with torch.device("meta"):
        model = Transformer(c)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for block in model.blocks for p in block.moe.experts.parameters())
    return total, total - experts // c.E * (c.E - c.K)


def flop_of_token(c: Config):
    """Of forward and backward: 6 for each active parameter and 6 L d s of causal attention; nothing
    that is computed again counts."""
    return 6 * parameters(c)[1] + 6 * c.layers * c.d * c.context


def kept_for_backward(model, tokens):
    """Bytes that autograd keeps after the forward pass beside the parameters, fake tensors or real:
    what it saves, every storage once."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses, _ = model(tokens)
    del losses
    return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plan(c: Config, *, experts, recompute, precision, micro_batch, processes):
    """-> {what: count or bytes of one process}, by FSDP-2 over `processes` of them."""
    total, active = parameters(c)
    value, gradient, moments = (b * total / processes for b in STATE_BYTES[precision])
    dtype = COMPUTE_DTYPE[precision]
    with FakeTensorMode(), default_dtype(dtype):
        model = Transformer(c, experts, recompute)
        block = sum(p.numel() for p in model.blocks[0].parameters())
        root = total - c.layers * block
        kept = kept_for_backward(model, torch.zeros(micro_batch, c.context + 1, dtype=torch.int64))
    return {
        "parameters": total,
        "active parameters": active,
        "parameters' shard": value,
        "gradients' shard": gradient,
        "AdamW's moments' shard": moments,
        # The root's stay from forward to backward; one block computes while the next is gathered.
        "gathered parameters": (root + min(2, c.layers) * block) * dtype.itemsize,
        "kept for backward": kept,
    }


def table(c, name, **options):
    numbers = plan(c, **options)
    lines = [f"{name}: " + ", ".join(f"{key} {value}" for key, value in options.items())]
    for key in ("parameters", "active parameters"):
        lines.append(f"  {key:24}{numbers.pop(key):>16,}")
    for key, size in (numbers | {"sum": sum(numbers.values())}).items():
        lines.append(f"  {key:24}{size / GIB:>12.3f} GiB")
    return "\n".join(lines)
