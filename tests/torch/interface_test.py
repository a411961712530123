"""What users of the package meet before any number: names, types, defaults, examples, versions."""

import doctest
import inspect
import re
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tilemoe
import tilemoe.state_dict
from tilemoe import _config, _huggingface, _library, _rules, functional, module, routing

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"d": 32, "n": 16, "E": 6, "K": 2}
NAMES = {"d": "hidden_size", "n": "intermediate_size", "E": "num_experts", "K": "top_k"}
NAMED = {NAMES[letter]: size for letter, size in SIZES.items()}


def test_version_is_the_headers():
    header = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()
    numbers = re.findall(r"#define TILEMOE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert tilemoe.__version__ == ".".join(numbers) and len(numbers) == 3


def test_activations_are_the_headers():
    header = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()
    (enum,) = re.findall(r"typedef enum tilemoe_activation[^{]*{([^}]*)}", header)
    listed = re.findall(r"TILEMOE_(\w+) = (\d+)", enum)
    assert [(name.lower(), int(number)) for name, number in listed] == [
        (name, number) for number, name in enumerate(_rules.ACTIVATIONS)
    ]


def test_every_activation_is_documented():
    pages = [(ROOT / "docs" / page).read_text() for page in ("mathematics.md", "pytorch.md")]
    for name in _rules.ACTIVATIONS:
        assert all(re.search(f'`"?{name}"?`', page) for page in pages), name
        assert f'"{name}"' in tilemoe.moe.__doc__, name


def test_config_tells_versions_and_devices(capsys):
    tilemoe.show_config()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["tilemoe"] == tilemoe.__version__ and lines["torch"] == torch.__version__
    assert Path(lines["libraries"]) == _library.directory()
    assert lines["CPU"].startswith(f"yes, {torch.get_num_threads()} threads")
    why = _library.why_no_cuda()
    assert lines["CUDA"].startswith("yes" if why is None else f"no: {why}")


def test_config_tells_each_gpus_kit(monkeypatch, capsys):
    class Ampere:
        name, total_memory = "NVIDIA A100", 80 * 2**30

    kits = {0: "sm80, the newest for compute capability 8.0"}

    def kit_of(index):
        if index in kits:
            return kits[index]
        raise RuntimeError("unsupported: tilemoe_cuda_kit: TITAN V has none [device.cpp:1: x]")

    monkeypatch.setattr(_library, "_no_cuda", None)
    monkeypatch.setattr(_library, "operators", types.SimpleNamespace(kit_of=kit_of))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Ampere)
    tilemoe.show_config()
    told = capsys.readouterr().out
    assert "cuda:0 NVIDIA A100, 80 GiB: sm80, the newest for compute capability 8.0\n" in told
    assert "cuda:1 NVIDIA A100, 80 GiB: not used, tilemoe_cuda_kit: TITAN V has none\n" in told


def test_sizes_go_by_letters_or_names():
    by_letter = tilemoe.MoE(**SIZES, return_aux=True)
    for layer in (tilemoe.MoE(**NAMED, return_aux=True),
                  tilemoe.MoE(32, 16, num_experts=6, top_k=2, return_aux=True)):  # fmt: skip
        assert repr(layer) == repr(by_letter)
        layer.load_state_dict(by_letter.state_dict())


@pytest.mark.parametrize("letter", SIZES)
def test_a_size_is_given_once(letter):
    without = {name: size for name, size in SIZES.items() if name != letter}
    with pytest.raises(TypeError, match=f"takes {letter} or {NAMES[letter]}, and neither is given"):
        tilemoe.MoE(**without, return_aux=True)
    twice = SIZES | {NAMES[letter]: SIZES[letter]}
    with pytest.raises(TypeError, match=f"takes {letter} or {NAMES[letter]}, and both are given"):
        tilemoe.MoE(**twice, return_aux=True)
    for wrong in (16.0, True, "16"):
        with pytest.raises(TypeError, match=f"{NAMES[letter]} is {wrong!r}, expected an int"):
            tilemoe.MoE(**without, **{NAMES[letter]: wrong}, return_aux=True)


def test_output_alone_goes_into_a_sequence():
    torch.manual_seed(0)
    alone = tilemoe.MoE(**SIZES, return_aux=False)
    both = tilemoe.MoE(**SIZES, return_aux=True)
    both.load_state_dict(alone.state_dict())
    x = torch.randn(5, 32)
    model = nn.Sequential(nn.LayerNorm(32), alone, nn.Linear(32, 4))
    model(x).sum().backward()
    assert alone.experts.down_proj.grad.abs().sum() > 0 and alone.gate.weight.grad.abs().sum() > 0
    assert torch.equal(alone(x), both(x)[0])


def test_a_layer_that_does_not_say_what_it_returns_warns_once_where_it_is_made():
    with pytest.warns(DeprecationWarning, match="say return_aux=True or return_aux=False") as said:
        layer = tilemoe.MoE(**SIZES)
    assert [Path(w.filename).name for w in said] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, aux = layer(torch.randn(3, 32))
    assert out.shape == (3, 32) and aux.expert_counts.sum() == 6


@pytest.mark.parametrize("of", [functional, routing, module, _config, _huggingface], ids=lambda m: m.__name__)
def test_examples_in_docstrings(of):
    torch.manual_seed(0)
    names = {"torch": torch, "tilemoe": tilemoe}
    found = doctest.testmod(of, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0 and found.attempted > 0


PUBLIC = [getattr(tilemoe, name) for name in tilemoe.__all__ if name != "__version__"]


@pytest.mark.parametrize("public", [f for f in PUBLIC if inspect.isfunction(f)], ids=lambda f: f.__name__)
def test_functions_are_annotated_and_documented(public):
    signature = inspect.signature(public)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
        assert parameter.name in public.__doc__, f"{parameter} is not documented"


def test_the_module_documents_every_argument():
    for name in inspect.signature(tilemoe.MoE).parameters:
        assert re.search(rf"^ +(\w+, )*{name}(, \w+)*:", tilemoe.MoE.__doc__, re.MULTILINE), name
