"""The command `tilemoe` (`python -m tilemoe`): what it prints, and how it ends."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilemoe
from tilemoe import _command, _invocation
from tilemoe._command import archs, check, doctor, installation, registry

ROOT = Path(__file__).resolve().parents[2]
# As apps/tilemoe/check.cpp has them (tests/command_line_test.cpp).
CHECK_KEYS = {
    "version", "device", "pass", "seed", "repeats", "cases",
    "rows", "failures", "impossible", "spoilings", "refused",
}  # fmt: skip


def command(*words, path=(), **environment):
    """`python -m tilemoe` in a process of its own, which sees no GPU. -> CompletedProcess"""
    places = {"PYTHONPATH": os.pathsep.join(map(str, [*path, *sys.path])), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "tilemoe", *words],
        capture_output=True, text=True, env=os.environ | places | environment,
    )  # fmt: skip


def run(*words):
    return _command.main([str(word) for word in words])


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("chek", "unknown command chek; did you mean check?"),
        ("zzzzzz", "unknown command zzzzzz; `tilemoe --help` lists the commands"),
        ("train", "train is only a command of the C++ program"),
        ("info --jsno", "unknown option --jsno; did you mean --json?"),
        ("info --js", "unknown option --js; did you mean --json?"),  # no abbreviations
        ("info more", "unknown argument more"),
        ("check --reducd --list", "unknown option --reducd; did you mean --reduced?"),
        ("check no-such-case", "no case matches no-such-case; `tilemoe check --list` names them all"),
        ("check --dtype float8", "--dtype: invalid choice: 'float8'"),
        ("check --repeat -1", "--repeat must be in [0, 1000000], got -1"),
        ("check --seed 9223372036854775808", "--seed must be in [0, 9223372036854775807], got 9223372036854775808"),
        ("check --repeat many", "--repeat: invalid int value: 'many'"),
        ("doctor --device cuda:x", "--device must be auto, cpu, cuda or cuda:N, got cuda:x"),
        ("doctor --arch sm70", "--arch: invalid choice: 'sm70'"),
        ("bench --config nothing", "--config nothing: No such file or directory"),
    ],
)
def test_wrong_usage(words, sentence, capsys):
    assert run(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tilemoe: error: ") and sentence in err
    assert err.count("\n") == 1


def test_without_a_command_it_helps(capsys):
    assert run() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("tilemoe: error: a command is required")
    for name in ("info", "doctor", "check", "bench"):
        assert f"\n    {name} " in err


def test_help_and_version(capsys):
    assert run("--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for status in ("0 done", "1 the work failed", "2 wrong usage", "130 Ctrl-C", "141 closed pipe"):
        assert status in out
    for name in ("info", "doctor", "check", "bench"):
        assert run(name, "--help") == 0
        assert capsys.readouterr().out.startswith(f"usage: tilemoe {name} ")
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith(f"tilemoe {tilemoe.__version__}")


def test_an_interrupt_is_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.Registry, "run", interrupted)
    assert run("check", "one-token/float32", "--device", "cpu") == 130


def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "tilemoe", "info"], stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr == "tilemoe: error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    "argv, orig_argv, expected",
    [
        (["-m", "info"], ["python", "-m", "tilemoe", "info"], True),
        (["-m"], ["python", "-X", "dev", "-mtilemoe"], True),
        (["/bin/tilemoe", "info"], ["python", "/bin/tilemoe", "info"], True),
        (["-m", "tilemoe"], ["python", "-m", "pytest", "tilemoe"], False),
        (["-m"], ["python", "-m", "tilemoe.bench"], False),
        (["train.py", "-m", "tilemoe"], ["python", "train.py", "-m", "tilemoe"], False),
        ([""], ["python"], False),
    ],
)
def test_it_knows_that_it_is_the_command(argv, orig_argv, expected, monkeypatch):
    """Any other program that cannot use the package must fail at its import."""
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert _invocation.is_command() == expected


# ---------------------------------------------------------------- check


def test_check_of_two_cases(tmp_path, capsys):
    file = tmp_path / "check.json"
    words = ("swiglu/float32", "--case", "smallest/bfloat16", "--device", "cpu", "--json", file)
    assert run("check", *words) == 0
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert set(report) == CHECK_KEYS
    assert report["cases"] == 2 and report["failures"] == [] and report["pass"] == "all"
    names = {row["case"] for row in report["rows"]}
    assert names == {"swiglu/float32", "swiglu/float32 (integers)",
                     "smallest/bfloat16", "smallest/bfloat16 (integers)"}  # fmt: skip
    of_swiglu = [row for row in report["rows"] if row["case"] == "swiglu/float32"]
    assert [row["tensor"] for row in of_swiglu] == ["H", "O", "dX", "ds", "dW1", "dW2"]
    for row in of_swiglu:
        assert 0 < row["frobenius"] <= row["frobenius_limit"] < 1e-5
        assert 0 < row["worst_row"] <= row["worst_row_limit"] and row["passed"]
    for row in report["rows"]:
        if row["case"].endswith("(integers)"):
            assert row["frobenius"] == row["frobenius_limit"] == 0
    assert f"2 cases, {len(report['rows'])} tensors, 0 failures\n" in out
    assert f"{report['spoilings']} results were corrupted on purpose" in out
    assert report["spoilings"] > 30


def test_check_of_one_pass(tmp_path):
    file = tmp_path / "check.json"
    words = ("one-token/float16", "--device", "cpu", "--pass", "forward", "--json", file)
    assert run("check", *words, "--repeat", 3) == 0
    report = json.loads(file.read_text())
    assert {row["tensor"] for row in report["rows"]} == {"H", "O"}
    assert report["pass"] == "forward" and report["repeats"] == 3


def test_the_quick_cases_are_the_registrys(capsys):
    """Each in three types; the files of verify/ below mark them."""

    def listed(*words):
        assert run("check", "--list", *words) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]

    quick, every = listed("--reduced"), listed()
    files = "registry.cpp", "lora_cases.cpp", "quantized_cases.cpp"
    source = "".join((ROOT / "verify" / file).read_text() for file in files)
    marks = source.count("reduced = true") + source.count(".reduced = activation ==")
    assert len(quick) == 3 * marks and len(every) > 2 * len(quick)
    assert set(quick) < set(every)
    assert listed("--dtype", "float16", "--reduced") == [c for c in quick if c.endswith("/float16")]


def test_every_quick_case_passes(tmp_path):
    """On the CPU, both passes, in one type: LayerBounded and LayerExact compute them in all three."""
    file = tmp_path / "check.json"
    words = ("--reduced", "--device", "cpu", "--dtype", "bfloat16", "--json", file)
    assert run("check", *words) == 0
    report = json.loads(file.read_text())
    cases = registry.Registry("cpu").cases(dtype="bfloat16", reduced=True)
    assert report["cases"] == len(cases) >= 24
    assert {row["case"].removesuffix(" (integers)") for row in report["rows"]} == {
        case["case"] for case in cases
    }
    assert all(row["passed"] for row in report["rows"])


# oneDNN's GEMM as the library calls it, except for one element of its result.
WRONG_GEMM = """
typedef long long dim;
int dnnl_sgemm(char ta, char tb, dim M, dim N, dim K, float alpha, const float *A, dim lda,
               const float *B, dim ldb, float beta, float *C, dim ldc) {
  for (dim i = 0; i < M; ++i)
    for (dim j = 0; j < N; ++j) {
      float sum = 0;
      for (dim k = 0; k < K; ++k)
        sum += (ta == 'T' || ta == 't' ? A[k * lda + i] : A[i * lda + k]) *
               (tb == 'T' || tb == 't' ? B[j * ldb + k] : B[k * ldb + j]);
      C[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * C[i * ldc + j]);
    }
  C[0] *= FACTOR;
  return 0;
}
"""


@pytest.fixture
def gemm(tmp_path):
    """A function: -> a library to preload, with a factor for the first element of the GEMM."""
    source = tmp_path / "gemm.c"
    source.write_text(WRONG_GEMM)

    def build(factor):
        library = tmp_path / f"gemm-{factor}.so"
        cc = shutil.which("cc") or shutil.which("gcc")
        subprocess.run(
            [cc, "-O1", "-shared", "-fPIC", f"-DFACTOR={factor}", "-o", library, source], check=True
        )
        return str(library)

    return build


def test_check_fails_if_a_gemm_is_wrong(gemm):
    words = ("check", "swiglu/float32", "--device", "cpu")
    right = command(*words, LD_PRELOAD=gemm("1.0f"))
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = command(*words, LD_PRELOAD=gemm("1.01f"))
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "FAILED" in wrong.stdout and "swiglu/float32, H: frobenius" in wrong.stdout


def test_a_failure_is_printed(monkeypatch, capsys):
    row = {"case": "a/float32", "tensor": "O", "frobenius": None, "frobenius_limit": 1e-6,
           "worst_row": None, "worst_row_limit": 1e-6, "passed": False}  # fmt: skip
    result = {"rows": [row], "failures": ["a/float32, O: nan"], "impossible": ["a: zeroed"],
              "spoilings": 3, "refused": 1}  # fmt: skip
    monkeypatch.setattr(registry.Registry, "run", lambda *_: result)
    assert run("check", "smallest/float32", "--device", "cpu") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["a/float32", "O", "nan", "1.00e-06", "nan", "1.00e-06", "FAILED"]
    assert lines[-3:] == ["1 cases, 1 tensors, 1 failures, 1 of them refused",
                          "3 results were corrupted on purpose; 1 cannot be",
                          "  a/float32, O: nan"]  # fmt: skip


def test_check_on_a_gpu_that_cannot_be_used(capsys, monkeypatch):
    monkeypatch.setattr(check, "why_no_layer", lambda: "the GPU is on holiday")
    assert run("check", "--device", "cuda") == 1
    assert capsys.readouterr().err == (
        "tilemoe: error: --device cuda: the GPU is on holiday; `tilemoe doctor` reports what is missing\n"
    )
    monkeypatch.setenv("TILEMOE_ARCH", "sm80")
    monkeypatch.setenv("TILEMOE_KIT", "sm80")
    assert run("check", "--arch", "sm90") == 1, "the CPU does not replace an arch"
    assert "--device cuda: the GPU is on holiday" in capsys.readouterr().err
    assert os.environ["TILEMOE_ARCH"] == "sm90" and "TILEMOE_KIT" not in os.environ
    assert check._device("auto") == "cpu"
    monkeypatch.setattr(check, "why_no_layer", lambda: None)
    assert check._device("auto") == check._device("cuda") == "cuda:0"


def test_a_file_that_cannot_be_written_is_an_early_error(monkeypatch, capsys):
    monkeypatch.setattr(registry.Registry, "run", lambda *_: pytest.fail("a case was run"))
    assert run("check", "smallest/float32", "--device", "cpu", "--json", "/nowhere/out.json") == 1
    assert "cannot write /nowhere/out.json" in capsys.readouterr().err


# ---------------------------------------------------------------- info and doctor


def test_info_is_show_config(capsys):
    tilemoe.show_config()
    config = capsys.readouterr().out.splitlines()
    assert run("info") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in config if line not in lines] == []
    assert any(line.startswith("driver ") for line in lines)
    assert run("info", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"].startswith(tilemoe.__version__)
    assert report["backends"][0] == {"name": "cpu", "available": True}


TORCH = """
from types import SimpleNamespace
__version__ = "2.9.1"
version = SimpleNamespace(cuda="12.8")
"""


@pytest.mark.parametrize(
    "torch, sentence, how",
    [
        (None, "no TileMoE operators at /nowhere/libtilemoe_torch.so", "install the package"),
        ("raise ImportError('broken')", "cannot be imported (broken)", "install the package again"),
        (TORCH, "TileMoE requires torch >= 2.10, got 2.9.1", "pip install --upgrade 'torch"),
    ],
    ids=["no operators", "no torch", "old torch"],
)
def test_without_the_operators(torch, sentence, how, tmp_path):
    path = []
    if torch is not None:
        (tmp_path / "torch.py").write_text(torch)
        path = [tmp_path]
    where = {"path": path, "TILEMOE_LIBRARY_DIR": "/nowhere"}
    info = command("info", **where)
    assert info.returncode == 0 and info.stderr == ""
    assert sentence in info.stdout
    as_json = command("info", "--json", **where)
    cpu = json.loads(as_json.stdout)["backends"][0]
    assert not cpu["available"] and sentence in cpu["reason"]
    done = command("doctor", "--json", tmp_path / "report.json", **where)
    assert done.returncode == 1 and done.stderr == ""
    assert sentence in done.stdout and how in done.stdout
    assert "result     FAILED: no usable GPU\n" in done.stdout
    for words in (("check", "--list"), *([] if torch == TORCH else [("bench", "--list")])):
        failed = command(*words, **where)
        assert failed.returncode == 1 and failed.stderr.startswith("tilemoe: error: ")
        assert "Traceback" not in failed.stderr
    program = subprocess.run(
        [sys.executable, "-c", "import tilemoe; tilemoe.moe"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, *sys.path])),
                          "TILEMOE_LIBRARY_DIR": "/nowhere"},
    )  # fmt: skip
    assert program.returncode == 1 and "ImportError" in program.stderr


H100 = installation.Gpu(0, "NVIDIA H100", 80 << 30, (9, 0), "sm90, the newest")
GOOD = installation.Installation(
    version="0.2.0", commit="0123456789ab", libraries="/lib", has_cpu_library=True,
    has_cuda_library=True, python="3.12.3, Linux x86_64", torch="2.11.0+cu130", torch_cuda="13.0",
    operators_error=None, cuda_error=None, threads=16, gpus_in_machine=1, driver="580.95.05",
    driver_cuda="13.0", visible=None, gpus=[H100],
)  # fmt: skip
V100 = installation.Gpu(0, "Tesla V100", 16 << 30, (7, 0), None, "compute capability 7.0 is too old")
NO_DRIVER = {"driver": None, "driver_cuda": None, "gpus": []}


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({}, []),
        ({"torch": None, "torch_cuda": None, "operators_error": "torch is not installed", "gpus": []},
         [("torch is not installed", "pip install 'torch>=2.10'")]),
        ({"torch": "2.9.1", "operators_error": "needs torch 2.10", "gpus": []},
         [("needs torch 2.10", "pip install --upgrade 'torch>=2.10'")]),
        ({"operators_error": "cannot be loaded", "gpus": []},
         [("cannot be loaded", "install the package again")]),
        ({"torch": "2.11.0+cpu", "torch_cuda": None, "cuda_error": "built without CUDA", "gpus": []},
         [("torch 2.11.0+cpu was built without CUDA", "install a torch with CUDA")]),
        ({"has_cuda_library": False, "cuda_error": "without its CUDA library", "gpus": []},
         [("/lib/libtilemoe_torch_cuda.so", "TILEMOE_CUDA=ON pip install .")]),
        ({"cuda_error": "its CUDA library cannot be loaded (libcudart)", "gpus": []},
         [("cannot be loaded (libcudart)", "with one CUDA version")]),
        ({**NO_DRIVER, "gpus_in_machine": 0}, [("no NVIDIA GPU and no driver", "8.0 or newer")]),
        (NO_DRIVER, [("an NVIDIA GPU without a driver", "docker run --gpus all")]),
        ({"driver_cuda": "12.2", "gpus": []},
         [("the driver supports CUDA 12.2, but torch was built with CUDA 13.0", "580 or newer")]),
        ({"visible": "", "gpus": []}, [("CUDA_VISIBLE_DEVICES='' leaves no GPU", "unset it")]),
        ({"gpus": []}, [("torch finds no GPU", "nvidia-smi")]),
        ({"gpus": [V100]}, [("cuda:0 Tesla V100, compute capability 7.0", "8.0 or newer (A100")]),
        ({"gpus": [V100, dataclasses.replace(H100, index=1)]}, []),
        ({"gpus": [dataclasses.replace(H100, arch=None, reason="no kernel image")]},
         [("no kernel image", "update NVIDIA's driver")]),
        ({**NO_DRIVER, "gpus_in_machine": 0, "has_cuda_library": False, "torch_cuda": None},
         [("torch 2.11.0+cu130 was built without CUDA", "install a torch with CUDA"),
          ("TileMoE was built without CUDA", "does not end in +cpu"),
          ("no NVIDIA GPU and no driver", "NVIDIA's driver")]),
    ],
)  # fmt: skip
def test_what_is_missing(changed, expected):
    found = installation.missing(dataclasses.replace(GOOD, **changed))
    assert len(found) == len(expected)
    for one, (what, how) in zip(found, expected):
        assert what in one.what and how in one.how


def test_gpus_without_a_driver_are_found(tmp_path):
    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"),
                               ("2", "0x8086", "0x030000"), ("3", "0x10de", "0x030000")):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "4").mkdir()
    assert installation._gpus_in_machine(tmp_path) == 2


CHILD = """
import json, os, signal, sys, time
folder, words = sys.argv[1], sys.argv[2:]
arch = os.environ.get("TILEMOE_ARCH", "cpu")
plan = json.load(open(f"{folder}/plan.json"))
with open(f"{folder}/ran", "a") as ran:
    print(json.dumps([arch, "TILEMOE_KIT" in os.environ, os.environ.get("CUDA_VISIBLE_DEVICES"), words]),
          file=ran)
