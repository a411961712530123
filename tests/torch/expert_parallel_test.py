"""Experts spread over one, two and four processes on this machine (gloo): the processes run every
scenario once; each is a test here."""

import functools
import pathlib
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

import expert_parallel_one_gpu as one_gpu
import expert_parallel_training as training
import expert_parallel_worker as worker
import launcher
import tilemoe
import tilemoe.expert_parallel
from checks import start
from module_support import same_bits
from processes import launch, of_world
from tilemoe.distributed import cost
from tilemoe.options import Options
from tilemoe.bench import records

WORLDS = (1, 2, 4)
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "expert_parallel.py"
pytestmark = pytest.mark.cpu


def of(world, *more):
    """A test with N processes; with four only in a long run."""
    return pytest.param(world, *more, marks=[pytest.mark.long] * (world == 4))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """-> what runs the processes once: world -> folder, for each rank {scenario: what went wrong}."""
    done = {}

    def of(world):
        if world not in done:
            folder = tmp_path_factory.mktemp(f"world{world}")
            names = [scenario.__name__ for scenario in of_world(worker.SCENARIOS, world)]
            done[world] = folder, launch(pathlib.Path(worker.__file__), names, world, folder, "cpu")
        return done[world]

    return of


@pytest.mark.parametrize(
    "world, scenario",
    [of(w, s.__name__) for w in WORLDS for s in of_world(worker.SCENARIOS, w)],
)
def test_ranks(job, world, scenario):
    for rank, result in enumerate(job(world)[1]):
        assert not result[scenario], f"rank {rank}: {result[scenario]}"


@pytest.mark.parametrize("world, name", [of(2, "checkpoint"), of(4, "checkpoint"), of(4, "of_four")])
def test_a_checkpoint_of_ranks_is_loaded_by_one(job, world, name):
    folder, _ = job(world)
    moe = training.plain_layer()
    state = moe.state_dict()
    dcp.load(state, checkpoint_id=folder / name, no_dist=True)
    moe.load_state_dict(state)
    same_bits(moe.state_dict(), torch.load(folder / "whole.pt", weights_only=True))


@pytest.mark.parametrize("links, found", [("shared", 7), ("nccl", 3)])
def test_rows_are_read_in_the_peers_memory(tmp_path, links, found):
    """As on GPUs, in files that two processes map; links: of ranks that share a GPU, or not."""
    only = "^(memory|calls_of|the_same_bits|nothing|transfers|no_tokens|exchanges)"
    if links == "nccl":
        only = "^(memory|the_same_bits|exchanges)"
    scenarios = of_world(one_gpu.SCENARIOS, 2)
    names = [s.__name__ for s in scenarios if re.search(only, s.__name__)]
    program = pathlib.Path(one_gpu.__file__)
    results = launch(program, names, 2, tmp_path, "cpu", only, links=links)
    for rank, result in enumerate(results):
        assert len(result) == found and not any(result.values()), f"rank {rank}: {result}"


def test_the_example_learns():
    """In two processes."""
    done = start(*launcher.python(2), EXAMPLE, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"loss (\S+)\n", done.stdout))
    assert after < 0.9 * before


def test_the_plans_sizes():
    """Places by hand: of every routing by default, of the mean, and one rank's own."""
    plan = tilemoe.expert_parallel.plan
    sizes = dict(T=64, d=32, n=16, E=8, K=3)
    assert plan(**sizes, ranks=2).places == 64 * 2 * 3
    assert plan(**sizes, ranks=4).places == 64 * 4 * 2
    assert plan(**sizes, ranks=2, capacity_factor=None) == plan(**sizes, ranks=2)
    assert plan(**sizes, ranks=2, capacity_factor=1.5).places == 64 * 3 * 1.5
    assert plan(**sizes, ranks=1).places == plan(**sizes, ranks=1, capacity_factor=1.5).places == 64 * 3
    kept = [plan(**sizes, ranks=2, keep_gathered=keep).kept for keep in (False, True)]
    assert kept[1] - kept[0] == 2 * 2 * 64 * 32
    with pytest.raises(ValueError, match="E must be a multiple of the 3 ranks, got 8"):
        plan(**sizes, ranks=3)
    wide = dict(sizes, n=128)
    in_fp8 = [plan(**wide, ranks=2, recipe="fp8", save_h=save_h).kept for save_h in (None, "fp8")]
    assert in_fp8[0] - in_fp8[1] == 64 * 2 * 3 * (4 * 128 - (2 * 128 + 8))
    with pytest.raises(ValueError, match="recipe must be bf16, fp8 or fp8_forward in a plan, got"):
        plan(**sizes, ranks=2, recipe="auto")
    with pytest.raises(NotImplementedError, match="quantised weights require chunks=1"):
        plan(**wide, ranks=2, recipe="fp8", chunks=2)
    assert "288 pairs" in str(plan(**sizes, ranks=2, capacity_factor=1.5))


