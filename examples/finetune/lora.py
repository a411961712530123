"""Fine-tune a Mixture-of-Experts model of Hugging Face with low-rank adapters (LoRA).

The program adapts attention and experts, with PEFT, transformers' Trainer and TileMoE, on one GPU
or a CPU.

    python examples/finetune/lora.py
    python examples/finetune/lora.py --model allenai/OLMoE-1B-7B-0924 --text my.txt --plan
    python examples/finetune/lora.py --model allenai/OLMoE-1B-7B-0924 --text my.txt
    python examples/finetune/lora.py --model Qwen/Qwen3-30B-A3B --text my.txt --quantize nf4

Experts of checkpoints in MXFP4 (gpt-oss) and FP8 stay quantised; --quantize quantises those of a
16-bit checkpoint while it is loaded (QLoRA). Without --model the model is random, tiny and reads
bytes: nothing is downloaded, and the run needs half a minute on a CPU. Ctrl-C saves a checkpoint;
the same command with --resume continues from it, on a CPU with the same bits. --output receives the
adapters in PEFT's format, and a picture of the loss.
"""

import argparse
import gzip
import hashlib
import json
import math
import signal
import sys
import time
import weakref
from pathlib import Path

try:
    import accelerate  # noqa: F401 (Trainer needs it)
    import psutil
    import torch
    from peft import LoraConfig, get_peft_model
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import (
        AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer,
        PrinterCallback, Qwen3MoeConfig, Trainer, TrainerCallback, TrainingArguments, set_seed,
    )  # fmt: skip

    import tilemoe.peft
    import tilemoe.transformers
except ImportError as missing:
    sys.exit(f"error: {missing} (pip install '.[peft]' installs all requirements)")

DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")  # English, from Debian's package dict-gcide
DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
DEFAULT_TEXT = [DICTIONARY] if DICTIONARY.exists() else DOCS
LARGEST = 1 << 22  # bytes of the default text
VALIDATION = 16  # sequences
TINY = Qwen3MoeConfig(
    vocab_size=256, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,
    num_experts_per_tok=2, initializer_range=0.1,
)  # fmt: skip
# Options that must not change in a resumed run, so that it continues with the same bits.
IDENTITY = (
    "model", "quantize", "rank", "batch", "length", "steps", "learning_rate", "seed", "text_sha256",
)  # fmt: skip
FORMATS = ("nf4", "nf4_double", "mxfp4", "nvfp4", "fp8")
USABLE = 0.92  # usable part of the free memory: the rest is lost to the allocator or used by CUDA


