"""The stages of run.py: the commands of each stage and the readers of their output.

A stage is a list of items. An item is one command with a time limit. If this machine does not have
what an item needs, the item is skipped and the reason is reported.
"""

import csv
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import sys
import xml.etree.ElementTree
from typing import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))  # a file of it needs no package
import records  # noqa: E402

TESTS = ROOT / "tests" / "torch"
JAX = ROOT / "tests" / "jax" / "jax_on_gpu.py"
# T, d, n, E, K, and the T at which ragged_dot's expanded operands fit into the GPU's memory.
JAX_LAYERS = {"wide": ([8192, 2048, 3072, 8, 2], 8192), "7b-n256": ([24576, 1536, 256, 128, 8], 1024),
              "qwen3-235b": ([32768, 4096, 1536, 128, 8], 512)}
CONFIGS = ["7b-n256", "7b-n1024", "30b-n256", "30b-n1024", "olmoe", "qwen3-235b", "gpt-oss-20b",
           "kimi-linear", "qwen3-next", "wide", "few-rows"]
MORE_CONFIGS = ["narrow", "granite", "one-expert", "mixtral", "phi-3.5", "qwen1.5"]  # of tiles
ARCHS = ("sm80", "sm90")
SPARSE = ["sparse-e128", "sparse-e256", "sparse-e512"]
# Top-K, small and large M of an expert, rounding, split-K of long experts, blocks of columns.
REPEATED = [f"{case}/bfloat16" for case in
            ("swiglu", "many-pairs", "rounded-nearest", "long-experts", "column-blocks", "lora")]
# GiB of GPU memory of each; two at a time fit into 78 GiB.
HUGE = {"deepseek-v3.2": 60, "huge-rows": 12, "huge-hidden": 17}
# The largest need up to 35 GiB, so two run at a time.
SIZES = ["7b-n256", "7b-n1024", "30b-n256", "olmoe", "gpt-oss-20b", "qwen3-235b", "kimi-linear",
         "qwen3-next", "wide", "few-rows", "off-tiles"]
# Layers with low-rank adapters, T, d, n, E, K: those of Qwen3-30B-A3B and of gpt-oss-20b.
ADAPTERS = {"qwen3-30b-512": [512, 2048, 768, 128, 8], "qwen3-30b": [4096, 2048, 768, 128, 8],
            "qwen3-30b-32768": [32768, 2048, 768, 128, 8], "gpt-oss-20b": [8192, 2880, 2880, 32, 4]}
# Layers of the stage fp8, and its test programs.
FP8_LAYERS = ["gpt-oss-20b", "qwen3-235b", "olmoe", "kimi-linear", "7b-n1024", "30b-n1024", "wide",
              "7b-n256"]
FP8_TESTS = ["cuda_quantize_fp8_test", "cuda_fp8_layer_test", "cuda_fp8_gradients_test"]
FORMATS = ["fp8", "mxfp4", "nf4", "nf4_double", "nvfp4"]  # of quantised weights
BENCH_SHAPE = [2048, 1024, 512, 16, 4]  # T, d, n, E, K of the command's short bench
ON_TWO_DEVICES = "*Device*"  # of cuda_layer_test
PROFILED = ["7b-n256", "7b-n1024", "qwen3-235b"]
LONG_TESTS = {"cuda_backward_steps_test": 3}  # programs whose tests are split over N processes
SANITIZERS = ["memcheck", "racecheck", "synccheck", "initcheck"]
# Step tests of tiles that the cost model does not select for the registry's small cases.
FORCED_TILES = ":".join(f"*EqualTheCpus/{name}*" for name in
                        ("swiglu_cooperative", "swiglu_p", "swiglu_t_", "down_", "gpt_oss_"))
# Tests of routers that have no case in the registry.
ROUTERS = "*InGroups:*GivenIds"
# Parts of W1 that differ in dtype or layout.
TWO_LAYOUTS = "CudaWeightLayouts.*OfTwo*"
TOKEN_ROUTERS = "*InGroups:*OfEveryCountOfTokens:*PastTheCapacity"


# Tests that run again with archs other than the GPU's default: those of GEMMs, and of the layer in
# the PyTorch package. (The pretraining example runs on GPUs only in the stages of several GPUs.)
GEMMS = ["cuda_backward_steps_test", "cuda_forward_steps_test", "cuda_layer_test",
         "cuda_router_logits_test", "cuda_train_test", "cuda_weight_layouts_test"]
