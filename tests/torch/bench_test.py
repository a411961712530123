"""python -m tilemoe bench, on small layers: what it measures and leaves out, not how fast."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilemoe
from tilemoe import _library, state_dict
from tilemoe.bench import check, cli, fp8, huggingface_config, kernels, machine, measure, memory
from tilemoe.bench import peers, records, report, rounding, router, session
from tilemoe.bench.layers import LAYERS
from tilemoe.bench.measure import CpuClock, LeftOut
from tilemoe.bench.problem import CASES, Case, Problem

SMALL = Case("small", T=96, d=40, n=24, E=6, K=2)
SHAPE = ["--device", "cpu", "--shape", *SMALL.shape.values()]
CPU_PEERS = ["tilemoe", "tilemoe-keeps-h", "tilemoe-dh-over-h", "torch-grouped_mm"]


class Here:
    """A worker without a process: a stand-in for session.Worker."""

    def __init__(self, peer, case, settings):
        self.peer, self.rounds, self.commands = peer, [], []
        commands = iter(self.commands.pop, None)
        self.answers = measure.answers(peer, case, vars(settings), commands)

    def request(self, command):
        self.commands.append(command)
        answer = next(self.answers)
        if reason := answer.get("left_out"):
            raise LeftOut(reason)
        return json.loads(json.dumps(answer))

    def close(self):
        pass


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(CpuClock, "REST_SECONDS", 0)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(session.run, "__kwdefaults__", None)
    monkeypatch.setattr(session.run, "__defaults__", (lambda line: None, Here))


def run(*words):
    return cli.run([str(word) for word in words])


def measured(classes, case=SMALL, say=lambda line: None, **settings):
    settings = session.Settings(**{"rounds": 1, **settings})
    return session.run(case, classes, settings, say, start=Here)


def test_readme_has_every_peer_and_only_layers_that_exist():
    page = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
    layers, listed = page.split("## Layers")[1].split("## Peers")
    listed = listed.split("\n## ")[0]
    named = re.findall(r"`([a-z0-9][\w.-]+)`", re.sub(r"\[`.*?`\]", "", layers))
    assert len(named) > 3 and set(named) <= {*CASES}
    prefixes = []
    for row in re.findall(r"^- (`.*?):", listed, re.MULTILINE):
        first, *others = re.findall(r"`(.*?)`", row)
        family = "tilemoe" if first.startswith("tilemoe") else first
        prefixes += [first, *(family + name if name[0] == "-" else name for name in others)]
    exact = {name for name in prefixes if not name.endswith("...")}
    families = tuple(name[:-3] for name in prefixes if name.endswith("..."))
    assert exact <= {*peers.PEERS}
    assert {name for name in peers.PEERS if not name.startswith(families)} == exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [{}, {"zipf": True}, {"activation": "geglu"}], ids=str)
@pytest.mark.parametrize("name", CPU_PEERS)
def test_peers_compute_the_layer(name, case, dtype):
    check.check(peers.PEERS[name], device="cpu", dtype=dtype, **case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_peer_computes_the_layer(dtype):
    check.check(peers.PEERS["torch-grouped_mm-compiled"], dtype=dtype)


ADAPTERS = {"frozen": True, "lora_rank": 8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [{"frozen": True}, ADAPTERS], ids=str)
@pytest.mark.parametrize("name", ["tilemoe", "torch-grouped_mm", "torch-grouped_mm-compiled"])
def test_peers_compute_the_layer_with_frozen_weights(name, case, dtype):
    check.check(peers.PEERS[name], dtype=dtype, **case)


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nf4", "nf4-double", "nvfp4"])
def test_peers_with_quantized_weights(format):
    make = peers.PEERS[f"tilemoe-{format}"]
    of_case = dict(d=64, n=32, dtype="bfloat16", **ADAPTERS)
    check.check(make, **of_case)
    case = dataclasses.replace(SMALL, **of_case)
    assert make.missing(SMALL).startswith("quantised weights require --frozen") and not make.missing(case)
    peer = make(Problem(case))
    wide = peer.W1.nbytes + peer.W2.nbytes
    narrow = sum(weight.nbytes for weight in peer.narrow)
    assert peer.resident_bytes() == peer.problem.resident_bytes() - wide + narrow
    assert narrow < 0.52 * wide


RECIPES = [f"tilemoe-recipe-fp8{kind}" for kind in ("", "-each", "-forward", "-save-h")]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("of_case", [{}, {"n": 144}, {"frozen": True}, {"biases": True}], ids=str)
def test_peers_with_a_recipe(name, of_case):
    """128 does not divide 144: gate and up are two tensors, and dW1 is a pair until it is compared."""
    of_case = {"dtype": "bfloat16", **of_case}
    check.check(peers.PEERS[name], **of_case)
    peer = peers.PEERS[name](check.small_problem(**of_case))
    assert len(peer.masters) == (2 if "n" in of_case else 1)
    codes = sum(one.nbytes for one in peer.codes)
    assert peer.resident_bytes() == peer.problem.resident_bytes() + codes
    assert torch.equal(peer.codes[0].weight.dequantize(), peer.masters[0])


def test_a_recipe_has_larger_errors_than_the_layer(monkeypatch):
    monkeypatch.setattr(peers.TileMoERecipe, "tolerance", 0.0)
    with pytest.raises(check.Wrong, match="the error of O is 4"):
        check.check(peers.TileMoERecipe, dtype="bfloat16")


def test_what_a_recipe_does_not_compute():
    fp8, _, forward, _ = (peers.PEERS[name] for name in RECIPES)
    case = lambda **of: dataclasses.replace(SMALL, **{"d": 64, "n": 128, "dtype": "bfloat16", **of})
    adapted = case(frozen=True, lora_rank=8)
    assert "fp8_forward does" in fp8.missing(adapted) and not forward.missing(adapted)
    check.check(forward, dtype="bfloat16", frozen=True, lora_rank=8)
    assert "multiple of 128" in forward.missing(dataclasses.replace(adapted, n=48))
    assert "multiple of 128" in fp8.missing(case(n=48, biases=True)) and not fp8.missing(case(n=48))
    assert "multiples of 16" in fp8.missing(case(n=40))


def test_recipes_of_the_command_line(here, tmp_path, capsys):
    file = tmp_path / "fp8.jsonl"
    words = "--device cpu --dtype bfloat16 --rounds 1 --shape 32 64 48 4 2".split()
    assert run(*words, "--recipe", *peers.RECIPES, "--json", file) == 0
    names = [one.name.rpartition("/")[2] for one in records.read(file)]
    assert names == ["tilemoe", *RECIPES]
    assert "time_over_tilemoe" in records.read(file)[1].values
    assert run(*words, "--recipe", "fp16") != 0


def test_kernels_of_fp8_next_to_dense_gemms(capsys):
    assert fp8.main(["olmoe"]) == (0 if torch.cuda.is_available() else 1)
    samples = {key: [1.0, 2.0] for key in ("up_ms", "dense_ms", "quantize_x_ms", "quantize_W1_ms")}
    samples |= {"dense_fast_accum_ms": [0.5, 1.0], "copy_of_x_ms": [4.0, 4.0]}
    values = fp8.values_of(LAYERS["cuda"]["wide"], samples | {"copy_of_W1_ms": [1.0, 1.0]})
    assert values["rounds"] == 2 and values["up_rate_over_dense"] == [1.0, 1.0, 1.0]
    assert values["up_rate_over_dense_fast_accum"][1] == 0.5
    assert values["quantize_x_over_copy"][1] == 0.375 and values["quantize_W1_over_copy"][1] == 1.5
    flop = 2 * 8192 * 2 * 2048 * 2 * 3072
    assert values["up_tflop_per_s"][1] == pytest.approx(0.75 * flop * 1e-12 / 1e-3)
    kernel = "void tilemoe::cuda::sm90::grouped_gemm<GroupedGemm<..., QuantizingEpilogue<...>>>"
    assert fp8.up_projection([("other", 1.0), (kernel, 2.0)]) == 2.0
    with pytest.raises(ValueError, match="no up-projection"):
        fp8.up_projection([("other", 1.0)])


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_adapters_of_peft(kind):
    pytest.importorskip("peft")
    found = {peer.name: peer for peer in peers.all_peers().values()}
    check.check(found[f"peft-{kind}"], **ADAPTERS)


def test_the_frozen_layer_is_that_of_the_case_with_adapters():
    case = dataclasses.replace(SMALL, **ADAPTERS)
    frozen = peers.TileMoEFrozen.case_of(case)
    assert frozen == dataclasses.replace(SMALL, frozen=True)
    assert case.flop("both") == 12 * case.rows * case.d * case.n
    assert Problem(case).names == ("O", "dX", "dA1", "dB1", "dA2", "dB2")


@pytest.mark.parametrize("case", [{"activation": "reglu"}, {"T": 1}, {"T": 16, "biases": True},
                                  {"zipf": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("passes", ["both", "inference"])
def test_tilemoe_computes_further_layers(passes, case, monkeypatch):
    """In inference tilemoe.MoE does, if it has the case."""
    module, called = tilemoe.MoE.forward, []
    monkeypatch.setattr(
        tilemoe.MoE, "forward", lambda *a, **k: called.append(0) or module(*a, **k)
    )
    check.check(peers.TileMoE, passes, **case)
    has = not {"biases", "zipf"} & case.keys()
    assert bool(called) == (passes == "inference" and has)


def test_inference_with_small_T_is_one_call(monkeypatch):
    small, called = tilemoe.MoE._decode, []
    monkeypatch.setattr(tilemoe.MoE, "_decode", lambda *a, **k: called.append(0) or small(*a, **k))
    peer = peers.TileMoE(Problem(dataclasses.replace(SMALL, T=4)))
    with torch.no_grad():
        peer.infer()
    assert called


class Spoiled(peers.TorchGroupedMM):
    """With a wrong row block of one result."""

    name, wrong = "spoiled", None

    def forward(self):
        O = super().forward()
        return O * (torch.arange(O.shape[0]) > 7)[:, None] if self.wrong == "O" else O

    def backward(self, O):
        gradients = [g.clone() for g in super().backward(O)]
        if self.wrong != "O":
            gradients[self.problem.names.index(self.wrong) - 1][0] = 0
        return gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["O", "dX", "drouter", "dW1", "dW2"])
def test_check_refuses(name, dtype):
    with pytest.raises(check.Wrong, match=name):
        check.check(type("Peer", (Spoiled,), {"wrong": name}), dtype=dtype)


@pytest.mark.parametrize("name", ["O", "dX", "dA1", "dB1", "dA2", "dB2"])
def test_check_refuses_wrong_adapters(name):
    with pytest.raises(check.Wrong, match=name):
        check.check(type("Peer", (Spoiled,), {"wrong": name}), **ADAPTERS)


def test_check_refuses_swapped_gate_and_up_and_another_activation():
    class Swapped(peers.TorchGroupedMM):
        @staticmethod
        def rows_of_W1(n):
            return torch.arange(2 * n).roll(n)

    class Plain(peers.TorchGroupedMM):
        activate = staticmethod(lambda H, delta, activation: peers.glu(H, "swiglu"))

    for peer, case in ((Swapped, {}), (Plain, {"activation": "geglu_tanh"})):
        with pytest.raises(check.Wrong, match="the error of O is"):
            check.check(peer, **case)


def test_own_row_orders_are_undone():
    for peer, order in ((peers.SonicMoE, [0, 3, 1, 4, 2, 5]), (peers.ScatterMoE, [3, 4, 5, 0, 1, 2])):
        measured = peer.__new__(peer)
        measured.order = peer.rows_of_W1(3)
        assert measured.order.tolist() == order
        given = torch.arange(6)
        assert torch.equal(measured.given_layout(given[measured.order][None])[0], given)


def test_memory_is_what_the_design_says():
    case = dataclasses.replace(SMALL, T=4096)
    pairs, problem = case.rows, Problem(case)
    kept = 4 * (case.T * case.d + 2 * pairs * case.n)
    found = memory.measure(peers.TileMoE(problem))
    assert kept <= found["saved_bytes"] <= kept + 16 * pairs + 8 * case.E + 64
    for peer in (peers.TileMoE, peers.TileMoEOverwriting, peers.TorchGroupedMM):
        found = memory.measure(peer(problem))
        assert found["resident_bytes"] < found["floor_bytes"] <= found["peak_bytes"], peer.name
        if peer is peers.TileMoEOverwriting:  # above it are the router's part and what threads use
            above = found["floor_bytes"] - found["resident_bytes"]
            assert found["peak_bytes"] - found["floor_bytes"] <= 0.2 * above + 8 * 2**20
    inference = memory.measure(peers.TileMoE(problem), "inference")
    assert set(inference) == {"peak_bytes", "resident_bytes"}
    assert inference["resident_bytes"] < inference["peak_bytes"] < found["peak_bytes"]


def test_peak_counts_every_live_tensor():
    class Ballast(peers.TorchGroupedMM):
        """Holds a further 1 MiB while it runs forward."""

        def forward(self):
            ballast = torch.empty(1 << 20, dtype=torch.uint8)
            O = super().forward()
            del ballast
            return O

    problem = Problem(dataclasses.replace(SMALL, T=8))
    plain, more = (memory.measure(peer(problem)) for peer in (peers.TorchGroupedMM, Ballast))
    assert more["peak_bytes"] - plain["peak_bytes"] > 0.9 * 2**20
    assert more["saved_bytes"] == plain["saved_bytes"]


def test_table_results_file_and_last_line(tmp_path, capsys, here):
    file = tmp_path / "new" / "out.jsonl"
    assert run(*SHAPE, "--rounds", 4, "--host", "--against", "torch-grouped_mm", "--json", file) == 0
    text = capsys.readouterr().out
    ours, torchs = records.read(file)
    name = "bench/T96-d40-n24-E6-K2/"
    assert [ours.name, torchs.name] == [name + "tilemoe", name + "torch-grouped_mm"]
    for one in (ours, torchs):
        assert torch.__version__.startswith(one.versions["torch"]) and one.commit == ours.commit
        values = one.values
        assert [values[letter] for letter in "TdnEK"] == list(SMALL.shape.values())
        for key in ("forward_ms", "backward_ms", "host_forward_us", "host_backward_us", "total_ms"):
            first, median, third = values[key]
            assert 0 < first <= median <= third, key
        assert values["host_first_forward_ms"] > 0 and values["resident_bytes"] < values["peak_bytes"]
        assert values["saved_bytes"] > 0
    assert ours.versions["tilemoe"] == tilemoe.__version__
    speed = torchs.median("time_over_tilemoe")
    *_, last, written = text.splitlines()
    how = f"{speed:.2f}x faster than" if speed >= 1.005 else f"{speed:.2f}x as fast as"
    used = ours.values["peak_bytes"] / torchs.values["peak_bytes"]
    assert last == f"TileMoE: {how} torch-grouped_mm, {used:.2f}x the peak memory"
    assert written == f"written to {file}"
    assert "first forward, ms" in text


def result_of(times, left_out=None):
    """By rounds' (forward, backward) of each peer."""
    def worker(name, rounds):
        keys = ("forward_ms", "backward_ms")
        return SimpleNamespace(peer=peers.PEERS[name], rounds=[dict(zip(keys, r)) for r in rounds])

    answer = {"samples": {}, "values": {}, "kernels": [], "device": "a GPU", "versions": {}, "commit": "c"}
    workers = [worker(name, rounds) for name, rounds in times.items()]
    found = [session._measurement(SMALL, session.Settings(), w, answer, workers[0].rounds) for w in workers]
    return session.Result(SMALL, found, {}, left_out or {})


