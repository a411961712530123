"""Routings of several groups of tokens as the one routing of all of them."""

import torch

from ._rules import counters_of, lay_out, offsets_of, row_arrays_of


def expert_of(offsets, row):
    """offsets (..., E + 1), row (..., rows) -> the expert that has each row; E of those past the
    last."""
    # Not of the offsets behind the first: torch.compile (2.11) searches a view from its base on.
    return torch.searchsorted(offsets.contiguous(), row, right=True) - 1


def as_one(routings, T, E, capacity):
    """routings (G, elements) int32, rounded, of T tokens and room for `capacity` rows each -> the
    rounded routing of G T tokens, whose capacity is the sum of theirs. An expert's rows are those
    of the first group, then of the second, and so on, and so are the pairs: both stay in the order
    of the tokens."""
    G = routings.shape[0]
    row_score, row_token, pair_row, following = row_arrays_of(routings, E, capacity)
    row = torch.arange(capacity, device=routings.device)
    all_rows = torch.arange(G * capacity, device=routings.device)

    offsets = offsets_of(routings, E).contiguous()  # (G, E + 1)
    counts = offsets.diff().mT.flatten()  # (E G), by expert
    ends = counts.cumsum(0)
    starts = (ends - counts).view(E, G)

    # Where a group's row goes: its expert begins there, and its place in the expert stays.
    each = row.expand(G, -1).contiguous()
    expert = expert_of(offsets, each).clamp(max=E - 1)  # the last also of rows past its own
    place = row - offsets.gather(1, expert)
    goes_to = starts.mT.gather(1, expert) + place  # (G, capacity)

    # And where a row of all comes from.
    source = torch.searchsorted(ends, all_rows, right=True).clamp(max=E * G - 1)
    from_expert, group = source // G, source % G
    from_row = offsets[group, from_expert] + all_rows - starts.flatten()[source]
    from_row = group * capacity + from_row.clamp(0, capacity - 1)
    scores = row_score.flatten()[from_row]
    tokens = row_token.flatten()[from_row] + group * T

    # A group's pairs follow those of the group before; past the last of all there are none.
    last = offsets[:, E].cumsum(0)
    group = torch.searchsorted(last, all_rows, right=True).clamp(max=G - 1)
    pair = all_rows - (last - offsets[:, E])[group]
    rows = pair_row.flatten()[group * capacity + pair.clamp(0, capacity - 1)].clamp(min=0)
    rows = goes_to.flatten()[group * capacity + rows]
    rows = torch.where(all_rows < last[-1], rows, -1)

    first_pairs = following[:, :T] + (last - offsets[:, E])[:, None]
    return lay_out(
        torch.cat((ends.new_zeros(1), ends[G - 1 :: G])),
        scores,
        tokens,
        rows,
        torch.cat((first_pairs.flatten(), last[-1:])),
        counters_of(routings).sum(0),
    )