TORCH_FILES = ["cuda_test.py", "cuda_gemms_test.py", "cuda_quantized_test.py",
               "cuda_transformers_test.py", "functional_test.py", "gemms_test.py",
               "module_routing_test.py", "module_test.py", "router_logits_test.py",
               "torchtitan_test.py"]

# Tests without a GEMM: {program: filter of its tests}.
NO_GEMMS = {"cuda_pdl_test": "*", "cuda_routing_test": "*", "cuda_rounding_test": "*",
            "cuda_route_tokens_test": "CudaRouteTokens.*",
            "cuda_router_test": "*", "cuda_score_and_bias_gradient_test": "*",
            "cuda_store_threads_test": "*", "cuda_forward_steps_test": "Combine.*"}
ONE_GPU = "this machine has one GPU"
# Tests that may be skipped on such a machine. Any other skipped test is a failure.
SKIPPED_ON_ONE_GPU = frozenset({"DeviceLayerTest.GivesTheSameBitsOnEveryDevice",
                                "DeviceLayerTest.RunsOnTwoDevicesAtOnce",
                                "SumRows.ReadsAnotherGpu"})


@dataclasses.dataclass
class Item:
    name: str
    command: list
    limit_s: int
    # Output -> {quantity: value}, or the measurements that the program wrote. Raises OSError,
    # ValueError or KeyError if the output has no result.
    report: Callable[[str], object]
    missing: str | None = None  # why the item cannot run here: run.py reports it and continues
    # Tests that may be skipped; None: the program checks that (tests/torch/skips.py).
    may_skip: frozenset | None = frozenset()
    arch: str | None = None  # set by TILEMOE_ARCH; None: the GPU's default
    min_s: int = 5  # measure.py does not start the item if fewer seconds are left


class Machine:
    """The programs to run, the tools of this machine, and the MiB of memory of each GPU.

    `archs`: those that the first GPU runs, its default first. `wheel`: of the PyTorch package.
    `packages`: a folder of wheels that its tests need. `installed`: the folder where they are
    installed. `wanted`: names of the part's items that will run, None: all.
    """

    def __init__(self, programs, wheel=None, packages=None, installed=None):
        self.programs = {}
        for path in sorted(pathlib.Path(programs).rglob("*")):
            if path.is_file() and os.access(path, os.X_OK):
                self.programs.setdefault(path.name, path)
        self.sanitizer = find_tool("compute-sanitizer")
        self.profiler = find_tool("ncu")
        self.gpus, self.archs = [], []
        self.wheel, self.packages, self.installed = wheel, packages, installed
        self.wanted = None

    def program(self, name):
        return self.programs.get(name, name)

    def tests(self):
        return [n for n in self.programs if n.startswith("cuda_") and n.endswith("_test")]

    def other_archs(self):
        return self.archs[1:]

    def item(self, name, program, arguments, limit_s, report, tool=(), missing=None, arch=None):
        if program not in self.programs:
            missing = f"{program} was not built"
        return Item(name, [*selecting(arch), *tool, self.program(program), *arguments], limit_s,
                    report, missing, arch=arch)

    def gtest(self, name, program, tests, folder, limit_s, tool=(), arch=None):
        """Return an item that runs and counts tests of a GoogleTest program."""
        file = folder / f"{name}.json"
        arguments = ["--gtest_brief=1", f"--gtest_filter={tests}", f"--gtest_output=json:{file}"]
        return self.item(name, program, arguments, limit_s, lambda _: test_counts(file), tool,
                         arch=arch)

    def torch_item(self, name, arguments, limit_s, report, gpus=1, arch=None, tool=()):
        """Return an item that runs this Python with the wheel."""
        missing = None
        if not self.wheel:
            missing = "--wheel was not given"
        elif importlib.util.find_spec("torch") is None:
            missing = "this Python has no torch"
        elif len(self.gpus) < gpus:
            missing = ONE_GPU
        # The package is that of the wheel, whatever the environment of this shell is.
        python = ["env", "-u", "TILEMOE_LIBRARY_DIR", f"PYTHONPATH={self.installed}",
                  sys.executable]
        return Item(name, [*selecting(arch), *tool, *python, *arguments], limit_s, report, missing,
                    may_skip=None, arch=arch)

    def pytest_item(self, name, words, folder, limit_s, gpus=1, arch=None):
        """Return an item that runs pytest, which an interrupt at the limit makes report."""
        file = folder / f"{name}.xml"
        workers = importlib.util.find_spec("xdist") and gpus == 1
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={TESTS}",
                 "--device", "cuda", f"--junitxml={file}", "--durations=15",
                 *(["-n", "8"] if workers else []), *words]
        tool = ["timeout", "-s", "INT", "-k", "10", str(limit_s)]
        return self.torch_item(name, words, limit_s + 15, lambda _: junit_counts(file), gpus, arch,
                               tool)


