"""Pretrains a sparse language model with torchrun, FSDP-2 and torch's distributed checkpoint.

    python examples/pretrain/corpus.py runs/corpus docs
    python examples/pretrain/train.py --config tiny --data runs/corpus --output runs/tiny
    torchrun --nproc-per-node 8 examples/pretrain/train.py --config S1 --data ... --output ...

A run goes on from the last checkpoint of its output folder, with any number of processes.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import plan
from configs import CONFIGS, Refusal, configuration
from experts import IMPLEMENTATIONS
from logs import Log
from model import RECOMPUTE
from parallel import start
from run import Run


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--config", choices=CONFIGS, required=True)
    add("--plan", action="store_true", help="print parameters, memory and time, and do nothing")
    add("--processes", type=int, default=1, help="of the plan")
    add(
        "--device-gib",
        type=float,
        help="memory of the plan's device; without it the GPU's here, or 79.2 of an H100",
    )
    add("--data", type=Path, help="folder that corpus.py wrote")
    add("--output", type=Path, help="folder of checkpoints and log.jsonl")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=8, help="sequences of a step, over all processes")
    add("--micro-batch", type=int, default=2, help="sequences of a forward pass")
    add("--layers", type=int, help="so many of the configuration's, not all")
    add("--experts", choices=IMPLEMENTATIONS, default="tilemoe")
    add("--rounding", choices=("nearest", "up", "down", "stochastic", "balanced"))
    add(
        "--renormalize",
        action="store_true",
        help="under --rounding, what is left of a token's scores adds up to 1 again",
    )
    add(
        "--capacity",
        type=float,
        metavar="FACTOR",
        help="an expert keeps FACTOR times its share of pairs at most, those of the highest scores",
    )
    add(
        "--routing-tokens",
        type=int,
        metavar="T",
        help="every T tokens of a micro-batch are rounded, or kept to a capacity, by themselves",
    )
    add(
        "--recompute",
        choices=RECOMPUTE,
        default="none",
        help="blocks that keep only their input for backward: none, every second, all",
    )
    add("--compile", action="store_true", help="blocks and loss by torch.compile")
    add(
        "--keep-gathered",
        action="store_true",
        help="copies of parameters for computing stay from forward to backward, and for all "
        "micro-batches of a step",
    )
    add(
        "--reduce",
        choices=("step", "micro-batch"),
        default="step",
        help="gradients over processes: once a step, whole ones accumulating in each process, or "
        "after each micro-batch, into shards",
    )
    add(
        "--block-turns",
        type=int,
        default=1,
        help="blocks of tilemoe's products a multiprocessor, one after the other: 4 where "
        "collectives slow them (tilemoe.set_block_turns)",
    )
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
    add("--tensorboard", action="store_true", help="its files, in --output")
    args = parser.parse_args(argv)
    if not args.plan and args.batch % args.micro_batch:
        parser.error(f"--batch {args.batch} is no multiple of --micro-batch {args.micro_batch}")
    T = args.micro_batch * CONFIGS[args.config].context
    together = args.routing_tokens or T
    if not args.plan and (together < 1 or T % together):
        parser.error(f"--routing-tokens is {together}, and a micro-batch has {T} tokens")
    if args.keep < 1:
        parser.error(f"--keep is {args.keep}, expected at least 1")
    if not args.plan and not (args.data and args.output):
        parser.error("--data and --output are needed")
    return args


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
    log = Log(args.output, run.rank, args.tensorboard)
    resumed = run.resume()
    if resumed is not None:
        log.write({"resumed": run.step, "from": str(resumed), "processes": run.ranks})
    tokens = args.batch * run.config.context
    peak = plan.peak_flops(device)
    flop = plan.flop_of_token(run.config)
    while run.step < args.steps:
        began = time.perf_counter()
        record, good = run.train()
        if not good:
            stop(run, record, log)
            log.close()
            return 1
        speed = tokens / (time.perf_counter() - began)  # the step's norm was read: it is done
        record["tokens_per_s"] = speed
        if peak is not None:
            record["mfu"] = speed * flop / (peak * run.ranks)
        if device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        log.write(record)
        last = run.step == args.steps
        if last or run.step % args.evaluate_every == 0:
            log.write({"evaluated": run.step, "held_out_loss": run.evaluate()})
        if last or run.step % args.save_every == 0:
            run.save()
    log.close()
    return 0


def device_bytes(args):
    """Memory that the plan is for: what was said, this machine's GPU, or an H100's."""
    if args.device_gib is not None:
        return args.device_gib * plan.GIB
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return 79.2 * plan.GIB


def main(argv=None):
    args = arguments(argv)
    try:
        return carry_out(args)
    except Refusal as why:
        return f"error: {why}"


def carry_out(args):
    if args.plan:
        if args.experts != "tilemoe" and (args.experts, args.precision) not in plan.COUNTED:
            raise Refusal("--plan counts tilemoe, and grouped_mm where it computes in bfloat16")
        # Groups change little of a plan, which is made of micro-batches of one and of two.
        config = configuration(
            args.config, args.layers, args.rounding, None, args.capacity, args.renormalize
        )
        choices = args.experts, args.recompute, args.precision, args.compile
        of = plan.Plan(config, *choices, processes=args.processes)
        print(plan.table(args.config, of, args.micro_batch, device_bytes(args)))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        return train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
