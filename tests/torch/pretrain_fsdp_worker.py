"""A process of pretrain_fsdp_test.py: the gradients of examples/pretrain's model, sharded over all
processes and whole in each of them. The first process prints, as JSON, what was found of each case.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

import tilemoe

sys.path.append(str(Path(__file__).parents[2] / "examples" / "pretrain"))

import parallel  # noqa: E402
import plan  # noqa: E402
from configs import configuration  # noqa: E402
from model import Transformer  # noqa: E402

# Configuration, the model's own arguments, whether blocks are compiled.
CASES = {
    "tiny": (configuration("tiny"), (), False),
    "compiled": (configuration("tiny"), (), True),
    "recomputed": (configuration("tiny"), ("tilemoe", "half"), False),
    "selection bias": (configuration("tiny-bias"), (), False),
    "rounding": (configuration("tiny", rounding="stochastic"), (), False),
    "renormalized": (configuration("tiny", rounding="nearest", renormalize=True), (), False),
    "capacity": (configuration("tiny", capacity=0.75), (), False),
    "fp8": (configuration("tiny-wide", recipe="fp8"), (), False),
    "H in fp8": (configuration("tiny-wide", recipe="fp8", save_h="fp8"), (), False),
    "grouped_mm": (configuration("tiny"), ("grouped_mm",), False),
}


def made(c, args, is_compiled):
    model = Transformer(c, *args)
    model.initialise(0)
    if is_compiled:
        model.compile_blocks(backend="aot_eager")
    return model


def micro_batch(c, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(c.vocabulary, (2, c.context + 1), generator=generator)


def backward(model, number, share):
    losses, _ = model(micro_batch(model.c, number), offset=number)
    (losses.total / share).backward()


def views_of(model):
    """-> a list that fills with the classes of sharded modules that return a view with a gradient:
    what FSDP warns of, in the torch versions that do."""
    found = []

    def look(module, _, output):
        for t in tree_leaves(output):
            if torch.is_tensor(t) and t.requires_grad and t._base is not None:
                found.append(type(module).__name__)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(look)
    return found


def compared(mesh, case):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, sharded = made(*case), made(*case)
    for number in range(ranks):
        backward(whole, number, ranks)
    if sharded.c.recipe != "bf16":
        tilemoe.gather_in_fp8_(sharded)
    parallel.shard(sharded, mesh, "float32")
    views = views_of(sharded)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backward(sharded, rank, 1)  # FSDP takes the mean over processes
    different = []
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        if not torch.equal(a.grad, b.grad.full_tensor()):
            different.append(name)
    warned = [str(w.message) for w in said if "FSDP" in str(w.message)]
    return {
        "different": different,
        "gradients": sum(1 for p in whole.parameters() if p.grad.abs().max() > 0),
        "shards": sum(p.to_local().numel() < p.numel() for p in sharded.parameters()),
        "views": views,
        "warnings": warned,
    }


def main():
    mesh, _ = parallel.start()
    plan.GROUP = 1  # every block is gathered alone
    torch.use_deterministic_algorithms(True)
    found = {name: compared(mesh, case) for name, case in CASES.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    parallel.leave(main())
