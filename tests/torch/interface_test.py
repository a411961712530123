"""The package's interface without numbers: names, types, defaults, examples, versions."""

import doctest
import inspect
import re
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import reference
from checks import refused
import tilemoe
import tilemoe.state_dict
from tilemoe import (
    _config, _library, _parameters, _signatures, expert_parallel, functional, module, options,
    routing,
)  # fmt: skip
from tilemoe.distributed import cost
from tilemoe.integrations import from_modules, huggingface

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "include" / "tilemoe" / "activations.inc"
SIZES = {"d": 32, "n": 16, "E": 6, "K": 2}
NAMES = {"d": "hidden_size", "n": "intermediate_size", "E": "num_experts", "K": "top_k"}
NAMED = {NAMES[letter]: size for letter, size in SIZES.items()}


def test_version_is_the_headers():
    header = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()
    numbers = re.findall(r"#define TILEMOE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert tilemoe.__version__ == ".".join(numbers) and len(numbers) == 3


def test_activations_are_the_headers_and_the_lists():
    header = (ROOT / "include" / "tilemoe" / "tilemoe.h").read_text()
    (enum,) = re.findall(r"typedef enum tilemoe_activation[^{]*{([^}]*)}", header)
    listed = re.findall(r"TILEMOE_(\w+) = (\d+)", enum)
    assert [(name.lower(), int(number)) for name, number in listed] == [
        (name, number) for number, name in enumerate(options.ACTIVATIONS)
    ]
    rows = re.findall(r"^TILEMOE_ACTIVATION\((\w+), +(\w+),", LIST.read_text(), re.MULTILINE)
    assert rows == [(name, name.upper()) for name in options.ACTIVATIONS]


def test_every_activation_is_documented():
    text = LIST.read_text()
    for name in options.ACTIVATIONS:
        assert re.search(rf'^TILEMOE_ACTIVATION\({name}, .*"[^"]+"\)$', text, re.MULTILINE), name
    for page in ("mathematics.md", "pytorch.md"):
        assert "include/tilemoe/activations.inc" in (ROOT / "docs" / page).read_text(), page
    assert "include/tilemoe/activations.inc" in tilemoe.moe.__doc__
    page = (ROOT / "docs" / "mathematics.md").read_text()
    for function in reference.FUNCTIONS:
        assert re.search(rf"\b{function}\b", text) and f"`{function}(x)`" in page, function


def test_config_prints_versions_and_devices(capsys):
    tilemoe.show_config()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["tilemoe"] == tilemoe.__version__ and lines["torch"] == torch.__version__
    assert Path(lines["libraries"]) == _library.directory()
    assert lines["CPU"].startswith(f"yes, {torch.get_num_threads()} threads")
    why = _library.why_no_cuda()
    assert lines["CUDA"].startswith("yes" if why is None else f"no: {why}")


def test_config_prints_each_gpus_arch(monkeypatch, capsys):
    class Ampere:
        name, total_memory = "NVIDIA A100", 80 * 2**30

    archs = {0: "sm80, the newest for compute capability 8.0"}

    def arch_of(index):
        if index in archs:
            return archs[index]
        raise RuntimeError("unsupported: tilemoe_cuda_arch: TITAN V has none [device.cpp:1: x]")

    monkeypatch.setattr(_library, "_no_cuda", None)
    monkeypatch.setattr(_library, "operators", types.SimpleNamespace(arch_of=arch_of))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Ampere)
    tilemoe.show_config()
    out = capsys.readouterr().out
    assert "cuda:0 NVIDIA A100, 80 GiB: sm80, the newest for compute capability 8.0\n" in out
    assert "cuda:1 NVIDIA A100, 80 GiB: not used, tilemoe_cuda_arch: TITAN V has none\n" in out


# Each older name works for one version, with a warning; both names in one call are an error.
def warns_of(name, newer):
    return pytest.warns(DeprecationWarning, match=f"^{name} is the older name of {newer} ")


