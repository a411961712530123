"""Programs that take turns: what the comparisons share."""

import json
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


def serve(name, one_round, entry):
    """The worker's other end: a round for every line of standard input, then its entry."""
    print(json.dumps({"ready": name}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: one_round()}), flush=True)
    print(json.dumps([entry()]), flush=True)
