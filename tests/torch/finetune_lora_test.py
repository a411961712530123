"""examples/finetune/lora.py: it learns, is stopped and resumed, says what memory a step takes before
anything is loaded, and refuses what it cannot do. In this process, but for the run that Ctrl-C
stops: importing transformers takes seconds."""

import importlib.util
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3Config, Qwen3MoeConfig, set_seed

import tilemoe.peft
import tilemoe.transformers
from checks import Calls, same_bits
from finetune_test import save_tokenizer
from peak_memory_test import allocations, live_sums
from quantized_checkpoints import load, make, make_mxfp4

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune" / "lora.py"
sys.path.append(str(EXAMPLE.parent))
sys.path.append(str(ROOT / "benchmarks"))
import finetune_memory  # noqa: E402
import lora  # noqa: E402

TEXT = ROOT / "include" / "tilemoe" / "tilemoe.h"
SHORT = ["--steps", 40, "--save-every", 10, "--batch", 4, "--text", TEXT]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()
    tilemoe.peft.register()


@pytest.fixture(autouse=True)
def one_thread():
    """The example takes one for its tiny model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def all_fused(monkeypatch):
    """PEFT computes no adapter of experts."""

    def refuse(weight, reason):
        raise AssertionError(f"{weight}: {reason}")

    monkeypatch.setattr(tilemoe.integrations.peft, "_report", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(*options):
    """-> exit status"""
    return lora.main([str(option) for option in options])


def refused(*options):
    """-> what it printed to stderr"""
    with pytest.raises(SystemExit) as exit:
        run(*options)
    assert str(exit.value).startswith("error: ")
    return str(exit.value)


def adapters(folder):
    return load_file(folder / "adapter_model.safetensors")


def history(folder, step=SHORT[1]):
    entries = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return entries["log_history"]


def steps_of(folder):
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    with Calls() as calls:
        assert run(*SHORT, "--output", folder) == 0
    names = [name for name, _ in calls.seen]
    assert names.count("experts_lora_backward_over_H") == 2 * SHORT[1]
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that Ctrl-C stopped, as its user starts it."""
    folder = tmp_path_factory.mktemp("stopped")
    command = [sys.executable, EXAMPLE, *SHORT, "--output", folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    lines = []
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 20/40 "):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert "stopping after this step\n" in lines
    assert lines[-1] == f"stopped after step {steps_of(folder)[-1]}; continue with --resume\n"
    return folder


def test_the_default_text():
    training, validation = lora.sequences(lora.arguments([]))
    assert len(training) > 100 * len(validation) == 100 * lora.VALIDATION
    assert training[0]["input_ids"].shape == (128,)


def test_it_learns(whole):
    first, *_, last = [entry["eval_loss"] for entry in history(whole) if "eval_loss" in entry]
    assert first > 5.3 and last < first - 1  # log(256) = 5.5 of a model that knows nothing
    if HAS_MATPLOTLIB:
        assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_its_adapters_are_pefts(whole):
    """A new base model with them has the loss that the run ended with."""
    _, validation = lora.sequences(lora.arguments(list(map(str, SHORT))))
    set_seed(0)
    base = AutoModelForCausalLM.from_config(lora.TINY, experts_implementation="tilemoe")
    ids = torch.stack([sample["input_ids"] for sample in validation])
    with torch.no_grad():
        without = base(input_ids=ids, labels=ids).loss
        model = PeftModel.from_pretrained(base, whole)
        loss = model(input_ids=ids, labels=ids).loss
    losses = [entry["eval_loss"] for entry in history(whole) if "eval_loss" in entry]
    assert without.item() == pytest.approx(losses[0], abs=1e-4)
    assert loss.item() == pytest.approx(losses[-1], abs=1e-4)


@pytest.mark.parametrize("is_killed", [False, True], ids=["", "killed while it saved"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    whole, stopped, is_killed, tmp_path, capsys, monkeypatch
):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    first = steps_of(tmp_path)[-1]
    if is_killed:  # the last checkpoint is not complete
        (tmp_path / f"checkpoint-{first}" / "trainer_state.json").unlink()
        first = steps_of(tmp_path)[-2]
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 10 <= first < SHORT[1]
    assert run(*SHORT, "--output", tmp_path, "--resume") == 0
    same_bits(adapters(tmp_path), adapters(whole))
    printed = capsys.readouterr().out
    no_picture = "no picture of the loss: matplotlib is not installed" in printed
    assert no_picture == (is_killed or not HAS_MATPLOTLIB)
    of = lambda folder: {e["step"]: e["eval_loss"] for e in history(folder) if "eval_loss" in e}
    assert of(tmp_path) == of(whole)
    assert "is finished" in refused(*SHORT, "--output", tmp_path, "--resume")


# ---------------------------------------------------------------- memory

SIZED = Qwen3MoeConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=96,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_experts=16, num_experts_per_tok=8,
)  # fmt: skip
SLACK = 3 * MIB  # the CPU's partial sums


@pytest.mark.parametrize(
    "checkpointing, options",
    [(False, []), (True, []), (True, ["--quantize", "nf4"])],
    ids=["", "checkpointing", "quantised"],
)
def test_the_plan_is_what_torch_allocates(checkpointing, options):
    args = lora.arguments(["--batch", "4", "--length", "256", *options])
    parts = lora.step_memory(SIZED, args, checkpointing)
    model = AutoModelForCausalLM.from_config(SIZED, **args.build)
    if args.quantize:
        lora.quantize(model, args.quantize)
    model = lora.with_adapters(model, args.rank).train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable()
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad] + lora.quantized(model)
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(0, 256, (4, 256))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    step()  # the experts' form is found once
    optimizer.step()
    size = lambda tensors: sum(t.nbytes for t in tensors)
    assert parts["weights"] == size(frozen)
    assert parts["adapters"] == size(trained)
    assert parts["gradients"] == size(p.grad for p in trained)
    state = [t for of in optimizer.state.values() for t in of.values() if t.dim() > 0]
    assert parts["AdamW"] == size(state)
    optimizer.zero_grad()
    seen = max(live_sums(allocations(step)))
    assert 20 * MIB < parts["activations"] <= seen <= parts["activations"] + SLACK
    assert seen >= size(trained)
    resident = parts["weights"] + parts["adapters"] + parts["AdamW"]
    assert parts["peak"] == resident + parts["activations"]


