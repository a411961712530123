"""examples/pretrain on the CPU: it learns, continues where it was, alone and in two processes, and
survives being killed in the middle of a save."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain"
sys.path.append(str(EXAMPLE))

import corpus  # noqa: E402
import launcher  # noqa: E402
import sources  # noqa: E402
from data import Corpus  # noqa: E402

STEPS, SAVED = 24, 4
RUN = f"--steps {STEPS} --save-every {SAVED} --keep 9 --evaluate-every {STEPS}".split()
RUN += "--precision float32 --deterministic --batch 8 --micro-batch 2".split()


def launch(folder, data, *options, processes=1, config="tiny", program=(EXAMPLE / "train.py",)):
    command = [*launcher.python(processes), *program]
    command += ["--config", config, "--data", data, "--output", folder, *RUN, *options]
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,  # so that a test may kill all of it
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def steps(folder):
    """{step: its record}, the last one where a step was done twice, without its time."""
    records = {r["step"]: r for r in log(folder) if "step" in r}
    return {s: {k: v for k, v in r.items() if k != "tokens_per_s"} for s, r in records.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    corpus.build(folder, sources.files([ROOT / "docs", ROOT / "include"]), validation=0.2)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """{processes: folder of a run that nothing interrupted}."""
    folders = {}
    for processes in (1, 2):
        folders[processes] = tmp_path_factory.mktemp("whole") / "run"
        done = launch(folders[processes], data, processes=processes)
        assert done.returncode == 0, done.stderr
    return folders


def from_step(step, whole, folder):
    """A run's folder as it was after a step."""
    name = Path("checkpoints") / f"step-{step:09d}"
    shutil.copytree(whole / name, folder / name)
    return folder


def test_it_learns(whole):
    losses = [record["loss"] for record in steps(whole[1]).values()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.4
    validation = [r["validation_loss"] for r in log(whole[1]) if "validation_loss" in r]
    assert len(validation) == 1 and validation[0] < losses[0] - 0.4


def compare(ours, theirs, equal):
    done = steps(ours)
    assert sorted(done) == list(range(SAVED + 1, STEPS + 1))
    for step, record in done.items():
        reference = steps(theirs)[step]
        assert record["batch"] == reference["batch"]
        assert equal(record, reference), (record, reference)


@pytest.mark.long
def test_reducing_after_each_micro_batch_is_the_same_step(whole, data, tmp_path):
    """With gathered copies kept; gathered again it is test_another_number_of_processes_continues."""
    folder = from_step(SAVED, whole[2], tmp_path)
    done = launch(folder, data, "--reduce", "micro-batch", "--keep-gathered", processes=2)
    assert done.returncode == 0, done.stderr
    compare(folder, whole[2], lambda a, b: abs(a["loss"] - b["loss"]) <= 1e-5 * b["loss"])


@pytest.mark.parametrize("processes", [1, 2])
def test_as_many_processes_go_on_with_the_same_bits(whole, data, tmp_path, processes):
    folder = from_step(SAVED, whole[processes], tmp_path)
    done = launch(folder, data, processes=processes)
    assert done.returncode == 0, done.stderr
    assert log(folder)[0]["resumed"] == SAVED
    compare(folder, whole[processes], lambda a, b: a == b)


@pytest.mark.long
@pytest.mark.parametrize("before, after, reduce", [(2, 1, "step"), (1, 2, "micro-batch")])
def test_another_number_of_processes_continues(whole, data, tmp_path, before, after, reduce):
    """Reducing gradients after each micro-batch is the same step."""
    folder = from_step(SAVED, whole[before], tmp_path)
    done = launch(folder, data, "--reduce", reduce, processes=after)
    assert done.returncode == 0, done.stderr
    keys = ("loss", "balance", "z")  # reduced over processes
    close = lambda a, b: all(abs(a[key] - b[key]) <= 1e-5 * b[key] for key in keys)
    compare(folder, whole[before], close)
    validation = [
        next(r["validation_loss"] for r in log(run) if "validation_loss" in r)
        for run in (folder, whole[before])
    ]
    assert abs(validation[0] - validation[1]) <= 1e-5 * validation[1]


KILLED = """
import os, signal, sys
sys.path.insert(0, {example!r})
import checkpoints, train

save, rename = checkpoints.dcp.save, os.rename

def killed():
    os.killpg(0, signal.SIGKILL)

def half_a_save(state, checkpoint_id):
    save(state, checkpoint_id=checkpoint_id)
    if state["progress"]["step"] == 12:
        os.truncate(next(checkpoint_id.glob("*.distcp")), 100)
        (checkpoint_id / ".metadata").unlink(missing_ok=True)
        killed()

def no_rename(source, target):
    killed() if target.name.endswith("12") else rename(source, target)

if sys.argv.pop(1) == "write":
    checkpoints.dcp.save = half_a_save
else:
    checkpoints.os.rename = no_rename
sys.exit(train.main())
"""


@pytest.mark.parametrize("moment, processes", [("write", 2), ("rename", 1)])
def test_a_job_killed_in_a_save_loses_the_steps_since_the_last(
    whole, data, tmp_path, moment, processes
):
    program = tmp_path / "killed.py"
    program.write_text(KILLED.format(example=str(EXAMPLE)))
    folder = tmp_path / "run"
    done = launch(folder, data, processes=processes, program=(program, moment))
    assert done.returncode != 0
    assert max(steps(folder)) == 12  # the step whose save was cut
    left = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert left == ["step-000000004", "step-000000008", "step-000000012.partial"]

    done = launch(folder, data, processes=processes)
    assert done.returncode == 0, done.stderr
    assert [r["resumed"] for r in log(folder) if "resumed" in r] == [8]
    assert steps(folder) == steps(whole[processes])
    assert not list((folder / "checkpoints").glob("*.partial"))


POISONED = """
import sys
sys.path.insert(0, {example!r})
import train

step = train.Run.train

def poisoned(run):
    if run.step == 6:
        run.model.norm.weight.data.to_local().fill_(float("nan"))
    return step(run)

train.Run.train = poisoned
sys.exit(train.main())
"""


def test_a_loss_that_is_not_a_number_stops_the_run(whole, data, tmp_path):
    program = tmp_path / "poisoned.py"
    program.write_text(POISONED.format(example=str(EXAMPLE)))
    folder = from_step(SAVED, whole[1], tmp_path / "run")
    done = launch(folder, data, program=(program,))
    assert done.returncode == 1
    good = folder / "checkpoints" / "step-000000004"
    assert "step 7: loss nan, gradient norm nan" in done.stderr
    assert f"batch: sequences 48 to 55; last good checkpoint: {good}" in done.stderr
    last = log(folder)[-1]
    assert last == {"not_finite": 7, "sequences": [48, 55], "last_good": str(good)}


def test_a_gradient_that_is_not_a_number_stops_the_run(whole, data, tmp_path):
    folder = from_step(SAVED, whole[1], tmp_path)
    # Step 5 is done, 6 overflows.
    done = launch(folder, data, "--learning-rate", "1e38", "--change-options")
    assert done.returncode == 1
    assert re.search(r"step 6: loss \S+, gradient norm (nan|inf);", done.stderr)


@pytest.mark.long
def test_only_the_last_checkpoints_are_kept(data, tmp_path):
    done = launch(tmp_path, data, "--keep", "2", "--steps", "12")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000008", "step-000000012"]
    other = launch(tmp_path, data, "--seed", "1")
    assert other.returncode == 1 and "error: a checkpoint requires its own" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.long
@pytest.mark.parametrize("precision", ["mixed", "bfloat16"])
def test_bfloat16_learns(data, tmp_path, precision):
    done = launch(tmp_path, data, "--precision", precision, "--recompute", "blocks")
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in steps(tmp_path).values()]
    assert losses[-1] < losses[0] - 0.4