for event in plan.get(arch, plan["else"]):
    if event == "hang":
        time.sleep(1000)
    if event == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps(event), flush=True)
"""


def result(case, *failures, **bits):
    rows = [{"case": case, "tensor": name, "bits": value} for name, value in bits.items()]
    return {"result": {"rows": rows, "failures": list(failures)}}


GOOD_CHILD = [{"device": "Some GPU", "count": 2}, {"case": "a"}, result("a", O="0", dX="1", H=None),
              {"case": "b"}, result("b", O="2")]  # fmt: skip


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A function that sets what a stand-in for `tilemoe check --lines` prints, by arch; its `ran` are
    [(arch, whether TILEMOE_KIT is set, CUDA_VISIBLE_DEVICES, words)]."""
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    monkeypatch.setattr(archs, "_COMMAND", (sys.executable, str(program), str(tmp_path)))
    monkeypatch.setenv("TILEMOE_KIT", "sm80")

    def plan(**by_arch):
        (tmp_path / "ran").unlink(missing_ok=True)
        (tmp_path / "plan.json").write_text(json.dumps({"else": GOOD_CHILD, **by_arch}))

    plan.ran = lambda: [tuple(json.loads(line)) for line in (tmp_path / "ran").open()]
    plan()
    return plan


AGAINST = ("check", "--arch", "sm90", "--against", "sm80", "--reduced", "a", "--limit", "5")


