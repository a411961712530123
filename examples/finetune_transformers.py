"""Fine-tune a Mixture-of-Experts model of Hugging Face with transformers' Trainer and TileMoE.

    python examples/finetune_transformers.py
    python examples/finetune_transformers.py --model allenai/OLMoE-1B-7B-0924 --text corpus.txt

Two lines use TileMoE: register() and experts_implementation="tilemoe"; the rest is Trainer code.
Without --model the model is new, tiny and reads bytes, and the text is this repository's docs:
nothing is downloaded, and the run needs half a minute on a CPU. With --model all weights are
trained, with gradient checkpointing; the required memory is printed before the weights are loaded.
"""

import argparse
from pathlib import Path

import psutil
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

import tilemoe.transformers

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
TINY = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    output_router_logits=True,  # adds the balance loss
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or name of a checkpoint; default: a tiny model")
    parser.add_argument("--text", type=Path, nargs="+", default=DOCS, help="files to train on")
    parser.add_argument(
        "--experts", default="tilemoe", help='or "eager", "grouped_mm" for comparison'
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, help="default: 1e-5, 3e-3 without --model")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="dtype of --model's weights; float32 needs twice the memory, and keeps the small "
        "updates that bfloat16 rounds away (default: bfloat16)",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/finetune_transformers"))
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = 3e-3 if args.model is None else 1e-5
    return args


def memory(config, dtype, tokens):
    """Return {part: bytes} of a training step with AdamW and gradient checkpointing.

    Saved for backward are each layer's input, and everything in one layer, estimated at 16 rows of
    the model's width per token, and five rows of the experts' width for each of its experts.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    text = config.get_text_config()
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    layer = 16 * text.hidden_size + 5 * width * getattr(text, "num_experts_per_tok", 1)
    per_token = dtype.itemsize * (text.num_hidden_layers * text.hidden_size + layer)
    logits = (dtype.itemsize + 12) * text.vocab_size  # also logits, loss, gradient in float32
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
        "activations, about": tokens * (per_token + logits),
    }


def require_memory(args, device):
    """Print the memory of the training, and exit if the device has less."""
    config = AutoConfig.from_pretrained(args.model)
    parts = memory(config, getattr(torch, args.dtype), args.batch * args.length)
    needed = sum(parts.values())
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
    else:
        free = psutil.virtual_memory().available
    each = ", ".join(f"{what} {size / 2**30:.1f}" for what, size in parts.items())
    needed, free = needed / 2**30, free / 2**30
    print(f"memory in GiB: {each}; together {needed:.1f}, free on {device} {free:.1f}")
    if needed > free:
        raise SystemExit(
            f"{args.model} does not fit: training all of its weights in {args.dtype} needs "
            f"{needed:.0f} GiB, and {device} has {free:.0f} GiB free. Use a smaller model "
            "or --batch, train adapters (PEFT), or shard it over several GPUs (FSDP)."
        )


def load(args):
    """Return the model, and a function from text to ids (tokens)."""
    tilemoe.transformers.register()
    if args.model is None:
        model = AutoModelForCausalLM.from_config(TINY, experts_implementation=args.experts)
        return model, lambda text: torch.tensor(list(text.encode()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    require_memory(args, device)
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=getattr(torch, args.dtype),
        device_map=device,
        experts_implementation=args.experts,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return model, lambda text: tokenizer(text, return_tensors="pt").input_ids[0]


def sequences(ids, length):
    """Split ids (tokens) into [{input_ids (length), labels (length)}]; the model shifts labels."""
    rows = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main():
    args = arguments()
    set_seed(0)
    model, encode = load(args)
    data = sequences(encode("\n".join(path.read_text() for path in args.text)), args.length)
    validation, training = data[::10], [row for i, row in enumerate(data) if i % 10]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            learning_rate=args.learning_rate,
            gradient_checkpointing=args.model is not None,
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 10,
            logging_steps=max(1, args.steps // 10),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
        train_dataset=training,
        eval_dataset=validation,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"validation loss {before:.3f} -> {after:.3f} nats per token, experts by {args.experts}")


if __name__ == "__main__":
    main()
