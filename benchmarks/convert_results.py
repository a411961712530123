#!/usr/bin/env python3
"""Convert the results files of benchmarks/results from one JSON document per program to JSON lines.

  python3 benchmarks/convert_results.py     # writes *.jsonl there and tests/data/*.jsonl

Writes one measurement per line (python/tilemoe/bench/records.py): medians and quartiles in place of
rounds, outcomes in place of reports. The documents themselves remain in the history.
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS, DATA = ROOT / "benchmarks" / "results", ROOT / "tests" / "data"
sys.path.append(str(ROOT / "python" / "tilemoe" / "bench"))
from records import Measurement, quartiles, write  # noqa: E402

SIZES = "TdnEK"
PACKAGES = ("tilemoe", "torch", "triton", "transformers", "torchtitan", "sonic-moe", "quack-kernels",
            "nvidia-cutlass-dsl", "scattermoe", "cuda", "nccl", "onednn")  # fmt: skip
# The step that a kernel belongs to: the first of these in its name.
STEPS = {"combine_rows": "combine", "ActivationGradientEpilogue": "activation_gradient",
         "SwiGLUEpilogue": "up_projection", "ActivationEpilogue": "up_projection",
         "WeightGradientEpilogue": "weight_gradients", "SummedWeights": "input_gradient",
         "StoreEpilogue": "down_projection"}  # fmt: skip


def load(name):
    return json.loads((RESULTS / name).read_text())


def version_of(build):
    return re.match(r"TileMoE ([\d.]+)", build)[1]


def versions(entry, *outer):
    """What of the versions a reader needs, with the driver."""
    found = {}
    for one in (entry, *outer):
        given = dict(one.get("versions", {}))
        if "build" in one:
            given.setdefault("tilemoe", version_of(one["build"]))
        if "cuda_runtime" in given:
            given["cuda"] = given.pop("cuda_runtime")
        for name in PACKAGES:
            if name in given:
                found.setdefault(name, given[name].partition("+")[0])
        if "driver_version" in one:
            found.setdefault("driver", one["driver_version"])
    return found


def sizes(shape):
    return {letter: shape[letter] for letter in SIZES}


def present(**values):
    return {name: value for name, value in values.items() if value is not None}


def layer_values(entry):
    """Of an entry of `python -m tilemoe.bench`, with its rounds."""
    rounds, host = entry["round_times"], entry.get("host_round_times") or []
    values = {**sizes(entry["shape"]), "dtype": entry["dtype"], "rounds": entry["rounds"]}
    for way, name in (("fwd_ms", "forward"), ("bwd_ms", "backward")):
        values[f"{name}_ms"] = quartiles(r[way] for r in rounds)
        if host:
            values[f"host_{name}_us"] = statistics.median(1e3 * r[way] for r in host)
    values["both_ms"] = quartiles(sum(r.values()) for r in rounds)
    for name in ("tflops", "saved_bytes", "peak_bytes", "resident_bytes", "floor_bytes",
                 "reserved_bytes", "threads", "load_average"):  # fmt: skip
        if entry.get(name) is not None:
            values[name] = entry[name]
    return values


def against(ours, peer):
    """TileMoE's time over the peer's, medians of the rounds' ratios."""
    over = (ours.get("time_of_peers") or {}).get(peer)
    if over is None:
        return {}
    return {"forward_ratio": over["fwd_ms"], "backward_ratio": over["bwd_ms"]}


def step_of(kernel):
    return next((step for part, step in STEPS.items() if part in kernel), "others")


def kernel_values(entry):
    """{"forward.up_projection_ms": ms}: kernels alone, by torch's profiler."""
    values = {}
    for way, kernels in entry.get("kernels", {}).items():
        for kernel, ms in kernels.items():
            name = f"{way}.{step_of(kernel)}_ms"
            values[name] = values.get(name, 0.0) + ms
    return values


def peers():
    results = load("gpu_peers.json")
    for item in results["items"]:
        ours = item["report"][0]
        for entry in item["report"]:
            if entry["backend"] == "tilemoe-before":
                continue
            yield Measurement(f"peers/{entry['config']}/{entry['backend']}", entry["device"],
                              versions(entry, ours, results), ours["commit"],
                              {**layer_values(entry), **against(ours, entry["backend"])})  # fmt: skip