def selecting(arch):
    return ["env", f"TILEMOE_ARCH={arch}"] if arch else []


def named(name, arch):
    return f"{name}-{arch}" if arch else name


def find_tool(name):
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which(name, path=os.pathsep.join(places))


# ---------------------------------------------------------------- readers of an item's output


def test_counts(file):
    """Return the numbers of tests that ran, failed and were skipped in a GoogleTest program."""
    suites = json.loads(file.read_text())
    if suites["tests"] == 0:
        raise ValueError("no test ran")
    tests = [(suite["name"], one) for suite in suites["testsuites"] for one in suite["testsuite"]]
    skipped = [f"{suite}.{one['name']}" for suite, one in tests if one.get("result") == "SKIPPED"]
    return {"tests": suites["tests"], "failures": suites["failures"], "skipped": skipped}


def junit_counts(file):
    """Return the counts of tests of pytest as test_counts does, and the names of failed ones."""
    cases = list(xml.etree.ElementTree.parse(file).iter("testcase"))
    if not cases:
        raise ValueError("no test ran")
    of = lambda *kinds: [f"{case.get('classname')}::{case.get('name')}" for case in cases
                         if any(case.find(kind) is not None for kind in kinds)]
    failed = of("failure", "error")
    counts = {"tests": len(cases), "failures": len(failed), "skipped": of("skipped")}
    return counts | ({"failed": "; ".join(failed)} if failed else {})


def check_counts(output):
    """Return the numbers of cases, tensors, failures and deliberately corrupted results."""
    lines = [line for line in output.splitlines() if " cases, " in line or "on purpose" in line]
    return {"said": "; ".join(lines)}


def scenario_results(output):
    """Return {scenario: passed or failed} from the output of distributed_worker.py and others."""
    return dict(re.findall(r"^(\w+) (passed|failed)$", output, re.MULTILINE))


def shared_gpu_results(output, log):
    """Return the results in the output of expert_parallel_one_gpu.py and of its first rank.

    Raises:
        ValueError: no row was exchanged through symmetric memory.
    """
    results = scenario_results(output)
    if results.get("exchanges_were_through_symmetric_memory") != "passed":
        raise ValueError("no row was exchanged through symmetric memory")
    seen = re.findall(r"^(?:a barrier: .*|\d+ exchanges|after .* s: .*)$", log.read_text(),
                      re.MULTILINE)
    return results | {"seen": "; ".join(seen)}


def pretrain_losses(file):
    """Return the last loss of each run and the errors, from the results of pretrain_two_gpus.py."""
    found = json.loads(file.read_text())
    losses = {f"{name}, last loss": run["losses"][-1] for name, run in found["runs"].items()
              if run.get("losses")}
    return losses | {"wrong": "; ".join(found.get("wrong", ["not finished"]))}


def measured(file, item):
    """Return the measurements of a program, with the item's name if the item adds options."""
    found = []
    for one in records.read(file):
        mode, layer, *rest = one.name.split("/")
        if item.startswith(layer):
            one = dataclasses.replace(one, name="/".join([mode, item, *rest]))
        found.append(one)
    if not found:
        raise ValueError("nothing was measured")
    return found


def digests_of(output):
    """Return {name: {quantity: value}} of each case."""
    report = json.loads(output)
    arch = report.get("arch", report.get("kit")).split(",")[0]
    return {f"digests/{arch}/{one['case']}": {"arch": arch, "case": one["case"],
                                              "seed": report["seed"], "inputs": one["inputs"],
                                              **one["tensors"]} for one in report["cases"]}


def sanitizer_errors(output):
    """Return the sanitizer's last line: `ERROR SUMMARY: 0 errors`, or racecheck's counts."""
    return {"said": "; ".join(re.findall(r"========= ((?:ERROR|RACECHECK) SUMMARY: .*)", output))}


METRICS = [
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg.per_second",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
]


