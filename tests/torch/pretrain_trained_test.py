"""Uses of a run of examples/pretrain that has trained: text is sampled from it, and it is
exported to transformers."""

import dataclasses
import shutil
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "pretrain"))

import corpus  # noqa: E402
import export  # noqa: E402
import sample  # noqa: E402
import sources  # noqa: E402
import tokens  # noqa: E402
import train  # noqa: E402
import trained  # noqa: E402
from configs import CONFIGS  # noqa: E402
from model import Cache, Transformer  # noqa: E402

ALONE = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
TEXT = "the café costs 5 € 🙂\n"


def trained_run(folder, data, *options):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, str(value))
        own = ["--config", "tiny", "--data", str(data), "--output", str(folder)]
        own += "--batch 16 --micro-batch 16 --learning-rate 1e-2 --steps 12".split()
        assert train.main([*own, *options]) == 0
    torch.set_float32_matmul_precision("highest")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A token is a byte; its parameters are float32."""
    folder = tmp_path_factory.mktemp("bytes")
    corpus.build(folder / "data", sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2)
    return trained_run(folder / "run", folder / "data", "--save-every", "6")


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """A run's folder with a tokenizer of its own, as far as tokens go."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("worded")
    corpus.build(folder, sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2, vocabulary=400)
    (folder / "run").mkdir()
    tokens.keep(folder, folder / "run")
    return folder / "run"


def random_model(c, seed=0):
    """Values that are no initial ones: every weight has its say."""
    model = Transformer(c).eval()
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.normal_(mean=float(p.dim() == 1), std=0.3, generator=generator)
    return model


def numbers(c, *shape):
    return torch.randint(c.vocabulary, shape, generator=torch.Generator().manual_seed(1))


def close(ours, theirs):
    return not (ours - theirs).abs().max() > 1e-5 * theirs.abs().max()


# ---------------------------------------------------------------- sampling


def test_keys_and_values_that_are_kept_change_nothing():
    c = CONFIGS["tiny"]
    model, text = random_model(c), numbers(c, 2, 20)
    whole = model.logits(text)
    assert close(model.logits(text, last=True), whole[:, -1:])
    caches = [Cache() for _ in model.blocks]
    found = [model.logits(text[:, :7], caches)]
    found += [model.logits(text[:, i : i + 1], caches) for i in range(7, 20)]
    assert close(torch.cat(found, dim=1), whole)
    assert caches[1].length == 20


@pytest.mark.parametrize("prompt", [1, 30, 32, 70])
def test_past_the_context_the_last_half_of_it_stays(prompt):
    c = CONFIGS["tiny"]
    model, sampler = random_model(c), sample.Sampler(0, temperature=0)
    given = numbers(c, prompt).tolist()
    found = list(islice(sample.generate(model, given, sampler), 40))
    text, start = list(given), 0
    for token in found:
        if len(text) - start > c.context:
            start = len(text) - c.context // 2
        assert model.logits(torch.tensor([text[start:]]))[0, -1].argmax() == token
        text.append(token)
    assert len(set(found)) > 5


P = [0.1, 0.5, 0.15, 0.25]
KEPT = [
    ({}, P),
    ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
    ({"top_p": 0.6}, [0, 2 / 3, 0, 1 / 3]),
    ({"top_p": 0.5}, [0, 1, 0, 0]),
    ({"top_k": 3, "top_p": 1e-9}, [0, 1, 0, 0]),
    ({"temperature": 0}, [0, 1, 0, 0]),
    ({"temperature": 0.5}, [p * p / sum(q * q for q in P) for p in P]),
    ({"vocabulary": 1}, [1, 0, 0, 0]),
]


@pytest.mark.parametrize("options, expected", KEPT)
def test_tokens_are_drawn_by_their_probabilities(options, expected):
    logits, draws = torch.tensor(P).log(), 4000
    sampler, same = (sample.Sampler(3, **options) for _ in range(2))
    drawn = [sampler(logits) for _ in range(draws)]
    assert drawn[:50] == [same(logits) for _ in range(50)]
    for token, p in enumerate(expected):
        deviation = (p * (1 - p) / draws) ** 0.5
        assert abs(drawn.count(token) / draws - p) <= 5 * deviation


def sampled(capfdbinary, *options):
    """-> exit status, stdout, stderr"""
    status = sample.main(list(map(str, [*options, "--device", "cpu"])))
    out, err = capfdbinary.readouterr()
    return status, out, err.decode()


def test_the_command_writes_text_and_nothing_else(run, capfdbinary):
    options = [run, "--prompt", "/// ", "--tokens", 20]
    status, text, said = sampled(capfdbinary, *options, "--seed", 1)
    assert status == 0 and text.startswith(b"/// ") and text.endswith(b"\n")
    assert 5 < len(text) <= 25
    assert "step-000000012: tiny after 12 steps, on cpu in float32" in said
    assert "tokens/s" in said and len(said.splitlines()) == 2
    assert sampled(capfdbinary, *options, "--seed", 1)[1] == text
    assert sampled(capfdbinary, *options, "--seed", 2)[1] != text
    of_middle = [run / "checkpoints" / "step-000000006", *options[1:], "--seed", 1]
    status, other, said = sampled(capfdbinary, *of_middle)
    assert status == 0 and "tiny after 6 steps" in said and other != text


