"""examples/pretrain's study of token rounding, small: capacity drops the right pairs; runs are
paired, skip themselves when they are done, and share their work."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
sys.path.append(str(EXAMPLE))

import capacity  # noqa: E402
import corpus  # noqa: E402
import paired  # noqa: E402
import renormalized  # noqa: E402
import rounding  # noqa: E402
import sources  # noqa: E402
import tilemoe  # noqa: E402
from configs import CONFIGS  # noqa: E402
from tilemoe.bench import records  # noqa: E402
from tilemoe.options import Options  # noqa: E402


def chosen(T, E, K, seed=0):
    """scores, ids (T, K) of random logits, some scores equal and some NaN."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (T, E), generator=generator).float()
    scores, ids = logits.softmax(-1).topk(K)
    scores[T // 2, 0] = math.nan
    return scores, ids.to(torch.int32)


@pytest.mark.parametrize(
    "T, groups, E, K, max_pairs", [(24, 1, 5, 2, 6), (24, 3, 5, 2, 2), (8, 2, 4, 4, 3)]
)
def test_capacity_keeps_the_highest_scores(T, groups, E, K, max_pairs):
    scores, ids = chosen(T, E, K)
    stays, counts = capacity.kept_pairs(scores, ids, E, max_pairs, T // groups)
    assert counts.tolist() == torch.bincount(ids.flatten(), minlength=E).tolist()
    expected = torch.zeros(T, K, dtype=torch.bool)
    for group in range(groups):
        for e in range(E):
            first = group * T // groups
            of_expert = (ids[first : first + T // groups] == e).nonzero() + torch.tensor([first, 0])
            score = lambda pair: -math.inf if scores[pair].isnan() else float(scores[pair])
            pairs = sorted(map(tuple, of_expert.tolist()), key=lambda pair: (-score(pair), pair))
            for pair in pairs[:max_pairs]:
                expected[pair] = True
    assert torch.equal(stays, expected) and not stays.all()


def tiny_layer(kind, **change):
    """Experts of a kind, x (32, d) and logits (32, E), and the configuration."""
    c = dataclasses.replace(CONFIGS["tiny"], routing_tokens=16, **change)
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    experts = kind(c)
    torch.manual_seed(2)
    experts.reset_parameters()
    return experts, normal(32, c.d), normal(32, c.E).requires_grad_(), c


def check_layer(out, experts, x, logits, weight):
    """out (32, d) and its gradient are those of the experts, one by one, by weight (32, E)."""
    W1, W2 = experts.gate_up_proj, experts.down_proj
    expected = torch.zeros_like(x)
    for t, e in weight.detach().nonzero().tolist():
        gate, up = (W1[e] @ x[t]).chunk(2)
        expected[t] += weight[t, e] * (W2[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    dO = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (mine,) = torch.autograd.grad((out * dO).sum(), logits)
    (want,) = torch.autograd.grad((expected * dO).sum(), logits)
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


def test_dropped_pairs_have_no_part_in_output_and_gradient():
    experts, x, logits, c = tiny_layer(capacity.Bounded, capacity=0.5)
    routing = dict(options=Options(K=c.K, scoring=c.scoring), selection_bias=None)
    out, aux = experts(x, logits, None, **routing)
    scores, ids = logits.topk(c.K)
    scores = scores.softmax(-1)
    max_pairs = math.ceil(0.5 * 16 * c.K / c.E)
    stays, counts = capacity.kept_pairs(scores, ids, c.E, max_pairs, 16)
    assert aux.dropped == (~stays).sum() > 0 and aux.added == 0
    assert aux.without == (~stays.any(dim=1)).sum()
    assert torch.equal(aux.expert_counts, counts)
    weight = torch.zeros_like(logits).scatter(1, ids, torch.where(stays, scores, 0))
    check_layer(out, experts, x, logits, weight)
    plain, aux = experts.eval()(x, logits, None, **routing)
    assert aux.dropped == 0 and not torch.equal(plain, out)


def test_renormalized_scores_add_up_to_one():
    change = dict(rounding="nearest", m=8, renormalize=True)
    experts, x, logits, c = tiny_layer(renormalized.Renormalized, **change)
    given = dict(rounding="nearest", m=8, rounding_tokens=16)
    options = Options(K=c.K, scoring=c.scoring, **given)
    routing = dict(options=options, selection_bias=None, seed=None, offset=None)
    out, aux = experts(x, logits, None, **routing)
    tokens, ids, _ = tilemoe.rounded_router(logits, c.K, **given)
    has = torch.zeros(32, c.E, dtype=torch.bool)
    for t, e in zip(tokens.tolist(), ids.tolist()):
        if t < 32:
            has[t, e] = True
    chosen = torch.zeros_like(has).scatter(1, logits.topk(c.K).indices, True)
    assert aux.dropped == (chosen & ~has).sum() > 0 and aux.added == (has & ~chosen).sum() > 0
    assert aux.without == (~has.any(dim=1)).sum()
    assert torch.equal(aux.expert_counts.long(), chosen.sum(0))
    p = torch.where(has, logits.exp(), 0)
    check_layer(out, experts, x, logits, p / p.sum(dim=1, keepdim=True).clamp(min=1e-30))
    plain, aux = experts.eval()(x, logits, None, **routing | {"rounds": False})
    assert aux.dropped == 0 and not torch.equal(plain, out)


def test_names_are_the_runs():
    runs = rounding.STUDY.runs()
    assert len(set(map(str, runs))) == len(runs)
    assert [rounding.STUDY.named(str(run)) for run in runs] == runs
    wanted = {
        (model, method, seed)
        for model in ("S1", "S2")
        for method, seeds in [("top_k", 5), ("nearest", 5), *((m, 3) for m in rounding.STUDY.methods)]
        for seed in range(seeds)
    }
    assert {(run.model, run.method, run.seed) for run in runs} == wanted
    for model in ("S1", "S2"):
        tiles = {run.tiles for run in runs if run.model == model and run.method == "nearest"}
        assert tiles == {1, 2, 4, 8}
        c = CONFIGS[model]
        for run in runs:
            if run.model == model and run.tiles:
                assert rounding.STUDY.routing_tokens(run) * c.K == run.tiles * c.E * c.m
    for wrong in ("S1-top_k-2-s0", "S1-nearest-s0", "S4-up-2-s0", "S1-sideways-2-s0"):
        with pytest.raises(ValueError):
            rounding.STUDY.named(wrong)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    corpus.build(folder, sources.files([EXAMPLE.parents[1] / "docs"]), validation=0.2)
    return folder


OPTIONS = ["--tokens", "8192", "--batch", "32", "--precision", "float32"]
OPTIONS += ["--learning-rate", "0.01"]


def study(data, out, *arguments):
    command = [sys.executable, EXAMPLE / "rounding.py", "--data", data, "--out", out]
    return subprocess.run(
        list(map(str, [*command, *OPTIONS, *arguments])),
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


NAMES = [
    "tiny-top_k-s0", "tiny-nearest-1-s0", "tiny-stochastic-2-s0", "tiny-capacity-1-s0",
    "tiny-nearest-1-s1",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """Results file that two processes wrote together."""
    out = tmp_path_factory.mktemp("study") / "rounding.jsonl"
    done = study(data, out, "--runs", *NAMES, "--gpus", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["name"] for line in done.stdout.splitlines()) == sorted(NAMES)
    return out


def test_runs_of_a_seed_are_paired(finished):
    values = {line.name.removeprefix("rounding/"): line.values for line in records.read(finished)}
    assert sorted(values) == sorted(NAMES)
    pairing = {name: (v["initial"], v["batches"]) for name, v in values.items()}
    assert len(set(pairing.values())) == 2
    assert len({pairing[name] for name in NAMES if name.endswith("s0")}) == 1
    for name, v in values.items():
        assert v["steps"] == 8 and v["T"] == (512 if "-1-" in name else 1024)
        assert v["loss"] < v["mean_loss"] - 0.1
        changed = v["mean_pairs_dropped"], v["mean_pairs_added"]
        if v["method"] == "top_k":
            assert changed == (0, 0) and "loss_as_trained" not in v
        else:
            assert (changed[0] > 0) and (changed[1] > 0) == (v["method"] != "capacity")
            assert v["loss_as_trained"] != v["loss"]
    losses = {name: (v["mean_loss"], v["loss"]) for name, v in values.items()}
    assert losses["tiny-top_k-s0"] != losses["tiny-nearest-1-s0"] != losses["tiny-capacity-1-s0"]
    assert "| tiny | `nearest` | 1 | 1 |" in rounding.STUDY.table(rounding.STUDY.lines_of(finished))


def test_a_finished_run_is_left_out(finished, data, capsys):
    before = finished.read_bytes()
    again = study(data, finished, "--runs", *NAMES)
    assert again.returncode == 0 and again.stdout == "", again.stderr
    late = study(data, finished, "--runs", "tiny-up-1-s0", "--seconds", "0.01")
    assert late.returncode == 0 and late.stdout == "", late.stderr
    assert finished.read_bytes() == before
    assert rounding.STUDY.main(["--out", str(finished), "--runs", NAMES[0], "tiny-up-1-s0", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{NAMES[0]} finished", "tiny-up-1-s0 "]


def some_runs(differences, **changed):
    """Top-K, and `nearest` at two tiles, whose losses are larger by these percentages."""
    made = {}
    for seed, more in enumerate(differences):
        for method, tiles, factor in (("top_k", None, 1), ("nearest", 2, 1 + more / 100)):
            run = paired.Named("S1", method, tiles, seed)
            values = {"initial": seed, "batches": 7, "steps": 916, "tokens_of_step": 131072}
            values |= {"validation_tokens": 2_000_000, "options": ""}
            values |= {"loss": (2.0 + seed / 10) * factor}
            values |= {"mean_pairs_dropped": 0.0625, "mean_pairs_added": 0.056}
            values |= changed if tiles else {}
            made[run] = records.Measurement(f"rounding/{run}", "a GPU", {}, "abc", values)
    return made


@pytest.mark.parametrize(
    "differences, off",
    [
        # Student's t with two degrees of freedom: 4.303 times a deviation of 0.1 over sqrt(3).
        ((0.1, 0.2, 0.3), "+0.20 ± 0.25"),
        ((0.3, 0.4, 0.5), "+0.40 ± 0.25"),
        ((0.2, 0.2), "+0.20 ± 0.00"),
        ((0.4,), "+0.40"),
        ((math.nan, 0.1, 0.2), "+nan ± nan"),
    ],
)
def test_paired_differences(differences, off):
    rows = rounding.STUDY.table(some_runs(differences)).splitlines()[2:]
    assert rows == [f"| S1 | `nearest` | 2 | {len(differences)} | {off} | 6.2 | 5.6 |"]


@pytest.mark.parametrize("key", ["initial", "batches", "steps", "options"])
def test_what_is_no_pair_is_refused(key):
    with pytest.raises(ValueError, match=f"S1-nearest-2-s0 and .*S1-top_k-s0 must have the same {key}"):
        rounding.STUDY.table(some_runs((0.1,), **{key: [1]}))
