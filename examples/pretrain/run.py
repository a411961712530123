"""Define one training job: its state, one step, one evaluation.

The micro-batch is the unit of everything that is not linear in the tokens: balance and z loss are
computed in each and averaged over all of a step, on any process. So a step is the same function of
the same batch on one process and on eight. If N processes share the experts, their N micro-batches
are one in this sense, the same that a single process would have.
"""

import json
import math
import os
import zlib

import torch
import torch.distributed as dist

import tilemoe
from checkpoints import Checkpoints
from configs import Refusal, configuration
from data import Corpus, verify
from experts import refusal
from model import Transformer
from optimizer import learning_rate, optimizer_of
from parallel import agree, are_finite, clip, expert_mesh, norm_of, reshard, shard

# Values of a step in the log: means over its micro-batches; the last four are fractions.
MEANS = (
    "loss", "balance", "z", "load", "pairs_dropped", "pairs_added", "tokens_without",
    "pairs_without_place",
)  # fmt: skip

# A checkpoint continues with the same of these alone. In the order of checkpoints that have nothing
# else.
IDENTITY = ("config", "layers", "batch", "micro_batch", "seed", "corpus")
# The options, without --steps, that later steps depend on besides: a change is made on purpose,
# or is a mistake. The options that are in neither change at most the last bits.
DECIDING = (
    "precision", "learning_rate", "warmup", "weight_decay", "clip", "bias_rate", "rounding",
    "renormalize", "capacity", "routing_tokens", "recipe", "save_h",
)  # fmt: skip


def build(args, mesh, device, order=None):
    """Return the configuration, the sharded model with its initial values, and the optimizer."""
    routing = args.rounding, args.routing_tokens, args.capacity, args.renormalize
    c = configuration(args.config, args.layers, *routing, args.recipe, args.save_h)
    why = refusal(args.experts, c, device.type) or not_shared(args, c) or not_in_fp8(args, c)
    if why is not None:
        raise Refusal(why)
    tilemoe.set_ctas_per_sm(args.ctas_per_sm)
    # The float32 GEMMs next to bfloat16 are the router's: by TF32, exact for bfloat16 inputs.
    torch.set_float32_matmul_precision("highest" if args.precision == "float32" else "high")
    groups, spread = None, None
    if args.expert_parallel > 1:
        groups = expert_mesh(args.expert_parallel, device)
        spread = {"expert_mesh": groups["experts"], "capacity_factor": args.places}
    with torch.device("meta"):
        model = Transformer(c, args.experts, args.recompute, spread)
    if args.precision == "bfloat16":
        model.to(torch.bfloat16)
    if args.compile:
        model.compile_blocks()
    if c.recipe != "bf16":
        tilemoe.gather_in_fp8_(model)
    shard(model, mesh, args.precision, args.keep_gathered, groups)
    model.to_empty(device=device)
    model.initialise(args.seed, order)
    return c, model, optimizer_of(model, args)


def not_shared(args, c):
    """Return why the processes cannot share the experts, or None."""
    together, ranks = args.expert_parallel, dist.get_world_size()
    if together == 1:
        return None
    if ranks % together or c.E % together:
        return f"--expert-parallel must divide {ranks} processes and {c.E} experts, got {together}"
    if args.experts != "tilemoe" or c.capacity is not None or c.renormalize or args.compile:
        return (
            "--expert-parallel requires --experts tilemoe without --capacity, "
            "--renormalize and --compile"
        )
    return None


def not_in_fp8(args, c):
    """Return why the experts cannot compute in FP8, or None."""
    if c.recipe == "bf16":
        return None
    ranks = dist.get_world_size() // args.expert_parallel
    if args.experts != "tilemoe" or args.compile:
        return "--recipe requires --experts tilemoe without --compile"
    if c.E // args.expert_parallel % ranks:
        return (
            f"--recipe requires a number of experts that is a multiple of the {ranks} processes that "
            f"shard them, got {c.E // args.expert_parallel}"
        )
    return None


