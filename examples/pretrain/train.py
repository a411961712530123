"""Pretrains a sparse language model with torchrun, FSDP-2 and torch's distributed checkpoint.

    python examples/pretrain/corpus.py runs/corpus docs
    python examples/pretrain/train.py --config tiny --data runs/corpus --output runs/tiny
    torchrun --nproc-per-node 8 examples/pretrain/train.py --config S1 --data ... --output ...

A run goes on from the last checkpoint of its output folder, with any number of processes.

The micro-batch is the unit of everything that is not linear in the tokens: balance and z loss are
computed in each and averaged over all of a step, whoever computes them. So a step is the same
function of the same batch on one process and on eight.
"""

import argparse
import json
import math
import os
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import plan
from checkpoints import Checkpoints
from data import Corpus
from model import CONFIGS, Transformer

H100_FLOPS = 989e12  # dense bfloat16, of the data sheet


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--config", choices=CONFIGS, required=True)
    add("--plan", action="store_true", help="print parameters and memory, and do nothing")
    add("--processes", type=int, default=1, help="of the plan")
    add("--data", type=Path, help="folder that corpus.py wrote")
    add("--output", type=Path, help="folder of checkpoints and log.jsonl")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=8, help="sequences of a step, over all processes")
    add("--micro-batch", type=int, default=2, help="sequences of a forward pass")
    add("--experts", choices=("tilemoe", "grouped_mm"), default="tilemoe")
    add("--rounding", choices=("nearest", "up", "down", "stochastic", "balanced"))
    add("--recompute", action="store_true", help="keep only the inputs of blocks for backward")
    add("--precision", choices=plan.STATE_BYTES, default="mixed", help="see README.md")
    add("--learning-rate", type=float, default=1e-3)
    add("--warmup", type=int, default=10, help="steps")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--bias-rate", type=float, default=1e-3, help="of the selection bias, a step")
    add("--seed", type=int, default=0)
    add("--deterministic", action="store_true", help="the same bits from every run")
    add("--save-every", type=int, default=100, help="steps")
    add("--keep", type=int, default=3, help="checkpoints")
    add("--evaluate-every", type=int, default=100, help="steps")
    add("--evaluate-batches", type=int, default=4, help="of --batch sequences")
    args = parser.parse_args(argv)
    if args.batch % args.micro_batch:
        parser.error(f"--batch {args.batch} is no multiple of --micro-batch {args.micro_batch}")
    if args.keep < 1:
        parser.error(f"--keep is {args.keep}, expected at least 1")
    if not args.plan and not (args.data and args.output):
        parser.error("--data and --output are needed")
    return args


def start():
    """Joins torchrun's processes, or is a job of one. -> the mesh of all of them, device."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone, MASTER_PORT="0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),)), device


def shard(model, mesh, precision):
    """FSDP-2 over all processes, block by block: values, gradients and moments lie in shards."""
    policy = MixedPrecisionPolicy(
        param_dtype=plan.COMPUTE_DTYPE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotations stay float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def adamw(model, args):
    """Fused; no weight decay on the norms' weights."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )


