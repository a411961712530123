"""Programs that take turns: what the comparisons share. Needs nothing but Python."""

import json
import os
import pathlib
import subprocess
import sys


class Worker:
    """A program that does one round for every line it is sent and waits idle in between."""

    def __init__(self, command, environment=None):
        self.command = [str(word) for word in command]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)
        self.ready = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{sys.argv[0]}: error: {self.command[0]} ended with status "
                     f"{self.process.wait()}")
        return json.loads(line)

    def round(self):
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        return self.read()

    def finish(self):
        self.process.stdin.close()
        result = self.read()
        self.process.wait()
        return result


def peer_worker(python, name, case, passes="both", threads=0, environment=None, kernels=False):
    """The peer `name` of peers.py in a process of `python`'s, which need not have tilemoe. case:
    the fields of cases.Case; kernels: its entry has each kernel's time. Where it cannot run,
    `ready` has `left_out` that says why."""
    script = pathlib.Path(__file__).with_name("alone.py")
    return Worker([python, script, "--peer", name, "--case", json.dumps(case), "--pass", passes,
                   "--threads", threads, *(["--kernels"] if kernels else [])], environment)


def claim_stdout():
    """Standard output for answers alone: what libraries print from now on goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(answers, name, one_round, entry):
    """The worker's other end: a round for every line of standard input, then its entry."""
    print(json.dumps({"ready": name}), file=answers)
    for _ in sys.stdin:
        print(json.dumps({name: one_round()}), file=answers)
    print(json.dumps([entry()]), file=answers)