def archs():
    for file, skipped in (("gpu_kits.json", ()), ("gpu_kits_scattermoe.json", ("tilemoe",))):
        results = load(file)
        for item in results["items"]:
            ours = item["report"][0]
            part = "archs" if file == "gpu_kits.json" else "archs-scattermoe"
            for entry in item["report"]:
                if entry["backend"] in skipped:
                    continue
                yield Measurement(f"{part}/{entry['config']}/{entry['backend']}", entry["device"],
                                  versions(entry, ours, results), ours["commit"],
                                  {**layer_values(entry), **kernel_values(entry)})  # fmt: skip


def cpp_values(entry):
    """Of an entry of `tilemoe bench`: medians of the program's own rounds."""
    host = entry["host_ms"]
    values = {**sizes(entry["shape"]), "dtype": entry["dtype"], "rows": entry["rows"],
              "rounds": entry["rounds"]}  # fmt: skip
    for way, name in (("fwd_ms", "forward"), ("bwd_ms", "backward")):
        values |= present(**{f"{name}_ms": entry[way],
                             f"{name}_limit_ms": entry["limit_ms"].get(name),
                             f"host_{name}_us": name in host and 1e3 * host[name] or None})
    return {**values, **{name: entry[name] for name in ("saved_bytes", "library_peak_bytes")}}


def layers():
    for file, part in (("gpu_bench.json", "layers"), ("gpu_rounding.json", "rounding-kernels")):
        results = load(file)
        for item in results["items"]:
            (entry,) = item["report"]
            where = entry["device"], versions(entry, results), entry["commit"]
            yield Measurement(f"{part}/{item['item']}", *where, cpp_values(entry))
            plain = entry["routing"] == "random" and entry["rounding"] == "none"
            if not plain and part == "layers":
                continue
            for name, step in entry["steps"].items():
                yield Measurement(f"{part}/{item['item']}/{name}", *where, step)


def decode():
    results = load("gpu_few_tokens.json")
    for entry in results["entries"]:
        for peer, rounds in entry["round_us"].items():
            yield Measurement(
                f"decode/{entry['config']}/T={entry['shape']['T']}/{peer}", results["device"],
                versions(results), results["commit"],
                {**sizes(entry["shape"]), "dtype": entry["dtype"], "forward_us": quartiles(rounds),
                 "experts": statistics.mean(entry["touched"]), "weight_bytes": entry["touched_bytes"],
                 "limit_us": entry["bytes_us"], "launches": entry["launches"][peer],
                 "copies": entry["copies"], "rounds": results["rounds"]})  # fmt: skip


def expert_parallel():
    results = load("gpu_expert_parallel.json")
    for entry in results["entries"]:
        name = f"expert-parallel/{entry['layer']}/T={entry['shape']['T']}"
        where = results["device"], versions(results), results["commit"]
        links = {f"{link}_gb_per_s": of["GB_per_s"] for link, of in entry["links"].items()}
        yield Measurement(f"{name}/links", *where, {"ranks": entry["ranks"], **links})
        for way, rounds in entry["round_ms"].items():
            values = {**sizes(entry["shape"]), "dtype": entry["dtype"], "ranks": entry["ranks"],
                      "both_ms": quartiles(rounds)}  # fmt: skip
            values |= present(ratio_to_own=(entry["over_own"] or {}).get(way),
                              peak_bytes=entry["peak_bytes"][way],
                              plan_bytes=entry["plan_bytes"][way])  # fmt: skip
            values["in_graph"] = way in entry["in_graph"]
            yield Measurement(f"{name}/{way}", *where, values)


def memory_curve():
    for entry in load("memory_curve.json"):
        yield Measurement(
            f"memory-curve/{entry['config']}/{entry['column_blocks']}", entry["device"],
            versions(entry), entry["commit"],
            {**sizes(entry["shape"]), "dtype": entry["dtype"],
             "column_blocks": entry["column_blocks"],
             "library_peak_bytes": entry["library_peak_bytes"],
             "saved_bytes": entry["saved_bytes"], "both_ms": quartiles(entry["round_ms"]),
             "ratio_to_one_block": entry["time_of_first"]})  # fmt: skip


def memory_options():
    for entry in load("gpu_torch_layer.json"):
        yield Measurement(f"memory-options/{entry['config']}/{entry['backend']}", entry["device"],
                          versions(entry), entry["commit"], layer_values(entry))  # fmt: skip


def cpu_layer():
    for entry in load("cpu_layer.json"):
        yield Measurement(f"cpu-layer/{entry['dtype']}/{entry['backend']}", entry["device"],
                          versions(entry), entry["commit"], layer_values(entry))  # fmt: skip