def test_check_of_two_archs(child, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert run(*AGAINST, "--repeat", 3, "--json", file) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sm90: 2 cases, 4 tensors, 0 failures", "sm80: 2 cases, 4 tensors, 0 failures",
        "", "Some GPU", "3 tensors compared bit for bit, 0 cases differ"]  # fmt: skip
    words = ["--device", "cuda", "--dtype", "all", "--pass", "all", "--seed", "1", "--repeat", "3",
             "--reduced", "--", "a"]  # fmt: skip
    assert [(arch, older, given) for arch, older, _, given in child.ran()] == [
        ("sm90", False, words), ("sm80", False, words)]  # fmt: skip
    report = json.loads(file.read_text())
    assert report["differences"] == [] and report["tensors_compared"] == 3
    assert [one["arch"] for one in report["archs"]] == ["sm90", "sm80"]


@pytest.mark.parametrize(
    "events, expected",
    [
        ([*GOOD_CHILD[:2], result("a", O="0", dX="7"), GOOD_CHILD[3], result("b", O="8")],
         ["a: dX by sm90 have other bits than by sm80", "b: O by sm90 have other bits than by sm80"]),
        ([*GOOD_CHILD[:4], result("b", "b, O: too far", O="2")], ["  b, O: too far"]),
        (GOOD_CHILD[:4], ["  b: ended with status 0"]),
        ([*GOOD_CHILD[:2], {"error": "cudaErrorIllegalAddress"}],
         ["  a: cudaErrorIllegalAddress; 1 later cases were not run"]),
        ([*GOOD_CHILD[:4], "crash"], ["  b: crashed by signal 11 (Segmentation fault)"]),
        ([*GOOD_CHILD[:2], "hang"], ["  a: no output for 5 s; 1 later cases were not run"]),
        (["crash"], ["  before the first case: crashed by signal 11 (Segmentation fault)"]),
        ([{"device": "Some GPU", "count": 0}], ["0 tensors compared bit for bit, 0 cases differ"]),
    ],
    ids=["bits", "float64", "end", "error", "crash", "hang", "start", "nothing"],
)  # fmt: skip
def test_check_of_an_arch_that_is_wrong(events, expected, child, capsys):
    child(sm90=events)
    assert run(*AGAINST) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in expected if line not in lines] == [], lines


