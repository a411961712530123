"""The stages of run.py: what each runs, and what it takes.

A stage is a list of items, each one command with a time limit of its own. What an item needs and
this machine lacks is found out before it runs, and named.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import sys
from typing import Callable

from reports import (METRICS, bench_entries, check_counts, kernel_profile, layer_figures,
                     sanitizer_errors, scenario_results, shared_gpu_results, test_counts)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CONFIGS = ["7b-n256", "7b-n1024", "30b-n256", "30b-n1024", "olmoe", "qwen3-235b", "gpt-oss-20b",
           "kimi-linear", "qwen3-next", "wide", "few-rows"]
KITS = ("sm80", "sm90")
SPARSE = ["sparse-e128", "sparse-e256", "sparse-e512"]
# Routing by top-K, few rows and many an expert, rounding, long experts in shares, blocks of columns.
REPEATED = [f"{case}/bfloat16" for case in
            ("swiglu", "many-pairs", "rounded-nearest", "long-experts", "column-blocks")]
# GiB of the GPU's memory that each takes; two side by side fit into 78 GiB.
HUGE = {"deepseek-v3.2": 60, "huge-rows": 12, "huge-hidden": 17}
# What is compared with other implementations, and a layer off every tile;
# tests/torch/real_sizes.py has their shapes. The largest take up to 35 GiB: two fit side by side.
SIZES = ["7b-n256", "7b-n1024", "30b-n256", "olmoe", "gpt-oss-20b", "qwen3-235b", "kimi-linear",
         "qwen3-next", "wide", "few-rows", "off-tiles"]
BENCH_SHAPE = [2048, 1024, 512, 16, 4]  # T, d, n, E, K of the command's short bench
ON_TWO_DEVICES = "*Device*"  # of cuda_layer_test
PROFILED = ["7b-n256", "7b-n1024", "qwen3-235b"]
LONG_TESTS = {"cuda_backward_steps_test": 3}  # programs whose tests are dealt to so many processes
SANITIZERS = ["memcheck", "racecheck", "synccheck", "initcheck"]
# Of the step tests, the tiles that the cost model does not pick for the registry's small cases.
FORCED_TILES = "*EqualTheCpus/swiglu_cooperative*:*EqualTheCpus/swiglu_p*:*EqualTheCpus/down_*"
# Routers that the registry has no case of.
ROUTERS = "*InGroups:*GivenIds"
# Parts of W1 that differ in dtype or layout.
TWO_LAYOUTS = "CudaWeightLayouts.*OfTwo*"
TOKEN_ROUTERS = "*InGroups:*OfEveryCountOfTokens:*PastTheCapacity"


# What a kit that the GPU does not take by itself runs again: products' tests, and the layer's of the
# PyTorch package. (The pretraining example runs on GPUs in the stage two-gpus alone.)
PRODUCTS = ["cuda_backward_steps_test", "cuda_forward_steps_test", "cuda_layer_test",
            "cuda_train_test", "cuda_weight_layouts_test"]
TORCH_FILES = ["cuda_test.py", "cuda_transformers_test.py", "functional_test.py",
               "module_routing_test.py", "module_test.py", "torchtitan_test.py"]

# What needs no product: programs, and of one of them some tests.
ROWWISE = {"cuda_early_launch_test": "*", "cuda_routing_test": "*", "cuda_rounding_test": "*",
           "cuda_route_tokens_test": "CudaRouteTokens.*",
           "cuda_router_test": "*", "cuda_score_and_bias_gradient_test": "*",
           "cuda_store_threads_test": "*", "cuda_forward_steps_test": "Combine.*"}
ONE_GPU = "this machine has one GPU"
# Tests of programs that are skipped there; skipped anywhere else, or any other one, is a failure.
SKIPPED_ON_ONE_GPU = frozenset({"DeviceLayerTest.GivesTheSameBitsOnEveryDevice",
                                "DeviceLayerTest.RunsOnTwoDevicesAtOnce",
                                "SumRows.ReadsAnotherGpu"})


@dataclasses.dataclass
class Item:
    name: str
    command: list
    limit_s: int
    report: Callable[[str], object]  # what the results file says of it, from its output
    missing: str | None = None  # why it cannot run here: run.py names it, and goes on
    # Tests that its report may name as skipped; None: it judges that itself (tests/torch/skips.py).
    may_skip: frozenset | None = frozenset()
    kit: str | None = None  # that it asks for (TILEMOE_KIT); None: the GPU's own


class Machine:
    """The programs to run, the tools that are here, the GPUs: MiB of memory each.

    `kits`: that the first GPU runs, beginning with the one that it takes by itself. `wheel`,
    `packages`: of the PyTorch package, and a folder of wheels of what its tests need; `installed`:
    the folder that has them.
    """

    def __init__(self, programs, wheel=None, packages=None, installed=None):
        self.programs = {}
        for path in sorted(pathlib.Path(programs).rglob("*")):
            if path.is_file() and os.access(path, os.X_OK):
                self.programs.setdefault(path.name, path)
        self.sanitizer = find_tool("compute-sanitizer")
        self.profiler = find_tool("ncu")
        self.gpus, self.kits = [], []
        self.commit = None  # that the programs were built from
        self.wheel, self.packages, self.installed = wheel, packages, installed

    def program(self, name):
        return self.programs.get(name, name)

    def tests(self):
        return [n for n in self.programs if n.startswith("cuda_") and n.endswith("_test")]

    def forced_kits(self):
        return self.kits[1:]

    def item(self, name, program, arguments, limit_s, report, tool=(), missing=None, kit=None):
        if program not in self.programs:
            missing = f"{program} was not built"
        return Item(name, [*asking(kit), *tool, self.program(program), *arguments], limit_s, report,
                    missing, kit=kit)

    def torch_item(self, name, arguments, limit_s, report, gpus=1, kit=None):
        """A command of this Python with the wheel."""
        missing = None
        if not self.wheel:
            missing = "no wheel of the PyTorch package was named by --wheel"
        elif importlib.util.find_spec("torch") is None:
            missing = "this Python has no torch"
        elif len(self.gpus) < gpus:
            missing = ONE_GPU
        # Whatever this shell is set up for, the package is the wheel's.
        python = ["env", "-u", "TILEMOE_LIBRARY_DIR", f"PYTHONPATH={self.installed}",
                  sys.executable]
        return Item(name, [*asking(kit), *python, *arguments], limit_s, report, missing,
                    may_skip=None, kit=kit)


def asking(kit):
    return ["env", f"TILEMOE_KIT={kit}"] if kit else []


def named(name, kit):
    return f"{name}-{kit}" if kit else name


def find_tool(name):
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which(name, path=os.pathsep.join(places))


def test(machine, folder):
    def item(program, part, parts, kit=None):
        name = program if parts == 1 else f"{program}-{part + 1}-of-{parts}"
        name = named(name, kit)
        file = folder / f"{name}.json"
        arguments = ["--gtest_brief=1", f"--gtest_output=json:{file}"]
        dealt = ["env", f"GTEST_TOTAL_SHARDS={parts}", f"GTEST_SHARD_INDEX={part}"]
        made = machine.item(name, program, arguments, 300, lambda _: test_counts(file), dealt,
                            kit=kit)
        if len(machine.gpus) < 2:
            made.may_skip = SKIPPED_ON_ONE_GPU
        return made

    def items(programs, kit=None):
        check = ["check", "--device", "cuda", "--pass", "all"]
        return [*(item(program, part, LONG_TESTS.get(program, 1), kit) for program in programs
                  for part in range(LONG_TESTS.get(program, 1))),
                machine.item(named("check", kit), "tilemoe", check, 240, check_counts, kit=kit)]

    example = "example_layer_cuda"
    return [*items(machine.tests()),
            *(one for kit in machine.forced_kits() for one in items(PRODUCTS, kit)),
            machine.item(example, example, [], 60, str.splitlines)]


def ptx(machine, folder):
    """What the library has PTX for, 8.0's, which the driver compiles for this GPU: what a GPU runs
    that the library has no machine code for. The rowwise kernels, and the products of the kit sm80;
    sm90's have no PTX."""
    forced = ["env", "CUDA_FORCE_PTX_JIT=1"]

    def item(program, tests):
        file = folder / f"{program}.json"
        arguments = ["--gtest_brief=1", f"--gtest_filter={tests}", f"--gtest_output=json:{file}"]
        return machine.item(program, program, arguments, 300, lambda _: test_counts(file), forced)

    items = [item(program, tests) for program, tests in ROWWISE.items()]
    if "sm80" in machine.kits:
        check = ["check", "--device", "cuda", "--pass", "all", "--reduced"]
        items.append(machine.item("check-reduced-sm80", "tilemoe", check, 440, check_counts, forced,
                                  kit="sm80"))
    return items


