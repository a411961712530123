"""Processes whose ranks have their own tokens and their part of the experts, compared with one
process that has all of both:

    python expert_parallel_worker.py --device cuda --world 2     on GPUs, NCCL, 16 bits
    ... --device cuda --only a_killed --dispatch pull            how a dead rank ends those that pull
    python expert_parallel_worker.py --world 4                   as expert_parallel_test.py does: gloo

Each process runs every scenario of its number of ranks and writes FOLDER/RANK.json.
"""

import sys

import expert_parallel_training as training
import expert_parallel_travel as travel
import expert_parallel_values as values
from expert_parallel_job import Job
from processes import main_of

SCENARIOS = {
    values.module_equals_one_process: (1, 2, 4),
    values.rounding_is_over_all_tokens: (2, 4),
    values.ids_of_elsewhere: (2, 4),
    values.padding: (2, 4),
    values.bits_are_those_of_the_parts: (1, 2, 4),
    values.errors_are_those_of_one_more_rounding: (2, 4),
    values.nothing_is_lost_by_default: (1, 2, 4),
    values.overflow_is_nan_or_dropped: (2, 4),
    values.values_are_drawn_alike: (1, 2, 4),
    travel.nothing_waits_for_the_device: (2,),
    travel.what_is_kept: (2, 4),
    travel.transfers_overlap_with_gemms: (2,),
    travel.peak_is_the_plans: (2, 4),
    travel.a_graph_has_all_of_it: (1, 2, 4),
    values.no_tokens_anywhere: (2,),
    values.low_rank_adapters: (1, 2, 4),
    values.composes: (1, 2),
    values.refusals: (2,),
    training.fsdp: (1, 2, 4),
    training.fsdp_mixed_precision: (2, 4),
    training.gradients_that_somebody_else_divides: (2, 4),
    training.distributed_checkpoint: (1, 2, 4),
    training.checkpoint_of_two_ranks_by_four: (4,),
    travel.a_killed_rank_is_an_error_on_the_others: (2, 4),
    travel.a_killed_rank_ends_the_others: (2, 4),
}


if __name__ == "__main__":
    dispatch = dict(choices=["all_gather", "pull"], help="of a_killed_rank_ends_the_others")
    sys.exit(main_of(__file__, __doc__, SCENARIOS, Job, dispatch=dispatch))