@pytest.mark.parametrize("format", [None, "nf4"])
def test_the_pages_tables_are_computed(format):
    """A row of each; benchmarks/finetune_memory.py writes them all."""
    page = (ROOT / "docs" / "finetuning.md").read_text()
    start = finetune_memory.QUANTISED if format else finetune_memory.START
    table = page.split(start)[1].split(finetune_memory.END)[0]
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in table.splitlines()}
    listed = finetune_memory.FORMATS if format else {*finetune_memory.MODELS} - {"gpt-oss-120b"}
    assert set(listed) < set(rows)
    parts = finetune_memory.memory("OLMoE-1B-7B", format=format)
    sizes = parts["weights"], 4 * parts["adapters"], parts["activations"]
    want = [float(cell) for cell in rows["OLMoE-1B-7B"][1:4]]
    assert [size / 2**30 for size in sizes] == pytest.approx(want, abs=0.06, rel=0.01)


def save_config(config, folder, architecture):
    config.architectures = [architecture]
    config.save_pretrained(folder)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, capsys):
    """There are no weights to load."""
    sizes = dict(hidden_size=8192, moe_intermediate_size=2048, num_experts=8192)
    save_config(Qwen3MoeConfig(**sizes, num_hidden_layers=4), tmp_path, "Qwen3MoeForCausalLM")
    options = "--model", tmp_path, "--length", 64
    assert run(*options, "--plan") == 0
    printed = capsys.readouterr().out
    weights = float(printed.split("weights ")[2].split()[0])
    of_experts = 2 * 4 * 8192 * 3 * 8192 * 2048 / 2**30
    assert of_experts < weights < 1.05 * of_experts
    assert printed.startswith("computed: memory in GiB of a step of 1 x 64 tokens")
    assert "does not fit as is, and does not fit with checkpointing" in printed
    assert "too little memory" in refused(*options)


# ---------------------------------------------------------------- models and mistakes


