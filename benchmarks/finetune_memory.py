#!/usr/bin/env python3
"""Write the table of docs/finetuning.md: the models whose adapters can be trained in 12 to 80 GB.

  python3 benchmarks/finetune_memory.py                    # the whole table: some minutes
  python3 benchmarks/finetune_memory.py --check OLMoE-1B-7B   # status 1 if this row is another one

The numbers are computed, by the plan of examples/finetune/lora.py, and nothing is loaded.
"""

import argparse
import pathlib
import sys

import peft
import torch
import transformers
from transformers import (
    DeepseekV2Config, GptOssConfig, GraniteMoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig,
    Qwen3MoeConfig,
)  # fmt: skip

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples" / "finetune"))
import lora  # noqa: E402

PAGE = ROOT / "docs" / "finetuning.md"
START, END = "<!-- memory: written by benchmarks/finetune_memory.py -->\n", "\n<!-- end -->"
CARDS = (12, 16, 24, 48, 80)  # GB, which cards count as GiB
SEQUENCES = (1, 2, 4, 8, 16)
LENGTH = 2048
HEADER = (
    "model | parameters, billions | weights | adapters, gradients, AdamW | activations | "
    + " | ".join(f"{card} GB" for card in CARDS)
)

# As in the config.json of each model's repository; sizes that are not named are the class's own.
MODELS = {
    "granite-3.1-1b-a400m": GraniteMoeConfig(
        vocab_size=49155, hidden_size=1024, intermediate_size=512, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=8, num_local_experts=32, num_experts_per_tok=8,
        tie_word_embeddings=True,
    ),
    "granite-3.1-3b-a800m": GraniteMoeConfig(
        vocab_size=49155, hidden_size=1536, intermediate_size=512, num_hidden_layers=32,
        num_attention_heads=24, num_key_value_heads=8, num_local_experts=40, num_experts_per_tok=8,
        tie_word_embeddings=True,
    ),
    "OLMoE-1B-7B": OlmoeConfig(intermediate_size=1024),
    "Qwen1.5-MoE-A2.7B": Qwen2MoeConfig(),
    "DeepSeek-V2-Lite": DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, num_experts_per_tok=6,
        first_k_dense_replace=1, q_lora_rank=None,
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "Qwen3-30B-A3B": Qwen3MoeConfig(num_hidden_layers=48, head_dim=128),
    "Mixtral-8x7B": MixtralConfig(),
}  # fmt: skip


def memory(config, sequences):
    args = lora.arguments(
        ["--model", "computed", "--batch", str(sequences), "--length", str(LENGTH)]
    )
    return lora.step_memory(config, args, checkpointing=True)


def row(name):
    """A line of the table. A step needs more with each sequence, so the first that is too much for
    the largest card is the last."""
    parts = {}
    for sequences in SEQUENCES:
        parts[sequences] = memory(MODELS[name], sequences)
        if parts[sequences]["peak"] > lora.USABLE * CARDS[-1] * 2**30:
            break
    weights, adapters, activations = (
        parts[1][what] / 2**30 for what in ("weights", "adapters", "activations")
    )
    cells = [name, f"{parts[1]['weights'] / 2e9:.1f}"]
    cells += [f"{size:.1f}" for size in (weights, 4 * adapters, activations)]
    for card in CARDS:
        enough = [s for s in parts if parts[s]["peak"] <= lora.USABLE * card * 2**30]
        cells.append(str(max(enough)) if enough else "no")
    return f"| {' | '.join(cells)} |"


def table():
    rows = [f"| {HEADER} |", f"|{' --- |' * (HEADER.count('|') + 1)}", *map(row, MODELS)]
    versions = {"transformers": transformers, "PEFT": peft, "torch": torch}
    said = ", ".join(
        f"{name} {module.__version__.partition('+')[0]}" for name, module in versions.items()
    )
    return "\n".join([*rows, "", f"Computed with {said}."])


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--check", metavar="MODEL", choices=MODELS, help="compare one row")
    args = parser.parse_args()
    lora.tilemoe.transformers.register()
    lora.tilemoe.peft.register()
    made = row(args.check) if args.check else table()
    before, _, rest = PAGE.read_text().partition(START)
    present, _, after = rest.partition(END)
    if args.check is None:
        PAGE.write_text(before + START + made + END + after)
    elif made not in present.splitlines():
        sys.exit(f"{PAGE}: expected {made}")


if __name__ == "__main__":
    main()