def test_check_of_an_arch_that_is_not_there(child, capsys):
    child(sm80=[{"skipped": "this build has no arch sm80"}])
    assert run(*AGAINST) == 1
    assert "error: --arch sm80: this build has no arch sm80; `tilemoe" in capsys.readouterr().err
    child(sm90=[{"wrong_usage": "no case matches a"}])
    assert run(*AGAINST) == 2
    for words, complaint in (
        (("--against", "sm80"), "--against requires --arch"),
        (("--arch", "sm80", "--against", "sm80"), "--against must differ from --arch, got sm80"),
        (("--arch", "sm80", "--device", "cpu"), "--arch requires a GPU; remove --device cpu"),
        (("--arch", "sm80", "--kit", "sm90"), "must have the same value, got sm80 and sm90"),
        (("--arch", "sm80", "--limit", 0), "--limit must be >= 1, got 0"),
        (("--arch", "sm70"), "invalid choice: 'sm70'"),
    ):
        assert run("check", *words) == 2
        assert complaint in capsys.readouterr().err
    assert run("check", "--kit", "sm90", "--against", "sm90") == 2
    assert "warning: --kit is the older name of --arch\n" in capsys.readouterr().err


def test_the_child_of_check(capsys, monkeypatch):
    words = ("one-token/float16", "--device", "cpu", "--lines")
    assert run("check", *words) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(event) for event in events] == [["device", "count"], ["case"], ["result"]]
    rows = events[2]["result"]["rows"]
    assert len(rows) > 10 and all(re.fullmatch("[0-9a-f]{16}", row["bits"]) for row in rows)
    assert run("check", "nothing", "--device", "cpu", "--lines") == 0
    assert "no case matches nothing" in json.loads(capsys.readouterr().out)["wrong_usage"]
    monkeypatch.setattr(check, "why_no_layer", lambda: "it needs 10.0")
    assert run("check", "--device", "cuda", "--lines") == 0
    assert json.loads(capsys.readouterr().out) == {"skipped": "it needs 10.0"}


