"""Pretrain a sparse language model with torchrun, FSDP-2 and torch's distributed checkpoint.

    python examples/pretrain/corpus.py runs/corpus docs
    python examples/pretrain/train.py --config tiny --data runs/corpus --output runs/tiny
    torchrun --nproc-per-node 8 examples/pretrain/train.py --config S1 --data ... --output ...

A run continues from the last checkpoint of its output folder, with any number of processes.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import plan
import tokens
from configs import CONFIGS, Refusal, configuration
from experts import IMPLEMENTATIONS
from logs import Log, Screen, counted
from model import RECOMPUTE
from options import OlderName, Parser, real, whole
from parallel import leave, report, set_threads, start
from run import Run


def arguments(argv=None):
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--config", choices=CONFIGS, required=True)
    add("--plan", action="store_true", help="print parameters, memory and time, and exit")
    add("--processes", type=whole(1), default=1, help="processes of the plan")
    add(
        "--device-gib",
        type=real(0, above=True),
        help="GiB of the plan's device; default: this GPU's memory, or 79.2 (H100)",
    )
    add("--data", type=Path, help="folder that corpus.py wrote")
    add("--output", type=Path, help="folder of checkpoints and log.jsonl")
    add("--steps", type=whole(0), default=100)
    add("--batch", type=whole(1), default=8, help="sequences of a step, over all processes")
    add("--micro-batch", type=whole(1), default=2, help="sequences of a forward pass")
    add("--layers", type=whole(1), metavar="N", help="use the first N layers of the configuration")
    add("--experts", choices=IMPLEMENTATIONS, default="tilemoe")
    add(
        "--recipe",
        choices=("bf16", "fp8", "fp8_forward"),
        default="bf16",
        help="GEMMs of the experts: in 16 bits; in FP8, with weight gradients in 16 bits; FP8 only "
        "in forward",
    )
    add(
        "--save-h",
        choices=("fp8",),
        help="with --recipe fp8: save H, the largest tensor of the experts, in FP8 for backward",
    )
    add("--rounding", choices=("nearest", "up", "down", "stochastic", "balanced"))
    add(
        "--renormalize",
        action="store_true",
        help="with --rounding, make a token's remaining scores sum to 1",
    )
    add(
        "--capacity",
        type=real(0, above=True),
        metavar="FACTOR",
        help=(
            "maximum pairs of an expert, FACTOR times its share; the pairs with the highest "
            "scores stay"
        ),
    )
    add(
        "--routing-tokens",
        type=whole(1),
        metavar="T",
        help="tokens of a micro-batch that are rounded, or limited by a capacity, together",
    )
    add(
        "--expert-parallel",
        type=whole(1),
        default=1,
        metavar="N",
        help="N processes share the experts, each with E / N of a layer; FSDP-2 over the others",
    )
    add(
        "--places",
        type=real(0, above=True),
        metavar="FACTOR",
        help="with --expert-parallel: memory of a process, FACTOR times the mean of its "
        "experts' pairs; a step with more pairs stops the run; default: memory for every "
        "routing",
    )
    add(
        "--recompute",
        choices=RECOMPUTE,
        default="none",
        help="blocks that save only their input for backward: none, every second, all",
    )
    add("--compile", action="store_true", help="compile blocks and loss with torch.compile")
    add(
        "--keep-gathered",
        action="store_true",
        help="keep gathered copies of parameters from forward to backward, and for all "
        "micro-batches of a step",
    )
    add(
        "--reduce",
        choices=("step", "micro-batch"),
        default="step",
        help="reduction of gradients over processes: once per step, with whole gradients in "
        "each process, or after each micro-batch, into shards",
    )
    waves = parser.add_mutually_exclusive_group()
    count = {"type": whole(1, 16), "dest": "ctas_per_sm"}
    waves.add_argument(
        "--ctas-per-sm",
        default=1,
        help="CTAs per SM for tilemoe's GEMMs, in waves: 4 if collectives slow them down",
        **count,
    )
    waves.add_argument("--block-turns", action=OlderName, **count)
    add("--precision", choices=plan.STATE_BYTES, default="mixed", help="see reference.md")
    add("--learning-rate", type=real(0), default=1e-3)
    add("--warmup", type=whole(0), default=10, help="steps")
    add("--weight-decay", type=real(0), default=0.1)
    add("--clip", type=real(0, above=True), default=1.0, help="maximum gradient norm")
    add("--bias-rate", type=real(0), default=1e-3, help="selection-bias update per step")
    add("--seed", type=whole(0, 2**32 - 1), default=0)
    add("--deterministic", action="store_true", help="same bits in every run")
    add("--save-every", type=whole(1), default=100, help="steps")
    add("--keep", type=whole(1), default=3, help="checkpoints")
    add("--evaluate-every", type=whole(1), default=100, help="steps")
    add("--evaluate-batches", type=whole(1), default=4, help="evaluations of --batch sequences")
    add(
        "--change-options",
        action="store_true",
        help="continue from a checkpoint with another precision, learning rate, warm-up, weight "
        "decay, clip, bias rate, rounding, capacity, recipe or --save-h than it was trained with",
    )
    add("--log-every", type=whole(1), default=10, help="steps per line; log.jsonl has every step")
    add("--tensorboard", action="store_true", help="write TensorBoard files to --output")
    args = parser.parse_args(argv)
    if not args.plan and args.batch % args.micro_batch:
        parser.error(
            f"--batch must be a multiple of --micro-batch, got --batch {args.batch} and "
            f"--micro-batch {args.micro_batch}"
        )
    T = args.micro_batch * args.expert_parallel * CONFIGS[args.config].context
    together = args.routing_tokens or T
    if not args.plan and (together < 1 or T % together):
        parser.error(
            f"--routing-tokens must divide the {T} tokens of a micro-batch, got {together}"
        )
    if args.places is not None and args.expert_parallel == 1:
        parser.error("--places requires --expert-parallel")
    if not args.plan and not (args.data and args.output):
        parser.error("--data and --output are required")
    return args


def too_few_places(record, args):
    """Return the advice on --places for a step that is not finite because of it, otherwise ""."""
    share = record["pairs_without_place"]
    if share == 0:
        return ""
    return (
        f"{share:.2%} of the routed tokens exceeded the expert capacity of --places "
        f"{args.places:g}; use a larger --places, or remove it to have memory for "
        "every routing; "
    )


def stop(run, record, first, log, what=""):
    """Report the step that failed, whose first sequence is given."""
    batch = [first, first + run.args.batch - 1]
    what += too_few_places(record, run.args)
    last = run.checkpoints.last()
    log.write({"not_finite": record["step"], "sequences": batch, "last_good": str(last)})
    why = (
        f"step {record['step']}: {what}loss {record['loss']}, gradient norm "
        f"{record['gradient_norm']}; batch: sequences {batch[0]} to {batch[1]}; last good "
        f"checkpoint: {last}"
    )
    report(why)
    if run.rank == 0:
        print(why, file=sys.stderr)


def go_on(run, log, screen):
    """Resume from the last checkpoint, if any."""
    folder, changed = run.resume()
    if folder is None:
        return
    record = {"resumed": run.step, "from": str(folder), "processes": run.ranks}
    log.write(record | ({"changed": changed} if changed else {}))
    screen.say(f"resuming from {folder}")
    for name, (before, now) in changed.items():
        screen.say(f"changed: {name} {before}, now {now}")


def train(args):
    """Train, and return the exit status."""
    mesh, device = start()
    torch.use_deterministic_algorithms(args.deterministic)
    total, active = plan.parameters(configuration(args.config, args.layers))
    threads = set_threads(active, device)
    run = Run(args, mesh, device)
    if run.rank == 0:
        tokens.keep(args.data, args.output)
    log = Log(args.output, run.rank, args.tensorboard)
    screen = Screen(run.rank, args.steps, args.batch * run.config.context, args.log_every)
    of_threads = f" of {counted(threads, 'thread')}" if device.type == "cpu" else ""
    screen.say(
        f"{args.config}: {total:,} parameters, {active:,} active; "
        f"{counted(run.ranks, 'process', 'es')}{of_threads} on {device.type}; every step is in "
        f"{log.path}"
    )
    try:
        go_on(run, log, screen)
        return steps(run, log, screen)
    finally:
        log.close()


def steps(run, log, screen):
    """Run all remaining steps, and return the exit status."""
    args, device = run.args, run.device
    if run.step >= args.steps:
        screen.say(
            f"all of --steps {args.steps} are done; pass a larger --steps to continue the run"
        )
    peak = plan.peak_flops(device)
    flop = plan.flop_of_token(run.config)
    while run.step < args.steps:
        began, first = time.perf_counter(), run.sequence
        record, good = run.train()
        if not good:
            stop(run, record, first, log)
            return 1
        seconds = time.perf_counter() - began  # the step's norm was read, so the step is done
        record["tokens_per_s"] = speed = screen.tokens / seconds
        if peak is not None:
            record["mfu"] = speed * flop / (peak * run.ranks)
        if device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        log.write(record)
        screen.step(record, seconds)
        last = run.step == args.steps
        if last or run.step % args.evaluate_every == 0:
            loss = run.evaluate()
            log.write({"evaluated": run.step, "validation_loss": loss})
            screen.evaluated(run.step, loss, run.validation.tokens_per_byte)
        if (last or run.step % args.save_every == 0) and not run.save():
            stop(run, record, first, log, "the update made parameters that are not finite; ")
            return 1
        if last:
            screen.say(f"done: {run.checkpoints.last()}")
    return 0


def device_bytes(args):
    """Return the memory of the plan: the option, this machine's GPU, or an H100."""
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
            raise Refusal("--plan supports tilemoe, and grouped_mm if it computes in bfloat16")
        # Groups change little of a plan, which is made of micro-batches of one and of two.
        config = configuration(
            args.config, args.layers, args.rounding, None, args.capacity, args.renormalize,
            args.recipe, args.save_h,
        )  # fmt: skip
        choices = args.experts, args.recompute, args.precision, args.compile
        together = args.expert_parallel
        if args.processes % together or config.E % together:
            raise Refusal(
                f"--expert-parallel must divide --processes {args.processes} and E = "
                f"{config.E}, got {together}"
            )
        of = plan.Plan(config, *choices, args.processes, together, args.places)
        print("counting on fake tensors, about ten seconds", file=sys.stderr)
        job = plan.Job(args.steps, args.batch, args.micro_batch)
        print(plan.table(args.config, of, job, device_bytes(args)))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        return train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    leave(main())