def test_ratios_are_those_of_the_rounds_and_honest():
    ours = [(f, 10.0) for f in (1.0, 2.0, 3.0, 4.0, 5.0)]
    slow = [(factor * (f + 10) - 10, 10.0) for factor, (f, _) in zip((1.0, 1.5, 2.0, 2.5, 3.0), ours)]
    fast = [(f, b - 0.04 * (f + b)) for f, b in ours]
    times = {"tilemoe": ours, "torch-grouped_mm": slow, "sonic-moe": fast, "scattermoe": ours}
    result = result_of(times, {"torch-dense": "out of memory", "transformers": "not installed: pip"})
    lines = report.of(result).splitlines()
    cells = {words[0]: words[1:] for line in lines if (words := line.split())}
    assert cells["tilemoe"][:4] == ["3.000", "2.000-4.000", "10.000", "10.000-10.000"]
    assert cells["torch-grouped_mm"][-2:] == ["2.00x", "1.50x-2.50x"]
    assert cells["torch-dense"] == ["out", "of", "memory"]
    assert "  left out: transformers: not installed: pip" in lines
    assert lines[-3:] == ["TileMoE: 2.00x faster than torch-grouped_mm", "TileMoE: 0.96x as fast as "
                          "sonic-moe", "TileMoE: 1.00x as fast as scattermoe"]  # fmt: skip
    assert records.quartiles([7.0]) == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(("kernel", "step"), [
    ("a::grouped_gemm<a::Gemm<S, load::GatheredRows<S>, load::Weights<S>, a::SwiGLUEpilogue<S>>>",
     "up-projection"),
    ("a::grouped_gemm<a::Gemm<S, load::GatheredRows<S>, load::Weights<S>, "
     "a::InterleavedActivationEpilogue<S>>>", "up-projection"),
    ("a::grouped_gemm<a::Gemm<S, load::DenseRows<S>, load::Weights<S>, a::StoreEpilogue<S>>>",
     "down-projection"),
    ("a::grouped_gemm<a::Gemm<S, load::GatheredRows<S>, load::Weights<S>, "
     "a::ActivationGradientEpilogue<S>>>", "activation gradient"),
    ("a::grouped_gemm<a::Gemm<S, load::DensePartRows<S>, load::WeightsByParts<S>, a::StoreEpilogue<S>>>",
     "input gradient"),
    ("a::grouped_gemm<a::Gemm<S, a::DensePartRows<S>, a::SummedWeights<S>, a::StoreEpilogue<S>>>",
     "input gradient"),
    ("a::grouped_gemm<a::Gemm<S, load::GatheredRowsAsK<S>, load::DenseRowsAsK<S>, "
     "a::WeightGradientEpilogue<S, float, 0>>>", "weight gradients"),
    ("a::reduce_splits<a::ReduceSplits<S, a::ExpertOrder<S>, a::WeightGradientEpilogue<S, float, 0>>>",
     "weight gradients"),
    ("tilemoe::cuda::(anonymous namespace)::rank_rows(a::Params)", "weight gradients"),
    ("tilemoe::cuda::(anonymous namespace)::count_pairs<int>(a::Params)", "routing"),
    ("tilemoe::exchange::(anonymous namespace)::sum_places<float>(a::Params)", "combine"),
])  # fmt: skip
def test_the_step_of_a_kernel(kernel, step):
    assert kernels.step(f"void {kernel}") == step