def corpus_refused(folder):
    """Return why the corpus differs from its manifest; one process per machine reads it."""
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:
        return None
    try:
        return verify(folder)
    except Refusal as why:
        return str(why)


class Run:
    """A training job. `order` renumbers the experts (Transformer.initialise)."""

    def __init__(self, args, mesh, device, order=None):
        self.args, self.device = args, device
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.together = args.expert_parallel  # processes that share the experts
        self.micro_batches = args.batch // args.micro_batch  # of a step, over all processes
        if self.micro_batches % self.ranks:
            raise Refusal(
                f"a step has {self.micro_batches} micro-batches, expected a multiple of "
                f"the {self.ranks} processes"
            )
        self.checkpoints = Checkpoints(args.output / "checkpoints", args.keep)
        agree(corpus_refused(args.data))
        self.config, self.model, self.optimizer = build(args, mesh, device, order)
        c = self.config
        self.corpus = Corpus(args.data, "train", c.context, args.seed)
        self.validation = Corpus(args.data, "validation", c.context, args.seed)
        if self.corpus.vocabulary > c.vocabulary:
            raise Refusal(
                f"{args.data} has {self.corpus.vocabulary} tokens, expected {c.vocabulary} "
                f"for {args.config}"
            )
        self.step = self.sequence = 0  # finished steps, and the next sequence of the data
        self.watched = {}  # {name: parameters} whose gradient norm is also logged

    def progress(self):
        """Return what a checkpoint has in addition to the state of model and optimizer.

        Schedule, rounding and the order of the data are functions of these.
        """
        a, c = self.args, self.config
        micro_batch = a.micro_batch * self.together
        own = (a.config, c.layers, a.batch, micro_batch, a.seed, self.corpus.sha256)
        of = dict(zip(IDENTITY, own)) | {name: getattr(a, name) for name in DECIDING}
        return {"step": self.step, "sequence": self.sequence, "of": json.dumps(of)}

    def save(self):
        """Save, and return whether all parameters and moments are finite.

        If they are not, nothing is saved, and the existing checkpoints stay.
        """
        reshard(self.model)
        state = list(self.model.parameters())
        for moments in self.optimizer.state.values():
            state += moments["exp_avg"], moments["exp_avg_sq"]
        if not are_finite(state):
            return False
        self.checkpoints.save(self.step, self.model, self.optimizer, self.progress())
        return True

    def resume(self):
        """Resume, and return the checkpoint's folder, or None, and the changed options.

        The options are {name: value in the checkpoint, and now}, of those that affect later steps.
        """
        folder = self.checkpoints.last()
        if folder is None:
            return None, {}
        wanted = self.progress()
        saved = self.checkpoints.progress(folder, wanted)
        changed = self.changed(folder, json.loads(saved["of"]), json.loads(wanted["of"]))
        self.checkpoints.load(folder, self.model, self.optimizer)
        self.step, self.sequence = saved["step"], saved["sequence"]
        return folder, changed

    def changed(self, folder, saved, now):
        if isinstance(saved, list):
            saved = dict(zip(IDENTITY, saved))  # by an earlier version
        known = [name for name in now if name in saved]
        differ = {name: [saved[name], now[name]] for name in known if saved[name] != now[name]}
        text = lambda names: ", ".join(f"{name} {differ[name][0]}" for name in names)
        text_now = lambda names: ", ".join(f"{name} {differ[name][1]}" for name in names)
        own = [name for name in differ if name in IDENTITY]
        if own:
            raise Refusal(
                "a checkpoint requires its own configuration, batch, micro-batch, seed "
                f"and corpus: {folder} has {text(own)}, this run has {text_now(own)}"
            )
        if differ and not self.args.change_options:
            raise Refusal(
                f"{folder} was trained with {text(differ)}, this run has "
                f"{text_now(differ)}; pass --change-options to continue with this run's "
                "options"
            )
        return differ

    def micro(self, corpus, sequence):
        """Return the number of a micro-batch and this process' tokens (micro_batch, S + 1).

        They are part of the batch that begins with a sequence. Processes that share the experts
        have neighbouring parts of one micro-batch, by its number.
        """
        share, size = self.micro_batches // self.ranks, self.args.micro_batch
        group, place = divmod(self.rank, self.together)
        first = sequence // (size * self.together) + group * share
        for number in range(first, first + share):
            own = (number * self.together + place) * size
            yield number, corpus.sequences(range(own, own + size))

    def on_device(self, tokens):
        """Copy tokens to the device without waiting for its current work."""
        if self.device.type == "cpu":
            return tokens
        return tokens.pin_memory().to(self.device, non_blocking=True)

    def mean(self, total, share):
        """Return the mean over all processes from the sum over this process' micro-batches."""
        dist.all_reduce(total)
        return total / (share * self.ranks)

    def update(self, lr, loss):
        """Update the parameters by the gradients of a step, free these, and return their norm ().

        Nothing changes if the norm or the loss, (), is not finite.
        """
        norm = clip(list(self.model.parameters()), self.args.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step(skip=1 - torch.isfinite(loss + norm).float())
        self.optimizer.zero_grad()
        return norm

    def train(self):
        """Run one step; return its record in the log, and whether loss and gradient are finite.

        If they are not, nothing was changed.
        """
        share = self.micro_batches // self.ranks
        sums = torch.zeros(len(MEANS), dtype=torch.float64, device=self.device)
        counts, checksum = 0, 0
        self.model.train()
        for i, (number, tokens) in enumerate(self.micro(self.corpus, self.sequence)):
            last = i + 1 == share
            self.model.set_requires_gradient_sync(last or self.args.reduce == "micro-batch")
            self.model.set_reshard_after_backward(last or not self.args.keep_gathered)
            losses, routed = self.model(self.on_device(tokens), offset=number)
            (losses.total / share).backward()  # FSDP averages over processes
            sums += torch.stack([*losses[1:], *routed[1:]]).detach()
            counts = counts + routed.expert_counts
            checksum += sum(zlib.crc32(row.numpy().tobytes()) for row in tokens)
        means = self.mean(sums, share)
        norms = [norm_of(watched) for watched in self.watched.values()]
        lr = learning_rate(self.step, self.args)
        norm = self.update(lr, means[0])
        if self.ranks > 1:
            batch = torch.tensor(checksum, device=self.device)  # int64
            dist.all_reduce(batch)
            checksum = batch.item()
        norm, *watched = torch.stack([norm, *norms]).tolist()  # waits for the device
        record = {"step": self.step + 1} | dict(zip(MEANS, means.tolist()))
        T = self.args.micro_batch * self.together * self.config.context
        record["T"] = self.config.routing_tokens or T
        loss = record["loss"]
        record |= {"gradient_norm": norm, "learning_rate": lr, "batch": checksum}
        record |= {f"norm_{name}": value for name, value in zip(self.watched, watched)}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return record, False
        if self.config.selection_bias:
            dist.all_reduce(counts)  # (layers, E) of the whole step, so that ranks have one bias
            for block, chosen in zip(self.model.blocks, counts):
                block.moe.update_selection_bias(chosen, self.args.bias_rate)
        self.step += 1
        self.sequence += self.args.batch
        return record, True

    @torch.no_grad()
    def evaluate(self, as_trained=False):
        """Return the mean loss of the first validation sequences.

        `as_trained`: with the training's rounding or capacity instead of top-K.
        """
        self.model.train(as_trained)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in range(self.args.evaluate_batches):
            for number, tokens in self.micro(self.validation, batch * self.args.batch):
                losses, _ = self.model(self.on_device(tokens), offset=number)
                total += losses.next_token
        share = self.micro_batches // self.ranks * self.args.evaluate_batches
        return self.mean(total, share).item()
