"""One peer in a process of its own, that runs a round when it is told to (rounds.py)."""

import argparse
import json

from .rounds import claim_stdout, serve


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--case", type=json.loads, required=True, help="fields of cases.Case")
    parser.add_argument("--pass", dest="passes", default="both")
    parser.add_argument("--threads", type=int, default=0, help="0 for one a core")
    parser.add_argument("--kernels", action="store_true", help="each kernel's time in the entry")
    args = parser.parse_args()
    answers = claim_stdout()

    import torch

    from . import machine, session
    from .cases import Case
    from .measure import make_clock
    from .peers import all_peers
    from .problem import Problem

    if args.threads:
        torch.set_num_threads(args.threads)
    case = Case(**args.case)
    try:
        peer = all_peers()[args.peer]
        problem, clock = Problem(case), make_clock(case.device)
        measured = session.measured_in_process(peer, problem, clock, args.passes)
    except session.LeftOut as error:
        print(json.dumps({"left_out": str(error)}), file=answers)
        return
    serve(
        answers,
        args.peer,
        measured.round,
        lambda: {
            **measured.entry(),
            **({"kernels": measured.kernels()} if args.kernels else {}),
            **machine.describe(case.device, peer.packages),
        },
    )