REAL = {"qwen3-235b": (4096, 1536, 128, 8), "30b-n256": (4096, 256, 256, 16)}  # d, n, E, K


@pytest.mark.parametrize("layer", REAL)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_model_of_chunks(layer, ranks):
    """In one chunk X, O and dO are waited for as a whole; "auto" takes what the model finds best."""
    sizes, rates, T = REAL[layer], cost.Rates(), 32768
    exposed = lambda chunks, T=T: cost.exposed_ms(T, *sizes, ranks, chunks, 2, rates)  # noqa: E731
    leaving = (ranks - 1) * T * 4096 * 2 * 1e-6
    whole = leaving * (2 / rates.gather_gb_per_s + 1 / rates.return_gb_per_s) + 3 * rates.latency_ms
    assert exposed(1) == pytest.approx(whole)
    best = cost.best_chunks(T, *sizes, ranks, 2)
    assert exposed(best) == min(map(exposed, range(1, 9)))
    assert best == 1 if ranks < 8 else exposed(best) < 0.95 * exposed(1)
    assert cost.best_chunks(64, *sizes, ranks, 2) == 1
    assert exposed(64, T=64) > exposed(1, T=64)
    given = dict(zip(("T", "d", "n", "E", "K"), (T, *sizes)), ranks=ranks)
    plan = tilemoe.expert_parallel.plan
    assert plan(**given, chunks="auto") == plan(**given, chunks=best)
    assert best == 1 or plan(**given, chunks=best) != plan(**given)
    # If GEMMs take no time, nothing is hidden, and every chunk costs its latency.
    idle = rates._replace(tflop_per_s=1e9)
    of_idle = [cost.exposed_ms(T, *sizes, ranks, c, 2, idle) for c in (1, 2, 4)]
    assert of_idle == sorted(of_idle)


def test_the_model_of_pulling(monkeypatch):
    """If reading is fast, few experts per token are pulled, many gathered; "auto" uses it if all is
    on one host."""
    best_way, Way = cost.best_way, cost.Way
    few, many = (32768, 4096, 3072, 64, 2), (32768, *REAL["qwen3-235b"])
    assert best_way(*few, 4, 2, 1) == Way(1, False)
    fast = cost.Rates(pull_gb_per_s=330)
    for chunks in (1, 4):
        assert best_way(*few, 4, 2, chunks, fast) == Way(1, True)
    assert best_way(*many, 2, 2, 1, fast) == Way(1, False) == best_way(*few, 1, 2, 1, fast)
    assert cost.pull_ms(*few, 4, 2) < 0.6 * cost.pull_ms(*many, 4, 2)
    monkeypatch.setattr(cost, "best_way", functools.partial(best_way, rates=fast))
    options = Options(dispatch="auto", chunks=4)
    for local, world, way in (("4", "4", Way(1, True)), ("4", "8", Way(4, False))):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        monkeypatch.setenv("WORLD_SIZE", world)
        assert cost.way_of(options, *few, 4, torch.bfloat16) == way
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cost.way_of(options, *few, 4, torch.bfloat16) == Way(4, False)
    given = dict(zip(("T", "d", "n", "E", "K"), few), ranks=4)
    plan = tilemoe.expert_parallel.plan
    assert plan(**given, dispatch="pull", device="cpu").kept < plan(**given, keep_gathered=True).kept
    with pytest.raises(ValueError, match="chunks must be 1 or 'auto' with dispatch='pull', got 2"):
        plan(**given, dispatch="pull", chunks=2)


@pytest.mark.parametrize("file", ["fitted", "expert_parallel"])
def test_the_model_chooses_what_was_fast_on_gpus(file):
    results, layers = pathlib.Path(__file__).parents[2] / "benchmarks" / "results", {}
    for one in records.read(results / f"{file}.jsonl"):
        part, layer = one.name.split("/", 1)
        if part == "expert-parallel":
            layer, way = layer.rsplit("/", 1)
            layers.setdefault(layer, {})[way] = one
    for layer, ways in layers.items():
        of = ways["serial"].values
        best = cost.best_chunks(*(of[letter] for letter in "TdnEK"), of["ranks"], 2)
        assert best == 1, layer  # "chunks-auto" has the number that the model chose at that time
        others = [one.median("step_ms") for way, one in ways.items() if way.startswith("chunks-")]
        assert ways["serial"].median("step_ms") <= 1.05 * min(others), layer
    assert len(layers) >= 3


def test_the_name_of_a_dimension_is_required():
    class Mesh:
        ndim = 2

    with pytest.raises(ValueError, match="expert_mesh must have one dimension, got 2"):
        tilemoe.MoE(32, 16, 4, 2, return_aux=False, expert_mesh=Mesh())
