"""python -m tilemoe.bench, on small layers: what it measures and leaves out, not how fast."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilemoe
from tilemoe import _library
from tilemoe.bench import __main__ as bench
from tilemoe.bench import check, machine, memory, peers, plots, report, session
from tilemoe.bench.ahead import compile_for
from tilemoe.bench.cases import CASES, Case
from tilemoe.bench.measure import CpuClock, Measured
from tilemoe.bench.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
SMALL = Case("small", T=96, d=40, n=24, E=6, K=2)
CPU_PEERS = ["tilemoe", "tilemoe-keeps-h", "tilemoe-dh-over-h", "torch-grouped_mm"]
COMPILED = "torch-grouped_mm-compiled"


def run(*words):
    bench.main([str(word) for word in words])


def shape_words(case):
    return ["--device", "cpu", "--shape", *case.shape.values()]


def test_cases_are_those_of_the_documentation():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.M)
    assert {name: tuple(map(int, sizes)) for name, *sizes in rows} == {
        case.name: tuple(case.shape.values()) for case in CASES.values()
    }


def test_cases_are_those_of_the_registry():
    """verify/registry.cpp's table of the cases for a GPU, but for those that run by name alone."""
    source = (ROOT / "verify" / "registry.cpp").read_text()
    body = source[source.index("make_bench_cases() {") : source.index("The sparser")]
    row = r'\.name = "([\w-]+)", ' + ", ".join(rf"\.{letter} = (\d+)" for letter in "TdnEK")
    found = {name: tuple(map(int, sizes)) for name, *sizes in re.findall(row, body)}
    assert len(found) == body.count(".name =")
    assert found == {
        case.name: tuple(case.shape.values()) for case in CASES.values() if case.device == "cuda"
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("zipf", [False, True])
@pytest.mark.parametrize("name", CPU_PEERS)
def test_peers_compute_the_layer(name, zipf, dtype):
    check.check(peers.all_peers()[name], "cpu", dtype, zipf)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_peer_computes_the_layer(dtype):
    check.check(peers.all_peers()[COMPILED], "cpu", dtype)


class Sabotaged(peers.TorchGroupedMM):
    name = "sabotaged"

    def backward(self, O):
        return tuple(self.spoil(list(super().backward(O))))

    @staticmethod
    def spoil(gradients):
        return gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index, tensor", list(enumerate(check.NAMES)))
def test_check_refuses(index, tensor, dtype):
    """A lost row block of each result."""

    class Peer(Sabotaged):
        def forward(self):
            O = super().forward()
            return O * (torch.arange(O.shape[0]) > 7)[:, None] if tensor == "O" else O

        @staticmethod
        def spoil(gradients):
            if tensor != "O":
                g = gradients[index - 1].clone()
                g[0] = 0
                gradients[index - 1] = g
            return gradients

    with pytest.raises(check.Wrong, match=tensor):
        check.check(Peer, "cpu", dtype)


def test_check_refuses_swapped_gate_and_up():
    class Peer(Sabotaged):
        @staticmethod
        def rows_of_W1(n):
            return torch.arange(2 * n).roll(n)

    with pytest.raises(check.Wrong, match="O is off"):
        check.check(Peer, "cpu", "float32")


def test_own_row_orders_are_undone():
    for peer in (peers.SonicMoE, peers.ScatterMoE):
        order = peer.rows_of_W1(3)
        given = torch.arange(6)
        held = peer.__new__(peer)
        held.order = order
        assert torch.equal(held.given_layout(given[order][None])[0], given)
    assert peers.SonicMoE.rows_of_W1(3).tolist() == [0, 3, 1, 4, 2, 5]
    assert peers.ScatterMoE.rows_of_W1(3).tolist() == [3, 4, 5, 0, 1, 2]


def test_tilemoe_keeps_what_the_design_says():
    for case in SMALL.granularities():
        found = memory.measure(peers.TileMoE(Problem(case)))
        pairs = case.T * case.K
        kept = 4 * (case.T * case.d + 2 * pairs * case.n)
        assert kept <= found["saved_bytes"] <= kept + 16 * pairs + 8 * case.E + 64
        assert found["peak_bytes"] > found["resident_bytes"]
    assert [case.K for case in SMALL.granularities()] == [1, 2]


def test_the_floor_is_below_every_peak_and_near_the_least():
    case = dataclasses.replace(SMALL, T=4096)
    problem = Problem(case)
    for peer in (peers.TileMoE, peers.TileMoEOverwriting, peers.TorchGroupedMM):
        found = memory.measure(peer(problem))
        assert found["resident_bytes"] < found["floor_bytes"] <= found["peak_bytes"], peer.name
        if peer is peers.TileMoEOverwriting:  # beside it are the router's part and what threads use
            above = found["floor_bytes"] - found["resident_bytes"]
            assert found["peak_bytes"] - found["floor_bytes"] <= 0.2 * above + 8 * 2**20


def test_peak_counts_every_live_tensor():
    class Peer(peers.TorchGroupedMM):
        """Holds a further 1 MiB while it runs forward."""

        def forward(self):
            ballast = torch.empty(1 << 20, dtype=torch.uint8)
            O = super().forward()
            del ballast
            return O

    problem = Problem(dataclasses.replace(SMALL, T=8))
    plain = memory.measure(peers.TorchGroupedMM(problem))
    more = memory.measure(Peer(problem))
    assert more["peak_bytes"] - plain["peak_bytes"] > 0.9 * 2**20
    assert more["saved_bytes"] == plain["saved_bytes"]


def test_table_json_and_pictures(tmp_path, capsys):
    file, folder = tmp_path / "out.json", tmp_path / "plots"
    run(*shape_words(SMALL), "--rounds", 2, "--against", "torch-grouped_mm", "sonic-moe",
        "--json", file, "--granularity", "--plots", folder)  # fmt: skip
    text, said = capsys.readouterr()
    assert "left out: sonic-moe: it runs on a GPU" in text
    ours, torchs = json.loads(file.read_text())
    assert [ours["backend"], torchs["backend"]] == ["tilemoe", "torch-grouped_mm"]
    for entry in (ours, torchs):
        assert entry["shape"] == SMALL.shape and entry["rows"] == 192 and entry["rounds"] == 2
        assert len(entry["round_times"]) == 2 and entry["fwd_ms"] > 0 and entry["bwd_ms"] > 0
        assert set(entry["host_ms"]) == {"forward", "backward"}
        assert torch.__version__.startswith(entry["versions"]["torch"])
        assert len(entry["granularity"]) == 2
    both = [[sum(r.values()) for r in e["round_times"]] for e in (ours, torchs)]
    ratios = [theirs / mine for mine, theirs in zip(*both)]
    assert ours["speed_against"]["torch-grouped_mm"] == pytest.approx(sum(ratios) / 2)
    drawn = {path.name for path in folder.iterdir()}
    assert drawn == {"throughput_float32.svg", "memory_custom.svg"}
    for peer in ("tilemoe", "torch-grouped_mm"):
        assert said.count(f"custom: memory of {peer} at n=") == 2


def test_pictures_measure_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(Measured, "kernels", lambda self: pytest.fail("kernels were measured"))
    monkeypatch.setattr(session, "_granularity", lambda *_: pytest.fail("memory was measured"))
    run(*shape_words(SMALL), "--rounds", 1, "--against", "--plots", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"throughput_float32.svg"}


def test_the_table_has_quartiles_and_the_load():
    times = [{"fwd_ms": f, "bwd_ms": 10.0} for f in (1.0, 2.0, 3.0, 4.0, 5.0)]
    entry = {"config": "a", "dtype": "float32", "shape": SMALL.shape, "device": "some CPU",
             "rounds": 5, "host_ms": {}, "tflops": None, "load_average": 1.25, "left_out": {},
             "fwd_ms": 3.0, "bwd_ms": 10.0}  # fmt: skip
    ours = {**entry, "backend": "tilemoe", "round_times": times,
            "speed_against": {"slow": 2.0}}  # fmt: skip
    slow = {**entry, "backend": "slow", "round_times": [
        {"fwd_ms": factor * sum(mine.values()) - 10, "bwd_ms": 10.0}
        for factor, mine in zip((1.0, 1.5, 2.0, 2.5, 3.0), times)]}  # fmt: skip
    _, load, header, first, second, *_ = report.table([ours, slow]).splitlines()
    assert load == f"  load average 1.2 after the rounds, on {machine.cores()} cores"
    assert header.split("  ")[-1].strip() == "quartiles"
    assert first.split()[1:5] == ["3.000", "2.000-4.000", "10.000", "10.000-10.000"]
    assert second.split()[-2:] == ["2.000", "1.500-2.500"]
    assert report.quartiles([7.0]) == (7.0, 7.0)


@pytest.mark.parametrize("load, warned", [(0.4, False), (1.0, False), (1.6, True)])
def test_a_busy_machine_is_warned_of(load, warned, monkeypatch, capsys):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    run(*shape_words(SMALL), "--rounds", 1, "--against")
    said = capsys.readouterr().err
    assert ("warning: the load average is 1.6 on 2 cores" in said) == warned


def test_the_time_is_estimated(monkeypatch, capsys):
    """After a case's first round, for its others; after a case, for the cases that follow."""
    said = []
    session.run(SMALL, [peers.TileMoE], rounds=3, say=said.append)
    after = said.index(next(line for line in said if "round 1 of 3" in line)) + 1
    assert re.fullmatch(r"small: about \d+ s for the other 2 rounds", said[after])
    twice = dataclasses.replace(SMALL, T=2 * SMALL.T)
    bench._say_what_is_left([SMALL, twice], 1, 120.0, "both")
    bench._say_what_is_left([SMALL, twice], 2, 120.0, "both")
    assert capsys.readouterr().err == "  1 of 2 cases done; about 4 min for the others\n"


def test_implementations_of_transformers_are_tested(monkeypatch, capsys):
    """deepgemm and sonicmoe are there by name wherever transformers is."""
    moe = pytest.importorskip("transformers.integrations.moe")
    kinds = {f"transformers-{kind}" for kind in ("deepgemm", "sonicmoe")}
    assert {"deepgemm", "sonicmoe"} <= set(moe.ALL_EXPERTS_FUNCTIONS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run("--list")
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {listed[kind] for kind in kinds} == {"it runs on a GPU"}
    assert listed["transformers-eager"] == listed["transformers-grouped_mm"] == "available"
    assert listed["tilemoe-sm80"] == listed["tilemoe-sm90"] == "it runs on a GPU"
    on_gpu = dataclasses.replace(SMALL, device="cuda", dtype="bfloat16")
    for kind in kinds:  # transformers' own test, on a machine without a GPU
        assert re.search("kernels|CUDA", peers.all_peers()[kind].missing(on_gpu))


@pytest.mark.parametrize(
    "passes, keys",
    [("forward", {"fwd_ms"}), ("backward", {"bwd_ms"}), ("inference", {"fwd_ms"})],
)
def test_passes(passes, keys):
    (entry,) = session.run(SMALL, [peers.TileMoE], passes=passes, rounds=1)
    assert entry["round_times"][0].keys() == keys
    assert ("saved_bytes" in entry) == (passes == "backward")


def test_rounded_case_runs_alone():
    case = dataclasses.replace(SMALL, rounding="nearest")
    (entry,) = session.run(case, [peers.TileMoE, peers.TorchGroupedMM], rounds=1)
    assert entry["left_out"] == {"torch-grouped_mm": "it has no token rounding"}


def test_wrong_and_failing_peers_are_left_out():
    class Wrong(Sabotaged):
        name = "wrong"

        @staticmethod
        def spoil(gradients):
            return [2 * g for g in gradients]

    class Failing(peers.TorchGroupedMM):
        name = "failing"

        def forward(self):
            raise MemoryError("the machine said no\nand more")

    class Large(peers.TorchGroupedMM):
        name = "large"

        @staticmethod
        def working_bytes(case):
            return 1 << 60

    (entry,) = session.run(SMALL, [peers.TileMoE, Wrong, Failing, Large], rounds=1)
    assert entry["left_out"]["wrong"].startswith("wrong results: dX is off by 1.0e+00")
    assert entry["left_out"]["failing"] == "MemoryError: the machine said no"
    assert entry["left_out"]["large"].startswith("it needs some 1073741824.")


def test_a_wrong_tilemoe_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(peers.TileMoE, "backward", lambda self, O: [
        torch.zeros_like(g) for g in peers.Peer.backward(self, O)])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        run(*shape_words(SMALL), "--rounds", 1, "--against")
    assert ended.value.code == 1
    assert "error: tilemoe: wrong results: dX is off" in capsys.readouterr().err


def test_peer_in_another_python():
    entries = session.run(
        SMALL, [peers.TileMoE, peers.TorchGroupedMM, peers.ScatterMoE], rounds=2, threads=1,
        places={name: session.Place() for name in ("torch-grouped_mm", "scattermoe")},
    )  # fmt: skip
    ours, torchs = entries
    assert torchs["backend"] == "torch-grouped_mm" and torchs["threads"] == 1
    assert torchs["fwd_ms"] == pytest.approx(
        sum(r["fwd_ms"] for r in torchs["round_times"]) / 2
    )
    assert ours["left_out"] == {"scattermoe": "it runs on a GPU"}
    ratios = [a["bwd_ms"] / b["bwd_ms"] for a, b in zip(ours["round_times"], torchs["round_times"])]
    assert ours["time_of_peers"]["torch-grouped_mm"]["bwd_ms"] == pytest.approx(sum(ratios) / 2)


@pytest.fixture
def kits(monkeypatch):
    """[kit]: what every call of the layer ran with, by a stand-in for the choice of one."""
    chosen, seen = ["auto"], []
    monkeypatch.setattr(peers.TileMoESm80, "devices", ("cpu", "cuda"))
    moe, grad = tilemoe.moe, torch.autograd.grad
    monkeypatch.setattr(tilemoe, "set_kit", lambda kit: chosen.__setitem__(0, kit), raising=False)
    for module, name, call in ((tilemoe, "moe", moe), (torch.autograd, "grad", grad)):
        watched = lambda *a, call=call, **k: (seen.append(chosen[0]), call(*a, **k))[1]
        monkeypatch.setattr(module, name, watched)
    return seen


def test_a_kit_is_chosen_for_its_peer_alone(kits):
    problem = Problem(SMALL)
    for name, kit in (("tilemoe-sm80", "sm80"), ("tilemoe", "auto"), ("tilemoe-sm90", "sm90")):
        kits.clear()
        peer = peers.all_peers()[name](problem)
        peer.backward(peer.forward())
        assert kits == [kit, kit]  # forward and backward
    with pytest.raises(RuntimeError):
        peer.backward(torch.ones_like(problem.X))  # no gradient leads anywhere
    kits.clear()
    peers.TileMoE(problem).forward()
    assert kits == ["auto"]


def test_kits_take_turns(kits):
    classes = [peers.TileMoE, peers.TileMoESm90, peers.TileMoESm80]
    entries = session.run(SMALL, classes, rounds=2)
    assert [entry["backend"] for entry in entries] == ["tilemoe", "tilemoe-sm90", "tilemoe-sm80"]
    assert set(kits) == {"auto", "sm90", "sm80"} and entries[0]["left_out"] == {}


def test_a_tilemoe_without_kits_says_so(monkeypatch):
    monkeypatch.delattr(tilemoe, "set_kit", raising=False)
    reason = "this tilemoe has no kits to choose from"
    assert peers.TileMoESm80.missing(SMALL) == peers.TileMoESm90.missing(SMALL) == reason


def test_dense_products_are_the_layers():
    """As many operations forward and in both passes, each product a torch.mm."""
    case = dataclasses.replace(SMALL, T=7)
    problem = Problem(case)
    dense = peers.TorchDense(problem)
    with FlopCounterMode(display=False) as forward:
        O = dense.forward()
    with FlopCounterMode(display=False) as backward:
        dA, dW2, dX, dW1 = dense.backward(O)
    assert forward.get_total_flops() == case.flop("forward")
    assert backward.get_total_flops() == case.flop("backward")
    M, d, n = case.rows, case.d, case.n
    shapes = [tuple(t.shape) for t in (O, dA, dW2, dX, dW1)]
    assert shapes == [(M, d), (M, n), (d, n), (M, d), (2 * n, d)]
    assert torch.equal(dense.rows[3], problem.X[1]) and torch.equal(dense.d_rows[13], problem.dO[6])


def test_a_yardstick_is_timed_and_not_held_to_the_formula():
    ours, dense = session.run(SMALL, [peers.TileMoE, peers.TorchDense], rounds=1)
    assert dense["fwd_ms"] > 0 and dense["bwd_ms"] > 0 and "peak_bytes" not in dense
    assert "peak_bytes" in ours and ours["left_out"] == {}


def test_peers_that_run_only_if_named(capsys, monkeypatch):
    found = []
    monkeypatch.setattr(session, "run", lambda case, classes, **_: found.extend(classes) or [])
    monkeypatch.setattr(bench, "table", lambda entries: "")
    run(*shape_words(SMALL))
    names = {peer.name for peer in found}
    assert {"tilemoe", "torch-grouped_mm", "scattermoe"} <= names
    assert not names & {"tilemoe-sm80", "tilemoe-keeps-h", "tilemoe-before", "torch-dense", "scattermoe-sm80"}


def test_scattermoe_has_variables_in_a_process_of_its_own(tmp_path, capsys, monkeypatch):
    """On the CPU what its process says is another thing than what this one does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/triton")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache/inductor")
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    assert peers.ScatterMoE.variables() == {
        "TRITON_CACHE_DIR": "/cache/triton/scattermoe",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor/scattermoe",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    assert peers.ScatterMoESm80.variables() == {
        "TRITON_CACHE_DIR": "/cache/triton/scattermoe-sm80",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor/scattermoe-sm80",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_OVERRIDE_ARCH": "sm80",
    }
    words = [*shape_words(SMALL), "--rounds", 1, "--against", "scattermoe-sm80"]
    run(*words)
    assert "scattermoe-sm80: it needs a process of its own" in capsys.readouterr().out
    run(*words, "--packages", f"scattermoe-sm80={tmp_path}")
    assert "scattermoe-sm80: it runs on a GPU" in capsys.readouterr().out


def test_scattermoe_says_which_instructions_its_ptx_has(tmp_path, monkeypatch):
    mma, wgmma = "  mma.sync.aligned.m16n8k16\n", "  wgmma.fence.sync.aligned;\n"
    for index, text in enumerate((mma + mma, wgmma, "ld.global;", mma + wgmma)):
        file = tmp_path / "scattermoe-sm80" / str(index) / "kernel.ptx"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    held = peers.ScatterMoESm80.__new__(peers.ScatterMoESm80)
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "scattermoe-sm80"))
    assert held.settings == {
        "TRITON_OVERRIDE_ARCH": "sm80", "kernels": 4, "with wgmma": 2, "with mma.sync": 2,
    }  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert held.settings == {}, "others' kernels were counted"


def test_kernels_are_told_where_asked_for(tmp_path):
    """Those of a GPU; a CPU has none to tell."""
    place = session.Place()
    classes = [peers.TileMoE, peers.TorchGroupedMM]
    for kernels in (False, True):
        entries = session.run(
            SMALL, classes, rounds=1, kernels=kernels, places={"torch-grouped_mm": place}
        )
        assert [entry.get("kernels") for entry in entries] == [{} if kernels else None] * 2


def test_kernels_are_medians_of_calls(monkeypatch):
    """By stand-ins for the profiler's answers: one kernel is in two calls of three alone."""
    answers = iter([{"a": 1.0}, {"b": 4.0}, {"a": 3.0, "c": 1.0}, {"b": 5.0}, {"a": 2.0, "c": 2.0}, {"b": 9.0}])
    held = Measured.__new__(Measured)
    held.peer = SimpleNamespace(
        X=SimpleNamespace(device=SimpleNamespace(type="cuda")), forward=None, backward=None
    )
    held.passes = "both"
    monkeypatch.setattr(held, "_profiled", lambda work: (next(answers), None), raising=False)
    assert held.kernels() == {"forward": {"a": 2.0, "c": 1.5}, "backward": {"b": 5.0}}


@pytest.fixture
def other_build(tmp_path):
    """A folder with this package, as `pip install --target` leaves it, but for its commit."""
    package, libraries = Path(tilemoe.__file__).parent, _library.directory()
    folder = tmp_path / "before" / "tilemoe"
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__", "lib"))
    (folder / "lib").mkdir()
    for library in libraries.glob("libtilemoe_torch*.so"):
        (folder / "lib" / library.name).symlink_to(library)
    (folder / "lib" / "commit.txt").write_text("0123456789ab\n")
    return folder.parent


def test_another_build_takes_turns(other_build):
    place = session.Place(packages=other_build)
    entries = session.run(
        SMALL, [peers.TileMoE, peers.TileMoEBefore], rounds=2, places={"tilemoe-before": place}
    )
    ours, before = entries
    assert before["backend"] == "tilemoe-before" and before["commit"] == "0123456789ab"
    assert ours["commit"] != before["commit"]
    assert set(ours["time_of_peers"]["tilemoe-before"]) == {"fwd_ms", "bwd_ms"}


def test_a_process_that_ends_is_left_out(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    places = {"torch-grouped_mm": session.Place(packages=tmp_path)}
    (ours,) = session.run(SMALL, [peers.TileMoE, peers.TorchGroupedMM], rounds=1, places=places)
    assert ours["left_out"]["torch-grouped_mm"].endswith("ended with status 3")


def test_peers_compile_ahead():
    """The smallest case first; where one cannot run, the others do."""
    said = []
    larger = dataclasses.replace(SMALL, name="larger", E=8, rounding=None)
    places = {"torch-grouped_mm": session.Place(), "scattermoe": session.Place()}
    classes = [peers.TileMoE, peers.TorchGroupedMM, peers.ScatterMoE]
    compile_for([larger, SMALL], classes, places, said.append)
    assert [re.sub(r", \d+ s", "", line) for line in said] == [
        "small: torch-grouped_mm compiled", "larger: torch-grouped_mm compiled",
        "small: scattermoe is left out: it runs on a GPU",
        "larger: scattermoe is left out: it runs on a GPU",
    ]  # fmt: skip


def test_the_command_of_all_peers(tmp_path, other_build):
    """benchmarks/gpu_peers.py on the CPU, with this process's package;
    tests/python/gpu_peers_test.py has what it does besides."""
    out = tmp_path / "peers.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_peers.py", "--device", "cpu", "--out", out,
               "--rounds", "2", "--config", "cpu-t512", "--before", other_build, "--cache",
               tmp_path / "cache", "--seconds", "3000", "--against", "tilemoe-keeps-h",
               "tilemoe-before", "torch-grouped_mm"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(tilemoe.__file__).parents[1])}
    environment["TILEMOE_LIBRARY_DIR"] = str(_library.directory())
    said = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stdout + said.stderr
    (item,) = json.loads(out.read_text())["items"]
    names = [entry["backend"] for entry in item["report"]]
    assert names == ["tilemoe", "tilemoe-keeps-h", "tilemoe-before", "torch-grouped_mm"]
    ours = item["report"][0]
    assert ours["left_out"] == {} and set(ours["time_of_peers"]) == set(names[1:])
    assert re.search(r"cpu-t512 +tilemoe-before .*tilemoe over it: fwd_ms \d", said.stdout)


def test_pictures_of_steps_and_of_kernels(tmp_path):
    """The C++ bench's steps, and kernels as a GPU's entries have them."""
    shape = {"shape": SMALL.shape, "rows": 192, "dtype": "bfloat16", "device": "some GPU"}
    entries = [
        {"config": "a", "backend": "tilemoe-cuda", "fwd_ms": 1.0, "bwd_ms": 2.0, **shape,
         "steps": {"router": {"ms": 0.25}, "up_projection": {"ms": 0.75}}},
        {"config": "a", "backend": "sonic-moe", "fwd_ms": 1.5, "bwd_ms": 2.5, **shape,
         "kernels": {"forward": {"nvjet_a": 0.5, "cutlass_b": 1.5}, "backward": {"b": 3.0}}},
    ]  # fmt: skip
    file = tmp_path / "in.json"
    file.write_text(json.dumps(entries))
    run("--from", file, "--plots", tmp_path)
    picture = (tmp_path / "kernels_a.svg").read_text()
    drawn = re.findall(r"<text[^>]*> ?([^<]*)</text>", picture)
    assert {"TileMoE", "sonic-moe", "0.75", "1.00 ms", "2.00", "3.00", "5.00 ms"} <= set(drawn)
    kinds = ["up-projection", "router and routing", "other matrix products", "other"]
    assert [text for text in drawn if text in plots.KINDS] == kinds
    assert (tmp_path / "throughput_bfloat16.svg").exists()


@pytest.mark.parametrize(
    "words, status, sentence",
    [
        (["--config", "cpu-t9"], 2, "--config cpu-t9: not one of cpu-t4096"),
        (["--against", "megablocks"], 2, "--against megablocks: not one of tilemoe"),
        (["--python", "megablocks=python3"], 2, "--python megablocks: not one of"),
        (["--packages", "tilemoe-before=/nowhere"], 2, "--packages tilemoe-before=/nowhere: no such"),
        (["--rounds", "0"], 2, "--rounds: at least 1"),
        (["--json", "/proc/nowhere/out.json"], 1, "--json /proc/nowhere/out.json"),
        (["--from", "nowhere.json", "--plots", "."], 1, "nowhere.json"),
        (["--from", "nowhere.json"], 2, "--from draws: --plots says where to"),
        (["--device", "cuda"], 1, "--device cuda: torch sees no GPU here"),
    ],
)
def test_errors(words, status, sentence, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        run(*words)
    assert ended.value.code == status
    assert re.search(f"^tilemoe.bench: error: .*{re.escape(sentence)}", capsys.readouterr().err)


def test_list_names_what_a_missing_peer_takes(capsys, monkeypatch):
    there = peers.importlib.util.find_spec
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda n: None if n == "transformers" else there(n)
    )
    run("--list")
    text = capsys.readouterr().out
    assert "cpu-t4096" in text and "qwen3-235b" in text
    assert re.search(r"transformers +not installed: pip install transformers==5.17", text)


def test_tiles_of_sonic_moe_are_kept_before_it_lists_them(monkeypatch):
    """Its kernels' list is made where it is imported: by stand-ins for its modules."""
    config = lambda m, n, **of: SimpleNamespace(
        tile_m=m, tile_n=n, **{"pingpong": True, "swap_ab": False, "device_capacity": 9} | of
    )
    good = config(128, 192)
    every = [config(192, 128), config(128, 192, swap_ab=True), good, config(128, 256)]
    quack, gemm_config = ModuleType("quack"), ModuleType("quack.gemm_config")
    quack.gemm_config = gemm_config
    gemm_config.get_all_configs = lambda *_: every
    listed = []

    class AtImport(ModuleType):
        def __getattr__(self, name):
            listed.append(gemm_config.get_all_configs("gated"))
            return name

    enums = ModuleType("sonicmoe.enums")
    enums.ActivationType = SimpleNamespace(SWIGLU="swiglu")
    modules = {"quack": quack, "quack.gemm_config": gemm_config, "sonicmoe.enums": enums}
    modules |= {"sonicmoe": ModuleType("sonicmoe"), "sonicmoe.functional": AtImport("functional")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    peers.SonicMoE(Problem(SMALL))
    assert [good] in listed and every not in listed


def test_caches_are_cold_and_the_order_turns(monkeypatch):
    """Every timed pass follows a flush, and each peer is first in turn."""
    seen = []
    flush = CpuClock.timed
    monkeypatch.setattr(CpuClock, "REST_SECONDS", 0)
    monkeypatch.setattr(
        CpuClock, "timed", lambda self, work: (seen.append(work), flush(self, work))[1]
    )
    session.run(SMALL, [peers.TileMoE, peers.TorchGroupedMM], rounds=2)
    owners = [work.__self__.name for work in seen if hasattr(work, "__self__")]
    assert owners == ["tilemoe", "torch-grouped_mm", "torch-grouped_mm", "tilemoe"]
    assert len(seen) == 8


def test_kernels_have_names_for_people():
    tile = "a::TileShape<__nv_bfloat16, 128, 256, (a::Schedule)0, 1>"
    gemm = f"a::GroupedGemm<{tile}, a::GatheredRows<{tile} >, a::ActivationEpilogue<{tile}, 0> >"
    named = {
        f"void a::grouped_gemm<{gemm} >({gemm}::Params)": "up-projection",
        "void a::(anonymous namespace)::combine_rows<b::X, 1>(a::Params)": "combine",
        "nvjet_sm90_tst_128x192": "other matrix products",
        "up_projection": "up-projection",
        "activation_gradient": "activation gradient",
        "vectorized_gather_kernel": "gather, scatter, sort",
        "vectorized_elementwise_kernel": "elementwise",
        "Memset": "other",
    }
    assert {name: plots.kind(name) for name in named} == named