def routing():
    results = load("gpu_routing.json")
    for entry in results["items"][0]["report"]:
        groups = {name: entry[name] for name in ("n_group", "topk_group") if name in entry}
        us = {f"{name.replace(', each ', '-')}_us": value for name, value in entry["us"].items()}
        yield Measurement(f"routing/{entry['config']}/{entry['dtype']}", results["name"],
                          versions(results), results["commit"],
                          {**{letter: entry[letter] for letter in "TEK"}, **groups, **us})  # fmt: skip


def host_time():
    results = load("host_time.json")
    for what, us in results["us"].items():
        yield Measurement(f"host-time/{what.replace(' ', '-')}", results["device"],
                          versions(results), results["commit"],
                          {f"{way.replace(', ', '-').replace(' ', '-')}_us": value
                           for way, value in us.items()})  # fmt: skip


def rounding():
    for file in sorted((RESULTS / "rounding").glob("*.json")):
        run = json.loads(file.read_text())
        values = {name: run[name] for name in ("model", "method", "seed", *SIZES, "m", "steps",
                                                "tokens_of_step", "unique_tokens")}  # fmt: skip
        values |= present(tiles=run["tiles"], loss=run["held_out"]["top_k"],
                          loss_as_trained=run["held_out"].get("as_trained"),
                          validation_tokens=run["held_out_tokens"],
                          initial=run["initial"], batches=run["batches"],
                          tokens_per_s=run["tokens_per_s"])  # fmt: skip
        mean = run["whole"]
        values |= {f"mean_{name}": mean[name] for name in mean}
        yield Measurement(f"rounding/{run['name']}", run["device"], versions(run), run["commit"], values)
    for entry in load("rounding_time.json")["entries"]:
        name = "/".join(str(entry[key]) for key in ("part", "model", "tiles", "method"))
        values = {key: entry[key] for key in ("model", "tiles", "method", "T")}
        values |= sizes(entry["shape"]) if "shape" in entry else {}
        values |= present(rows=entry.get("rows"), forward_ms=entry.get("fwd_ms"),
                          backward_ms=entry.get("bwd_ms"), step_ms=entry.get("ms"),
                          peak_bytes=entry.get("peak_bytes"))  # fmt: skip
        for way, of in entry.get("profile_ms", {}).items():
            values |= {f"{way}.{part}_ms": ms for part, ms in of.items()}
        yield Measurement(f"rounding-time/{name}", entry["device"], versions(entry), entry["commit"],
                          values)  # fmt: skip


def training_values(entry, options):
    """Of a training that was timed: the step with its quartiles where three were kept."""
    values = {**options, "micro_batch": entry["micro_batch"], "step_ms": entry["ms"]}
    low, high = entry["spread_ms"]
    values |= {"step_least_ms": low, "step_most_ms": high}
    values |= present(update_ms=entry.get("update_ms"),
                      tokens_per_s_and_process=entry["tokens_per_s_and_process"], mfu=entry["mfu"],
                      peak_bytes=entry["peak_bytes"], reserved_bytes=entry["reserved_bytes"],
                      first_loss=entry["losses"][0] if entry.get("losses") else None,
                      last_loss=entry["losses"][-1] if entry.get("losses") else None,
                      does_not_fit_micro_batch=entry.get("does_not_fit_micro_batch"))  # fmt: skip
    kinds = entry.get("kinds_ms") or {}
    return values | {f"kind.{kind}_ms": ms for kind, ms in kinds.items()}


def pretrain_study():
    for entry in load("pretrain_study.json"):
        options = {name: entry[name] for name in ("config", "layers", "experts", "recompute", "share",
                                                  "processes", "kept", "once", "turns", "compile",
                                                  "measured_steps")}  # fmt: skip
        yield Measurement(f"pretrain-study/{entry['name']}", entry["device"], versions(entry),
                          entry["commit"], training_values(entry, options))  # fmt: skip


def pretrain_speed():
    for size in ("7b", "s1"):
        results = load(f"pretrain_speed_{size}_h100.json")
        for entry in results["entries"]:
            options = {name: entry[name] for name in ("config", "experts", "precision", "recompute",
                                                      "compile")}  # fmt: skip
            options |= present(layers=entry["layers"])
            options |= {name: results[name] for name in ("processes", "measured_steps")}
            yield Measurement(f"pretrain-speed/{entry['config']}/{entry['micro_batch']}",
                              results["device"], versions(results), results["commit"],
                              training_values(entry, options))  # fmt: skip


