"""The code blocks of the documentation run unchanged."""

import pathlib
import re

import pytest
import torch

import tilemoe
from checks import python
from documented import ALONE, CONTINUES, OF_TRANSFORMERS, PAGES, ROOT, need_packages


def test_the_pages_have_their_blocks():
    alone = {"README.md", "docs/quickstart.md", "docs/finetuning.md", "docs/pytorch.md"}
    assert alone <= {page for page, *_ in ALONE}
    assert {"README.md", "docs/pytorch.md"} <= {page for page, *_ in OF_TRANSFORMERS}
    assert sum(CONTINUES in block for _, block, _ in OF_TRANSFORMERS) >= 1
    assert sum(bool(printed) for _, _, printed in ALONE) >= 1


def test_the_first_layer_is_that_of_the_readme():
    of_readme, of_quickstart = (
        next((block, printed) for name, block, printed in ALONE if name == page)
        for page in ("README.md", "docs/quickstart.md")
    )
    assert of_readme == of_quickstart


def test_the_quick_start_quotes_messages_of_the_package():
    """The first cells of Troubleshooting, but those of torch and transformers."""
    table = PAGES["docs/quickstart.md"].split("## Troubleshooting\n")[1].split("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(messages) == 10
    folder = pathlib.Path(tilemoe.__file__).parent
    sources = "".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    sources = re.sub(r'"\s+f?"', "", sources)  # strings of several lines
    sources = re.sub(r"{[^{}]*}", "...", sources)
    theirs = {'experts_implementation="tilemoe"', "torch.compiler.disable()"}
    assert [text for text in messages if text not in theirs and text not in sources] == []


@pytest.mark.parametrize("page, block, printed", ALONE, ids=[page for page, *_ in ALONE])
def test_a_block(page, block, printed, capsys, monkeypatch):
    # A page shows the CPU's output, also on a machine with a GPU: cuda_documentation_test.py.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    need_packages(block)
    names = {}
    exec(compile(block, page, "exec"), names)
    if "out" in names:
        assert names["out"].shape == names["x"].shape
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page, block, printed", OF_TRANSFORMERS, ids=[b[0] for b in OF_TRANSFORMERS])
def test_a_model_of_transformers(page, block, printed, monkeypatch):
    """As the page has it, but that the model is small and comes from nowhere."""
    transformers = pytest.importorskip("transformers")
    if "get_peft_model" in block:
        pytest.importorskip("peft", reason="peft is not installed")

    def small(name, **options):
        assert name == "allenai/OLMoE-1B-7B-0924"
        assert options.pop("dtype") is torch.bfloat16 and options.pop("device_map") == "auto"
        quantization = options.pop("quantization_config", None)
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        if quantization is not None:
            tilemoe.transformers.quantize(model, quantization.format)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small)
    names = {}
    exec(compile(block, page, "exec"), names)
    model, ids = names["model"], torch.arange(8).reshape(1, 8)
    calls, moe = [], tilemoe.functional.moe
    called = lambda *args, **kw: calls.append(1) or moe(*args, **kw)  # noqa: E731
    monkeypatch.setattr(tilemoe.functional, "moe", called)
    ours = model(ids).logits
    assert len(calls) == 1
    if "QuantizedExpertsConfig" in block:
        model = model.dequantize()
    model.set_experts_implementation("eager")
    assert (ours - model(ids).logits).abs().max() < 1e-5
    assert len(calls) == 1


def test_every_public_name_is_documented():
    pages = "".join(text for page, text in PAGES.items() if page.startswith("docs/"))
    assert [name for name in tilemoe.__all__ if not re.search(rf"\b{name}\b", pages)] == []


def run_example(name):
    """The output of the example."""
    return python(ROOT / "examples" / name)


def test_the_functions_example_learns():
    before, after = map(float, re.findall(r"loss (\S+) nats", run_example("pytorch_functions.py")))
    assert after < before - 2


def test_the_module_example_learns():
    losses = re.findall(r"loss (\S+) -> (\S+)", run_example("pytorch_module.py"))
    assert len(losses) == 2
    assert all(float(last) < 0.6 * float(first) for first, last in losses), losses