def test_a_checkpoint(tmp_path, capsys):
    """In bfloat16, with its tokenizer and small steps."""
    config = OlmoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model, tuned = tmp_path / "model", tmp_path / "tuned"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    save_tokenizer(model)
    (tmp_path / "text").write_text((ROOT / "README.md").read_text())
    options = "--model", model, "--text", tmp_path / "text", "--length", 64, "--steps", 5
    assert run(*options, "--output", tuned) == 0
    printed = capsys.readouterr().out
    assert "weights in bfloat16" in printed and printed.count(": validation loss 5.") == 2
    assert json.loads((tuned / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(model)
    assert {tensor.dtype for tensor in adapters(tuned).values()} == {torch.float32}
    names = {name.rpartition(".lora_")[0].partition(".layers.0.")[2] for name in adapters(tuned)}
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    assert names - {""} == attention | {"mlp.experts", "mlp.experts.base_layer"}


@pytest.mark.parametrize("kind", ["mxfp4", "nf4"])
def test_a_quantised_model(kind, tmp_path, capsys):
    """A checkpoint in MXFP4 as it is, and one in 16 bits by --quantize; the plan says so. Losses
    and adapters are those of a run with the dequantised checkpoint."""
    folder, tuned, in_16_bits = (tmp_path / name for name in ("model", "tuned", "in 16 bits"))
    folder.mkdir()
    options = []
    if kind == "mxfp4":
        make_mxfp4(folder, vocab_size=512)
    else:
        make("qwen3_moe", folder, vocab_size=512)
        options = ["--quantize", kind]
    save_tokenizer(folder)
    (tmp_path / "text").write_text((ROOT / "README.md").read_text())
    common = "--text", tmp_path / "text", "--length", 32, "--steps", 3, "--save-every", 1
    common += ("--no-checkpointing",)
    options += ["--model", folder, *common]
    with Calls() as calls:
        assert run(*options, "--output", tuned) == 0
    backward = calls.of("experts_lora_backward_over_H")
    number = 2 if kind == "mxfp4" else 3  # tilemoe_format of W1, W1_up and W2
    assert len(backward) == 6 and all(args[11][:3] == [number, 0, number] for args in backward)
    printed = capsys.readouterr().out
    assert f"experts in {kind}, other weights in bfloat16" in printed
    assert any("experts" in name for name in adapters(tuned))

    how = {}
    if kind == "nf4":
        how = dict(quantization_config=tilemoe.transformers.QuantizedExpertsConfig(kind))
    load(folder, **how).dequantize().save_pretrained(in_16_bits)
    save_tokenizer(in_16_bits)
    other = tmp_path / "other"
    assert run("--model", in_16_bits, *common, "--output", other) == 0
    of = lambda entry: [entry[key] for key in ("loss", "eval_loss") if key in entry]
    losses = lambda folder: [loss for entry in history(folder, 3) for loss in of(entry)]
    assert losses(tuned) == losses(other) and len(set(losses(tuned))) == 7
    same_bits(adapters(tuned), adapters(other))
    if kind == "mxfp4":
        why = "is quantised (mxfp4)"
        assert why in refused(*options, "--quantize", "nf4", "--output", tuned)
    else:
        assert "has quantize nf4, expected None" in refused(
            *options[2:], "--output", tuned, "--resume"
        )


def test_what_is_refused(tmp_path, whole, capsys):
    dense, quantized = tmp_path / "dense", tmp_path / "quantized"
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    save_config(Qwen3Config(**sizes), dense, "Qwen3ForCausalLM")
    config = Qwen3MoeConfig(**sizes, quantization_config={"quant_method": "awq"})
    save_config(config, quantized, "Qwen3MoeForCausalLM")
    odd = Qwen3MoeConfig(**sizes, moe_intermediate_size=20, num_experts=8)
    save_config(odd, tmp_path / "odd", "Qwen3MoeForCausalLM")
    new = tmp_path / "new"
    (tmp_path / "short").write_text("a few words")
    for options, why in [
        (["--model", dense], "Qwen3ForCausalLM has no experts that TileMoE supports"),
        (["--model", quantized], "is quantised (awq), expected 16 bits, MXFP4 or FP8"),
        (["--model", tmp_path / "odd"], "its widths must be multiples of 8, got 32 and 20"),
        (["--model", new], f"--model {new}: "),
        (["--text", new, "--output", new], f"No such file or directory: '{new}'"),
        (["--text", tmp_path / "short", "--output", new], "the text must have 24 sequences of 128 tokens, got 0"),
        (["--output", tmp_path / "short"], "File exists"),
        (["--output", new, "--resume"], f"no checkpoint found in {new}"),
        ([*SHORT, "--output", whole], f"{whole} already contains a run; resume it with --resume"),
        ([*SHORT, "--rank", 4, "--output", whole, "--resume"], "has rank 16, expected 4"),
        ([*SHORT, "--seed", 1, "--output", whole, "--resume"], "has seed 0, expected 1"),
    ]:
        assert why in refused(*options), options
    assert not new.exists()
    with pytest.raises(SystemExit):
        run("--rank", 0)
    assert "--rank must be >= 1, got 0" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match=r"error: .*peft.* \(pip install '\.\[peft\]'"):
        runpy.run_path(str(EXAMPLE))