@pytest.mark.long
def test_the_selection_bias_is_one_over_two_processes(data, tmp_path):
    """Experts are chosen by a bias that the counts of the whole step moved: with each process'
    own counts the losses would part."""
    runs = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        done = launch(folder, data, "--bias-rate", "0.05", processes=processes, config="tiny-bias")
        assert done.returncode == 0, done.stderr
        runs[processes] = steps(folder)
    for step, record in runs[1].items():
        assert abs(runs[2][step]["loss"] - record["loss"]) <= 1e-5 * record["loss"]


@pytest.mark.long
def test_the_log_has_the_counts_of_routing(whole, data, tmp_path):
    """The same of one process and of two, which share the micro-batches."""
    bounded = ["--capacity", "0.75", "--routing-tokens", "32", "--steps", "4"]
    runs = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        done = launch(folder, data, *bounded, processes=processes)
        assert done.returncode == 0, done.stderr
        runs.append(steps(folder))
    keys = ("load", "pairs_dropped", "pairs_added", "tokens_without")
    for step, record in runs[0].items():
        assert record["T"] == runs[1][step]["T"] == 32
        assert 1 < record["load"] < 4 and 0.05 < record["pairs_dropped"] < 0.9
        assert record["pairs_added"] == 0 and 0 <= record["tokens_without"] < 0.5
        for key in keys:
            assert runs[1][step][key] == pytest.approx(record[key], abs=2e-3)  # experts may differ
    for record in steps(whole[1]).values():
        assert record["T"] == 64 and all(record[key] == 0 for key in keys[1:])


def test_tensorboard_has_what_the_log_has(data, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = launch(tmp_path, data, "--tensorboard", "--steps", "2", "--evaluate-every", "2")
    assert done.returncode == 0, done.stderr
    (events,) = tmp_path.glob("events.out.tfevents.*")
    written = events.read_bytes()
    for name in (b"loss", b"gradient_norm", b"tokens_per_s", b"validation_loss"):
        assert name in written


def test_an_epoch_has_every_window_once(data):
    c = Corpus(data, "train", 32, seed=3)
    epochs = [[c.window(e * c.windows + i) for i in range(c.windows)] for e in (0, 1)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(c.windows))
    assert epochs[0] != epochs[1]
    numbers = range(5, 9)
    again = Corpus(data, "train", 32, seed=3)
    assert torch.equal(c.sequences(numbers), again.sequences(numbers))
    row = c.sequences([5])[0]
    start = c.window(5) * 32
    assert row.tolist() == c.shards[0][start : start + 33].tolist()
