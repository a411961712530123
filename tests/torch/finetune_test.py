"""The fine-tuning example, run as its page says: it learns, and as with `eager` experts."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, and Trainer needs it")

from checks import start

ROOT = Path(__file__).parents[2]


def run(*options):
    example = ROOT / "examples" / "finetune_transformers.py"
    done = start(sys.executable, example, *options, timeout=None, HF_HUB_OFFLINE="1")
    print(done.stdout)
    return done


def losses(*options):
    done = run(*options)
    assert done.returncode == 0, done.stderr
    before, after = re.search(r"validation loss ([\d.]+) -> ([\d.]+)", done.stdout).groups()
    return float(before), float(after), done.stdout


@pytest.mark.long
def test_the_example_learns_as_eager_does(tmp_path):
    before, after, _ = losses("--steps", 40, "--output", tmp_path / "tilemoe")
    assert after <= before - 1.5  # log(256) = 5.5 at the start, 3.2 of letters' frequencies alone
    assert (tmp_path / "tilemoe" / "model.safetensors").exists()
    options = "--steps", 40, "--experts", "eager", "--output", tmp_path / "eager"
    eager_before, eager_after, _ = losses(*options)
    assert before == pytest.approx(eager_before, abs=2e-3)
    assert after == pytest.approx(eager_after, abs=2e-2)


def save_tokenizer(folder):
    """Of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_a_checkpoint_gets_small_steps(tmp_path):
    """Those of a new model would spoil it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    options = "--model", tmp_path / "model", "--output", tmp_path / "tuned"
    before, after, printed = losses("--steps", 10, *options)
    assert before - 0.1 < after < before  # ten steps of 1e-5 at most, by AdamW
    assert "memory in GiB: weights 0.0" in printed and "experts by tilemoe" in printed


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path):
    """There are no weights to load."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=8192, moe_intermediate_size=2048, num_experts=256, num_hidden_layers=32
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    done = run("--model", tmp_path)
    assert done.returncode == 1
    of_experts = 32 * 256 * 3 * 8192 * 2048
    needed = float(re.search(r"in bfloat16 needs (\d+) GiB", done.stderr).group(1))
    assert 8 * of_experts / 2**30 <= needed <= 1.05 * 8 * of_experts / 2**30
    assert "does not fit" in done.stderr and "Traceback" not in done.stderr
    parts = re.search(r"weights ([\d.]+), gradients ([\d.]+), optimizer ([\d.]+), ", done.stdout)
    weights, gradients, optimizer = map(float, parts.groups())
    assert weights == gradients == pytest.approx(optimizer / 2, abs=0.1)
    assert weights == pytest.approx(needed / 4, rel=0.01)
    assert done.stdout.count("together") == 1
