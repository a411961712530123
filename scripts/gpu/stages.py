"""The stages of run.py: what each runs, and what it takes.

A stage is a list of items, each one command with a time limit of its own. What an item needs and
this machine lacks is found out before it runs, and named.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Callable

from reports import (METRICS, bench_entries, check_counts, kernel_profile, sanitizer_errors,
                     test_counts)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CONFIGS = ["7b-n256", "7b-n1024", "30b-n256", "30b-n1024", "olmoe", "qwen3-235b", "gpt-oss-20b",
           "kimi-linear", "qwen3-next", "wide", "few-rows"]
SPARSE = ["sparse-e128", "sparse-e256", "sparse-e512"]
# Routing by top-K, few rows and many an expert, rounding, long experts in shares, blocks of columns.
REPEATED = [f"{case}/bfloat16" for case in
            ("swiglu", "many-pairs", "rounded-nearest", "long-experts", "column-blocks")]
HUGE = ["huge-rows", "huge-hidden", "deepseek-v3.2"]
PROFILED = ["7b-n256", "7b-n1024", "qwen3-235b"]
LONG_TESTS = {"cuda_backward_steps_test": 3}  # programs whose tests are dealt to so many processes
SANITIZERS = ["memcheck", "racecheck", "synccheck", "initcheck"]
# Of the step tests, the tiles that the cost model does not pick for the registry's small cases.
FORCED_TILES = "*EqualTheCpus/swiglu_cooperative*:*EqualTheCpus/swiglu_p*:*EqualTheCpus/down_*"


@dataclasses.dataclass
class Item:
    name: str
    command: list
    limit_s: int
    report: Callable[[str], object]  # what the results file says of it, from its output
    missing: str | None = None  # why it cannot run here


class Machine:
    """The programs to run and the tools that are here."""

    def __init__(self, programs):
        self.programs = {}
        for path in sorted(pathlib.Path(programs).rglob("*")):
            if path.is_file() and os.access(path, os.X_OK):
                self.programs.setdefault(path.name, path)
        self.sanitizer = find_tool("compute-sanitizer")
        self.profiler = find_tool("ncu")

    def program(self, name):
        return self.programs.get(name, name)

    def tests(self):
        return [n for n in self.programs if n.startswith("cuda_") and n.endswith("_test")]

    def item(self, name, program, arguments, limit_s, report, tool=(), missing=None):
        if program not in self.programs:
            missing = f"{program} was not built"
        return Item(name, [*tool, self.program(program), *arguments], limit_s, report, missing)


def find_tool(name):
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which(name, path=os.pathsep.join(places))


def test(machine, folder):
    def item(program, part, parts):
        name = program if parts == 1 else f"{program}-{part + 1}-of-{parts}"
        file = folder / f"{name}.json"
        arguments = ["--gtest_brief=1", f"--gtest_output=json:{file}"]
        dealt = ["env", f"GTEST_TOTAL_SHARDS={parts}", f"GTEST_SHARD_INDEX={part}"]
        return machine.item(name, program, arguments, 300, lambda _: test_counts(file), dealt)

    items = [item(program, part, LONG_TESTS.get(program, 1)) for program in machine.tests()
             for part in range(LONG_TESTS.get(program, 1))]
    check = ["check", "--device", "cuda", "--pass", "all"]
    return [*items, machine.item("check", "tilemoe", check, 240, check_counts)]


def repeat(machine, folder):
    """The same bits a thousand times on a busy GPU."""
    return [machine.item(name.replace("/", "-"), "tilemoe",
                         ["check", "--device", "cuda", "--pass", "all", "--repeat", "1000", name],
                         120, check_counts) for name in REPEATED]


def huge(machine, folder):
    """Tensors, then weights, of more than 2^31 elements."""
    return [machine.item(name, "tilemoe", ["check", "--device", "cuda", "--pass", "all", name],
                         240, check_counts) for name in HUGE]


def sanitize(tool):
    def stage(machine, folder):
        missing = None if machine.sanitizer else "compute-sanitizer is not installed"
        prefix = [machine.sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        check = ["check", "--device", "cuda", "--pass", "all", "--reduced"]
        tiles = ["--gtest_brief=1", f"--gtest_filter={FORCED_TILES}"]
        return [
            machine.item("check-reduced", "tilemoe", check, 400, sanitizer_errors, prefix, missing),
            machine.item("forced-tiles", "cuda_forward_steps_test", tiles, 200, sanitizer_errors,
                         prefix, missing),
        ]

    return stage


def bench(machine, folder):
    def item(name, *arguments):
        file = folder / f"{name}.json"
        command = ["bench", "--device", "cuda", *arguments, "--json", str(file)]
        return machine.item(name, "tilemoe", command, 120, lambda _: bench_entries(file))

    items = [item(config, "--config", config) for config in CONFIGS]
    items += [item(f"{config}-zipf", "--config", config, "--routing", "zipf", "--baseline", "none")
              for config in ("7b-n256", "qwen3-235b")]
    items += [item("7b-n256-one-expert", "--config", "7b-n256", "--routing", "one-expert"),
              item("gpt-oss-20b-biases", "--config", "gpt-oss-20b", "--biases",
                   "--baseline", "none")]
    items += [item(f"{config}-nearest", "--config", config, "--rounding", "nearest",
                   "--baseline", "none") for config in CONFIGS]
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
    "repeat": repeat,
    "huge": huge,
    **{f"sanitize-{i}": sanitize(tool) for i, tool in enumerate(SANITIZERS, start=1)},
    "bench": bench,
    "rounding": rounding,
    "configurations": configurations,
    "profile": profile,
}
# Items that run side by side, where none is timed: the tests wait for the CPU's results above all.
AT_ONCE = {"test": 6, "repeat": 5, "huge": 2, **{f"sanitize-{i}": 2 for i in range(1, len(SANITIZERS) + 1)}}
