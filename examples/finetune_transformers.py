"""Fine-tunes a Mixture-of-Experts model of Hugging Face's with transformers' Trainer and TileMoE.

    python examples/finetune_transformers.py
    python examples/finetune_transformers.py --model Qwen/Qwen3-30B-A3B --text corpus.txt

Two lines are TileMoE's: register() and experts_implementation="tilemoe"; the rest is Trainer's.
Without --model the model is new, tiny and of bytes, and the text is this repository's docs: nothing
is downloaded, and the CPU is done in half a minute.
"""

import argparse
from pathlib import Path

import torch
from transformers import (
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
    parser.add_argument("--model", help="a checkpoint's folder or name; default: a tiny one")
    parser.add_argument("--text", type=Path, nargs="+", default=DOCS, help="files to train on")
    parser.add_argument("--experts", default="tilemoe", help='or "eager", "grouped_mm" to compare')
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/finetune_transformers"))
    return parser.parse_args()


def load(args):
    """-> model, and a function that turns text into ids (tokens)."""
    tilemoe.transformers.register()
    if args.model is None:
        model = AutoModelForCausalLM.from_config(TINY, experts_implementation=args.experts)
        return model, lambda text: torch.tensor(list(text.encode()))
    model = AutoModelForCausalLM.from_pretrained(args.model, experts_implementation=args.experts)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return model, lambda text: tokenizer(text, return_tensors="pt").input_ids[0]


def sequences(ids, length):
    """ids (tokens) -> [{input_ids (length), labels (length)}]; the model shifts the labels."""
    rows = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main():
    args = arguments()
    set_seed(0)
    model, encode = load(args)
    data = sequences(encode("\n".join(path.read_text() for path in args.text)), args.length)
    held_out, training = data[::10], [row for i, row in enumerate(data) if i % 10]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            learning_rate=args.learning_rate,
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
        eval_dataset=held_out,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"held-out loss {before:.3f} -> {after:.3f} nats a token, experts by {args.experts}")


if __name__ == "__main__":
    main()