def test_what_cannot_be_sampled_is_refused_in_a_sentence(run, tmp_path):
    assert sample.main([str(tmp_path)]) == (
        f"error: no checkpoint found in {tmp_path}; pass --output of train.py, or a step-N in it"
    )
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    assert f"error: {tmp_path / 'tokens.json'} is missing" in sample.main([str(tmp_path)])


def test_a_checkpoint_that_cannot_be_read_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "checkpoints" / "step-000000012"
    (last / ".metadata").write_bytes(b"not a pickle")
    said = sample.main([str(tmp_path)])
    assert said.startswith(f"error: torch {torch.__version__} cannot read {last}, which is damaged")
    assert trained.load(last.with_name("step-000000006")).step == 6


def test_bytes_are_text_and_back(run):
    text = tokens.of_run(run)
    decoded = text.decoder()
    assert text.encode(TEXT) == list(TEXT.encode())
    assert b"".join(map(decoded, text.encode(TEXT))) == TEXT.encode()


def test_a_runs_tokenizer_is_text_and_back(worded):
    text = tokens.of_run(worded)
    decoded = text.decoder()
    ids = text.encode(TEXT)
    pieces = [decoded(token) for token in ids]
    assert b"".join(pieces) == TEXT.encode() and len(ids) < len(TEXT.encode())
    for piece in pieces:
        piece.decode()  # no half of a character
    assert text.end not in text.encode(corpus.END)


def test_the_weights_are_those_of_the_checkpoint(run):
    wide = trained.load(run)
    narrow = trained.load(run, dtype=torch.bfloat16)
    first = trained.load(run / "checkpoints" / "step-000000006")
    assert (wide.step, first.step, wide.name) == (12, 6, "tiny")
    assert all(p.dtype == torch.bfloat16 for p in narrow.model.parameters())
    for a, b, c in zip(*(of.model.parameters() for of in (wide, narrow, first)), strict=True):
        assert torch.equal(a.bfloat16(), b) and not torch.equal(a, c)
    # It contains what was learned.
    data = list((ROOT / "include/tilemoe/tilemoe.h").read_bytes()[: 33 * 40])
    text = torch.tensor(data).view(40, 33)
    with torch.no_grad():
        losses = [of.model(text)[0].next_token.item() for of in (first, wide)]
    assert losses[1] < losses[0] - 0.2 and losses[1] < 4.5


# ---------------------------------------------------------------- transformers

SHAPES = {
    "a shared expert": CONFIGS["tiny"],
    "none": dataclasses.replace(CONFIGS["tiny"], shared=0, kv_heads=4),
    "an output layer of its own": dataclasses.replace(CONFIGS["tiny"], tied=False, K=3, kv_heads=1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same_function(shape):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    c = SHAPES[shape]
    ours, text = random_model(c), numbers(c, 3, c.context + 1)
    theirs = transformers.GraniteMoeSharedForCausalLM(export.config_of(c, 256, transformers))
    theirs.load_state_dict(export.renamed(ours.state_dict(), c.tied))
    theirs.eval()
    with torch.no_grad():
        expected = theirs(text, labels=text)
        loss = ours(text)[0].next_token
    logits = ours.logits(text)
    assert close(logits, expected.logits) and logits.std() > 0.5
    assert not abs(loss - expected.loss) > 1e-6 * expected.loss


def test_an_exported_run_is_loaded_and_is_the_same(run, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path / "exported"
    assert export.main([str(run), str(folder)]) == 0
    of = trained.load(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == export.CLASS and theirs.dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert ids.tolist() == [list(TEXT.encode())] and tokenizer.decode(ids[0]) == TEXT
    assert tokenizer.eos_token_id == 256 == theirs.generation_config.eos_token_id
    with torch.no_grad():
        assert close(of.model.logits(ids), theirs(ids).logits)
    prompt = tokenizer("struct", return_tensors="pt").input_ids
    found = theirs.generate(prompt, max_new_tokens=20, do_sample=False)[0, 6:].tolist()
    sampler = sample.Sampler(0, temperature=0)
    ours = list(islice(sample.generate(of.model, prompt[0].tolist(), sampler), len(found)))
    assert found == ours
    assert export.main([str(run), str(folder)]) == f"error: {folder} already exists; choose another folder"


def test_an_exported_tokenizer_gives_the_same_tokens(worded, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = tokens.of_run(worded)
    export.tokenizer_of(text, CONFIGS["tiny"], transformers).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT).input_ids == text.encode(TEXT) and theirs.eos_token_id == text.end
    assert theirs.decode(text.encode(TEXT)) == TEXT


def test_what_has_no_equal_in_transformers_is_refused():
    for name, c in CONFIGS.items():
        assert (export.refusal(name, c) is None) == (name != "tiny-bias")
    assert "tiny-bias has sigmoid_renormalized with a selection bias" in export.refusal(
        "tiny-bias", CONFIGS["tiny-bias"]
    )
