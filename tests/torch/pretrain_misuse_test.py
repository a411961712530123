"""examples/pretrain against mistakes: a second process, a corpus that changed, options that changed,
numbers that are none. In one process: torchrun's start costs seconds."""

import ast
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checks import refused

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "pretrain"))

import checkpoints  # noqa: E402
import corpus  # noqa: E402
import data as shards  # noqa: E402
import parallel  # noqa: E402
import run as job  # noqa: E402
import sources  # noqa: E402
import train  # noqa: E402
from configs import Refusal  # noqa: E402

ALONE = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    corpus.build(folder, sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2)
    return folder


@pytest.fixture
def launch(data, tmp_path, monkeypatch):
    """Runs the command without a process of its own -> its exit status."""
    for name, value in ALONE.items():
        monkeypatch.setenv(name, str(value))
    tiny = "--config tiny --precision float32 --batch 2 --evaluate-batches 1 --save-every 1".split()

    def launched(*options, folder=tmp_path / "run", data=data):
        own = ["--data", data, "--output", folder, *options]
        return train.main([*tiny, *map(str, own)])

    yield launched
    torch.set_float32_matmul_precision("highest")


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def names(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_a_second_training_is_refused_and_removes_nothing(launch, tmp_path):
    folder = tmp_path / "run"
    half = folder / "checkpoints" / "step-000000012.partial"
    half.mkdir(parents=True)
    first = checkpoints.locked(folder / "checkpoints")
    assert launch() == f"error: another process is training in {folder}"
    assert half.exists() and not (folder / "log.jsonl").exists()
    del first
    assert launch("--steps", 1) == 0
    assert names(folder) == ["step-000000001"]


def test_options_that_decide_change_on_purpose_alone(launch, tmp_path, capsys):
    folder = tmp_path / "run"
    assert launch("--steps", 1) == 0
    last = folder / "checkpoints" / "step-000000001"
    other = ["--steps", 2, "--learning-rate", 0.5, "--clip", 2, "--rounding", "nearest"]
    other += ["--weight-decay", 0]
    assert launch(*other) == (
        f"error: {last} was trained with learning_rate 0.001, weight_decay 0.1, clip 1.0, rounding "
        "None, this run has learning_rate 0.5, weight_decay 0.0, clip 2.0, rounding nearest; "
        "pass --change-options to continue with this run's options"
    )
    capsys.readouterr()
    assert launch(*other, "--change-options") == 0
    said = capsys.readouterr().out
    assert f"resuming from {last}\n" in said and "changed: clip 1.0, now 2.0\n" in said
    changed = {"learning_rate": [0.001, 0.5], "weight_decay": [0.1, 0.0], "clip": [1.0, 2.0]}
    resumed = next(record for record in log(folder) if "resumed" in record)
    assert resumed["changed"] == changed | {"rounding": [None, "nearest"]}
    refused = launch("--seed", 1, "--change-options")
    assert refused.endswith("step-000000002 has seed 0, this run has seed 1")


def test_H_in_fp8_is_trained_and_is_an_option_that_decides(launch, tmp_path):
    """The last --config counts."""
    wide = ["--config", "tiny-wide", "--recipe", "fp8", "--evaluate-every", 9]
    plain, codes = tmp_path / "plain", tmp_path / "codes"
    assert launch(*wide, "--steps", 2, folder=plain) == 0
    assert launch(*wide, "--steps", 2, "--save-h", "fp8", folder=codes) == 0
    one, other = ([record["loss"] for record in log(folder)[:2]] for folder in (plain, codes))
    assert one[0] == other[0] and one[1] != other[1]  # the same forward, other gradients
    why = launch(*wide, "--steps", 3, folder=codes)
    assert "was trained with save_h fp8, this run has save_h None" in why
    assert launch("--save-h", "fp8") == (
        "error: --save-h fp8 requires --recipe fp8, got --recipe bf16"
    )


def test_a_checkpoint_with_fewer_options_is_compared_by_those():
    """Those of earlier versions have a list, without the options that decide."""
    run = SimpleNamespace(args=SimpleNamespace(change_options=False))
    now = dict(zip(job.IDENTITY, ["tiny", 2, 8, 2, 0, "of the corpus"])) | {"clip": 1.0}
    before = ["tiny", 2, 8, 2, 0, "of the corpus"]
    assert job.Run.changed(run, "folder", before, now) == {}
    with pytest.raises(Refusal, match="folder has batch 4, this run has batch 8"):
        job.Run.changed(run, "folder", ["tiny", 2, 4, 2, 0, "of the corpus"], now)


@pytest.mark.parametrize("what", ["gradient", "parameter", "moment"])
def test_what_is_not_finite_is_not_saved(launch, tmp_path, monkeypatch, what):
    """The third step goes wrong; with --keep 1 a save of it would leave no good checkpoint."""
    inner_clip, inner_train = job.clip, job.Run.train

    def clip(parameters, largest):
        if what == "gradient" and len(log(tmp_path / "run")) == 2:
            parameters[-1].grad.to_local()[0] = torch.nan
        return inner_clip(parameters, largest)

    def step(run):
        record = inner_train(run)
        parameter = next(run.model.parameters())
        if what != "gradient" and run.step == 3:
            of = parameter if what == "parameter" else run.optimizer.state[parameter]["exp_avg_sq"]
            of.detach().to_local()[0] = torch.inf
        return record

    monkeypatch.setattr(job, "clip", clip)
    monkeypatch.setattr(job.Run, "train", step)
    assert launch("--steps", 4, "--keep", 1, "--evaluate-every", 9) == 1
    assert names(tmp_path / "run") == ["step-000000002"]
    last = log(tmp_path / "run")[-1]
    assert last["not_finite"] == 3 and last["sequences"] == [4, 5]
    assert last["last_good"].endswith("step-000000002")


# ---------------------------------------------------------------- the corpus


@pytest.fixture
def copy(data, tmp_path):
    ignored = shutil.ignore_patterns("verified.json")
    return Path(shutil.copytree(data, tmp_path / "copy", ignore=ignored))


def damaged(folder, how):
    path, manifest = folder / "train-00000.bin", folder / "manifest.json"
    tokens = np.fromfile(path, "<u2")
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-2])
    elif how == "missing":
        path.unlink()
    elif how == "changed":
        tokens[7] ^= 1
        tokens.tofile(path)
    elif how == "past the vocabulary":
        tokens[7] = 257
        tokens.tofile(path)
    elif how == "no manifest":
        manifest.write_text(manifest.read_text()[:-100])


