"""Compute the memory and time of a step of a configuration before anything is allocated.

Memory is counted from the model on fake tensors; time is from predict.py.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import head
import predict
from configs import Config
from logs import duration
from model import RECOMPUTE, Transformer
from tilemoe import expert_parallel

GIB = 2**30
# Bytes of a parameter's value, its gradient and AdamW's two moments; of its copy for computation.
STATE_BYTES = {"float32": (4, 4, 8), "mixed": (4, 4, 8), "bfloat16": (2, 2, 4)}
COMPUTE_DTYPE = {"float32": torch.float32, "mixed": torch.bfloat16, "bfloat16": torch.bfloat16}
# Usable part of the device's memory: the rest is used by CUDA and NCCL, or lost to the allocator.
USABLE = 0.92
# Experts and precision that support fake tensors, in addition to tilemoe.
COUNTED = {("grouped_mm", "mixed"), ("grouped_mm", "bfloat16")}
# Values of --places that the plan compares with memory for every routing.
LESS = 1.5
# Minimum parameters that FSDP gathers together: parallel.groups.
GROUP = 100_000_000
# Dense bfloat16 FLOP/s of the data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12}


def peak_flops(device):
    """Return the FLOP/s of a device, or None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def parameters(c: Config):
    """Return all parameters and the active ones, those of K of E experts of a layer."""
    with torch.device("meta"):
        model = Transformer(c)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for block in model.blocks for p in block.moe.experts.parameters())
    return total, total - experts // c.E * (c.E - c.K)


def flop_of_token(c: Config):
    """Return the FLOP of forward and backward per token.

    These are 6 per active parameter and 6 L d s of causal attention; recomputation does not count.
    """
    return 6 * parameters(c)[1] + 6 * c.layers * c.d * c.context


def kept_for_backward(model, tokens):
    """Return the bytes that autograd saves in forward, without parameters, each storage once.

    The tensors may be fake or real.
    """
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage  # a reference, so that no address is used twice
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