def pretrain_guard():
    """The criteria with their limits, and each run's distance; the loss curve of a run."""
    results = load("pretrain_guard_h200.json")
    where = results["device"], versions(results), results["commit"]
    for part, criteria in results["verdict"].items():
        if part == "misses":
            continue
        for quantity, of in criteria.items():
            runs = of.get("means") or of["off"]
            yield Measurement(f"pretrain-guard/{part}/{quantity}", *where,
                              {"limit": of["bar"], **runs})  # fmt: skip
    yield Measurement("pretrain-guard/run", *where,
                      {"config": results["config"], "steps": results["steps"],
                       "batch": results["batch"], "last": results["last"],
                       **{f"misses.{run}": len(of)
                          for run, of in results["verdict"]["misses"].items()}})  # fmt: skip


def train_cpu():
    both = load("train_cpu.json")
    study, timed = both["study"], both["timed"]

    def where(of):
        onednn = re.search(r"oneDNN ([\d.]+)", of["backend"])[1]
        return of["device"], {"onednn": onednn}, of["commit"]

    for routing, values in study["bits_per_byte"].items():
        for seed, value in zip(study["seeds"][routing], values):
            yield Measurement(f"train-cpu/{routing}/{seed}", *where(study),
                              {"bits_per_byte": value, "parameters": study["parameters"],
                               "steps": study["config"]["steps"]})  # fmt: skip
    pairs = study["nearest_pairs"]
    yield Measurement("train-cpu/xz", *where(study), {"bits_per_byte": study["xz_bits_per_byte"]})
    yield Measurement("train-cpu/nearest-pairs", *where(study),
                      {"dropped_share": pairs["dropped"], "added_share": pairs["added"]})  # fmt: skip
    yield Measurement("train-cpu/timed", *where(timed),
                      {"seconds": timed["seconds"], "tokens_per_s": timed["median_tokens_per_s"],
                       "bits_per_byte": timed["bits_per_byte"], "threads": 2,
                       "load_average": timed["load_average_before"]})  # fmt: skip


def train_devices():
    results = load("train_devices.json")
    devices = {"cuda": "NVIDIA H100 80GB HBM3", "cpu": "5 of 16 threads of a CPU"}
    for device, values in results["bits_per_byte"].items():
        for seed, value in zip(results["seeds"], values):
            yield Measurement(f"train-devices/{device}/{seed}", devices[device], {},
                              results["commit"],
                              {"bits_per_byte": value,
                               "tokens_per_s": results["median_tokens_per_s"][device]})  # fmt: skip
    yield Measurement("train-devices/difference", devices["cuda"], {}, results["commit"],
                      {name: results[name] for name in ("first_losses_differ_by", "means_differ_by",
                                                        "cpu_seeds_spread")})  # fmt: skip


def kill_resume():
    results = load("kill_resume.json")
    program = results["program"]
    yield Measurement("kill-resume", results["machine"], {"tilemoe": version_of(program)},
                      re.search(r"commit (\w+)", program)[1],
                      {name: results[name] for name in ("kills", "inside_save", "keep", "steps",
                                                        "killed_after_a_resume", "save_every",
                                                        "log_lines_equal")})  # fmt: skip


def wheel():
    results = load("wheel.json")
    inside = {f"{pathlib.Path(file).name.partition('.')[0].partition('-')[0]}_bytes": size
              for file, size in results["largest_bytes_inside"].items()}  # fmt: skip
    kernels = {f"kernels_{arch}": count for arch, count in results["kernels"].items()}
    yield Measurement("wheel", "x86-64", {"tilemoe": results["wheel"].split("-")[1],
                                          "nvcc": results["nvcc"]}, results["commit"],
                      {"wheel": results["wheel"], "bytes": results["bytes"], **inside, **kernels})


SUMMARY = re.compile(r"(\d+) (errors|hazards)")


def outcome(item):
    """What a reader needs of an item of a GPU stage: its counts."""
    report = item.get("report")
    values = {"status": item["status"], "seconds": item["seconds"]}
    if isinstance(report, list):
        report = " ".join(report)
    if isinstance(report, str):
        for number, what in re.findall(r"(\d+) (cases|tensors|failures|passed|errors|hazards)", report):
            values[what] = int(number)
        return values
    scenarios = report.get("scenarios") or {}
    if report.get("tests") is not None:
        values |= {"tests": report["tests"]}
        failures = report.get("failures", len(report.get("failed") or ()))
        values |= {"failures": failures, "skipped": len(report.get("skipped") or ())}
    elif scenarios or all(isinstance(one, str) for one in report.values()):
        said = scenarios or report
        values |= {"tests": len(said), "failures": sum(one != "passed" for one in said.values())}
    elif "error_over_expected" in report:
        values |= {"failures": len(report["failed"]),
                   "largest_error_over_expected": max(report["error_over_expected"].values())}
    elif "wrong" in report:
        values |= {"tests": len(report["runs"]), "failures": len(report["wrong"])}
    return values