def arguments(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n\n")[0])
    option = parser.add_argument
    option("--model", help="folder or name of a checkpoint; default: a tiny random model")
    option(
        "--text", type=Path, nargs="+", help="text files (.gz too); default: a dictionary, or docs/"
    )
    option("--plan", action="store_true", help="print the memory of a step, and exit")
    option("--quantize", choices=FORMATS, help="quantise the experts of a 16-bit checkpoint")
    option("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    option("--batch", type=int, help="sequences per step; default: 1, without --model 8")
    option("--length", type=int, help="tokens per sequence; default: 2048, without --model 128")
    option("--steps", type=int, default=100, help="default: 100")
    option("--learning-rate", type=float, help="default: 2e-4, without --model 1e-2")
    option("--checkpointing", action=argparse.BooleanOptionalAction,
           help="recompute activations in backward to save memory; default: with --model")  # fmt: skip
    option("--save-every", type=int, default=50, help="steps (default: 50)")
    option("--seed", type=int, default=0)
    option("--output", type=Path, default=Path("runs/finetune"), help="default: runs/finetune")
    option("--resume", action="store_true", help="continue the run in --output")
    args = parser.parse_args(argv)
    tiny = dict(batch=8, length=128, learning_rate=1e-2, checkpointing=False)
    real = dict(batch=1, length=2048, learning_rate=2e-4, checkpointing=True)
    for name, value in (real if args.model else tiny).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("rank", "batch", "length", "steps", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.dtype = torch.bfloat16 if args.model or args.device == "cuda" else torch.float32
    args.format = args.quantize  # format of the experts; None: 16 bits
    args.build = dict(dtype=args.dtype, experts_implementation="tilemoe")
    return args


def configuration(args):
    """Return the model's configuration, and further arguments of from_pretrained."""
    if args.model is None:
        return TINY, {}
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as why:
        sys.exit(f"error: --model {args.model}: {str(why).strip().splitlines()[0]}")
    if stored := getattr(config, "quantization_config", None):
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        format = stored.get("format", stored["quant_method"])  # QuantizedExpertsConfig
        if format not in FORMATS:
            why = f"is quantised ({format}), expected 16 bits, MXFP4 or FP8"
            sys.exit(f"error: {args.model} {why}")
        if args.quantize:
            sys.exit(
                f"error: --quantize requires a 16-bit checkpoint, but {args.model} is "
                f"quantised ({format})"
            )
        args.format = format
        return config, {}
    if args.quantize:
        options = tilemoe.transformers.QuantizedExpertsConfig(args.quantize)
        return config, {"quantization_config": options}
    return config, {}


def quantize(model, format):
    try:
        tilemoe.transformers.quantize(model, format)
    except ValueError as why:  # a wrong size
        sys.exit(f"error: --quantize: {why}")


def with_adapters(model, rank):
    """Add adapters to every linear layer of attention, and to both weights of the experts."""
    modules = dict(model.named_modules())
    experts = {name: m for name, m in modules.items() if hasattr(m, "is_concatenated")}
    if not experts:
        sys.exit(f"error: {type(model).__name__} has no experts that TileMoE supports")
    last = lambda name: name.rpartition(".")[2]  # PEFT adapts everything with this ending
    linear = [name for name, m in modules.items() if isinstance(m, torch.nn.Linear)]
    attention = {last(name) for name in linear if "attn" in name}
    weights = {
        f"{last(name)}.{weight}"
        for name, m in experts.items()
        for weight in ("gate_up_proj" if m.has_gate else "up_proj", "down_proj")
    }
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=sorted(attention),
        target_parameters=sorted(weights), task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, config)


class LiveMemory(TorchDispatchMode):
    """Count the bytes of the existing tensors, also fake ones, and record the largest sum."""

    def __init__(self, resident):
        super().__init__()
        self.sizes, self.live, self.peak = {}, 0, 0
        for tensor in resident:
            self.add(tensor)
        self.resident = self.live

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.remove, storage._cdata)

    def remove(self, key):
        self.live -= self.sizes.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        self.peak = max(self.peak, self.live + workspace(function, args))
        return made


def workspace(function, args):
    """Return the bytes that an operator of TileMoE allocates while it runs."""
    if function.namespace != "tilemoe" or not function._opname.startswith("experts"):
        return 0
    named = dict(zip((argument.name for argument in function._schema.arguments), args))
    (_, d, n), size = named["weights"][2].shape, named["X"].element_size()
    formats = named.get("formats") or [0, 0, 0]
    # A quantised weight in 16 bits; the two weights of a split gate are one.
    of = lambda *places: size * sum(named["weights"][i].numel() for i in places if formats[i])
    W1, W2 = of(0, 1), of(2)
    if "capacity" in named:  # forward
        return named["capacity"] * n * size + max(W1, named["capacity"] * d * size + W2)
    rows = named["H"].shape[0] * size
    r1, r2 = named["P1"].shape[-1], named["P2"].shape[-1]
    return max(rows * (n + r2) + W2, rows * (d + r1) + W1)


def replace_by_fakes(model):
    """Replace parameters and buffers with memory by fake tensors without memory."""
    made = {}
    has_memory = lambda t: t is not None and t.element_size() > 0
    like = lambda t: torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            present = {name: tensor for name, tensor in tensors.items() if has_memory(tensor)}
            tensors.update({name: made.setdefault(t, like(t)) for name, t in present.items()})


def quantized(model):
    """Return the buffers of quantised weights."""
    return [buffer for buffer in model.buffers() if buffer.dtype == torch.uint8]


def step_memory(config, args, checkpointing):
    """Return {part: bytes} of a training step, by running it on fake tensors: nothing is loaded.

    "activations" is the maximum that exists at one time in forward and backward, including the
    gradients at that time; so the peak is less than the sum of all parts.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **args.build)
        if args.format:
            quantize(model, args.format)
        model = with_adapters(model, args.rank).train()
    model.config.use_cache = False
    if model.config._attn_implementation == "sdpa":  # would make a mask only for fake tensors
        AttentionInterface.register("sdpa_without_mask", AttentionInterface()["sdpa"])
        AttentionMaskInterface.register("sdpa_without_mask", lambda *args, **kwargs: None)
        model.set_attn_implementation("sdpa_without_mask")
    if checkpointing:
        model.gradient_checkpointing_enable()
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    frozen += sum(b.nbytes for b in quantized(model))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    with FakeTensorMode():
        replace_by_fakes(model)
        ids = torch.zeros(args.batch, args.length, dtype=torch.int64)
        with LiveMemory([*model.parameters(), *quantized(model)]) as memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    parts = {"weights": frozen, "adapters": trained, "gradients": trained, "AdamW": 2 * trained}
    parts["activations"] = memory.peak - memory.resident
    return parts | {"peak": frozen + 3 * trained + max(trained, parts["activations"])}


def fits(config, args):
    """Print the memory of a step, and return whether it fits on the device."""
    both = {way: step_memory(config, args, way) for way in (False, True)}
    weights = f"weights in {str(args.dtype).removeprefix('torch.')}"
    if args.format:
        weights = f"experts in {args.format}, other {weights}"
    unit, name = (2**30, "GiB") if both[True]["peak"] > 2**30 else (2**20, "MiB")
    print(
        f"computed: memory in {name} of a step of {args.batch} x {args.length} tokens, "
        f"adapters of rank {args.rank} in float32, "
        f"{weights}\n{'':12}{'as is':>12}{'with checkpointing':>22}"
    )
    for what in both[True]:
        print(f"{what:12}{both[False][what] / unit:12.2f}{both[True][what] / unit:22.2f}")
    if args.device == "cuda":
        device, free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    else:
        device, free = "the CPU (no GPU was found)", psutil.virtual_memory().available
    is_enough = {way: both[way]["peak"] <= USABLE * free for way in both}
    said = {way: "fits" if is_enough[way] else "does not fit" for way in both}
    print(
        f"{device} has {free / 2**30:.1f} GiB free, and {USABLE:.0%} of it count: the step "
        f"{said[False]} as is, and {said[True]} with checkpointing"
    )
    return is_enough[args.checkpointing]


def sequences(args):
    """Return sequences for training and for validation, in Trainer's format."""
    texts = []
    for path in args.text or DEFAULT_TEXT:
        with (gzip.open if path.suffix in (".gz", ".dz") else open)(path, "rb") as file:
            texts.append(file.read(-1 if args.text else LARGEST))
    text = b"\n".join(texts)
    args.text_sha256 = hashlib.sha256(text).hexdigest()
    if args.model is None:
        ids = torch.tensor(list(text))
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = torch.tensor(tokenizer(text.decode(errors="replace"), verbose=False).input_ids)
    rows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    if (needed := VALIDATION + args.batch) > len(rows):
        sys.exit(
            f"error: the text must have {needed} sequences of {args.length} tokens, got {len(rows)}"
        )
    every = len(rows) // VALIDATION
    is_validation = torch.arange(len(rows)) % every == every - 1
    of = lambda some: [{"input_ids": row, "labels": row} for row in some]  # the model shifts labels
    return of(rows[~is_validation]), of(rows[is_validation])


def checkpoint(args):
    """Return the folder to continue from, or None for a new run.

    An unfinished checkpoint is ignored: it lacks trainer_state.json, which is written last.
    """
    own = {name: getattr(args, name) for name in IDENTITY}
    record = args.output / "run.json"
    found = [path.parent for path in args.output.glob("checkpoint-*/trainer_state.json")]
    if not args.resume:
        if found:
            sys.exit(
                f"error: {args.output} already contains a run; resume it with --resume or "
                "choose another --output"
            )
        args.output.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(own, indent=1) + "\n")
        return None
    if not found or not record.exists():
        sys.exit(f"error: --resume: no checkpoint found in {args.output}")
    saved = json.loads(record.read_text())
    for name, value in own.items():
        if saved.get(name) != value:
            what = f"{name} {saved.get(name)}, expected {value}"
            sys.exit(f"error: --resume: the run in {args.output} has {what}")
    number, folder = max((int(path.name.partition("-")[2]), path) for path in found)
    if number >= args.steps:
        sys.exit(f"error: --resume: the run in {args.output} is finished")
    return folder