def kernel_profile(output, item):
    """Return {name: {metric: value}} of each profiled launch, in base units."""
    table = output[output.index('"ID"'):] if '"ID"' in output else ""
    launches = {}
    for row in csv.DictReader(io.StringIO(table)):
        kernel = re.sub(r"\(.*", "", row["Kernel Name"])
        values = launches.setdefault(f"profile/{item}/{row['ID']}",
                                     {"kernel": kernel, "grid": row["Grid Size"]})
        if value := row["Metric Value"].replace(",", ""):
            values[row["Metric Name"]] = float(value)
    if not launches:
        raise ValueError("no kernel was profiled")
    return launches


# ---------------------------------------------------------------- the stages


def test(machine, folder):
    def programs(names, arch=None):
        for program in names:
            parts = LONG_TESTS.get(program, 1)
            for part in range(parts):
                name = program if parts == 1 else f"{program}-{part + 1}-of-{parts}"
                split = ["env", f"GTEST_TOTAL_SHARDS={parts}", f"GTEST_SHARD_INDEX={part}"]
                made = machine.gtest(named(name, arch), program, "*", folder, 300, split, arch)
                if len(machine.gpus) < 2:
                    made.may_skip = SKIPPED_ON_ONE_GPU
                yield made
        yield machine.item(named("check", arch), "tilemoe",
                           ["check", "--device", "cuda", "--pass", "all"], 240, check_counts,
                           arch=arch)

    example = "example_layer_cuda"
    return [*programs(machine.tests()),
            *(one for arch in machine.other_archs() for one in programs(GEMMS, arch)),
            machine.item(example, example, [], 60, lambda output: {"said": output.strip()})]


def ptx(machine, folder):
    """Run the library's PTX for 8.0, which the driver compiles for GPUs without machine code.

    The library has PTX of the kernels other than GEMMs and of the GEMMs of sm80, but not of sm90.
    """
    forced = ["env", "CUDA_FORCE_PTX_JIT=1"]
    items = [machine.gtest(program, program, tests, folder, 300, forced)
             for program, tests in NO_GEMMS.items()]
    if "sm80" in machine.archs:
        check = ["check", "--device", "cuda", "--pass", "all", "--reduced"]
        items.append(machine.item("check-reduced-sm80", "tilemoe", check, 440, check_counts, forced,
                                  arch="sm80"))
    return items


def torch(machine, folder):
    """Run the tests of the PyTorch package; with other archs, those of TORCH_FILES."""
    others = machine.other_archs()
    return [machine.pytest_item("tests", [TESTS], folder, 280 if others else 440),
            *(machine.pytest_item(named("tests", arch), [TESTS / file for file in TORCH_FILES],
                                  folder, 140, arch=arch) for arch in others)]


def command(machine, folder):
    """Run the wheel's command: info, the quick cases of the registry, and a short bench."""
    def item(name, words, limit_s, report):
        return machine.torch_item(name, ["-m", "tilemoe", *words], limit_s, report)

    doctor, bench = folder / "doctor.json", folder / "bench.jsonl"
    return [
        item("info", ["info", "--json"], 30,
             lambda output: {"version": json.loads(output)["version"]}),
        item("doctor", ["doctor", "--device", "cuda", "--json", doctor], 210,
             lambda output: {"said": output.strip().splitlines()[-1]}),
        item("check-reduced", ["check", "--device", "cuda", "--reduced"], 150, check_counts),
        item("bench", ["bench", "--device", "cuda", "--shape", *map(str, BENCH_SHAPE), "--rounds",
                       "5", "--against", "torch-grouped_mm", "--json", bench], 90,
             lambda _: records.read(bench)),
    ]


def sizes(machine, folder):
    """Check every row of every tensor of real models' layers, through the PyTorch package."""
    def item(name):
        file = folder / f"{name}.json"
        return machine.torch_item(name, [TESTS / "real_sizes.py", name, "--json", file], 120,
                                  lambda _: json.loads(file.read_text()))

    return [item(name) for name in SIZES]


