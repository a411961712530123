"""The table of docs/pytorch.md of adapters and quantised weights with each feature: its rows, the test
of one, and layers with the inputs of each entry.

Run as a script it writes the table; lora_features_test.py and quantized_features_test.py compare it.
"""

import re
from pathlib import Path

import torch

import tilemoe
from checks import refused
from random_layers import E, K, T, normal

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
MARKS = "<!-- features: written by tests/torch/feature_table.py -->\n", "<!-- end -->\n"
HEADER = "| feature | adapters | quantised weights |\n|---|---|---|\n"
REFUSED = "refused: "  # begins the entry of a feature that raises; the message follows


def check(use, says):
    """Call the test of a row, which must raise what the row says, if anything."""
    if says.startswith(REFUSED):
        refused(NotImplementedError, says.removeprefix(REFUSED), use)
    else:
        use()


def rows_of_page(column):
    """-> {feature: the entry of this column of the table} of those that have one."""
    before, begin, rest = PAGE.read_text().partition(MARKS[0])
    table, end, _ = rest.partition(MARKS[1])
    assert begin and end and table.startswith(HEADER), before[-80:]
    names, _, *rows = [line.strip("| ").split(" | ") for line in table.replace("`", "").splitlines()]
    at = names.index(column)
    return {row[0]: row[at] for row in rows if row[at] != "-"}


def without_marks(rows):
    """-> the rows as `rows_of_page` returns them."""
    return {feature.replace("`", ""): says.replace("`", "") for feature, says in rows.items()}


def table(adapters, quantized):
    """The table of both kinds of layers, from their {feature: entry}."""
    lines = []
    for feature in {**adapters, **quantized}:
        entries = [kind.get(feature, "-") for kind in (adapters, quantized)]
        entries = [re.sub(f"^({REFUSED})(.*)", r"\1`\2`", entry) for entry in entries]
        lines.append(f"| {feature} | {' | '.join(entries)} |\n")
    return HEADER + "".join(lines)


def with_given_ids(tensors):
    """-> the tensors of `moe` with scores instead of logits, and the ids that they have."""
    scores, ids = tilemoe.top_k(tensors["logits_or_scores"].detach(), K)[:2]
    return {**tensors, "logits_or_scores": scores.requires_grad_()}, dict(ids=ids)


def of_pairs(tensors):
    """-> tensors of `moe_general`, and its pairs: two of each token, some of no expert."""
    tensors = {k: v for k, v in tensors.items() if k != "logits_or_scores"}
    tensors["scores"] = normal(2 * T, seed=3, dtype=torch.float32).requires_grad_()
    tokens = torch.arange(T).repeat_interleave(2)
    return tensors, dict(tokens=tokens, experts=torch.arange(2 * T) % (E + 1))


def of_rows(tensors):
    """-> tensors of `grouped_experts`, and its counts."""
    tensors = {k: v for k, v in tensors.items() if k != "logits_or_scores"}
    tensors["rows"] = tensors.pop("x")
    return tensors, dict(counts=torch.arange(E))


def with_ones(tensors):
    """-> the tensors with an addend that requires its gradient."""
    return {**tensors, "addend": torch.ones_like(tensors["x"]).requires_grad_()}


def check_H_is_kept(function, tensors, leaves, overwrite_H):
    """A compiled layer may be differentiated twice, whatever overwrite_H."""
    loss = function(**tensors, K=K, overwrite_H=overwrite_H).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for again, gradient in zip(torch.autograd.grad(loss, leaves), first, strict=True):
        assert torch.equal(again, gradient)


def check_walked_twice(O, leaf):
    first = torch.autograd.grad(O.sum(), leaf, retain_graph=True)
    second = torch.autograd.grad(O.sum(), leaf)
    assert torch.equal(*first, *second) and first[0].any()


def take_second_gradients(O, leaf):
    (gradient,) = torch.autograd.grad(O.sum(), leaf, create_graph=True)
    gradient.sum().backward()


if __name__ == "__main__":
    import lora_features_test
    import quantized_features_test

    begin, end = MARKS
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    written = table(lora_features_test.ROWS, quantized_features_test.ROWS)
    PAGE.write_text(before + begin + written + end + after)