def learning_rate(step, args):
    """Up from 0 over the warm-up, then half a cosine down to a tenth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Run:
    """One training job: state, one step, one evaluation."""

    def __init__(self, args, mesh, device):
        self.args, self.device = args, device
        c = self.config = replace(CONFIGS[args.config], rounding=args.rounding)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.micro_batches = args.batch // args.micro_batch  # of a step, over all processes
        if self.micro_batches % self.ranks:
            raise ValueError(
                f"a step has {self.micro_batches} micro-batches, which {self.ranks} processes do "
                "not share evenly"
            )
        self.corpus = Corpus(args.data, "train", c.context, args.seed)
        self.held_out = Corpus(args.data, "held_out", c.context, args.seed)
        if self.corpus.vocabulary > c.vocabulary:
            raise ValueError(
                f"{args.data} has {self.corpus.vocabulary} tokens, {args.config} {c.vocabulary}"
            )
        torch.manual_seed(args.seed)  # every process makes the whole: shards of the same values
        model = Transformer(c, args.experts, args.recompute)
        if args.precision == "bfloat16":
            model.to(torch.bfloat16)
        self.model = shard(model.to(device), mesh, args.precision)
        self.optimizer = adamw(self.model, args)
        self.checkpoints = Checkpoints(args.output / "checkpoints", args.keep)
        self.step = self.sequence = 0  # done, and the next one of the data

    def progress(self):
        """What a checkpoint keeps beside the state of model and optimizer. Schedule, rounding and
        the order of the data are functions of these."""
        a = self.args
        return {
            "step": self.step,
            "sequence": self.sequence,
            "of": json.dumps([a.config, a.batch, a.micro_batch, a.seed, self.corpus.sha256]),
        }

    def save(self):
        self.checkpoints.save(self.step, self.model, self.optimizer, self.progress())

    def resume(self):
        """-> the checkpoint's folder, or None."""
        folder = self.checkpoints.last()
        if folder is None:
            return None
        wanted = self.progress()
        saved = self.checkpoints.progress(folder, wanted)
        if saved["of"] != wanted["of"]:
            raise ValueError(
                "a checkpoint continues with its own configuration, batch, micro-batch, seed and "
                f"corpus: {folder} has {saved['of']}, this run {wanted['of']}"
            )
        self.checkpoints.load(folder, self.model, self.optimizer)
        self.step, self.sequence = saved["step"], saved["sequence"]
        return folder

    def micro(self, corpus, sequence):
        """This process' part of the batch that begins with a sequence -> number of a micro-batch,
        tokens (micro_batch, S + 1)."""
        share, size = self.micro_batches // self.ranks, self.args.micro_batch
        first = sequence // size + self.rank * share
        for number in range(first, first + share):
            yield number, corpus.sequences(range(number * size, (number + 1) * size))

    def mean(self, total, share):
        """Sum over the micro-batches of a process -> the mean over those of all of them."""
        dist.all_reduce(total)
        return (total / (share * self.ranks)).tolist()

    def train(self):
        """One step -> what the log says of it, and whether loss and gradient are finite: where
        not, nothing was changed."""
        share = self.micro_batches // self.ranks
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        counts, checksum = 0, 0
        self.model.train()
        for i, (number, tokens) in enumerate(self.micro(self.corpus, self.sequence)):
            self.model.set_requires_gradient_sync(i + 1 == share)  # reduced once, with the last
            losses, chosen = self.model(tokens.to(self.device), offset=number)
            (losses.total / share).backward()  # FSDP takes the mean over processes
            sums += torch.stack(losses[1:]).detach()
            counts = counts + chosen
            checksum += sum(zlib.crc32(row.numpy().tobytes()) for row in tokens)
        loss, balance, z = self.mean(sums, share)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        norm = norm.full_tensor().item()
        batch = torch.tensor(checksum, device=self.device)  # int64
        dist.all_reduce(batch)
        lr = learning_rate(self.step, self.args)
        record = {"step": self.step + 1, "loss": loss, "balance": balance, "z": z}
        record |= {"gradient_norm": norm, "learning_rate": lr, "batch": batch.item()}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return record, False
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.config.selection_bias:
            dist.all_reduce(counts)  # (layers, E): of the whole step, so that ranks keep one bias
            for block, chosen in zip(self.model.blocks, counts):
                block.moe.update_selection_bias(chosen, self.args.bias_rate)
        self.step += 1
        self.sequence += self.args.batch
        return record, True

    @torch.no_grad()
    def evaluate(self):
        """-> mean loss of the first held-out sequences."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in range(self.args.evaluate_batches):
            for _, tokens in self.micro(self.held_out, batch * self.args.batch):
                total += self.model(tokens.to(self.device))[0].next_token
        share = self.micro_batches // self.ranks * self.args.evaluate_batches
        return self.mean(total, share)


class Log:
    """log.jsonl, and a line for the eye: by the first process alone."""

    def __init__(self, folder, rank):
        self.file = open(folder / "log.jsonl", "a", buffering=1) if rank == 0 else None

    def write(self, record):
        if self.file:
            self.file.write(json.dumps(record) + "\n")
            text = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()}
            print(" ".join(f"{k} {v}" for k, v in text.items()), flush=True)


def stop(run, record, log):
    """Says where it went wrong."""
    batch = [run.sequence, run.sequence + run.args.batch - 1]
    last = run.checkpoints.last()
    log.write({"not_finite": record["step"], "sequences": batch, "last_good": str(last)})
    if run.rank == 0:
        print(
            f"stopped at step {record['step']}: loss {record['loss']}, norm of the gradient "
            f"{record['gradient_norm']}; batch: sequences {batch[0]} to {batch[1]}; last good "
            f"checkpoint: {last}",
            file=sys.stderr,
        )


def train(args):
    """-> exit status."""
    mesh, device = start()
    torch.use_deterministic_algorithms(args.deterministic)
    run = Run(args, mesh, device)
    log = Log(args.output, run.rank)
    resumed = run.resume()
    if resumed is not None:
        log.write({"resumed": run.step, "from": str(resumed), "processes": run.ranks})
    tokens = args.batch * run.config.context
    on_h100 = device.type == "cuda" and "H100" in torch.cuda.get_device_name(device)
    flop = plan.flop_of_token(run.config)
    while run.step < args.steps:
        began = time.perf_counter()
        record, good = run.train()
        if not good:
            stop(run, record, log)
            return 1
        speed = tokens / (time.perf_counter() - began)  # the step's norm was read: it is done
        record["tokens_per_s"] = speed
        if on_h100:
            record["mfu"] = speed * flop / (H100_FLOPS * run.ranks)
        if device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        log.write(record)
        last = run.step == args.steps
        if last or run.step % args.evaluate_every == 0:
            log.write({"evaluated": run.step, "held_out_loss": run.evaluate()})
        if last or run.step % args.save_every == 0:
            run.save()
    return 0


def main(argv=None):
    args = arguments(argv)
    if args.plan:
        options = {"experts": args.experts, "recompute": args.recompute}
        options |= {"precision": args.precision, "micro_batch": args.micro_batch}
        config = replace(CONFIGS[args.config], rounding=args.rounding)
        print(plan.table(config, args.config, **options, processes=args.processes))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        return train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