def repeat(machine, folder):
    """The same bits a thousand times on a busy GPU."""
    return [machine.item(named(name.replace("/", "-"), kit), "tilemoe",
                         ["check", "--device", "cuda", "--pass", "all", "--repeat", "1000", name],
                         120, check_counts, kit=kit)
            for kit in (None, *machine.forced_kits()) for name in REPEATED]


def digests(machine, folder):
    """Hashes of what the kernels compute, which a simulation of them must compute too: cases made for
    it, and the reduced registry."""
    def item(name, cases, kit):
        return machine.item(named(name, kit), "tilemoe", ["digest", "--device", "cuda", *cases], 120,
                            json.loads, kit=kit)

    return [item(name, cases, kit) for kit in (None, *machine.forced_kits())
            for name, cases in (("calibration", ["calibration-*"]), ("reduced", ["--reduced"]))]


def huge(machine, folder):
    """Weights, then tensors of rows, of more than 2^31 elements."""
    def item(name, gib):
        lacks = min(machine.gpus, default=0) < gib * 1024
        return machine.item(name, "tilemoe", ["check", "--device", "cuda", "--pass", "all", name],
                            240, check_counts,
                            missing=f"it takes {gib} GiB of a GPU's memory" if lacks else None)

    return [item(name, gib) for name, gib in HUGE.items()]