@dataclass(frozen=True)
class Plan:
    """Memory of one process with FSDP-2 over `processes` of them."""

    config: Config
    experts: str
    recompute: str
    precision: str
    compiled: bool
    processes: int
    together: int = 1  # processes that share the experts
    places: float | None = (
        None  # capacity of each of them, as a multiple of the mean; None: for every routing
    )

    def layer(self, micro_batch, together, places):
        """Return the memory of one layer's experts in a process."""
        c = self.config
        sizes = dict(T=micro_batch * c.context, d=c.d, n=c.n, E=c.E, K=c.K, ranks=together)
        how = dict(dtype=COMPUTE_DTYPE[self.precision], recipe=c.recipe, save_h=c.save_h)
        return expert_parallel.plan(**sizes, capacity_factor=places, **how)

    def kept(self, micro_batch):
        alone = self.kept_alone(micro_batch)
        if self.together == 1:
            return alone
        shared = self.layer(micro_batch, self.together, self.places)
        more = shared.kept - self.layer(micro_batch, 1, None).kept
        recomputed = 0 if self.recompute == "none" else RECOMPUTE[self.recompute]
        layers = self.config.layers - (-(-self.config.layers // recomputed) if recomputed else 0)
        return alone + layers * more

    def kept_alone(self, micro_batch):
        """Return the bytes if each process has all experts."""
        c = self.config
        with FakeTensorMode(), default_dtype(COMPUTE_DTYPE[self.precision]):
            model = Transformer(c, self.experts, self.recompute)
            tokens = torch.zeros(micro_batch, c.context + 1, dtype=torch.int64)
            return kept_for_backward(model, tokens)

    def temporary(self, micro_batch):
        """Return the largest memory that a step allocates and releases before it ends.

        The candidates are the rows of logits; one block's backward pass of the experts (dH, A', dX~
        and a gradient of x); one block again, if recomputed.
        """
        c, size = self.config, COMPUTE_DTYPE[self.precision].itemsize
        T = micro_batch * c.context
        rows = T * c.K
        wide = 0 if self.compiled else 3 * 4  # float32 copies of each logit
        logits = min(head.ROWS, T) * c.vocabulary * (2 * size + wide)
        logits += 4 * c.vocabulary * c.d  # gradient of the weight in float32
        experts = rows * (3 * c.n + c.d) * size + T * c.d * size
        if self.together > 1:
            shared = self.layer(micro_batch, self.together, self.places)
            experts = max(shared.forward, shared.backward) - shared.kept
        again = 0
        if self.recompute != "none":
            block = replace(self, config=replace(c, layers=1), recompute="none")
            one, two = block.kept(1), block.kept(2)
            again = one + (micro_batch - 1) * (two - one)  # linear growth
        return max(logits, experts + again)

    def memory(self, micro_batch, kept=None):
        """Return {component: bytes}; `kept` if it is known."""
        c = self.config
        total, _ = parameters(c)
        value, gradient, moments = (
            of_one * total // self.processes for of_one in STATE_BYTES[self.precision]
        )
        block = (total - parameters_outside(c)) // c.layers
        root = total - c.layers * block
        own_experts = 3 * c.E * c.n * c.d // self.together
        block -= 3 * c.E * c.n * c.d - own_experts
        together = min(c.layers, -(-GROUP // block))
        size = COMPUTE_DTYPE[self.precision].itemsize
        return {
            "parameters' shard": value,
            "gradients' shard": gradient,
            "AdamW's moments' shard": moments,
            # The root's copies stay from forward to backward; a group of blocks computes while
            # another group is gathered.
            "gathered parameters": (root + min(2 * together, c.layers) * block) * size,
            # Copies of a group, and in float32 for the reduction; the root's are last.
            "gathered gradients": (root + together * block) * size
            + max(root, together * block) * 4,
            "saved for backward": self.kept(micro_batch) if kept is None else kept,
            "temporary within a step": self.temporary(micro_batch),
        }

    def largest_micro_batch(self, device_bytes):
        """Return the maximum sequences, 0 if none fits; memory for backward grows linearly."""
        one, two = self.kept(1), self.kept(2)

        def fits(size):
            memory = self.memory(size, kept=one + (size - 1) * (two - one))
            return peak(memory) <= USABLE * device_bytes

        if not fits(1):
            return 0
        low, high = 1, 2
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def peak(memory):
    """Return the peak of a step of one micro-batch: gradients replace what backward releases."""
    return sum(memory.values()) - min(memory["gradients' shard"], memory["saved for backward"])


def parameters_outside(c):
    """Return the parameters of embedding, last norm, and output layer unless it is tied."""
    return c.vocabulary * c.d * (1 if c.tied else 2) + c.d


@dataclass(frozen=True)
class Job:
    """Training to plan."""

    steps: int
    batch: int  # sequences of a step, over all processes
    micro_batch: int  # sequences of a forward pass

    def micro_batches(self, processes):
        """Return the number of micro-batches of a step in each process."""
        return -(-self.batch // (self.micro_batch * processes))


def table(name, of: Plan, job: Job, device_bytes):
    """Return parameters, memory by component and predicted time; the last line is the answer."""
    c = of.config
    total, active = parameters(c)
    compiled = ", compiled" if of.compiled else ""
    lines = [
        f"{name}: {c.layers} layers, experts {of.experts}, recompute {of.recompute}, precision "
        f"{of.precision}{compiled}, micro-batch {job.micro_batch}, processes {of.processes}"
        + (f", {of.together} of them share the experts" if of.together > 1 else ""),
        f"  {'parameters':24}{total:>16,}",
        f"  {'active parameters':24}{active:>16,}",
    ]
    memory = of.memory(job.micro_batch)
    for key, size in (memory | {"peak": peak(memory)}).items():
        lines.append(f"  {key:24}{size / GIB:>12.3f} GiB")
    largest = of.largest_micro_batch(device_bytes)
    lines.append(
        f"  {'largest micro-batch':24}{largest:>12} sequences of {c.context}, in {USABLE:.0%} of "
        f"{device_bytes / GIB:.1f} GiB"
    )
    if of.together > 1:
        for factor in dict.fromkeys((of.places, None, LESS)):
            kind = "for every routing" if factor is None else f"by --places {factor}"
            own = of.layer(job.micro_batch, of.together, factor)
            lines.append(f"  a layer's experts, places {kind}: {own}")
    lines += predict.lines(of, job.micro_batch, flop_of_token(c), PEAKS["H100"])
    return "\n".join([*lines, answer(of, job, peak(memory), largest, device_bytes)])


def answer(of: Plan, job: Job, taken, largest, device_bytes):
    """Return whether it fits, and the duration."""
    room = f"{taken / GIB:.1f} of {device_bytes / GIB:.1f} GiB"
    if largest == 0:
        return f"It does not fit: {room}, and no micro-batch fits. Use more processes."
    if taken > USABLE * device_bytes:
        return f"It does not fit: {room}. --micro-batch {largest} fits."
    seconds = predict.seconds(of, job.micro_batch, job.micro_batches(of.processes))
    if seconds is None:
        return f"It fits: {room} per process."
    where = "an H100" if of.processes == 1 else f"{of.processes} H100s, without communication,"
    return (
        f"It fits: {room} per process. On {where} {job.steps:,} steps of {job.batch} "
        f"sequences need about {duration(job.steps * seconds)}."
    )
