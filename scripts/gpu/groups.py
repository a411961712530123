"""Runs programs from several threads, each in a process group of its own, and leaves none running."""

import contextlib
import os
import signal
import subprocess
import threading
from concurrent.futures import wait

_running = set()
_starting = threading.Lock()  # locked while a program is begun and put there


def _end_with_all(signal_number, _):
    _starting.acquire()  # for good: nothing is begun after this
    for process in list(_running):  # a thread may take its own out meanwhile
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(128 + signal_number)


def end_together():
    """From now on, what run() has begun ends with this program when a signal ends it. Then the
    main thread must not call run(), and must wait with in_order()."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_with_all)


def run(command, limit_s, environment, before=lambda: None):
    """(exit status, all that it said); None for the status of one that was ended after `limit_s`, its
    children with it. `before()` runs while no thread starts a program, which would have the files
    that it writes open for a moment."""
    with _starting:
        before()
        process = subprocess.Popen([str(word) for word in command], env=environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   errors="replace", start_new_session=True)
        _running.add(process)
    try:
        said, _ = process.communicate(timeout=limit_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return None, said
    finally:
        _running.discard(process)


def in_order(futures):
    """Yields them as they are done, in their order. A signal that comes just before a wait does not
    end it, and Python acts on one only after a wait: none is long."""
    for future in futures:
        while not future.done():
            wait([future], timeout=0.5)
        yield future
