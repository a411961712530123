"""What the programs that run.py starts have said, as the results files keep it."""

import csv
import io
import json
import re


METRICS = [
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg.per_second",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
]


def test_counts(file):
    """Of a GoogleTest program: how many tests there were and failed, and which were skipped."""
    suites = json.loads(file.read_text())
    if suites["tests"] == 0:
        raise ValueError("no test ran")
    tests = [(suite["name"], one) for suite in suites["testsuites"] for one in suite["testsuite"]]
    skipped = [f"{suite}.{one['name']}" for suite, one in tests if one.get("result") == "SKIPPED"]
    return {"tests": suites["tests"], "failures": suites["failures"], "skipped": skipped}


def check_counts(output):
    """Cases, tensors and failures, and how many results were spoiled on purpose."""
    lines = [line for line in output.splitlines() if " cases, " in line or "on purpose" in line]
    return "; ".join(lines) or None


def layer_figures(file):
    """Of check_sizes.py with one layer."""
    (figures,) = json.loads(file.read_text()).values()
    return figures


def scenario_results(output):
    """Of distributed_worker.py and its like: {scenario: passed or failed}"""
    return dict(re.findall(r"^(\w+) (passed|failed)$", output, re.MULTILINE))


def shared_gpu_results(output, log):
    """Of expert_parallel_one_gpu.py, and what its first rank saw; nothing where no row went through
    symmetric memory."""
    results = scenario_results(output)
    if results.get("exchanges_were_through_symmetric_memory") != "passed":
        raise ValueError("nothing says that rows went through symmetric memory")
    seen = re.findall(r"^(?:a barrier: .*|\d+ exchanges|after .* s: .*)$", log.read_text(),
                      re.MULTILINE)
    return {"scenarios": results, "seen": seen}


def bench_entries(file):
    return json.loads(file.read_text())


def sanitizer_errors(output):
    """The sanitizer's own last word: `ERROR SUMMARY: 0 errors`, or racecheck's counts."""
    return re.findall(r"========= ((?:ERROR|RACECHECK) SUMMARY: .*)", output)


def kernel_profile(output):
    """Each profiled launch: its kernel's short name and the metrics, in base units."""
    table = output[output.index('"ID"'):] if '"ID"' in output else ""
    launches = {}
    for row in csv.DictReader(io.StringIO(table)):
        kernel = re.sub(r"\(.*", "", row["Kernel Name"])
        launch = launches.setdefault(row["ID"], {"kernel": kernel, "grid": row["Grid Size"]})
        value = row["Metric Value"].replace(",", "")
        launch[row["Metric Name"]] = float(value) if value else None
    return list(launches.values())

