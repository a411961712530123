"""Run one peer in a separate process: `python worker.py JOB`.

The Python has torch and the peer. Each line of standard input is a command, "prepare", "round" or
"finish"; each answer is a line of JSON. Output of libraries goes to standard error.
"""

import importlib.util
import json
import os
import pathlib
import sys

PACKAGE = "tilemoe_bench"


def load_package():
    """Load this folder as a separate package, which does not require tilemoe."""
    folder = pathlib.Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])
    load = lambda name: importlib.import_module(f"{PACKAGE}.{name}")
    return map(load, ("measure", "peers", "problem"))


def answers(job, commands):
    """Yield an answer to each command."""
    import torch

    measure, peers, problem = load_package()
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    peer = peers.peer_named(job["peer"])
    if job["options"]:
        peer = type(peer.__name__, (peer,), {"options": {**peer.options, **job["options"]}})
    return measure.answers(peer, problem.Case(**job["case"]), job, commands)


def main():
    sys.path.pop(0)  # this folder, whose file names are not module names
    job = json.loads(sys.argv[1])
    if (
        job["root"] and job["root"] not in sys.path
    ):  # folder of the tilemoe that started this process
        sys.path.insert(0, job["root"])
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for answer in answers(job, map(str.strip, sys.stdin)):
        print(json.dumps(answer), file=output)


if __name__ == "__main__":
    main()