def two_gpus(machine, folder):
    """Run the tests that need two GPUs: of the library, the package and the pretraining example."""
    layer = machine.gtest("layer", "cuda_layer_test", ON_TWO_DEVICES, folder, 240)
    if len(machine.gpus) < 2:
        layer.missing = layer.missing or ONE_GPU
    pulls = [TESTS / "expert_parallel_worker.py", "--device", "cuda", "--only", "a_killed_rank",
             "--dispatch", "pull"]
    training = folder / "pretrain.json"
    return [
        layer,
        machine.pytest_item("package", [TESTS / "cuda_two_devices_test.py"], folder, 105, gpus=2),
        machine.torch_item("processes", [TESTS / "distributed_worker.py", "--device", "cuda"], 260,
                           scenario_results, gpus=2),
        machine.torch_item("a-dead-rank-of-a-pull", pulls, 150, scenario_results, gpus=2),
        machine.torch_item("pretrain", [ROOT / "scripts" / "gpu" / "pretrain_two_gpus.py",
                                        "--json", training, "--work", folder / "pretrain",
                                        "--only", "deterministic", "own memory"],
                           300, lambda _: pretrain_losses(training), gpus=2),
    ]


def one_gpu_ranks(machine, folder):
    """Run ranks that share one GPU and read rows in each other's memory."""
    def item(world, limit_s):
        place = folder / f"{world}-ranks"
        command = [TESTS / "expert_parallel_one_gpu.py", "--device", "cuda", "--world", str(world),
                   "--folder", place, "--limit", str(limit_s)]
        return machine.torch_item(f"{world}-ranks", command, limit_s + 15,
                                  lambda output: shared_gpu_results(output, place / "0.log"))

    return [item(2, 90), item(4, 120)]


def repeat(machine, folder):
    """Require the same bits a thousand times on a busy GPU."""
    return [machine.item(named(name.replace("/", "-"), arch), "tilemoe",
                         ["check", "--device", "cuda", "--pass", "all", "--repeat", "1000", name],
                         120, check_counts, arch=arch)
            for arch in (None, *machine.other_archs()) for name in REPEATED]


def digests(machine, folder):
    """Hash the results of the kernels, for comparison with a simulation of the kernels."""
    return [machine.item(named(name, arch), "tilemoe", ["digest", "--device", "cuda", *cases], 120,
                         digests_of, arch=arch)
            for arch in (None, *machine.other_archs())
            for name, cases in (("calibration", ["calibration-*"]), ("reduced", ["--reduced"]))]


def huge(machine, folder):
    """Test weights, then tensors of rows, of more than 2^31 elements."""
    def item(name, gib):
        lacks = min(machine.gpus, default=0) < gib * 1024
        return machine.item(name, "tilemoe", ["check", "--device", "cuda", "--pass", "all", name],
                            240, check_counts,
                            missing=f"requires {gib} GiB of GPU memory" if lacks else None)

    return [item(name, gib) for name, gib in HUGE.items()]


def sanitize(tool):
    def stage(machine, folder):
        prefix = [machine.sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]

        def item(name, program, arguments, limit_s, arch=None):
            return machine.item(
                named(name, arch), program, arguments, limit_s, sanitizer_errors, prefix,
                None if machine.sanitizer else "compute-sanitizer is not installed", arch)

        def tests(name, program, chosen, arch=None):
            arguments = ["--gtest_brief=1", f"--gtest_filter={chosen}"]
            return item(name, program, arguments, 200, arch)

        check = ["check", "--device", "cuda", "--pass", "all", "--reduced"]
        others = machine.other_archs()
        return [
            item("check-reduced", "tilemoe", check, 400),
            tests("forced-tiles", "cuda_forward_steps_test", FORCED_TILES),
            tests("routers", "cuda_routing_test", ROUTERS),
            *(item("check-reduced", "tilemoe", check, 400, arch) for arch in others),
            tests("token-routers", "cuda_route_tokens_test", TOKEN_ROUTERS),
            *(tests("weight-layouts", "cuda_weight_layouts_test", TWO_LAYOUTS, arch)
              for arch in (None, *others)),
        ]

    return stage


def bench(machine, folder):
    """Compare the layer with its peers by the users' command, and with other archs."""
    def item(layer, arch=None):
        name = named(layer, arch)
        file = folder / f"{name}.jsonl"
        peers = ["--against", "none"] if arch else []
        return machine.torch_item(name, ["-m", "tilemoe", "bench", layer, "--device", "cuda",
                                         *peers, "--json", file], 120,
                                  lambda _: measured(file, name), arch=arch)

    return [*(item(layer) for layer in CONFIGS),
            *(item(layer, arch) for arch in machine.other_archs() for layer in PROFILED)]


def router(machine, folder):
    """Compare the router's logits with one order of the sum with torch's linear layer."""
    file = folder / "router.jsonl"
    return [machine.torch_item("router", ["-m", "tilemoe.bench.router", "--device", "cuda", "--json",
                                          file], 300, lambda _: records.read(file))]


