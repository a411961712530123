"""TRL's SFTTrainer, which makes PEFT's adapters itself: TileMoE's experts against `eager` ones."""

import pytest

pytest.importorskip("trl", reason="trl is not installed")

from datasets import Dataset
from peft.tuners.lora.layer import ParamWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tilemoe.peft
import tilemoe.transformers
from peft_support import build, config_of, fill, nothing_materialised

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def tokenizer():
    """One token per letter."""
    words = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def losses(implementation, folder):
    """Of six steps on prompts with completions of different lengths."""
    words = ["a mixture", "of experts", "routes tokens", "to", "some of them"]
    rows = [{"prompt": first, "completion": second} for first in words for second in words]
    options = SFTConfig(
        str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=3e-2,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        save_strategy="no", max_length=24, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        build(implementation=implementation), options, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(), peft_config=config_of(),
    )  # fmt: skip
    fill(trainer.model)
    trainer.train()
    assert sum(isinstance(module, ParamWrapper) for module in trainer.model.modules()) == 4
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_are_those_of_eager(tmp_path, monkeypatch):
    tilemoe.transformers.register()
    tilemoe.peft.register()
    want = losses("eager", tmp_path)
    with nothing_materialised(monkeypatch):
        got = losses("tilemoe", tmp_path)
    assert len(got) == 6 and got == pytest.approx(want, rel=1e-4)
    assert got[5] < got[0] - 0.05
