"""Run cases of the registry with one arch in a child process.

A kernel that traps or hangs is therefore a failure of the run. Two runs on one GPU must have the
same bits.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading

from .errors import WrongUsage

ARCHS = ("sm80", "sm90", "sm100")
LIMIT_S = 600
_COMMAND = (sys.executable, "-m", "tilemoe", "check", "--lines")


def add_options(parser, help):
    parser.add_argument("--arch", choices=ARCHS, help=help)
    parser.add_argument("--kit", dest="older_arch", choices=ARCHS, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=LIMIT_S, metavar="S",
        help=f"Seconds without output after which a case is killed ({LIMIT_S})")  # fmt: skip


def arch_of(args):
    """Return the arch of the options --arch and --kit, its older name; None without them."""
    if args.limit < 1:
        raise WrongUsage(f"--limit must be >= 1, got {args.limit}")
    if args.older_arch is None:
        return args.arch
    if args.arch not in (None, args.older_arch):
        raise WrongUsage(
            f"--arch and --kit, its older name, must have the same value, got {args.arch} and "
            f"{args.older_arch}"
        )
    print("tilemoe: warning: --kit is the older name of --arch", file=sys.stderr)
    return args.older_arch


def environment(arch):
    """Return the environment of a process that runs with this arch."""
    kept = {name: value for name, value in os.environ.items() if name != "TILEMOE_KIT"}
    return kept | {"TILEMOE_ARCH": arch} if arch else dict(os.environ)


@dataclasses.dataclass
class ArchRun:
    arch: str
    skipped: str | None = None  # why it did not run; then the other fields are empty
    device: str | None = None
    cases: int = 0  # completed
    tensors: int = 0  # tensors compared with float64
    failures: list = dataclasses.field(default_factory=list)
    bits: dict = dataclasses.field(default_factory=dict)  # (case, tensor): hash

    def add(self, result):
        self.cases += 1
        self.tensors += len(result["rows"])
        self.failures += result["failures"]
        self.bits |= {(row["case"], row["tensor"]): row["bits"]
                      for row in result["rows"] if row["bits"] is not None}  # fmt: skip

    def lines(self, shown=20):
        if self.skipped is not None:
            yield f"{self.arch}: not run: {self.skipped}"
            return
        count = len(self.failures)
        yield f"{self.arch}: {self.cases} cases, {self.tensors} tensors, {count} failures"
        yield from (f"  {failure}" for failure in self.failures[:shown])
        if count > shown:
            yield f"  and {count - shown} more"

    def as_json(self):
        if self.skipped is not None:
            return {"arch": self.arch, "skipped": self.skipped}
        return {"arch": self.arch, "device": self.device, "cases": self.cases,
                "tensors": self.tensors, "failures": self.failures}  # fmt: skip


def emit(**event):
    """Print, in the child, one JSON object per line."""
    print(json.dumps(event), flush=True)


def emit_cases(run, description, cases):
    """Run each case in the child and print its result."""
    emit(device=description, count=len(cases))
    for case in cases:
        emit(case=case)
        try:
            emit(result=run(case))
        except RuntimeError as error:  # the process can no longer use the GPU
            emit(error=str(error))
            return


def run(name, words, limit_s=LIMIT_S, environment=None, on_case=lambda text: None):
    """Run `tilemoe check` with the words in a child process.

    Args:
        name: Name of the run: the arch, or "cpu".
        words: Arguments of its command line, which select the cases.
        limit_s: Seconds after which a child that prints nothing is killed.
        environment: Environment of the child.
        on_case: Function that is called with a line of text before each case.

    Returns:
        An ArchRun.

    Raises:
        WrongUsage: The child rejected its command line.
    """
    found, count, case, error = ArchRun(name), None, None, None
    with subprocess.Popen(
        [*_COMMAND, *map(str, words)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        env=environment,
    ) as child:  # fmt: skip
        hung = threading.Event()

        def kill():
            hung.set()
            child.kill()

        def watch():
            timer = threading.Timer(limit_s, kill)
            timer.daemon = True
            timer.start()
            return timer

        timer = watch()
        try:
            for line in child.stdout:
                timer.cancel()
                timer = watch()
                event = json.loads(line)
                if "wrong_usage" in event:
                    raise WrongUsage(event["wrong_usage"])
                found.skipped = event.get("skipped", found.skipped)
                found.device, count = event.get("device", found.device), event.get("count", count)
                error = event.get("error", error)
                if "case" in event:
                    case = event["case"]
                    on_case(f"{name} {found.cases + 1}/{count} {case}")
                if "result" in event:
                    found.add(event["result"])
            status = child.wait()
        finally:
            timer.cancel()
            child.kill()
    if found.skipped is None and found.cases != count:
        found.failures.insert(0, _how_it_ended(case, error, hung.is_set(), limit_s, status))
        if count and found.cases + 1 < count:
            found.failures[0] += f"; {count - found.cases - 1} later cases were not run"
    return found


def _how_it_ended(case, error, hung, limit_s, status):
    place = case or "before the first case"
    if hung:
        return f"{place}: no output for {limit_s} s"
    if error:
        return f"{place}: {error}"
    if status < 0:
        return f"{place}: crashed by signal {-status} ({signal.strsignal(-status)})"
    return f"{place}: ended with status {status}"


def differences(one, other):
    """Return a text for each case that both ran and whose bits differ."""
    found = {}
    for (case, tensor), bits in one.bits.items():
        if other.bits.get((case, tensor), bits) != bits:
            found.setdefault(case, []).append(tensor)
    return [f"{case}: bits of {', '.join(tensors)} differ between {one.arch} and {other.arch}"
            for case, tensors in found.items()]  # fmt: skip


def tensors_compared(one, other):
    return len(one.bits.keys() & other.bits.keys())