DAMAGES = {
    "truncated": "train-00000.bin has [0-9]+ bytes, expected [0-9]+ tokens of two bytes",
    "missing": "train-00000.bin is missing",
    "changed": "train-00000.bin differs from manifest.json",
    "past the vocabulary": "train-00000.bin has token 257, expected tokens below the vocabulary 257",
    "no manifest": "manifest.json must be the manifest of a corpus",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_corpus_that_is_not_its_manifest_is_refused(copy, how):
    shards.verify(copy)
    damaged(copy, how)
    refused(Refusal, DAMAGES[how], shards.verify, copy)


def test_a_run_holds_its_corpus_to_the_manifest(launch, copy):
    damaged(copy, "changed")
    assert "train-00000.bin differs from manifest.json" in launch(data=copy)


def test_shards_are_read_again_only_where_they_changed(copy, monkeypatch):
    read, chunks = [], shards.chunks
    monkeypatch.setattr(shards, "chunks", lambda t: (read.append(len(t)), chunks(t))[1])
    files = sorted(copy.glob("*.bin"))
    shards.verify(copy)
    assert len(read) == len(files) > 1
    shards.verify(copy)
    assert len(read) == len(files)
    files[0].touch()
    shards.verify(copy)
    assert len(read) == len(files) + 1
    (copy / "verified.json").write_text("[]")
    shards.verify(copy)
    assert len(read) == 2 * len(files) + 1


def command(*arguments):
    """corpus.py's exit status and what it said, without a process of its own."""
    with pytest.raises(SystemExit) as raised:
        corpus.main(list(map(str, arguments)))
    return raised.value.code


def texts(folder, content):
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{content} {i}")
    return folder


def test_a_folder_continues_with_its_own_sources(tmp_path, monkeypatch, capsys):
    a, b = texts(tmp_path / "a", "one"), texts(tmp_path / "b", "other")
    out, options = tmp_path / "out", ["--bytes", "--validation", 0.2]
    with monkeypatch.context() as stopped:
        stopped.setattr(corpus, "tokens_of", lambda *_: 1 / 0)  # after the text was gathered
        with pytest.raises(ZeroDivisionError):
            corpus.main(list(map(str, [out, a, *options])))
    assert command(out, b, *options) == 1
    said = capsys.readouterr().err
    assert f"has a corpus with origin {{'files': ['{a}']}}, not {{'files': ['{b}']}}" in said
    monkeypatch.chdir(tmp_path)
    corpus.main(list(map(str, [out, "a", *options])))  # the same folder
    assert (out / "manifest.json").exists()


def test_no_more_is_read_of_a_large_file_than_says_so(tmp_path):
    folder = texts(tmp_path / "a", "one")
    with open(folder / "sparse", "wb") as file:
        file.truncate(20 << 30)
    sizes = {Path(name).name: len(content) for name, content in sources.files([folder], 100)}
    assert sizes["sparse"] == 101 and sizes["0.txt"] == 5
    manifest = corpus.build(tmp_path / "out", sources.files([folder]), validation=0.2)
    assert manifest["left out"]["too large"] == 1


# ---------------------------------------------------------------- options


def test_an_option_is_written_out(capsys):
    """train.py has no --device, which is no abbreviation of --device-gib; the error is one line."""
    own = ["--config", "tiny", "--data", "data", "--output", "output"]
    for wrong, why in (
        (["--device", "cuda"], "unrecognized arguments: --device cuda"),
        (["--places", "2"], "--places requires --expert-parallel"),
    ):
        with pytest.raises(SystemExit) as ended:
            train.arguments([*own, *wrong])
        assert ended.value.code == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f": error: {why} (" in said and said.endswith(" --help lists the options)")


def test_no_command_takes_an_abbreviation():
    parsers = 0
    for folder in ("examples", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                    parsers += 1
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert given.get("allow_abbrev") == "False", f"{path}:{node.lineno}"
    assert parsers > 10


def test_small_models_take_one_thread_of_a_cpu(monkeypatch):
    """Unless OMP_NUM_THREADS says otherwise; larger models and GPUs' processes take torch's."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        torch.set_num_threads(3)
        assert parallel.set_threads(24_256, gpu) == 3
        assert parallel.set_threads(29_900_000, cpu) == 3
        assert parallel.set_threads(24_256, cpu) == torch.get_num_threads() == 1
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert parallel.set_threads(24_256, cpu) == 3
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "option, values",
    [
        ("--learning-rate", ("nan", "inf", "-1", "1e", "")),
        ("--clip", ("0", "nan", "-inf")),
        ("--capacity", ("0", "nan")),
        ("--steps", ("-1", "1.5", "1e3", "1_000", " 1")),
        ("--batch", ("0", "-2")),
        ("--micro-batch", ("0",)),
        ("--save-every", ("0",)),
        ("--keep", ("0",)),
        ("--evaluate-every", ("0",)),
        ("--log-every", ("0",)),
        ("--ctas-per-sm", ("0", "17")),
        ("--seed", ("-1", str(2**32))),
    ],
)
def test_trainings_numbers_are_in_range(option, values, capsys):
    own = ["--config", "tiny", "--data", "data", "--output", "output"]
    for value in values:
        with pytest.raises(SystemExit):
            train.arguments([*own, f"{option}={value}"])
        assert f"error: argument {option}: expected a" in capsys.readouterr().err


def test_the_older_option_of_ctas_per_sm_warns(capsys):
    own = ["--config", "tiny", "--data", "data", "--output", "output"]
    assert train.arguments(own).ctas_per_sm == 1
    assert train.arguments([*own, "--ctas-per-sm", "4"]).ctas_per_sm == 4
    assert capsys.readouterr().err == ""
    assert train.arguments([*own, "--block-turns", "4"]).ctas_per_sm == 4
    warning = "warning: --block-turns is the older name of --ctas-per-sm\n"
    assert capsys.readouterr().err.endswith(warning)
    with pytest.raises(SystemExit):
        train.arguments([*own, "--block-turns", "4", "--ctas-per-sm", "4"])


@pytest.mark.parametrize(
    "option, values",
    [
        ("--megabytes", ("nan", "inf", "0", "-1")),
        ("--validation", ("nan", "1", "-0.1")),
        ("--largest", ("0", "1e6")),
        ("--vocabulary", ("0", "many")),
    ],
)
def test_the_corpus_numbers_are_in_range(tmp_path, option, values, capsys):
    for value in values:
        assert command(tmp_path / "out", tmp_path, f"{option}={value}") == 2
        assert f"error: argument {option}: expected a" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
