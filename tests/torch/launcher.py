"""torch's launcher of several processes."""

import sys


def python(processes):
    """-> the beginning of a command for N processes of this Python on this machine, where its
    own name need not have an address."""
    if processes == 1:
        return [sys.executable]
    local = ["--standalone", "--local-addr", "localhost", f"--nproc-per-node={processes}"]
    return [sys.executable, "-m", "torch.distributed.run", *local]