def with_adapters(machine, folder, layer, peers, arch=None):
    """Return an item that compares a layer of ADAPTERS with peers, from PyTorch."""
    name = named(layer, arch)
    file = folder / f"{name}.jsonl"

    def of_item(_):
        """Return the measurements under the item's name: several items have the same sizes."""
        return [dataclasses.replace(one, name=f"bench/{name}/{one.name.rsplit('/', 1)[1]}")
                for one in measured(file, name)]

    return machine.torch_item(name, ["-m", "tilemoe", "bench", "--device", "cuda", "--shape",
                                     *map(str, ADAPTERS[layer]), "--lora-rank", "16", "--against",
                                     *peers, "--json", file], 120, of_item, arch=arch)


def adapters(machine, folder):
    """Compare the layer with low-rank adapters with the frozen layer and with other libraries."""
    peers = ["tilemoe-frozen", "torch-grouped_mm-compiled", "peft-grouped_mm", "peft-tilemoe"]
    return [*(with_adapters(machine, folder, layer, peers) for layer in ADAPTERS),
            *(with_adapters(machine, folder, layer, peers[:1], arch)
              for arch in machine.other_archs() for layer in ADAPTERS)]


def quantized(machine, folder):
    """Compare the layer on quantised weights with the one on 16-bit weights, and time its steps."""
    peers = [f"tilemoe-{format.replace('_', '-')}" for format in FORMATS]
    return [*(with_adapters(machine, folder, layer, peers) for layer in ADAPTERS),
            timed(machine, folder, "steps", ["few-rows", "gpt-oss-20b", "--lora-rank", "16",
                                             "--quantized", "none", *FORMATS])]


def fp8(machine, folder):
    """Check the fp8 recipe, then compare it with bfloat16, with dense FP8 GEMMs and with copies.

    The checks are its cases of the registry, and bits against the CPU's emulation. Layers are whole,
    from PyTorch, with weights that are quantised already, also with H saved in FP8 and with one
    quantisation per pass. About 300 s.
    """
    def bench(layer):
        file = folder / f"{layer}.jsonl"
        words = ["-m", "tilemoe", "bench", layer, "--device", "cuda", "--recipe", "fp8", "fp8_each",
                 "fp8_save_h", "--rounds", "7", "--json", file]
        return machine.torch_item(layer, words, 60, lambda _: measured(file, layer))

    file = folder / "kernels.jsonl"
    return [machine.item("check", "tilemoe",
                         ["check", "fp8-*", "--device", "cuda", "--pass", "all"], 60, check_counts),
            *(machine.gtest(program, program, "*", folder, 60) for program in FP8_TESTS),
            *map(bench, FP8_LAYERS),
            machine.torch_item("kernels", ["-m", "tilemoe.bench.fp8", *FP8_LAYERS, "--rounds", "9",
                                           "--json", file], 90, lambda _: records.read(file))]


def jax(machine, folder):
    """Test tilemoe.jax on a GPU.

    The bits must equal those of the PyTorch package, also in command buffers and in FP8. A step,
    with and without an optimiser in the program, may need 1.1 times PyTorch's memory. Then measure
    the time compared with jax.lax.ragged_dot.
    """
    def item(name, words, shape, limit_s=60, arch=None):
        name = named(name, arch)
        file = folder / f"{name}.json"
        found = machine.torch_item(
            name, [JAX, *words, "--shape", *map(str, shape), "--json", file], limit_s,
            lambda _: {f"{of}/{name}": one for of, one in json.loads(file.read_text()).items()},
            arch=arch)
        if importlib.util.find_spec("jax") is None:
            found.missing = found.missing or "this Python has no jax"
        return found

    small, wide = JAX_LAYERS["7b-n256"][0], JAX_LAYERS["wide"][0]
    return [item("bits", ["bits"], small), item("captured", ["captured"], small),
            *(item(f"{words}-fp8{more}", [words, "--recipe", "fp8", *options], small)
              for words in ("bits", "captured")
              for more, options in (("", []), ("-save-h", ["--save-h", "fp8"]))
              if "sm90" in machine.archs),
            *(item("bits", ["bits"], small, arch=arch) for arch in machine.other_archs()),
            item("memory", ["memory"], wide),
            *(item(f"time-{layer}", ["time", "--peer-tokens", str(tokens)], shape, 90)
              for layer, (shape, tokens) in JAX_LAYERS.items())]