def torch(machine, folder):
    """The PyTorch package's own tests; by a kit that is asked for, those of TORCH_FILES."""
    packages = ["--packages", machine.packages] if machine.packages else []
    if machine.commit:
        packages += ["--commit", machine.commit]

    def item(kit, limit_s):
        out = folder / named("tests", kit)
        files = [f"--file={file}" for file in TORCH_FILES] if kit else []
        return machine.torch_item(
            named("tests", kit),
            [ROOT / "scripts" / "gpu" / "test_torch.py", machine.wheel, *packages, *files,
             "--out", out, "--limit", str(limit_s)],
            limit_s + 20, lambda _: json.loads((out / "gpu_torch.json").read_text()), kit=kit)

    kits = machine.forced_kits()
    return [item(None, 280 if kits else 440), *(item(kit, 140) for kit in kits)]


def command(machine, folder):
    """The wheel's own command: its report of the GPU, the quick cases of the registry, and the time
    of a small layer compared with torch's."""
    def item(name, words, limit_s, report):
        return machine.torch_item(name, ["-m", "tilemoe", *words], limit_s, report)

    def written(name, words, limit_s):
        file = folder / f"{name}.json"
        return item(name, [*words, "--json", file], limit_s, lambda _: json.loads(file.read_text()))

    return [
        item("info", ["info", "--json"], 60, json.loads),
        written("doctor", ["doctor"], 150),
        item("check-reduced", ["check", "--device", "cuda", "--reduced"], 150, check_counts),
        written("bench", ["bench", "--device", "cuda", "--shape", *map(str, BENCH_SHAPE),
                          "--rounds", "5", "--against", "torch-grouped_mm"], 90),
    ]


def sizes(machine, folder):
    """Layers of real models' sizes, every row of every tensor, through the PyTorch package."""
    def item(name):
        file = folder / f"{name}.json"
        script = ROOT / "scripts" / "gpu" / "check_sizes.py"
        return machine.torch_item(name, [script, name, "--json", file], 120,
                                  lambda _: layer_figures(file))

    return [item(name) for name in SIZES]


def two_gpus(machine, folder):
    """What needs two GPUs: of the library, of the package, of the pretraining example."""
    file = folder / "layer.json"
    layer = machine.item("layer", "cuda_layer_test",
                         ["--gtest_brief=1", f"--gtest_filter={ON_TWO_DEVICES}",
                          f"--gtest_output=json:{file}"], 240, lambda _: test_counts(file))
    if len(machine.gpus) < 2:
        layer.missing = layer.missing or ONE_GPU
    tests = ROOT / "tests" / "torch"
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={tests}",
              "--device", "cuda", tests / "cuda_two_devices_test.py"]
    expert_parallel = [tests / "expert_parallel_worker.py", "--device", "cuda"]
    training = folder / "pretrain.json"
    return [
        layer,
        machine.torch_item("package", pytest, 120, lambda output: output.splitlines()[-1:], gpus=2),
        machine.torch_item("processes", [tests / "distributed_worker.py", "--device", "cuda"], 260,
                           scenario_results, gpus=2),
        machine.torch_item("expert-parallel", expert_parallel, 260, scenario_results, gpus=2),
        machine.torch_item("a-dead-rank-of-a-pull",
                           [*expert_parallel, "--only", "a_killed_rank", "--dispatch", "pull"],
                           150, scenario_results, gpus=2),
        machine.torch_item("pretrain", [ROOT / "scripts" / "gpu" / "pretrain_two_gpus.py",
                                        "--json", training, "--work", folder / "pretrain"],
                           300, lambda _: json.loads(training.read_text()), gpus=2),
    ]


def one_gpu_ranks(machine, folder):
    """Ranks that share one GPU and read rows in each other's memory."""
    def item(world, limit_s):
        place = folder / f"{world}-ranks"
        command = [ROOT / "tests" / "torch" / "expert_parallel_one_gpu.py", "--device", "cuda",
                   "--world", str(world), "--folder", place, "--limit", str(limit_s)]
        return machine.torch_item(f"{world}-ranks", command, limit_s + 15,
                                  lambda output: shared_gpu_results(output, place / "0.log"))

    return [item(2, 90), item(4, 120)]


