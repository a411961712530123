"""Programs of several processes on this machine: scenarios that every process runs once, and what
went wrong in each."""

import argparse
import datetime
import faulthandler
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

LIMIT_S = 240
TIMEOUT_S = 60  # timeout of a collective
# What a scenario leaves for a result that has to end its process, before a regular expression of the
# process's last words.
ENDS = "the process should have ended alone, saying: "


def expect(message, call, kind=ValueError):
    try:
        call()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {message}")


def on(device):
    """A scenario of that device alone."""

    def mark(scenario):
        scenario.device = device
        return scenario

    return mark


def of_world(scenarios, world, device="cpu"):
    here = [s for s in scenarios if getattr(s, "device", device) == device]
    return [scenario for scenario in here if world in scenarios[scenario]]


def run_rank(scenarios, job_type, rank, world, folder, device, limit_s, more):
    """job_type may say otherwise than this does: gpu, the one that all ranks share; backend."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.8 * limit_s)  # where it hangs
    if device == "cuda":
        torch.cuda.set_device(getattr(job_type, "gpu", rank))
    dist.init_process_group(
        getattr(job_type, "backend", "nccl" if device == "cuda" else "gloo"),
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    job = job_type(rank, world, folder, device, **more)
    results = {}
    for scenario in of_world(scenarios, world, device):
        try:
            scenario(job)
            results[scenario.__name__] = ""
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


def launch(program, names, world, folder, device, only="", limit_s=LIMIT_S, **more):
    """Runs the processes, for at most limit_s -> by rank {scenario: "" or what went wrong}; more:
    values of the program's own options."""
    for left in [folder / "rendezvous", *(folder / f"{rank}.json" for rank in range(world))]:
        left.unlink(missing_ok=True)  # by a run before
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(world)]
    arguments = ["--folder", folder, "--device", device, "--world", str(world), "--only", only]
    arguments += ["--limit", str(limit_s)]
    arguments += [f"--{name}={value}" for name, value in more.items()]
    processes = [
        subprocess.Popen(
            [sys.executable, program, "--rank", str(rank), *arguments], stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        for rank in range(world)
    ]
    end = time.monotonic() + limit_s
    try:
        for process in processes:
            process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # a scenario without a result is an error
    finally:
        ended = [process.poll() not in (None, 0) for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    results = []
    for rank, log in enumerate(logs):
        log.seek(0)
        output = log.read()
        file = folder / f"{rank}.json"
        done = json.loads(file.read_text()) if file.exists() else {}
        missing = f"no result within {limit_s} s; its output:\n{output[-4000:]}"
        for name, said in done.items():
            if said.startswith(ENDS) and ended[rank] and re.search(said[len(ENDS) :], output):
                done[name] = ""
        results.append({name: done.get(name, missing) for name in names})
        log.close()
    return results


def main_of(program, description, scenarios, job_type, **own):
    """The main function of a program that also starts its processes. own: options in addition to
    those here, as argparse takes them; job_type has their values by name."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world", type=int, default=2, help="processes")
    parser.add_argument("--folder", type=pathlib.Path, help="of the results; else temporary")
    parser.add_argument("--rank", type=int, help="run one process, not all")
    parser.add_argument("--only", default="", help="scenarios whose name this is found in")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for all of it")
    for name, how in own.items():
        parser.add_argument(f"--{name}", **how)
    options = parser.parse_args()
    more = {name: getattr(options, name) for name in own if getattr(options, name) is not None}
    scenarios = {s: w for s, w in scenarios.items() if re.search(options.only, s.__name__)}
    if options.rank is not None:
        place = options.rank, options.world, options.folder, options.device, options.limit
        run_rank(scenarios, job_type, *place, more)
        return 0
    names = [s.__name__ for s in of_world(scenarios, options.world, options.device)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or pathlib.Path(temporary)).resolve()  # a URL has it
        folder.mkdir(parents=True, exist_ok=True)
        place = options.world, folder, options.device
        results = launch(program, names, *place, options.only, options.limit, **more)
    wrong = 0
    for name in names:
        said = [f"rank {rank}: {r[name]}" for rank, r in enumerate(results) if r[name]]
        print(f"{name} {'failed' if said else 'passed'}", *said, sep="\n  ")
        wrong += bool(said)
    return 1 if wrong else 0