def test_the_profile_by_kernel():
    tile = "a::TileShape<__nv_bfloat16, 128, 256, (a::Schedule)0, 1>"
    gemm = f"a::GroupedGemm<{tile}, a::GatheredRows<{tile} >, a::ActivationEpilogue<{tile}, 0> >"
    named = {
        f"void a::grouped_gemm<{gemm} >({gemm}::Params)": "up-projection",
        "void a::(anonymous namespace)::combine_rows<b::X, 1>(a::Params)": "combine",
        "nvjet_sm90_tst_128x192": "other GEMMs",
        "vectorized_gather_kernel": "gather or sort",
        "vectorized_elementwise_kernel": "elementwise",
        "Memset": "others",
    }
    assert {name: kernels.step(name) for name in named} == named
    found = [["forward", name, 2.0, 10.0 * (i + 1)] for i, name in enumerate(named)]
    result = dataclasses.replace(result_of({"tilemoe": [(1.0, 2.0)]}), kernels={"tilemoe": found})
    lines = [line for line in report.of(result).splitlines() if line.startswith("  forward ")]
    assert lines[0].split()[:4] == ["forward", "60.0", "28.6", "%"] and lines[0].endswith("Memset")
    assert lines[-2].split()[4:] == ["2", "combine", "a::combine_rows<b::X,", "1>"]
    assert re.fullmatch(r"a::grouped_gemm<.*, 256, 0, 1>, 0> > >", kernels.short(next(iter(named))))