class Progress(TrainerCallback):
    """Print the losses. Ctrl-C or SIGTERM ends the training after the step, with a checkpoint."""

    def __init__(self, tokens):
        self.tokens, self.is_stopped = tokens, False  # tokens of a step

    def stop(self, number, frame):
        self.is_stopped = True
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        print("stopping after this step", flush=True)

    def on_train_begin(self, args, state, control, **_):
        self.at, self.step = time.monotonic(), state.global_step

    def on_step_end(self, args, state, control, **_):
        if self.is_stopped:
            control.should_log = control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs, **_):
        if "eval_loss" in logs:
            print(f"step {state.global_step}: validation loss {logs['eval_loss']:.3f}", flush=True)
        elif "loss" in logs:
            now, step = time.monotonic(), state.global_step
            each = (now - self.at) / (step - self.step)
            left = each * (state.max_steps - step)
            speed = f"{self.tokens / each:,.0f} tokens/s   {left:.0f} s left"
            print(f"step {step}/{state.max_steps}   loss {logs['loss']:.3f}   {speed}", flush=True)
            self.at, self.step = now, step
            if not math.isfinite(logs["loss"]):
                sys.exit("error: the loss is not finite; use a smaller --learning-rate")


def draw(history, file):
    """Draw the losses of the run, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture of the loss: matplotlib is not installed (pip install matplotlib)")
        return
    axes = (figure := Figure(figsize=(6, 4))).subplots()
    for key, label in (("loss", "training"), ("eval_loss", "validation")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot(*zip(*points), label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(file)


def run(args):
    """Run the program, and return its exit status."""
    tilemoe.transformers.register()
    tilemoe.peft.register()
    config, options = configuration(args)
    if args.plan or args.model is not None:
        is_enough = fits(config, args)
        if args.plan:
            return 0
        if not is_enough:
            sys.exit("error: too little memory; use a smaller --length, --batch or --rank")
    if args.model is None and args.device == "cpu":
        torch.set_num_threads(1)  # more threads make such a small model slower
    training, validation = sequences(args)
    continued = checkpoint(args)
    set_seed(args.seed)
    if args.model is None:
        model = AutoModelForCausalLM.from_config(config, **args.build)
        if args.quantize:
            quantize(model, args.quantize)
    else:
        options |= args.build | dict(device_map=args.device)
        model = AutoModelForCausalLM.from_pretrained(args.model, **options)
    model = with_adapters(model, args.rank)
    model.print_trainable_parameters()
    how = TrainingArguments(
        output_dir=str(args.output), max_steps=args.steps, learning_rate=args.learning_rate,
        lr_scheduler_type="cosine", warmup_steps=args.steps // 10, seed=args.seed,
        per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch,
        gradient_checkpointing=args.checkpointing, bf16=args.dtype == torch.bfloat16,
        use_cpu=args.device == "cpu", label_names=["labels"], report_to="none", disable_tqdm=True,
        logging_steps=min(10, args.save_every), logging_nan_inf_filter=False,
        eval_strategy="steps", eval_steps=args.save_every, eval_on_start=continued is None,
        save_steps=args.save_every, save_total_limit=2,
    )  # fmt: skip
    how._n_gpu = min(how.n_gpu, 1)  # Trainer would use several GPUs with DataParallel
    progress = Progress(args.batch * args.length)
    data = dict(train_dataset=training, eval_dataset=validation)
    trainer = Trainer(model, how, **data, callbacks=[progress])
    trainer.remove_callback(PrinterCallback)
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = {number: signal.signal(number, progress.stop) for number in numbers}
    try:
        trainer.train(resume_from_checkpoint=continued and str(continued))
        trainer.save_model()
        draw(trainer.state.log_history, args.output / "loss.png")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if trainer.state.global_step < args.steps:
        print(f"stopped after step {trainer.state.global_step}; continue with --resume")
        return 130
    print(f"done: {args.output} has the adapters")
    return 0


def main(argv=None):
    try:
        return run(arguments(argv))
    except (NotImplementedError, OSError, torch.OutOfMemoryError) as why:
        sys.exit(f"error: {why}")
    except KeyboardInterrupt:  # before the first step
        return 130


if __name__ == "__main__":
    sys.exit(main())
