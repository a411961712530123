"""examples/pretrain whose processes share the experts: it trains as the same model without it, goes
on where it was, and with another number of processes."""

import dataclasses

import pytest
from pretrain_test import SAVED, data, from_step, launch, log, steps  # noqa: F401

import plan
from configs import CONFIGS

TOGETHER = ["--expert-parallel", 2]
KEYS = ("loss", "balance", "z", "gradient_norm")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, data):  # noqa: F811
    folder = tmp_path_factory.mktemp("shared") / "run"
    done = launch(folder, data, *TOGETHER, processes=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):  # noqa: F811
    """One process, whose micro-batches are those of two."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = launch(folder, data, "--micro-batch", 4)
    assert done.returncode == 0, done.stderr
    return folder


def close(ours, theirs, first):
    records, references = steps(ours), steps(theirs)
    assert sorted(records) == list(range(first, 25))
    for step, record in records.items():
        reference = references[step]
        assert record["batch"] == reference["batch"] and record["T"] == reference["T"] == 128
        assert record["pairs_without_place"] == 0
        for key in KEYS:
            assert abs(record[key] - reference[key]) <= 1e-4 * reference[key], (step, key)
    validation = [
        next(r["validation_loss"] for r in log(run) if "validation_loss" in r)
        for run in (ours, theirs)
    ]
    assert abs(validation[0] - validation[1]) <= 1e-5 * validation[1]


def test_it_trains_as_without_it(shared, alone):
    """In float32 the two differ in the order of sums alone."""
    close(shared, alone, 1)
    first, *_, last = steps(shared).values()
    assert last["loss"] < first["loss"] - 0.4


@pytest.mark.long
def test_it_continues_with_the_same_bits(shared, data, tmp_path):  # noqa: F811
    folder = from_step(SAVED, shared, tmp_path)
    done = launch(folder, data, *TOGETHER, processes=2)
    assert done.returncode == 0, done.stderr
    assert log(folder)[0]["resumed"] == SAVED
    whole = steps(shared)
    assert steps(folder) == {step: whole[step] for step in range(SAVED + 1, 25)}


@pytest.mark.long
def test_it_continues_without_it(shared, data, tmp_path):  # noqa: F811
    """A checkpoint of two processes that share the experts, in one that has all."""
    folder = from_step(SAVED, shared, tmp_path)
    done = launch(folder, data, "--micro-batch", 4)
    assert done.returncode == 0, done.stderr
    close(folder, shared, SAVED + 1)


@pytest.mark.long
def test_a_first_run_loses_nothing(data, tmp_path):  # noqa: F811
    """The README's, by defaults alone: its experts are not balanced yet in the first steps."""
    options = "--batch 64 --micro-batch 32 --learning-rate 1e-2 --precision mixed".split()
    done = launch(tmp_path, data, *options, *TOGETHER, processes=2)
    assert done.returncode == 0, done.stderr
    records = steps(tmp_path).values()
    assert len(records) == 24 and all(r["pairs_without_place"] == 0 for r in records)


def test_a_pair_without_a_place_stops_the_run(data, tmp_path):  # noqa: F811
    """The reason is in torchrun's own account of the failure, too: a user sees that last."""
    done = launch(tmp_path, data, "--expert-parallel", 2, "--places", 0.5, processes=2)
    assert done.returncode == 1
    of_run, _, root_cause = done.stderr.partition("Root Cause")
    why = " exceeded the expert capacity of --places 0.5; use a larger --places"
    assert why in of_run and root_cause.count(why) == 1


def test_what_it_cannot_share_is_refused(data, tmp_path):  # noqa: F811
    done = launch(tmp_path, data, "--expert-parallel", 2)
    assert done.returncode != 0
    assert "--expert-parallel must divide 1 processes and 8 experts, got 2" in done.stderr


def test_the_plan_has_both_sizes():
    """64 tokens of a process, two experts each: all pairs of two processes, or 1.5 times 128."""
    of = plan.Plan(CONFIGS["tiny"], "tilemoe", "none", "mixed", False, 4, 2)
    text = plan.table("tiny", of, plan.Job(10, 8, 2), 79 * plan.GIB)
    assert "processes 4, 2 of them share the experts" in text
    assert "places for every routing: 256 pairs: " in text
    assert "places by --places 1.5: 192 pairs: " in text
    less = dataclasses.replace(of, places=1.5)
    assert less.kept(2) < of.kept(2)
    assert less.kept(2) - of.kept(2) == 2 * (less.layer(2, 2, 1.5).kept - of.layer(2, 2, None).kept)


def test_the_plan_counts_what_is_kept():
    """More than alone by the experts' own share of it, in the blocks that keep it."""
    alone, half = (plan.Plan(CONFIGS["tiny"], "tilemoe", how, "mixed", False, 2) for how in ("none", "half"))
    more = {}
    for of in (alone, half):
        together = dataclasses.replace(of, together=2)
        more[of.recompute] = together.kept(2) - of.kept(2)
    assert more["none"] == 2 * more["half"] > 0
