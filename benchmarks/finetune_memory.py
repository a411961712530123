#!/usr/bin/env python3
"""Write the tables of docs/finetuning.md: the models whose adapters can be trained in 12 to 80 GB.

  python3 benchmarks/finetune_memory.py                # some minutes
  python3 benchmarks/finetune_memory.py --quantised    # the second table alone

The numbers are computed by the plan of examples/finetune/lora.py; nothing is downloaded or loaded.
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

import tilemoe.peft  # noqa: E402
import tilemoe.transformers  # noqa: E402

PAGE = ROOT / "docs" / "finetuning.md"
START, END = "<!-- memory: written by benchmarks/finetune_memory.py -->\n", "\n<!-- end -->"
QUANTISED = START.replace("memory:", "quantised memory:")
CARDS = (12, 16, 24, 48, 80)  # GB, which cards count as GiB
STEPS = ((1, 512), (1, 1024), (1, 2048), (2, 2048), (4, 2048), (8, 2048), (16, 2048))
COLUMNS = ("model", "parameters, billions", "weights", "adapters, gradients, AdamW", "activations")

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
    "gpt-oss-120b": GptOssConfig(num_hidden_layers=36, num_local_experts=128),
}  # fmt: skip
# The formats of experts in the second table; those of gpt-oss are its checkpoints'.
FORMATS = {
    "OLMoE-1B-7B": "nf4", "Qwen1.5-MoE-A2.7B": "nf4", "DeepSeek-V2-Lite": "nf4",
    "gpt-oss-20b": "mxfp4", "Qwen3-30B-A3B": "nf4", "Mixtral-8x7B": "nf4",
    "gpt-oss-120b": "mxfp4",
}  # fmt: skip


def memory(name, sequences=1, length=2048, format=None):
    """Return {what: bytes} of a step with activation checkpointing."""
    words = f"--model {name} --batch {sequences} --length {length}".split()
    args = lora.arguments(words)
    args.format = format
    return lora.step_memory(MODELS[name], args, checkpointing=True)


def row(name, format=None):
    """Return a row of the table.

    Memory grows with the number of tokens, so the search ends at the first step that is too large
    for the largest card.
    """
    peaks = {}
    for sequences, length in STEPS:
        parts = memory(name, sequences, length, format)
        peaks[sequences * length] = parts["peak"]
        if parts["peak"] > usable(CARDS[-1]):
            break
    parts = memory(name, format=format)
    sizes = parts["weights"], 4 * parts["adapters"], parts["activations"]
    first = format or f"{parts['weights'] / 2e9:.1f}"
    cells = [name, first, *(f"{size / 2**30:.1f}" for size in sizes)]
    for card in CARDS:
        tokens = [tokens for tokens, peak in peaks.items() if peak <= usable(card)]
        cells.append(str(max(tokens, default="no")))
    return cells


def usable(card):
    return lora.USABLE * card * 2**30


def table(formats):
    """Return a table of models; `formats`: {model: format of its experts}, None for 16 bits."""
    columns = [*COLUMNS, *(f"{card} GB" for card in CARDS)]
    if any(formats.values()):
        columns[1] = "experts"
    lines = [columns, ["---"] * len(columns), *(row(*pair) for pair in formats.items())]
    packages = {"transformers": transformers, "PEFT": peft, "torch": torch}
    versions = [f"{name} {package.__version__.split('+')[0]}" for name, package in packages.items()]
    lines = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([*lines, "", f"Computed with {', '.join(versions)}."])


def write(start, made):
    before, rest = PAGE.read_text().split(start)
    after = rest.partition(END)[2]
    PAGE.write_text(before + start + made + END + after)


def main():
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(allow_abbrev=False, description=about)
    parser.add_argument("--quantised", action="store_true", help="write the second table alone")
    only_second = parser.parse_args().quantised
    tilemoe.transformers.register()
    tilemoe.peft.register()
    if not only_second:
        write(START, table(dict.fromkeys(name for name in MODELS if name != "gpt-oss-120b")))
    write(QUANTISED, table(FORMATS))


if __name__ == "__main__":
    main()