def activations(machine, folder):
    """Compare gathered_mm, an activation in PyTorch and combine_mm with a compiled grouped_mm."""
    def item(layer):
        file = folder / f"{layer}.jsonl"
        return machine.torch_item(
            layer, ["-m", "tilemoe", "bench", "--device", "cuda", "--shape",
                    *map(str, ADAPTERS[layer]), "--activation", "mishglu", "--against",
                    "torch-grouped_mm-compiled", "--json", file], 120,
            lambda _: measured(file, layer))

    return [item(layer) for layer in ADAPTERS]


def timed(machine, folder, name, words, limit_s=120, arch=None):
    """Return an item that runs tilemoe_kernels."""
    file = folder / f"{name}.jsonl"
    return machine.item(name, "tilemoe_kernels", ["--device", "cuda", *words, "--json", file],
                        limit_s, lambda _: measured(file, name), arch=arch)


def kernels(machine, folder):
    """Time the layers' steps (also other loads, biases, token rounding), routing, bare GEMMs."""
    item = lambda *given, **more: timed(machine, folder, *given, **more)
    return [
        *(item(layer, [layer]) for layer in CONFIGS),
        *(item(f"{layer}-zipf", [layer, "--load", "zipf"]) for layer in ("7b-n256", "qwen3-235b")),
        item("7b-n256-one-expert", ["7b-n256", "--load", "one-expert"]),
        item("gpt-oss-20b-biases", ["gpt-oss-20b", "--biases", "--clamped", "--weights", "gpt-oss"]),
        item("gpt-oss-20b-biases-alone", ["gpt-oss-20b", "--biases", "--clamped"]),
        # Top-K and token rounding with the same T and K and more and more experts of fewer rows.
        *(item(f"{layer}-{rule}", [layer, "--rounding", rule, "--pass", "forward"])
          for layer in SPARSE for rule in ("none", "nearest")),
        item("routing", ["--routing", *CONFIGS]),
        item("gemm", ["--gemm", *CONFIGS]),
        *(item(named(layer, arch), [layer], arch=arch)
          for arch in machine.other_archs() for layer in CONFIGS),
    ]


def configurations(machine, folder):
    """Compare the cost model's choice with all other tiles, column groups and PDL settings."""
    item = lambda name, *words: timed(machine, folder, name, ["--configurations", *words], 240)
    return [
        item("layers", *CONFIGS, *MORE_CONFIGS),
        item("7b-n256-decode", "7b-n256", "--tokens", "1", "16", "64"),
        item("qwen3-235b-decode", "qwen3-235b", "--tokens", "1", "16", "64", "256"),
        item("30b-n1024-t1024", "30b-n1024", "--tokens", "1024"),
        item("few-rows-t4096", "few-rows", "--tokens", "4096"),
    ]


def profile(machine, folder):
    missing = None if machine.profiler else "ncu is not installed"
    prefix = [machine.profiler, "--clock-control", "none", "--csv", "--print-units", "base",
              "-k", "regex:grouped_gemm|combine", "--launch-count", "12", "--metrics",
              ",".join(METRICS)]
    return [machine.item(layer, "tilemoe_kernels", [layer, "--device", "cuda", "--repeat", "1"], 120,
                         lambda output, layer=layer: kernel_profile(output, layer), prefix, missing)
            for layer in PROFILED]


STAGES = {
    "test": test,
    "ptx": ptx,
    "torch": torch,
    "command": command,
    "sizes": sizes,
    "two-gpus": two_gpus,
    "one-gpu-ranks": one_gpu_ranks,
    "repeat": repeat,
    "digests": digests,
    "huge": huge,
    **{f"sanitize-{i}": sanitize(tool) for i, tool in enumerate(SANITIZERS, start=1)},
    "bench": bench,
    "router": router,
    "adapters": adapters,
    "quantized": quantized,
    "fp8": fp8,
    "activations": activations,
    "jax": jax,
    "kernels": kernels,
    "configurations": configurations,
    "profile": profile,
}
# Numbers of items that run at a time, in stages without timing: tests mostly wait for the CPU.
AT_ONCE = {"test": 6, "ptx": 6, "sizes": 2, "repeat": 5, "huge": 2,
           **{f"sanitize-{i}": 4 for i in range(1, len(SANITIZERS) + 1)}}