def gpu_tests():
    stages = ["test", "torch", "two-gpus", "one-gpu-ranks", "repeat", "ptx", "huge", "sizes"]
    for stage in [*stages, *(f"sanitize-{part}" for part in range(1, 5))]:
        results = load(f"gpu_{stage}.json")
        for item in results["items"]:
            report = item.get("report")
            own = report if isinstance(report, dict) else {}
            yield Measurement(f"{stage}/{item['item']}", results["name"], versions(own, results),
                              results["commit"], {"gpus": results["gpus"], **outcome(item)})


def simulator():
    for file in ("simulator.json", "simulator_sm100.json", "simulator_whole.json"):
        results = load(file)
        for device, text in results["simulated"].items():
            items = [item for item in results["items"] if item["simulated"] == device]
            total = lambda key: sum(item[key] for item in items)
            yield Measurement(
                f"simulator/{device}", results["device"],
                {"tilemoe": results["versions"]["tilemoe"]}, results["commit"],
                {"cases": len(items), "runs": total("seeds_done"), "seeds": results["seeds"],
                 "runs_with_findings": total("seeds_with_findings"),
                 "runs_wrong": total("seeds_wrong"), "schedule": results["schedule"],
                 "tensors_equal_to_gpu": total("tensors_equal_to_gpu"),
                 "cases_of_other_bits": len(results["unequal_bits"]),
                 "processor_s": total("processor_seconds")})  # fmt: skip


def tile_times():
    """Test data: the times of all tiles of each projection."""
    results = load("gpu_configurations.json")
    for entry in results["items"][0]["report"]["projections"]:
        yield Measurement(f"tiles/{entry['config']}/{entry['step']}", results["name"],
                          versions(results), results["commit"],
                          {**sizes(entry), "step": entry["step"],
                           **{f"{tile}_ms": ms for tile, ms in entry["ms"].items()}})  # fmt: skip


def orders():
    """Orders of tiles, and kernels by programmatic dependent launch."""
    report = load("gpu_configurations.json")["items"][0]["report"]
    where = report["device"], {"driver": report["driver"]}, report["commit"]
    for entry in report["column_groups"]:
        ms = {f"columns_{width}_ms": ms
              for width, ms in sorted(entry["ms"].items(), key=lambda one: int(one[0]))}
        yield Measurement(f"orders/{entry['config']}/{entry['step']}", *where, ms)
    for entry in report["early_launch"]:
        yield Measurement(f"pdl/{entry['config']}", *where,
                          {f"{way}_ms": ms for way, ms in entry["ms"].items()})  # fmt: skip


def digests():
    """Test data: hashes of every tensor of the verification cases on a GPU."""
    results = load("gpu_digests.json")
    for item in results["items"]:
        report = item["report"]
        for one in report["cases"]:
            arch = report["kit"].partition(",")[0]
            yield Measurement(f"digests/{arch}/{one['case']}", results["name"],
                              {"tilemoe": version_of(results["build"])}, results["commit"],
                              {"arch": arch, "case": one["case"], "seed": report["seed"],
                               "inputs": one["inputs"], **one["tensors"]})  # fmt: skip


FILES = {
    "peers": [peers], "archs": [archs], "layers": [layers], "decode": [decode],
    "expert_parallel": [expert_parallel], "memory": [memory_curve, memory_options],
    "cpu_layer": [cpu_layer], "routing": [routing], "host_time": [host_time],
    "rounding": [rounding], "pretrain": [pretrain_study, pretrain_speed, pretrain_guard],
    "train": [train_cpu, train_devices, kill_resume], "wheel": [wheel], "gpu_tests": [gpu_tests],
    "simulator": [simulator], "orders": [orders],
}  # fmt: skip


def main():
    for name, parts in FILES.items():
        write(RESULTS / f"{name}.jsonl", [one for part in parts for one in part()])
    DATA.mkdir(exist_ok=True)
    write(DATA / "tile_times.jsonl", list(tile_times()))
    write(DATA / "digests.jsonl", list(digests()))


if __name__ == "__main__":
    main()