def test_kernels_are_means_of_calls(monkeypatch):
    """By stand-ins for the profiler's answers: one kernel is in two calls of three only."""
    answers = iter([[("a", 1.0), ("a", 2.0)], [("b", 4.0)], [("a", 3.0), ("c", 3.0)],
                    [("b", 5.0)], [("a", 3.0)], [("b", 9.0)]])  # fmt: skip
    measured = measure.Measured.__new__(measure.Measured)
    measured.peer, measured.passes = SimpleNamespace(forward=None, backward=None), "both"
    monkeypatch.setattr(measured, "_profiled", lambda work: (next(answers), None), raising=False)
    assert measured._kernels() == [["forward", "a", 1.33, 3.0], ["backward", "b", 1.0, 6.0],
                               ["forward", "c", 0.33, 1.0]]  # fmt: skip


@pytest.mark.parametrize("load, warned", [(1.0, False), (1.6, True)])
def test_a_busy_machine_is_warned_of(load, warned, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert bool(machine.load_warning()) == warned


@pytest.mark.parametrize(
    "passes, keys, calls",
    [("forward", {"forward_ms"}, ["forward"]), ("inference", {"forward_ms"}, ["infer"]),
     ("backward", {"backward_ms"}, ["forward", "<lambda>"])],
)  # fmt: skip
def test_passes(passes, keys, calls, monkeypatch):
    seen, timed = [], CpuClock.timed
    monkeypatch.setattr(
        CpuClock, "timed", lambda self, work: (seen.append(work.__name__), timed(self, work))[1]
    )
    (one,) = measured([peers.TileMoE], passes=passes).measurements
    assert seen == calls
    assert {key for key in one.values if key in ("forward_ms", "backward_ms")} == keys
    assert ("saved_bytes" in one.values) == (passes == "backward") and "peak_bytes" in one.values


def test_peers_that_cannot_run_are_left_out():
    class Wrong(Spoiled):
        name, wrong = "wrong", "dX"

    class Failing(peers.TorchGroupedMM):
        name = "failing"

        def forward(self):
            raise RuntimeError("the machine said no\nand more")

    class Late(peers.TorchGroupedMM):
        """Out of memory in a round."""

        name, calls = "late", 0

        def forward(self):
            Late.calls += 1
            if Late.calls > 7:
                raise MemoryError
            return super().forward()

    class Large(peers.TorchGroupedMM):
        name = "large"

        @staticmethod
        def working_bytes(case):
            return 1 << 60

    said = []
    found = measured([peers.TileMoE, Wrong, Failing, Late, Large], say=said.append, rounds=3)
    assert found.left_out.pop("wrong").startswith("wrong results: the error of dX is ")
    assert found.left_out.pop("large").startswith("out of memory: about 1073741824.")
    assert found.left_out == {"failing": "RuntimeError: the machine said no", "late": "out of memory"}
    assert [one.name for one in found.measurements] == ["bench/small/tilemoe"]
    assert "late: out of memory" in found.measurements[0].values["left_out"]
    assert any(re.fullmatch(r"small: about \d+ s for the remaining 2 rounds", line) for line in said)
    rounded = dataclasses.replace(SMALL, rounding="nearest")
    found = measured([peers.TileMoE, peers.TorchGroupedMM], rounded)
    assert found.left_out == {"torch-grouped_mm": "token rounding is not supported"}


def test_a_named_peer_that_is_left_out_is_an_error_unless_allowed(capsys, here):
    """sonic-moe needs a GPU."""
    words = [*SHAPE, "--device", "cpu", "--rounds", 1, "--against", "sonic-moe"]
    assert run(*words) == 1
    assert "sonic-moe: a GPU and bfloat16 are required" in capsys.readouterr().err
    assert run(*words, "--may-leave-out") == 0


def test_a_wrong_tilemoe_is_an_error(monkeypatch, capsys, here):
    monkeypatch.setattr(peers.TileMoE, "backward", lambda self, O: [
        torch.zeros_like(g) for g in peers.Peer.backward(self, O)])  # fmt: skip
    assert run(*SHAPE, "--rounds", 1, "--against", "none") == 1
    assert "error: not measured: T96-d40-n24-E6-K2: tilemoe: wrong results: the error of dX" in capsys.readouterr().err


def test_caches_are_cold_and_each_peer_is_first(monkeypatch):
    seen, timed, flushed = [], CpuClock.timed, []
    monkeypatch.setattr(
        CpuClock, "timed", lambda self, work: (seen.append(work), timed(self, work))[1]
    )
    flush = SimpleNamespace(add_=flushed.append)
    monkeypatch.setattr(CpuClock, "__init__", lambda self: setattr(self, "flush", flush))
    measured([peers.TileMoE, peers.TorchGroupedMM], rounds=2)
    owners = [work.__self__.name for work in seen if hasattr(work, "__self__")]
    assert owners == ["tilemoe", "torch-grouped_mm", "torch-grouped_mm", "tilemoe"]
    assert len(seen) == len(flushed) == 8


def test_dense_gemms_are_the_layers():
    """As many operations forward and in both passes; timed, and not checked against the formula."""
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
    assert [tuple(t.shape) for t in (O, dA, dW2, dX, dW1)] == [
        (M, d), (M, n), (d, n), (M, d), (2 * n, d)]  # fmt: skip
    assert torch.equal(dense.rows[3], problem.X[1]) and torch.equal(dense.d_rows[13], problem.dO[6])
    _, dense = measured([peers.TileMoE, peers.TorchDense]).measurements
    assert dense.values["forward_ms"][1] > 0 and "peak_bytes" not in dense.values


# ---------------------------------------------------------------- processes


@pytest.fixture
def other_build(tmp_path):
    """A folder with this package, as `pip install --target` leaves it, with another commit."""
    package, libraries = Path(tilemoe.__file__).parent, _library.directory()
    folder = tmp_path / "before" / "tilemoe"
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__", "lib"))
    (folder / "lib").mkdir()
    for file in libraries.glob("*"):
        if file.suffix == ".so" or file.name == "namespace.txt":
            (folder / "lib" / file.name).symlink_to(file)
    (folder / "lib" / "commit.txt").write_text("0123456789ab\n")
    return folder.parent


def test_processes_another_build_and_failures(other_build, tmp_path):
    """One peer in this Python, one of another build, one whose process ends, one that hangs."""
    for name, text in (("ends", "raise SystemExit(3)"), ("hangs", "import time; time.sleep(600)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "torch.py").write_text(text)
    places = {"tilemoe-before": session.Place(packages=other_build),
              "torch-grouped_mm": session.Place(packages=tmp_path / "ends"),
              "torch-dense": session.Place(packages=tmp_path / "hangs")}  # fmt: skip
    classes = [peers.PEERS[name] for name in ("tilemoe", *places)]
    settings = session.Settings(rounds=2, threads=1, places=places, timeout=120,
                                options={"column_blocks": 2})  # fmt: skip

    def start(peer, case, settings):
        hangs = peer is peers.TorchDense
        return session.Worker(peer, case, dataclasses.replace(settings, timeout=2) if hangs else settings)

    found = session.run(SMALL, classes, settings, start=start)
    ours, before = found.measurements
    assert before.name == "bench/small/tilemoe-before" and before.commit == "0123456789ab"
    assert ours.commit != before.commit and before.median("time_over_tilemoe") > 0
    assert found.left_out == {"torch-grouped_mm": "its process ended with status 3",
                              "torch-dense": "no answer to 'prepare' within 2 s (--timeout)"}  # fmt: skip


def test_peers_compile_ahead(monkeypatch):
    """The smallest case first, with a small T; if one cannot run, the others do."""
    said, tokens = [], []

    def start(peer, case, settings):
        tokens.append(case.T)
        return Here(peer, case, settings)

    monkeypatch.setattr(session, "Worker", start)
    larger = dataclasses.replace(SMALL, name="larger", E=8, T=2000)
    session.compile_ahead([larger, SMALL], [peers.TorchGroupedMM, peers.ScatterMoE],
                          session.Settings(), said.append)  # fmt: skip
    assert [re.sub(r", \d+ s", "", line) for line in said] == [
        "small: torch-grouped_mm compiled", "larger: torch-grouped_mm compiled",
        "small: skip scattermoe: a GPU is required",
        "larger: skip scattermoe: a GPU is required",
    ]  # fmt: skip
    assert max(tokens) == session.COMPILE_TOKENS


def environment_of(monkeypatch, peer, **settings):
    """That its process would get, and its job."""
    found = []
    monkeypatch.setattr(session.subprocess, "Popen", lambda words, env, **_: found.extend(
        [env, json.loads(words[2])]) or SimpleNamespace(stdout=[]))  # fmt: skip
    session.Worker(peer, SMALL, session.Settings(**settings))
    return found


def test_the_arch_the_options_and_the_caches_of_a_process(monkeypatch, tmp_path):
    environment, job = environment_of(monkeypatch, peers.TileMoESm80, options={"column_blocks": 2})
    assert environment["TILEMOE_ARCH"] == "sm80" and job["options"] == {}
    arch = peers.arch_variables("sm90")
    environment, job = environment_of(
        monkeypatch, peers.TileMoE, options={"column_blocks": 2}, variables=arch, cache=tmp_path
    )
    assert environment["TILEMOE_ARCH"] == "sm90" and job["options"] == {"column_blocks": 2}
    assert environment["QUACK_CACHE_DIR"] == str(tmp_path / "quack")
    environment, _ = environment_of(monkeypatch, peers.ScatterMoESm80, cache=tmp_path)
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "triton" / "scattermoe-sm80")
    assert environment["TRITON_OVERRIDE_ARCH"] == "sm80" and "TILEMOE_ARCH" not in environment


def test_a_peer_that_ran_other_kernels_is_refused(monkeypatch, tmp_path):
    ours = peers.TileMoE.__new__(peers.TileMoE)
    ours.arch = "sm80"
    assert ours.wrong_kernels(["tilemoe::f<tilemoe::Sm80>", "other<Sm90>"]) is None
    assert ours.wrong_kernels(["tilemoe::f<tilemoe::Sm90>"]) == "kernels of sm90 ran"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    scatter = peers.ScatterMoESm80.__new__(peers.ScatterMoESm80)
    for text, refused in (("ld.global;", True), ("mma.sync.aligned", False), ("wgmma.fence", True)):
        (tmp_path / "kernel.ptx").write_text(text)
        assert bool(scatter.wrong_kernels()) == refused


# ---------------------------------------------------------------- the command line


def case_of(monkeypatch, *words):
    """The cases and the settings of the command line."""
    found = []
    monkeypatch.setattr(session, "run", lambda case, classes, settings, **_: found.append(
        (case, classes, settings)) or result_of({"tilemoe": [(1.0, 2.0)]}))  # fmt: skip
    assert run("--device", "cpu", *words) == 0
    return found


def test_the_command_line_becomes_settings(monkeypatch):
    ((case, classes, settings),) = case_of(monkeypatch)
    assert case == CASES["cpu-t512"] and settings == session.Settings()
    names = {peer.name for peer in classes}
    assert {"tilemoe", "torch-grouped_mm", "torch-grouped_mm-compiled", "scattermoe"} <= names
    assert not names & {"tilemoe-sm80", "tilemoe-keeps-h", "tilemoe-before", "torch-dense", "scattermoe-sm80"}
    found = case_of(monkeypatch, "olmoe", "--tokens", "1", "16", "--dtype", "bfloat16", "--overwrite-H",
                    "--column-blocks", "4", "--pass", "forward", "--against", "none", "--zipf")  # fmt: skip
    ((adapted, *_),) = case_of(monkeypatch, "--lora-rank", "16", "--against", "none")
    assert adapted == dataclasses.replace(CASES["cpu-t512"], frozen=True, lora_rank=16)
    olmoe = dataclasses.replace(CASES["olmoe"], device="cpu", zipf=True)
    assert [case for case, *_ in found] == [
        dataclasses.replace(olmoe, name=f"olmoe-t{T}", T=T) for T in (1, 16)
    ]
    assert found[0][1] == [peers.TileMoE] and found[0][2].passes == "forward"
    assert found[0][2].options == {"overwrite_H": True, "column_blocks": 4}


CONFIGS = {
    "qwen3_moe": (dict(hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_experts=128,
                       num_experts_per_tok=8, hidden_act="silu"), (2048, 768, 128, 8, "swiglu")),
    "mixtral": (dict(hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
                     hidden_act="silu"), (4096, 14336, 8, 2, "swiglu")),
    "olmoe": (dict(hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8),
              (2048, 1024, 64, 8, "swiglu")),
    "gpt_oss": (dict(hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
                     hidden_act="silu"), (2880, 2880, 32, 4, "swiglu")),
    "deepseek_v3": (dict(hidden_size=7168, moe_intermediate_size=2048, intermediate_size=18432,
                         n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8),
                    (7168, 2048, 256, 8, "swiglu")),
    "llama4": (dict(text_config=dict(hidden_size=5120, intermediate_size=8192, num_local_experts=16,
                                     num_experts_per_tok=1, hidden_act="gelu")), (5120, 8192, 16, 1, "geglu")),
}  # fmt: skip


@pytest.mark.parametrize("model", CONFIGS)
def test_configs_of_hugging_face(model, tmp_path, monkeypatch, capsys):
    config, sizes = CONFIGS[model]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model, **config}))
    ((case, *_),) = case_of(monkeypatch, "--config", tmp_path, "--against", "none")
    assert (case.d, case.n, case.E, case.K, case.activation) == sizes
    assert case.name == model.replace("_", "-") + "-t512"
    noted = {"gpt_oss": "without its biases", "deepseek_v3": "without its shared experts"}
    assert noted.get(model, "") in (said := capsys.readouterr().err)
    assert ("without" in said) == (model in noted)


