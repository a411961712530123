"""Run programs from several threads, each in its own process group, and leave none running."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from concurrent.futures import wait

_running = {}  # program: the signal that ends it
_starting = threading.Lock()  # held while a program is started and added to _running


def _end_with_all(signal_number, _):
    _starting.acquire()  # never released: no program starts after this
    for process, ended_by in list(_running.items()):  # a copy: threads may remove their programs
        with contextlib.suppress(ProcessLookupError):  # the process has just ended
            os.killpg(process.pid, ended_by)
    os._exit(128 + signal_number)


def end_together():
    """End the programs that run() has started when a signal ends this program.

    After this call the main thread must not call run(), and must wait with in_order().
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_with_all)


def run(command, limit_s, environment, before=lambda: None, ended_by=signal.SIGKILL):
    """Run a program; return its exit status and its output.

    After `limit_s` seconds, unless that is None, `ended_by` is sent to the program and its children,
    and the status is None. A program that ends its own process groups gets SIGTERM. Children that
    outlive the program are killed.
    `before()` runs while no thread starts a program: a program that starts inherits, for a moment,
    the files that `before()` has open for writing.
    """
    # A file: children that outlive the program would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with _starting:
            before()
            process = subprocess.Popen([str(word) for word in command], env=environment,
                                       stdout=output, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            _running[process] = ended_by
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, ended_by)
            process.wait()
        finally:
            _running.pop(process, None)
        with contextlib.suppress(ProcessLookupError):  # no child is left
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return status, output.read()


def in_order(futures):
    """Yield futures in their order, each when it is done.

    The waits are short: a signal that arrives just before a wait does not interrupt it, and Python
    handles the signal only after the wait.
    """
    for future in futures:
        while not future.done():
            wait([future], timeout=0.5)
        yield future