def test_two_runs_on_the_cpu_have_the_same_bits():
    """By real children."""
    runs = [archs.run("cpu", ("one-token/*16", "--device", "cpu", "--seed", seed)) for seed in (1, 1, 2)]
    assert [one.failures for one in runs] == [[], [], []]
    assert archs.tensors_compared(*runs[:2]) == runs[0].tensors == len(runs[0].bits) > 0
    assert archs.differences(*runs[:2]) == [] and len(archs.differences(*runs[1:])) == 4


@pytest.fixture
def a_gpu(child, tmp_path, monkeypatch):
    """A stand-in: an H100 that runs sm80 and sm90. -> child"""
    monkeypatch.setattr(installation, "find", lambda: GOOD)
    monkeypatch.setattr(doctor, "_BENCH", {"cuda": [str(tmp_path / "gpu")], "cpu": [str(tmp_path / "cpu")]})
    program = tmp_path / "bench.py"
    line = {"name": "bench/few-rows/tilemoe", "device": "Some GPU", "versions": {}, "commit": "0",
            "values": {"forward_ms": [1, 2, 3]}}  # fmt: skip
    program.write_text(
        "import os, pathlib, sys\npathlib.Path(sys.argv[1]).touch()\n"
        f"pathlib.Path(sys.argv[3]).write_text({json.dumps(line) + chr(10)!r})\n"
        "sys.exit(os.environ.get('BROKEN_BENCH'))\n"
    )
    monkeypatch.setattr(doctor, "_COMMAND", (sys.executable, str(program)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    child(sm100=[{"skipped": "it needs 10.0"}])
    monkeypatch.chdir(tmp_path)
    return child


def report_of(folder):
    return json.loads((folder / "tilemoe-report.json").read_text())


def test_doctor_on_a_gpu(a_gpu, tmp_path, capsys):
    assert run("doctor") == 0
    out = capsys.readouterr().out
    for line in ("sm80: 2 cases, 4 tensors, 0 failures", "sm100: not run: it needs 10.0",
                 "sm90 and sm80: 3 tensors compared bit for bit, 0 cases differ",
                 "bench/few-rows/tilemoe: forward_ms 2",
                 "result     passed: sm80, sm90"):  # fmt: skip
        assert f"{line}\n" in out
    assert f"report     {tmp_path}/tilemoe-report.json: attach it to an issue of " in out
    assert a_gpu.ran() == [(arch, False, "0", ["--device", "cuda", "--reduced"]) for arch in archs.ARCHS]
    report = report_of(tmp_path)
    assert report["passed"] and report["device"] == "Some GPU" and report["missing"] == []
    assert report["driver"] == GOOD.driver and report["commit"] == GOOD.commit
    assert report["archs"][2] == {"arch": "sm100", "skipped": "it needs 10.0"}
    assert report["bench"][0]["values"] == {"forward_ms": [1, 2, 3]} and report["bench_error"] is None
    assert (tmp_path / "gpu").exists() and not (tmp_path / "cpu").exists()


def test_doctor_on_a_gpu_whose_results_are_wrong(a_gpu, tmp_path, capsys, monkeypatch):
    a_gpu(sm90=[*GOOD_CHILD[:4], result("b", O="3")], sm100=[*GOOD_CHILD[:2], "crash"])
    assert run("doctor") == 1
    out = capsys.readouterr().out
    assert "  b: bits of O differ between sm90 and sm80\n" in out
    assert "  a: crashed by signal 11" in out
    assert "result     FAILED: sm90, sm100; passed: sm80\n" in out
    report = report_of(tmp_path)
    assert not report["passed"] and len(report["differences"]) == 1
    a_gpu(sm80=[*GOOD_CHILD[:2], {"error": "cudaErrorIllegalAddress"}])
    monkeypatch.setenv("BROKEN_BENCH", "no memory")
    assert run("doctor", "--arch", "sm80", "--json", tmp_path / "other.json") == 1
    assert "cudaErrorIllegalAddress; 1 later cases were not run" in capsys.readouterr().out
    report = json.loads((tmp_path / "other.json").read_text())
    assert report["bench"] == [] and report["bench_error"] == "no memory"


def test_doctor_skips_an_arch_that_the_gpu_does_not_run(a_gpu, capsys):
    a_gpu(sm90=[{"skipped": "not here"}], sm100=[{"skipped": "nor here"}])
    assert run("doctor", "--no-bench") == 0
    assert "result     passed: sm80\n" in capsys.readouterr().out
    assert run("doctor", "--no-bench", "--kit", "sm90") == 1
    assert "result     FAILED: no usable arch\n" in capsys.readouterr().out


def test_doctor_of_another_gpu(a_gpu, capsys, monkeypatch):
    assert run("doctor", "--device", "cuda:3") == 1
    assert "cuda:3: this machine has one GPU" in capsys.readouterr().out
    two = dataclasses.replace(GOOD, gpus=[H100, dataclasses.replace(H100, index=1)])
    monkeypatch.setattr(installation, "find", lambda: two)
    assert run("doctor", "--device", "cuda:1", "--no-bench") == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert run("doctor", "--device", "cuda:1", "--no-bench") == 0
    assert [visible for _, _, visible, _ in a_gpu.ran()] == ["1"] * 3 + ["7"] * 3


def test_doctor_without_a_gpu(a_gpu, tmp_path, capsys, monkeypatch):
    without = dataclasses.replace(GOOD, gpus_in_machine=0, **NO_DRIVER)
    monkeypatch.setattr(installation, "find", lambda: without)
    assert run("doctor") == 0
    out = capsys.readouterr().out
    assert "Missing for a GPU:\n  the machine has no NVIDIA GPU and no driver" in out and "    -> use a machine" in out
    assert "cpu: 2 cases, 4 tensors, 0 failures\n" in out
    assert "result     passed: cpu; no usable GPU\n" in out
    assert a_gpu.ran() == [("cpu", True, None, ["--device", "cpu", "--reduced"])]
    assert len(report_of(tmp_path)["missing"]) == 1 and (tmp_path / "cpu").exists()
    a_gpu(cpu=["crash"])
    assert run("doctor", "--no-bench") == 1
    assert "result     FAILED: cpu; no GPU" not in capsys.readouterr().out
    a_gpu()
    for words in (("--device", "cuda"), ("--arch", "sm80")):  # a GPU was named
        assert run("doctor", *words) == 1
        assert "result     FAILED: no usable GPU\n" in capsys.readouterr().out
    assert run("doctor", "--device", "cpu", "--no-bench") == 0
    assert "Missing" not in capsys.readouterr().out
    assert run("doctor", "--json", "/nowhere/out.json") == 1
    assert "cannot write /nowhere/out.json" in capsys.readouterr().err


def test_bench_is_the_benchs(capsys):
    assert run("bench", "--list") == 0
    assert "cpu-t4096" in capsys.readouterr().out