def test_config_of_transformers_agrees():
    """The sizes are those that tilemoe.state_dict reads from the same models' configurations."""
    transformers = pytest.importorskip("transformers")
    for name in ("Qwen3MoeConfig", "MixtralConfig", "OlmoeConfig", "DeepseekV3Config"):
        config = getattr(transformers, name)()
        options = state_dict.options_of(config)
        found = huggingface_config.sizes(config.to_dict(), name)[0]
        assert list(found.values()) == [options[key] for key in (
            "hidden_size", "intermediate_size", "num_experts", "top_k")], name  # fmt: skip


DENSE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize(
    "words, status, sentence",
    [
        (["cpu-t9"], 2, "layer must be one of 7b-n256, "),
        (["--against", "megablocks"], 2, "--against must be none or some of tilemoe, "),
        (["--python", "megablocks=python3"], 2, "--python must be PEER=..."),
        (["--packages", "tilemoe-before=/nowhere"], 2, "no folder found at /nowhere (--packages tilemoe-before)"),
        (["--rounds", "0"], 2, "--rounds must be >= 1, got 0"),
        (["--json", "/proc/nowhere/out.json"], 1, "cannot write /proc/nowhere/out.json: "),
        (["--json", "notes.txt"], 2, "--json notes.txt: expected a new file or a results file: notes.txt:1"),
        (["--device", "cuda"], 1, "--device cuda: torch finds no GPU"),
        (["--kernels"], 2, "--kernels requires a GPU"),
        (["--graph", "--pass", "both"], 2, "--graph requires --pass inference, got both"),
        (["--shape", "8", "8", "8", "2", "3"], 2, "K must be <= E = 2, got 3"),
        (["--shape", "8", "12", "8", "2", "1"], 2, "d must be a positive multiple of 8, got 12"),
        (["olmoe", "--tokens", "0"], 2, "olmoe-t0: T must be >= 1, got 0"),
        (["--config", "nowhere"], 2, "--config nowhere: No such file"),
        (["--config", "notes.txt"], 2, "--config notes.txt: not JSON"),
        (["--config", "dense.json"], 2, "the model 'llama' has no num_local_experts or num_experts or "
         "n_routed_experts or moe_num_experts (experts); num_experts_per_tok or "),
        (["--compile-only"], 2, "--compile-only requires --cache DIR"),
        (["--frobnicate"], 2, "unrecognized arguments: --frobnicate"),
    ],
)  # fmt: skip
def test_errors(words, status, sentence, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine\n")
    Path("dense.json").write_text(json.dumps(DENSE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(session, "run", lambda *_, **__: pytest.fail("it was measured"))
    assert run(*words) == status
    assert re.search(f"^tilemoe: error: .*{re.escape(sentence)}", capsys.readouterr().err)
    assert Path("notes.txt").read_text() == "mine\n"


def test_list_names_what_a_missing_peer_needs(capsys, monkeypatch):
    find = peers.importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if find("transformers"):
        moe = pytest.importorskip("transformers.integrations.moe")
        kinds = {f"transformers-{kind}" for kind in ("deepgemm", "sonicmoe")}
        assert {"deepgemm", "sonicmoe"} <= set(moe.ALL_EXPERTS_FUNCTIONS)
        run("--list")
        listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert {listed[kind] for kind in kinds} == {"a GPU is required"}
        assert listed["transformers-eager"] == listed["torch-grouped_mm"] == "available"
        assert listed["tilemoe-sm80"] == "a GPU is required"
        on_gpu = dataclasses.replace(SMALL, device="cuda", dtype="bfloat16")
        for kind in kinds:  # transformers' own test, on a machine without a GPU
            assert re.search("kernels|CUDA", peers.all_peers()[kind].missing(on_gpu))
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda n: None if n == "transformers" else find(n)
    )
    run("--list")
    text = capsys.readouterr().out
    assert "cpu-t4096" in text and "qwen3-235b" in text
    assert re.search(r"transformers +not installed: pip install transformers==5.17", text)


def test_tiles_of_sonic_moe_are_kept_before_it_lists_them(monkeypatch):
    """Its list of kernels is made when it is imported: by stand-ins for its modules."""
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


def test_the_router_next_to_the_linear_layer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(CpuClock, "REST_SECONDS", 0)
    file = tmp_path / "router.jsonl"
    words = ["cpu-t512", "--device", "cpu", "--rounds", "2", "--tokens", "1", "70"]
    assert router.main([*words, "--json", str(file)]) == 0
    found = records.read(file)
    assert [one.name for one in found] == [
        f"router/cpu-t512/{dtype}/t{T}" for dtype in ("bfloat16", "float32") for T in (1, 70)
    ]
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == [
        one.name for one in found
    ]
    for one in found:
        assert all(one.values[key][0] > 0 for key in ("tilemoe_ms", "linear_ms", "ratio"))
    monkeypatch.setattr(router, "linear", lambda x, weight, dtype: x.new_zeros(len(x), 32))
    with pytest.raises(ValueError, match="linear_ms: the logits differ"):
        router.main(words)


def test_rounding_is_compared_with_top_k(tmp_path, capsys):
    file = tmp_path / "rounding.jsonl"
    words = ["cpu-t512", "--tokens", "300", "--device", "cpu", "--rounds", "2", "--rules", "top-k",
             "nearest", "up", "--json", str(file)]  # fmt: skip
    assert rounding.main(words) == 0
    found = {one.name.removeprefix("rounding-layer/cpu-t512/"): one for one in records.read(file)}
    assert list(found) == ["top-k", "nearest", "up"]
    assert len(capsys.readouterr().out.splitlines()) == 3
    for rule, one in found.items():
        values = one.values
        assert values["T"] == 300 and values["rule"] == rule
        assert values["forward_ms"][0] > 0 < values["backward_ms"][0]
        assert values["rows"] == 300 * 4 - values["dropped"] + values["added"]
        assert rule == "top-k" or values["rows"] % 128 == 0
    assert found["top-k"].values["dropped"] == found["top-k"].values["added"] == 0
    assert found["nearest"].values["dropped"] > 0 == found["up"].values["dropped"]
    with pytest.raises(SystemExit):
        rounding.main(["teleport"])


@pytest.mark.parametrize("name", ["python_packages", "dsl_packages"])
def test_a_peers_folder_has_the_modules_of_cutes_dsl(tmp_path, name):
    """In one folder until 4.6, and in another since 4.7."""
    deeper = tmp_path / "nvidia_cutlass_dsl" / name
    deeper.mkdir(parents=True)
    path = session.Place(packages=tmp_path).environment()["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(tmp_path), str(deeper)]


def test_sonic_moe_chooses_its_tiles_again():
    variables = peers.SonicMoE.variables({})
    assert variables == {"QUACK_FORCE_CACHE_UPDATE": "1", "QUACK_PRINT_AUTOTUNING": "1"}