@pytest.mark.parametrize(
    "name, newer, value, wrong",
    [("set_kit", "set_arch", "sm80", "hopper"), ("set_block_turns", "set_ctas_per_sm", 4, 17)],
)
def test_an_older_function_warns_and_calls_the_newer(monkeypatch, name, newer, value, wrong):
    calls = []
    monkeypatch.setattr(_library, "_no_cuda", None)
    monkeypatch.setattr(_library, "operators", types.SimpleNamespace(**{newer: calls.append}))
    with warns_of(name, newer) as seen:
        getattr(tilemoe, name)(value)
    assert calls == [value] and [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(tilemoe, newer)(value)
    assert calls == [value, value]
    with warns_of(name, newer), pytest.raises(ValueError, match=f"must be .*, got {wrong!r}"):
        getattr(tilemoe, name)(wrong)


WEIGHTS = torch.zeros(6, 32, 32), torch.zeros(6, 32, 16)
OVERLAPPED = {
    "MoE": lambda **options: tilemoe.MoE(**SIZES, expert_mesh=object(), **options),
    "moe": lambda **options: expert_parallel.moe(
        torch.zeros(3, 32), torch.zeros(3, 6), *WEIGHTS, group=None, K=2, **options
    ),
    "plan": lambda **options: expert_parallel.plan(T=64, **SIZES, ranks=2, **options),
}


@pytest.mark.parametrize("call", OVERLAPPED.values(), ids=OVERLAPPED)
def test_the_older_name_of_overlap_warns(monkeypatch, call):
    class Stop(Exception):
        pass

    def made(overlap=True, **_):
        raise Stop(overlap)

    monkeypatch.setattr(_signatures, "Options", made)
    for reader in (module._options, expert_parallel._moe, cost._plan):
        monkeypatch.setattr(reader, "_kept", {})
    with warns_of("beside=", "overlap=") as seen, pytest.raises(Stop, match="False"):
        call(beside=False)
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options, overlap in ((dict(overlap=False), "False"), ({}, "True")):
            with pytest.raises(Stop, match=overlap):
                call(**options)
    with pytest.raises(TypeError, match="overlap= and beside=, its older name, are both given"):
        call(overlap=True, beside=True)


def test_sizes_go_by_letters_or_names():
    by_letter = tilemoe.MoE(**SIZES)
    for layer in (tilemoe.MoE(**NAMED), tilemoe.MoE(32, 16, num_experts=6, top_k=2)):
        assert repr(layer) == repr(by_letter)
        layer.load_state_dict(by_letter.state_dict())


@pytest.mark.parametrize("letter", SIZES)
def test_a_size_is_given_once(letter):
    without = {name: size for name, size in SIZES.items() if name != letter}
    with pytest.raises(TypeError, match=f"requires {letter} or {NAMES[letter]}, but neither is given"):
        tilemoe.MoE(**without)
    twice = SIZES | {NAMES[letter]: SIZES[letter]}
    with pytest.raises(TypeError, match=f"requires {letter} or {NAMES[letter]}, but both are given"):
        tilemoe.MoE(**twice)
    for wrong in (16.0, True, "16"):
        with pytest.raises(TypeError, match=f"{NAMES[letter]} must be an int, got {wrong!r}"):
            tilemoe.MoE(**without, **{NAMES[letter]: wrong})


def test_output_alone_goes_into_a_sequence():
    torch.manual_seed(0)
    alone = tilemoe.MoE(**SIZES)
    both = tilemoe.MoE(**SIZES, return_aux=True)
    both.load_state_dict(alone.state_dict())
    x = torch.randn(5, 32)
    model = nn.Sequential(nn.LayerNorm(32), alone, nn.Linear(32, 4))
    model(x).sum().backward()
    assert alone.experts.down_proj.grad.abs().sum() > 0 and alone.gate.weight.grad.abs().sum() > 0
    assert torch.equal(alone(x), both(x)[0])


def test_forward_returns_the_output_alone_by_default():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = tilemoe.MoE(**SIZES)
        out = layer(torch.randn(3, 32))
        out, aux = tilemoe.MoE(**SIZES, return_aux=True)(out)
    assert out.shape == (3, 32) and aux.expert_counts.sum() == 6


def test_a_loss_that_nobody_would_receive_is_refused():
    layer = tilemoe.MoE(**SIZES)
    layer.balance_coefficient = 0.1
    with pytest.raises(ValueError, match="balance_coefficient=0.1 .* require return_aux=True"):
        layer(torch.randn(3, 32))
    assert layer.eval()(torch.randn(3, 32)).shape == (3, 32)  # nothing is trained


class TestDtypeOnAGpu:
    """Parameters on a GPU are float32 only if the caller chose float32. No GPU is needed: the
    constructor refuses before it makes a tensor."""

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda")], ids=str)
    def test_the_constructor_explains(self, device):
        message = "dtype=torch.bfloat16, or dtype=torch.float32 for parameters that FSDP"
        for make in (
            lambda: tilemoe.MoE(**SIZES, device=device),
            lambda: tilemoe.MoE(**SIZES, router_dtype=torch.bfloat16, device=device),
            lambda: module.Experts(32, 16, 6, device=device),
            lambda: module.SharedExperts(32, 16, device=device),
            lambda: module.SharedExpertGate(1, 32, device=device),
        ):
            refused(ValueError, message, make)

    def test_the_default_device_counts(self):
        with torch.device("cuda:0"), pytest.raises(ValueError, match="dtype is required on cuda:0"):
            tilemoe.MoE(**SIZES)
        with torch.device("cuda:0"):
            assert tilemoe.MoE(**SIZES, device="cpu").gate.weight.device.type == "cpu"
        with torch.device("meta"):
            assert tilemoe.MoE(**SIZES).gate.weight.is_meta

    def test_what_was_chosen_is_allowed(self):
        check = _parameters.check_default_dtype
        for device in ("cuda", torch.device("cuda", 1), 0):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                check(device, dtype)
        for device in ("cpu", "meta", None):
            check(device, None)
        torch.set_default_dtype(torch.bfloat16)
        try:
            check("cuda", None)
        finally:
            torch.set_default_dtype(torch.float32)

    def test_forward_explains_a_layer_that_was_moved(self):
        x = types.SimpleNamespace(dtype=torch.float32, is_cuda=True, shape=(4, 32))
        with pytest.raises(NotImplementedError, match=r"got float32 with shape \(4, 32\); pass dtype"):
            _library.require_dtype(x)


@pytest.mark.parametrize(
    "of",
    [functional, routing, module, _config, from_modules, huggingface],
    ids=lambda m: m.__name__,
)
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