def sanitize(tool):
    def stage(machine, folder):
        missing = None if machine.sanitizer else "compute-sanitizer is not installed"
        prefix = [machine.sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        check = ["check", "--device", "cuda", "--pass", "all", "--reduced"]
        tiles = ["--gtest_brief=1", f"--gtest_filter={FORCED_TILES}"]
        routers = ["--gtest_brief=1", f"--gtest_filter={ROUTERS}"]
        of_tokens = ["--gtest_brief=1", f"--gtest_filter={TOKEN_ROUTERS}"]
        return [
            machine.item("check-reduced", "tilemoe", check, 400, sanitizer_errors, prefix, missing),
            machine.item("forced-tiles", "cuda_forward_steps_test", tiles, 200, sanitizer_errors,
                         prefix, missing),
            machine.item("routers", "cuda_routing_test", routers, 200, sanitizer_errors, prefix,
                         missing),
            *(machine.item(named("check-reduced", kit), "tilemoe", check, 400, sanitizer_errors,
                           prefix, missing, kit) for kit in machine.forced_kits()),
            machine.item("token-routers", "cuda_route_tokens_test", of_tokens, 200,
                         sanitizer_errors, prefix, missing),
            *(machine.item(named("weight-layouts", kit), "cuda_weight_layouts_test",
                           ["--gtest_brief=1", f"--gtest_filter={TWO_LAYOUTS}"], 200,
                           sanitizer_errors, prefix, missing, kit)
              for kit in (None, *machine.forced_kits())),
        ]

    return stage


def bench(machine, folder):
    def item(name, *arguments, kit=None):
        file = folder / f"{name}.json"
        command = ["bench", "--device", "cuda", *arguments, "--json", str(file)]
        return machine.item(name, "tilemoe", command, 120, lambda _: bench_entries(file), kit=kit)

    items = [item(config, "--config", config) for config in CONFIGS]
    items += [item(f"{config}-zipf", "--config", config, "--routing", "zipf", "--baseline", "none")
              for config in ("7b-n256", "qwen3-235b")]
    items += [item("7b-n256-one-expert", "--config", "7b-n256", "--routing", "one-expert"),
              item("gpt-oss-20b-biases", "--config", "gpt-oss-20b", "--biases",
                   "--baseline", "none")]
    items += [item(f"{config}-nearest", "--config", config, "--rounding", "nearest",
                   "--baseline", "none") for config in CONFIGS]
    items += [item(named(config, kit), "--config", config, kit=kit)
              for kit in machine.forced_kits() for config in CONFIGS]
    return items


def rounding(machine, folder):
    """Top-K and token rounding at the same T, E and K, the sparser the fewer rows an expert has."""
    def item(config, rule):
        file = folder / f"{config}-{rule}.json"
        return machine.item(f"{config}-{rule}", "tilemoe",
                            ["bench", "--device", "cuda", "--pass", "forward", "--config", config,
                             "--rounding", rule, "--baseline", "none", "--json", str(file)],
                            120, lambda _: bench_entries(file))

    return [item(config, rule) for config in SPARSE for rule in ("none", "nearest")]


def configurations(machine, folder):
    """The cost model's pick beside every other tile, tile orders and early launches."""
    file = folder / "configurations.json"
    return [machine.item("configurations", "tilemoe_cuda_steps",
                         ["--configurations", "--json", str(file)], 120,
                         lambda _: json.loads(file.read_text()))]


def routing(machine, folder):
    """Top-K, the routing from its pairs, token rounding, and top-K among the best groups."""
    file = folder / "routing.json"
    return [machine.item("routing", "tilemoe_cuda_routing", ["--json", str(file)], 120,
                         lambda _: json.loads(file.read_text()))]


def profile(machine, folder):
    missing = None if machine.profiler else "ncu is not installed"
    prefix = [machine.profiler, "--clock-control", "none", "--csv", "--print-units", "base",
              "-k", "regex:grouped_gemm|combine", "--launch-count", "12", "--metrics",
              ",".join(METRICS)]
    return [
        machine.item(config, "tilemoe",
                     ["bench", "--device", "cuda", "--config", config, "--rounds", "1",
                      "--baseline", "none"],
                     120, kernel_profile, prefix, missing)
        for config in PROFILED
    ]


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
    "rounding": rounding,
    "configurations": configurations,
    "routing": routing,
    "profile": profile,
}
# Items that run side by side, where none is timed: the tests wait for the CPU's results above all.
AT_ONCE = {"test": 6, "ptx": 6, "sizes": 2, "repeat": 5, "huge": 2,
           **{f"sanitize-{i}": 4 for i in range(1, len(SANITIZERS) + 1)}}
